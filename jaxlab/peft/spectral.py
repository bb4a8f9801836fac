"""Adapters that start from the kernel's singular value decomposition: PiSSA and MiLoRA.

K = U S V^T. PiSSA (arXiv 2404.02948) trains a = U_r sqrt(S_r / s), b = sqrt(S_r / s) V_r^T of the r largest singular
values, MiLoRA (2406.09044) those of the r smallest, and freezes the rest of K. Here the kernel stays what it is, and
the start is subtracted instead, which is the same function without a second copy of the base:

    K' = K + s (a b - a0 b0)

The update has rank 2 r, so as a plain LoRA it has twice the rank.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxlab.core import linalg
from jaxlab.peft.lora import LoRA
from jaxlab.peft.method import Arrays, high, natural

_OVERSAMPLE = 8


def leading_svd(
    w: Float[Array, "n m"], rank: int, power: int | None = None, key: Key[Array, ""] | None = None
) -> tuple[Float[Array, "n r"], Float[Array, " r"], Float[Array, "m r"]]:
    """The r largest singular values with their vectors: `(U_r, S_r, V_r)`.

    Args:
      w: a matrix.
      rank: r.
      power: None for the exact decomposition. Otherwise a random range of r + 8 vectors is multiplied by
        `(W W^T)^power` (Halko et al., arXiv 0909.4061), which is much cheaper for a small r and accurate where the
        spectrum falls; with a flat spectrum the vectors are others of about the same singular values.
      key: of the random range; needed with `power`.

    Returns:
      Orthonormal columns, and singular values, descending. The signs are those that the routine returned: keep them.

    Raises:
      ValueError: with `power` and no key.

    >>> leading_svd(jnp.diag(jnp.array([1.0, 3.0])), 1)[1].tolist()
    [3.0]
    """
    if power is None:
        u, s, vt = linalg.svd(w)
    else:
        if key is None:
            raise ValueError("leading_svd needs a key for its random range when power is given")
        width = min(rank + _OVERSAMPLE, *w.shape)
        q, _ = linalg.qr(high(w, jax.random.normal(key, (w.shape[1], width), w.dtype)))
        for _ in range(power):
            # Without a QR after each half, rounding would leave copies of the first vector.
            p, _ = linalg.qr(high(w.T, q))
            q, _ = linalg.qr(high(w, p))
        small, s, vt = linalg.svd(high(q.T, w))
        u = high(q, small)
    return u[:, :rank], s[:rank], vt[:rank].T


@dataclasses.dataclass(frozen=True)
class PiSSA(LoRA):
    """PiSSA; r (n + m) numbers.

    Attributes:
      rank, alpha, rs: as of `LoRA`; the scale does not change the start, only how fast it is left.
      power: None for an exact SVD, or how many power iterations of a random range to use.

    >>> PiSSA(4).count(10, 6)
    64
    """

    name: ClassVar[str] = "pissa"
    reads_kernel: ClassVar[bool] = True
    power: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power is not None:
            natural("power", self.power, 0)

    @property
    def label(self) -> str:
        return f"{self.name}{' rs' if self.rs else ''} r{self.rank}"

    def _start(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Array, Array, Array]:
        return leading_svd(kernel, self.rank, self.power, key)

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        u, s, v = self._start(key, kernel)
        root = jnp.sqrt(s / self.scale)
        a, b = u * root, root[:, None] * v.T
        return {"a": a, "b": b}, {"a": a, "b": b}

    def factors(self, t: Arrays, f: Arrays) -> tuple[Float[Array, "n r"], Float[Array, "r m"]]:
        a = jnp.concatenate([t["a"], f["a"]], axis=-1)
        return a, self.scale * jnp.concatenate([t["b"], -f["b"]], axis=-2)

    def delta(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        # Two products: their difference is exactly 0 at the start, one product's would be rounding.
        return self.scale * (high(t["a"], t["b"]) - high(f["a"], f["b"]))


@dataclasses.dataclass(frozen=True)
class MiLoRA(PiSSA):
    """MiLoRA; r (n + m) numbers. Arguments as of `LoRA`; its SVD is always exact.

    >>> MiLoRA(4).count(10, 6)
    64
    """

    name: ClassVar[str] = "milora"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power is not None:
            raise ValueError(f"power must be None: a random range finds the largest singular values, got {self.power}")

    def _start(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Array, Array, Array]:
        u, s, vt = linalg.svd(kernel)
        return u[:, -self.rank :], s[-self.rank :], vt[-self.rank :].T
