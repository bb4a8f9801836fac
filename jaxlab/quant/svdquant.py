"""SVDQuant: a low-bit base and a correction of low rank in bfloat16, fitted in turn.

    W diag(t) ~ Q + L,      Q <- quantise(W diag(t) - L),      L <- the best rank-r approximation of W diag(t) - Q

The published form is `smoothing=smooth.GRID, whiten=False`: channels are smoothed by t (see `smooth`), with exponents
from a grid that has (0, 0), none, among them; L starts as the singular part of the smoothed weights, so that large
directions leave the base before it is quantised; Q and L then take turns while the weighted error falls, and the
exponents with the smallest error win. `whiten=True` finds L in the metric of the inputs, L = svd_r((W - Q) C) C^-1 with
C C' = H, which is stronger than the published form where inputs are correlated.

Source: SVDQuant (arXiv 2411.05007), section 4.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.quant import smooth
from jaxlab.quant.calibrate import check_hessian
from jaxlab.quant.sign_lowrank import check_matrix, weighted_error

Quantize = Callable[[Float[np.ndarray, "m n"]], tuple[Any, Float[np.ndarray, "m n"]]]
Quantizer = Callable[[Any], Quantize]  # H of the inputs -> how weights are quantised
FINALISTS = 3  # exponents that are iterated with, beside none at all


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


@dataclasses.dataclass(frozen=True)
class Fit:
    """What `fit` found: W ~ (base + correction) diag(1 / smooth).

    Attributes:
      base: what the quantiser stores.
      correction: L.
      smooth: t `[in]`, numbers of bfloat16, or None for no smoothing.
      exponents: (a, b) of t.
      decoded: what all of it stands for, `[out, in]`.
      errors: weighted error after each iteration, relative to the energy of the weights; the last may be worse than
        the one that is kept.
    """

    base: Any
    correction: LowRank
    smooth: Float[np.ndarray, " n"] | None
    exponents: smooth.Exponents
    decoded: Float[np.ndarray, "m n"]
    errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """The smallest of the errors, that of what is stored."""
        return min(self.errors)


def roots(h: Float[np.ndarray, "*h"]) -> tuple[np.ndarray, np.ndarray]:
    """(H^(1/2), H^(-1/2)) in float64: matrices for a full H, rows `[1, n]` for a diagonal one."""
    h = np.asarray(h, np.float64)
    if h.ndim == 1:
        return np.sqrt(h)[None, :], 1 / np.sqrt(h)[None, :]
    values, vectors = np.linalg.eigh(h)
    values = np.maximum(values, 1e-10 * values[-1])
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T


def _times(a: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """a C, for a C as `roots` returns it."""
    return a if c is None else a * c if c.shape[0] == 1 else a @ c


def _best(a: np.ndarray, rank: int, inverse: np.ndarray | None) -> LowRank:
    """The best approximation of `a` of this rank, times `inverse`; by the eigenvectors of the smaller Gram matrix."""
    if a.shape[0] <= a.shape[1]:
        left = np.linalg.eigh(a @ a.T)[1][:, : -rank - 1 : -1]
        right = left.T @ a
    else:
        right = np.linalg.eigh(a.T @ a)[1][:, : -rank - 1 : -1].T
        left = a @ right.T
    # Balanced factors lose least to bfloat16.
    sizes = np.sqrt(np.linalg.norm(right, axis=1) / np.maximum(np.linalg.norm(left, axis=0), 1e-30))
    sizes = np.where(sizes > 0, sizes, 1)
    return LowRank(
        jnp.asarray(left * sizes, jnp.bfloat16), jnp.asarray(_times(right / sizes[:, None], inverse), jnp.bfloat16)
    )


def fit(
    w: Float[np.ndarray, "m n"],
    h: Float[np.ndarray, "*h"] | None,
    quantizer: Quantizer,
    *,
    rank: int,
    whiten: bool = True,
    smoothing: Sequence[smooth.Exponents] = (smooth.NONE,),
    iterations: int = 100,
) -> Fit:
    """Fits base and correction in turn until the weighted error does not fall any more.

    Every pair of exponents is tried with one iteration; the best three, and none where it is among them, go on.

    Args:
      w: weights `[out, in]`.
      h: H of the inputs; the error is always measured with it.
      quantizer: H -> how weights are quantised: weights -> (what is stored, what it decodes to).
      rank: of the correction, >= 1.
      whiten: whether L is found in the metric of H.
      smoothing: exponents (a, b) of the smoothing to try; `smooth.GRID` for the published search.
      iterations: at most.

    Returns:
      The best of all that was tried.

    Raises:
      ValueError: for weights that are no finite matrix, a rank out of range, `iterations < 1`, no exponents, or an H
        that does not fit.

    >>> import functools
    >>> from jaxlab.quant.gptq import quantizer
    >>> w = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    >>> found = fit(w, None, functools.partial(quantizer, "nvfp4"), rank=4)
    >>> found.correction.nbytes, found.error < 0.01
    (384, True)
    """
    w = check_matrix(w)
    m, n = w.shape
    if isinstance(rank, bool) or not 1 <= rank <= min(m, n):
        raise ValueError(f"rank must be in [1, {min(m, n)}] for a {m} x {n} matrix, got {rank}")
    if iterations < 1:
        raise ValueError(f"iterations must be >= 1, got {iterations}")
    if not smoothing:
        raise ValueError("smoothing must hold one or more pairs of exponents, got none")
    check_hessian(h, n)
    root, inverse = roots(np.ones(n) if h is None else h) if whiten else (None, None)
    run = functools.partial(_iterate, w, h, quantizer, rank, root, inverse)
    tried = list(dict.fromkeys(smoothing))
    if len(tried) > 1:
        first = {exponents: run(exponents, 1).error for exponents in tried}
        best = sorted(tried, key=first.__getitem__)[:FINALISTS]
        tried = [*best, *(e for e in tried if e == smooth.NONE and e not in best)]
    return min((run(exponents, iterations) for exponents in tried), key=lambda found: found.error)


def _iterate(
    w: np.ndarray, h: Any, quantizer: Quantizer, rank: int, root: Any, inverse: Any,
    exponents: smooth.Exponents, iterations: int,
) -> Fit:  # fmt: skip
    t = smooth.scales(w, h, exponents)
    wide = np.ones(w.shape[1], np.float32) if t is None else t
    if t is not None and root is not None:
        # (diag(1 / t) C) is a root of the moments of x / t.
        root = root / t[None, :] if root.shape[0] == 1 else root / t[:, None]
        inverse = inverse * t[None, :]
    quantize, scaled = quantizer(smooth.moments(h, t)), w * wide
    decoded, errors, best = np.zeros_like(w), [], None
    for _ in range(iterations):
        correction = _best(_times(scaled.astype(np.float64) - decoded, root), rank, inverse)
        low = np.asarray(correction.materialize())
        base, decoded = quantize(scaled - low)
        whole = (decoded + low) / wide
        errors.append(weighted_error(w, whole, h))
        if best is not None and errors[-1] >= min(errors[:-1]):
            break
        best = (base, correction, whole)
    base, correction, whole = best
    return Fit(base, correction, t, exponents, whole, tuple(errors))
