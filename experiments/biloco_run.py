"""One cell of the BiLoCo experiment: a method and a rank, on every matrix of a model or of a file."""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
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
from jaxlab.quant import awq, biloco, calibrate, gptq, sign_stack, smooth, svdquant
from jaxlab.quant.sign_lowrank import weighted_error

METHODS = {
    "bf16": "bfloat16",
    "rtn": "rounding to nearest",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "svdquant": "SVDQuant, as published",
    "svdquant_whitened": "SVDQuant, whitened",
    "biloco": "BiLoCo",
}
RANKED = ("svdquant", "svdquant_whitened", "biloco")  # methods with a correction
INTERVAL = 50
DAMPING = 0.01
FLOATS = ("F64", "F32", "F16", "BF16")  # of safetensors


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


def quantize_layers(
    config: Any, method: str, rank: int, ws: Sequence[np.ndarray], hs: Sequence[np.ndarray | None]
) -> list[Layer]:
    """Quantises matrices `[out, in]` of one shape with the second moments of their inputs.

    Args:
      config: format, rounding, hessian.
      method: a key of `METHODS`.
      rank: of the bfloat16 correction whose bytes a correction may take.
      ws: weights.
      hs: H of each, or None for the identity.

    Returns:
      A layer each.
    """
    if method != "biloco":
        return [_one(config, method, rank, w, h) for w, h in zip(ws, hs, strict=True)]
    settings = biloco.Settings("none" if hs[0] is None else config.hessian)
    found = biloco.fit_stack(ws, hs, _base(config), match_svd_rank=rank, settings=settings)
    layers = []
    for w, h, f in zip(ws, hs, found, strict=True):
        c = f.correction
        layers.append(_layer(w, h, f.base, f.decoded, u=c.u, v=c.v, s=c.scale, column=c.column, smooth=f.smooth))
    return layers


def _one(config: Any, method: str, rank: int, w: np.ndarray, h: np.ndarray | None) -> Layer:
    plain = gptq.quantizer(config.format)
    if method == "bf16":
        decoded = jnp.asarray(w, jnp.bfloat16)
        stored = {"weight": np.asarray(decoded)}
        return Layer(np.asarray(decoded, np.float32), stored, weighted_error(w, decoded.astype(jnp.float32), h))
    if method == "rtn":
        return _layer(w, h, *plain(w))
    if method == "gptq":
        return _layer(w, h, *gptq.quantizer(config.format, h, rounding="gptq")(w))
    if method == "awq":
        t, _ = awq.search(w, h, plain)
        wide = 1.0 if t is None else t
        q, decoded = plain(w * wide)
        return _layer(w, h, q, decoded / wide, smooth=t)
    whiten = method == "svdquant_whitened"
    found = svdquant.fit(w, h, _base(config), rank=rank, whiten=whiten, smoothing=smooth.GRID)
    c = found.correction
    return _layer(w, h, found.base, found.decoded, left=c.left, right=c.right, smooth=found.smooth)


def _base(config: Any) -> Any:
    return functools.partial(gptq.quantizer, config.format, rounding=config.rounding)


def _layer(w: np.ndarray, h: Any, q: Any, decoded: np.ndarray, **extra: Any) -> Layer:
    if extra.get("smooth") is not None:
        extra["smooth"] = jnp.asarray(extra["smooth"], jnp.bfloat16)  # which its numbers are already
    arrays = {"codes": q.codes, "scale": q.scale, "tensor_scale": q.tensor_scale, **extra}
    stored = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
    return Layer(decoded, stored, weighted_error(w, decoded, h))


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
    state = _initial(task, tx, init_key)
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


def _initial(task: lm.Task, tx: optax.GradientTransformation, key: Any) -> Base:
    params = transformer.init(task.model, key)
    return Base(params, tx.init(params))


