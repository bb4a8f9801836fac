"""SVDQuant: a low-bit base and a correction of low rank in bfloat16, fitted in turn.

    Q <- quantise(W - L),   L <- the best rank-r approximation of W - Q in the metric of H

The published form starts from L = the low rank part of W (large directions leave the base before it is quantised) and
measures with the identity, after a smoothing of the channels that is not part of this file (see `awq`); `whiten=True`
finds L in the metric of the inputs, L = svd_r((W - Q) H^(1/2)) H^(-1/2), which is the strongest form of this baseline.
Both iterate while the weighted error falls.

Source: SVDQuant (arXiv 2411.05007), section 4.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.quant.calibrate import check_hessian
from jaxlab.quant.sign_lowrank import weighted_error


@functools.partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LowRank:
    """L = left right, in bfloat16.

    Attributes:
      left: `[m, r]`.
      right: `[r, n]`.
    """

    left: Any
    right: Any

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return sum(x.size * x.dtype.itemsize for x in (self.left, self.right))

    def materialize(self) -> Float[Array, "m n"]:
        """The matrix L, in float32."""
        return self.left.astype(jnp.float32) @ self.right.astype(jnp.float32)


def roots(h: Float[np.ndarray, "*h"] | None, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(H^(1/2), H^(-1/2)) as matrices, in float64."""
    if h is None:
        return np.eye(n), np.eye(n)
    h = np.asarray(h, np.float64)
    if h.ndim == 1:
        return np.diag(np.sqrt(h)), np.diag(1 / np.sqrt(h))
    values, vectors = np.linalg.eigh(h)
    values = np.maximum(values, 1e-10 * values[-1])
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T


def fit(
    w: Float[np.ndarray, "m n"],
    h: Float[np.ndarray, "*h"] | None,
    quantize: Callable[[Float[np.ndarray, "m n"]], tuple[Any, Float[np.ndarray, "m n"]]],
    *,
    rank: int,
    whiten: bool = True,
    iterations: int = 100,
) -> tuple[Any, LowRank, list[float]]:
    """Fits base and correction in turn until the weighted error does not fall any more.

    Args:
      w: weights `[out, in]`.
      h: H of the inputs; the error is always measured with it.
      quantize: weights -> (what is stored, what it decodes to).
      rank: of the correction, >= 1.
      whiten: whether L is found in the metric of H.
      iterations: at most.

    Returns:
      (base, correction, the error after each iteration).

    Raises:
      ValueError: for a rank out of range, `iterations < 1`, or an H that does not fit.
    """
    w = np.asarray(w, np.float32)
    m, n = w.shape
    if not 1 <= rank <= min(m, n):
        raise ValueError(f"rank must be in [1, {min(m, n)}] for a {m} x {n} matrix, got {rank}")
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, got {iterations}")
    check_hessian(h, n)
    root, inverse = roots(h if whiten else None, n)
    decoded, errors, best = np.zeros_like(w), [], None
    for _ in range(iterations):
        u, s, vt = np.linalg.svd((w - decoded) @ root, full_matrices=False)
        # Balanced factors lose least to bfloat16.
        scale = np.sqrt(s[:rank])
        correction = LowRank(
            jnp.asarray(u[:, :rank] * scale, jnp.bfloat16),
            jnp.asarray((scale[:, None] * vt[:rank]) @ inverse, jnp.bfloat16),
        )
        low = np.asarray(correction.materialize())
        base, decoded = quantize(w - low)
        errors.append(weighted_error(w, decoded + low, h))
        if best is not None and errors[-1] >= best[2]:
            break
        best = (base, correction, errors[-1])
    return best[0], best[1], errors
