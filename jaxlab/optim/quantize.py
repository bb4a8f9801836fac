"""`quantize_state`: any optax transformation with its averages stored in 3, 4 or 8 bits.

The wrapper decodes the state, calls the unmodified transformation, and encodes the new state. It owns a counter that
advances with every update: the dither of step t is a function of (seed, name of the leaf, t, block), so nothing random
is stored, and a step that is skipped around the wrapper (`apply_if_finite`, `MultiSteps`) repeats nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxlab.core import tree
from jaxlab.kernels.bred_update import codec, vector
from jaxlab.kernels.bred_update.codec import QTensor, QuantSpec, is_quantized
from jaxlab.optim import parts
from jaxlab.optim.selection import Plan, Select, StateLeaf, default_select, leaf_ids, state_leaves


@functools.partial(jax.tree_util.register_dataclass, data_fields=["count", "inner"], meta_fields=["plan"])
@dataclasses.dataclass(frozen=True)
class QuantizedState:
    """State of `quantize_state`.

    Attributes:
      count: updates done; names the dither that the state was encoded with.
      inner: the transformation's state, with a `QTensor` where a leaf is quantised.
      plan: spec, seed and selection rule; static.
    """

    count: Any  # tree functions put structs and shardings here
    inner: Any
    plan: Plan

    @property
    def checkpoint_meta(self) -> str:
        """What a checkpoint must agree in, beside the arrays; `core.checkpoint` records it."""
        return f"bred seed={self.plan.seed}"


def quantize_state(
    inner: optax.GradientTransformation,
    spec: QuantSpec | None = None,
    *,
    seed: int = 0,
    select: Select | None = None,
    nonneg: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Stores the averages in a transformation's state in low bits.

    Update t: decode with the dither of t, `inner.update` in full precision, encode with the dither of t + 1.

    Args:
      inner: any optax transformation.
      spec: how to store; 4 bits in blocks of 128 with block replay dithering by default. Prefer `rounding="nearest"`
        where the signal dominates the noise of the gradients: its error is smaller there.
      seed: of the dither, >= 0.
      select: `StateLeaf -> True, a QuantSpec, or None, False or a reason not to`; `default_select()` by default.
      nonneg: names of fields that are never negative, of optimizers that this library does not know.

    Returns:
      A transformation whose state holds `QTensor` leaves. It survives jit, scan, vmap, donation, `inject_hyperparams`,
      `masked`, `partition`, `chain`; `MultiSteps` and `apply_if_finite` go around it, not into it.

    Raises:
      TypeError: for an `inner` that is no transformation; in `init`, when `select` chooses integers.
      ValueError: for a negative seed; in `init`, when the state is quantised already; in `update`, for a state of
        another plan, or `params=None` where the inner transformation needs them.

    Example:
      >>> params = {"w": jnp.zeros((64, 128))}
      >>> tx = quantize_state(optax.adamw(3e-4))
      >>> state = tx.init(params)
      >>> updates, state = tx.update({"w": jnp.ones((64, 128))}, state, params)
      >>> state_bytes(state).stored, state_bytes(optax.adamw(3e-4).init(params)).stored
      (8712, 65540)
    """
    spec = QuantSpec() if spec is None else spec
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(f"inner must be an optax transformation, got {type(inner).__name__}")
    if not isinstance(spec, QuantSpec):
        raise TypeError(f"spec must be a QuantSpec, got {spec!r}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed must be an integer >= 0, got {seed!r}")
    if isinstance(nonneg, str):
        raise TypeError(f"nonneg must be a sequence of field names, got the string {nonneg!r}")
    plan = Plan(spec, int(seed), default_select() if select is None else select, tuple(nonneg))
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> QuantizedState:
        state, count = inner.init(params), jnp.zeros((), jnp.int32)
        leaves = state_leaves(state)
        twice = [leaf.path for leaf, x in leaves if is_quantized(x)]
        if twice:
            raise ValueError(f"the state of inner is quantised already, at {twice[0]!r}: wrap it once")
        specs = [plan.decide(leaf) for leaf, _ in leaves]
        return QuantizedState(count, _encode(state, leaves, specs, plan.seed, count), plan)

    def update(
        updates: PyTree, state: QuantizedState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, QuantizedState]:
        if not isinstance(state, QuantizedState):
            raise ValueError(f"state must come from this transformation's init, got {type(state).__name__}")
        if state.plan != plan:
            theirs, ours = (f"seed={p.seed}, {p.spec}" for p in (state.plan, plan))
            raise ValueError(f"state was made with {theirs}; this transformation has {ours}")
        leaves, count = state_leaves(state.inner), optax.safe_increment(state.count)
        if vector.serves((updates, state)):
            return _in_parts(lambda old: inner.update(updates, old, params, **extra), state, leaves, count)
        updates, new = inner.update(updates, _decode(state, leaves), params, **extra)
        specs = [x.spec if is_quantized(x) else "" for _, x in leaves]
        return updates, QuantizedState(count, _encode(new, leaves, specs, plan.seed, count), plan)

    return optax.GradientTransformationExtraArgs(init, update)


