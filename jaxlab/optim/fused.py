"""Fused steps: parameters and packed states updated in one pass, without a full-precision state in memory.

An optax transformation returns updates, so its wrapper has to decode whole leaves first. A fused step takes parameters
and gradients and returns new parameters; every chunk of blocks is decoded, updated and encoded where it lies:

    opt = fused.adamw(3e-4)
    state = opt.init(params)
    params, state = jax.jit(opt.step, donate_argnums=(0, 2))(params, grads, state)

The codes are those of `quantize_state(optax.adamw(...))`: the two share codec, arithmetic and names of the leaves. What
stands between an optimizer and `apply_updates`, such as clipping and accumulation, goes before `step`.

Small leaves keep float32 states and optax's formula. A leaf is updated by one device: where parameters are sharded over
several, use `quantize_state`, or call `step` within `jax.shard_map`, whose devices then draw the same dithers.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from jaxlab.core import tree
from jaxlab.kernels.bred_update import api
from jaxlab.kernels.bred_update.codec import Layout, QTensor, QuantSpec, is_quantized, leaf_id
from jaxlab.kernels.bred_update.steps import Hyper
from jaxlab.optim.selection import MIN_SIZE, packed_bytes

ScalarOrSchedule = float | Array | Callable[[Any], Any]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["count", "averages"], meta_fields=["seed"])
@dataclasses.dataclass(frozen=True)
class FusedState:
    """State of a fused optimizer.

    Attributes:
      count: steps done; names the dither that the averages were encoded with.
      averages: name of an average (`mu`, `nu`, `trace`) -> pytree like the parameters, with a `QTensor` where a leaf is
        quantised and a float32 array where it is not.
      seed: of the dither; static.
    """

    count: Any  # tree functions put structs and shardings here
    averages: dict[str, Any]
    seed: int = 0

    @property
    def checkpoint_meta(self) -> str:
        """What a checkpoint must agree in, beside the arrays; `core.checkpoint` records it."""
        return f"bred seed={self.seed}"


class FusedOptimizer(NamedTuple):
    """A pair of pure functions, for jit, scan and donation.

    Attributes:
      init: `params -> FusedState`.
      step: `(params, grads, state) -> (params, state)`.
    """

    init: Callable[[PyTree], FusedState]
    step: Callable[[PyTree, PyTree, FusedState], tuple[PyTree, FusedState]]


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What tells one optimizer from another.

    Attributes:
      names: of its averages.
      packed: `(p, g, averages, hyper, words of the averages, further arguments of api) -> (p, *averages)`, of a leaf.
      plain: `(p, g, averages, hyper) -> (p, *averages)` in float32, by optax's formula.
      hyper: the scalars of step number `count`, but for the learning rate.
    """

    names: tuple[str, ...]
    packed: Callable[..., tuple[Any, ...]]
    plain: Callable[..., tuple[Any, ...]]
    hyper: Callable[[Any], Hyper]


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    weight_decay: Any = 1e-4,
    *,
    spec: QuantSpec | None = None,
    seed: int = 0,
    min_size: int = MIN_SIZE,
    implementation: str | None = None,
) -> FusedOptimizer:
    """AdamW: m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p -= lr (m / c1 / (sqrt(v / c2) + eps) + wd p).

    Args:
      learning_rate: a number, a scalar array, or an optax schedule of the number of steps done before.
      b1, b2: decays of the two averages, in [0, 1).
      eps: added to the root of the second moment.
      eps_root: added to the second moment; with XLA, another value than 0 costs a second root.
      weight_decay: decoupled, scaled by the learning rate.
      spec: how the averages are stored; 4 bits in blocks of 128 with block replay dithering by default. Its map is for
        `mu`; `nu` is always stored as a square root.
      seed: of the dither, >= 0.
      min_size: elements below which a leaf's averages stay in float32, as do those of a leaf whose last axis is so
        short that packing would not save half.
      implementation: None for that of the default backend, or one of `kernels.bred_update.api`.

    Returns:
      A `FusedOptimizer`.

    Raises:
      TypeError: for arguments of other types; in `init` and `step`, for leaves that are not real and floating.
      ValueError: for numbers outside their range, or an implementation that cannot run here; in `step`, when
        parameters, gradients and state do not match.

    Example:
      >>> opt = adamw(1e-3)
      >>> params = {"w": jnp.ones((64, 128))}
      >>> params, state = jax.jit(opt.step)(params, {"w": jnp.ones((64, 128))}, opt.init(params))
      >>> round(float(params["w"][0, 0]), 4), state.averages["mu"]["w"].nbytes
      (0.999, 4352)
    """
    for name, value, end in (("b1", b1, 1), ("b2", b2, 1), ("eps", eps, math.inf), ("eps_root", eps_root, math.inf)):
        _check_number(name, value, end)
    _check_number("weight_decay", weight_decay, math.inf)

    def hyper(count: Any) -> Hyper:
        return Hyper(0.0, b1, b2, eps, eps_root, weight_decay, 1 - b1**count, 1 - b2**count)

    def plain(p: Any, g: Any, averages: Sequence[Any], h: Hyper) -> tuple[Any, ...]:
        mu = (1 - h.b1) * g + h.b1 * averages[0]
        nu = (1 - h.b2) * (g * g) + h.b2 * averages[1]
        direction = (mu / h.correction1) / (jnp.sqrt(nu / h.correction2 + h.eps_root) + h.eps)
        return p - h.lr * (direction + h.weight_decay * p), mu, nu

    def packed(p: Any, g: Any, averages: Sequence[QTensor], h: Hyper, ids: Sequence[int], options: Any) -> Any:
        return api.adamw(p, g, *averages, h, leaves=tuple(ids), **options)

    return _build(_Rule(("mu", "nu"), packed, plain, hyper), learning_rate, spec, seed, min_size, implementation)


