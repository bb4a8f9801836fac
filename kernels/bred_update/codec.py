"""Arrays of any shape as packed low-bit blocks: the specification, the pytree `QTensor`, `encode` and `decode`.

Blocks lie along the last axis: an array `[*lead, n]` has `ceil(n / B)` blocks a row, of which the last may be shorter.
Codes are `uint8 [*lead, bytes a row]`, scales `[*lead, blocks a row]`, so that both follow the sharding of the array
they stand for. A short block is packed at its own size, rounded up to 8 elements.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Shaped, UInt8, UInt32

from jaxlab.kernels.bred_update import numerics, vector

BLOCK_SIZES = {3: 64, 4: 128, 8: 256}
ROUNDINGS = ("dither", "nearest", "stochastic")
MAPS = ("auto", "linear", "zero", "sqrt")
SCALE_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """How a state is stored; hashable, so it can be a static argument of `jax.jit`.

    Attributes:
      bits: 3, 4 or 8 bits an element, really packed.
      block_size: elements that share a scale, a positive multiple of 8; None for 64, 128 and 256 at 3, 4 and 8 bits.
      rounding: "dither" is block replay dithering: the error is uniform over a step and independent of the value, so
        that over many steps it neither accumulates nor depends on the signal. "stochastic" is unbiased with twice the
        error variance, and larger scales. "nearest" has the smallest error in a single step, but a bias that an
        average with decay b multiplies by 1 / (1 - b); it is the better choice where the signal dominates the noise,
        as it does for momentum late in full-batch training.
      map: "linear" puts all 2^bits levels on [-s, s], with none at zero; "zero" puts one level less there, with one
        at zero; "sqrt" is for values >= 0: the square root on [0, s], debiased, with a floor that keeps every element
        of a non-zero block above zero. "auto" takes "sqrt" for states that are known to be non-negative, else "linear";
        a wrapper takes "sqrt" for those whatever its own spec says.
      scale_dtype: "float32" or "bfloat16" (rounded up before use); float16 would underflow.

    Raises:
      ValueError: for anything else.

    >>> QuantSpec(bits=3).block_size
    64
    """

    bits: int = 4
    block_size: int | None = None
    rounding: str = "dither"
    map: str = "auto"
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in numerics.BITS:
            raise ValueError(f"bits must be one of {numerics.BITS}, got {self.bits!r}")
        object.__setattr__(self, "bits", int(self.bits))
        size = BLOCK_SIZES[self.bits] if self.block_size is None else self.block_size
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 8 or size % 8:
            raise ValueError(f"block_size must be a positive multiple of 8, got {self.block_size!r}")
        object.__setattr__(self, "block_size", int(size))
        for name, allowed in (("rounding", ROUNDINGS), ("map", MAPS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        try:
            scale = np.dtype(self.scale_dtype).name
        except TypeError:
            scale = repr(self.scale_dtype)
        if scale not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype must be one of {SCALE_DTYPES}, got {self.scale_dtype!r}")
        object.__setattr__(self, "scale_dtype", scale)

    @property
    def nonneg(self) -> bool:
        """Whether the map is for values >= 0."""
        return self.map == "sqrt"

    @property
    def steps(self) -> int:
        """L, number of lattice steps between the lowest and the highest level."""
        return 2**self.bits - (2 if self.map == "zero" else 1)

    @property
    def variance(self) -> float:
        """Of the lattice error in squared steps that decoding a square subtracts."""
        return {"dither": numerics.DITHER_VARIANCE, "stochastic": numerics.STOCHASTIC_VARIANCE, "nearest": 0.0}[
            self.rounding
        ]

    def resolve(self, nonneg: bool) -> "QuantSpec":
        """The same with `map="auto"` replaced by the map for a state that is, or is not, non-negative."""
        return dataclasses.replace(self, map="sqrt" if nonneg else "linear") if self.map == "auto" else self

    def encode_block(
        self, x: Float32[Array, "*n b"], u: Float32[Array, "*m"]
    ) -> tuple[UInt8[Array, "*n w"], Float32[Array, "*n 1"]]:
        """Packed codes and scale of whole blocks; see `numerics.encode`. With a fixed map only."""
        codes, scale = numerics.encode(
            x, u, steps=self.steps, nonneg=self.nonneg, scale_dtype=jnp.dtype(self.scale_dtype)
        )
        return numerics.pack(codes, self.bits), scale

    def decode_block(
        self, words: UInt8[Array, "*n w"], scale: Float[Array, "*n 1"], u: Float32[Array, "*m"] | float
    ) -> Float32[Array, "*n b"]:
        """The values of whole blocks; `u` is what was used to encode them, and matters with dither only."""
        subtracted = u if self.rounding == "dither" else jnp.float32(0)
        codes = numerics.unpack(words, self.bits)
        return numerics.decode(codes, scale, subtracted, steps=self.steps, nonneg=self.nonneg, variance=self.variance)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a row of `n` elements is cut into blocks of `block_size`.

    Attributes:
      n: elements of a row.
      spec: of the blocks.
    """

    n: int
    spec: QuantSpec

    @property
    def full(self) -> int:
        """Number of full blocks."""
        return self.n // self.spec.block_size

    @property
    def tail(self) -> int:
        """Elements of the last, short block; 0 where there is none."""
        return self.n % self.spec.block_size

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.full + (self.tail > 0)

    @property
    def main_bytes(self) -> int:
        """Bytes of the full blocks."""
        return numerics.packed_size(self.full * self.spec.block_size, self.spec.bits)

    @property
    def bytes(self) -> int:
        """Bytes of a row."""
        return self.main_bytes + numerics.packed_size(-(-self.tail // 8) * 8, self.spec.bits)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["shape", "dtype", "spec"]
)
@dataclasses.dataclass(frozen=True)
class QTensor:
    """An array in packed low-bit blocks; a pytree of two arrays.

    Attributes:
      codes: `uint8 [*lead, bytes a row]`.
      scale: `[*lead, blocks a row]`, of `spec.scale_dtype`.
      shape: of the array it stands for.
      dtype: of the array it stands for.
      spec: how it is stored, with a fixed map.
    """

    codes: Any  # not annotated as arrays: tree functions put structs, shardings and placeholders here
    scale: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: QuantSpec

    @property
    def size(self) -> int:
        """Number of elements it stands for."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in (self.codes, self.scale))

    @property
    def checkpoint_meta(self) -> str:
        """What a checkpoint must agree in, beside the arrays."""
        s = self.spec
        return f"{s.bits} bits, block_size={s.block_size}, {s.rounding}, {s.map} map of {self.dtype}{list(self.shape)}"

    @property
    def layout(self) -> Layout:
        """Of a row."""
        return Layout(self.shape[-1] if self.shape else 1, self.spec)


def is_quantized(x: Any) -> bool:
    """Whether x is a `QTensor`; the `is_leaf` for tree functions that shall see whole states."""
    return isinstance(x, QTensor)


def _check(seed: Any, spec: QuantSpec) -> None:
    if not isinstance(seed, jax.Array) and (isinstance(seed, bool) or operator.index(seed) < 0):
        raise ValueError(f"seed must be an integer >= 0, got {seed!r}")
    if spec.map == "auto":
        raise ValueError("spec.map must be 'linear', 'zero' or 'sqrt' here, got 'auto': the codec cannot know the sign")


def dither(
    spec: QuantSpec,
    lead: tuple[int, ...],
    blocks: int,
    *,
    seed: int,
    leaf: int,
    count: Int[Array, ""] | int,
    offset: int | UInt32[Array, ""] = 0,
) -> Float32[Array, "*lead b"]:
    """One dither value a block, in [-1/2, 1/2); zeros for the other roundings.

    The value of a block depends on (seed, leaf, count, its index in the whole array) alone: not on how the array is
    split over devices or over calls, and nothing of it is stored.

    Args:
      spec: its rounding.
      lead: leading axes of the array.
      blocks: a row.
      seed: >= 0.
      leaf: a 32-bit word that names the array, such as `leaf_id("mu/w")`.
      count: steps done.
      offset: index of the first block, where the array is a part of a larger one.

    Returns:
      u.
    """
    if spec.rounding != "dither":
        return jnp.zeros((*lead, blocks), jnp.float32)
    word = numerics.stream(seed, leaf, count)
    total = math.prod(lead) * blocks
    index = jax.lax.iota(jnp.uint32, total).reshape(*lead, blocks)
    return numerics.dither(word, index + jnp.asarray(offset, jnp.uint32))


def _element_dither(shape: tuple[int, ...], seed: int, leaf: int, count: Any, offset: Any) -> Float32[Array, "*n"]:
    """One value an element: what stochastic rounding adds."""
    word = numerics.stream(seed, leaf, count)
    index = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return numerics.dither(word, index + jnp.asarray(offset, jnp.uint32))


def leaf_id(name: str) -> int:
    """The 32-bit word of a name: FNV-1a of its UTF-8 bytes, the same in every process.

    >>> hex(leaf_id("mu/w"))
    '0xc8d9c86d'
    """
    word = 0x811C9DC5
    for byte in name.encode():
        word = (word ^ byte) * 0x01000193 & 0xFFFFFFFF
    return word


def encode(
    x: Shaped[Array, "*n"],
    spec: QuantSpec,
    *,
    seed: int = 0,
    leaf: int = 0,
    count: Int[Array, ""] | int = 0,
    offset: int | UInt32[Array, ""] = 0,
) -> QTensor:
    """Quantises an array: formulas in `numerics`, dither of (seed, leaf, count, block).

    Args:
      x: any shape, floating; computed in float32.
      spec: with a fixed map.
      seed, leaf, count, offset: as in `dither`; the offset counts blocks.

    Returns:
      A `QTensor` of the shape and dtype of x. A block with a NaN or an infinity decodes to NaN, and no other does.

    Raises:
      TypeError: for an array that is not real and floating.
      ValueError: for `map="auto"` or a negative seed.

    >>> q = encode(jnp.linspace(-1, 1, 256).reshape(2, 128), QuantSpec(map="linear"))
    >>> q.codes.shape, q.scale.shape, q.nbytes * 8 / q.size
    ((2, 64), (2, 1), 4.25)
    """
    _check(seed, spec)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x must be real and floating, got {x.dtype}")
    shape, dtype = tuple(x.shape), np.dtype(x.dtype)
    rows = jnp.asarray(x, jnp.float32).reshape(shape or (1,))
    *lead, n = rows.shape
    layout, block = Layout(n, spec), spec.block_size
    if math.prod(rows.shape) == 0:
        empty = jnp.zeros((*lead, layout.bytes), jnp.uint8), jnp.zeros((*lead, layout.blocks), spec.scale_dtype)
        return QTensor(*empty, shape, dtype, spec)
    if spec.rounding == "stochastic":
        first = jnp.asarray(offset, jnp.uint32) * jnp.uint32(block)
        u_all = _element_dither(rows.shape, seed, leaf, count, first)
        u_main, u_tail = u_all[..., : layout.full * block], u_all[..., layout.full * block :]
        u_main = u_main.reshape(*lead, layout.full, block)
    else:
        u_all = dither(spec, tuple(lead), layout.blocks, seed=seed, leaf=leaf, count=count, offset=offset)
        u_main, u_tail = u_all[..., : layout.full, None], u_all[..., layout.full :]
    codes, scales = [], []
    if layout.full:
        main = rows[..., : layout.full * block].reshape(*lead, layout.full, block)
        words, scale = _encode_full(spec, main, u_main, count)
        codes.append(words.reshape(*lead, layout.main_bytes))
        scales.append(scale[..., 0])
    if layout.tail:
        pad = [(0, 0)] * len(lead) + [(0, -layout.tail % 8)]
        u_tail = jnp.pad(u_tail, pad) if spec.rounding == "stochastic" else u_tail
        # Zeros raise no block maximum, and their codes are never read.
        words, scale = spec.encode_block(jnp.pad(rows[..., layout.full * block :], pad), u_tail)
        codes.append(words)
        scales.append(scale)
    join = functools.partial(jnp.concatenate, axis=-1)
    codes, scale = (parts[0] if len(parts) == 1 else join(parts) for parts in (codes, scales))
    return QTensor(codes, scale.astype(spec.scale_dtype), shape, dtype, spec)


def _encode_full(
    spec: QuantSpec, x: Float32[Array, "*n b"], u: Float32[Array, "*m"], count: Any
) -> tuple[UInt8[Array, "*n w"], Float32[Array, "*n 1"]]:
    """`QuantSpec.encode_block`, in a form that is fast where it runs."""
    if not vector.serves(x):
        return spec.encode_block(x, u)
    known = jnp.asarray(count) >= 0

    def first() -> Any:
        values = jnp.sqrt(x) if spec.nonneg else x
        return values, vector.peak(values), u

    values, peak, u = vector.stage(known, first)
    scale = numerics.block_scale(peak, jnp.dtype(spec.scale_dtype))

    def pack() -> Any:
        return vector.pack(
            vector.floor(numerics.place(values, scale, u, steps=spec.steps, nonneg=spec.nonneg)), spec.bits
        )

    planes = vector.planes(vector.stage(known, pack), spec.bits)
    return planes[0] if len(planes) == 1 else jnp.concatenate(planes, axis=-1), scale


def _decode_full(
    spec: QuantSpec, words: UInt8[Array, "*n w"], scale: Float[Array, "*n 1"], u: Float32[Array, "*m"], count: Any
) -> Float32[Array, "*n b"]:
    """`QuantSpec.decode_block`, in a form that is fast where it runs."""
    if not vector.serves(words):
        return spec.decode_block(words, scale, u)
    known = jnp.asarray(count) >= 0
    high = vector.stage(known, lambda: vector.high(words)) if spec.bits == 3 else None

    def values() -> Any:
        codes = vector.unpack(words, high, spec.bits)
        form = {"steps": spec.steps, "nonneg": spec.nonneg, "variance": spec.variance}
        return numerics.decode(codes, scale[..., None], u[..., None], **form)

    return vector.stage(known, values).reshape(*words.shape[:-1], -1)


def decode(
    q: QTensor,
    *,
    seed: int = 0,
    leaf: int = 0,
    count: Int[Array, ""] | int = 0,
    offset: int | UInt32[Array, ""] = 0,
) -> Float[Array, "*n"]:
    """The array that a `QTensor` stands for; the four numbers must be those of `encode` (the dither is replayed).

    Returns:
      An array of `q.shape` and `q.dtype`.

    Raises:
      ValueError: when the arrays do not have the shapes that `q.shape` and `q.spec` say.

    >>> x = jnp.array([0.5, -1.0, 0.25])
    >>> q = encode(x, QuantSpec(bits=8, map="linear"), seed=1, count=3)
    >>> bool(abs(decode(q, seed=1, count=3) - x).max() <= 1 / 255)
    True
    """
    spec = q.spec
    _check(seed, spec)
    lead = q.shape[:-1]
    layout, block = q.layout, spec.block_size
    expected = (*lead, layout.bytes), (*lead, layout.blocks)
    if (q.codes.shape, q.scale.shape) != expected:
        raise ValueError(
            f"codes and scale of a {list(q.shape)} state must have the shapes {expected[0]} and {expected[1]}, "
            f"got {q.codes.shape} and {q.scale.shape}"
        )
    if math.prod(q.shape) == 0:
        return jnp.zeros(q.shape, q.dtype)
    u = dither(spec, tuple(lead), layout.blocks, seed=seed, leaf=leaf, count=count, offset=offset)
    parts = []
    if layout.full:
        words = q.codes[..., : layout.main_bytes].reshape(*lead, layout.full, -1)
        main = _decode_full(spec, words, q.scale[..., : layout.full, None], u[..., : layout.full, None], count)
        parts.append(main.reshape(*lead, layout.full * block))
    if layout.tail:
        words = q.codes[..., layout.main_bytes :]
        tail = spec.decode_block(words, q.scale[..., layout.full :], u[..., layout.full :])
        parts.append(tail[..., : layout.tail])
    rows = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)
    return rows.reshape(q.shape).astype(q.dtype)