def _same_leaves(number: int, leaves: list[tuple[StateLeaf, Any]]) -> None:
    if number != len(leaves):
        raise ValueError(f"inner.update returned a state of {number} leaves, its init one of {len(leaves)}")


def _encode(
    state: PyTree, leaves: list[tuple[StateLeaf, Any]], specs: list[QuantSpec | str], seed: int, count: Array
) -> PyTree:
    values, treedef = jax.tree.flatten(state)
    _same_leaves(len(values), leaves)
    ids = leaf_ids([leaf for leaf, _ in leaves])
    stored = [
        codec.encode(x, spec, seed=seed, leaf=word, count=count) if isinstance(spec, QuantSpec) else x
        for x, spec, word in zip(values, specs, ids, strict=True)
    ]
    return jax.tree.unflatten(treedef, stored)


def _decode(state: QuantizedState, leaves: list[tuple[StateLeaf, Any]]) -> PyTree:
    treedef = jax.tree.structure(state.inner, is_leaf=is_quantized)
    ids = leaf_ids([leaf for leaf, _ in leaves])
    values = [
        codec.decode(x, seed=state.plan.seed, leaf=word, count=state.count) if is_quantized(x) else x
        for (_, x), word in zip(leaves, ids, strict=True)
    ]
    return jax.tree.unflatten(treedef, values)


def _in_parts(
    update: Callable[[PyTree], tuple[PyTree, PyTree]],
    state: QuantizedState,
    leaves: list[tuple[StateLeaf, Any]],
    count: Array,
) -> tuple[PyTree, QuantizedState]:
    """(updates, new state) of an update of the decoded state; see `parts`."""
    values, structure = [x for _, x in leaves], jax.tree.structure(state.inner, is_leaf=is_quantized)
    places = [i for i, x in enumerate(values) if is_quantized(x)]
    ids = leaf_ids([leaf for leaf, _ in leaves])
    form = parts.Codec([values[i] for i in places], [ids[i] for i in places], state.plan.seed, state.count, count)
    found = []

    def f(*decoded: Array) -> tuple[PyTree, PyTree]:
        full = list(values)
        for i, x in zip(places, decoded, strict=True):
            full[i] = x
        updates, new = update(jax.tree.unflatten(structure, full))
        found.append(jax.tree.structure(new))
        _same_leaves(found[-1].num_leaves, leaves)
        return updates, new

    updates, new = parts.run(f, form, places, split=jax.device_count() == 1)
    return updates, QuantizedState(count, jax.tree.unflatten(found[-1], new), state.plan)


def _is_state(x: Any) -> bool:
    return isinstance(x, QuantizedState)


