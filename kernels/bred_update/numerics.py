"""The numbers of block replay dithering: hash, dither, encoding, decoding and bit packing of blocks.

One set of functions serves the optimizer wrapper, the fused steps and the kernels, so that they agree bit for bit.
Every array is `[..., B]` (elements of a block last) or `[..., 1]` (one number a block). For a block x with dither
u in [-1/2, 1/2), L = `steps` lattice steps and scale s:

    signed        s = max|x|    k = floor(x L/(2s) + L/2 + u + 1/2)    xhat = (clip(k - u, 0, L) - L/2) 2s/L
    non-negative  r = sqrt(x), s = max r    k = floor(r L/s + u + 1/2)    w = clip(k - u, 0, L)
                  xhat = max(w^2 - var, 1/4) (s/L)^2        var: of the lattice error, in steps^2

Why the operations stand in this order: compilers may fuse a product with the sum behind it, which rounds once instead
of twice, and they do so in one context and not in another. Here a `clip` or a `maximum` stands between every such
pair, and k - u, w and w - L/2 are exact in float32 (u has 16 bits, k at most 8). Eager, jitted, chunked, sharded and
Pallas code therefore give the same codes and the same decoded values.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8, UInt32

BITS = (3, 4, 8)
DITHER_VARIANCE = 1 / 12  # of an error that is uniform over one lattice step
STOCHASTIC_VARIANCE = 1 / 6  # mean of f (1 - f) over the position f between two lattice points
TINY = 2.0**-118  # blocks whose largest absolute value is below are stored as zeros: L / s stays finite


def lowbias32(x: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """A bijection of the 32-bit words that flips every output bit with probability near one half.

    Source: the constants of C. Wellons, "Prospecting for hash functions" (2018, revised 2022).

    >>> [hex(int(lowbias32(jnp.uint32(x)))) for x in (0, 1, 0xFFFFFFFF)]
    ['0x0', '0x6d3fa73', '0xd9b56683']
    """
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x21F0AAAD)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def stream(
    seed: int | UInt32[Array, ""], leaf: int | UInt32[Array, ""], count: int | Int[Array, ""]
) -> UInt32[Array, ""]:
    """The word that tells apart the dithers of different seeds, leaves and steps."""
    word = jnp.uint32(0)
    for part in (seed, leaf, count):
        # Python integers from 2^31 on do not pass through jnp.asarray.
        part = jnp.uint32(part % 2**32) if isinstance(part, int) else jnp.asarray(part).astype(jnp.uint32)
        word = lowbias32((word + jnp.uint32(0x9E3779B9)) ^ part)
    return word


def dither(word: UInt32[Array, "*w"], index: UInt32[Array, "*n"]) -> Float32[Array, "*m"]:
    """u in [-1/2, 1/2), a multiple of 2^-16, of the blocks (or elements) with these indices in `stream` `word`.

    >>> dither(stream(0, 7, jnp.int32(1)), jnp.arange(3, dtype=jnp.uint32)).tolist()
    [0.1398773193359375, -0.4445037841796875, -0.0687408447265625]
    """
    # Two rounds: with one, streams whose words differ in low bits alone would be permutations of each other.
    top = lowbias32(lowbias32(index ^ word) + word) >> 16
    return top.astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-16) - jnp.float32(0.5)


def round_up(scale: Float32[Array, "*n"], dtype: Any) -> Float32[Array, "*n"]:
    """The smallest number of `dtype` (float32 or bfloat16) that is not below a scale >= 0, as float32."""
    if jnp.dtype(dtype) == jnp.float32:
        return scale
    low = scale.astype(dtype)
    bits = jax.lax.bitcast_convert_type(low, jnp.uint16)
    bits = bits + (low.astype(jnp.float32) < scale).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def encode(
    x: Float32[Array, "*n B"],
    u: Float32[Array, "*m"],
    *,
    steps: int,
    nonneg: bool,
    scale_dtype: Any = jnp.float32,
) -> tuple[Int32[Array, "*n B"], Float32[Array, "*n 1"]]:
    """Codes 0 .. `steps` and the scale of every block.

    Args:
      x: the values; where `nonneg`, a negative one counts as not finite.
      u: dither, `[..., 1]` for one a block or `[..., B]` for one an element.
      steps: L, number of lattice steps.
      nonneg: whether to quantise the square root on [0, s] instead of the value on [-s, s].
      scale_dtype: what the scale will be stored in; it is rounded up before it is used.

    Returns:
      `(codes, scale)`; the scale of a block with a NaN or an infinity is NaN, and its codes are meaningless.
    """
    x = jnp.sqrt(x) if nonneg else x
    scale = block_scale(jnp.max(magnitude(x), axis=-1, keepdims=True), scale_dtype)
    return place(x, scale, u, steps=steps, nonneg=nonneg).astype(jnp.int32), scale


def magnitude(x: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    """|x|, and infinity for NaN, which the maximum over an axis passes over on some backends, XLA for CPUs among them.

    >>> magnitude(jnp.array([-1.0, jnp.nan])).tolist()
    [1.0, inf]
    """
    x = jnp.abs(x)
    return jnp.where(x < jnp.inf, x, jnp.float32(jnp.inf))


def block_scale(peak: Float32[Array, "*n"], dtype: Any = jnp.float32) -> Float32[Array, "*n"]:
    """The scale of blocks whose largest absolute value (or root) is `peak`: 0 for tiny ones, NaN where not finite."""
    scale = jnp.where(peak < jnp.float32(TINY), jnp.float32(0), peak)
    scale = round_up(scale, dtype)
    return jnp.where(scale < jnp.inf, scale, jnp.float32(jnp.nan))


def place(
    x: Float32[Array, "*n"], scale: Float32[Array, "*s"], u: Float32[Array, "*m"], *, steps: int, nonneg: bool
) -> Float32[Array, "*n"]:
    """Where values lie on the dithered lattice: z in [0, steps + 1), with the code floor(z).

    x holds roots where `nonneg`; `scale` and `u` broadcast against it.
    """
    # Constants all: Pallas cannot lower the negation of one for Triton.
    low, half, high = (jnp.float32(k) for k in ((0, 0, steps) if nonneg else (-steps / 2, steps / 2, steps / 2)))
    per_step = high / jnp.where(scale > 0, scale, jnp.float32(jnp.inf))
    y = x * per_step
    # A root is not below 0; the clip at the other end parts the product from the sum all the same.
    y = jnp.minimum(y, high) if nonneg else jnp.clip(y, low, high)
    # Truncation is floor here: the sum is not negative, and below steps + 1 because u + 1/2 <= 1 - 2^-16.
    return y + (u + (half + jnp.float32(0.5)))


def decode(
    codes: Int32[Array, "*n B"],
    scale: Float[Array, "*s 1"],
    u: Float32[Array, "*m"],
    *,
    steps: int,
    nonneg: bool,
    variance: float = DITHER_VARIANCE,
) -> Float32[Array, "*n B"]:
    """The values that codes stand for; `u` is the dither of `encode`, or 0 where it is not subtracted.

    Args:
      codes: 0 .. `steps`.
      scale: of every block; NaN makes the whole block NaN, 0 makes it zero.
      u: dither, `[..., 1]`, or zeros.
      steps: L.
      nonneg: as in `encode`.
      variance: of the lattice error in squared steps, subtracted from the square of a non-negative value.

    Returns:
      The decoded values.
    """
    scale = scale.astype(jnp.float32)
    if nonneg:
        # Below 0 the clip at 0 would change nothing: there w^2 <= 1/4, and the floor decides.
        w = jnp.minimum(codes.astype(jnp.float32) - u, jnp.float32(steps))
        # Without the maximum, XLA would square the scale of a single block before the product.
        step = jnp.maximum(scale * jnp.float32(1 / steps), jnp.float32(0))
        floor = jnp.float32(0.25 + variance)
        return (step * step) * (jnp.maximum(w * w, floor) - jnp.float32(variance))
    half = jnp.float32(steps / 2)
    w = jnp.clip(codes.astype(jnp.float32) - (u + half), jnp.float32(-steps / 2), half)
    return w * (scale * jnp.float32(2 / steps))


def packed_size(size: int, bits: int) -> int:
    """Bytes of a packed block of `size` elements, a multiple of 8."""
    return size * bits // 8


def _plane(codes: Int32[Array, "*n B"], bits: int) -> Int32[Array, "*n b"]:
    """Packs `bits`-bit codes: byte j holds the codes j, j + B/p, ... of the p = 8 / bits parts of the block."""
    parts = jnp.split(codes, 8 // bits, axis=-1)
    return functools.reduce(operator.or_, (part << (bits * i) for i, part in enumerate(parts)))


def _unplane(words: Int32[Array, "*n b"], bits: int) -> Int32[Array, "*n B"]:
    mask = (1 << bits) - 1
    return jnp.concatenate([(words >> (bits * i)) & mask for i in range(8 // bits)], axis=-1)


def pack(codes: Int32[Array, "*n B"], bits: int) -> UInt8[Array, "*n b"]:
    """Packs the codes of a block, B a multiple of 8, into B * bits / 8 bytes.

    8 bits: a byte each. 4 bits: byte j holds the codes j and j + B/2. 3 bits: the low two bits of the codes j, j + B/4,
    j + B/2, j + 3B/4 in byte j < B/4, then the high bits of the codes j, j + B/8, ... in byte B/4 + j, j < B/8. No code
    spans two bytes, and no element moves to another position within its part, so that both directions vectorise.

    >>> pack(jnp.arange(8)[None], 4).tolist(), pack(jnp.arange(8)[None], 3).tolist()
    ([[64, 81, 98, 115]], [[136, 221, 240]])
    """
    codes = codes & ((1 << bits) - 1)
    if bits == 3:
        words = jnp.concatenate([_plane(codes & 3, 2), _plane(codes >> 2, 1)], axis=-1)
    else:
        words = _plane(codes, bits)
    return words.astype(jnp.uint8)


def unpack(words: UInt8[Array, "*n b"], bits: int) -> Int32[Array, "*n B"]:
    """The codes that `pack` packed.

    >>> unpack(pack(jnp.arange(8)[None], 3), 3).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    words = words.astype(jnp.int32)
    if bits != 3:
        return _unplane(words, bits)
    low = words.shape[-1] * 2 // 3
    return _unplane(words[..., :low], 2) | (_unplane(words[..., low:], 1) << 2)
