"""Rotations from skew-symmetric matrices, in matrix products and elementwise operations only.

A skew-symmetric K (r x r, K^T = -K) has r(r-1)/2 free numbers and gives a rotation Q in two ways:

    cayley   Q = (I - K/2)^-1 (I + K/2) = 2 R - I,   R = (I - K/2)^-1;   dQ = R dK R
    expm     Q = exp(K), by scaling and squaring of a Taylor polynomial

Both are I + K + K^2/2 + ... at small K, so their gradients at the start are equal. exp reaches every rotation, Cayley
all but those with an eigenvalue -1. No LAPACK is called: R is found by elimination without pivoting, which is safe as
the symmetric part of I - K/2 is I, so that no pivot is below 1. What rounding leaves of non-orthogonality is removed by
one step of Newton and Schulz, Q (3 I - Q^T Q) / 2, which changes neither an exact rotation nor the gradient.
A truncated Neumann series, which some implementations put in the place of R, is no rotation: see the tests.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.peft.method import high, option

_TAYLOR = 8  # terms; with a norm of at most 1/2 the remainder is below 2^-9 / 9! = 6e-9
_SQUARINGS = 10
_BY_MATMUL = 32


def planes(r: int) -> int:
    """Number of free numbers of a rotation in r dimensions, r (r - 1) / 2.

    >>> planes(4)
    6
    """
    return r * (r - 1) // 2


@functools.lru_cache
def _basis(r: int) -> np.ndarray:
    rows, cols = np.triu_indices(r, 1)
    basis = np.zeros((planes(r), r, r), np.float32)
    basis[np.arange(planes(r)), rows, cols] = 1
    return (basis - basis.transpose(0, 2, 1)).reshape(planes(r), r * r)


def skew(angles: Float[Array, "*s p"], r: int) -> Float[Array, "*s r r"]:
    """The skew-symmetric matrix whose part above the diagonal, row by row, is `angles`.

    >>> skew(jnp.array([1.0, 2.0, 3.0]), 3).tolist()
    [[0.0, 1.0, 2.0], [-1.0, 0.0, 3.0], [-2.0, -3.0, 0.0]]
    """
    if r <= _BY_MATMUL:
        # A product with a constant: the backward pass of a gather is a scatter, slow on CPUs and TPUs.
        flat = high(angles, jnp.asarray(_basis(r), angles.dtype))
        return flat.reshape(*angles.shape[:-1], r, r)
    rows, cols = np.triu_indices(r, 1)
    upper = jnp.zeros((*angles.shape[:-1], r, r), angles.dtype).at[..., rows, cols].set(angles)
    return upper - jnp.swapaxes(upper, -1, -2)


def _polish(q: Float[Array, "*s r r"]) -> Float[Array, "*s r r"]:
    gram = high(jnp.swapaxes(q, -1, -2), q)
    return high(q, 1.5 * jnp.eye(q.shape[-1], dtype=q.dtype) - 0.5 * gram)


def _resolvent(k: Float[Array, "*s r r"]) -> Float[Array, "*s r r"]:
    """(I - K/2)^-1 by Gauss and Jordan, in place."""
    r = k.shape[-1]
    a = jnp.eye(r, dtype=k.dtype) - k / 2

    def eliminate(j: Array, a: Array) -> Array:
        here = jnp.arange(r) == j
        row = jax.lax.dynamic_index_in_dim(a, j, -2, keepdims=True)
        col = jax.lax.dynamic_index_in_dim(a, j, -1, keepdims=True)
        pivot = jax.lax.dynamic_index_in_dim(row, j, -1, keepdims=True)
        a = jnp.where(here, 0, a)
        row = jnp.where(here, 1, row) / pivot
        return jnp.where(here[:, None], row, a - col * row)

    return jax.lax.fori_loop(0, r, eliminate, a)


@jax.custom_jvp
def cayley(k: Float[Array, "*s r r"]) -> Float[Array, "*s r r"]:
    """`(I - K/2)^-1 (I + K/2)`, a rotation for a skew-symmetric K.

    Args:
      k: skew-symmetric matrices.

    Returns:
      Rotations; the identity, exactly, for K = 0.

    >>> cayley(skew(jnp.array([2.0]), 2)).tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    return _polish(2 * _resolvent(k) - jnp.eye(k.shape[-1], dtype=k.dtype))


@cayley.defjvp
def _cayley_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    r = _resolvent(primals[0])
    q = _polish(2 * r - jnp.eye(r.shape[-1], dtype=r.dtype))
    return q, high(high(r, tangents[0]), r)


def expm(k: Float[Array, "*s r r"]) -> Float[Array, "*s r r"]:
    """`exp(K)`, a rotation for a skew-symmetric K.

    Args:
      k: skew-symmetric matrices; the largest sum of the sizes in a row at most 512.

    Returns:
      Rotations; the identity, exactly, for K = 0, and NaN for a larger K.

    >>> bool(jnp.allclose(expm(skew(jnp.array([jnp.pi / 2]), 2)), jnp.array([[0, 1], [-1, 0]]), atol=1e-6))
    True
    """
    norm = jax.lax.stop_gradient(jnp.max(jnp.sum(jnp.abs(k), axis=-1), axis=-1, initial=0))[..., None, None]
    squarings = jnp.ceil(jnp.log2(jnp.maximum(2 * norm, 1)))
    k = k * jnp.exp2(-squarings)
    eye = jnp.eye(k.shape[-1], dtype=k.dtype)
    q = eye + k / _TAYLOR
    for i in range(_TAYLOR - 1, 0, -1):
        q = eye + high(k, q) / i
    for i in range(_SQUARINGS):
        # Each matrix is squared as often as it needs; the number of products is static, so this can be differentiated.
        q = jnp.where(i < squarings, high(q, q), q)
    return jnp.where(squarings > _SQUARINGS, jnp.nan, _polish(q))


PARAMETRISATIONS: dict[str, Callable[[Array], Array]] = {"cayley": cayley, "expm": expm}


def rotation(angles: Float[Array, "*s p"], r: int, how: str) -> Float[Array, "*s r r"]:
    """The rotation in r dimensions that r (r - 1) / 2 numbers stand for.

    Args:
      angles: the part of K above the diagonal.
      r: dimensions.
      how: "cayley" or "expm".

    Returns:
      Orthogonal matrices with determinant 1.

    Raises:
      ValueError: for another `how`.

    >>> rotation(jnp.zeros((5, 3)), 3, "expm").shape
    (5, 3, 3)
    """
    option("orth", how, tuple(PARAMETRISATIONS))
    return PARAMETRISATIONS[how](skew(angles, r))