def dequantize(state: PyTree) -> PyTree:
    """The state in full precision: every `QuantizedState` in it becomes the state of the transformation inside.

    Args:
      state: of an optimizer, at any depth; leading axes, such as workers of a vmapped optimizer, are kept.

    Returns:
      The same state as the optimizer without `quantize_state` has it.

    >>> tx = quantize_state(optax.sgd(0.1, momentum=0.9))
    >>> dequantize(tx.init({"w": jnp.zeros((64, 64))}))[0].trace["w"].shape
    (64, 64)
    """

    def one(x: Any) -> Any:
        if not _is_state(x):
            return x
        full = lambda s: _decode(s, state_leaves(s.inner))  # noqa: E731
        for _ in range(jnp.ndim(x.count)):
            full = jax.vmap(full)
        return full(x)

    return jax.tree.map(one, state, is_leaf=_is_state)


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Memory of a state.

    Attributes:
      stored: bytes of all its arrays.
      full: bytes if nothing were quantised.
      bits_per_element: of the quantised leaves, scales included; NaN where there is none.
    """

    stored: int
    full: int
    bits_per_element: float


def state_bytes(state: PyTree) -> StateBytes:
    """Counts the bytes of a state, from its arrays (or `jax.ShapeDtypeStruct`).

    >>> state = jax.eval_shape(quantize_state(optax.lion(1e-4)).init, {"w": jnp.zeros((1024, 1024))})
    >>> state_bytes(state)
    StateBytes(stored=557064, full=4194312, bits_per_element=4.25)
    """
    leaves = jax.tree.leaves(state, is_leaf=is_quantized)
    packed = [x for x in leaves if is_quantized(x)]
    rest = tree.nbytes([x for x in leaves if not is_quantized(x)])
    # A vmapped state has more elements than its static shape says: its codes tell.
    elements = [x.nbytes // max(1, _row_bytes(x)) * (x.shape[-1] if x.shape else 1) for x in packed]
    stored = sum(x.nbytes for x in packed)
    full = sum(n * x.dtype.itemsize for n, x in zip(elements, packed, strict=True))
    bits = 8 * stored / sum(elements) if sum(elements) else float("nan")
    return StateBytes(stored + rest, full + rest, bits)


def _row_bytes(q: QTensor) -> int:
    return q.layout.bytes + q.layout.blocks * q.scale.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Summary:
    """What `summary` found; `str()` is a table.

    Attributes:
      rows: a tuple a leaf: path, shape, how it is stored, bytes in full precision, bytes stored, why not quantised.
      full: bytes of all leaves in full precision.
      stored: bytes of all leaves as stored.
    """

    rows: tuple[tuple[str, tuple[int, ...], str, int, int, str], ...]
    full: int
    stored: int

    def __str__(self) -> str:
        head = ("state", "shape", "stored as", "bytes before", "after", "why not quantised")
        rows = [
            (p, "x".join(map(str, s)) or "scalar", how, f"{a:,}", f"{b:,}", why) for p, s, how, a, b, why in self.rows
        ]
        rows.append(("total", "", "", f"{self.full:,}", f"{self.stored:,}", f"{self.stored / max(1, self.full):.1%}"))
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        cells = (
            "  ".join(
                cell.rjust(w) if i in (3, 4) else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in [head, *rows]
        )
        return "\n".join(line.rstrip() for line in cells)


def summary(tx: optax.GradientTransformation, params: PyTree) -> Summary:
    """What an optimizer quantises of its state, what not and why, and the bytes before and after; computes nothing.

    Args:
      tx: an optimizer with `quantize_state` in it, at any depth.
      params: arrays or `jax.ShapeDtypeStruct`.

    Returns:
      A `Summary`; print it.

    Raises:
      ValueError: when there is no `quantize_state` in `tx`.

    >>> print(summary(quantize_state(optax.lion(1e-4)), {"w": jnp.zeros((64, 128)), "b": jnp.zeros(128)}))
    state    shape   stored as                      bytes before  after  why not quantised
    0/count  scalar  int32                                     4      4  field 'count' is not known to be an average
    0/mu/b   128     float32                                 512    512  128 elements, fewer than min_size=4096
    0/mu/w   64x128  4 bits, B=128, linear, dither        32,768  4,352
    count    scalar  int32                                     4      4  counter of the dither
    total                                                 33,288  4,872  14.6%
    """
    state = jax.eval_shape(tx.init, params)
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(x)]
    if not found:
        raise ValueError("tx has no quantize_state in it: nothing is quantised")
    rows = []
    for part in found:
        for leaf, x in state_leaves(part.inner):
            if is_quantized(x):
                how = f"{x.spec.bits} bits, B={x.spec.block_size}, {x.spec.map}, {x.spec.rounding}"
                rows.append((leaf.path, leaf.shape, how, leaf.nbytes, x.nbytes, ""))
            else:
                why = str(part.plan.decide(leaf))
                rows.append((leaf.path, leaf.shape, leaf.dtype.name, leaf.nbytes, leaf.nbytes, why))
        rows.append(("count", (), "int32", 4, 4, "counter of the dither"))
    outside = tree.nbytes([x for x in jax.tree.leaves(state, is_leaf=_is_state) if not _is_state(x)])
    if outside:
        rows.append(("(around quantize_state)", (), "", outside, outside, "not inside the wrapper"))
    return Summary(tuple(rows), sum(r[3] for r in rows), sum(r[4] for r in rows))


def metadata(state: PyTree) -> dict[str, Any]:
    """What a checkpoint of plain arrays does not say: seeds and specs, as a JSON-serialisable dict.

    `jaxlab.core.checkpoint` records it by itself; save it beside the arrays when another library writes them.
    """
    found: dict[str, Any] = {}
    for number, part in enumerate(x for x in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(x)):
        specs = {leaf.path: dataclasses.asdict(x.spec) for leaf, x in state_leaves(part.inner) if is_quantized(x)}
        found[str(number)] = {"seed": part.plan.seed, "leaves": specs}
    return found


def check_metadata(saved: dict[str, Any], state: PyTree) -> None:
    """Compares the `metadata` of a checkpoint with a state that its arrays shall be put into.

    Raises:
      ValueError: naming every difference.

    >>> params = {"w": jnp.zeros((64, 128))}
    >>> a, b = (quantize_state(optax.lion(1e-4), QuantSpec(bits=n)).init(params) for n in (4, 3))
    >>> check_metadata(metadata(a), b)
    Traceback (most recent call last):
      ...
    ValueError: the checkpoint does not fit this optimizer:
      0/mu/w: bits: checkpoint 4, now 3
      0/mu/w: block_size: checkpoint 128, now 64
    """
    lines = []
    now = metadata(state)
    for number in dict.fromkeys([*saved, *now]):
        old, new = saved.get(number, {}), now.get(number, {})
        if old.get("seed") != new.get("seed"):
            lines.append(f"seed: checkpoint {old.get('seed')}, now {new.get('seed')}")
        before, after = old.get("leaves", {}), new.get("leaves", {})
        for path in dict.fromkeys([*before, *after]):
            a, b = before.get(path), after.get(path)
            if a is None or b is None:
                kinds = ("full precision" if x is None else "quantised" for x in (a, b))
                lines.append("{}: checkpoint {}, now {}".format(path, *kinds))
                continue
            lines += [f"{path}: {k}: checkpoint {a.get(k)}, now {b.get(k)}" for k in b if a.get(k) != b.get(k)]
    if lines:
        raise ValueError("the checkpoint does not fit this optimizer:\n  " + "\n  ".join(lines))


def state_sharding(tx: optax.GradientTransformation, params: PyTree, shardings: PyTree) -> PyTree:
    """Shardings for `tx.init(params)`: states follow their parameters, everything else is replicated.

    Codes and scales of a quantised state are sharded as the parameter is. Where the parameter's last axis is split into
    pieces that are not multiples of the block size, a block would span devices: then they are split along the other
    axes only.

    Args:
      tx: the optimizer.
      params: arrays or `jax.ShapeDtypeStruct`.
      shardings: a `NamedSharding` a parameter.

    Returns:
      A pytree of `NamedSharding` with the structure of the state: `jax.jit(tx.init, out_shardings=...)`.

    Raises:
      ValueError: when `shardings` does not match `params`.
    """
    by_path = dict(zip(tree.leaf_paths(params), jax.tree.leaves(params), strict=True))
    flat = jax.tree.leaves(shardings, is_leaf=lambda x: isinstance(x, NamedSharding))
    wrong = [x for x in flat if not isinstance(x, NamedSharding)]
    if len(flat) != len(by_path) or wrong:
        got = f"{type(wrong[0]).__name__}" if wrong else f"{len(flat)} shardings for {len(by_path)} parameters"
        raise ValueError(f"shardings must hold a NamedSharding for every parameter, got {got}")
    placed = dict(zip(by_path, flat, strict=True))
    state = jax.eval_shape(tx.init, params)
    everywhere = NamedSharding(flat[0].mesh, PartitionSpec())

    def place(leaf: StateLeaf, x: Any) -> Any:
        names = [leaf.rest, *(leaf.path[i + 1 :] for i, c in enumerate(leaf.path) if c == "/")]
        own = next((n for n in names if n in by_path and tuple(by_path[n].shape) == leaf.shape), None)
        if own is None:
            return dataclasses.replace(x, codes=everywhere, scale=everywhere) if is_quantized(x) else everywhere
        if not is_quantized(x):
            return placed[own]
        spec = list(placed[own].spec) + [None] * (len(leaf.shape) - len(placed[own].spec))
        if spec and spec[-1] is not None:
            axes = (spec[-1],) if isinstance(spec[-1], str) else spec[-1]
            parts = int(np.prod([placed[own].mesh.shape[axis] for axis in axes]))
            if leaf.shape[-1] % (parts * x.spec.block_size):
                spec[-1] = None
        sharding = NamedSharding(placed[own].mesh, PartitionSpec(*spec))
        return dataclasses.replace(x, codes=sharding, scale=sharding)

    leaves = state_leaves(state)
    treedef = jax.tree.structure(state, is_leaf=is_quantized)
    return jax.tree.unflatten(treedef, [place(leaf, x) for leaf, x in leaves])


def quantized_leaves(state: PyTree) -> Iterator[tuple[str, QTensor]]:
    """(path, leaf) of every quantised leaf of a state."""
    return ((leaf.path, x) for leaf, x in state_leaves(state) if is_quantized(x))
