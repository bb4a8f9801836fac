"""Number formats of quantised arrays: how rows are cut into blocks, scaled and encoded.

    nvfp4    E2M1 in blocks of 16, an E4M3 scale a block, a float32 scale a tensor     4.5 bits a weight
    mxfp4    E2M1 in blocks of 32, a power of two a block (rules floor, ceil, even)    4.25
    int8     absmax scale a row, block or tensor                                       8 + 32 / elements a scale
    int4     likewise                                                                  4 + 32 / elements a scale
    ternary  -1, 0, 1 times the mean of |x|                                            2 + 32 / elements a scale
    sign     -1, 1 times the mean of |x|; the sign of 0 is +1                          1 + 32 / elements a scale

A format is a frozen, hashable dataclass, so it can be a static argument of `jax.jit` and static data of a pytree. The
arithmetic is that of `jaxlab.kernels.lowbit`, which says why it has the same bits everywhere.

A row is what lies along the quantised axis. Rows are padded with zeros to whole blocks; without blocks, to whole bytes.
What has a scale of its own and a largest magnitude below 2^-96 is stored as zeros. Where a NaN or an infinity was let
through, the scale is NaN, and so is all that is decoded with it.

Quantising again what was dequantised gives the same values; for ternary the same codes, with a smaller mean. In NVFP4
this holds for blocks whose scale is a normal E4M3 number, those with a maximum from 2^-6 / 448 of the tensor's on.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from jaxlab.core.errors import did_you_mean
from jaxlab.kernels.lowbit import exact, numerics, packing

PER = ("tensor", "row", "block")


class Encoded(NamedTuple):
    """A quantised array before its codes are packed.

    Attributes:
      codes: `int32 [*lead, padded n]`, of which the lowest `bits` bits are stored.
      scale: as stored: uint8 bytes or float32, `[*lead, blocks]`, `[*lead, 1]` a row, or `[]` a tensor.
      tensor_scale: `float32 []`, or None for formats without.
    """

    codes: Int32[Array, "*lead p"]
    scale: Shaped[Array, "..."]
    tensor_scale: Float32[Array, ""] | None


@dataclasses.dataclass(frozen=True)
class Format:
    """What all formats have; one of the classes below.

    Attributes:
      bits: a code.
      per: what has a scale of its own: "block", "row" or "tensor".
      block_size: elements of a block; None without blocks.
    """

    bits: ClassVar[int]
    tensor_scaled: ClassVar[bool] = False
    scale_dtype: ClassVar[Any] = np.dtype(np.float32)

    @property
    def name(self) -> str:
        """Under which `resolve` finds it."""
        raise NotImplementedError

    def padded(self, n: int) -> int:
        """Elements that a row of n is stored with.

        >>> NVFP4().padded(17), Sign().padded(17)
        (32, 24)
        """
        unit = self.block_size or packing.per_byte(self.bits)
        return -(-n // unit) * unit

    def scale_shape(self, lead: tuple[int, ...], n: int) -> tuple[int, ...]:
        """Shape of the scales of `[*lead, n]`.

        >>> MXFP4().scale_shape((8,), 100), Ternary().scale_shape((8,), 100)
        ((8, 4), ())
        """
        if self.per == "tensor":
            return ()
        return (*lead, 1 if self.per == "row" else self.padded(n) // self.block_size)

    def encode(self, x: Float32[Array, "*lead n"]) -> Encoded:
        """Codes and scales of an array whose rows lie along the last axis."""
        raise NotImplementedError

    def decode(self, encoded: Encoded) -> Float32[Array, "*lead p"]:
        """The values, those of the padding included; of the codes, only the lowest `bits` bits are read."""
        raise NotImplementedError

    def inside(self, x: Float32[Array, "*lead n"], encoded: Encoded) -> Bool[Array, "*lead n"]:
        """Where x was not clipped: what a straight-through gradient passes."""
        return jnp.ones(x.shape, bool)

    def cut(self, x: Shaped[Array, "*lead p"]) -> Shaped[Array, "..."]:
        """Padded rows as `[*lead, blocks, B]`; without blocks, `[*lead, 1, p]`."""
        size = self.block_size or x.shape[-1]
        return x.reshape(*x.shape[:-1], x.shape[-1] // size if size else 1, size)

    def _blocks(self, x: Float32[Array, "*lead n"]) -> Float32[Array, "..."]:
        pad = self.padded(x.shape[-1]) - x.shape[-1]
        return self.cut(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]))

    def _up_to(self, x: Float32[Array, "*lead n"], limit: Float32[Array, "..."]) -> Bool[Array, "*lead n"]:
        return _join(jnp.abs(self._blocks(x)) <= limit)[..., : x.shape[-1]]

    def _spread(self, scale: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Stored scales in a form that broadcasts against `cut`."""
        return scale if self.per == "tensor" else scale[..., None]


