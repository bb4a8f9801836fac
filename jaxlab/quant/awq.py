"""AWQ scales: input channels that matter are scaled up before rounding, and down again after it.

    Q = quantise(W diag(t)) diag(1 / t),   t_j = (E x_j^2)^(alpha / 2),   alpha from a grid, by the weighted error

Source: AWQ (arXiv 2306.00978), section 3.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxlab.quant import smooth
from jaxlab.quant.sign_lowrank import check_matrix, weighted_error

GRID = tuple(alpha for alpha, _ in smooth.AWQ)


def search(
    w: Float[np.ndarray, "m n"],
    h: Float[np.ndarray, "*h"] | None,
    quantize: Callable[[Float[np.ndarray, "m n"]], tuple[Any, Float[np.ndarray, "m n"]]],
    grid: Sequence[float] = GRID,
) -> tuple[Float[np.ndarray, " n"] | None, float]:
    """The scales with the smallest error.

    Args:
      w: weights `[out, in]`.
      h: H of the inputs.
      quantize: weights -> (what is stored, what it decodes to).
      grid: values of alpha; 0 is no scaling.

    Returns:
      (t `[in]`, numbers of bfloat16 of geometric mean one, or None for no scaling; alpha).

    Raises:
      ValueError: for weights that are no finite matrix, an H that does not fit, or an empty grid.

    >>> from jaxlab.quant.gptq import quantizer
    >>> w, h = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32), np.ones(32, np.float32)
    >>> search(w, h, quantizer("nvfp4"))
    (None, 0.0)
    """
    w = check_matrix(w)
    if not grid:
        raise ValueError("grid must hold one or more values of alpha, got none")
    best = None
    for alpha in grid:
        t = smooth.scales(w, h, (alpha, 0.0))
        wide = 1.0 if t is None else t
        error = weighted_error(w, quantize(w * wide)[1] / wide, h)
        if best is None or error < best[0]:
            best = (error, t, float(alpha))
    return best[1], best[2]
