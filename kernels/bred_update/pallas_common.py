"""What the Pallas kernels of both backends share: one table of the steps, checks, scalars, block specifications.

A kernel works on tiles `[rows, B]`, one block a row, and calls the functions of `steps`, as the XLA path does: the
formulas exist once. Only what surrounds them is the backend's: how tiles come from memory and how codes are packed.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8, UInt32

from jaxlab.kernels.bred_update import numerics, steps
from jaxlab.kernels.bred_update.codec import QTensor, QuantSpec

Word = int | Int[Array, ""] | UInt32[Array, ""]


@dataclasses.dataclass(frozen=True)
class Layouts:
    """How the rows of a leaf, seen as `[rows, n]`, are cut into blocks; the same for all its states.

    Attributes:
      rows: product of the leading axes.
      n: elements of a row.
      block: B.
    """

    rows: int
    n: int
    block: int

    @property
    def full(self) -> int:
        """Full blocks of a row."""
        return self.n // self.block

    @property
    def tail(self) -> int:
        """Elements of the short block at the end of a row, 0 where there is none."""
        return self.n % self.block

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.full + (self.tail > 0)


@dataclasses.dataclass(frozen=True, eq=False)
class TileSpec(QuantSpec):
    """The specification of a state inside a kernel: one that also knows which elements of a tile exist.

    Attributes:
      keep: where elements exist, None where all do; the others are encoded as zeros, as `codec.encode` does.
      bytewise: whether a code fills a byte here, because the kernel packs and unpacks by itself.
    """

    keep: Bool[Array, "..."] | None = None
    bytewise: bool = False

    def encode_block(
        self, x: Float32[Array, "*n b"], u: Float32[Array, "*m"]
    ) -> tuple[UInt8[Array, "*n w"], Float32[Array, "*n 1"]]:
        """Codes and scale of the blocks of a tile."""
        if self.keep is not None:
            x = jnp.where(self.keep, x, jnp.float32(0))
        # The maximum of some accelerators passes over NaN, and would pack it as a valid code; infinity it sees.
        finite = (x >= 0) & (x < jnp.inf) if self.nonneg else jnp.abs(x) < jnp.inf
        x = jnp.where(finite, x, jnp.float32(jnp.inf))
        if not self.bytewise:
            return super().encode_block(x, u)
        codes, scale = numerics.encode(
            x, u, steps=self.steps, nonneg=self.nonneg, scale_dtype=jnp.dtype(self.scale_dtype)
        )
        return codes.astype(jnp.uint8), scale

    def decode_block(
        self, words: UInt8[Array, "*n w"], scale: Float[Array, "*n 1"], u: Float32[Array, "*m"] | float
    ) -> Float32[Array, "*n b"]:
        """The values of the blocks of a tile."""
        if not self.bytewise:
            return super().decode_block(words, scale, u)
        subtracted = u if self.rounding == "dither" else jnp.float32(0)
        codes = words.astype(jnp.int32)
        return numerics.decode(codes, scale, subtracted, steps=self.steps, nonneg=self.nonneg, variance=self.variance)


def tile_spec(spec: QuantSpec, keep: Bool[Array, "..."] | None = None, bytewise: bool = False) -> TileSpec:
    """`spec` for the tiles of a kernel."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(QuantSpec)}
    return TileSpec(**fields, keep=keep, bytewise=bytewise)


Tile = tuple[Any, ...]  # (parameters, *moments)
Moments = Sequence[steps.Moment]
Dithers = Sequence[steps.Dithers]
Specs = Sequence[QuantSpec]
Step = Callable[[Any, Any, Moments, Dithers, steps.Hyper, Specs], Tile]


def adamw_step(p: Any, g: Any, moments: Moments, dithers: Dithers, h: steps.Hyper, specs: Specs) -> Tile:
    """`steps.adamw` on lists of moments, dithers and specifications."""
    return steps.adamw(p, g, *moments, tuple(dithers), h, tuple(specs))


def lion_step(p: Any, g: Any, moments: Moments, dithers: Dithers, h: steps.Hyper, specs: Specs) -> Tile:
    """`steps.lion` likewise."""
    return steps.lion(p, g, moments[0], dithers[0], h, specs[0])


def sgdm_step(
    p: Any, g: Any, moments: Moments, dithers: Dithers, h: steps.Hyper, specs: Specs, *, nesterov: bool = False
) -> Tile:
    """`steps.sgdm` likewise."""
    return steps.sgdm(p, g, moments[0], dithers[0], h, specs[0], nesterov=nesterov)


