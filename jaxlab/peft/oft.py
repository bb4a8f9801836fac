"""OFT and BOFT: the inputs of a kernel are rotated.

OFT (arXiv 2306.07280): K' = R K with a block-diagonal rotation R of blocks b x b, so `y = (x R) K`. Exact Cayley
rotations, not the Neumann series of OFTv2. n/b * b (b - 1) / 2 numbers.

BOFT (2311.06243): R is a product of f block-diagonal rotations, which see the inputs in butterfly order: factor k
rotates half-blocks (b/2 inputs) u and u xor 2^k together. Factor 0 is OFT; with f = log2(2 n / b) every input reaches
every other. Each output also has a scale: K' = R K diag(s), f * n/b * b (b - 1) / 2 + m numbers.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxlab.peft.method import Arrays, Method, Product, high, natural, option
from jaxlab.peft.rotations import PARAMETRISATIONS, planes, rotation


@dataclasses.dataclass(frozen=True)
class OFT(Method):
    """OFT.

    Attributes:
      block: b; must divide the number of inputs.
      orth: "cayley" or "expm".

    >>> OFT(4).count(8, 6)
    12
    """

    name: ClassVar[str] = "oft"
    block: int = 32
    orth: str = "cayley"

    def __post_init__(self) -> None:
        natural("block", self.block, 2)
        option("orth", self.orth, tuple(PARAMETRISATIONS))

    @property
    def label(self) -> str:
        return f"{self.name} b{self.block}"

    @property
    def depth(self) -> int:
        """Number of block-diagonal factors."""
        return 1

    def check(self, n: int, m: int) -> None:
        if n % self.block:
            raise ValueError(f"block must divide the number of inputs {n}, got {self.block}")

    def count(self, n: int, m: int) -> int:
        return n // self.block * planes(self.block)

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        shape = (self.depth, kernel.shape[0] // self.block, planes(self.block))
        return {"rotation": jnp.zeros(shape, kernel.dtype)}, {}

    def rotations(self, t: Arrays) -> Float[Array, "f g b b"]:
        """The blocks of every factor."""
        return rotation(t["rotation"], self.block, self.orth)

    def rotate(self, x: Float[Array, "*l n"], r: Float[Array, "f g b b"]) -> Float[Array, "*l n"]:
        """x R: factor 0 first."""
        for k in range(self.depth):
            grouped = self._group(x, k)
            grouped = jnp.einsum("...gi,gij->...gj", grouped, r[k].astype(x.dtype), preferred_element_type=r.dtype)
            x = self._ungroup(grouped.astype(x.dtype), k, x.shape)
        return x

    def _group(self, x: Array, k: int) -> Array:
        """[..., n] -> [..., n/b, b]: what factor k rotates together."""
        b = self.block
        if k == 0:
            return x.reshape(*x.shape[:-1], -1, b)
        split = x.reshape(*x.shape[:-1], -1, 2, 2**k, b // 2)
        return jnp.swapaxes(split, -3, -2).reshape(*x.shape[:-1], -1, b)

    def _ungroup(self, x: Array, k: int, shape: tuple[int, ...]) -> Array:
        if k == 0:
            return x.reshape(shape)
        split = x.reshape(*shape[:-1], -1, 2**k, 2, self.block // 2)
        return jnp.swapaxes(split, -3, -2).reshape(shape)

    def rotated(self, kernel: Float[Array, "n m"], t: Arrays) -> Float[Array, "n m"]:
        """R K, from (K^T R^T)^T: every factor transposed, the last first."""
        r, x = self.rotations(t), kernel.T
        for k in reversed(range(self.depth)):
            grouped = high(jnp.swapaxes(self._group(x, k), -2, -3), jnp.swapaxes(r[k], -1, -2))
            x = self._ungroup(jnp.swapaxes(grouped, -2, -3), k, x.shape)
        return x.T

    def merged(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        return self.rotated(kernel, t)

    def apply(
        self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays, x: Float[Array, "*b n"], product: Product
    ) -> Float[Array, "*b m"]:
        return product(self.rotate(x, self.rotations(t)))


@dataclasses.dataclass(frozen=True)
class BOFT(OFT):
    """BOFT.

    Attributes:
      block: b; must be even and divide the number of inputs.
      orth: "cayley" or "expm".
      butterflies: f; the number of half-blocks must be a multiple of 2^f.

    >>> BOFT(4, butterflies=2).count(8, 6)
    30
    """

    name: ClassVar[str] = "boft"
    block: int = 8
    orth: str = "cayley"
    butterflies: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        natural("butterflies", self.butterflies)
        if self.block % 2:
            raise ValueError(f"block must be even, as half-blocks are exchanged, got {self.block}")

    @property
    def label(self) -> str:
        return f"{self.name} b{self.block} f{self.butterflies}"

    @property
    def depth(self) -> int:
        return self.butterflies

    def check(self, n: int, m: int) -> None:
        super().check(n, m)
        if (2 * n // self.block) % 2**self.butterflies:
            raise ValueError(
                f"{self.butterflies} butterflies need a multiple of {2**self.butterflies} half-blocks, but "
                f"2 * {n} / {self.block} = {2 * n // self.block}"
            )

    def count(self, n: int, m: int) -> int:
        return self.butterflies * super().count(n, m) + m

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        trainable, frozen = super().init(key, kernel)
        return {**trainable, "scale": jnp.ones(kernel.shape[1], kernel.dtype)}, frozen

    def merged(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        return self.rotated(kernel, t) * t["scale"]

    def apply(
        self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays, x: Float[Array, "*b n"], product: Product
    ) -> Float[Array, "*b m"]:
        return super().apply(kernel, t, f, x, product) * t["scale"]
