"""The state of adapters, and what is done with it: start, merge, take out again, combine, stack.

    spec = match(params, rules)
    state = init(key, params, spec)
    loss = lambda trainable: f(merge(params, state.replace(trainable=trainable)), batch)   # gradients of `trainable`
    params = merge(params, state)                                                          # to serve

The parameters of the model are never changed in place: whoever keeps them can go back to them bit for bit.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, PyTree

from jaxlab.core import linalg, tree
from jaxlab.core.errors import did_you_mean
from jaxlab.peft.lora import LoRA
from jaxlab.peft.method import Method, high, narrow, natural
from jaxlab.peft.spec import Spec, Target, check_arrays, flatten
from jaxlab.quant.qtensor import dequantize, is_quantized

Weight = float | int | Array | np.ndarray


@functools.partial(jax.tree_util.register_dataclass, data_fields=["trainable", "frozen"], meta_fields=["spec"])
@dataclasses.dataclass(frozen=True)
class Adapters:
    """Adapters of a model: a pytree of two dicts, path -> name -> array.

    Attributes:
      trainable: what is trained; float32 (float64 for kernels in float64).
      frozen: what goes with it: bases, permutations, random projections. No gradient passes through it.
      spec: what the arrays mean; static.
    """

    trainable: Any  # not annotated as arrays: tree functions put structs, shardings and placeholders here
    frozen: Any
    spec: Spec

    def replace(self, **changes: Any) -> "Adapters":
        """The same with other `trainable`, `frozen` or `spec`."""
        return dataclasses.replace(self, **changes)

    @property
    def checkpoint_meta(self) -> str:
        """What a checkpoint must agree in, beside the arrays."""
        return "; ".join(f"{t.path}: {t.method} on {t.n} x {t.m}, axes {t.in_axes}" for t in self.spec.targets)


def init(key: Key[Array, ""], params: PyTree, spec: Spec) -> Adapters:
    """Adapters with which the model is what it was: `merge(params, state)` equals `params` to rounding.

    Args:
      key: typed key. A path's random numbers depend on it and on the path alone, not on the other targets.
      params: the model's parameters.
      spec: from `match`.

    Returns:
      The state.

    Raises:
      ValueError: when `params` does not fit the spec.

    >>> from jaxlab.peft import LoRA, Rule, match
    >>> params = {"q": {"kernel": jnp.ones((4, 3))}}
    >>> state = init(jax.random.key(0), params, match(params, [Rule("q/kernel", LoRA(2))]))
    >>> jax.tree.map(jnp.shape, state.trainable)
    {'q/kernel': {'a': (4, 2), 'b': (2, 3)}}
    """
    leaves, trainable, frozen = flatten(params), {}, {}
    for target in spec.targets:
        kernel = _kernel(target, leaves)
        own = jax.random.fold_in(key, np.uint32(zlib.crc32(target.path.encode())))
        if target.stack:
            flat = kernel.reshape(-1, target.n, target.m)
            found = jax.vmap(target.method.init)(jax.random.split(own, len(flat)), flat)
            found = jax.tree.map(lambda x, s=target.stack: x.reshape(*s, *x.shape[1:]), found)
        else:
            found = target.method.init(own, kernel)
        trainable[target.path], frozen[target.path] = found
    return Adapters(trainable, frozen, spec)


def abstract(spec: Spec) -> Adapters:
    """The state's shapes and dtypes, as `jax.ShapeDtypeStruct`: what `Checkpointer.restore` wants."""
    pairs = {target.path: target.structs() for target in spec.targets}
    return Adapters({p: s[0] for p, s in pairs.items()}, {p: s[1] for p, s in pairs.items()}, spec)


def base_leaf(target: Target, leaves: dict[str, Any]) -> Float[Array, "..."]:
    """The target's leaf of the base as an array, a quantised one decoded.

    Raises:
      ValueError: when it is absent or has another shape.
    """
    if target.path not in leaves:
        raise ValueError(f"params lack the adapted leaf {target.path!r}{did_you_mean(target.path, leaves)}")
    leaf = leaves[target.path]
    if tuple(leaf.shape) != target.shape:
        raise ValueError(f"{target.path} has shape {list(leaf.shape)} in params, but {list(target.shape)} in the spec")
    return dequantize(leaf) if is_quantized(leaf) else jnp.asarray(leaf)


