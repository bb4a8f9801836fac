"""IsoLoCo and its baselines on one small language model: who loses least quality for the communication saved?

Every cell (method, K workers, H inner steps, seed) trains the same model on the same number of tokens with AdamW, the
same warm-up, cosine decay, weight decay and clipping, and is scored on the test part of the corpus. Settings were tuned
on the validation part with another seed (`jaxlab run isoloco:tune`), with as many grid points for every method.
"""

import functools
import operator
from pathlib import Path
from typing import Any

import jax
import optax

from jaxlab import lowcomm
from jaxlab.core import mesh as meshes
from jaxlab.core import prng, run, sweep, tree
from jaxlab.core.metrics import make_writer, read_jsonl
from jaxlab.core.progress import NullProgress, Progress
from jaxlab.core.report import Result
from jaxlab.core.train import checkpoint, evaluate, fit
from jaxlab.data import make_shards, per_worker_batch
from jaxlab.experiments import lm, lowcomm_report
from jaxlab.nn import transformer

SETTINGS = operator.itemgetter("lr", "outer_lr", "outer_momentum")
METHODS = {
    "dp": "data-parallel AdamW",
    "diloco": "DiLoCo",
    "diloco_sgd": "DiLoCo-SGD",
    "diloco_sgd_isoc": "DiLoCo-SGD + Iso-C",
    "isoloco": "IsoLoCo",
}


def algorithm(config: Any, cell: sweep.Cell, params: Any, values: Any = None) -> lowcomm.LowComm | lowcomm.DataParallel:
    """The training algorithm of one cell; `values` replaces its three numbers, so that they can be traced."""
    lr, eta, mu = SETTINGS(cell.settings) if values is None else values
    t, c, method = config.train, config.lowcomm, cell.labels["method"]
    momentum = cell.settings["outer_momentum"] > 0
    mu = mu if momentum else 0.0
    warmup = max(1, round(t.warmup * t.steps))
    shape = optax.warmup_cosine_decay_schedule(0.1, 1.0, warmup, t.steps, t.final_lr)
    adamw = optax.adamw(lambda step: lr * shape(step), b1=0.9, b2=0.95, weight_decay=t.weight_decay)
    inner = optax.chain(optax.clip_by_global_norm(t.clip), adamw)
    if method == "dp":
        return lowcomm.DataParallel(inner)
    if method in ("isoloco", "diloco_sgd_isoc"):
        specs = transformer.matrix_specs(lm.model_config(config))
        outer = lowcomm.isoloco(eta, mu, nesterov=momentum, method=c.isotropize, specs=specs)
    else:
        outer = lowcomm.diloco(eta, mu, nesterov=momentum)
    stacked = lm.model_config(config).scan_layers
    fragments = lowcomm.Fragments.by_layer(params, c.fragments, stacked=stacked) if c.fragments > 1 else None
    compress = None if c.compress == "none" else lowcomm.Compression(c.compress)
    return lowcomm.LowComm(
        inner, outer, cell.labels["H"], c.aggregate, fragments, overlap=c.overlap, mix=c.mix, compress=compress
    )


def cells(config: Any) -> list[sweep.Cell]:
    """Everything the config asks for; data-parallel training does not depend on K and H and runs once a seed."""
    ks = config.sweep.workers or (config.lowcomm.workers,)
    hs = config.sweep.inner_steps or (config.lowcomm.inner_steps,)
    found = []
    for seed in config.seeds:
        for k in ks:
            for h in hs:
                if config.train.steps % h:
                    raise ValueError(f"train.steps must be a multiple of inner_steps={h}, got {config.train.steps}")
                for method in config.methods:
                    if method not in METHODS:
                        raise ValueError(f"methods must be among {tuple(METHODS)}, got {method!r}")
                    if method == "dp" and (k, h) != (ks[-1], hs[-1]):
                        continue
                    for setting, extra in lowcomm_report.settings(config, method, k, h):
                        labels = {"method": method, "K": k, "H": h, **extra}
                        found.append(sweep.Cell(labels, seed, config.train.steps, setting))
    return found


