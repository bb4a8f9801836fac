"""Second moments of a layer's inputs, H = E[x x'], gathered in a stream and merged over devices or files.

Post-training quantisation measures the error of a layer's output, ||(W - A) X||^2 = tr((W - A) H (W - A)'): all it
needs to know of the calibration data is H.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

HESSIANS = ("none", "diag", "full")


class Moments(NamedTuple):
    """Sums over the inputs of a layer; add two of them (`merge`, or a `psum`) to see both halves of the data.

    Attributes:
      total: sum of x x', `[n, n]`, or of x^2, `[n]`.
      count: number of vectors.
    """

    total: Float[Array, "*h"]
    count: Float[Array, ""]


def moments(n: int, *, full: bool = True) -> Moments:
    """Empty sums for inputs of `n` features; only the diagonal where `full` is False."""
    if n < 1:
        raise ValueError(f"n must be >= 1, got {n}")
    return Moments(jnp.zeros((n, n) if full else n, jnp.float32), jnp.zeros((), jnp.float32))


def update(m: Moments, x: Shaped[Array | np.ndarray, "*batch n"]) -> Moments:
    """Adds inputs `[..., n]`; in float32, jit it.

    >>> update(moments(2), jnp.array([[1.0, 2.0]])).total.tolist()
    [[1.0, 2.0], [2.0, 4.0]]

    Raises:
      ValueError: when x has another number of features.
    """
    if x.shape[-1] != m.total.shape[0]:
        raise ValueError(f"x must have {m.total.shape[0]} features, got {x.shape[-1]}")
    rows = jnp.asarray(x, jnp.float32).reshape(-1, x.shape[-1])
    added = rows.T @ rows if m.total.ndim == 2 else jnp.sum(rows * rows, axis=0)
    return Moments(m.total + added, m.count + rows.shape[0])


def merge(a: Moments, b: Moments) -> Moments:
    """The sums over both.

    >>> int(merge(update(moments(2), jnp.ones((3, 2))), update(moments(2), jnp.ones((4, 2)))).count)
    7
    """
    if a.total.shape != b.total.shape:
        raise ValueError(f"moments of different layers: {a.total.shape} and {b.total.shape}")
    return Moments(a.total + b.total, a.count + b.count)


def hessian(m: Moments, *, damping: float = 0.01) -> Float[np.ndarray, "*h"]:
    """H = total / count + damping mean(diag) I, on the host.

    Raises:
      ValueError: when nothing was added, a sum is not finite, or damping < 0.
    """
    if not damping >= 0:
        raise ValueError(f"damping must be >= 0, got {damping}")
    count, total = float(m.count), np.asarray(m.total, np.float64)
    if count < 1 or not np.isfinite(total).all():
        raise ValueError(f"moments must hold finite inputs of at least one vector, got {count:g}")
    h = total / count
    diagonal = h if h.ndim == 1 else np.diagonal(h)
    if not diagonal.any():
        raise ValueError("moments are those of inputs that are all zero: no error can be weighed with them")
    ridge = damping * np.mean(diagonal)
    return (h + ridge if h.ndim == 1 else h + ridge * np.eye(len(h))).astype(np.float32)


def check_hessian(h: object, n: int) -> None:
    """Checks H for `n` inputs: None, a positive diagonal, or a symmetric matrix with a positive diagonal.

    Raises:
      ValueError: naming what is wrong.
    """
    if h is None:
        return
    a = np.asarray(h)
    if a.shape not in ((n,), (n, n)):
        raise ValueError(f"hessian must have the shape ({n},) or ({n}, {n}), got {a.shape}")
    if not np.isfinite(a).all():
        raise ValueError("hessian must be finite")
    if (a if a.ndim == 1 else np.diagonal(a)).min() <= 0:
        raise ValueError("hessian must have a positive diagonal; add damping")
    if a.ndim == 2 and np.abs(a - a.T).max() > 1e-4 * np.abs(a).max():
        raise ValueError("hessian must be symmetric")


def restrict(h: Float[np.ndarray, "*h"] | None, kind: str) -> Float[np.ndarray, "*k"] | None:
    """What a method is to see of H: "none" of it, its diagonal, or all.

    Raises:
      ValueError: for another kind, or "full" where only a diagonal is there.
    """
    if kind not in HESSIANS:
        raise ValueError(f"hessian must be one of {HESSIANS}, got {kind!r}")
    if h is None or kind == "none":
        return None
    if kind == "full":
        if np.ndim(h) != 2:
            raise ValueError("hessian='full' needs a matrix, got a diagonal")
        return np.asarray(h, np.float32)
    return np.asarray(h if np.ndim(h) == 1 else np.diagonal(h), np.float32)
