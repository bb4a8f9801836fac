"""One run of the BReD experiment: an optimizer, a way to store its state, a seed."""

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree
from optax import contrib

from jaxlab.core import mesh as meshes
from jaxlab.core import prng, sweep, tree
from jaxlab.core.metrics import read_jsonl
from jaxlab.data import make_shards
from jaxlab.experiments import lm
from jaxlab.nn import transformer
from jaxlab.optim import bred

INTERVAL = 50  # steps between records
OPTIMIZERS = {
    "adamw": "AdamW",
    "muon": "Muon",
    "lion": "Lion",
    "sgdm": "SGD with momentum",
    "ademamix": "AdEMAMix",
}
_STORAGE = re.compile(r"(bred|nearest|stochastic)(\d+)((?:-\w+)*)")


def storage(name: str) -> bred.QuantSpec | None:
    """The spec of a name such as `bred4-b32-bf16`; None for `fp32`.

    Raises:
      ValueError: for a name that is no storage.

    >>> storage("nearest3-zero").rounding, storage("bred4-b32").block_size
    ('nearest', 32)
    """
    if name == "fp32":
        return None
    match = _STORAGE.fullmatch(name)
    if match is None:
        raise ValueError(f"storages must be fp32 or ROUNDING BITS [-OPTION ...] such as bred4-b32, got {name!r}")
    options: dict[str, Any] = {"bits": int(match[2]), "rounding": "dither" if match[1] == "bred" else match[1]}
    for option in match[3].split("-")[1:]:
        if option == "bf16":
            options["scale_dtype"] = "bfloat16"
        elif option == "zero":
            options["map"] = "zero"
        elif re.fullmatch(r"b\d+", option):
            options["block_size"] = int(option[1:])
        else:
            raise ValueError(f"storages: option {option!r} of {name!r} is not b<size>, bf16 or zero")
    return bred.QuantSpec(**options)


def optimizer(config: Any, name: str, lr: Any, decay: float, steps: int, stacked: bool) -> optax.GradientTransformation:
    """The optimizer in full precision, with warm-up, cosine decay, clipping and weight decay."""
    t = config.train
    warmup = max(1, round(t.warmup * steps))
    shape = optax.warmup_cosine_decay_schedule(0.1, 1.0, warmup, steps, t.final_lr)
    schedule = lambda step: lr * shape(step)  # noqa: E731
    wd = t.weight_decay
    if name == "adamw":
        tx = optax.adamw(schedule, b1=0.9, b2=decay, weight_decay=wd)
    elif name == "lion":
        tx = optax.lion(schedule, b1=0.9, b2=decay, weight_decay=wd)
    elif name == "sgdm":
        # The trace sums to 1 / (1 - decay) times the average: one learning rate serves all decays.
        momentum = optax.chain(optax.trace(decay), optax.scale(1 - decay))
        # No weight decay: at learning rates a hundred times those of AdamW it would erase the weights.
        tx = optax.chain(momentum, optax.scale_by_learning_rate(schedule))
    elif name == "ademamix":
        tx = contrib.ademamix(schedule, b1=0.9, b2=0.95, b3=decay, alpha=5.0, weight_decay=wd)
    else:
        adam_lr = config.settings.adamw[0]
        dims = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)

        def is_matrix(params: PyTree) -> PyTree:
            return tree.map_with_path(
                lambda path, x: dims if x.ndim == 2 + stacked and "layers/" in path else None, params
            )

        tx = contrib.muon(
            schedule, beta=decay, weight_decay=wd, adam_b1=0.9, adam_b2=config.settings.adamw[1],
            adam_weight_decay=wd, adam_learning_rate=lambda step: adam_lr * shape(step),
            muon_weight_dimension_numbers=is_matrix,
        )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(t.clip), tx)


def stored(config: Any, tx: optax.GradientTransformation, name: str) -> optax.GradientTransformation:
    """The optimizer with its state stored as a name says; unchanged for `fp32`."""
    spec = storage(name)
    if spec is None:
        return tx
    return bred.quantize_state(tx, spec, seed=config.bred.seed, select=bred.default_select(config.bred.min_size))


class TrainState(NamedTuple):
    """What a run carries.

    Attributes:
      params: of the model.
      opt_state: as stored.
      exact: the state that the optimizer has in full precision after the same gradients; empty where not measured.
    """

    params: PyTree
    opt_state: PyTree
    exact: PyTree


def state_error(opt_state: PyTree, exact: PyTree) -> dict[str, Array]:
    """|stored - exact| / |exact| over all quantised averages with a sign (`m`), and over all squares (`v`)."""
    sums: dict[str, list[Array]] = {"m": [], "v": []}
    packed = jax.tree.leaves(opt_state, is_leaf=bred.is_quantized)
    full = jax.tree.leaves(bred.dequantize(opt_state))
    outer = [x for x in packed if bred.is_quantized(x)]
    index = [i for i, x in enumerate(packed) if bred.is_quantized(x)]
    # The wrapper's own counter comes first: the leaves behind it are those of the optimizer inside.
    for q, i in zip(outer, index, strict=True):
        a, b = full[i - 1], jax.tree.leaves(exact)[i - 1]
        sums["v" if q.spec.nonneg else "m"].append(jnp.stack([jnp.sum((a - b) ** 2), jnp.sum(b * b)]))
    totals = {name: sum(parts) for name, parts in sums.items() if parts}
    return {f"error_{name}": jnp.sqrt(x[0] / jnp.maximum(x[1], 1e-30)) for name, x in totals.items()}


