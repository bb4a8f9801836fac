"""Products with weights in NVFP4 or MXFP4, by the implementation for the device.

    y = round(ts * x U'),   U[n, k] = E2M1(codes[n, k]) * scale of its block

U is exact in float32 and in bfloat16; products are summed in float32, the tensor scale ts comes at the end, and y is
rounded once. The gradient for x is ts g U, in float32; codes and scales are constants.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

from jaxlab.kernels.lowbit import matmul_common as common
from jaxlab.kernels.lowbit.matmul_common import Options


def _forward(options: Options, x: Array, codes: Array, scales: Array, tensor_scale: Array) -> Array:
    return options.call("fp4_matmul", "matmul", x, codes, scales, tensor_scale)


def _backward(options: Options, g: Array, codes: Array, scales: Array, tensor_scale: Array) -> Array:
    return common.product_back(g.astype(jnp.float32) * tensor_scale, common.units(codes, scales, options.layout))


_apply = common.differentiable(_forward, _backward)


def fp4_matmul(
    x: Shaped[Array, "..."],
    codes: Shaped[Array, "..."],
    scales: Shaped[Array, "..."],
    tensor_scale: Any = 1.0,
    *,
    format: str = "nvfp4",
    implementation: str | None = None,
    interpret: bool = False,
    out_dtype: Any = None,
) -> Float[Array, "..."]:
    """y = x W' for W in 4 bits.

    Args:
      x: `[..., K]`, float32 or bfloat16.
      codes: `uint8 [N, K / 2]`, the code with the even index in the low nibble.
      scales: `uint8 [N, K / 16]`, E4M3 bytes of nvfp4, or `[N, K / 32]`, E8M0 bytes of mxfp4.
      tensor_scale: `[]`; 1 for mxfp4.
      format: "nvfp4" or "mxfp4".
      implementation: None for that of the default backend, "xla", "pallas_tpu" or "pallas_gpu".
      interpret: whether to run a Pallas kernel as XLA operations, on any device.
      out_dtype: of y; None for that of x.

    Returns:
      `[..., N]`.

    Raises:
      TypeError: for an x that is not floating point, codes or scales that are not uint8.
      ValueError: for shapes that do not belong together, a K that is no multiple of the block, an unknown format, and
        an implementation that cannot run here.

    >>> codes = jnp.full((3, 16), 0x42, jnp.uint8)  # 1 and 2, in turn
    >>> scales = jnp.full((3, 2), 56, jnp.uint8)  # 1
    >>> fp4_matmul(jnp.ones((1, 32)), codes, scales, 0.5).tolist()
    [[24.0, 24.0, 24.0]]
    """
    layout = common.fp4_layout(format)
    common.check_x(x)
    common.check_words("codes", codes, layout, x.shape)
    common.check_scale_bytes("scales", scales, codes, layout)
    tensor_scale = common.check_scale("tensor_scale", tensor_scale, None)
    implementation = common.check_implementation(implementation, interpret=interpret)
    options = Options(layout, implementation, interpret, x.dtype.name, common.check_out_dtype(out_dtype, x.dtype))
    return _apply(options, x, codes, scales, tensor_scale)


def prepare(
    codes: Shaped[Array, "..."], scales: Shaped[Array, "..."], *, format: str = "nvfp4", dtype: Any = jnp.float32
) -> Float[Array, "n k"]:
    """U, expanded once for many products on a CPU; exact in float32 and bfloat16.

    Args:
      codes, scales, format: as `fp4_matmul` takes them.
      dtype: float32 or bfloat16.

    Raises:
      TypeError, ValueError: as `fp4_matmul`.
    """
    layout = common.fp4_layout(format)
    common.check_words("codes", codes, layout)
    common.check_scale_bytes("scales", scales, codes, layout)
    return common.units(codes, scales, layout).astype(common.check_out_dtype(dtype, dtype))


def matmul_prepared(
    x: Float[Array, "*m k"], w: Float[Array, "n k"], tensor_scale: Any = 1.0, *, out_dtype: Any = None
) -> Float[Array, "*m n"]:
    """`fp4_matmul` with the weights that `prepare` returned.

    >>> matmul_prepared(jnp.ones((2, 4)), jnp.ones((1, 4)), 0.25).tolist()
    [[1.0], [1.0]]
    """
    common.check_x(x)
    scale: Float32[Array, ""] = common.check_scale("tensor_scale", tensor_scale, None)
    wide = jnp.promote_types(x.dtype, w.dtype)
    return common.finish(
        common.product(x.astype(wide), w.astype(wide)), scale, common.check_out_dtype(out_dtype, x.dtype)
    )
