"""IsoLoCo and its baselines on one small language model: who loses least quality for the communication saved?

Every cell (method, K workers, H inner steps, seed) trains the same model on the same number of tokens with AdamW, the
same warm-up, cosine decay, weight decay and clipping, and is scored on the test part of the corpus. Settings were tuned
on the validation part with another seed (`jaxlab run isoloco:tune`), on grids of as many points for every method.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import optax

from jaxlab import lowcomm
from jaxlab.core import run, sweep, tree
from jaxlab.core.errors import ConfigError
from jaxlab.core.progress import NullProgress, Progress
from jaxlab.core.report import Result
from jaxlab.data import make_shards
from jaxlab.experiments import lm, lowcomm_check, lowcomm_report, lowcomm_run
from jaxlab.nn import transformer
from jaxlab.optim import bred

METHODS = {
    "dp": "data-parallel AdamW",
    "diloco": "DiLoCo",
    "diloco_sgd": "DiLoCo-SGD",
    "diloco_sgd_isoc": "DiLoCo-SGD + Iso-C",
    "isoloco": "IsoLoCo",
}


def algorithm(config: Any, cell: sweep.Cell, params: Any, values: Any = None) -> lowcomm_run.Algorithm:
    """The training algorithm of one cell; `values` replaces its three numbers, so that they can be traced."""
    lr, eta, mu = lowcomm_run.SETTINGS(cell.settings) if values is None else values
    t, c, method = config.train, config.lowcomm, cell.labels["method"]
    momentum = cell.settings["outer_momentum"] != 0
    mu = mu if momentum else 0.0
    warmup = max(1, round(t.warmup * t.steps))
    shape = optax.warmup_cosine_decay_schedule(0.1, 1.0, warmup, t.steps, t.final_lr)
    adamw = optax.adamw(lambda step: lr * shape(step), b1=0.9, b2=0.95, weight_decay=t.weight_decay)
    inner = optax.chain(optax.clip_by_global_norm(t.clip), adamw)
    if c.state_bits != 32:
        inner = bred.quantize_state(inner, bred.QuantSpec(c.state_bits))
    if method == "dp":
        return lowcomm.DataParallel(inner)
    model = lm.model_config(config)
    if method in ("isoloco", "diloco_sgd_isoc"):
        specs = transformer.matrix_specs(model)
        if c.fragments > 1:  # the outer optimizer sees a fragment at a time: patterns are for the whole
            resolved = lowcomm.resolve_specs(params, specs)
            specs = lambda path, leaf: resolved[path]  # noqa: E731
        outer = lowcomm.isoloco(eta, mu, nesterov=momentum, method=c.isotropize, specs=specs)
    else:
        outer = lowcomm.diloco(eta, mu, nesterov=momentum)
    fragments = lowcomm.Fragments.by_layer(params, c.fragments, stacked=model.scan_layers) if c.fragments > 1 else None
    compress = None if c.compress == "none" else lowcomm.Compression(c.compress)
    return lowcomm.LowComm(
        inner, outer, cell.labels["H"], c.aggregate, fragments, overlap=c.overlap, mix=c.mix, compress=compress
    )


def cells(config: Any) -> list[sweep.Cell]:
    """Everything the config asks for; data-parallel training does not depend on K and H and runs once a seed.

    Raises:
      ConfigError: for settings that do not fit together, before anything is trained.
    """
    try:
        ks, hs = lowcomm_check.whole(config, METHODS)
        found = [
            sweep.Cell({"method": method, "K": k, "H": h, **extra}, seed, config.train.steps, setting)
            for seed in config.seeds
            for k in ks
            for h in hs
            for method in config.methods
            if method != "dp" or (k, h) == (ks[-1], hs[-1])
            for setting, extra in lowcomm_report.settings(config, method, k, h)
        ]
        params = _abstract_params(config)
        for cell in found:
            lowcomm_check.cell(config, cell)
            algorithm(config, cell, params)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return found


def main(config: Any, workdir: Path) -> Result:
    """Runs every cell and reports losses, gaps, and curves against tokens and bytes."""
    todo = cells(config)
    try:
        task = lm.load_task(config)
        for k in {cell.labels["K"] for cell in todo}:
            make_shards(task.train, k, seq_len=config.data.seq_len, split=config.data.split)
    except (ValueError, TypeError, OSError) as error:  # a token file of another type is a TypeError
        raise ConfigError(str(error)) from error
    run.add_env(workdir, {"corpus_sha256": task.corpus_sha256})
    train = functools.partial(
        lowcomm_run.train, config, task, functools.partial(algorithm, config), resume=run.resume_command(workdir)
    )
    first = jax.process_index() == 0
    with (Progress if first else NullProgress)(sum(cell.steps for cell in todo)) as progress:
        results = sweep.run_cells(
            todo, lambda cell, folder, view: train(cell, folder, view), workdir, progress=progress,
            steps_per_update=lambda cell: lowcomm_run.steps_a_call(config, cell), allow_divergence=bool(config.grid),
            facts={"corpus": task.corpus_sha256},
        )  # fmt: skip
    return lowcomm_report.result(config, todo, results, METHODS) if first else Result("written by process 0")


def describe(config: Any) -> dict[str, Any]:
    """Sizes of one run without training: parameters, state, arithmetic and communication."""
    todo = cells(config)  # first, because it checks the settings
    model, params = lm.model_config(config), _abstract_params(config)
    tokens = config.train.global_batch * config.data.seq_len
    facts = {
        "parameters": tree.size(params),
        "tokens a step": tokens,
        "FLOPs a step": transformer.flops_per_token(model, config.data.seq_len) * tokens,
    }
    swept = len({(cell.labels["K"], cell.labels["H"]) for cell in todo}) > 1
    for cell in {lowcomm_run.kind(cell): cell for cell in todo}.values():
        algo, k, h = algorithm(config, cell, params), cell.labels["K"], cell.labels["H"]
        state = jax.eval_shape(lambda p, algo=algo, k=k: algo.init(p, k), params)
        name = METHODS[cell.labels["method"]] + (f", K={k}, H={h}" if swept else "")
        facts[f"state bytes, {name}"] = tree.nbytes(state)
        facts[f"bytes sent a worker and step, {name}"] = lowcomm_run.bytes_sent(algo, params, k, h)
    return facts


def _abstract_params(config: Any) -> Any:
    model = lm.model_config(config)
    return jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))


if __name__ == "__main__":
    run.app(main, "isoloco")
