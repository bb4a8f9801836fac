"""Arithmetic whose results have the same bits everywhere: eager, jitted, sharded, inside kernels, on any processor.

Three things break such an agreement in ordinary code, and none of them occurs here:

- a compiler fuses a product with the sum behind it, which rounds once instead of twice, in one context and not in
  another. Here a product that feeds a sum is either exact, or loses its last bit in between;
- a division becomes a product with a rounded reciprocal where the divisor is a constant, and is not correctly rounded
  on GPUs and TPUs. Here quotients are made from products;
- the order of a floating-point sum depends on the program around it. Here means are summed in integers.

Subnormal numbers, which some processors flush to zero, are kept away by `TINY`.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

TINY = 2.0**-96  # blocks, rows or tensors whose largest magnitude is below are stored as zeros
_DIGIT = 15  # bits: 2^15 digits can be summed in 32 bits


def bits(x: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The 32 bits of a float32.

    >>> hex(int(bits(jnp.float32(1))))
    '0x3f800000'
    """
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def from_bits(x: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    """The float32 with these 32 bits."""
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def peak(x: Float32[Array, "*n"], axis: int | Sequence[int] | None = -1) -> Float32[Array, "*m"]:
    """max|x| with the reduced axes kept, 0 for no elements; NaN where there is one.

    >>> peak(jnp.array([1.0, -3.0, 2.0])).tolist()
    [3.0]
    """
    # As integers, NaN is the largest of all: the maximum of floats passes over it on some backends.
    axis = tuple(axis) if isinstance(axis, Sequence) else axis
    return from_bits(jnp.max(bits(x) & 0x7FFFFFFF, axis=axis, keepdims=True, initial=0))


def mantissa_and_power(x: Float32[Array, "*n"]) -> tuple[Float32[Array, "*n"], Float32[Array, "*n"]]:
    """(m, p) with |x| = m p, 1 <= m < 2 and p a power of two, for a normal x.

    >>> [float(v) for v in mantissa_and_power(jnp.float32(-12))]
    [1.5, 8.0]
    """
    word = bits(x)
    return from_bits((word & 0x007FFFFF) | 0x3F800000), from_bits(word & 0x7F800000)


def _cut(x: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    """x without its last bit: no compiler can fuse the product that made it with a sum behind."""
    return from_bits(bits(x) & -2)


def _halves(x: Float32[Array, "*n"]) -> tuple[Float32[Array, "*n"], Float32[Array, "*n"]]:
    """(high, low) of 12 bits each, that sum to x: products of two halves are exact."""
    high = from_bits(bits(x) & -4096)
    return high, x - high


def divide(x: Float32[Array, "*n"], n: int, low: Float32[Array, "*n"] | float = 0.0) -> Float32[Array, "*n"]:
    """(|x| + low) / n, rounded to nearest, for a constant n, a normal x and |low| at most an ulp of x.

    A first quotient is corrected once by its remainder, which is computed exactly.

    Args:
      x: 0 gives 0.
      n: from 1 to 2^32.
      low: what x lacks.

    Returns:
      The quotient.

    >>> float(divide(jnp.float32(3), 2688)) == float(np.float32(3) / np.float32(2688))
    True
    """
    m, power = mantissa_and_power(x)
    divisor = np.float32(n)
    n_high = np.frombuffer((divisor.view(np.uint32) & np.uint32(0xFFFFF000)).tobytes(), np.float32)[0]
    n_low, inverse = divisor - n_high, np.float32(1) / divisor
    q = _cut(m * inverse)
    q_high, q_low = _halves(q)
    rest = m - n_high * q_high - n_high * q_low - n_low * q_high - n_low * q_low
    if not isinstance(low, float):
        rest = rest + low * from_bits(_inverse_bits(power))
    return (q + _cut(rest * inverse)) * power


def _inverse_bits(power: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The bits of 1 / power, for a power of two from 2^-126 to 2^126: no division that could be approximated."""
    return np.int32(0x7F000000) - bits(power)


def mean_magnitude(
    x: Float32[Array, "*n"], axis: int | Sequence[int] = -1, count: int | None = None
) -> Float32[Array, "*m"]:
    """sum|x| / count with the reduced axes kept: the same bits in whatever order, parts or devices it is summed.

    Elements are rounded to multiples of 2^-30 of the power of two above the maximum, and summed in integers.

    Args:
      x: values.
      axis: one or several.
      count: what to divide by; None for the number of elements reduced.

    Returns:
      The mean; 0 where the maximum is below `TINY`, and NaN where it is not finite.

    >>> mean_magnitude(jnp.array([[1.0, -2.0, 6.0, 0.0]])).tolist()
    [[2.25]]
    """
    axes = sorted(a % x.ndim for a in ([axis] if isinstance(axis, int) else axis))
    count = math.prod(x.shape[a] for a in axes) if count is None else count
    top = peak(x, axes)
    if x.size == 0:
        return jnp.zeros_like(top)
    empty = top < np.float32(TINY)
    _, power = mantissa_and_power(jnp.where(empty, np.float32(1), top))
    to_fixed = from_bits(_inverse_bits(power) + (29 << 23))  # 2^29 / power: products with it are exact
    fixed = jnp.round(jnp.abs(x) * to_fixed).astype(jnp.int32)
    digits = [fixed & 0x7FFF, fixed >> _DIGIT]
    for a in reversed(axes):
        digits = _sum_digits(digits, a)
    total, low = _to_float(digits)
    mean = divide(total, max(count, 1), low) * from_bits(_inverse_bits(to_fixed))
    return jnp.where(empty, np.float32(0), jnp.where(top < np.float32(np.inf), mean, np.float32(np.nan)))


def _carry(digits: list[Int32[Array, "..."]]) -> list[Int32[Array, "..."]]:
    """The same number, with every digit but the last below 2^15 and one digit more."""
    out = []
    over = jnp.zeros_like(digits[0])
    for digit in digits:
        digit = digit + over
        out.append(digit & 0x7FFF)
        over = digit >> _DIGIT
    return [*out, over]


def _sum_digits(digits: list[Int32[Array, "..."]], axis: int) -> list[Int32[Array, "..."]]:
    """The digits of the sum along an axis, which is kept with length 1."""
    while (n := digits[0].shape[axis]) > 1:
        chunks = -(-n // 2**_DIGIT)
        size = -(-n // chunks)
        pad = [(0, chunks * size - n if a == axis else 0) for a in range(digits[0].ndim)]
        shape = (*digits[0].shape[:axis], chunks, size, *digits[0].shape[axis + 1 :])
        digits = _carry([jnp.sum(jnp.pad(d, pad).reshape(shape), axis=axis + 1, dtype=jnp.int32) for d in digits])
    return digits


def _to_float(digits: list[Int32[Array, "..."]]) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    """(s, low): the number as a float32 and what that lacks."""
    s = low = jnp.zeros(digits[0].shape, jnp.float32)
    for digit in reversed(digits):
        s, low = s * np.float32(2**_DIGIT), low * np.float32(2**_DIGIT)  # exact
        d = digit.astype(jnp.float32)
        total = s + d
        s, low = total, low + (d - (total - s))
    return s, low
