"""Products with packed weights as a Pallas kernel for GPUs; `fp4_matmul`, and what the other products are made of.

The kernel is written for the Triton backend of Pallas. A program computes a tile of y: it goes through K in steps of
`bk` bytes, decodes one plane of codes after the other in registers, and adds its product with the matching stride of x
(on tensor cores for bfloat16 and int8). Every element addresses the byte of its block's scale.

    decode   M < 128: tiles of 16 rows and 32 columns, so that many programs share the weights
    prefill  M >= 128: tiles of 64 rows and columns, 32 for float32

K is cut in the same way in both, so that a row's sum has one order. Nothing is padded: loads and stores are masked.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float32, Int32, Shaped, UInt8

from jaxlab.kernels.lowbit import matmul_common as common
from jaxlab.kernels.lowbit import packing

PREFILL = 128  # rows of x from which tiles are large
DECODE_TILE, PREFILL_TILE = (16, 32), (64, 64)  # rows and columns; tensor cores take 16 rows at least
FLOAT32_TILE = (32, 32)  # of a prefill without tensor cores, which would not fit into registers otherwise
BK = {4: 64, 2: 32, 1: 32}  # bits -> bytes of a row of a step; each plane's product has as many terms
BR = 32  # terms of a step of the correction


def _dot(x: Array, w: Array, x_dtype: Any, transposed: bool = True) -> Array:
    _, total, precision = common.operand(x_dtype)
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(x, w, contract, precision=precision, preferred_element_type=total)


def _load(ref: Any, row: Int32[Array, "r"], column: Int32[Array, "c"], mask: Any, offset: int = 0) -> Array:
    """ref[row + offset, column], zeros where the mask is not set."""
    shape = (row.shape[0], column.shape[0])
    rows = jnp.broadcast_to((row + offset)[:, None], shape)
    return plgpu.load(ref.at[rows, jnp.broadcast_to(column[None, :], shape)], mask=mask, other=0)


def _kernel(*refs: Any, layout: common.Layout, factor: str, tile: tuple[int, int], m: int, extra: bool) -> None:
    """References, all of whole arrays: [factor], x [p * M, b], words [N, b], [scales], [t [M, r], u [r, a]]; y."""
    rest = list(refs)
    scale = None if factor == "none" else rest.pop(0)
    x, words = rest.pop(0), rest.pop(0)
    scales = None if layout.block is None else rest.pop(0)
    t, u = (rest.pop(0), rest.pop(0)) if extra else (None, None)
    (y,) = rest
    (bm, bn), bk, (n, width) = tile, BK[layout.bits], words.shape
    dtype, total, _ = common.operand(x.dtype)
    row = pl.program_id(0) * bm + jax.lax.iota(jnp.int32, bm)
    column = pl.program_id(1) * bn + jax.lax.iota(jnp.int32, bn)
    row_in, column_in = row < m, column < n

    def step(i: Any, acc: Array) -> Array:
        byte = i * bk + jax.lax.iota(jnp.int32, bk)
        inside = byte < width
        x_mask, w_mask = row_in[:, None] & inside[None, :], column_in[:, None] & inside[None, :]
        tile_words = _load(words, column, byte, w_mask)
        block: Any = None
        if scales is not None:
            place = jax.lax.div(byte, jnp.int32(layout.block_bytes))
            block = layout.scales(_load(scales, column, place, w_mask))
        for p, codes in enumerate(packing.planes(tile_words, layout.bits)):
            w = layout.values(codes)
            w = w if block is None else w * block
            # Integers reach bfloat16 through float32.
            w = w.astype(dtype) if jnp.issubdtype(dtype, jnp.integer) else w.astype(jnp.float32).astype(dtype)
            acc = acc + _dot(_load(x, row, byte, x_mask, p * m), w, x.dtype)
        return acc

    out: Any = jax.lax.fori_loop(0, pl.cdiv(width, bk), step, jnp.zeros((bm, bn), total))
    if factor == "scalar":
        out = out * scale[0]
    elif scale is not None:
        out = out * plgpu.load(scale.at[column], mask=column_in, other=0)[None, :]
    if t is not None and u is not None:
        out = out + _correction(t, u, row, column, row_in, column_in)
    shape = (bm, bn)
    at = jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None, :], shape)
    plgpu.store(y.at[at], out.astype(y.dtype), mask=row_in[:, None] & column_in[None, :])


def _correction(t: Any, u: Any, row: Array, column: Array, row_in: Array, column_in: Array) -> Array:
    """The tile of t U'."""
    rank = t.shape[1]
    byte, place = jax.lax.div(column, jnp.int32(8)), jax.lax.rem(column, jnp.int32(8))

    def step(i: Any, acc: Array) -> Array:
        term = i * BR + jax.lax.iota(jnp.int32, BR)
        inside = term < rank
        left = _load(t, row, term, row_in[:, None] & inside[None, :])
        words = _load(u, term, byte, inside[:, None] & column_in[None, :]).astype(jnp.int32)
        signs = 1 - 2 * ((words >> place[None, :]) & 1)
        return acc + _dot(left, signs.astype(jnp.float32), jnp.float32, transposed=False)

    return jax.lax.fori_loop(0, pl.cdiv(rank, BR), step, jnp.zeros((row.shape[0], column.shape[0]), jnp.float32))


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
    large = FLOAT32_TILE if x.dtype == jnp.float32 else PREFILL_TILE
    tile = large if m >= PREFILL else DECODE_TILE
    inputs = [common.planes_of(x, layout.per_byte).reshape(-1, width), words]
    kind = "none"
    if factor is not None:
        kind = "row" if factor.ndim else "scalar"
        inputs.insert(0, factor.reshape(-1))
    inputs += [] if scales is None else [scales]
    inputs += [] if extra is None else list(extra)
    return pl.pallas_call(
        functools.partial(_kernel, layout=layout, factor=kind, tile=tile, m=m, extra=extra is not None),
        grid=(pl.cdiv(m, tile[0]), pl.cdiv(n, tile[1])),
        out_shape=common.like((m, n), out_dtype, *inputs),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name=f"{layout.name}_matmul",
        interpret=interpret,
    )(*inputs)


matmul = functools.partial(common.fp4_by_kernel, packed_matmul)
