"""One cell of the BiLoCo experiment: a method and a rank, on every matrix of a model or of a file."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from jaxlab.core import errors, prng, sweep, tree
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.data import make_shards
from jaxlab.experiments import lm
from jaxlab.nn import taps, transformer
from jaxlab.quant import awq, biloco, calibrate, dequantize, gptq, svdquant
from jaxlab.quant.sign_lowrank import weighted_error

METHODS = {
    "bf16": "bfloat16",
    "rtn": "rounding to nearest",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "svdquant": "SVDQuant, plain and iterated",
    "svdquant_whitened": "SVDQuant, whitened and iterated",
    "biloco": "BiLoCo",
}
RANKED = ("svdquant", "svdquant_whitened", "biloco")  # methods with a correction
INTERVAL = 50
DAMPING = 0.01


@dataclasses.dataclass(frozen=True)
class Layer:
    """A matrix after quantisation.

    Attributes:
      decoded: what it stands for, `[out, in]`.
      arrays: what is stored, by name.
      error: weighted error, relative to the energy of the weights.
    """

    decoded: np.ndarray
    arrays: dict[str, np.ndarray]
    error: float

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return sum(x.nbytes for x in self.arrays.values())


def quantize_layer(config: Any, method: str, rank: int, w: np.ndarray, h: np.ndarray | None) -> Layer:
    """Quantises one matrix `[out, in]` with the second moments of its inputs.

    Args:
      config: format, rounding, hessian.
      method: a key of `METHODS`.
      rank: of the bfloat16 correction whose bytes a correction may take.
      w: weights.
      h: H, or None for the identity.

    Returns:
      The layer.
    """
    if method == "bf16":
        decoded = jnp.asarray(w, jnp.bfloat16)
        stored = {"weight": np.asarray(decoded)}
        return Layer(np.asarray(decoded, np.float32), stored, weighted_error(w, decoded.astype(jnp.float32), h))
    plain = gptq.quantizer(config.format)
    base = gptq.quantizer(config.format, h, rounding=config.rounding)
    extra: dict[str, Any] = {}
    if method == "rtn":
        q, decoded = plain(w)
    elif method == "gptq":
        q, decoded = gptq.quantizer(config.format, h, rounding="gptq")(w)
    elif method == "awq":
        t, _ = awq.search(w, np.ones(w.shape[1], np.float32) if h is None else h, plain)
        q, decoded = plain(w * t)
        decoded, extra = decoded / t, {"awq": t.astype(jnp.bfloat16)}
    elif method == "biloco":
        found = biloco.fit(w, h, base, match_svd_rank=rank, hessian="none" if h is None else config.hessian)
        q, c = found.base, found.correction
        decoded = _decode(q) + np.asarray(c.materialize())
        extra = {"u": c.u, "v": c.v, "s": c.scale, **({} if c.column is None else {"column": c.column})}
    else:
        whiten = method == "svdquant_whitened"
        q, c, _ = svdquant.fit(w, h, base, rank=rank, whiten=whiten)
        decoded = _decode(q) + np.asarray(c.materialize())
        extra = {"left": c.left, "right": c.right}
    arrays = {"codes": q.codes, "scale": q.scale, "tensor_scale": q.tensor_scale, **extra}
    stored = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
    return Layer(decoded, stored, weighted_error(w, decoded, h))


def _decode(q: Any) -> np.ndarray:
    return np.asarray(dequantize(q))


def train_base(config: Any, task: lm.Task, cell: sweep.Cell, folder: Path, progress: Any, resume: str) -> Any:
    """Trains the model that is quantised, with AdamW in full precision."""
    t, (init_key, run_key) = config.train, jax.random.split(prng.key(cell.seed))
    schedule = optax.warmup_cosine_decay_schedule(0.1 * t.lr, t.lr, max(1, t.steps // 10), t.steps, 0.1 * t.lr)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    shards = make_shards(task.train, 1, seq_len=config.data.seq_len, seed=cell.seed)

    @jax.jit
    def step(state: Any, batch: PyTree, key: Any) -> Any:
        loss, grads = jax.value_and_grad(task.loss_fn)(state.params, batch, key)
        updates, opt = tx.update(grads, state.opt_state, state.params)
        return Base(optax.apply_updates(state.params, updates), opt), {"loss": loss}

    batches = lambda i: jax.tree.map(lambda x: x[0], shards.batch(i, batch_per_worker=t.batch))  # noqa: E731
    state = _base(config, task, tx, init_key)
    facts = {"corpus": task.corpus_sha256, "cell": cell.name}
    state, records = lm.fit_cell(
        config, task, state, step, batches, folder=folder, facts=facts, key=run_key, per_call=1, log_every=INTERVAL,
        progress=progress, resume=resume,
    )  # fmt: skip
    loss = float(task.evaluate(state.params, task.test))
    return sweep.CellResult({"loss": loss}, {"steps": [r["step"] for r in records]})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Base:
    """What the training carries: parameters and the optimizer's state."""

    params: Any
    opt_state: Any


def _base(config: Any, task: lm.Task, tx: optax.GradientTransformation, key: Any) -> Base:
    params = transformer.init(task.model, key)
    return Base(params, tx.init(params))