def abstract(config: Any) -> tuple[PyTree, list[Any]]:
    """Shapes of the model's parameters, and of the matrices among them that are quantised."""
    params = jax.eval_shape(lambda: transformer.init(lm.model_config(config), jax.random.key(0)))
    named = zip(tree.leaf_paths(params), jax.tree.leaves(params), strict=True)
    return params, [x for path, x in named if path.endswith("kernel")]


def load_base(config: Any, task: lm.Task, folder: Path) -> PyTree:
    """The parameters in the newest checkpoint of `train_base`."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lambda step: 0.0))
    like = _initial(task, tx, jax.random.key(0))
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
    for paths in _by_shape({path: kernel.shape for path, kernel in kernels.items()}, lambda m, n: len(kernels)):
        ws = [np.asarray(kernels[path], np.float32).T for path in paths]
        found = quantize_layers(config, method, rank, ws, [moments[path] for path in paths])
        layers |= zip(paths, found, strict=True)
        progress.update(len(layers), {"error": found[-1].error})
    new = tree.map_with_path(lambda p, x: jnp.asarray(layers[p].decoded.T) if p in layers else x, params)
    values = _values(layers, time.perf_counter() - begun)
    values |= {
        "loss": float(task.evaluate(new, task.test)),
        "valid": float(task.evaluate(new, task.valid)),
    }
    return sweep.CellResult(values), layers


def _by_shape(shapes: dict[str, tuple[int, ...]], most: Callable[[int, int], int]) -> list[list[str]]:
    """Names in groups of one shape, of `most` of the shape at most."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault(tuple(shape), []).append(name)
    cut = []
    for shape, names in groups.items():
        size = most(*shape)
        cut += [names[i : i + size] for i in range(0, len(names), size)]
    return cut


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
    """Quantises the matrices of a safetensors file: no more of them are in memory than are fitted together."""
    method, rank = cell.labels["method"], cell.labels["rank"]
    begun, layers = time.perf_counter(), {}
    for names, ws in matrices(config):
        try:
            found = quantize_layers(config, method, rank, ws, [None] * len(ws))
        except ValueError as error:
            raise ValueError(f"weights: {', '.join(map(repr, names))}: {error}") from error
        for name, layer in zip(names, found, strict=True):
            keep(name, layer)
            layers[name] = dataclasses.replace(layer, decoded=np.empty(layer.decoded.shape, bool))  # its size is all
        progress.update(len(layers), {"error": found[-1].error})
    return sweep.CellResult(_values(layers, time.perf_counter() - begun)), len(layers)


def matrix_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes `[out, in]` of the matrices that are quantised: those `config.select` finds, of floating point,
    with a width that the format can divide.

    Raises:
      ValueError: when there is none.
    """
    block = gptq.BLOCKS[config.format]
    turned = -1 if config.layout == "in_out" else 1
    try:
        pattern = re.compile(config.select)
    except re.error as error:
        raise ValueError(f"select: {config.select!r} is no regular expression ({error})") from error
    with _open(config.weights) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: tuple(x.get_shape())[::turned] for name, x in slices.items() if x.get_dtype() in FLOATS}
    found = {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == 2 and pattern.search(name) and min(shape) > 0 and shape[1] % block == 0
    }
    if not found:
        raise ValueError(
            f"weights: {config.weights} has no matrix of floating point whose name matches select={config.select!r} "
            f"and whose inputs are a multiple of {block}; it has {', '.join(list(slices)[:5]) or 'no tensors'}, ..."
        )
    return found


def matrices(config: Any) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    """(names, weights `[out, in]` in float32) of groups of equal shape, each read when it is asked for."""
    groups = _by_shape(matrix_shapes(config), sign_stack.together)
    with _open(config.weights) as file:
        for names in groups:
            ws = []
            for name in names:
                w = np.asarray(jnp.asarray(file.get_tensor(name)), np.float32)
                if not np.isfinite(w).all():
                    raise ValueError(f"weights: {name!r} holds NaN or infinities")
                ws.append(w if config.layout == "out_in" else np.ascontiguousarray(w.T))
            yield names, ws


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
