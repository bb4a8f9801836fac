"""Products with 4-bit weights and their correction by a sum of sign matrices, by the implementation for the device.

    y = round(ts * x Q' + (((x * b) V) * s) U')         Q in NVFP4 or MXFP4, U and V of +1 and -1, one bit each

Both products are summed in float32, and y is rounded once. `schedule="fused"` computes the second product in the same
kernel as the first; "two_ops" computes two float32 arrays and adds them: both give the same result, but for the last
bit, and to XLA they are one program. What U meets, (x * b) V, is small, and computed before either.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jaxlab.kernels.fp4_matmul import api as fp4
from jaxlab.kernels.fp4_sign_matmul import reference
from jaxlab.kernels.lowbit import matmul_common as common
from jaxlab.kernels.lowbit.matmul_common import Options
from jaxlab.kernels.sign_matmul import api as sign

SCHEDULES = ("fused", "two_ops")


def _forward(options: Options, x: Array, *weights: Any) -> Array:
    # XLA would compile both schedules to the same program.
    if options.schedule == "fused" or options.implementation == "xla":
        return options.call("fp4_sign_matmul", "matmul", x, *weights)
    codes, scales, tensor_scale, u, v, sign_scale, column = weights
    run = {"implementation": options.implementation, "interpret": options.interpret, "out_dtype": jnp.float32}
    base = fp4.fp4_matmul(x, codes, scales, tensor_scale, format=options.layout.name, **run)
    wide = x.astype(jnp.float32) * (1.0 if column is None else column.astype(jnp.float32))
    inner = sign.sign_matmul(wide, v, **run) * sign_scale.astype(jnp.float32)
    # `u` has its bits along N, where a kernel for packed weights has them along its contraction: this product, which
    # is r / K of the first one, takes the signs unpacked.
    outer, _ = reference.signs(u, v, codes.shape[0])
    more = common.row_tiles(lambda rows: common.product(rows, outer.astype(jnp.float32), axis=0), inner)
    return (base + more).astype(options.out_dtype)


def _backward(options: Options, g: Array, *weights: Any) -> Array:
    codes, scales, tensor_scale, u, v, sign_scale, column = weights
    g = g.astype(jnp.float32)
    u_int, v_int = reference.signs(u, v, codes.shape[0])
    more = common.product(g, u_int.astype(jnp.float32)) * sign_scale.astype(jnp.float32)
    more = common.product_back(more, v_int.astype(jnp.float32))
    more = more if column is None else more * column.astype(jnp.float32)
    return common.product_back(g * tensor_scale, common.units(codes, scales, options.layout)) + more


_apply = common.differentiable(_forward, _backward)


def _check_signs(
    u: Shaped[Array, "..."], v: Shaped[Array, "..."], sign_scale: Any, column: Any, n: int, k: int
) -> None:
    for name, words, size in (("u", u, n), ("v", v, k)):
        if words.dtype != jnp.uint8:
            raise TypeError(f"{name} must be uint8, 8 signs a byte, got {words.dtype}")
        if words.ndim != 2 or words.shape[1] != -(-size // 8):
            raise ValueError(f"{name} must be [r, {-(-size // 8)}], the signs of {size}, got {list(words.shape)}")
    if u.shape[0] != v.shape[0]:
        raise ValueError(f"u and v must have as many rows, the rank r, got {u.shape[0]} and {v.shape[0]}")
    wanted = [("sign_scale", sign_scale, (u.shape[0],))] + ([] if column is None else [("column", column, (k,))])
    for name, x, shape in wanted:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point, got {x.dtype}")
        if x.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(x.shape)}")


def fp4_sign_matmul(
    x: Shaped[Array, "..."],
    codes: Shaped[Array, "..."],
    scales: Shaped[Array, "..."],
    tensor_scale: Any,
    u: Shaped[Array, "..."],
    v: Shaped[Array, "..."],
    sign_scale: Shaped[Array, "..."],
    column: Shaped[Array, "..."] | None = None,
    *,
    format: str = "nvfp4",
    schedule: str = "fused",
    implementation: str | None = None,
    interpret: bool = False,
    out_dtype: Any = None,
) -> Float[Array, "..."]:
    """y = x W' for W = Q + U diag(s) V' diag(b); the gradient for x is g W, in float32.

    A row of y does not depend on how many rows x has.

    Args:
      x: `[..., K]`, float32 or bfloat16.
      codes, scales, tensor_scale, format: Q, as `fp4_matmul` takes it.
      u: `uint8 [r, ceil(N / 8)]`, sign (n, i) of U in bit n % 8 of byte n // 8 of row i, 1 for -1.
      v: `uint8 [r, K / 8]`, V likewise.
      sign_scale: s `[r]`.
      column: b `[K]`; None for ones.
      schedule: "fused" or "two_ops".
      implementation: None for that of the default backend, "xla", "pallas_tpu" or "pallas_gpu".
      interpret: whether to run a Pallas kernel as XLA operations, on any device.
      out_dtype: of y; None for that of x.

    Returns:
      `[..., N]`.

    Raises:
      TypeError: for an x that is not floating point, packed arrays that are not uint8.
      ValueError: for shapes that do not belong together, an unknown format or schedule, and an implementation that
        cannot run here.

    >>> codes, scales = jnp.full((2, 16), 0x22, jnp.uint8), jnp.full((2, 2), 56, jnp.uint8)  # ones
    >>> u, v = jnp.array([[0b10]], jnp.uint8), jnp.zeros((1, 4), jnp.uint8)
    >>> fp4_sign_matmul(jnp.ones((1, 32)), codes, scales, 1.0, u, v, jnp.array([0.5])).tolist()
    [[48.0, 16.0]]
    """
    layout = common.fp4_layout(format)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")
    common.check_x(x)
    common.check_words("codes", codes, layout, x.shape)
    common.check_scale_bytes("scales", scales, codes, layout)
    tensor_scale = common.check_scale("tensor_scale", tensor_scale, None)
    _check_signs(u, v, sign_scale, column, codes.shape[0], x.shape[-1])
    implementation = common.check_implementation(implementation, interpret=interpret)
    out = common.check_out_dtype(out_dtype, x.dtype)
    options = Options(layout, implementation, interpret, x.dtype.name, out, schedule)
    return _apply(options, x, codes, scales, tensor_scale, u, v, sign_scale, column)


class Prepared(NamedTuple):
    """Expanded weights, for many products on a CPU.

    Attributes:
      base: Q without its tensor scale, `float [N, K]`.
      u: U', `float [r, N]`.
      v: V', `float [r, K]`.
    """

    base: Float[Array, "n k"]
    u: Float[Array, "r n"]
    v: Float[Array, "r k"]


def prepare(
    codes: Shaped[Array, "..."],
    scales: Shaped[Array, "..."],
    u: Shaped[Array, "..."],
    v: Shaped[Array, "..."],
    *,
    format: str = "nvfp4",
) -> Prepared:
    """Expands the weights to float32.

    Args:
      codes, scales, u, v, format: as `fp4_sign_matmul` takes them.

    Raises:
      TypeError, ValueError: as `fp4_sign_matmul`.
    """
    base = fp4.prepare(codes, scales, format=format)
    _check_signs(u, v, jnp.zeros(u.shape[0]), None, *base.shape)
    return Prepared(base, *(x.astype(jnp.float32) for x in reference.signs(u, v, base.shape[0])))


def matmul_prepared(
    x: Float[Array, "*m k"],
    w: Prepared,
    tensor_scale: Any,
    sign_scale: Float[Array, " r"],
    column: Float[Array, " k"] | None = None,
    *,
    out_dtype: Any = None,
) -> Float[Array, "*m n"]:
    """`fp4_sign_matmul` with the weights that `prepare` returned, faster on a CPU.

    Not in tiles of rows: the last bits of a row may depend on how many there are.
    """
    common.check_x(x)
    scale = common.check_scale("tensor_scale", tensor_scale, None)
    out = jnp.dtype(common.check_out_dtype(out_dtype, x.dtype))
    return _of_expanded(x, *w, scale, sign_scale, column, out_dtype=out)


_of_expanded = jax.jit(reference.of_expanded, static_argnames="out_dtype")
