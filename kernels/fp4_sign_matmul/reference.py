"""The definition of `fp4_sign_matmul`, in XLA operations."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, UInt8

from jaxlab.kernels.lowbit import matmul_common as common


def signs(u: UInt8[Array, "r a"], v: UInt8[Array, "r b"], n: int) -> tuple[Int8[Array, "r n"], Int8[Array, "r k"]]:
    """(U' `[r, N]`, V' `[r, K]`) as int8."""
    return common.expand(u, common.SIGN)[:, :n], common.expand(v, common.SIGN)


def correction(
    x: Float[Array, "*m k"],
    u: Float[Array, "r n"],
    v: Float[Array, "r k"],
    sign_scale: Float[Array, " r"],
    column: Float[Array, " k"] | None,
) -> Float32[Array, "*m n"]:
    """(((x * b) V) * s) U', all in float32."""
    x = x.astype(jnp.float32)
    wide = x if column is None else x * column.astype(jnp.float32)
    return common.product(common.product(wide, v) * sign_scale.astype(jnp.float32), u, axis=0)


def of_expanded(
    x: Float[Array, "*m k"],
    base: Float[Array, "n k"],
    u: Float[Array, "r n"],
    v: Float[Array, "r k"],
    tensor_scale: Float32[Array, ""],
    sign_scale: Float[Array, " r"],
    column: Float[Array, " k"] | None,
    *,
    out_dtype: Any,
) -> Float[Array, "*m n"]:
    """The product with expanded weights."""
    y = common.product(x.astype(jnp.float32), base) * tensor_scale
    return (y + correction(x, u, v, sign_scale, column)).astype(out_dtype)


def matmul(
    x: Float[Array, "*m k"],
    codes: UInt8[Array, "n b"],
    scales: UInt8[Array, "n c"],
    tensor_scale: Float32[Array, ""],
    u: UInt8[Array, "r a"],
    v: UInt8[Array, "r w"],
    sign_scale: Float[Array, " r"],
    column: Float[Array, " k"] | None,
    *,
    layout: common.Layout,
    out_dtype: Any,
) -> Float[Array, "*m n"]:
    """round(ts * x Q' + (((x * b) V) * s) U'): two float32 sums, added, rounded once; tile by tile of rows."""
    expanded = [a.astype(jnp.float32) for a in (common.units(codes, scales, layout), *signs(u, v, codes.shape[0]))]

    def tile(rows: Any) -> Any:
        return of_expanded(rows, *expanded, tensor_scale, sign_scale, column, out_dtype=out_dtype)

    return common.row_tiles(tile, x)