def _join(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


@dataclasses.dataclass(frozen=True)
class NVFP4(Format):
    """E2M1 in blocks of 16 with an E4M3 scale s_b each, and a float32 scale ts a tensor.

        ts = max|x| / (6 448)    s_b = clip(max|x_b| / 6 / ts, 2^-9, 448)    value = E2M1(x / (s_b ts)) s_b ts

    >>> NVFP4().name, NVFP4().bits
    ('nvfp4', 4)
    """

    bits: ClassVar[int] = 4
    per: ClassVar[str] = "block"
    block_size: ClassVar[int] = numerics.NVFP4_BLOCK
    tensor_scaled: ClassVar[bool] = True
    scale_dtype: ClassVar[Any] = np.dtype(np.uint8)

    @property
    def name(self) -> str:
        """`nvfp4`."""
        return "nvfp4"

    def __str__(self) -> str:
        return self.name

    def encode(self, x: Float32[Array, "*lead n"]) -> Encoded:
        """See `Format`."""
        tensor_scale = numerics.nvfp4_tensor_scale(exact.peak(x, None).reshape(()))
        codes, byte = numerics.nvfp4_encode(self._blocks(x), tensor_scale)
        return Encoded(_join(codes), byte[..., 0].astype(jnp.uint8), tensor_scale)

    def decode(self, encoded: Encoded) -> Float32[Array, "*lead p"]:
        """See `Format`."""
        byte = self._spread(encoded.scale).astype(jnp.int32)
        return _join(numerics.nvfp4_decode(self.cut(encoded.codes), byte, encoded.tensor_scale))

    def inside(self, x: Float32[Array, "*lead n"], encoded: Encoded) -> Bool[Array, "*lead n"]:
        """|x| <= 6 s_b ts, but for rounding: the largest element of a tensor is inside."""
        byte = self._spread(encoded.scale).astype(jnp.int32)
        return self._up_to(x, numerics.nvfp4_limit(byte, encoded.tensor_scale))


@dataclasses.dataclass(frozen=True)
class MXFP4(Format):
    """E2M1 in blocks of 32 with a power of two as the scale of each; see `numerics.e8m0_encode` for the rules.

    Attributes:
      scale_rule: "floor" (OCP; saturates above 6 / 8 of the range), "ceil" (never saturates) or "even".

    Raises:
      ValueError: for another rule.

    >>> str(MXFP4("ceil"))
    'mxfp4 ceil'
    """

    scale_rule: str = "floor"
    bits: ClassVar[int] = 4
    per: ClassVar[str] = "block"
    block_size: ClassVar[int] = numerics.MXFP4_BLOCK
    scale_dtype: ClassVar[Any] = np.dtype(np.uint8)

    def __post_init__(self) -> None:
        if self.scale_rule not in numerics.E8M0_RULES:
            raise ValueError(f"scale_rule must be one of {numerics.E8M0_RULES}, got {self.scale_rule!r}")

    @property
    def name(self) -> str:
        """`mxfp4`."""
        return "mxfp4"

    def __str__(self) -> str:
        return f"{self.name} {self.scale_rule}"

    def encode(self, x: Float32[Array, "*lead n"]) -> Encoded:
        """See `Format`."""
        codes, byte = numerics.mxfp4_encode(self._blocks(x), self.scale_rule)
        return Encoded(_join(codes), byte[..., 0].astype(jnp.uint8), None)

    def decode(self, encoded: Encoded) -> Float32[Array, "*lead p"]:
        """See `Format`."""
        return _join(numerics.mxfp4_decode(self.cut(encoded.codes), self._spread(encoded.scale).astype(jnp.int32)))

    def inside(self, x: Float32[Array, "*lead n"], encoded: Encoded) -> Bool[Array, "*lead n"]:
        """|x| <= 6 times the scale."""
        return self._up_to(x, numerics.mxfp4_limit(self._spread(encoded.scale).astype(jnp.int32)))


def _check_blocks(fmt: Any) -> None:
    if fmt.per not in PER:
        raise ValueError(f"per must be one of {PER}, got {fmt.per!r}")
    size, unit = fmt.block_size, packing.per_byte(fmt.bits)
    if (size is None) != (fmt.per != "block"):
        raise ValueError(f"per='block' and block_size go together, got per={fmt.per!r} and block_size={size!r}")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % unit):
        raise ValueError(f"block_size must be a positive multiple of {unit} for {fmt.bits}-bit codes, got {size!r}")