def train_cell(config: Any, task: lm.Task, cell: sweep.Cell, folder: Path, progress: Any, resume: str) -> Any:
    """Trains and scores one cell, continuing from its newest checkpoint."""
    k, h, t = cell.labels["K"], cell.labels["H"], config.train
    batch = per_worker_batch(t.global_batch, k)
    init_key, run_key = jax.random.split(prng.key(cell.seed))
    params = transformer.init(task.model, init_key)
    algo = algorithm(config, cell, params)
    mesh = _worker_mesh(config.lowcomm.devices, k)
    shards = make_shards(task.train, k, seq_len=config.data.seq_len, split=config.data.split, seed=cell.seed)
    by_round = {"round": True, "step": False}[t.unit]
    scale = h if by_round else 1  # inner steps in one call of the compiled program
    program, values = _program(config, task, cell, mesh), SETTINGS(cell.settings)

    def batches(i):
        rows = shards.batch(i, batch_per_worker=batch, inner_steps=h if by_round else None)
        return rows if mesh is None else meshes.put(rows, meshes.named(mesh, "worker"))

    facts = {"corpus": task.corpus_sha256, "cell": cell.name, "settings": dict(cell.settings)}
    checkpointer, state, start = sweep.restore(
        folder, algo.init(params, k, mesh=mesh), facts, keep=2, on_message=progress.line
    )
    every = h // scale  # calls in a round
    hooks = [
        evaluate(lambda s: {"loss": task.evaluate(s.params, task.valid)}, t.eval_every * every, "valid"),
        checkpoint(checkpointer, t.checkpoint_every * every, facts),
    ]
    first = jax.process_index() == 0  # the only process that writes
    with checkpointer, make_writer(folder, t.writers if first else (), resume_step=start or None) as writer:
        result = fit(
            state, lambda *args: program(*args, values), batches, steps=t.steps // scale, key=run_key, start=start, log_every=every, hooks=hooks,
            writer=writer, progress=progress, resume_command=resume,
        )  # fmt: skip
    records = [r for r in (read_jsonl(folder / "metrics.jsonl") if first else []) if "valid/loss" in r]
    sent = lowcomm_report.bytes_sent(algo, params, k, h)
    inner_steps = [r["step"] * scale for r in records]
    tokens = t.global_batch * config.data.seq_len
    return sweep.CellResult(
        {
            "loss": float(task.evaluate(result.state.params, task.test)),
            "valid": float(task.evaluate(result.state.params, task.valid)),
            "MB sent": sent * t.steps / 1e6,
        },
        {
            "tokens": [s * tokens for s in inner_steps],
            "MB": [s * sent / 1e6 for s in inner_steps],
            "valid": [r["valid/loss"] for r in records],
        },
    )


def _program(config: Any, task: lm.Task, cell: sweep.Cell, mesh: Any) -> Any:
    """One call of training, compiled once for all seeds and settings of a method, K and H."""
    labels = tuple(cell.labels[name] for name in ("method", "K", "H")) + (cell.settings["outer_momentum"] > 0,)
    if labels not in task.programs:
        params = jax.eval_shape(lambda: transformer.init(task.model, jax.random.key(0)))

        def call(state, batch, key, values):
            algo = algorithm(config, cell, params, values)
            run_one = algo.round if config.train.unit == "round" else algo.step
            return run_one(task.loss_fn, mesh=mesh)(state, batch, key)

        task.programs[labels] = jax.jit(call, donate_argnums=0)
    return task.programs[labels]


def main(config: Any, workdir: Path) -> Result:
    """Runs every cell and reports losses, gaps, and curves against tokens and bytes."""
    todo, task = cells(config), lm.load_task(config)
    run.add_env(workdir, {"corpus_sha256": task.corpus_sha256})
    train = functools.partial(train_cell, config, task, resume=run.resume_command(workdir))
    scale = 1 if config.train.unit == "step" else None
    first = jax.process_index() == 0
    with (Progress if first else NullProgress)(sum(cell.steps for cell in todo)) as progress:
        results = sweep.run_cells(
            todo, lambda cell, folder, view: train(cell, folder, view), workdir, progress=progress,
            steps_per_update=lambda cell: scale or cell.labels["H"], allow_divergence=config.grid.on,
        )  # fmt: skip
    return lowcomm_report.result(config, todo, results, METHODS) if first else Result("written by process 0")


def describe(config: Any) -> dict[str, Any]:
    """Sizes of one run without training: parameters, state, arithmetic and communication."""
    model, facts = lm.model_config(config), {}
    params = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
    tokens = config.train.global_batch * config.data.seq_len
    facts["parameters"] = tree.size(params)
    facts["tokens a step"] = tokens
    facts["FLOPs a step"] = transformer.flops_per_token(model, config.data.seq_len) * tokens
    for cell in {cell.labels["method"]: cell for cell in cells(config)}.values():
        algo, k = algorithm(config, cell, params), cell.labels["K"]
        state = jax.eval_shape(lambda p, algo=algo, k=k: algo.init(p, k), params)
        name = METHODS[cell.labels["method"]]
        facts[f"state bytes, {name}"] = tree.nbytes(state)
        facts[f"bytes sent a worker and step, {name}"] = lowcomm_report.bytes_sent(algo, params, k, cell.labels["H"])
    return facts


def _worker_mesh(devices: int, workers: int) -> jax.sharding.Mesh | None:
    """A mesh over the workers, or None for one device; 0 devices takes as many as divide the workers."""
    available = jax.device_count()
    if devices == 0:
        devices = max(d for d in range(1, available + 1) if workers % d == 0)
    return None if devices == 1 and jax.process_count() == 1 else meshes.make_mesh({"worker": devices})


if __name__ == "__main__":
    run.app(main, "isoloco")
