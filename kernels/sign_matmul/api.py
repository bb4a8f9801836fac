"""Products with sign weights, by the implementation for the device.

    x float:  y = round(scale * x S'),  sums in float32          x int8:  y = x S', exact in int32

S[n, k] = 1 - 2 code. On CPUs the fast form is int8: expand the weights once with `prepare`, then `matmul_prepared`.
"""

from typing import Any

from jaxtyping import Array, Int8, Int32, Shaped

from jaxlab.kernels.lowbit import matmul_common as common


def sign_matmul(
    x: Shaped[Array, "..."],
    codes: Shaped[Array, "..."],
    scale: Any = None,
    *,
    implementation: str | None = None,
    interpret: bool = False,
    out_dtype: Any = None,
) -> Shaped[Array, "..."]:
    """y = x W' for W = scale * S in 1 bit; the gradient for x is (g scale) S, in float32.

    Args:
      x: `[..., K]`, float32 or bfloat16, or int8, whose scales are the caller's.
      codes: `uint8 [N, K / 8]`, 1 for -1 and 0 for +1, the first in the lowest bit.
      scale: `[]` or `[N, 1]`; None for 1. An int8 x takes none.
      implementation: None for that of the default backend, "xla", "pallas_tpu" or "pallas_gpu".
      interpret: whether to run a Pallas kernel as XLA operations, on any device.
      out_dtype: of y; None for that of x. An int8 x gives int32.

    Returns:
      `[..., N]`.

    Raises:
      TypeError: for another dtype of x, or codes that are not uint8.
      ValueError: for shapes that do not belong together, a scale with an int8 x, and an implementation that cannot
        run here.

    >>> import jax.numpy as jnp
    >>> codes = jnp.array([[0b10]], jnp.uint8)  # 1, -1, 1, 1, ...
    >>> sign_matmul(jnp.ones((1, 8)), codes, 0.5).tolist()
    [[3.0]]
    >>> sign_matmul(jnp.arange(8, dtype=jnp.int8), codes).tolist()
    [26]
    """
    return common.integer_matmul("sign_matmul", common.SIGN, x, codes, scale, implementation, interpret, out_dtype)


def prepare(codes: Shaped[Array, "..."]) -> Int8[Array, "n k"]:
    """The weights S as int8, expanded once for many products on a CPU.

    Args:
      codes: `uint8 [N, K / 8]`.

    Raises:
      TypeError, ValueError: as `sign_matmul`.

    >>> import jax.numpy as jnp
    >>> prepare(jnp.array([[0b10]], jnp.uint8)).tolist()
    [[1, -1, 1, 1, 1, 1, 1, 1]]
    """
    common.check_words("codes", codes, common.SIGN)
    return common.expand(codes, common.SIGN)


def matmul_prepared(x: Shaped[Array, "..."], w: Shaped[Array, "..."]) -> Int32[Array, "..."]:
    """x w' of int8 arrays, exact in int32: rows of x are padded to 4 or a multiple of 8, and both
    contract their last axis: the form that is fast on CPUs.

    Args:
      x: `int8 [..., K]`.
      w: `int8 [N, K]`, from `prepare`.

    Raises:
      TypeError: for other dtypes. ValueError: for another K.

    >>> import jax.numpy as jnp
    >>> matmul_prepared(jnp.array([[1, 2]], jnp.int8), jnp.array([[1, -1]], jnp.int8)).tolist()
    [[-1]]
    """
    return common.prepared_product(x, w)
