"""Updates of few entries: DiaBlo's diagonal blocks and SHiRA's random mask; and full fine-tuning, the other extreme.

DiaBlo (arXiv 2506.03230): K' = K + blockdiag(D_1, ..., D_N), each of ceil(n/N) x ceil(m/N), zero at the start. Where N
does not divide, the last block is cut, and its numbers beyond the edge are never used.
SHiRA (2406.13175): K' = K + a sparse matrix whose places are drawn once, here r (n + m) of them as LoRA has numbers.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxlab.peft.method import Arrays, Method, Product, merged_product, natural


@dataclasses.dataclass(frozen=True)
class DiaBlo(Method):
    """DiaBlo; n m / N numbers, where N divides both.

    Attributes:
      blocks: N.
      pad: whether N may not divide; then N ceil(n/N) ceil(m/N) numbers.

    >>> DiaBlo(4).count(8, 12), DiaBlo(4).count(7, 12)
    (24, 24)
    """

    name: ClassVar[str] = "diablo"
    blocks: int = 64
    pad: bool = True

    def __post_init__(self) -> None:
        natural("blocks", self.blocks)

    @property
    def label(self) -> str:
        return f"{self.name} N{self.blocks}"

    def sizes(self, n: int, m: int) -> tuple[int, int]:
        """Inputs and outputs of a block."""
        return -(-n // self.blocks), -(-m // self.blocks)

    def check(self, n: int, m: int) -> None:
        for what, size in (("inputs", n), ("outputs", m)):
            if size % self.blocks and not self.pad:
                raise ValueError(f"blocks must divide the {size} {what} with pad=False, got {self.blocks}")
            if (self.blocks - 1) * -(-size // self.blocks) >= size:
                raise ValueError(f"blocks must leave {what} to every block, but {self.blocks} for {size} do not")

    def count(self, n: int, m: int) -> int:
        i, o = self.sizes(n, m)
        return self.blocks * i * o

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        return {"blocks": jnp.zeros((self.blocks, *self.sizes(*kernel.shape)), kernel.dtype)}, {}

    def dense(self, blocks: Float[Array, "N i o"], n: int, m: int) -> Float[Array, "n m"]:
        """The block-diagonal matrix."""
        count, i, o = blocks.shape
        diagonal = jnp.eye(count, dtype=bool)[:, None, :, None]
        return jnp.where(diagonal, blocks[:, :, None, :], 0).reshape(count * i, count * o)[:n, :m]

    def act(self, x: Float[Array, "*b n"], blocks: Float[Array, "N i o"]) -> Float[Array, "*b N o"]:
        """x times the block-diagonal matrix, a row a block."""
        count, i, _ = blocks.shape
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * i - x.shape[-1])]) if x.shape[-1] < count * i else x
        x = x.reshape(*x.shape[:-1], count, i)
        out = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.einsum("...ki,kio->...ko", x, blocks.astype(x.dtype), preferred_element_type=out)

    def delta(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        return self.dense(t["blocks"], *kernel.shape)

    def update(self, x: Float[Array, "*b n"], t: Arrays, f: Arrays, m: int) -> Float[Array, "*b m"]:
        """x times the update."""
        y = self.act(x, t["blocks"])
        return y.reshape(*y.shape[:-2], -1)[..., :m]

    def apply(
        self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays, x: Float[Array, "*b n"], product: Product
    ) -> Float[Array, "*b m"]:
        update = lambda x, t, f: self.update(x, t, f, kernel.shape[1])  # noqa: E731
        if x.dtype == kernel.dtype:
            # Products of many small blocks are slow for what they compute on CPUs, sums of matrices are not.
            return merged_product(self, kernel, t, f, x, product, update)
        return product(x) + update(x, t, f)

    def support(self, n: int, m: int, f: Arrays) -> np.ndarray:
        i, o = self.sizes(n, m)
        return np.arange(n)[:, None] // i == np.arange(m)[None, :] // o


@dataclasses.dataclass(frozen=True)
class SHiRA(Method):
    """SHiRA with a random mask; r (n + m) numbers.

    Attributes:
      rank: r, of the LoRA with as many numbers.
      entries: how many numbers instead, if given.

    >>> SHiRA(2).count(10, 6), SHiRA(entries=7).count(10, 6)
    (32, 7)
    """

    name: ClassVar[str] = "shira"
    rank: int = 8
    entries: int | None = None

    def __post_init__(self) -> None:
        natural("rank", self.rank)
        if self.entries is not None:
            natural("entries", self.entries)

    @property
    def label(self) -> str:
        return f"{self.name} r{self.rank}" if self.entries is None else f"{self.name} {self.entries}"

    def check(self, n: int, m: int) -> None:
        if self.count(n, m) > n * m:
            raise ValueError(
                f"a kernel of {n} x {m} has {n * m} entries, fewer than the {self.count(n, m)} to be drawn"
            )

    def count(self, n: int, m: int) -> int:
        return self.rank * (n + m) if self.entries is None else self.entries

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        count = self.count(*kernel.shape)
        places = jnp.sort(jax.random.permutation(key, kernel.size)[:count]).astype(jnp.int32)
        return {"values": jnp.zeros(count, kernel.dtype)}, {"places": places}

    def delta(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        flat = jnp.zeros(kernel.size, kernel.dtype)
        flat = flat.at[f["places"]].add(t["values"], unique_indices=True, indices_are_sorted=True)
        return flat.reshape(kernel.shape)

    def support(self, n: int, m: int, f: Arrays) -> np.ndarray:
        mask = np.zeros(n * m, bool)
        mask[np.asarray(f["places"])] = True
        return mask.reshape(n, m)


@dataclasses.dataclass(frozen=True)
class Full(Method):
    """Full fine-tuning of a kernel, n m numbers, behind the same interface: a trained copy in float32.

    >>> Full().count(10, 6)
    60
    """

    name: ClassVar[str] = "full"

    def count(self, n: int, m: int) -> int:
        return n * m

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        return {"kernel": kernel}, {}

    def merged(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        return t["kernel"]

    def apply(
        self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays, x: Float[Array, "*b n"], product: Product
    ) -> Float[Array, "*b m"]:
        return product(x, t["kernel"])
