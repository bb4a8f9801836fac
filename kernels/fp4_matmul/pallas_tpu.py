"""Products with packed weights as a Pallas kernel for TPUs; `fp4_matmul`, and what the other products are made of.

A program takes `bn` rows of the weights and `bk` bytes of each, decodes one plane of codes after the other, and adds
its product with the matching stride of x to an accumulator in VMEM. The scale of a byte's block comes to its lane
through a product with a matrix of zeros and ones, which is exact: lanes cannot be repeated otherwise.

    decode   M < 128: one tile of rows, so that every weight is read once; the grid goes over N and K
    prefill  M >= 128: tiles of 128 rows

K is cut in the same way in both, so that a row's sum has one order. x and, where K is no multiple of a tile, the
weights are padded with zeros; a tile of N may end outside of the arrays.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float32, Shaped, UInt8

from jaxlab.kernels.lowbit import matmul_common as common
from jaxlab.kernels.lowbit import packing

PREFILL = 128  # rows of x from which they are cut into tiles of as many
BN = 256  # rows of the weights of a tile
# Bytes of a row of a tile: that of the scales, an eighth or a sixteenth of it, must have a multiple of 128 lanes, too.
BK = {None: 512, 16: 1024, 32: 2048}
VMEM = 48 * 2**20


def _grow(rows: int, columns: int, each: int) -> Bool[Array, "r c"]:
    """One where column // each == row: a product with it repeats every column `each` times."""
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
    return (column >= row * each) & (column < (row + 1) * each)


def _repeat(x: Float32[Array, "r c"], columns: int, each: int) -> Float32[Array, "r d"]:
    """Every column `each` times; exact for values that are exact in bfloat16."""
    grow = _grow(x.shape[1], columns, each).astype(jnp.bfloat16)
    return jax.lax.dot_general(
        x.astype(jnp.bfloat16), grow, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )


def _signs(words: UInt8[Array, "r b"], n: int) -> Float32[Array, "r n"]:
    """n signs of every row, unpacked in their order."""
    repeated = _repeat(words.astype(jnp.int32).astype(jnp.float32), n, 8).astype(jnp.int32)
    place = jax.lax.broadcasted_iota(jnp.int32, repeated.shape, 1) & 7
    return (1 - 2 * ((repeated >> place) & 1)).astype(jnp.float32)


def _kernel(*refs: Any, layout: common.Layout, factor: str, steps: int, extra: bool) -> None:
    """References: [factor], x [p, bm, bk], words [bn, bk], [scales], [t [bm, r], u [1, r, bn / 8]]; y; accumulator."""
    rest = list(refs)
    scale = None if factor == "none" else rest.pop(0)
    x, words = rest.pop(0), rest.pop(0)
    scales = None if layout.block is None else rest.pop(0)
    t, u = (rest.pop(0), rest.pop(0)) if extra else (None, None)
    y, acc = rest
    dtype, total, precision = common.operand(x.dtype)
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        acc[...] = jnp.zeros(acc.shape, total)

    block = None
    if scales is not None:
        block = _repeat(layout.scales(scales[...]), words.shape[1], layout.block_bytes)
    for i, codes in enumerate(packing.planes(words[...], layout.bits)):
        w = layout.values(codes)
        w = w if block is None else w * block
        # Integers reach bfloat16 through float32.
        w = w.astype(dtype) if jnp.issubdtype(dtype, jnp.integer) else w.astype(jnp.float32).astype(dtype)
        acc[...] += jax.lax.dot_general(
            x[i], w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=total
        )

    @pl.when(step == steps - 1)
    def _() -> None:
        out: Any = acc[...]
        if scale is not None:
            out = out * (scale[0] if factor == "scalar" else scale[...])
        if t is not None and u is not None:
            out = out + jax.lax.dot_general(
                t[...],
                _signs(u[0], y.shape[1]),
                (((1,), (0,)), ((), ())),
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
        y[...] = out.astype(y.dtype)


def _pad(x: Shaped[Array, "..."], axis: int, multiple: int) -> Shaped[Array, "..."]:
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if a == axis % x.ndim else 0) for a in range(x.ndim)]) if missing else x


def packed_matmul(
    x: Shaped[Array, "m k"],
    words: UInt8[Array, "n b"],
    scales: UInt8[Array, "n c"] | None,
    factor: Float32[Array, "..."] | None,
    *,
    layout: common.Layout,
    out_dtype: Any,
    interpret: bool,
    extra: tuple[Float32[Array, "m r"], UInt8[Array, "r a"]] | None = None,
) -> Shaped[Array, "m n"]:
    """round(factor * x W' + t U') for W of any layout.

    Args:
      x: float32 or bfloat16, or int8 for ternary and sign weights.
      words, scales: packed weights and the bytes of their blocks' scales.
      factor: `[]` or `[N, 1]`; None for int32 results.
      layout: of the weights.
      out_dtype: of the result.
      interpret: whether to run the kernel as XLA operations.
      extra: (t, u) of a correction, t float32, u the packed signs of U' along N.
    """
    m, (n, width) = x.shape[0], words.shape
    if 0 in (m, n, width):
        return jnp.zeros((m, n), out_dtype)
    native = 32 // x.dtype.itemsize  # rows of a native tile
    bm = PREFILL if m >= PREFILL else -(-m // native) * native
    bn, bk = min(BN, n), min(BK[layout.block], width)
    planes = _pad(_pad(common.planes_of(x, layout.per_byte), 2, bk), 1, bm)
    words = _pad(words, 1, bk)
    rows, steps = planes.shape[1], words.shape[1] // bk
    inputs, specs, kind = [], [], "none"
    if factor is not None:
        kind = "row" if factor.ndim else "scalar"
        inputs.append(factor.reshape(1, n) if factor.ndim else factor.reshape(1))
        tile = pl.BlockSpec((1, bn), lambda i, j, k: (0, j))
        specs.append(tile if factor.ndim else pl.BlockSpec(memory_space=pltpu.SMEM))
    inputs += [planes, words]
    specs += [
        pl.BlockSpec((layout.per_byte, bm, bk), lambda i, j, k: (0, i, k)),
        pl.BlockSpec((bn, bk), lambda i, j, k: (j, k)),
    ]
    if scales is not None:
        each = bk // layout.block_bytes
        inputs.append(_pad(scales, 1, each))
        specs.append(pl.BlockSpec((bn, each), lambda i, j, k: (j, k)))
    if extra is not None:
        t, u = extra
        # A tile of u would have fewer than 128 lanes: an axis of its own for the tiles lets it.
        u = _pad(u, 1, -(-bn // 8))
        u = jnp.moveaxis(u.reshape(u.shape[0], -1, -(-bn // 8)), 1, 0)
        inputs += [_pad(t, 0, bm), u]
        specs += [
            pl.BlockSpec((bm, t.shape[1]), lambda i, j, k: (i, 0)),
            pl.BlockSpec((1, *u.shape[1:]), lambda i, j, k: (j, 0, 0)),
        ]
    y = pl.pallas_call(
        functools.partial(_kernel, layout=layout, factor=kind, steps=steps, extra=extra is not None),
        grid=(rows // bm, pl.cdiv(n, bn), steps),
        in_specs=specs,
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)),
        out_shape=common.like((rows, n), out_dtype, *inputs),
        scratch_shapes=[pltpu.VMEM((bm, bn), common.operand(x.dtype)[1])],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        name=f"{layout.name}_matmul",
        interpret=interpret,
    )(*inputs)
    return y[:m]


matmul = functools.partial(common.fp4_by_kernel, packed_matmul)