class _Scaled(Format):
    """A format whose values are small integers times a float32 scale."""

    def __str__(self) -> str:
        return f"{self.name} per {self.per}" + (f" of {self.block_size}" if self.block_size else "")

    def _encode(self, blocks: Float32[Array, "..."], scale: Float32[Array, "..."]) -> Int32[Array, "..."]:
        raise NotImplementedError

    def _decode(self, codes: Int32[Array, "..."], scale: Float32[Array, "..."]) -> Float32[Array, "..."]:
        raise NotImplementedError

    def _scale(self, x: Float32[Array, "*lead n"]) -> Float32[Array, "..."]:
        raise NotImplementedError

    def encode(self, x: Float32[Array, "*lead n"]) -> Encoded:
        """See `Format`."""
        scale = self._scale(x)
        codes = self._encode(self._blocks(x), self._spread(scale))
        return Encoded(_join(codes), scale, None)

    def decode(self, encoded: Encoded) -> Float32[Array, "*lead p"]:
        """See `Format`."""
        return _join(self._decode(self.cut(encoded.codes), self._spread(encoded.scale)))

    def _means(self, x: Float32[Array, "*lead n"]) -> Float32[Array, "..."]:
        """Mean of |x| of every block, row or of the tensor; the zeros of the padding do not count."""
        if self.per == "tensor":
            return exact.mean_magnitude(x, tuple(range(x.ndim))).reshape(())
        if self.per == "row":
            return exact.mean_magnitude(x)
        full, tail = divmod(x.shape[-1], self.block_size)
        whole = full * self.block_size
        means = exact.mean_magnitude(x[..., :whole].reshape(*x.shape[:-1], full, self.block_size))[..., 0]
        return jnp.concatenate([means, exact.mean_magnitude(x[..., whole:])], axis=-1) if tail else means


@dataclasses.dataclass(frozen=True)
class Int(_Scaled):
    """Symmetric integers: value = k s with s = max|x| / qmax, k = clip(round(x / s), -qmax, qmax), qmax = 127 or 7.

    Attributes:
      bits: 8 or 4.
      per: what has a scale.
      block_size: with per="block".

    Raises:
      ValueError: for anything else.

    >>> str(Int(4, "block", 32)), str(Int(8))
    ('int4 per block of 32', 'int8 per row')
    """

    bits: int = 8
    per: str = "row"
    block_size: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {self.bits!r}")
        _check_blocks(self)

    @property
    def name(self) -> str:
        """`int8` or `int4`."""
        return f"int{self.bits}"

    def _scale(self, x: Float32[Array, "*lead n"]) -> Float32[Array, "..."]:
        if self.per == "tensor":
            return numerics.int_scale(exact.peak(x, None).reshape(()), self.bits)
        return numerics.int_scale(exact.peak(self._blocks(x))[..., 0], self.bits)

    def _encode(self, blocks: Float32[Array, "..."], scale: Float32[Array, "..."]) -> Int32[Array, "..."]:
        return numerics.int_encode(blocks, scale, self.bits)

    def _decode(self, codes: Int32[Array, "..."], scale: Float32[Array, "..."]) -> Float32[Array, "..."]:
        return numerics.int_decode(numerics.sign_extend(codes, self.bits), scale)


