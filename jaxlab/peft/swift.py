"""SWIFT: diagonal blocks whose outputs are routed by a fixed permutation, so that small blocks mix the whole width.

    y = x K + Pi (x D),   D = blockdiag(D_1, ..., D_N)      "routed"
    y = x K + (I + Pi) (x D)                                "local+routed", with the same numbers

A block-diagonal update alone (DiaBlo) never moves information from one block of coordinates to another: stacked on a
residual stream it has N islands. A permutation that scatters every block over many blocks joins them at no cost in
parameters: the coordinates become a small-world graph, cliques (the blocks) with one long-range edge each. How well Pi
scatters is tau, the least number of blocks that the outputs of a block come to; `min(ceil(m/N), N)` is the most there
can be, and the perfect shuffle reaches it. tau >= 2 is required. `peft.topology` measures the graphs.

The paper's text was not at hand; this is a reconstruction from its abstract, on top of DiaBlo (arXiv 2506.03230).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Key

from jaxlab.peft.method import Arrays, natural, option
from jaxlab.peft.sparse import DiaBlo
from jaxlab.peft.topology import scattering

PERMUTATIONS = ("shuffle", "butterfly", "random")
PLACEMENTS = ("output", "input")
MODES = ("routed", "local+routed")


def permutation(kind: str | Sequence[int], size: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Where routed coordinates come from: coordinate j receives coordinate `perm[j]`.

    Args:
      kind: "shuffle", `arange(N b).reshape(N, b).T`, the transposition of blocks and places; "butterfly", place o of
        block k comes from place o of block `k xor (o mod N)`, its own inverse, for N a power of 2; "random"; or the
        permutation itself. Where N does not divide the size, that of the next multiple without what is beyond.
      size: number of coordinates.
      blocks: N.
      seed: of "random".

    Returns:
      A permutation of `arange(size)`.

    Raises:
      ValueError: for another kind, something that is no permutation, or a butterfly of blocks that are no power of 2.

    >>> permutation("shuffle", 6, 2).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    b = -(-size // blocks)
    padded = np.arange(blocks * b).reshape(blocks, b)
    if not isinstance(kind, str):
        perm = np.asarray(kind)
        if perm.shape != (size,) or not np.array_equal(np.sort(perm), np.arange(size)):
            raise ValueError(f"perm must be a permutation of 0 to {size - 1}, got {perm.size} numbers that are none")
        return perm.astype(np.int32)
    option("perm", kind, PERMUTATIONS)
    if kind == "random":
        return np.random.default_rng(seed).permutation(size).astype(np.int32)
    if kind == "butterfly":
        if blocks & (blocks - 1):
            raise ValueError(f"blocks must be a power of 2 for the butterfly, got {blocks}")
        place = np.arange(b)
        perm = padded[np.arange(blocks)[:, None] ^ (place % blocks)[None, :], place[None, :]]
    else:
        perm = padded.T
    perm = perm.ravel()
    return perm[perm < size].astype(np.int32)


@jax.custom_vjp
def _take(x: Float[Array, "*b n"], perm: Int32[Array, " n"], inverse: Int32[Array, " n"]) -> Float[Array, "*b n"]:
    """x[..., perm]; its transpose is a gather, too, where JAX would make a scatter. Has no forward-mode derivative."""
    return jnp.take(x, perm, axis=-1, unique_indices=True, mode="clip")


_take.defvjp(
    lambda x, perm, inverse: (_take(x, perm, inverse), (perm, inverse)),
    lambda saved, g: (jnp.take(g, saved[1], axis=-1, unique_indices=True, mode="clip"), None, None),
)


@dataclasses.dataclass(frozen=True)
class SWIFT(DiaBlo):
    """SWIFT; n m / N numbers, where N divides both.

    Attributes:
      blocks: N >= 2.
      pad: whether N may not divide; then N ceil(n/N) ceil(m/N) numbers.
      perm: "shuffle", "butterfly", "random", or the permutation itself, see `permutation`.
      placement: "output", y = x K + Pi (x D), or "input", y = x K + (Pi x) D.
      mode: "routed" or "local+routed".
      seed: of "random".

    Raises:
      ValueError: in `check`, that is in `match`, when tau < 2 among others.

    >>> SWIFT(4).count(8, 12)
    24
    """

    name: ClassVar[str] = "swift"
    blocks: int = 64
    pad: bool = True
    perm: Any = "shuffle"
    placement: str = "output"
    mode: str = "routed"
    seed: int = 0

    def __post_init__(self) -> None:
        natural("blocks", self.blocks, 2)
        natural("seed", self.seed, 0)
        option("placement", self.placement, PLACEMENTS)
        option("mode", self.mode, MODES)
        if isinstance(self.perm, str):
            option("perm", self.perm, PERMUTATIONS)
        else:
            array = np.asarray(self.perm)
            if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
                raise ValueError(f"perm must be one of {PERMUTATIONS} or a vector of integers, got {self.perm!r}")
            object.__setattr__(self, "perm", tuple(array.tolist()))

    @property
    def label(self) -> str:
        perm = self.perm if isinstance(self.perm, str) else "given"
        place = "" if self.placement == "output" else " input"
        return f"{self.name} N{self.blocks} {perm}{place}" + (" +local" if self.mode != "routed" else "")

    def routes(self, n: int, m: int) -> np.ndarray:
        """The permutation, of outputs or of inputs."""
        return permutation(self.perm, m if self.placement == "output" else n, self.blocks, self.seed)

    def check(self, n: int, m: int) -> None:
        super().check(n, m)
        tau = scattering(self.routes(n, m), self.blocks).tau
        if tau < 2:
            raise ValueError(
                f"perm must scatter each of the {self.blocks} blocks over at least 2 (tau >= 2) for {n} x {m}, but "
                f"{self.label} has tau = {tau}; take fewer blocks, or another permutation or seed"
            )

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        trainable, _ = super().init(key, kernel)
        perm = self.routes(*kernel.shape)
        return trainable, {"perm": jnp.asarray(perm), "inverse": jnp.asarray(np.argsort(perm).astype(np.int32))}

    def delta(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        local = super().delta(kernel, t, f)
        if self.placement == "output":
            routed = _take(local, f["perm"], f["inverse"])
        else:
            routed = _take(local.T, f["inverse"], f["perm"]).T
        return local + routed if self.mode == "local+routed" else routed

    def update(self, x: Float[Array, "*b n"], t: Arrays, f: Arrays, m: int) -> Float[Array, "*b m"]:
        local = self.mode == "local+routed"
        if self.placement == "input":
            routed = self._route(x, f)
            # The blocks are linear: they are applied once, to the sum.
            return super().update(x + routed if local else routed, t, f, m)
        y = super().update(x, t, f, m)
        return y + self._route(y, f) if local else self._route(y, f)

    def _route(self, y: Float[Array, "*b k"], f: Arrays) -> Float[Array, "*b k"]:
        if self.perm == "shuffle" and y.shape[-1] % self.blocks == 0:
            # A transposition, which XLA fuses with what comes before and after.
            return jnp.swapaxes(y.reshape(*y.shape[:-1], self.blocks, -1), -1, -2).reshape(y.shape)
        return _take(y, f["perm"], f["inverse"])

    def support(self, n: int, m: int, f: Arrays) -> np.ndarray:
        local, perm = super().support(n, m, f), np.asarray(f["perm"])
        routed = local[:, perm] if self.placement == "output" else local[np.argsort(perm)]
        return local | routed if self.mode == "local+routed" else routed
