"""Low-bit numbers and their scales: what quantisation, fake quantisation, dequantisation and kernels have in common.

    E2M1     s eem: 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives         NVFP4, MXFP4
    E4M3     s eeeemmm, bias 7, largest 448, 0x7F is NaN                   scales of NVFP4
    E8M0     2^(byte - 127), 255 is NaN                                    scales of MXFP4
    int      two's complement, -qmax .. qmax with qmax = 2^(bits - 1) - 1
    ternary  code = value + 1
    sign     code 1 is -1, code 0 is +1

Codes and bytes are int32 here, values float32; `packing` makes bytes of them. All functions work on arrays, and are
made of comparisons, bit operations and products only, so that they also run inside Pallas kernels for TPUs and GPUs.
Where a code depends on a quotient x / s, it is decided by comparing |x| with products b s of the boundaries b between
codes: the product of two float32 has one rounding on every processor, a quotient has not (see `exact`).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jaxlab.kernels.lowbit import exact
from jaxlab.kernels.lowbit.exact import TINY, bits, from_bits

E2M1_MAX, E4M3_MAX = 6, 448
E4M3_MIN = 2.0**-9
E8M0_RULES = ("floor", "ceil", "even")
NVFP4_BLOCK, MXFP4_BLOCK = 16, 32
NVFP4_TENSOR = E2M1_MAX * E4M3_MAX  # largest value in units of the tensor scale
# The larger of two values has an even code where a tie goes up.
_BOUNDARIES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
_ZERO_BYTE, _NAN_BYTE = 0, 255
_LAST_BYTE = 252  # of a scale: 6 * 2^125 is finite
_PEAK = 2.0**128 * (1 - 2.0**-22)


def _absmax_scale(peak: Float32[Array, "*n"], largest: int) -> Float32[Array, "*n"]:
    """peak / largest, rounded to nearest; 1 below `exact.TINY` (stored as zeros), NaN where `peak` is not finite."""
    # With the largest numbers, the product that gives the peak back could round to infinity.
    scale = exact.divide(jnp.minimum(peak, np.float32(_PEAK)), largest)
    scale = jnp.where(peak < np.float32(TINY), np.float32(1), scale)
    return jnp.where(_finite(peak), scale, np.float32(np.nan))


def _finite(x: Float32[Array, "*n"]) -> Bool[Array, "*n"]:
    return jnp.abs(x) < np.float32(np.inf)


def e2m1_encode(x: Float32[Array, "*n"], scale: Float32[Array, "*s"] | float = 1.0) -> Int32[Array, "*n"]:
    """The code of x / scale: rounded to nearest, ties to the even code, saturating at 6; -0 and small negatives give 8.

    Args:
      x: values; NaN gives a zero.
      scale: positive, broadcasts against x; 2^-124 at least, that boundaries be normal numbers.

    Returns:
      0 .. 15.

    >>> e2m1_encode(jnp.array([0.25, 0.75, 2.5, -5.0, 9.0, -0.1])).tolist()
    [0, 2, 4, 14, 7, 8]
    """
    magnitude = jnp.abs(x)
    code = (bits(x) >> 28) & 8
    for boundary, up in _BOUNDARIES:
        edge = np.float32(boundary) * scale
        code = code + (magnitude >= edge if up else magnitude > edge).astype(jnp.int32)
    return code


def e2m1_decode(code: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    """The value of a code 0 .. 15, without a table.

    >>> e2m1_decode(jnp.arange(8)).tolist(), e2m1_decode(jnp.array([9, 15])).tolist()
    ([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], [-0.5, -6.0])
    """
    low = code & 7
    # From 1 on, exponent and mantissa stand as in float32, but for the bias: 126 = 252 / 2.
    magnitude = jnp.where(low < 2, low * 0x3F000000, (low + 252) << 22)
    return from_bits(magnitude | ((code & 8) << 28))


def e4m3_encode(x: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The byte of x >= 0: rounded to nearest, ties to even, saturating at 448 (byte 126); all else gives 127, NaN.

    >>> e4m3_encode(jnp.array([0.0, 2**-10, 2**-9, 1.0, 17.0, 448.0, 1e9])).tolist()
    [0, 0, 1, 56, 88, 126, 126]
    """
    word = bits(jnp.minimum(x, np.float32(E4M3_MAX)))
    normal = ((word + 0x7FFFF + ((word >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 multiples of 2^-9; the sum has no bits for fractions.
    tiny = bits(x * np.float32(2**9) + np.float32(2**23)) & 0xFF
    return jnp.where(x >= 0, jnp.where(x < np.float32(2**-6), tiny, normal), 127)


def e4m3_decode(byte: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    """The value of a byte 0 .. 255, negative from 128 on; 127 and 255 are NaN.

    >>> e4m3_decode(jnp.array([1, 56, 88, 126, 184])).tolist()
    [0.001953125, 1.0, 16.0, 448.0, -1.0]
    """
    low = byte & 127
    normal = from_bits((low + (120 << 3)) << 20)
    magnitude = jnp.where(low < 8, low.astype(jnp.float32) * np.float32(E4M3_MIN), normal)
    word = jnp.where(low == 127, 0x7FC00000, bits(magnitude))
    return from_bits(word | ((byte & 128) << 24))


def e8m0_encode(peak: Float32[Array, "*n"], rule: str = "floor") -> Int32[Array, "*n"]:
    """The scale's byte of MXFP4 blocks whose largest magnitude is `peak` = m 2^E, 1 <= m < 2.

        floor   2^(E - 2), the rule of OCP                              peak / scale in [4, 8): saturates from 6 on
        ceil    2^ceil(log2(peak / 6)): E - 2, or E - 1 if m > 3/2      (3, 6]: never saturates
        even    E - 2, or E - 1 if m >= 7/4: as if m had one bit        [3.5, 7): saturates by less than 7/6

    Args:
      peak: not negative.
      rule: one of the three.

    Returns:
      Byte 0 for a block below `exact.TINY`, which is stored as zeros; 255 where `peak` is not finite; else at most 252,
      so that 6 times the scale is finite.

    >>> [int(e8m0_encode(jnp.float32(7.5), rule)) for rule in E8M0_RULES]
    [127, 128, 128]
    """
    word = bits(peak)
    up = {"floor": 0, "ceil": 0x3FFFFF, "even": 0x200000}[rule]
    byte = jnp.minimum(((word + up) >> 23) - 2, _LAST_BYTE)
    return jnp.where(peak < np.float32(TINY), _ZERO_BYTE, jnp.where(_finite(peak), byte, _NAN_BYTE))


def e8m0_decode(byte: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    """2^(byte - 127); byte 0 is a subnormal number, and 255 is NaN.

    >>> e8m0_decode(jnp.array([126, 127, 130])).tolist()
    [0.5, 1.0, 8.0]
    """
    word = jnp.where(byte == 0, 0x00400000, byte << 23)
    return from_bits(jnp.where(byte == _NAN_BYTE, 0x7FC00000, word))


def mxfp4_encode(x: Float32[Array, "*n B"], rule: str = "floor") -> tuple[Int32[Array, "*n B"], Int32[Array, "*n 1"]]:
    """(codes, scale byte) of blocks; see `e8m0_encode`."""
    byte = e8m0_encode(exact.peak(x), rule)
    # Zeros are encoded with scale 1: that of their byte is subnormal.
    return e2m1_encode(x, e8m0_decode(jnp.where(byte == _ZERO_BYTE, 127, byte))), byte


def mxfp4_decode(codes: Int32[Array, "*n"], byte: Int32[Array, "*s"]) -> Float32[Array, "*m"]:
    """E2M1 * E8M0, which is exact; `byte` broadcasts against the codes.

    >>> mxfp4_decode(*mxfp4_encode(jnp.array([[0.1, -3.0, 1.3]]))).tolist()
    [[0.0, -3.0, 1.5]]
    """
    return e2m1_decode(codes) * e8m0_decode(byte)


def mxfp4_limit(byte: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    """The largest magnitude that is not clipped: 6 times the scale."""
    return np.float32(E2M1_MAX) * e8m0_decode(jnp.where(byte == _ZERO_BYTE, 127, byte))


def nvfp4_tensor_scale(peak: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    """peak / (6 * 448), rounded to nearest; 1 below `exact.TINY` (the tensor is stored as zeros), NaN if not finite.

    >>> float(nvfp4_tensor_scale(jnp.float32(2688))), float(nvfp4_tensor_scale(jnp.float32(0)))
    (1.0, 1.0)
    """
    return _absmax_scale(peak, NVFP4_TENSOR)


def _nvfp4_block_byte(peak: Float32[Array, "*n"], tensor_scale: Float32[Array, "*m"]) -> Int32[Array, "*n"]:
    unit = np.float32(E2M1_MAX) * tensor_scale
    byte = e4m3_encode(jnp.clip(peak / unit, np.float32(E4M3_MIN), np.float32(E4M3_MAX)))
    # The quotient decides to within one byte. Ties go to the even one.
    here, odd = e4m3_decode(byte), (byte & 1) == 1
    over = (here + e4m3_decode(byte + 1)) * np.float32(0.5) * unit
    under = (here + e4m3_decode(byte - 1)) * np.float32(0.5) * unit
    up = (byte < 126) & ((peak > over) | ((peak == over) & odd))
    down = (byte > 1) & ((peak < under) | ((peak == under) & odd))
    return byte + up.astype(jnp.int32) - down.astype(jnp.int32)


def _nvfp4_scale(byte: Int32[Array, "*n"], tensor_scale: Float32[Array, "*m"]) -> Float32[Array, "*n"]:
    # Without the maximum, XLA would take a boundary between codes into the tensor scale before the product.
    return jnp.maximum(e4m3_decode(byte) * tensor_scale, np.float32(TINY * 2.0**-24))


def nvfp4_encode(
    x: Float32[Array, "*n B"], tensor_scale: Float32[Array, "*m"]
) -> tuple[Int32[Array, "*n B"], Int32[Array, "*n 1"]]:
    """(codes, scale byte) of blocks: s_b = clip(max|x| / 6 / ts, 2^-9, 448) in E4M3, codes of x / (s_b ts).

    Args:
      x: blocks.
      tensor_scale: ts, of `nvfp4_tensor_scale` of the whole tensor; broadcasts against `[*n, 1]`.

    Returns:
      Codes 0 .. 15 and bytes 1 .. 126: always a finite, positive scale.
    """
    byte = _nvfp4_block_byte(exact.peak(x), tensor_scale)
    return e2m1_encode(x, _nvfp4_scale(byte, tensor_scale)), byte


def nvfp4_decode(
    codes: Int32[Array, "*n"], byte: Int32[Array, "*s"], tensor_scale: Float32[Array, "*t"]
) -> Float32[Array, "*m"]:
    """(E2M1 * E4M3) * ts, broadcast: the first product is exact (6 bits), so that a value is rounded once.

    A kernel may therefore sum products with E2M1 * E4M3, exact in bfloat16, too, and multiply by ts at the end.

    >>> ts = nvfp4_tensor_scale(jnp.float32(2.625))
    >>> nvfp4_decode(*nvfp4_encode(jnp.array([[0.1, -2.625, 1.4]]), ts), ts).tolist()
    [[0.0, -2.625, 1.3125]]
    """
    # Without the clip, XLA would multiply the two scales of a single block first, and round twice.
    units = jnp.clip(e2m1_decode(codes) * e4m3_decode(byte), np.float32(-NVFP4_TENSOR), np.float32(NVFP4_TENSOR))
    return units * tensor_scale


def nvfp4_limit(byte: Int32[Array, "*n"], tensor_scale: Float32[Array, "*m"]) -> Float32[Array, "*n"]:
    """The largest magnitude that is not clipped: 6 s_b ts, and the next numbers above.

    The largest element of a tensor is 6 s_b ts but for rounding: it shall not count as clipped.
    """
    return np.float32(E2M1_MAX * (1 + 2.0**-20)) * _nvfp4_scale(byte, tensor_scale)


def int_max(bits: int) -> int:
    """qmax = 2^(bits - 1) - 1: the range is symmetric.

    >>> int_max(8), int_max(4)
    (127, 7)
    """
    return 2 ** (bits - 1) - 1


def int_scale(peak: Float32[Array, "*n"], bits: int) -> Float32[Array, "*n"]:
    """peak / qmax, rounded to nearest; 1 below `exact.TINY` (stored as zeros), NaN where `peak` is not finite."""
    return _absmax_scale(peak, int_max(bits))


def int_encode(x: Float32[Array, "*n"], scale: Float32[Array, "*s"], bits: int) -> Int32[Array, "*n"]:
    """round(x / scale), ties to even, clipped to -qmax .. qmax; in 32-bit two's complement.

    >>> int_encode(jnp.array([0.5, -1.27, 0.005, 1.0]), int_scale(jnp.float32(1.27), 8), 8).tolist()
    [50, -127, 0, 100]
    """
    magnitude, half = jnp.abs(x), np.float32(0.5)
    # Rounded down. Where the quotient's own rounding takes it past an integer, that integer is the nearest.
    code = jnp.minimum(magnitude / scale, np.float32(int_max(bits))).astype(jnp.int32)
    edge = (code.astype(jnp.float32) + half) * scale
    up = (magnitude > edge) | ((magnitude == edge) & ((code & 1) == 1))
    code = jnp.minimum(code + up.astype(jnp.int32), int_max(bits))
    return jnp.where(x < 0, -code, code)


def int_decode(codes: Int32[Array, "*n"], scale: Float32[Array, "*s"]) -> Float32[Array, "*m"]:
    """code * scale."""
    return codes.astype(jnp.float32) * scale


def sign_extend(codes: Int32[Array, "*n"], bits: int) -> Int32[Array, "*n"]:
    """The numbers of which the lowest `bits` bits are given.

    >>> sign_extend(jnp.array([7, 9, 15]), 4).tolist()
    [7, -7, -1]
    """
    half = 1 << (bits - 1)
    return ((codes & (2 * half - 1)) ^ half) - half


def ternary_encode(x: Float32[Array, "*n"], scale: Float32[Array, "*s"], eps: float = 1e-5) -> Int32[Array, "*n"]:
    """clip(round(x / (scale + eps)), -1, 1) + 1, ties to even: 0 up to half of scale + eps, or `exact.TINY`.

    Source: BitNet b1.58 (arXiv 2402.17764), where `scale` is the mean of |x|.

    >>> w = jnp.array([[0.4, -0.2, 0.1], [-0.8, 0.05, 0.3]])
    >>> ternary_decode(ternary_encode(w, jnp.float32(0.3083333)), jnp.float32(1)).tolist()
    [[1.0, -1.0, 0.0], [-1.0, 0.0, 1.0]]
    """
    edge = jnp.maximum(np.float32(0.5) * (scale + np.float32(eps)), np.float32(TINY))
    beyond = (jnp.abs(x) > edge).astype(jnp.int32)
    return jnp.where(x < 0, 1 - beyond, 1 + beyond)


def ternary_limit(scale: Float32[Array, "*s"], eps: float = 1e-5) -> Float32[Array, "*s"]:
    """The largest magnitude whose rounded quotient is not clipped: a tie at 3/2 counts as inside."""
    return np.float32(1.5) * (scale + np.float32(eps))


def ternary_decode(codes: Int32[Array, "*n"], scale: Float32[Array, "*s"]) -> Float32[Array, "*m"]:
    """(code - 1) * scale, which is exact."""
    return (codes - 1).astype(jnp.float32) * scale


def sign_encode(x: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """1 where x < 0, else 0: zeros, negative and subnormal ones too, count as +1.

    >>> sign_encode(jnp.array([-2.0, -0.0, 0.0, 3.0])).tolist()
    [1, 0, 0, 0]
    """
    return ((bits(x) < 0) & ((bits(x) & 0x7F800000) != 0)).astype(jnp.int32)


def sign_decode(codes: Int32[Array, "*n"], scale: Float32[Array, "*s"]) -> Float32[Array, "*m"]:
    """(1 - 2 code) * scale, which is exact."""
    return (1 - 2 * codes).astype(jnp.float32) * scale