def load_base(config: Any, task: lm.Task, folder: Path) -> PyTree:
    """The parameters in the newest checkpoint of `train_base`."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lambda step: 0.0))
    like = _base(config, task, tx, jax.random.key(0))
    with Checkpointer(folder / "checkpoints") as checkpointer:
        restored = checkpointer.restore(like)
    if restored is None:
        raise errors.CheckpointError(f"{folder} holds no checkpoint of the model; delete the folder to train it again")
    return restored.state.params


def hessians(config: Any, task: lm.Task, params: PyTree, seed: int) -> dict[str, np.ndarray]:
    """H of the inputs of every linear layer, on windows of the training part."""
    shards = make_shards(task.train, 1, seq_len=config.data.seq_len, seed=seed)
    count = min(config.data.calibration, 32)

    @jax.jit
    def add(sums: PyTree, tokens: Any) -> PyTree:
        inputs = taps.linear_inputs(task.model, params, tokens)
        return {path: calibrate.update(sums[path], x) for path, x in inputs.items()}

    shapes = jax.eval_shape(lambda p: taps.linear_inputs(task.model, p, jnp.zeros((1, 2), jnp.int32)), params)
    sums = {path: calibrate.moments(x.shape[-1]) for path, x in shapes.items()}
    for i in range(-(-config.data.calibration // count)):
        # Batches behind those of the training: other windows, as far as the corpus has them.
        tokens = shards.batch(config.train.steps + i, batch_per_worker=count)["tokens"][0]
        sums = add(sums, tokens[:, :-1])
    return {path: calibrate.hessian(m, damping=DAMPING) for path, m in sums.items()}


def quantize_model(
    config: Any, task: lm.Task, params: PyTree, moments: dict[str, np.ndarray], cell: sweep.Cell, progress: Any
) -> tuple[sweep.CellResult, dict[str, Layer]]:
    """Quantises every linear layer of the model, and scores the result."""
    method, rank = cell.labels["method"], cell.labels["rank"]
    kernels = {p: x for p, x in zip(tree.leaf_paths(params), jax.tree.leaves(params), strict=True) if p in moments}
    begun, layers = time.perf_counter(), {}
    for number, (path, kernel) in enumerate(kernels.items(), 1):
        layers[path] = quantize_layer(config, method, rank, np.asarray(kernel, np.float32).T, moments[path])
        progress.update(number, {"error": layers[path].error})
    new = tree.map_with_path(lambda p, x: jnp.asarray(layers[p].decoded.T) if p in layers else x, params)
    values = _values(layers, time.perf_counter() - begun)
    values |= {
        "loss": float(task.evaluate(new, task.test)),
        "valid": float(task.evaluate(new, task.valid)),
    }
    return sweep.CellResult(values), layers


def _values(layers: dict[str, Layer], seconds: float) -> dict[str, float]:
    weights = sum(layer.decoded.size for layer in layers.values())
    nbytes = sum(layer.nbytes for layer in layers.values())
    found = {
        "error": float(np.mean([layer.error for layer in layers.values()])),
        "bytes": nbytes,
        "bits a weight": 8 * nbytes / weights,
        "seconds": seconds,
    }
    return found | {f"error of {path}": layer.error for path, layer in layers.items()}


def quantize_file(
    config: Any, cell: sweep.Cell, progress: Any, keep: Callable[[str, Layer], Any]
) -> tuple[sweep.CellResult, int]:
    """Quantises the matrices of a safetensors file one after the other: one at a time is in memory."""
    method, rank = cell.labels["method"], cell.labels["rank"]
    begun, layers = time.perf_counter(), {}
    for number, (name, w) in enumerate(matrices(config), 1):
        try:
            layer = quantize_layer(config, method, rank, w, None)
        except ValueError as error:
            raise ValueError(f"weights: {name!r}: {error}") from error
        keep(name, layer)
        layers[name] = dataclasses.replace(layer, decoded=np.empty(layer.decoded.shape, bool))  # its size is all
        progress.update(number, {"error": layer.error})
    return sweep.CellResult(_values(layers, time.perf_counter() - begun)), len(layers)


def matrix_names(config: Any) -> list[str]:
    """Names of the matrices that are quantised: those `config.select` finds, with a width the format can divide.

    Raises:
      ValueError: when there is none.
    """
    block = gptq.BLOCKS[config.format]
    with _open(config.weights) as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    width = 1 if config.layout == "out_in" else 0
    names = [n for n, s in shapes.items() if len(s) == 2 and re.search(config.select, n) and s[width] % block == 0]
    if not names:
        raise ValueError(
            f"weights: {config.weights} has no matrix whose name matches select={config.select!r} and whose inputs are "
            f"a multiple of {block}; it has {', '.join(list(shapes)[:5])}, ..."
        )
    return names


def matrices(config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(name, weights `[out, in]` in float32) of every matrix that is quantised, read when it is asked for."""
    names = matrix_names(config)
    with _open(config.weights) as file:
        for name in names:
            w = np.asarray(jnp.asarray(file.get_tensor(name)), np.float32)
            if not np.isfinite(w).all():
                raise ValueError(f"weights: {name!r} holds NaN or infinities")
            yield name, w if config.layout == "out_in" else np.ascontiguousarray(w.T)


def _open(path: str) -> Any:
    safetensors = errors.require("safetensors", extra="models")
    try:
        return safetensors.safe_open(path, framework="flax")
    except Exception as error:  # the library raises its own type for a damaged file, OSError for a missing one
        raise ValueError(f"weights: cannot read {path!r} as safetensors: {error}") from error


def save(path: Path, layers: dict[str, dict[str, np.ndarray]], meta: dict[str, str]) -> None:
    """Writes the stored arrays of every layer as `NAME.PART`."""
    errors.require("safetensors", extra="models")
    module = errors.require("safetensors.numpy", extra="models")
    flat = {f"{name}.{part}": np.ascontiguousarray(x) for name, arrays in layers.items() for part, x in arrays.items()}
    module.save_file(flat, path, metadata=meta)