@dataclasses.dataclass(frozen=True)
class Ternary(_Scaled):
    """clip(round(x / (g + eps)), -1, 1) times g = mean|x|, as in BitNet b1.58 (arXiv 2402.17764).

    What was dequantised has another mean: quantising it again gives the same codes (as long as eps is small against g),
    and a smaller scale.

    Attributes:
      per: what has a scale.
      block_size: with per="block".
      eps: added to the mean where values are divided by it. BitNet's value lets weights near 1e-5 become zeros.

    Raises:
      ValueError: for anything else.

    >>> str(Ternary()), str(Ternary("row"))
    ('ternary per tensor', 'ternary per row')
    """

    per: str = "tensor"
    block_size: int | None = None
    eps: float = 1e-5
    bits: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check_blocks(self)
        if not 0 <= self.eps < math.inf:
            raise ValueError(f"eps must be finite and >= 0, got {self.eps!r}")

    @property
    def name(self) -> str:
        """`ternary`."""
        return "ternary"

    def __str__(self) -> str:
        return super().__str__() + (f", eps={self.eps}" if self.eps != 1e-5 else "")

    def _scale(self, x: Float32[Array, "*lead n"]) -> Float32[Array, "..."]:
        return self._means(x)

    def _encode(self, blocks: Float32[Array, "..."], scale: Float32[Array, "..."]) -> Int32[Array, "..."]:
        return numerics.ternary_encode(blocks, scale, self.eps)

    def _decode(self, codes: Int32[Array, "..."], scale: Float32[Array, "..."]) -> Float32[Array, "..."]:
        return numerics.ternary_decode(codes, scale)

    def inside(self, x: Float32[Array, "*lead n"], encoded: Encoded) -> Bool[Array, "*lead n"]:
        """|x| <= 3/2 (g + eps): beyond, the rounded quotient was clipped."""
        return self._up_to(x, numerics.ternary_limit(self._spread(encoded.scale), self.eps))


@dataclasses.dataclass(frozen=True)
class Sign(_Scaled):
    """-1 and 1 times mean|x|, the best scale in the squared error; zeros count as +1.

    Attributes:
      per: what has a scale.
      block_size: with per="block".

    Raises:
      ValueError: for anything else.

    >>> str(Sign("block", 64))
    'sign per block of 64'
    """

    per: str = "tensor"
    block_size: int | None = None
    bits: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_blocks(self)

    @property
    def name(self) -> str:
        """`sign`."""
        return "sign"

    def _scale(self, x: Float32[Array, "*lead n"]) -> Float32[Array, "..."]:
        return self._means(x)

    def _encode(self, blocks: Float32[Array, "..."], scale: Float32[Array, "..."]) -> Int32[Array, "..."]:
        return numerics.sign_encode(blocks)

    def _decode(self, codes: Int32[Array, "..."], scale: Float32[Array, "..."]) -> Float32[Array, "..."]:
        return numerics.sign_decode(codes, scale)


FORMATS: Mapping[str, Format] = {
    "nvfp4": NVFP4(),
    "mxfp4": MXFP4(),
    "int8": Int(8),
    "int4": Int(4),
    "ternary": Ternary(),
    "sign": Sign(),
}


def resolve(
    format: str | Format,
    *,
    scale_rule: str | None = None,
    block_size: int | None = None,
    per: str | None = None,
) -> Format:
    """The format of a name, with what is not None changed.

    Args:
      format: a name of `FORMATS`, or a format.
      scale_rule: of mxfp4.
      block_size: of int8, int4, ternary and sign, where it implies per="block"; nvfp4 and mxfp4 have 16 and 32.
      per: of int8, int4, ternary and sign: "tensor", "row" or "block".

    Raises:
      TypeError: when `format` is something else.
      ValueError: for a name that is not known, and an option that the format does not have.

    >>> resolve("mxfp4", scale_rule="ceil")
    MXFP4(scale_rule='ceil')
    >>> resolve("int4", block_size=32)
    Int(bits=4, per='block', block_size=32)
    """
    if isinstance(format, str):
        if format not in FORMATS:
            raise ValueError(f"format {format!r} is not known{did_you_mean(format, FORMATS)}")
        format = FORMATS[format]
    if not isinstance(format, Format):
        raise TypeError(f"format must be a name or a Format, got {format!r}")
    fields = {field.name for field in dataclasses.fields(format)}
    if scale_rule is not None and "scale_rule" not in fields:
        raise ValueError(f"scale_rule is an option of mxfp4, got {scale_rule!r} for {format.name}")
    if block_size is not None and "block_size" not in fields and block_size != format.block_size:
        raise ValueError(f"block_size must be {format.block_size} for {format.name}, got {block_size!r}")
    if per is not None and "per" not in fields and per != format.per:
        raise ValueError(f"per must be {format.per!r} for {format.name}, got {per!r}")
    changes: dict[str, Any] = {}
    if scale_rule is not None:
        changes["scale_rule"] = scale_rule
    if block_size is not None and "block_size" in fields:
        changes |= {"block_size": block_size, "per": "block"}
    if per is not None and "per" in fields:
        changes |= {"per": per} if per == "block" or block_size is not None else {"per": per, "block_size": None}
    return dataclasses.replace(format, **changes) if changes else format