def train(
    config: Any, task: lm.Task, cell: sweep.Cell, folder: Path, progress: Any, resume: str,
    start_from: Callable[[], PyTree] | None = None,
) -> sweep.CellResult:  # fmt: skip
    """Trains and scores one cell, continuing from its newest checkpoint.

    Args:
      config: of the experiment, with `train.steps` those of this cell.
      task: corpus and model.
      cell: what to train.
      folder: the cell's own.
      progress: the cell's part of the progress.
      resume: the command that continues the run.
      start_from: makes the initial parameters; by default those of the seed.

    Returns:
      Test and validation loss, bytes of the state, milliseconds a step; curves of loss and error of the state.
    """
    init_key, run_key = jax.random.split(prng.key(cell.seed))
    make = start_from or (lambda: transformer.init(task.model, init_key))
    name, how = cell.labels["optimizer"], cell.labels["storage"]
    measure = config.bred.measure and how != "fp32"
    mesh = data_mesh(config)
    build = lambda lr: optimizer(  # noqa: E731
        config, name, lr, cell.settings["decay"], cell.steps, task.model.scan_layers
    )

    def init(params: PyTree) -> TrainState:
        exact = build(0.0)
        return TrainState(params, stored(config, exact, how).init(params), exact.init(params) if measure else ())

    def step(state: TrainState, batch: PyTree, key: Array, lr: Array) -> tuple[TrainState, dict[str, Array]]:
        exact = build(lr)
        loss, grads = jax.value_and_grad(task.loss_fn)(state.params, batch, key)
        updates, opt_state = stored(config, exact, how).update(grads, state.opt_state, state.params)
        metrics, shadow = {"loss": loss}, ()
        if measure:
            _, shadow = exact.update(grads, state.exact, state.params)
            metrics |= state_error(opt_state, shadow)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, shadow), metrics

    kind = (name, how, cell.settings["decay"], cell.steps, measure)
    if kind not in task.programs:
        task.programs[kind] = jax.jit(step, donate_argnums=0)
    program, lr = task.programs[kind], jnp.float32(cell.settings["lr"])
    shards = make_shards(task.train, 1, seq_len=config.data.seq_len, seed=cell.seed)

    def batches(i: int) -> PyTree:
        rows = jax.tree.map(lambda x: x[0], shards.batch(i, batch_per_worker=config.train.batch))
        return rows if mesh is None else meshes.put(rows, meshes.named(mesh, "data"))

    params = make()
    placed = None if mesh is None else _placement(init, params, mesh)
    state = jax.jit(init, out_shardings=placed)(params)
    nbytes = bred.state_bytes(state.opt_state)
    facts = {"corpus": task.corpus_sha256, "cell": cell.name, "settings": dict(cell.settings)}
    state, records = lm.fit_cell(
        config, task, state, lambda s, batch, key: program(s, batch, key, lr), batches, folder=folder, facts=facts,
        key=run_key, per_call=1, log_every=INTERVAL, progress=progress, resume=resume,
    )  # fmt: skip
    timed = [r for r in (read_jsonl(folder / "metrics.jsonl") if records else []) if "steps_per_s" in r]
    rates = [r["steps_per_s"] for r in timed][1:] or [r["steps_per_s"] for r in timed]  # the first one compiles
    values = {
        "loss": float(task.evaluate(state.params, task.test)),
        "valid": float(task.evaluate(state.params, task.valid)),
        "state bytes": nbytes.stored,
        "ms a step": 1e3 / statistics.median(rates) if rates else float("nan"),
    }
    curves = {"steps": [r["step"] for r in records], "valid": [r["valid/loss"] for r in records]}
    for error in ("error_m", "error_v"):
        found = [r for r in timed if error in r]
        if found:
            curves["error steps"] = [r["step"] for r in found]
            curves[error] = [r[error] for r in found]
    return sweep.CellResult(values, curves)


def data_mesh(config: Any) -> jax.sharding.Mesh | None:
    """A mesh whose devices share the batch and the states, or None for one device."""
    devices = config.bred.devices or jax.device_count()
    if devices < 0 or config.train.batch % devices:
        raise ValueError(f"bred.devices must divide train.batch={config.train.batch}, got {config.bred.devices}")
    return None if devices == 1 and jax.process_count() == 1 else meshes.make_mesh({"data": devices})


def _placement(init: Callable[[PyTree], TrainState], params: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """Splits every parameter, and with it its states, along its first axis that the devices divide."""
    devices = mesh.shape["data"]

    def split(x: Any) -> Any:
        axis = next((d for d in range(x.ndim - 1) if x.shape[d] % devices == 0), None)
        return meshes.named(mesh, *([None] * axis + ["data"] if axis is not None else []))

    shardings = jax.tree.map(split, params)
    return bred.state_sharding(optax.GradientTransformation(init, lambda *a: a), params, shardings)
