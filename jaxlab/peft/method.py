"""What an adapter is: a static description, and pure functions over one kernel.

All mathematics is written for one kernel K of shape (n, m) = (inputs, outputs), as Flax has it, so that `y = x K`;
papers write W = K^T. Whatever the shape in the model (heads, convolutions, layers on a leading axis), `spec.Target`
brings it to this form. A method is a frozen dataclass of its hyper-parameters, with

    init(key, K)        -> (trainable, frozen)     two dicts of arrays
    merged(K, t, f)     -> K'                      the adapted kernel
    apply(K, t, f, x, product)  -> x K'            without forming K' where that is cheaper; product(x) is x K, and
                                                   product(x, M) is x M for another kernel M
    count(n, m)         -> int                     how many numbers are trained
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

Arrays = dict[str, Any]  # arrays by name; not annotated closer, as tree functions put other things in their place
Product = Callable[..., Any]


def natural(name: str, value: Any, least: int = 1) -> None:
    """Raises unless value is an integer of at least `least`.

    Raises:
      TypeError: for anything but an integer.
      ValueError: for a smaller one.

    >>> natural("rank", 4)
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


def option(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises `ValueError` unless value is one of `allowed`.

    >>> option("mode", "routed", ("routed", "local+routed"))
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def check_rank(rank: int, n: int, m: int) -> None:
    """Raises `ValueError` unless 1 <= rank <= min(n, m).

    >>> check_rank(4, 8, 4)
    """
    if not 1 <= rank <= min(n, m):
        raise ValueError(f"rank must be from 1 to min(n, m) = {min(n, m)} for a kernel of {n} x {m}, got {rank}")


def high(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """`a @ b` in full precision on every backend: what becomes part of a weight is not computed in TF32 or bfloat16.

    >>> high(jnp.ones((2, 3)), jnp.ones((3, 1))).shape
    (2, 1)
    """
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def narrow(x: Float[Array, "*b i"], w: Float[Array, "i j"]) -> Float[Array, "*b j"]:
    """`x @ w` on activations: operands in x's dtype, accumulated in at least float32, returned so.

    >>> narrow(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 1))).dtype.name
    'float32'
    """
    out = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.matmul(x, w.astype(x.dtype), preferred_element_type=out)


@dataclasses.dataclass(frozen=True)
class Method:
    """The base of all methods; see the module's head.

    Attributes:
      name: what tables call it.
      reads_kernel: whether `init` needs the values of the kernel, so that it must be a float array.
    """

    name: ClassVar[str] = "method"
    reads_kernel: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The name with what matters of the hyper-parameters."""
        return self.name

    def check(self, n: int, m: int) -> None:
        """Raises `ValueError` when a kernel of n x m cannot be adapted so."""

    def count(self, n: int, m: int) -> int:
        """Number of trained numbers for a kernel of n x m."""
        raise NotImplementedError

    def init(self, key: Key[Array, ""], kernel: Float[Array, "n m"]) -> tuple[Arrays, Arrays]:
        """(trainable, frozen) arrays with which the adapted kernel is the kernel."""
        raise NotImplementedError

    def delta(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        """What is added to the kernel."""
        return self.merged(kernel, t, f) - kernel

    def merged(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        """The adapted kernel, in the dtype that is computed in."""
        return kernel + self.delta(kernel, t, f)

    def apply(
        self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays, x: Float[Array, "*b n"], product: Product
    ) -> Float[Array, "*b m"]:
        """`x @ merged(kernel, t, f)`, where `product(x)` computes `x @ kernel`, and `product(x, M)` `x @ M`."""
        return product(x, self.merged(kernel, t, f))

    def factors(self, t: Arrays, f: Arrays) -> tuple[Float[Array, "n r"], Float[Array, "r m"]]:
        """(a, b) with `delta = a @ b`, for methods whose update has low rank whatever is trained.

        Raises:
          TypeError: for the others.
        """
        raise TypeError(f"{self.label} is no low-rank update; to_lora needs a rank for it")

    def support(self, n: int, m: int, f: Arrays) -> np.ndarray:
        """Which entries of the kernel can change: bool [n, m]."""
        return np.ones((n, m), bool)


@dataclasses.dataclass(frozen=True)
class LowRank(Method):
    """Methods whose update is a product of two thin matrices, `delta = a b`; they define `factors`."""

    def factors(self, t: Arrays, f: Arrays) -> tuple[Float[Array, "n r"], Float[Array, "r m"]]:
        raise NotImplementedError

    def delta(self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays) -> Float[Array, "n m"]:
        a, b = self.factors(t, f)
        return high(a, b)

    def apply(
        self, kernel: Float[Array, "n m"], t: Arrays, f: Arrays, x: Float[Array, "*b n"], product: Product
    ) -> Float[Array, "*b m"]:
        def update(x: Array, t: Arrays, f: Arrays) -> Array:
            a, b = self.factors(t, f)
            return narrow(narrow(x, a).astype(x.dtype), b)

        (n, m), rows = kernel.shape, x.size // x.shape[-1]
        if x.dtype == kernel.dtype and rows * (n + m) > 2 * n * m:
            # Two merges, n m r each, take less than the forward pass of the thin products and half of the backward one.
            return merged_product(self, kernel, t, f, x, product, update)
        return product(x) + update(x, t, f)


def merged_product(
    method: Method,
    kernel: Float[Array, "n m"],
    t: Arrays,
    f: Arrays,
    x: Float[Array, "*b n"],
    product: Product,
    update: Callable[[Any, Arrays, Arrays], Any],
) -> Float[Array, "*b m"]:
    """`x @ merged(K)`, whose gradient for the trained arrays is that of `update`, not that of a whole kernel.

    The merged kernel is formed anew in the backward pass, so that it takes no memory in between. Has no forward-mode
    derivative.

    Args:
      method: additive: `merged(K) = K + delta`.
      kernel, t, f, x, product: as in `Method.apply`.
      update: (x, t, f) -> x @ delta, without forming delta.
    """

    @jax.custom_vjp
    def adapted(x: Array, kernel: Array, t: Arrays, f: Arrays) -> Array:
        return product(x, method.merged(kernel, t, f))

    def backward(saved: tuple[Array, Array, Arrays, Arrays], g: Array) -> tuple[Any, ...]:
        x, kernel, t, f = saved
        # The kernel's gradient is dead code unless the base is trained, too.
        dx, dk = jax.vjp(product, x, method.merged(kernel, t, f))[1](g)
        (dt,) = jax.vjp(lambda t: update(x, t, f).astype(g.dtype), t)[1](g)
        return dx, dk, dt, None

    adapted.defvjp(lambda *args: (adapted(*args), args), backward)
    return adapted(x, kernel, t, f)