def check(p: Float[Array, "*s"], g: Float[Array, "*s"], moments: Sequence[QTensor], dtypes: Sequence[str]) -> None:
    """Raises TypeError or ValueError for what no kernel of the backend can take; `dtypes` are its parameters' types."""
    for name, x in (("p", p), ("g", g)):
        if x.dtype.name not in dtypes:
            raise TypeError(f"{name} must be one of {tuple(dtypes)} for this kernel, got {x.dtype}")
    for q in moments:
        if tuple(q.shape) != tuple(p.shape):
            raise ValueError(f"a state stands for shape {list(q.shape)}, but the parameters have {list(p.shape)}")
        if q.spec.map == "auto":
            raise ValueError("spec.map must be 'linear', 'zero' or 'sqrt' here, got 'auto'")
        if q.spec.rounding == "stochastic":
            raise ValueError(
                "spec.rounding must be 'dither' or 'nearest' for a Pallas kernel, got 'stochastic', which needs a "
                "random number an element; implementation='xla' has it"
            )
        lead = tuple(q.shape[:-1])
        expected = (*lead, q.layout.bytes), (*lead, q.layout.blocks)
        if (q.codes.shape, q.scale.shape) != expected:
            raise ValueError(
                f"codes and scale of a {list(q.shape)} state must have the shapes {expected[0]} and {expected[1]}, "
                f"got {q.codes.shape} and {q.scale.shape}"
            )
    sizes = {q.spec.block_size for q in moments}
    if len(sizes) > 1:
        raise ValueError(f"the states of a leaf must have one block_size in a fused step, got {sorted(sizes)}")


def words(seed: Word, leaves: Sequence[Word], count: Word) -> UInt32[Array, "w"]:
    """The stream words of every state: at `count`, to decode, and at `count + 1`, to encode.

    >>> words(0, (7, 8), 3).shape
    (4,)
    """
    at = jnp.asarray(count)
    return jnp.stack([numerics.stream(seed, leaf, at + i) for leaf in leaves for i in (0, 1)])


def scalars(hyper: steps.Hyper) -> Float32[Array, "h"]:
    """The hyperparameters as one float32 array, in the order of `steps.Hyper`."""
    return jnp.stack([jnp.asarray(x, jnp.float32) for x in hyper])


def dither_pair(
    spec: QuantSpec, word: Sequence[UInt32[Array, ""]], index: UInt32[Array, "*n"]
) -> tuple[Float32[Array, "*n"], Float32[Array, "*n"]]:
    """(u0, u1) of the blocks with these indices in the whole leaf; zeros where the rounding has no dither."""
    if spec.rounding != "dither":
        return jnp.zeros(index.shape, jnp.float32), jnp.zeros(index.shape, jnp.float32)
    return numerics.dither(word[0], index), numerics.dither(word[1], index)


# What a backend gives: new (p, codes, scale, codes, scale, ...) from
# (step, specs, layouts, words, scalars, p, g, (codes, scale, ...)), all arrays [rows, ...].
Run = Callable[..., Sequence[Array]]


def update(
    run: Run,
    step: Step,
    p: Float[Array, "*s"],
    g: Float[Array, "*s"],
    moments: Sequence[QTensor],
    hyper: steps.Hyper,
    dtypes: Sequence[str],
    *,
    seed: Word,
    leaves: Sequence[Word],
    count: Word,
) -> tuple[Any, ...]:
    """One step of one leaf by a backend's kernel.

    Args:
      run: the backend.
      step: of the table above.
      p, g: parameters and gradient, of one shape.
      moments: its states, encoded at `count`.
      hyper: scalars.
      dtypes: that the backend's kernel takes.
      seed, leaves, count: of the dithers; `leaves` has an entry a state.

    Returns:
      `(p, *moments)`, the moments encoded at `count + 1`.

    Raises:
      TypeError, ValueError: as `check`.
    """
    check(p, g, moments, dtypes)
    if p.size == 0:
        return (p, *moments)
    n = p.shape[-1] if p.ndim else 1
    layouts = Layouts(math.prod(p.shape[:-1]), n, moments[0].spec.block_size)
    rows = layouts.rows
    states = [x.reshape(rows, -1) for q in moments for x in (q.codes, q.scale)]
    out = run(
        step,
        tuple(q.spec for q in moments),
        layouts,
        words(seed, leaves, count),
        scalars(hyper),
        p.reshape(rows, n),
        g.reshape(rows, n),
        states,
    )
    new = [
        dataclasses.replace(q, codes=codes.reshape(q.codes.shape), scale=scale.reshape(q.scale.shape))
        for q, codes, scale in zip(moments, out[1::2], out[2::2], strict=True)
    ]
    return (out[0].reshape(p.shape), *new)
