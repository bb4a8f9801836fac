"""The definition of `fp4_matmul`, in XLA operations."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

from jaxlab.kernels.lowbit import matmul_common as common


def matmul(
    x: Float[Array, "*m k"],
    codes: UInt8[Array, "n b"],
    scales: UInt8[Array, "n c"],
    tensor_scale: Float32[Array, ""],
    *,
    layout: common.Layout,
    out_dtype: Any,
) -> Float[Array, "*m n"]:
    """round(ts * sum_k x[m, k] (E2M1 * block scale)[n, k]): the weights are exact, the sum is float32."""
    w = common.units(codes, scales, layout)
    return common.finish(common.product(x.astype(jnp.float32), w), tensor_scale, out_dtype)