def _kernel(target: Target, leaves: dict[str, Any]) -> Float[Array, "*stack n m"]:
    """The target's leaf as matrices, in the dtype that is computed in."""
    return target.to_matrix(base_leaf(target, leaves).astype(target.compute))


def over_stack(f: Callable[..., Any], target: Target) -> Callable[..., Any]:
    """f, mapped over the target's stacked axes."""
    for _ in target.stack:
        f = jax.vmap(f)
    return f


def arrays(state: Adapters, path: str) -> tuple[Any, Any]:
    """(trainable, frozen) arrays of one target; no gradient passes through the frozen ones."""
    return state.trainable[path], jax.tree.map(jax.lax.stop_gradient, state.frozen[path])


def delta(params: PyTree, state: Adapters, path: str) -> Float[Array, "..."]:
    """What an adapter adds to a leaf, in the leaf's shape and float32 (float64 for such leaves).

    Args:
      params: the model's parameters.
      state: adapters.
      path: of an adapted leaf.

    Returns:
      `merged - leaf`, before rounding.

    Raises:
      KeyError: when the path is not adapted.
      ValueError: when parts do not fit.
    """
    check_arrays(state.spec, state.trainable, state.frozen)
    target = state.spec[path]
    return target.from_matrix(_delta(target, _kernel(target, flatten(params)), state))


def _delta(target: Target, kernel: Float[Array, "*stack n m"], state: Adapters) -> Float[Array, "*stack n m"]:
    return over_stack(target.method.delta, target)(kernel, *arrays(state, target.path))


def merge(params: PyTree, state: Adapters) -> PyTree:
    """The parameters with all adapters in them, ready for the unchanged model; differentiable.

    Sums are made in float32 at least, and rounded once to the leaf's dtype. A quantised leaf comes back as an array.

    Args:
      params: the model's parameters.
      state: adapters.

    Returns:
      A tree like `params`.

    Raises:
      ValueError: when the state does not fit its spec or `params`, or an update is not finite (which cannot be seen
        under `jit`, where it gives weights that are not finite either).

    >>> from jaxlab.peft import LoRA, Rule, match
    >>> params = {"q": {"kernel": jnp.ones((4, 3), jnp.bfloat16)}}
    >>> state = init(jax.random.key(0), params, match(params, [Rule("q/kernel", LoRA(2))]))
    >>> merge(params, state)["q"]["kernel"].dtype.name
    'bfloat16'
    """
    check_arrays(state.spec, state.trainable, state.frozen)
    leaves, merged = flatten(params), {}
    for target in state.spec.targets:
        kernel = _kernel(target, leaves)
        found = over_stack(target.method.merged, target)(kernel, *arrays(state, target.path))
        merged[target.path] = _rounded(target, found)
    return substitute(params, merged)


def _rounded(target: Target, matrix: Float[Array, "*stack n m"]) -> Float[Array, "..."]:
    if not isinstance(matrix, jax.core.Tracer) and not bool(tree.all_finite(matrix)):
        raise ValueError(f"{target.path}: the adapted kernel is not finite ({target.method.label}); nothing was merged")
    return target.from_matrix(matrix).astype(target.dtype)


