"""Matrix factorisations of stacks of matrices that cannot deadlock on a CPU.

jaxlib's LAPACK calls split a *batch* over XLA's intra-op thread pool and wait for it, while they occupy a thread of
that pool. Two such calls at once (two shapes in one program, or the same program on several CPU devices) on a machine
with two cores wait for each other forever (seen with jaxlib 0.10.2). A call for a single matrix does not use the pool,
so on CPU these functions loop over the stack, also under `vmap`; on accelerators they call batched `jnp.linalg`.
They can be differentiated in both modes; under `vmap` *and* differentiation the loop does not hold, and LAPACK gets
the batch that `vmap` made.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def svd(a: Float[Array, "*stack m n"]) -> tuple[Float[Array, "*stack m r"], Float[Array, "*stack r"], Array]:
    """Thin singular value decomposition `A = U diag(s) V^T` of each matrix, `r = min(m, n)`.

    Args:
      a: matrices `[..., m, n]`.

    Returns:
      `(U [..., m, r], s [..., r] descending, V^T [..., r, n])`.

    Example:
      >>> [x.shape for x in svd(jnp.ones((3, 4, 2)))]
      [(3, 4, 2), (3, 2), (3, 2, 2)]
    """
    return _stacked(lambda x: tuple(jnp.linalg.svd(x, full_matrices=False)), a)


def qr(a: Float[Array, "*stack m n"]) -> tuple[Float[Array, "*stack m r"], Float[Array, "*stack r n"]]:
    """Reduced QR factorisation of each matrix, `r = min(m, n)`.

    Example:
      >>> [x.shape for x in qr(jnp.ones((3, 4, 2)))]
      [(3, 4, 2), (3, 2, 2)]
    """
    return _stacked(lambda x: tuple(jnp.linalg.qr(x)), a)


def singular_values(a: Float[Array, "*stack m n"]) -> Float[Array, "*stack r"]:
    """Singular values of each matrix, descending.

    Example:
      >>> singular_values(jnp.diag(jnp.array([1.0, 3.0]))).tolist()
      [3.0, 1.0]
    """
    return _stacked(lambda x: jnp.linalg.svd(x, compute_uv=False), a)


def _stacked(factorise: Callable[[Array], Any], a: Array) -> Any:
    one = jax.custom_batching.sequential_vmap(factorise)

    @jax.custom_jvp
    def looped(x):
        f = one
        for _ in range(x.ndim - 2):
            f = jax.vmap(f)
        return f(x)

    @looped.defjvp
    def derivative(primals, tangents):
        # Not `one`: reverse mode cannot pass through a custom batching rule.
        def plain(x):
            flat = jax.lax.map(factorise, x.reshape(-1, *x.shape[-2:]))
            return jax.tree.map(lambda y: y.reshape(*x.shape[:-2], *y.shape[1:]), flat)

        return jax.jvp(plain, primals, tangents)

    return jax.lax.platform_dependent(a, cpu=looped, default=factorise)
