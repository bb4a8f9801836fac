"""LoRA and its near relatives: a product of two thin matrices beside the kernel.

    K' = K + s a b,   a (n, r),  b (r, m)          y = x K + s (x a) b

LoRA (arXiv 2106.09685): a uniform in +-1/sqrt(n), b = 0, s = alpha / r; rsLoRA (2312.03732): s = alpha / sqrt(r).
LoRA-FA (2308.03303): a stays as it was drawn, only b is trained.
VeRA (2310.11454): random a and b shared by all kernels of a size, trained are a scale of each inner and each output
channel: K' = K + (a diag(d)) (b diag(e)), d = 0.1 and e = 0 at the start.
DoRA (2402.09353): the norm of each output's weights is trained apart from their direction:
K' = g (K + s a b) / ||K + s a b||, norms over the inputs, g = ||K|| at the start; the norm in the denominator counts
as constant for the gradient, as in the paper's section 4.3.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxlab.peft.method import Arrays, LowRank, Method, Product, check_rank, high, narrow, natural


def check_alpha(alpha: float | int | None) -> None:
    """Raises `ValueError` unless alpha is a finite number > 0 or None.

    >>> check_alpha(16)
    """
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if alpha is not None and not (number and 0 < alpha < math.inf):
        raise ValueError(f"alpha must be a finite number > 0 or None, got {alpha!r}")


def uniform(key: Key[Array, ""], n: int, r: int, dtype: jnp.dtype) -> Float[Array, "n r"]:
    """Uniform in +-1/sqrt(n): what Kaiming's rule with a = sqrt(5) gives for n inputs."""
    return jax.random.uniform(key, (n, r), dtype, -(n**-0.5), n**-0.5)


@dataclasses.dataclass(frozen=True)
class LoRA(LowRank):
    """LoRA; r (n + m) numbers.

    Attributes:
      rank: r.
      alpha: s = alpha / r, or alpha / sqrt(r) with `rs`; None for alpha = r.
      rs: rank-stabilised scale.

    >>> LoRA(8, alpha=16).scale, LoRA(16, alpha=16, rs=True).scale, LoRA(4).count(10, 6)
    (2.0, 4.0, 64)
    """

    name: ClassVar[str] = "lora"
    rank: int = 8
    alpha: float | int | None = None
    rs: bool = False

    def __post_init__(self) -> None:
        natural("rank", self.rank)
        check_alpha(self.alpha)

    @property
    def label(self) -> str:
        return f"{'rslora' if self.rs else self.name} r{self.rank}"

    @property
    def scale(self) -> float:
        """s."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rs else self.rank)

    def check(self, n: int, m: int) -> None:
        check_rank(self.rank, n, m)

    def count(self, n: int, m: int) -> int:
        return self.rank * (n + m)

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        n, m = kernel.shape
        a = uniform(key, n, self.rank, kernel.dtype)
        return {"a": a, "b": jnp.zeros((self.rank, m), kernel.dtype)}, {}

    def factors(self, t: Arrays, f: Arrays) -> tuple[Float[Array, "n r"], Float[Array, "r m"]]:
        return t["a"], self.scale * t["b"]


@dataclasses.dataclass(frozen=True)
class LoRAFA(LoRA):
    """LoRA-FA; r m numbers. Arguments as of `LoRA`.

    >>> LoRAFA(4).count(10, 6)
    24
    """

    name: ClassVar[str] = "lora_fa"

    @property
    def label(self) -> str:
        return f"{self.name}{' rs' if self.rs else ''} r{self.rank}"

    def count(self, n: int, m: int) -> int:
        return self.rank * m

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        trainable, _ = super().init(key, kernel)
        return {"b": trainable["b"]}, {"a": trainable["a"]}

    def factors(self, t: Arrays, f: Arrays) -> tuple[Float[Array, "n r"], Float[Array, "r m"]]:
        return f["a"], self.scale * t["b"]


@dataclasses.dataclass(frozen=True)
class VeRA(LowRank):
    """VeRA; r + m numbers.

    Attributes:
      rank: r.
      seed: of the projections, which depend on it and on the size of the kernel only, so that all layers share them.
      start: of d.

    >>> VeRA(4).count(10, 6)
    10
    """

    name: ClassVar[str] = "vera"
    rank: int = 64
    seed: int = 0
    start: float = 0.1

    def __post_init__(self) -> None:
        natural("rank", self.rank)
        natural("seed", self.seed, 0)

    @property
    def label(self) -> str:
        return f"{self.name} r{self.rank}"

    def check(self, n: int, m: int) -> None:
        check_rank(self.rank, n, m)

    def count(self, n: int, m: int) -> int:
        return self.rank + m

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        (n, m), dtype = kernel.shape, kernel.dtype
        first, second = jax.random.split(jax.random.key(self.seed))
        frozen = {"a": uniform(first, n, self.rank, dtype), "b": uniform(second, self.rank, m, dtype)}
        return {"d": jnp.full(self.rank, self.start, dtype), "e": jnp.zeros(m, dtype)}, frozen

    def factors(self, t: Arrays, f: Arrays) -> tuple[Float[Array, "n r"], Float[Array, "r m"]]:
        return f["a"] * t["d"], f["b"] * t["e"]


@dataclasses.dataclass(frozen=True)
class DoRA(LoRA):
    """DoRA; r (n + m) + m numbers. Arguments as of `LoRA`.

    >>> DoRA(4).count(10, 6)
    70
    """

    name: ClassVar[str] = "dora"

    @property
    def label(self) -> str:
        return f"{self.name}{' rs' if self.rs else ''} r{self.rank}"

    def count(self, n: int, m: int) -> int:
        return self.rank * (n + m) + m

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        trainable, frozen = super().init(key, kernel)
        return {**trainable, "magnitude": jnp.linalg.norm(kernel, axis=0)}, frozen

    def gain(self, kernel: Float[Array, "n m"], t: Arrays) -> Float[Array, " m"]:
        """g / ||K + s a b||; an output whose weights are all zero keeps them."""
        norm = jnp.linalg.norm(kernel + high(t["a"], self.scale * t["b"]), axis=0)
        norm = jax.lax.stop_gradient(norm)
        return t["magnitude"] / jnp.where(norm > 0, norm, 1)

    def delta(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        return Method.delta(self, kernel, t, f)

    def merged(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        return self.gain(kernel, t) * (kernel + high(t["a"], self.scale * t["b"]))

    def apply(
        self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays, x: Float[Array, "*b n"], product: Product
    ) -> Float[Array, "*b m"]:
        low = narrow(narrow(x, t["a"]).astype(x.dtype), self.scale * t["b"])
        # The norm is constant for the gradient; stopping here spares the backward pass a product of kernel size.
        gain = t["magnitude"] * self.gain(*jax.lax.stop_gradient((kernel, {**t, "magnitude": 1.0})))
        return gain * (product(x) + low)

    def factors(self, t: Arrays, f: Arrays) -> tuple[Float[Array, "n r"], Float[Array, "r m"]]:
        return Method.factors(self, t, f)
