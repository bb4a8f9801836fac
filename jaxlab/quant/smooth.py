"""Smoothing: input channels of a layer are scaled up before its weights are rounded, and its inputs scaled down.

    W x = (W diag(t)) (diag(1 / t) x),    t_j = (E x_j^2)^(a / 2) / (max_i |W_ij|)^b

Rounding takes steps in proportion to the largest weight of a block: a channel that is scaled up loses less of what it
carries. (a, 0) are the scales of AWQ; SVDQuant and SmoothQuant divide by the weights' range, too. t is stored in
bfloat16, one number an input; (0, 0) is no smoothing, and stores nothing.

Source: AWQ (arXiv 2306.00978), section 3.2; SVDQuant (arXiv 2411.05007), section 4.1.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxlab.quant.calibrate import check_hessian

Exponents = tuple[float, float]  # (a, b)
NONE: Exponents = (0.0, 0.0)
AWQ: tuple[Exponents, ...] = tuple((i / 10, 0.0) for i in range(11))
GRID: tuple[Exponents, ...] = (*AWQ, *((i / 10, 1 - i / 10) for i in range(1, 10)))


def scales(
    w: Float[np.ndarray, "m n"], h: Float[np.ndarray, "*h"] | None, exponents: Exponents
) -> Float[np.ndarray, " n"] | None:
    """t, of geometric mean one and rounded to bfloat16; None where all are equal.

    Args:
      w: weights `[out, in]`.
      h: H of the inputs or its diagonal; None for inputs of equal size.
      exponents: (a, b), finite.

    Raises:
      ValueError: for other exponents, or an H that does not fit.

    >>> scales(np.array([[1.0, 2.0], [1.0, 1.0]]), np.array([16.0, 1.0]), (0.5, 0.0)).tolist()
    [1.4140625, 0.70703125]
    """
    if len(exponents) != 2 or not np.isfinite(exponents).all():
        raise ValueError(f"exponents must be two finite numbers (a, b), got {exponents!r}")
    check_hessian(h, w.shape[1])
    power = np.ones(w.shape[1]) if h is None else np.asarray(h if np.ndim(h) == 1 else np.diagonal(h), np.float64)
    top = np.abs(np.asarray(w, np.float64)).max(axis=0, initial=0)
    top = np.maximum(top, 1e-6 * max(top.max(initial=0), 1e-30))  # columns of zeros
    a, b = exponents
    log = a / 2 * np.log(np.maximum(power, 1e-30)) - b * np.log(top)
    t = np.exp(np.clip(log - log.mean(), -20, 20))
    rounded = np.asarray(jnp.asarray(t, jnp.bfloat16), np.float32)
    return None if np.ptp(rounded) == 0 else rounded


def moments(h: Float[np.ndarray, "*h"] | None, t: Float[np.ndarray, " n"] | None) -> Float[np.ndarray, "*k"] | None:
    """H of the inputs that are divided by t.

    >>> moments(np.array([4.0, 1.0]), np.array([2.0, 1.0])).tolist(), moments(None, np.array([2.0])).tolist()
    ([1.0, 1.0], [0.25])
    """
    if t is None:
        return h
    t = np.asarray(t, np.float64)
    if h is None or np.ndim(h) == 1:
        return ((1.0 if h is None else h) / t**2).astype(np.float32)
    return (h / t[:, None] / t[None, :]).astype(np.float32)
