"""AWQ scales: input channels that matter are scaled up before rounding, and down again after it.

    Q = quantise(W diag(t)) diag(1 / t),   t_j = (E x_j^2)^(alpha / 2),   alpha from a grid, by the weighted error

Source: AWQ (arXiv 2306.00978), section 3.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxlab.quant.sign_lowrank import weighted_error

GRID = tuple(i / 10 for i in range(11))


def search(
    w: Float[np.ndarray, "m n"],
    h: Float[np.ndarray, "*h"],
    quantize: Callable[[Float[np.ndarray, "m n"]], tuple[Any, Float[np.ndarray, "m n"]]],
    grid: Sequence[float] = GRID,
) -> tuple[Float[np.ndarray, " n"], float]:
    """The scales with the smallest error.

    Args:
      w: weights `[out, in]`.
      h: H of the inputs.
      quantize: weights -> (what is stored, what it decodes to).
      grid: values of alpha; 0 is no scaling.

    Returns:
      (t `[in]` of geometric mean one, alpha).

    >>> from jaxlab.quant.gptq import quantizer
    >>> w, h = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32), np.ones(32, np.float32)
    >>> search(w, h, quantizer("nvfp4"))[1]
    0.0
    """
    power = np.log(np.maximum(np.asarray(h if np.ndim(h) == 1 else np.diagonal(h), np.float64), 1e-30))
    power = power - power.mean()
    best = None
    for alpha in grid:
        t = np.exp(power * alpha / 2).astype(np.float32)
        error = weighted_error(w, quantize(w * t)[1] / t, h)
        if best is None or error < best[0]:
            best = (error, t, float(alpha))
    return best[1], best[2]
