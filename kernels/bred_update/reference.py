"""The fused step in plain XLA: parameters and packed states of one leaf, updated a chunk of blocks at a time.

States are decoded, updated and encoded in chunks of at most `CHUNK` elements, in place where the arguments are donated:
a float32 state exists for one chunk only. The codes and scales are, bit for bit, those of `codec.decode`, `steps` and
`codec.encode` on the whole leaf. What makes it fast on a CPU:

- Blocks are seen in parts, `[blocks, 2, B/2]` at 4 bits: the parts that share a byte are an axis of their own, so that
  unpacking is a broadcast and a shift, packing an "or" of two slices, and the innermost loop runs along the elements.
- A chunk takes two stages. The first computes the new averages into buffers that stay in the cache. Without the
  boundary XLA would compute them again for every reader, and copy the codes that are read and written in one loop.
  XLA for CPUs drops `optimization_barrier` before it fuses; a branch on something it cannot know does bound the stages.
- Kernels over a large chunk are split over all cores; small chunks would lose more in starting them.
- Roots are taken once: they are what is encoded, and sqrt(v / c) = sqrt(v) / sqrt(c). For `eps_root` other than 0 the
  second moment itself is kept, and its root taken twice.
- The largest absolute value of a block is found among the bits of its elements, as integers, which have one order.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8, UInt32

from jaxlab.kernels.bred_update import codec, numerics, steps
from jaxlab.kernels.bred_update.codec import QTensor, QuantSpec

Word = int | Int[Array, ""] | UInt32[Array, ""]
CHUNK = 2**19  # elements: the float32 buffers of a chunk take 8 bytes an element
PLANES = {8: ((8, 0),), 4: ((4, 0),), 3: ((2, 0), (1, 2))}  # bits -> (bits, lowest bit) of the planes that pack writes


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
      axes: number of axes of size 2 that a block is seen with.
    """

    rows: int
    row_blocks: int
    first: int
    blocks: int
    stride: int
    length: int
    row: int
    axes: int

    @property
    def size(self) -> int:
        """Elements that are packed: a multiple of 8."""
        return -(-self.length // 8) * 8

    @property
    def view(self) -> tuple[int, ...]:
        """Shape of a block."""
        return (2,) * self.axes + (self.size >> self.axes,)

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


def _axes(bits: int) -> int:
    """Base-2 logarithm of the largest number of codes that share a byte."""
    return max(int(math.log2(8 // width)) for width, _ in PLANES[bits])


def _parts(shape: tuple[int, ...], specs: Sequence[QuantSpec]) -> list[_Part]:
    *lead, n = shape or (1,)
    rows, block = math.prod(lead), specs[0].block_size
    axes = max(_axes(spec.bits) for spec in specs)
    full, tail = divmod(n, block)
    blocks = full + (tail > 0)
    if blocks == 1 and n % 8 == 0:
        return [_Part(1, rows, 0, rows, n, n, rows * n, axes)]
    if not tail:
        return [_Part(1, rows * full, 0, rows * full, block, block, rows * n, axes)]
    short = _Part(rows, blocks, full, 1, block, tail, n, axes)
    return [_Part(rows, blocks, 0, full, block, block, n, axes), short] if full else [short]


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


class _Window:
    """One tile of a leaf: reads and writes its blocks as `[blocks, ...]`."""

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

    def elements(self, x: Float[Array, "..."]) -> Float32[Array, "n *view"]:
        """Of parameters or gradient, zeros behind the last of a short block."""
        part = self.part
        if part.flat:
            return jax.lax.dynamic_slice_in_dim(x, self.block, self.blocks).astype(jnp.float32)
        corner = self._corner(part.first * part.stride, part.stride)
        rows = jax.lax.dynamic_slice(x, corner, (self.rows, self.blocks * part.length)).astype(jnp.float32)
        rows = jnp.pad(rows.reshape(self.count, part.length), ((0, 0), (0, part.size - part.length)))
        return rows.reshape(self.count, *part.view)

    def write_elements(self, x: Float[Array, "..."], new: Float32[Array, "n *view"]) -> Float[Array, "..."]:
        """The parameters with these blocks replaced."""
        part, new = self.part, new.astype(x.dtype)
        if part.flat:
            return jax.lax.dynamic_update_slice_in_dim(x, new, self.block, 0)
        new = new.reshape(self.count, part.size)[:, : part.length].reshape(self.rows, -1)
        return jax.lax.dynamic_update_slice(x, new, self._corner(part.first * part.stride, part.stride))

    def scale(self, x: Float[Array, "..."]) -> Float[Array, "n"]:
        """Of the blocks."""
        if self.part.flat:
            return jax.lax.dynamic_slice_in_dim(x, self.block, self.blocks)
        return jax.lax.dynamic_slice(x, self._corner(self.part.first, 1), (self.rows, self.blocks)).reshape(-1)

    def write_scale(self, x: Float[Array, "..."], new: Float32[Array, "n"]) -> Float[Array, "..."]:
        """The scales with those of the blocks replaced."""
        new = new.astype(x.dtype)
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

    def dither(self, spec: QuantSpec, word: UInt32[Array, ""], encode: bool) -> Float32[Array, "n *m"]:
        """u of the blocks; for stochastic rounding one an element to encode with."""
        part = self.part
        if spec.rounding == "nearest" or (spec.rounding == "stochastic" and not encode):
            return jnp.zeros((self.count,), jnp.float32)
        row = jax.lax.iota(jnp.uint32, self.rows) + jnp.asarray(self.row, jnp.uint32)
        place = jax.lax.iota(jnp.uint32, self.blocks) + jnp.asarray(part.first + self.block, jnp.uint32)
        if spec.rounding == "dither":
            index = (row * jnp.uint32(part.row_blocks))[:, None] + place
            return numerics.dither(word, index.reshape(self.count))
        start = (row * jnp.uint32(part.row))[:, None] + place * jnp.uint32(part.stride)
        index = start.reshape(-1, 1) + jax.lax.iota(jnp.uint32, part.size)
        u = numerics.dither(word, index).reshape(self.count, *part.view)
        return u if self.exists is None else jnp.where(self.exists, u, jnp.float32(0))

    @property
    def exists(self) -> np.ndarray | None:
        """Which elements of a block do; None for all."""
        if self.part.length == self.part.size:
            return None
        return (np.arange(self.part.size) < self.part.length).reshape(self.part.view)

    def per_block(self, x: Float32[Array, "n *m"]) -> Float32[Array, "n ..."]:
        """One number a block, in a form that broadcasts against elements."""
        return x.reshape(self.count, *(1,) * (self.part.axes + 1)) if x.ndim == 1 else x

    def unpack(self, words: UInt8[Array, "n w"], bits: int) -> Int32[Array, "n *view"]:
        """The codes: `numerics.unpack`, seen in parts."""
        view, at, codes = self.part.view, 0, []
        for width, low in PLANES[bits]:
            shared, size = int(math.log2(8 // width)), self.part.size * width // 8
            shape = (1,) * shared + view[shared:]
            plane = words[:, at : at + size].astype(jnp.int32).reshape(self.count, *shape)
            shift = np.arange(8 // width, dtype=np.int32).reshape(*(2,) * shared, *(1,) * (len(view) - shared)) * width
            codes.append(((plane >> shift) & ((1 << width) - 1)) << low)
            at += size
        return functools.reduce(operator.or_, codes)

    def pack(self, codes: Int32[Array, "n *view"], bits: int) -> list[UInt8[Array, "n _"]]:
        """The planes that `numerics.pack` puts one behind the other."""
        planes = []
        for width, low in PLANES[bits]:
            plane, shared = (codes >> low if low else codes) & ((1 << width) - 1), int(math.log2(8 // width))
            parts = [plane[(slice(None), *index)] for index in itertools.product((0, 1), repeat=shared)]
            words = functools.reduce(operator.or_, (x << (width * i) if i else x for i, x in enumerate(parts)))
            planes.append(words.reshape(self.count, -1).astype(jnp.uint8))
        return planes


def _peak(x: Float32[Array, "n *view"]) -> Float32[Array, "n"]:
    """max|x| of every block; NaN, of whatever sign, where there is one."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    while bits.ndim > 2:
        bits = jnp.maximum(bits[:, 0], bits[:, 1])
    while bits.shape[1] > 16 and bits.shape[1] % 2 == 0:  # halves run along the elements, a reduction across them
        half = bits.shape[1] // 2
        bits = jnp.maximum(bits[:, :half], bits[:, half:])
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=1), jnp.float32)


def _floor(z: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """floor(z) of 0 <= z < 2^8 in the lowest bits: a conversion would check for what an integer cannot hold."""
    return jax.lax.bitcast_convert_type(jnp.floor(z) + jnp.float32(2**23), jnp.int32)


def _stage(known: Any, f: Callable[[], Any]) -> Any:
    """f(), computed once and before everything that uses it; `known` is true, but XLA does not know."""
    return jax.lax.cond(known, f, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f)))


# (g, olds, zeros) -> what the second stage needs, each [blocks, *view] or [blocks, 1, ...].
First = Callable[[Any, Sequence[Any], Sequence[Any]], tuple[Any, ...]]
# (p, g, *first) -> (new p, what is encoded: values, or roots where the map is one of roots).
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
    p: Float[Array, "*s"],
    g: Float[Array, "*s"],
    moments: Sequence[QTensor],
    first: First,
    second: Second,
    *,
    seed: Word,
    leaves: Sequence[Word],
    count: Word,
    chunk: int,
) -> tuple[Any, ...]:
    """One step of one leaf; `first` and `second` are the optimizer's two stages."""
    _check(p, g, moments)
    if p.size == 0:
        return (p, *moments)
    specs, now = [q.spec for q in moments], jnp.asarray(count)
    words = [[numerics.stream(seed, leaf, now + i) for i in (0, 1)] for leaf in leaves]
    parts = _parts(tuple(p.shape), specs)
    known = now >= 0

    def seen(x: Any, width: tuple[int, ...]) -> Any:
        return x.reshape(parts[0].blocks if parts[0].flat else -1, *width)

    flat = parts[0].flat
    wide = parts[0].view if flat else (p.shape[-1] if p.ndim else 1,)
    grad = seen(g, wide)
    states = [x for q in moments for x in (seen(q.codes, (q.codes.size // max(_rows(q, flat), 1),)), q.scale)]
    carry = [seen(p, wide), *states]
    for i in range(2, len(carry), 2):
        carry[i] = carry[i].reshape(-1) if flat else carry[i].reshape(_rows(moments[0], False), -1)

    def tile(part: _Part, tiles: _Tiles, number: Any, carry: Sequence[Any]) -> list[Any]:
        at = _Window(part, tiles, number)
        params, codes, scales = carry[0], carry[1::2], carry[2::2]

        def begin() -> Any:
            olds, zeros = [], []
            for spec, (word, _), c, s in zip(specs, words, codes, scales, strict=True):
                scale = at.per_block(at.scale(s).astype(jnp.float32))
                u = at.per_block(at.dither(spec, word, encode=False))
                found = at.unpack(at.words(c, spec.bits), spec.bits)
                olds.append(
                    numerics.decode(found, scale, u, steps=spec.steps, nonneg=spec.nonneg, variance=spec.variance)
                )
                zeros.append(steps.zero_of(scale))
            new = [at.dither(spec, word, encode=True) for spec, (_, word) in zip(specs, words, strict=True)]
            return first(at.elements(grad), olds, zeros), new

        stored, dithers = _stage(known, begin)
        new_p, values = second(at.elements(params), lambda: at.elements(grad), *stored)
        out = [at.write_elements(params, new_p)]
        for spec, x, u, c, s in zip(specs, values, dithers, codes, scales, strict=True):
            x = x if at.exists is None else jnp.where(at.exists, x, jnp.float32(0))
            scale = numerics.block_scale(_peak(x), jnp.dtype(spec.scale_dtype))
            z = numerics.place(x, at.per_block(scale), at.per_block(u), steps=spec.steps, nonneg=spec.nonneg)
            out += [at.write_words(c, spec.bits, at.pack(_floor(z), spec.bits)), at.write_scale(s, scale)]
        return out

    for part in parts:
        for tiles in _tiles(part.rows, part.blocks, max(chunk // part.size, 1)):
            body = functools.partial(tile, part, tiles)
            number = tiles.down * tiles.across
            carry = jax.lax.fori_loop(0, number, body, carry) if number > 1 else body(0, carry)
    new = [
        dataclasses.replace(q, codes=c.reshape(q.codes.shape), scale=s.reshape(q.scale.shape))
        for q, c, s in zip(moments, carry[1::2], carry[2::2], strict=True)
    ]
    return (carry[0].reshape(p.shape), *new)