def substitute(params: PyTree, leaves: dict[str, Any]) -> PyTree:
    """The tree with other leaves at some paths.

    >>> substitute({"a": [1, 2]}, {"a/1": 5})
    {'a': [1, 5]}
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
    return jax.tree.unflatten(structure, [leaves.get(tree.path_str(path), leaf) for path, leaf in flat])


def combine(params: PyTree, states: Sequence[Adapters], weights: Sequence[Weight] | None = None) -> PyTree:
    """Several adapters of one model at once: `K + sum_i weight_i delta_i(K)`, rounded once.

    Args:
      params: the model's parameters.
      states: adapters, of any methods and paths.
      weights: one for each, 1 by default; 0 switches one off.

    Returns:
      A tree like `params`.

    Raises:
      ValueError: for no states, another number of weights, or as `merge`.
    """
    if not states or (weights is not None and len(weights) != len(states)):
        raise ValueError(
            f"combine needs states and a weight for each, got {len(states)} states and "
            f"{'no' if weights is None else len(weights)} weights"
        )
    leaves, sums, targets = flatten(params), {}, {}
    for state, weight in zip(states, weights or [1.0] * len(states), strict=True):
        check_arrays(state.spec, state.trainable, state.frozen)
        for target in state.spec.targets:
            kernel, first = _kernel(target, leaves), targets.setdefault(target.path, target)
            # Two adapters may see one leaf as different matrices, so sums are made in the leaf's own shape.
            change = target.from_matrix(jnp.asarray(weight, target.compute) * _delta(target, kernel, state))
            sums[target.path] = sums.get(target.path, first.from_matrix(_kernel(first, leaves))) + change
    merged = {path: _rounded(targets[path], targets[path].to_matrix(x)) for path, x in sums.items()}
    return substitute(params, merged)


def kept(params: PyTree, spec: Spec) -> dict[str, Any]:
    """The leaves that a merge replaces, by path: keep them to `unmerge`.

    >>> from jaxlab.peft import LoRA, Rule, match
    >>> params = {"q": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    >>> list(kept(params, match(params, [Rule("q", LoRA(2))])))
    ['q']
    """
    leaves = flatten(params)
    for target in spec.targets:
        _kernel(target, leaves)
    return {path: leaves[path] for path in spec.paths}


def unmerge(merged: PyTree, kept: dict[str, Any]) -> PyTree:
    """The parameters before a merge, bit for bit.

    Subtracting the update would not do: `(W + D) - D` is not W in floating point.

    Args:
      merged: from `merge` or `combine`.
      kept: from `kept`, before.

    Returns:
      The parameters with the kept leaves.

    Raises:
      ValueError: when a kept leaf is not in the tree, or has another shape there.
    """
    leaves = flatten(merged)
    for path, leaf in kept.items():
        found = list(jnp.shape(leaves[path])) if path in leaves else "no such leaf"
        if found != list(leaf.shape):
            raise ValueError(f"kept leaf {path} has shape {list(leaf.shape)}, but the merged tree has {found}")
    return substitute(merged, kept)


def apply(params: PyTree, state: Adapters, path: str, x: Float[Array, "*b n"]) -> Float[Array, "*b m"]:
    """`x @ adapted kernel` of one target, without forming the adapted kernel where the method knows a cheaper way.

    Args:
      params: the model's parameters.
      state: adapters.
      path: of an adapted leaf that is no stack.
      x: inputs; for a kernel with several input axes, flattened.

    Returns:
      Outputs, in at least float32, equal to the product with the merged kernel up to rounding.

    Raises:
      KeyError: when the path is not adapted.
      ValueError: when it is a stack, or parts do not fit.
    """
    target = state.spec[path]
    if target.stack:
        raise ValueError(f"{path} is a stack of {target.stack} kernels: apply works on one, map it over the stack")
    if x.shape[-1] != target.n:
        raise ValueError(f"x must have {target.n} inputs for {path}, got shape {list(x.shape)}")
    check_arrays(state.spec, state.trainable, state.frozen)
    kernel = _kernel(target, flatten(params))
    return target.method.apply(kernel, *arrays(state, path), x, lambda x, k=kernel: narrow(x, k))


def labels(state: Adapters, by: str | Callable[[str, Method, str], str] = "method") -> dict[str, dict[str, str]]:
    """A label for every trained array, for `optax.multi_transform`: other learning rates for other parts.

    Args:
      state: adapters.
      by: "method" (`lora`), "name" (`lora/b`: method and array), or a function of (path, method, name).

    Returns:
      A tree like `state.trainable`.

    Raises:
      ValueError: for another `by`.

    >>> from jaxlab.peft import LoRA, Rule, match
    >>> params = {"q": jnp.ones((4, 3))}
    >>> labels(init(jax.random.key(0), params, match(params, [Rule("q", LoRA(2))])), "name")
    {'q': {'a': 'lora/a', 'b': 'lora/b'}}
    """
    choices: dict[str, Callable[[str, Method, str], str]] = {
        "method": lambda _, method, __: method.name,
        "name": lambda _, method, name: f"{method.name}/{name}",
    }
    if not callable(by) and by not in choices:
        raise ValueError(f"by must be one of {tuple(choices)} or a function, got {by!r}")
    choose = by if callable(by) else choices[by]
    return {t.path: {name: choose(t.path, t.method, name) for name in t.structs()[0]} for t in state.spec.targets}


def stack(states: Sequence[Adapters]) -> Adapters:
    """Adapters of one spec on a leading axis, for `jax.vmap(lambda state: f(merge(params, state)))`.

    Raises:
      ValueError: for none, and for states of different specs.

    >>> from jaxlab.peft import LoRA, Rule, match
    >>> params = {"q": jnp.ones((4, 3))}
    >>> state = init(jax.random.key(0), params, match(params, [Rule("q", LoRA(2))]))
    >>> jax.vmap(lambda s: merge(params, s))(stack([state, state]))["q"].shape
    (2, 4, 3)
    """
    if not states:
        raise ValueError("states must hold at least one, got none")
    for state in states[1:]:
        if state.spec != states[0].spec:
            raise ValueError("states must have one spec: other kernels, methods or ranks cannot lie in one array")
    return jax.tree.map(lambda *x: jnp.stack(x), *states)


def to_lora(state: Adapters, params: PyTree | None = None, rank: int | None = None) -> Adapters:
    """The same updates as LoRA adapters of scale 1, which any tool for LoRA can read.

    Exact for LoRA, rsLoRA, LoRA-FA, VeRA, AdaLoRA, PiSSA and MiLoRA (with twice the rank: the start is subtracted) and
    CORA with the global basis. The others become the nearest update of a given rank, by a truncated SVD.

    Args:
      state: adapters.
      params: the model's parameters; needed with methods that are not exact.
      rank: of the result, for methods that are not exact or to make it smaller. Kernels with fewer inputs or outputs
        get min(n, m), with which any update is exact.

    Returns:
      Adapters with the same paths.

    Raises:
      TypeError: for a method that needs a rank or `params`, and has none.
      ValueError: when the state does not fit its spec, or the rank is below 1.
    """
    check_arrays(state.spec, state.trainable, state.frozen)
    if rank is not None:
        natural("rank", rank)
    leaves, trainable, targets = flatten(params) if params is not None else {}, {}, []
    for target in state.spec.targets:
        t, f = arrays(state, target.path)
        if rank is None:
            a, b = over_stack(target.method.factors, target)(t, f)
            if a.shape[-1] > min(target.n, target.m):
                a, b = _truncate(high(a, b), min(target.n, target.m))
        else:
            if params is None:
                raise TypeError(f"to_lora with a rank needs params, to know what {target.path} is changed by")
            a, b = _truncate(_delta(target, _kernel(target, leaves), state), min(rank, target.n, target.m))
        trainable[target.path] = {"a": a, "b": b}
        targets.append(dataclasses.replace(target, method=LoRA(a.shape[-1])))
    frozen = {path: {} for path in trainable}
    return Adapters(trainable, frozen, Spec(tuple(targets), state.spec.total))


def _truncate(w: Float[Array, "*s n m"], rank: int) -> tuple[Float[Array, "*s n r"], Float[Array, "*s r m"]]:
    u, s, vt = linalg.svd(w)
    root = jnp.sqrt(s[..., :rank])
    return u[..., :rank] * root[..., None, :], root[..., :, None] * vt[..., :rank, :]


def support(state: Adapters, path: str) -> Bool[np.ndarray, "*stack n m"]:
    """Which entries of a target's kernels can change, for `topology`.

    Raises:
      KeyError: when the path is not adapted.

    >>> from jaxlab.peft import DiaBlo, Rule, match
    >>> params = {"q": jnp.ones((4, 4))}
    >>> support(init(jax.random.key(0), params, match(params, [Rule("q", DiaBlo(2))])), "q").sum()
    np.int64(8)
    """
    target = state.spec[path]
    frozen = {name: np.asarray(x).reshape(-1, *x.shape[len(target.stack) :]) for name, x in state.frozen[path].items()}
    masks = [
        target.method.support(target.n, target.m, {name: x[i] for name, x in frozen.items()})
        for i in range(math.prod(target.stack))
    ]
    return np.stack(masks).reshape(*target.stack, target.n, target.m)


def size(state: Adapters) -> int:
    """Number of trained numbers, counted in the arrays; equals `state.spec.count`."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(state.trainable))
