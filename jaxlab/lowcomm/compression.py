"""Pseudo-gradients in 8 or 4 bits, for leaves of any shape, with error feedback.

A worker sends C(delta + e) and keeps e <- delta + e - C(delta + e), so that what is lost in one round is sent in a
later one: the sum of what was sent over T rounds differs from the sum of the deltas by the last e alone.

A leaf is flattened and cut into blocks; each block is divided by its largest magnitude s and stored as
  int8   round(127 x / s), in [-127, 127];        |error| <= s / 254
  int4   round(7 x / s), in [-7, 7], two a byte;  |error| <= s / 14
  e3m0   sign and 3 exponent bits, no mantissa: 0 or s 2^(e-7), e = 1..7, two a byte; |error| <= max(|x| / 3, s 2^-7)

Sources: error feedback, Karimireddy et al. 2019 (arXiv 1901.09847); e3m0 pseudo-gradients, Streaming DiLoCo
(arXiv 2501.18512), section 2.4.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

FORMATS = ("int8", "int4", "e3m0")
_LEVELS = {"int8": 127, "int4": 7}
# Below it a block is sent as zeros, and error feedback keeps it: its codes would decode to subnormal numbers, which
# some processors keep and others do not.
_SMALLEST = 2.0**-118


class Packed(NamedTuple):
    """What one worker sends for one leaf: codes (4-bit formats hold two a byte) and one float32 scale a block."""

    codes: UInt8[Array, "*lead bytes"]
    scales: Float[Array, "*lead blocks"]


@dataclasses.dataclass(frozen=True)
class Compression:
    """How pseudo-gradients are sent.

    Attributes:
      format: "int8", "int4" or "e3m0".
      block_size: elements that share a scale; even.
      error_feedback: keep what was lost and add it to the next round.

    Example:
      >>> c = Compression("int8")
      >>> [round(float(v), 3) for v in c.decode(c.encode(jnp.array([1.0, -0.5, 0.0])), (3,), jnp.float32)]
      [1.0, -0.504, 0.0]
    """

    format: str = "int8"
    block_size: int = 256
    error_feedback: bool = True

    def __post_init__(self):
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {FORMATS}, got {self.format!r}")
        if self.block_size < 2 or self.block_size % 2:
            raise ValueError(f"block_size must be even and >= 2, got {self.block_size}")

    def encode(self, x: Float[Array, "..."]) -> Packed:
        """Packs one leaf `x [...]` of any rank, empty included. A NaN or Inf makes its block decode to NaN."""
        blocks = math.ceil(x.size / self.block_size)
        flat = jnp.zeros((blocks * self.block_size,), jnp.float32).at[: x.size].set(jnp.ravel(x).astype(jnp.float32))
        grid = flat.reshape(blocks, self.block_size)
        scale = jnp.max(jnp.abs(grid), axis=1, initial=0.0)
        normal = ~(scale < _SMALLEST)
        # Compilers divide by multiplying with the reciprocal, which is subnormal for the largest scales and counts as 0
        # on some processors: both sides go to the middle of the range first. Powers of two, so nothing is rounded.
        middle = jnp.where(scale > 1, 2.0**-24, 2.0**24)
        unit = (grid * middle[:, None]) / jnp.where(normal, scale * middle, 1.0)[:, None]
        if self.format == "e3m0":
            codes = _e3m0_encode(unit).ravel()
        else:
            level = _LEVELS[self.format]
            codes = jnp.clip(jnp.round(unit * level), -level, level).astype(jnp.int8).astype(jnp.uint8).ravel()
        if self.format != "int8":
            pairs = (codes & 0xF).reshape(-1, 2)
            codes = pairs[:, 0] | (pairs[:, 1] << 4)
        return Packed(codes, jnp.where(jnp.isfinite(scale), jnp.where(normal, scale, 0.0), jnp.nan))

    def decode(self, packed: Packed, shape: tuple[int, ...], dtype) -> Float[Array, "..."]:
        """The leaf of `shape` and `dtype` that `packed` stands for."""
        codes = packed.codes
        if self.format != "int8":
            codes = jnp.stack([codes & 0xF, codes >> 4], axis=-1).ravel()
        unit = {"int8": _int8_decode, "int4": _int4_decode, "e3m0": _e3m0_decode}[self.format](codes)
        grid = unit.reshape(-1, self.block_size) * packed.scales[:, None]
        return grid.ravel()[: math.prod(shape)].reshape(shape).astype(dtype)

    def nbytes(self, size: int) -> int:
        """Bytes sent for a leaf of `size` elements."""
        blocks = math.ceil(size / self.block_size)
        return blocks * (self.block_size // (1 if self.format == "int8" else 2) + 4)

    def encode_workers(self, deltas: dict[str, Array]) -> dict[str, Packed]:
        """Packs every leaf `[K, ...]`, each worker on its own."""
        return {path: jax.vmap(self.encode)(x) for path, x in deltas.items()}

    def decode_workers(self, packed: dict[str, Packed], like: dict[str, Array]) -> dict[str, Array]:
        """The inverse of `encode_workers`, with the shapes and dtypes of `like`."""
        return {
            path: jax.vmap(lambda p, x=like[path]: self.decode(p, x.shape[1:], x.dtype))(packed[path]) for path in like
        }


def _int8_decode(codes: UInt8[Array, " n"]) -> Float[Array, " n"]:
    # Clipped: as a multiplication with the reciprocal, 127 / 127 may come out above 1 and overflow with its scale.
    return jnp.clip(codes.astype(jnp.int8).astype(jnp.float32) / 127, -1.0, 1.0)


def _int4_decode(codes: UInt8[Array, " n"]) -> Float[Array, " n"]:
    signed = codes.astype(jnp.int32)
    return jnp.clip(jnp.where(signed > 7, signed - 16, signed).astype(jnp.float32) / 7, -1.0, 1.0)


def _e3m0_encode(unit: Float[Array, "blocks size"]) -> UInt8[Array, "blocks size"]:
    # Thresholds are the midpoints between neighbouring magnitudes 0, 2^-6, ..., 2^0; counting them is exact,
    # unlike a rounded log2.
    magnitude = jnp.abs(unit)
    midpoints = [2.0**-7] + [1.5 * 2.0 ** (e - 7) for e in range(1, 7)]
    exponent = sum((magnitude >= m).astype(jnp.uint8) for m in midpoints)
    return (exponent | (jnp.where(unit < 0, 8, 0).astype(jnp.uint8))).astype(jnp.uint8)


def _e3m0_decode(codes: UInt8[Array, " n"]) -> Float[Array, " n"]:
    exponent: Int[Array, " n"] = (codes & 7).astype(jnp.int32)
    table = jnp.array([0.0] + [2.0 ** (e - 7) for e in range(1, 8)], jnp.float32)
    return jnp.where(codes >= 8, -1.0, 1.0) * table[exponent]
