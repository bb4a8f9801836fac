"""The fused step as a Pallas kernel for GPUs: one pass over a leaf, in place.

The kernel is written for the Triton backend of Pallas. A program updates R blocks as one tile `[R, 8 w]`, w the
smallest power of two that is not below B / 8: a block of any size is cut into eighths, the parts of the 3-bit format,
and each is padded to w. Triton cannot cut a tile that is in registers, so every element addresses the byte that holds
its code (a byte is read twice or more, from the cache) and shifts it, and codes are packed by a sum over the parts of
a block, whose bits do not overlap. A short block at the end of every row is updated by a second call. Both calls
update the arrays in place.

Division and square root are the GPU's fast ones (2 ulp), and products may be fused with sums. New parameters and
scales can therefore differ from those of the XLA path in their last bits, and codes where a value lies within such a
difference of a boundary between two codes. Dither, unpacking and decoding are exact, so every path decodes to the
same values what this one has encoded.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8, UInt32

from jaxlab.kernels.bred_update import numerics, pallas_common, steps
from jaxlab.kernels.bred_update.codec import QTensor, QuantSpec
from jaxlab.kernels.bred_update.pallas_common import Word

DTYPES = ("float32", "bfloat16", "float16")
TILE = 1024  # elements of a program: 8 a thread
WARPS = 4
OUTSIDE = 2**30  # a column that no array has; what a masked element addresses


@dataclasses.dataclass(frozen=True)
class _Part:
    """The blocks of one size of every row: all full ones, or the short one.

    Attributes:
      rows: of the arrays.
      row_blocks: blocks of a row, of every size.
      first: the first of these in a row.
      blocks: how many of them a row has.
      block: elements from one to the next.
      length: elements of each.
    """

    rows: int
    row_blocks: int
    first: int
    blocks: int
    block: int
    length: int

    @property
    def eighth(self) -> int:
        """Elements of a part of a block."""
        return -(-self.length // 8)

    @property
    def wide(self) -> int:
        """Elements of a part in a tile."""
        return pl.next_power_of_2(self.eighth)

    @property
    def padded(self) -> bool:
        """Whether a tile has columns that are no elements of a block."""
        return 8 * self.wide != self.length

    @property
    def total(self) -> int:
        """Blocks of this size of the whole leaf."""
        return self.rows * self.blocks

    @property
    def tile(self) -> int:
        """R, blocks of a program."""
        return min(max(TILE // (8 * self.wide), 1), pl.next_power_of_2(self.total))


def _parts(layouts: pallas_common.Layouts) -> list[_Part]:
    rows, blocks, block = layouts.rows, layouts.blocks, layouts.block
    full = _Part(rows, blocks, 0, layouts.full, block, block)
    short = _Part(rows, blocks, layouts.full, 1, block, layouts.tail)
    return [full] * (layouts.full > 0) + [short] * (layouts.tail > 0)


def _planes(bits: int) -> list[tuple[int, int, int]]:
    """(bits, lowest bit, first byte in eighths of a block) of every plane of the packed format."""
    return {8: [(8, 0, 0)], 4: [(4, 0, 0)], 3: [(2, 0, 0), (1, 2, 2)]}[bits]


def _kernel(words, scalars, p, g, *refs, step: pallas_common.Step, specs: Sequence[QuantSpec], part: _Part) -> None:
    """References: inputs p, g, (codes, scale) a state; outputs p, (codes, scale) a state. All of whole arrays."""
    count = len(specs)
    states, p_out, outs = refs[: 2 * count], refs[2 * count], refs[2 * count + 1 :]
    h = steps.Hyper(*(scalars[i] for i in range(len(steps.Hyper._fields))))
    number = pl.program_id(0) * part.tile + jax.lax.iota(jnp.int32, part.tile)
    real = number < part.total
    row, place = number, jnp.full_like(number, part.first)
    if part.blocks > 1:
        row = jax.lax.div(number, jnp.int32(part.blocks))
        place = place + jax.lax.rem(number, jnp.int32(part.blocks))
    index = row.astype(jnp.uint32) * jnp.uint32(part.row_blocks) + place.astype(jnp.uint32)

    element, keep = _columns(8, real, part)
    if part.length % 8:
        keep = keep & (element < part.length)[None, :]
    at = functools.partial(_address, row, part=part)
    here = at(place * part.block, element, keep)
    moments, tiles, dithers = [], [], []
    for i, spec in enumerate(specs):
        codes = _unpack(states[2 * i], spec.bits, at, place, real, part)
        scale = plgpu.load(states[2 * i + 1].at[row, place], mask=real, other=0)
        moments.append(steps.Moment(codes, scale[:, None]))
        # Blocks that do not exist are read as zeros and not stored: only elements within a block need be told apart.
        tiles.append(pallas_common.tile_spec(spec, keep if part.padded else None, bytewise=True))
        pair = pallas_common.dither_pair(spec, (words[2 * i], words[2 * i + 1]), index)
        dithers.append(tuple(u[:, None] for u in pair))
    new_p, *moments = step(
        plgpu.load(p.at[here], mask=keep, other=0),
        plgpu.load(g.at[here], mask=keep, other=0),
        moments,
        dithers,
        h,
        tiles,
    )
    plgpu.store(p_out.at[here], new_p, mask=keep)
    for i, (spec, moment) in enumerate(zip(specs, moments, strict=True)):
        _pack(outs[2 * i], moment.words, spec.bits, at, place, real, part)
        scale_out = outs[2 * i + 1]
        scale = moment.scale.reshape(part.tile).astype(scale_out.dtype)
        plgpu.store(scale_out.at[row, place], scale, mask=real)


def _columns(
    count: int, real: Bool[Array, "r"], part: _Part, repeat: int = 1
) -> tuple[Int32[Array, "e"], Bool[Array, "r k"]]:
    """Of the columns of a tile that holds `count` eighths, `repeat` times: their places, and which are no padding."""
    lane = jax.lax.iota(jnp.int32, count * repeat * part.wide)
    # The compiler sees through remainders, and then loads neighbours together; it does not through masks and shifts.
    lane = jax.lax.rem(lane, jnp.int32(count * part.wide)) if repeat > 1 else lane
    if part.wide == part.eighth:
        return lane, real[:, None]
    inside = jax.lax.rem(lane, jnp.int32(part.wide))
    places = jax.lax.div(lane, jnp.int32(part.wide)) * part.eighth + inside
    return places, real[:, None] & (inside < part.eighth)[None, :]


def _address(
    row: Int32[Array, "r"],
    start: Int32[Array, "r"],
    column: Int32[Array, "e"],
    mask: Bool[Array, "r k"],
    *,
    part: _Part,
) -> tuple[Int32[Array, "r e"], Int32[Array, "r e"]]:
    """Where the elements of a tile lie in an array: rows and columns."""
    shape = (row.shape[0], column.shape[0])
    columns = start[:, None] + column[None, :]
    if part.wide != part.eighth:
        # Padding must not share an address with an element: when interpreted, a masked store writes the old value.
        columns = jnp.where(mask, columns, OUTSIDE)
    return jnp.broadcast_to(row[:, None], shape), columns


def _byte_start(place: Int32[Array, "r"], bits: int, part: _Part) -> Int32[Array, "r"]:
    return place * numerics.packed_size(part.block, bits)


def _unpack(
    ref: Any, bits: int, at: Any, place: Int32[Array, "r"], real: Bool[Array, "r"], part: _Part
) -> UInt8[Array, "r e"]:
    """The codes of a tile, a byte each."""
    eighth = jax.lax.div(jax.lax.iota(jnp.int32, 8 * part.wide), jnp.int32(part.wide))
    start, codes = _byte_start(place, bits, part), None
    for width, low, first in _planes(bits):
        # A plane packs 8 / width parts of the block over each other, each of `width` eighths.
        byte, mask = _columns(width, real, part, 8 // width)
        shift = jax.lax.div(eighth, jnp.int32(width)) * width
        words = plgpu.load(ref.at[at(start, first * part.eighth + byte, mask)], mask=mask, other=0).astype(jnp.int32)
        plane = ((words >> shift[None, :]) & ((1 << width) - 1)) << low
        codes = plane if codes is None else codes | plane
    return codes.astype(jnp.uint8)


def _pack(
    ref: Any,
    codes: UInt8[Array, "r e"],
    bits: int,
    at: Any,
    place: Int32[Array, "r"],
    real: Bool[Array, "r"],
    part: _Part,
) -> None:
    """Stores the codes of a tile."""
    start = _byte_start(place, bits, part)
    codes = codes.astype(jnp.int32)
    for width, low, first in _planes(bits):
        over = 8 // width
        tile = ((codes >> low) & ((1 << width) - 1)).reshape(part.tile, over, width * part.wide)
        shift = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 1) * width
        words = jnp.sum(tile << shift, axis=1, dtype=jnp.int32) if over > 1 else tile.reshape(part.tile, -1)
        byte, mask = _columns(width, real, part)
        plgpu.store(ref.at[at(start, first * part.eighth + byte, mask)], words.astype(jnp.uint8), mask=mask)


def _run(
    step: pallas_common.Step,
    specs: tuple[QuantSpec, ...],
    layouts: pallas_common.Layouts,
    words: UInt32[Array, "w"],
    scalars: Float32[Array, "h"],
    p: Float[Array, "r n"],
    g: Float[Array, "r n"],
    states: Sequence[Array],
    *,
    interpret: bool,
) -> Sequence[Array]:
    shapes = [x.shape for x in (p, *states)]
    if layouts.tail == 0:
        # One block a row costs nothing here, and spares the kernel a division.
        blocks = layouts.rows * layouts.full
        layouts = pallas_common.Layouts(blocks, layouts.block, layouts.block)
        p, g = p.reshape(blocks, -1), g.reshape(blocks, -1)
        states = [x.reshape(blocks, -1) for x in states]
    outs = [p, *states]
    for part in _parts(layouts):
        outs = pl.pallas_call(
            functools.partial(_kernel, step=step, specs=specs, part=part),
            grid=(pl.cdiv(part.total, part.tile),),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
            # Inputs 2 and 4, 5, ... are the parameters and the states; input 3 is the gradient.
            input_output_aliases={2: 0} | {4 + i: 1 + i for i in range(len(states))},
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
            name="bred_update",
            interpret=interpret,
        )(words, scalars, outs[0], g, *outs[1:])
    return [x.reshape(shape) for x, shape in zip(outs, shapes, strict=True)]


def adamw(
    p: Float[Array, "*s"],
    g: Float[Array, "*s"],
    mu: QTensor,
    nu: QTensor,
    hyper: steps.Hyper,
    *,
    seed: Word,
    leaves: tuple[Word, Word],
    count: Word,
    interpret: bool = False,
) -> tuple[Float[Array, "*s"], QTensor, QTensor]:
    """One step of AdamW on one leaf: the formula of `steps.adamw` on every block.

    Args:
      p: parameters, float32, bfloat16 or float16; with the states donated to `jax.jit`, they are updated in place.
      g: gradient, of the same shape.
      mu, nu: the averages, encoded at `count`, with one block size, and dithered or rounded to nearest.
      hyper: scalars of the step.
      seed: of the dithers.
      leaves: the 32-bit words of mu and nu.
      count: steps done before this one.
      interpret: whether to run the kernel as XLA operations, on any device.

    Returns:
      `(p, mu, nu)`, the averages encoded at `count + 1`.

    Raises:
      TypeError: for other dtypes.
      ValueError: for states of other shapes or specifications.
    """
    run = functools.partial(_run, interpret=interpret)
    step = pallas_common.adamw_step
    return pallas_common.update(run, step, p, g, (mu, nu), hyper, DTYPES, seed=seed, leaves=leaves, count=count)


def lion(
    p: Float[Array, "*s"],
    g: Float[Array, "*s"],
    mu: QTensor,
    hyper: steps.Hyper,
    *,
    seed: Word,
    leaf: Word,
    count: Word,
    interpret: bool = False,
) -> tuple[Float[Array, "*s"], QTensor]:
    """One step of Lion on one leaf, by `steps.lion`; arguments, result and errors as those of `adamw`."""
    run = functools.partial(_run, interpret=interpret)
    step = pallas_common.lion_step
    return pallas_common.update(run, step, p, g, (mu,), hyper, DTYPES, seed=seed, leaves=(leaf,), count=count)


def sgdm(
    p: Float[Array, "*s"],
    g: Float[Array, "*s"],
    trace: QTensor,
    hyper: steps.Hyper,
    *,
    seed: Word,
    leaf: Word,
    count: Word,
    nesterov: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "*s"], QTensor]:
    """One step of SGD with momentum on one leaf, by `steps.sgdm`; otherwise as `adamw`."""
    run = functools.partial(_run, interpret=interpret)
    step = functools.partial(pallas_common.sgdm_step, nesterov=nesterov)
    return pallas_common.update(run, step, p, g, (trace,), hyper, DTYPES, seed=seed, leaves=(leaf,), count=count)
