"""The fused step as a Pallas kernel for TPUs: one pass over a leaf, in place.

The arrays keep the shapes that they have outside, seen as `[rows, n]`, `[rows, bytes a row]` and `[rows, blocks a
row]`: another view, such as one block a row, would make XLA copy them, because TPU arrays lie in tiles of 8 x 128, and
a scale a row would fill 128 lanes. A program takes some rows of a tile of columns and goes through the blocks of these
columns in groups that start at a multiple of 128 lanes. All dithers of a tile are computed at once, with rows and
blocks as its axes; the scalars lie in SMEM.

The arithmetic is that of the XLA path but for the rounding of divisions and roots and the fusion of products with
sums, which are the compiler's: new parameters and scales can differ in their last bits, and codes where a value lies
within such a difference of a boundary between two codes. Dither, unpacking and decoding are exact.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, UInt32

from jaxlab.kernels.bred_update import numerics, pallas_common, steps
from jaxlab.kernels.bred_update.codec import QTensor, QuantSpec
from jaxlab.kernels.bred_update.pallas_common import Word

DTYPES = ("float32", "bfloat16")
LANES = 128
CHUNK = 32  # rows worked on at a time: a native tile of uint8, and what the rows of a tile are a multiple of
WHOLE_ROW = 8192  # elements up to which a tile holds whole rows
TILE = 2**17  # elements of a tile where it can be chosen: half a megabyte of float32
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class _Grid:
    """How a leaf is cut into tiles.

    Attributes:
      layouts: of its rows.
      sizes: bytes of a full block, one a state.
      row_tile: rows of a tile.
      blocks: blocks of a row of a tile.
      columns: tiles beside each other.
    """

    layouts: pallas_common.Layouts
    sizes: tuple[int, ...]
    row_tile: int
    blocks: int
    columns: int

    @property
    def chunk(self) -> int:
        """Rows worked on at a time."""
        return CHUNK if self.row_tile % CHUNK == 0 else self.row_tile

    @property
    def group(self) -> int:
        """Blocks after which parameters and codes are at a multiple of 128 lanes again."""
        return math.lcm(*(LANES // math.gcd(LANES, size) for size in (self.layouts.block, *self.sizes)))

    def widths(self, row_bytes: Sequence[int]) -> tuple[int, ...]:
        """Elements of a row of a tile: of the parameters, then of codes and scale of every state."""
        if self.columns == 1:
            states = [(size, self.blocks) for size in row_bytes]
            return self.layouts.n, *(x for pair in states for x in pair)
        states = [(self.blocks * size, self.blocks) for size in self.sizes]
        return self.blocks * self.layouts.block, *(x for pair in states for x in pair)


def _grid(layouts: pallas_common.Layouts, specs: Sequence[QuantSpec]) -> _Grid:
    whole = layouts.n <= WHOLE_ROW or layouts.blocks <= LANES
    blocks = layouts.blocks if whole else LANES  # the last axis of a tile of scales: all, or a multiple of 128
    width = layouts.n if whole else blocks * layouts.block
    rows = layouts.rows
    if rows > CHUNK:
        rows = max(min(TILE // width, rows) // CHUNK, 1) * CHUNK
    sizes = tuple(numerics.packed_size(layouts.block, spec.bits) for spec in specs)
    return _Grid(layouts, sizes, rows, blocks, 1 if whole else pl.cdiv(layouts.blocks, blocks))


def _kernel(words, scalars, p, g, *refs, step: pallas_common.Step, specs: Sequence[QuantSpec], grid: _Grid) -> None:
    """References: inputs p, g, (codes, scale) a state; outputs p, (codes, scale) a state."""
    count, layouts, block = len(specs), grid.layouts, grid.layouts.block
    states, p_out, outs = refs[: 2 * count], refs[2 * count], refs[2 * count + 1 :]
    h = steps.Hyper(*(scalars[i] for i in range(len(steps.Hyper._fields))))
    first_row, column = pl.program_id(0) * grid.row_tile, pl.program_id(1)
    last_full = layouts.full - (grid.columns - 1) * grid.blocks  # full blocks of the last tile of a row
    lane = jax.lax.broadcasted_iota(jnp.int32, (grid.chunk, grid.blocks), 1)

    def pick(x: Float32[Array, "r c"], i: Any) -> Float32[Array, "r 1"]:
        """Column i, which need not be known when compiling; the sum has one term, so it is exact."""
        return jnp.sum(jnp.where(lane == i, x, jnp.float32(0)), axis=-1, keepdims=True)

    def rows_from(start: Any) -> None:
        rows = pl.ds(start, grid.chunk)
        row = jax.lax.broadcasted_iota(jnp.int32, (grid.chunk, grid.blocks), 0) + (first_row + start)
        index = row.astype(jnp.uint32) * jnp.uint32(layouts.blocks) + (lane + column * grid.blocks).astype(jnp.uint32)
        pairs = [
            pallas_common.dither_pair(spec, (words[2 * i], words[2 * i + 1]), index) for i, spec in enumerate(specs)
        ]
        scales = [states[2 * i + 1][rows, :].astype(jnp.float32) for i in range(count)]

        def blocks_from(first: Any, lengths: Sequence[int], new_scales: Sequence[Any]) -> tuple[Any, ...]:
            """Updates neighbouring blocks of these numbers of elements; the first lies at a multiple of 128 lanes."""
            padded = [-(-length // 8) * 8 for length in lengths]

            def lanes(size: int, total: int) -> Any:
                start = first * size
                return pl.ds(start if isinstance(first, int) else pl.multiple_of(start, LANES), total)

            here = lanes(block, sum(lengths))
            sizes = [[numerics.packed_size(length, spec.bits) for length in padded] for spec in specs]
            at = [lanes(grid.sizes[i], sum(sizes[i])) for i in range(count)]
            p_all, g_all = p[rows, here], g[rows, here]
            words_all = [states[2 * i][rows, at[i]] for i in range(count)]
            new_p, new_words, offsets = [], [[] for _ in specs], [0] * count
            for j, (length, pad) in enumerate(zip(lengths, padded, strict=True)):
                cut = functools.partial(_cut, start=j * block, length=length, pad=pad)
                moments = []
                for i in range(count):
                    end = offsets[i] + sizes[i][j]
                    moments.append(steps.Moment(words_all[i][:, offsets[i] : end], pick(scales[i], first + j)))
                    offsets[i] = end
                keep = None
                if length != pad:
                    keep = jax.lax.broadcasted_iota(jnp.int32, (grid.chunk, pad), 1) < length
                tiles = [pallas_common.tile_spec(spec, keep) for spec in specs]
                dithers = [tuple(pick(u, first + j) for u in pair) for pair in pairs]
                new, *moments = step(cut(p_all), cut(g_all), moments, dithers, h, tiles)
                new_p.append(new[:, :length])
                for i, moment in enumerate(moments):
                    new_words[i].append(moment.words)
                new_scales = [
                    jnp.where(lane == first + j, moment.scale, old)
                    for old, moment in zip(new_scales, moments, strict=True)
                ]
            p_out[rows, here] = _join(new_p)
            for i in range(count):
                outs[2 * i][rows, at[i]] = _join(new_words[i])
            return tuple(new_scales)

        def store(new_scales: Sequence[Any]) -> None:
            for i, scale in enumerate(new_scales):
                ref = outs[2 * i + 1]
                ref[rows, :] = scale.astype(ref.dtype)

        group = grid.group

        def body(k: Any, new_scales: tuple[Any, ...]) -> tuple[Any, ...]:
            return blocks_from(k * group, [block] * group, new_scales)

        new_scales, groups = tuple(scales), last_full // group
        if grid.columns > 1:
            bound = jnp.where(column == grid.columns - 1, groups, grid.blocks // group)
            new_scales = jax.lax.fori_loop(0, bound, body, new_scales)
        elif groups > 1:
            new_scales = jax.lax.fori_loop(0, groups, body, new_scales)
        elif groups == 1:
            new_scales = blocks_from(0, [block] * group, new_scales)
        rest = [block] * (last_full % group) + [layouts.tail] * (layouts.tail > 0)
        if not rest:
            store(new_scales)
        elif grid.columns == 1:
            store(blocks_from(groups * group, rest, new_scales))
        else:
            store(new_scales)

            @pl.when(column == grid.columns - 1)
            def _() -> None:
                store(blocks_from(groups * group, rest, new_scales))

    if grid.row_tile == grid.chunk:
        rows_from(0)
    else:
        jax.lax.fori_loop(
            0,
            grid.row_tile // grid.chunk,
            lambda i, _: rows_from(pl.multiple_of(i * grid.chunk, grid.chunk)),
            None,
        )


def _cut(x: Float[Array, "r l"], *, start: int, length: int, pad: int) -> Float[Array, "r b"]:
    """`length` columns, with zeros to `pad` columns behind."""
    x = x[:, start : start + length]
    if length == pad:
        return x
    return jnp.concatenate([x, jnp.zeros((x.shape[0], pad - length), x.dtype)], axis=-1)


def _join(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


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
    grid = _grid(layouts, specs)
    widths = grid.widths([codes.shape[1] for codes in states[::2]])
    tiles = [pl.BlockSpec((grid.row_tile, width), lambda i, j: (i, j)) for width in widths]
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    outs = [p, *states]
    # Inputs 2 and 4, 5, ... are the parameters and the states; input 3 is the gradient.
    aliases = {2: 0} | {4 + i: 1 + i for i in range(len(states))}
    tile_bytes = sum(
        grid.row_tile * width * x.dtype.itemsize
        for width, x in zip((widths[0], *widths, *widths), (g, *outs, *outs), strict=True)
    )
    return pl.pallas_call(
        functools.partial(_kernel, step=step, specs=specs, grid=grid),
        grid=(pl.cdiv(layouts.rows, grid.row_tile), grid.columns),
        in_specs=[smem, smem, tiles[0], *tiles],
        out_specs=tiles,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            # Two buffers of every tile, and room for what does not fit into registers.
            vmem_limit_bytes=max(16 * MIB, 2 * tile_bytes + 4 * MIB),
        ),
        name="bred_update",
        interpret=interpret,
    )(words, scalars, p, g, *states)


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
      p: parameters, float32 or bfloat16; with the states donated to `jax.jit`, they are updated in place.
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