def lion(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.99,
    weight_decay: Any = 1e-3,
    *,
    spec: QuantSpec | None = None,
    seed: int = 0,
    min_size: int = MIN_SIZE,
    implementation: str | None = None,
) -> FusedOptimizer:
    """Lion: p -= lr (sign(b1 m + (1 - b1) g) + wd p), m = b2 m + (1 - b2) g.

    Args, Returns, Raises: as in `adamw`; hyperparameters and defaults are those of `optax.lion`.

    >>> lion(1e-4).init({"w": jnp.ones((64, 128))}).averages["mu"]["w"].spec.bits
    4
    """
    for name, value, end in (("b1", b1, 1), ("b2", b2, 1), ("weight_decay", weight_decay, math.inf)):
        _check_number(name, value, end)

    def plain(p: Any, g: Any, averages: Sequence[Any], h: Hyper) -> tuple[Any, ...]:
        direction = jnp.sign((1 - h.b1) * g + h.b1 * averages[0])
        return p - h.lr * (direction + h.weight_decay * p), (1 - h.b2) * g + h.b2 * averages[0]

    def packed(p: Any, g: Any, averages: Sequence[QTensor], h: Hyper, ids: Sequence[int], options: Any) -> Any:
        return api.lion(p, g, *averages, h, leaf=ids[0], **options)

    rule = _Rule(("mu",), packed, plain, lambda _: Hyper(0.0, b1, b2, weight_decay=weight_decay))
    return _build(rule, learning_rate, spec, seed, min_size, implementation)


def sgdm(
    learning_rate: ScalarOrSchedule,
    momentum: Any = 0.9,
    nesterov: bool = False,
    *,
    spec: QuantSpec | None = None,
    seed: int = 0,
    min_size: int = MIN_SIZE,
    implementation: str | None = None,
) -> FusedOptimizer:
    """SGD with momentum: t = g + momentum t, p -= lr t, or p -= lr (g + momentum t) with Nesterov's.

    Args, Returns, Raises: as in `adamw`; hyperparameters are those of `optax.sgd`.

    >>> sgdm(0.1).init({"w": jnp.ones((64, 128))}).averages["trace"]["w"].shape
    (64, 128)
    """
    _check_number("momentum", momentum, 1)
    if not isinstance(nesterov, bool):
        raise TypeError(f"nesterov must be True or False, got {nesterov!r}")

    def plain(p: Any, g: Any, averages: Sequence[Any], h: Hyper) -> tuple[Any, ...]:
        trace = g + h.b1 * averages[0]
        return p - h.lr * (g + h.b1 * trace if nesterov else trace), trace

    def packed(p: Any, g: Any, averages: Sequence[QTensor], h: Hyper, ids: Sequence[int], options: Any) -> Any:
        return api.sgdm(p, g, *averages, h, leaf=ids[0], nesterov=nesterov, **options)

    rule = _Rule(("trace",), packed, plain, lambda _: Hyper(0.0, momentum))
    return _build(rule, learning_rate, spec, seed, min_size, implementation)


