"""An update with quantised states, computed one parameter at a time on CPUs.

XLA sees an optimizer's update as one program, and may hold the decoded states of all parameters at once. On a CPU that
is slow as well as large: memory above some tens of megabytes comes from the operating system anew in every call, and
each page of it costs more than the arithmetic on it. So the transformation is traced, and its equations are sorted into
parts that share no large array, which are computed one behind the other. A part whose equations all work element by
element, as those of most optimizers do, is computed a chunk of rows at a time: a float32 state exists for a chunk only.
Nothing is assumed of the transformation: what is not understood is computed whole.
"""

import dataclasses
import functools
import graphlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jaxtyping import Array, Int32, PyTree, UInt32
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from jaxlab.kernels.bred_update import codec, vector
from jaxlab.kernels.bred_update.codec import QTensor

LARGE = 2**12  # elements from which on an array ties together what makes and what reads it
CHUNK = 2**19  # elements of a state that are decoded at a time, about
ELEMENTWISE = frozenset(
    """
    abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p cos div eq erf exp exp2 expm1 floor
    ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow reduce_precision rem round
    rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905
)
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr", "closed_call": "call_jaxpr"}


@dataclasses.dataclass(frozen=True)
class Codec:
    """How the quantised leaves of a state are decoded, and encoded again.

    Attributes:
      stored: the leaves as they are.
      words: that name them in their dithers.
      seed: of the dithers.
      count: steps done.
      next_count: steps done after this one.
    """

    stored: Sequence[QTensor]
    words: Sequence[int]
    seed: int
    count: Int32[Array, ""]
    next_count: Int32[Array, ""]

    def decode(self, k: int, part: QTensor | None = None, offset: int | UInt32[Array, ""] = 0) -> Array:
        """Leaf k, or some rows of it, whose first block has the index `offset`."""
        q = self.stored[k] if part is None else part
        return codec.decode(q, seed=self.seed, leaf=self.words[k], count=self.count, offset=offset)

    def encode(self, k: int, x: Array, offset: int | UInt32[Array, ""] = 0) -> QTensor:
        """What to store of leaf k, or of some rows of it."""
        spec = self.stored[k].spec
        return codec.encode(x, spec, seed=self.seed, leaf=self.words[k], count=self.next_count, offset=offset)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Equations that share large arrays.

    Attributes:
      eqns: in order.
      decodes, encodes: the numbers of the leaves that it reads and writes.
      reads: variables from elsewhere.
      writes: variables that are read elsewhere.
    """

    eqns: list[Any]
    decodes: list[int]
    encodes: list[int]
    reads: list[Any]
    writes: list[Any]


def run(
    f: Callable[..., tuple[PyTree, PyTree]], form: Codec, places: Sequence[int], *, split: bool
) -> tuple[PyTree, list[Any]]:
    """(updates, leaves of the new state) of `f`, in parts.

    Args:
      f: decoded leaves -> (updates, new state in full precision); closes over everything else.
      form: of the leaves.
      places: where they stand among the leaves of the new state.
      split: whether a part may be computed in chunks; sharded arrays would be gathered for that.

    Returns:
      The updates, and the leaves of the new state with a `QTensor` at `places`; as computed whole, up to the rounding
      of operations that XLA fuses.
    """
    structs = [jax.ShapeDtypeStruct(q.shape, q.dtype) for q in form.stored]
    traced, (updates, _) = jax.make_jaxpr(f, return_shape=True)(*structs)
    jaxpr, first = traced.jaxpr, len(jax.tree.leaves(updates))
    encoded = [jaxpr.outvars[first + place] for place in places]
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    token, stored = jnp.asarray(form.count, jnp.int32), {}
    for part in _parts(jaxpr, encoded, first, set(places)):
        if split and _rowwise(part, jaxpr, encoded, form):
            results, packed = _chunks(part, jaxpr, encoded, form, values, token)
        elif part.decodes or part.encodes:
            compute = functools.partial(_whole, part, jaxpr, encoded, form, values)
            results, packed = vector.stage(token >= 0, compute)
        else:
            results, packed = _whole(part, jaxpr, encoded, form, values)
        if packed:
            token = _after(token, packed[0].codes)
        values.update(zip(part.writes, results, strict=True))
        stored.update(zip(part.encodes, packed, strict=True))
    out = [v.val if _literal(v) else values.get(v) for v in jaxpr.outvars]
    for k, place in enumerate(places):
        out[first + place] = stored[k]
    return jax.tree.unflatten(jax.tree.structure(updates), out[:first]), out[first:]


def _literal(v: Any) -> bool:
    return isinstance(v, jex.Literal)


def _large(v: Any) -> bool:
    return not _literal(v) and getattr(v.aval, "size", 0) >= LARGE


def _after(token: Int32[Array, ""], x: Array) -> Int32[Array, ""]:
    """Another number >= 0, which XLA does not know before it has x."""
    return jnp.minimum(token, x.reshape(-1)[0].astype(jnp.int32)) if x.size else token


def _parts(jaxpr: Any, encoded: Sequence[Any], first: int, places: set[int]) -> Iterator[_Part]:
    """The parts, in an order in which they can be computed."""
    eqns, inputs = jaxpr.eqns, jaxpr.invars
    # Nodes: equations, then what decodes the inputs, then what encodes.
    made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    made |= {v: len(eqns) + k for k, v in enumerate(inputs)}
    reads = [[v for v in e.invars if not _literal(v)] for e in eqns]
    reads += [[] for _ in inputs] + [[] if _literal(v) else [v] for v in encoded]
    edges = [(made[v], i, _large(v)) for i, vs in enumerate(reads) for v in vs if v in made]
    # A large array ties both ways: what is strongly connected then is a part.
    ties = [(a, b) for a, b, _ in edges] + [(b, a) for a, b, large in edges if large]
    ends = ([a for a, _ in ties], [b for _, b in ties])
    graph = coo_array(([1] * len(ties), ends), shape=(len(reads), len(reads)))
    count, label = connected_components(graph, connection="strong")
    members: list[list[int]] = [[] for _ in range(count)]
    for i, part in enumerate(label):
        members[part].append(i)
    order = graphlib.TopologicalSorter({part: set() for part in range(count)})
    for a, b, _ in edges:
        if label[a] != label[b]:
            order.add(label[b], label[a])
    kept = [v for i, v in enumerate(jaxpr.outvars) if i < first or i - first not in places]
    readers: dict[Any, set[int]] = {v: {-1} for v in kept if not _literal(v)}
    for i, vs in enumerate(reads):
        for v in vs:
            readers.setdefault(v, set()).add(label[i])
    for part in order.static_order():
        nodes = members[part]
        inside = [eqns[i] for i in nodes if i < len(eqns)]
        decodes = [i - len(eqns) for i in nodes if len(eqns) <= i < len(eqns) + len(inputs)]
        encodes = [i - len(eqns) - len(inputs) for i in nodes if i >= len(eqns) + len(inputs)]
        own = [v for e in inside for v in e.outvars] + [inputs[k] for k in decodes]
        used = dict.fromkeys(v for i in nodes for v in reads[i])
        yield _Part(
            inside,
            decodes,
            encodes,
            [v for v in used if v not in set(own)],
            [v for v in own if readers.get(v, {part}) != {part}],
        )


def _whole(
    part: _Part, jaxpr: Any, encoded: Sequence[Any], form: Codec, values: Mapping[Any, Any]
) -> tuple[list[Array], list[QTensor]]:
    """(what the part writes, what it encodes), all rows at once."""
    targets = [encoded[k] for k in part.encodes]
    own = [jaxpr.invars[k] for k in part.decodes]
    inner = jaxpr.replace(constvars=[], invars=[*own, *part.reads], outvars=[*part.writes, *targets], eqns=part.eqns)
    inputs = [*map(form.decode, part.decodes), *(values[v] for v in part.reads)]
    out = jex.jaxpr_as_fun(jex.ClosedJaxpr(inner, []))(*inputs)
    fresh = out[len(part.writes) :]
    return out[: len(part.writes)], [form.encode(k, x) for k, x in zip(part.encodes, fresh, strict=True)]


def _rowwise(part: _Part, jaxpr: Any, encoded: Sequence[Any], form: Codec) -> bool:
    """Whether every row of what the part computes depends on the same row of what it reads alone."""
    leaves = [form.stored[k] for k in (*part.decodes, *part.encodes)]
    if not leaves or not leaves[0].size > CHUNK:
        return False
    shape = leaves[0].shape
    if any(q.shape != shape or _unit(q) is None for q in leaves):
        return False
    targets = [encoded[k] for k in part.encodes]
    if any(_literal(v) or v.aval.dtype != q.dtype for v, q in zip(targets, leaves[len(part.decodes) :], strict=True)):
        return False
    arrays = [*part.reads, *part.writes, *targets]
    known = all(v.aval.shape in ((), shape) for v in arrays) and all(v.aval.shape == shape for v in part.writes)
    return known and all(_elementwise(e, shape) for e in part.eqns)


def _elementwise(e: Any, shape: tuple[int, ...]) -> bool:
    shapes = {v.aval.shape for v in (*e.invars, *e.outvars)}
    if not shapes <= {(), shape}:
        return False
    if shapes == {()} or e.primitive.name in ELEMENTWISE:
        return True
    if e.primitive.name == "broadcast_in_dim":
        return e.invars[0].aval.shape == ()
    name = CALLS.get(e.primitive.name)
    return name is not None and all(_elementwise(inner, shape) for inner in e.params[name].jaxpr.eqns)


def _rows(eqns: Sequence[Any], values: dict[Any, Any], whole: tuple[int, ...], rows: tuple[int, ...]) -> dict[Any, Any]:
    """The values of all variables, where arrays of the shape `whole` are cut to `rows`."""
    for e in eqns:
        inputs = [v.val if _literal(v) else values[v] for v in e.invars]
        if e.primitive.name == "broadcast_in_dim" and e.outvars[0].aval.shape == whole:
            found = [jnp.broadcast_to(inputs[0], rows)]
        elif e.primitive.name in CALLS:
            inner = e.params[CALLS[e.primitive.name]]
            start = dict(zip(inner.jaxpr.constvars, inner.consts, strict=True))
            start |= dict(zip(inner.jaxpr.invars, inputs, strict=True))
            end = _rows(inner.jaxpr.eqns, start, whole, rows)
            found = [v.val if _literal(v) else end[v] for v in inner.jaxpr.outvars]
        else:
            found = e.primitive.bind(*inputs, **e.params)
            found = found if e.primitive.multiple_results else [found]
        values.update(zip(e.outvars, found, strict=True))
    return values


@dataclasses.dataclass(frozen=True)
class _Unit:
    """What a leaf is cut into along its first axis: rows, or the blocks of a vector.

    Attributes:
      number: of them.
      elements, words, scales: of a unit, along the first axis of the array, its codes and its scales.
      blocks: in a unit.
    """

    number: int
    elements: int
    words: int
    scales: int
    blocks: int


def _unit(q: QTensor) -> _Unit | None:
    """The unit of a leaf; None where its rows cannot be encoded apart."""
    layout, block = q.layout, q.spec.block_size
    if layout.tail and (len(q.shape) == 1 or q.spec.rounding == "stochastic"):
        return None  # stochastic rounding counts elements, and `codec` has an offset in blocks only
    if len(q.shape) == 1:
        return _Unit(layout.full, block, layout.main_bytes // layout.full, 1, 1)
    return _Unit(q.shape[0], 1, 1, 1, q.scale.size // q.scale.shape[0])


def _chunks(
    part: _Part, jaxpr: Any, encoded: Sequence[Any], form: Codec, values: Mapping[Any, Any], token: Int32[Array, ""]
) -> tuple[list[Array], list[QTensor]]:
    """(what the part writes, what it encodes), some rows at a time, in place."""
    q = form.stored[(part.decodes or part.encodes)[0]]
    unit = _unit(q)
    assert unit is not None
    limit = max(1, CHUNK * unit.number // q.size)
    # Equal chunks where there are some of nearly that size.
    size = next((n for n in range(min(limit, unit.number), (limit + 1) // 2, -1) if unit.number % n == 0), limit)

    def turn(start: int, size: int, number: Any, carry: Any) -> Any:
        out, state = carry
        row = start + vector.spread(number) * size
        cut = lambda x, each: jax.lax.dynamic_slice_in_dim(x, row * each, size * each)  # noqa: E731
        put = lambda x, new, each: jax.lax.dynamic_update_slice_in_dim(x, new, row * each, 0)  # noqa: E731
        block = lambda own: row.astype(jnp.uint32) * jnp.uint32(own.blocks)  # noqa: E731
        local = {v: cut(values[v], unit.elements) if v.aval.shape == q.shape else values[v] for v in part.reads}
        shape = (size * unit.elements, *q.shape[1:])
        for k in part.decodes:
            old, own = form.stored[k], _unit(form.stored[k])
            codes, scale = state.get(k, (old.codes, old.scale))
            rows = dataclasses.replace(old, codes=cut(codes, own.words), scale=cut(scale, own.scales), shape=shape)
            local[jaxpr.invars[k]] = form.decode(k, rows, block(own))
        local = _rows(part.eqns, local, q.shape, shape)
        out = [put(x, local[v], unit.elements) for v, x in zip(part.writes, out, strict=True)]
        new = {}
        for k, (codes, scale) in state.items():
            own, rows = _unit(form.stored[k]), form.encode(k, local[encoded[k]], block(own))
            new[k] = put(codes, rows.codes, own.words), put(scale, rows.scale, own.scales)
        return out, new

    # Zeros that must wait for their turn, lest all buffers exist from the start.
    out = [jnp.full(v.aval.shape, jnp.minimum(token, 0).astype(v.aval.dtype)) for v in part.writes]
    carry = out, {k: (form.stored[k].codes, form.stored[k].scale) for k in part.encodes}
    for start, n, number in ((0, size, unit.number // size), (unit.number // size * size, unit.number % size, 1)):
        if n:
            turns = jnp.where(token >= 0, number, 0)  # not a constant, so that XLA keeps the loop and its order
            carry = jax.lax.fori_loop(0, turns, functools.partial(turn, start, n), carry)
    out, state = carry
    return out, [dataclasses.replace(form.stored[k], codes=state[k][0], scale=state[k][1]) for k in part.encodes]
