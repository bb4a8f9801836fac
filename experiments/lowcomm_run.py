"""One run of a low-communication experiment: a cell is trained, scored, and leaves its curves."""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxlab import lowcomm
from jaxlab.core import mesh as meshes
from jaxlab.core import prng, sweep
from jaxlab.data import make_shards, per_worker_batch
from jaxlab.experiments import lm
from jaxlab.nn import transformer

Algorithm = lowcomm.LowComm | lowcomm.DataParallel
# (cell, parameters, three numbers to use instead of the cell's own, or None) -> algorithm
Build = Callable[..., Algorithm]
SETTINGS = operator.itemgetter("lr", "outer_lr", "outer_momentum")


def steps_a_call(config: Any, cell: sweep.Cell) -> int:
    """Inner steps in one call of the compiled program."""
    return cell.labels["H"] if config.train.unit == "round" else 1


def kind(cell: sweep.Cell) -> tuple[Any, ...]:
    """What cells that can share a compiled program have in common: method, K, H, and whether there is momentum."""
    return (*(cell.labels[name] for name in ("method", "K", "H")), cell.settings["outer_momentum"] != 0)


def bytes_sent(algo: Algorithm, params: Any, k: int, h: int) -> float:
    """Bytes that a worker sends for one inner step, on average, on a ring."""
    low = isinstance(algo, lowcomm.LowComm)
    per_round = algo.bytes_per_round(params, k) if low else algo.bytes_per_round(params, k, h)
    return per_round["ring"] / h


def train(
    config: Any, task: lm.Task, build: Build, cell: sweep.Cell, folder: Path, progress: Any, resume: str
) -> sweep.CellResult:
    """Trains and scores one cell, continuing from its newest checkpoint.

    Args:
      config: of the experiment.
      task: corpus and model.
      build: makes the cell's algorithm.
      cell: what to train.
      folder: the cell's own.
      progress: the cell's part of the progress.
      resume: the command that continues the run.

    Returns:
      Test and validation loss and megabytes sent; curves of the validation loss against tokens and megabytes.
    """
    k, h, t = cell.labels["K"], cell.labels["H"], config.train
    batch, scale = per_worker_batch(t.global_batch, k), steps_a_call(config, cell)
    init_key, run_key = jax.random.split(prng.key(cell.seed))
    init = lambda: transformer.init(task.model, init_key)  # noqa: E731
    params = jax.eval_shape(init)  # the arrays themselves live in the state alone
    algo, mesh = build(cell, params), worker_mesh(config.lowcomm.devices, k)
    shards = make_shards(task.train, k, seq_len=config.data.seq_len, split=config.data.split, seed=cell.seed)
    program, values = _program(config, task, build, cell, params, mesh), SETTINGS(cell.settings)

    def batches(i):
        rows = shards.batch(i, batch_per_worker=batch, inner_steps=h if t.unit == "round" else None)
        return rows if mesh is None else meshes.put(rows, meshes.named(mesh, "worker"))

    state, records = lm.fit_cell(
        config, task, algo.init(init(), k, mesh=mesh), lambda *args: program(*args, values), batches, folder=folder,
        facts={"corpus": task.corpus_sha256, "cell": cell.name, "settings": dict(cell.settings)}, key=run_key,
        per_call=scale, log_every=h // scale, progress=progress, resume=resume,
    )  # fmt: skip
    sent, tokens = bytes_sent(algo, params, k, h), t.global_batch * config.data.seq_len
    inner_steps = [r["step"] * scale for r in records]
    return sweep.CellResult(
        {
            "loss": float(task.evaluate(state.params, task.test)),
            "valid": float(task.evaluate(state.params, task.valid)),
            "MB sent": sent * t.steps / 1e6,
        },
        {
            "tokens": [s * tokens for s in inner_steps],
            "MB": [s * sent / 1e6 for s in inner_steps],
            "valid": [r["valid/loss"] for r in records],
        },
    )


def _program(config: Any, task: lm.Task, build: Build, cell: sweep.Cell, params: Any, mesh: Any) -> Callable[..., Any]:
    """One call of training, compiled once for all seeds and settings of a kind of cell."""
    if kind(cell) not in task.programs:

        def call(state, batch, key, values):
            run = getattr(build(cell, params, values), config.train.unit)(task.loss_fn, mesh=mesh)
            state, metrics = run(state, batch, key)
            metrics.pop("nonfinite_leaf", None)  # a number of no use in a log: loss and delta_sq are NaN as well
            return state, metrics

        task.programs[kind(cell)] = jax.jit(call, donate_argnums=0)
    return task.programs[kind(cell)]


def worker_mesh(devices: int, workers: int) -> jax.sharding.Mesh | None:
    """A mesh over the workers, or None for one device; 0 devices takes as many as divide the workers."""
    if devices < 0 or (devices and workers % devices):
        raise ValueError(f"lowcomm.devices must divide the {workers} workers (or be 0: as many as fit), got {devices}")
    if devices == 0:
        devices = max(d for d in range(1, jax.device_count() + 1) if workers % d == 0)
    return None if devices == 1 and jax.process_count() == 1 else meshes.make_mesh({"worker": devices})