def _build(
    rule: _Rule, learning_rate: Any, spec: Any, seed: Any, min_size: Any, implementation: str | None
) -> FusedOptimizer:
    if not callable(learning_rate):
        _check_number("learning_rate", learning_rate, math.inf, "a number, a scalar array or a schedule")
    spec = QuantSpec() if spec is None else spec
    if not isinstance(spec, QuantSpec):
        raise TypeError(f"spec must be a QuantSpec, got {spec!r}")
    if spec.map == "sqrt":
        raise ValueError("spec.map='sqrt' is for values >= 0; nu is stored so whatever the map, the others have a sign")
    for name, value in (("seed", seed), ("min_size", min_size)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
    api.check_implementation(implementation)
    seed, sqrt = int(seed), dataclasses.replace(spec, map="sqrt")
    specs = {name: sqrt if name == "nu" else spec.resolve(False) for name in rule.names}

    def zeros(p: Any, spec: QuantSpec) -> Any:
        size, shape = math.prod(p.shape), tuple(p.shape)
        if size < min_size or 2 * packed_bytes(shape, spec) > 4 * size:
            return jnp.zeros(shape, jnp.float32)
        # A scale of 0 decodes to 0 whatever the codes: no zeros in full precision are needed to encode.
        layout = Layout(shape[-1] if shape else 1, spec)
        codes = jnp.zeros((*shape[:-1], layout.bytes), jnp.uint8)
        scale = jnp.zeros((*shape[:-1], layout.blocks), spec.scale_dtype)
        return QTensor(codes, scale, shape, np.dtype("float32"), spec)

    def init(params: PyTree) -> FusedState:
        _check_leaves("params", params)
        averages = {name: jax.tree.map(functools.partial(zeros, spec=s), params) for name, s in specs.items()}
        return FusedState(jnp.zeros((), jnp.int32), averages, seed)

    def step(params: PyTree, grads: PyTree, state: FusedState) -> tuple[PyTree, FusedState]:
        paths, columns = _matched(params, grads, state, specs, seed)
        count = optax.safe_increment(state.count)
        lr = jnp.asarray(learning_rate(state.count), jnp.float32) if callable(learning_rate) else learning_rate
        h = rule.hyper(count)._replace(lr=lr)
        options = {"seed": seed, "count": state.count, "implementation": implementation}
        results = []
        for path, p, g, *averages in zip(paths, *columns, strict=True):
            if is_quantized(averages[0]):
                ids = [leaf_id(f"{name}/{path}") for name in rule.names]
                results.append(rule.packed(p, g, averages, h, ids, options))
            else:
                new_p, *averages = rule.plain(p.astype(jnp.float32), g.astype(jnp.float32), averages, h)
                results.append((new_p.astype(p.dtype), *averages))
        treedef = jax.tree.structure(params)
        trees = [treedef.unflatten([result[i] for result in results]) for i in range(1 + len(rule.names))]
        return trees[0], FusedState(count, dict(zip(rule.names, trees[1:], strict=True)), seed)

    return FusedOptimizer(init, step)


def _check_number(name: str, value: Any, end: float | int, what: str = "a number or a scalar array") -> None:
    """Raises for what is no number, and for one outside [0, end); arrays may be traced, and are not looked into."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"{name} must be {what}, got {value.dtype}{list(value.shape)}")
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {what}, got {value!r}")
    if not 0 <= value < end:
        raise ValueError(f"{name} must be in [0, {end}), got {value!r}")


def _check_leaves(name: str, values: PyTree) -> list[tuple[str, Any]]:
    """(path, leaf) of arrays that are real and floating; anything else is an error that names the path."""
    if values is None:
        raise ValueError(f"{name} must be a pytree of arrays, got None")
    found = [(tree.path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(values)]
    for path, x in found:
        dtype = getattr(x, "dtype", None)
        if dtype is None or not hasattr(x, "shape"):
            raise TypeError(f"{name} {path!r} must be an array, got {x!r}")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{name} {path!r} must be real and floating, got {dtype}: leave it out of the tree")
    return found


def _matched(
    params: PyTree, grads: PyTree, state: Any, specs: dict[str, QuantSpec], seed: int
) -> tuple[list[str], list[list[Any]]]:
    """Names of the leaves, and columns of parameters, gradients and averages; errors say where they do not match."""
    if not isinstance(state, FusedState):
        raise ValueError(f"state must come from this optimizer's init, got {type(state).__name__}")
    if set(state.averages) != set(specs):
        raise ValueError(f"state has the averages {sorted(state.averages)}, this optimizer {sorted(specs)}")
    if state.seed != seed:
        raise ValueError(f"state was made with seed={state.seed}, this optimizer has seed={seed}")
    ours, columns = _check_leaves("params", params), []
    _check_leaves("grads", grads)
    for name, values in [("params", params), ("grads", grads), *((x, state.averages[x]) for x in specs)]:
        flat = jax.tree_util.tree_leaves_with_path(values, is_leaf=is_quantized)
        theirs = [(tree.path_str(path), x) for path, x in flat]
        columns.append([x for _, x in theirs])
        left, right = ({path: list(x.shape) for path, x in leaves} for leaves in (ours, theirs))
        for path in [*left, *right]:
            if left.get(path) != right.get(path):
                shapes = f"params {left.get(path, 'absent')}, {name} {right.get(path, 'absent')}"
                raise ValueError(f"params and {name} do not match at {path!r}: {shapes}")
        if jax.tree.structure(values, is_leaf=is_quantized) != jax.tree.structure(params):
            raise ValueError(f"params and {name} have leaves of the same names in other containers")
        for path, x in theirs:
            if is_quantized(x) and x.spec != specs[name]:
                raise ValueError(f"{name} of {path!r} was made with {x.spec}, this optimizer has {specs[name]}")
    # As in `quantize_state`, a name that came before gets a number behind it.
    paths = [path for path, _ in ours]
    return [path if not (n := paths[:i].count(path)) else f"{path}#{n + 1}" for i, path in enumerate(paths)], columns
