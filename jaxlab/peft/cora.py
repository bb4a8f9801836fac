"""CORA: the basis of a pretrained kernel is rotated slice by slice, and its singular values are shifted.

Post-training moves the singular vectors of a weight by nearly shared rotations and scales its singular values nearly
uniformly (He and Cao, "Understanding Post-Training Structural Changes in Large Language Models", arXiv 2509.17866).
CORA trains just that. With W = K^T (m x n, outputs x inputs), its r leading singular triples W ~ U S V^T, and the rows
cut into m/h slices of h = r rows:

    W'_i = W_i + (U_i Q_i (S + diag(d)) Q_i^T - U_i S) V^T,     Q_i a rotation in r dimensions, d shared by the layer

so the numbers trained are m/r * r (r - 1) / 2 + r = m (r - 1) / 2 + r, about a fourth of LoRA's for a square W, at
LoRA's cost: the update has rank r and is exactly a LoRA with the fixed a = V and b = (M - U S)^T.

The paper's text was not at hand; this is a reconstruction from its abstract ("per-slice orthogonal rotations and a
per-layer diagonal scale"). `basis="global"` is the reading above. `basis="slice"` is the other one: every slice has a
singular value decomposition of its own, W_i = U_i S_i V_i^T + rest; with d = 0 it keeps each slice's singular values,
its update has full rank, and it stores a copy of the kernel. Both have the same number of parameters.

At Q = I the gradient is, with G~_i = U_i^T (dL/dW_i) V and K_i the skew-symmetric matrix behind Q_i,

    dL/dK_i[a, b] = (S_b - S_a) (G~_i[a, b] + G~_i[b, a])  for a < b,      dL/dd = sum_i diag(G~_i)

so directions of equal singular values get no gradient: CORA needs a spectrum with gaps, which pretrained weights have
and random ones lack.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxlab.core import linalg
from jaxlab.peft.method import Arrays, LowRank, Method, Product, check_rank, high, natural, option
from jaxlab.peft.rotations import PARAMETRISATIONS, planes, rotation
from jaxlab.peft.spectral import leading_svd

BASES = ("global", "slice")


@dataclasses.dataclass(frozen=True)
class CORA(LowRank):
    """CORA; m (r - 1) / 2 + r numbers, where r divides m and `height` is r.

    Attributes:
      rank: r >= 2.
      basis: "global" or "slice".
      orth: "cayley" or "expm".
      height: h, rows (outputs) of a slice; None for r. The last slice may be shorter. At least r with "slice".
      power: None for an exact SVD of the kernel, or how many power iterations of a random range to use ("global").

    >>> CORA(16).count(4096, 4096), 16 * (4096 + 4096)
    (30736, 131072)
    """

    name: ClassVar[str] = "cora"
    reads_kernel: ClassVar[bool] = True
    rank: int = 16
    basis: str = "global"
    orth: str = "cayley"
    height: int | None = None
    power: int | None = None

    def __post_init__(self) -> None:
        natural("rank", self.rank, 2)
        option("basis", self.basis, BASES)
        option("orth", self.orth, tuple(PARAMETRISATIONS))
        if self.height is not None:
            natural("height", self.height)
        if self.power is not None:
            natural("power", self.power, 0)
            if self.basis == "slice":
                raise ValueError(f"power must be None with basis='slice', whose SVDs are exact, got {self.power}")

    @property
    def label(self) -> str:
        return f"{self.name} {self.basis} r{self.rank}"

    @property
    def rows(self) -> int:
        """h."""
        return self.height or self.rank

    def slices(self, m: int) -> int:
        """Number of slices of m outputs."""
        return -(-m // self.rows)

    def check(self, n: int, m: int) -> None:
        check_rank(self.rank, n, m)
        if self.basis == "slice" and self.rank > self.rows:
            raise ValueError(f"height must be >= rank = {self.rank} with basis='slice', got {self.rows}")

    def count(self, n: int, m: int) -> int:
        return self.slices(m) * planes(self.rank) + self.rank

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        m, dtype = kernel.shape[1], kernel.dtype
        if self.basis == "global":
            v, s, u = leading_svd(kernel, self.rank, self.power, key)
        else:
            u, s, vt = linalg.svd(self._sliced(kernel.T))
            u, s, v = u[..., : self.rank], s[..., : self.rank], jnp.swapaxes(vt[..., : self.rank, :], -1, -2)
        angles = jnp.zeros((self.slices(m), planes(self.rank)), dtype)
        return {"rotation": angles, "d": jnp.zeros(self.rank, dtype)}, {"u": u, "s": s, "v": v}

    def _sliced(self, w: Float[Array, "m k"]) -> Float[Array, "slices h k"]:
        m, k = w.shape
        padded = jnp.pad(w, ((0, self.slices(m) * self.rows - m), (0, 0)))
        return padded.reshape(-1, self.rows, k)

    def moved(self, t: Arrays, f: Arrays) -> Float[Array, "slices h r"]:
        """U_i Q_i (S + diag(d)) Q_i^T - U_i S of all slices: what the update multiplies V^T with."""
        q = rotation(t["rotation"], self.rank, self.orth)
        u = self._sliced(f["u"]) if self.basis == "global" else f["u"]
        s = jnp.broadcast_to(f["s"], (u.shape[0], self.rank))[:, None, :]
        return high(high(u, q) * (s + t["d"]), jnp.swapaxes(q, -1, -2)) - u * s

    def factors(self, t: Arrays, f: Arrays) -> tuple[Float[Array, "n r"], Float[Array, "r m"]]:
        if self.basis == "slice":
            return Method.factors(self, t, f)
        return f["v"], self.moved(t, f).reshape(-1, self.rank)[: f["u"].shape[0]].T

    def delta(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        if self.basis == "global":
            return super().delta(kernel, t, f)
        n, m = kernel.shape
        return high(self.moved(t, f), jnp.swapaxes(f["v"], -1, -2)).reshape(-1, n)[:m].T

    def apply(
        self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays, x: Float[Array, "*b n"], product: Product
    ) -> Float[Array, "*b m"]:
        if self.basis == "global":
            return super().apply(kernel, t, f, x, product)
        return Method.apply(self, kernel, t, f, x, product)
