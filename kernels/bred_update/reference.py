"""The fused step in plain XLA: parameters and packed states of one leaf, updated a chunk of blocks at a time.

States are decoded, updated and encoded in chunks of at most `CHUNK` elements, in place where the arguments are donated:
a float32 state exists for one chunk only. The codes and scales are, bit for bit, those of `codec.decode`, `steps` and
`codec.encode` on the whole leaf. What makes it fast on a CPU, where this is the default:

- Blocks are unpacked as `[blocks, 2, B/2]` at 4 bits: the parts that share a byte are an axis of their own, so that
  unpacking is a broadcast and a shift, packing an "or" of two slices, and the innermost loop runs along the elements.
- A chunk takes two stages. The first computes the new averages into buffers. Without the boundary XLA would compute
  them again for every reader, and copy codes that one loop reads and writes. XLA for CPUs drops `optimization_barrier`
  before it fuses; a branch on something that it cannot know bounds the stages.
- Most kernels over a large chunk are split over the cores, and those that are not run beside each other. Small chunks
  would lose more in starting kernels than they gain in the cache.
- Roots are taken once: they are what is encoded, and sqrt(v / c) = sqrt(v) / sqrt(c). Where `eps_root` is not 0, the
  second moment itself is kept, and its root taken twice.
- The largest absolute value of a block is found among the bits of its elements, as integers, and codes are read from
  the bits of a sum: maxima and conversions of float32 come with checks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Shaped, UInt8, UInt32

from jaxlab.kernels.bred_update import numerics, steps, vector
from jaxlab.kernels.bred_update.codec import QTensor, QuantSpec

Word = int | Int[Array, ""] | UInt32[Array, ""]
CHUNK = 2**20  # elements that are updated at a time
MEMORY = 9e6  # bytes that their buffers may take; with more buffers an element, chunks are smaller


@dataclasses.dataclass(frozen=True)
class _Part:
    """The blocks of one size of every row: all full ones, or the short one.

    Attributes:
      rows: of the leaf; 1 where its blocks lie one behind the other and count as those of one row.
      row_blocks: blocks of a row, of every size.
      first: the first of these in a row.
      blocks: how many of them a row has.
      stride: elements from one block to the next.
      length: elements of each.
      row: elements of a row.
    """

    rows: int
    row_blocks: int
    first: int
    blocks: int
    stride: int
    length: int
    row: int

    @property
    def size(self) -> int:
        """Elements that are packed: a multiple of 8."""
        return -(-self.length // 8) * 8

    @property
    def flat(self) -> bool:
        """Whether all arrays of the leaf are seen with one block a row."""
        return self.rows == 1 and self.blocks == self.row_blocks and self.length == self.size


class _Tiles(NamedTuple):
    """A rectangle of rows and blocks, cut into equal tiles.

    Attributes:
      row, block: its first.
      down, across: number of tiles.
      rows, blocks: of a tile.
    """

    row: int
    block: int
    down: int
    across: int
    rows: int
    blocks: int


def _parts(shape: tuple[int, ...], block: int) -> list[_Part]:
    *lead, n = shape or (1,)
    rows = math.prod(lead)
    full, tail = divmod(n, block)
    blocks = full + (tail > 0)
    if blocks == 1 and n % 8 == 0:
        return [_Part(1, rows, 0, rows, n, n, rows * n)]
    if not tail:
        return [_Part(1, rows * full, 0, rows * full, block, block, rows * n)]
    short = _Part(rows, blocks, full, 1, block, tail, n)
    return [_Part(rows, blocks, 0, full, block, block, n), short] if full else [short]


def _fit(n: int, limit: int) -> int:
    """The size of a tile of n things: not above the limit, and dividing n where a size not below half of it does."""
    if n <= limit:
        return n
    return next((size for size in range(limit, (limit + 1) // 2 - 1, -1) if n % size == 0), limit)


def _tiles(rows: int, blocks: int, limit: int, row: int = 0, block: int = 0) -> Iterator[_Tiles]:
    """Cuts rows x blocks into tiles of at most `limit` blocks; what does not fit follows as further rectangles."""
    wide = _fit(blocks, limit)
    high = _fit(rows, limit // blocks) if wide == blocks else 1
    yield _Tiles(row, block, rows // high, blocks // wide, high, wide)
    if blocks % wide:
        yield from _tiles(rows, blocks % wide, limit, row, block + blocks // wide * wide)
    if rows % high:
        yield from _tiles(rows % high, blocks, limit, row + rows // high * high, block)


def _stored(x: Float[Array, "..."]) -> Array:
    """The array, or the bits of bfloat16: to update a part of it, XLA for CPUs before jax 0.12 rounds all of it."""
    bits = x.dtype == jnp.bfloat16 and jax.__version_info__ < (0, 12)
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if bits else x


def _loaded(x: Array, dtype: Any) -> Array:
    """The numbers of `dtype` that `_stored` gave."""
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x


class _Window:
    """One tile of a leaf: reads and writes its blocks as `[blocks, ...]`, parameters and scales as `_stored`."""

    def __init__(self, part: _Part, tiles: _Tiles, number: Any):
        down, across = (number, 0) if tiles.across == 1 else (0, number)
        if tiles.across > 1 and tiles.down > 1:
            down, across = number // tiles.across, number % tiles.across
        self.part, self.rows, self.blocks = part, tiles.rows, tiles.blocks
        self.row, self.block = tiles.row + down * tiles.rows, tiles.block + across * tiles.blocks

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.rows * self.blocks

    def _corner(self, first: int, stride: int) -> tuple[Any, Any]:
        return self.row, first + self.block * stride

    def elements(self, x: Array, dtype: Any) -> Float32[Array, "n b"]:
        """Of parameters or gradient, zeros behind the last of a short block."""
        part = self.part
        if part.flat:
            return _loaded(jax.lax.dynamic_slice_in_dim(x, self.block, self.blocks), dtype).astype(jnp.float32)
        corner = self._corner(part.first * part.stride, part.stride)
        rows = jax.lax.dynamic_slice(x, corner, (self.rows, self.blocks * part.length))
        rows = _loaded(rows, dtype).astype(jnp.float32).reshape(self.count, part.length)
        return jnp.pad(rows, ((0, 0), (0, part.size - part.length)))

    def write_elements(self, x: Array, new: Float32[Array, "n b"], dtype: Any) -> Array:
        """The parameters with these blocks replaced."""
        part, new = self.part, _stored(new.astype(dtype))
        if part.flat:
            return jax.lax.dynamic_update_slice_in_dim(x, new, self.block, 0)
        new = new[:, : part.length].reshape(self.rows, -1)
        return jax.lax.dynamic_update_slice(x, new, self._corner(part.first * part.stride, part.stride))

    def scale(self, x: Array, dtype: Any) -> Float32[Array, "n 1"]:
        """Of the blocks."""
        if self.part.flat:
            x = jax.lax.dynamic_slice_in_dim(x, self.block, self.blocks)
        else:
            x = jax.lax.dynamic_slice(x, self._corner(self.part.first, 1), (self.rows, self.blocks)).reshape(-1)
        return _loaded(x, dtype).astype(jnp.float32)[:, None]

    def write_scale(self, x: Array, new: Float32[Array, "n 1"], dtype: Any) -> Array:
        """The scales with those of the blocks replaced."""
        new = _stored(new[:, 0].astype(dtype))
        if self.part.flat:
            return jax.lax.dynamic_update_slice_in_dim(x, new, self.block, 0)
        return jax.lax.dynamic_update_slice(x, new.reshape(self.rows, -1), self._corner(self.part.first, 1))

    def _bytes(self, bits: int) -> tuple[tuple[Any, Any], int]:
        part = self.part
        size = numerics.packed_size(part.size, bits)
        return self._corner(numerics.packed_size(part.first * part.stride, bits), size), size

    def words(self, x: UInt8[Array, "..."], bits: int) -> UInt8[Array, "n w"]:
        """Packed codes of the blocks."""
        if self.part.flat:
            return jax.lax.dynamic_slice_in_dim(x, self.block, self.blocks)
        corner, size = self._bytes(bits)
        return jax.lax.dynamic_slice(x, corner, (self.rows, self.blocks * size)).reshape(self.count, size)

    def write_words(self, x: UInt8[Array, "..."], bits: int, planes: Sequence[UInt8[Array, "n _"]]) -> Any:
        """The packed codes with those of the blocks replaced."""
        if not self.part.flat:
            words = planes[0] if len(planes) == 1 else jnp.concatenate(planes, axis=1)
            return jax.lax.dynamic_update_slice(x, words.reshape(self.rows, -1), self._bytes(bits)[0])
        place = 0
        for plane in planes:  # each in its place: a concatenation would be one more pass
            x = jax.lax.dynamic_update_slice(x, plane, (self.block, place))
            place += plane.shape[1]
        return x

    def dither(self, spec: QuantSpec, word: UInt32[Array, ""], encode: bool) -> Float32[Array, "n m"]:
        """u of the blocks, m = 1; for stochastic rounding one an element to encode with."""
        part = self.part
        if spec.rounding == "nearest" or (spec.rounding == "stochastic" and not encode):
            return jnp.zeros((self.count, 1), jnp.float32)
        row = jax.lax.iota(jnp.uint32, self.rows) + jnp.asarray(self.row, jnp.uint32)
        place = jax.lax.iota(jnp.uint32, self.blocks) + jnp.asarray(part.first + self.block, jnp.uint32)
        if spec.rounding == "dither":
            index = (row * jnp.uint32(part.row_blocks))[:, None] + place
            return numerics.dither(word, index.reshape(-1, 1))
        start = (row * jnp.uint32(part.row))[:, None] + place * jnp.uint32(part.stride)
        return self.masked(numerics.dither(word, start.reshape(-1, 1) + jax.lax.iota(jnp.uint32, part.size)))

    def masked(self, x: Float32[Array, "n b"]) -> Float32[Array, "n b"]:
        """Zeros where a short block has no element."""
        if self.part.length == self.part.size:
            return x
        return jnp.where(np.arange(self.part.size) < self.part.length, x, jnp.float32(0))


# First stage: (g, decoded state, a zero, as `steps.zero_of`) for every state, seen in the state's parts -> arrays.
First = Callable[[Sequence[tuple[Any, Any, Any]]], tuple[Any, ...]]
# Second stage: (p, g, *arrays) -> (new p, what is encoded: values, or their roots where the map is one of roots).
Second = Callable[..., tuple[Any, Sequence[Any]]]


def _check(p: Any, g: Any, moments: Sequence[QTensor]) -> None:
    for name, x in (("p", p), ("g", g)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be real and floating, got {x.dtype}")
    for name, shape in [("g", g.shape), *(("a state", q.shape) for q in moments)]:
        if tuple(shape) != tuple(p.shape):
            raise ValueError(f"{name} has the shape {list(shape)}, the parameters have {list(p.shape)}")
    for q in moments:
        if q.spec.map == "auto":
            raise ValueError("spec.map must be 'linear', 'zero' or 'sqrt' here, got 'auto'")
        lead = tuple(q.shape[:-1])
        expected = (*lead, q.layout.bytes), (*lead, q.layout.blocks)
        if (q.codes.shape, q.scale.shape) != expected:
            raise ValueError(
                f"codes and scale of a {list(q.shape)} state must have the shapes {expected[0]} and {expected[1]}, "
                f"got {q.codes.shape} and {q.scale.shape}"
            )
    sizes = sorted({q.spec.block_size for q in moments})
    if len(sizes) > 1:
        raise ValueError(f"the states of a leaf must have one block_size in a fused step, got {sizes}")


def _update(
    p: Shaped[Array, "*s"],
    g: Shaped[Array, "*t"],
    moments: Sequence[QTensor],
    first: First,
    second: Second,
    *,
    seed: Word,
    leaves: Sequence[Word],
    count: Word,
    chunk: int | None,
    buffers: int,
) -> tuple[Any, ...]:
    """One step of one leaf, by the two stages of an optimizer; `buffers` float32 arrays of a chunk exist at a time."""
    _check(p, g, moments)
    if p.size == 0:
        return (p, *moments)
    specs, now = [q.spec for q in moments], jnp.asarray(count)
    streams = [[numerics.stream(seed, leaf, now + i) for i in (0, 1)] for leaf in leaves]
    stage = functools.partial(vector.stage, now >= 0)
    parts = _parts(tuple(p.shape), specs[0].block_size)
    flat = parts[0].flat
    rows = parts[0].blocks if flat else parts[0].rows
    grad, carry = g.reshape(rows, -1), [_stored(p).reshape(rows, -1)]
    for q in moments:
        carry += [q.codes.reshape(rows, -1), _stored(q.scale).reshape((rows,) if flat else (rows, -1))]

    def tile(part: _Part, tiles: _Tiles, turn: Any, carry: Sequence[Any]) -> list[Any]:
        at = _Window(part, tiles, vector.spread(turn))
        params, codes, scales = carry[0], carry[1::2], carry[2::2]

        def words(i: int) -> Any:
            return at.words(codes[i], specs[i].bits)

        high = [stage(lambda i=i: vector.high(words(i))) if spec.bits == 3 else None for i, spec in enumerate(specs)]

        def begin() -> Any:
            states, dithers = [], []
            for i, (spec, (word, next_word), s) in enumerate(zip(specs, streams, scales, strict=True)):
                found = vector.unpack(words(i), high[i], spec.bits)
                scale = at.scale(s, spec.scale_dtype)[:, :, None]
                u = at.dither(spec, word, encode=False)[:, :, None]
                form = {"steps": spec.steps, "nonneg": spec.nonneg, "variance": spec.variance}
                old = numerics.decode(found, scale, u, **form)
                states.append((at.elements(grad, g.dtype).reshape(old.shape), old, steps.zero_of(scale)))
                dithers.append(at.dither(spec, next_word, encode=True))
            return first(states), dithers

        arrays, dithers = stage(begin)
        start, slope = at.elements(params, p.dtype), at.elements(grad, g.dtype)
        new_p, values = second(start, slope, *(x.reshape(at.count, -1) for x in arrays))
        out = [at.write_elements(params, new_p, p.dtype)]
        for spec, x, u, c, s in zip(specs, values, dithers, codes, scales, strict=True):
            peak = vector.peak(at.masked(x))

            def pack(spec=spec, x=x, u=u, peak=peak) -> Any:
                scale = numerics.block_scale(peak, jnp.dtype(spec.scale_dtype))
                z = numerics.place(at.masked(x), scale, u, steps=spec.steps, nonneg=spec.nonneg)
                return vector.pack(vector.floor(z), spec.bits)

            planes = vector.planes(stage(pack) if spec.bits == 3 else pack(), spec.bits)
            scale = numerics.block_scale(peak, jnp.dtype(spec.scale_dtype))
            out += [at.write_words(c, spec.bits, planes), at.write_scale(s, scale, spec.scale_dtype)]
        return out

    for part in parts:
        # Maxima of other blocks are a library's, whose input is a buffer; so are a number an element, and padded rows.
        more = (part.size % 128 > 0) + any(spec.rounding == "stochastic" for spec in specs)
        fit = MEMORY / (4 * (buffers + len(moments) * more + (not part.flat)))
        size = min(CHUNK, 2 ** int(math.log2(fit))) if chunk is None else chunk
        for tiles in _tiles(part.rows, part.blocks, max(size // part.size, 1)):
            number = tiles.down * tiles.across
            # Without a loop nothing would be in place, and the buffers of all leaves would exist at once: XLA must not
            # see that a loop has a single turn. (What such a turn computes from the gradient alone is done before the
            # loop, in buffers of its own: that belongs into the first stage.)
            turns = number if number > 1 else jnp.where(now >= 0, number, 0)
            carry = jax.lax.fori_loop(0, turns, functools.partial(tile, part, tiles), carry)
    new = [
        dataclasses.replace(
            q, codes=c.reshape(q.codes.shape), scale=_loaded(s, jnp.dtype(q.spec.scale_dtype)).reshape(q.scale.shape)
        )
        for q, c, s in zip(moments, carry[1::2], carry[2::2], strict=True)
    ]
    return (_loaded(carry[0], p.dtype).reshape(p.shape), *new)


def adamw(
    p: Shaped[Array, "*s"],
    g: Shaped[Array, "*t"],
    mu: QTensor,
    nu: QTensor,
    hyper: steps.Hyper,
    *,
    seed: Word,
    leaves: tuple[Word, Word],
    count: Word,
    chunk: int | None = None,
) -> tuple[Float[Array, "*s"], QTensor, QTensor]:
    """One step of AdamW on one leaf: the formula of `steps.adamw` on every block.

    Args:
      p: parameters; with the states donated to `jax.jit`, they are updated in place.
      g: gradient, of the same shape.
      mu, nu: the averages, encoded at `count`, with one block size.
      hyper: scalars of the step.
      seed: of the dithers.
      leaves: the 32-bit words of mu and nu.
      count: steps done before this one.
      chunk: how many elements are updated at a time, about; None for `CHUNK`, or fewer.

    Returns:
      `(p, mu, nu)`, the averages encoded at `count + 1`.

    Raises:
      TypeError: for parameters or a gradient that are not real and floating.
      ValueError: for states of other shapes, or of two block sizes.

    >>> from jaxlab.kernels.bred_update.codec import encode
    >>> p = jnp.ones((4, 128))
    >>> mu, nu = (encode(jnp.zeros_like(p), QuantSpec(map=x)) for x in ("linear", "sqrt"))
    >>> h = steps.Hyper(lr=0.1, b1=0.9, b2=0.999, correction1=0.1, correction2=0.001)
    >>> p, mu, nu = adamw(p, 2 * p, mu, nu, h, seed=0, leaves=(1, 2), count=0)
    >>> float(p[0, 0]), mu.nbytes * 8 / mu.size
    (0.8999999761581421, 4.25)
    """
    h = hyper
    rooted = nu.spec.nonneg and isinstance(h.eps_root, int | float) and h.eps_root == 0

    def first(states: Sequence[Any]) -> tuple[Any, ...]:
        (g, old_m, zero_m), (also_g, old_v, zero_v) = states
        v = steps.average(h.b2, also_g * also_g, old_v, zero_v)
        return steps.average(h.b1, g, old_m, zero_m), jnp.sqrt(v) if rooted else v

    def second(p: Any, _: Any, m: Any, v: Any) -> tuple[Any, Sequence[Any]]:
        if rooted:
            root = v * (1 / jnp.sqrt(jnp.asarray(h.correction2, jnp.float32)))
        else:
            root = jnp.sqrt(v / h.correction2 + h.eps_root)
        direction = (m / h.correction1) / (root + h.eps)
        return p - h.lr * (direction + h.weight_decay * p), (m, jnp.sqrt(v) if nu.spec.nonneg and not rooted else v)

    names = {"seed": seed, "leaves": leaves, "count": count}
    return _update(p, g, (mu, nu), first, second, **names, chunk=chunk, buffers=2 if rooted else 3)


def lion(
    p: Shaped[Array, "*s"],
    g: Shaped[Array, "*t"],
    mu: QTensor,
    hyper: steps.Hyper,
    *,
    seed: Word,
    leaf: Word,
    count: Word,
    chunk: int | None = None,
) -> tuple[Float[Array, "*s"], QTensor]:
    """One step of Lion on one leaf, by the formula of `steps.lion`; otherwise as `adamw`."""
    h = hyper

    def first(states: Sequence[Any]) -> tuple[Any, ...]:
        ((g, old, zero),) = states
        return jnp.sign(steps.average(h.b1, g, old, zero)), steps.average(h.b2, g, old, zero)

    def second(p: Any, _: Any, direction: Any, m: Any) -> tuple[Any, Sequence[Any]]:
        return p - h.lr * (direction + h.weight_decay * p), (m,)

    names = {"seed": seed, "leaves": (leaf,), "count": count}
    return _update(p, g, (mu,), first, second, **names, chunk=chunk, buffers=2)


def sgdm(
    p: Shaped[Array, "*s"],
    g: Shaped[Array, "*t"],
    trace: QTensor,
    hyper: steps.Hyper,
    *,
    seed: Word,
    leaf: Word,
    count: Word,
    nesterov: bool = False,
    chunk: int | None = None,
) -> tuple[Float[Array, "*s"], QTensor]:
    """One step of SGD with momentum on one leaf, by the formula of `steps.sgdm`; otherwise as `adamw`."""
    h = hyper

    def first(states: Sequence[Any]) -> tuple[Any, ...]:
        ((g, old, zero),) = states
        return (g + (h.b1 * old + zero),)

    def second(p: Any, g: Any, t: Any) -> tuple[Any, Sequence[Any]]:
        return p - h.lr * (g + h.b1 * t if nesterov else t), (t,)

    names = {"seed": seed, "leaves": (leaf,), "count": count}
    return _update(p, g, (trace,), first, second, **names, chunk=chunk, buffers=1)
