"""BiLoCo: a 4-bit base and a correction whose factors are sign bits.

Paper: "BiLoCo" (abstract only). Weights W are stored as a quantised base Q plus L = U diag(s) V' diag(b) with U and V
in {-1, +1}: a term costs m + n + 16 bits, a sixteenth of a bfloat16 rank-one term, so a correction of the same size has
sixteen times as many terms. The correction is found in the metric of the layer's inputs,

    minimise  tr((W - Q - L) H (W - Q - L)'),   H = E[x x'] on calibration data.

What is reconstructed, and why. The fit of the terms is in `sign_lowrank`. Where L comes from at first is ours:

  residual   Q = quantise(W), all terms fit W - Q. Best where the weights have no dominant directions.
  absorb     some terms are fitted to W itself, with the diagonal of H; Q = quantise(W - L_1); the others then fit
             W - L_1 - Q with all of H. The error of a 4-bit base is proportional to what it has to represent, and that
             is what the first terms take away. This is the counterpart of SVDQuant's first step, and what a planted
             low-rank part asks for: 8 sign terms hold more of it than the bfloat16 rank that they cost.

`fit` tries several shares of absorbing terms, refits all terms against the base and the base against the terms, and
keeps the best by the weighted error on the calibration H.

Neighbours: SVDQuant (arXiv 2411.05007); LittleBit and double binary factorisation for sign factors that replace W.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxlab.kernels.fp4_sign_matmul.api import fp4_sign_matmul
from jaxlab.quant import sign_lowrank
from jaxlab.quant.calibrate import check_hessian, restrict
from jaxlab.quant.gptq import BLOCKS
from jaxlab.quant.qtensor import QTensor
from jaxlab.quant.sign_lowrank import SignLowRank, memory_match_rank, pack_signs, weighted_error

Quantize = Callable[[Float[np.ndarray, "m n"]], tuple[Any, Float[np.ndarray, "m n"]]]
SHARES = (0.0, 0.5)


@dataclasses.dataclass(frozen=True)
class Fit:
    """What `fit` found.

    Attributes:
      base: what the quantiser stores.
      correction: the sign matrices.
      error: weighted error of base plus correction, relative to the energy of the weights.
      share: of the terms that absorbed directions of the weights.
      history: error after each step of the winning share.
    """

    base: Any
    correction: SignLowRank
    error: float
    share: float
    history: tuple[float, ...]


def fit(
    w: Float[np.ndarray, "m n"],
    h: Float[np.ndarray, "*h"] | None,
    quantize: Quantize,
    *,
    rank: int | None = None,
    match_svd_rank: int | None = None,
    hessian: str = "full",
    columns: bool | None = None,
    shares: Sequence[float] = SHARES,
    passes: int = 1,
    iterations: int = 2,
    key: Key[Array, ""] | None = None,
) -> Fit:
    """Fits base and correction of one layer.

    Args:
      w: weights `[out, in]`.
      h: H of the inputs, `[in, in]` or its diagonal; None for the identity.
      quantize: weights -> (what is stored, what it decodes to).
      rank: number of terms.
      match_svd_rank: instead of `rank`: as many terms as take the bytes of a bfloat16 correction of this rank.
      hessian: what the fit may see of H: "none", "diag" or "full". The error is always measured with all of it.
      columns: whether to use a column scale; None tries both.
      shares: shares of absorbing terms to try; (0.0,) for the plain residual fit.
      passes: refits of every term given all others.
      iterations: of refitting the terms against the base, and the base against the terms; 0 for none.
      key: a typed key.

    Returns:
      The best of all that was tried.

    Raises:
      ValueError: for both or neither of `rank` and `match_svd_rank`, a share outside [0, 1], or an H that does not fit.
    """
    w = np.asarray(w, np.float32)
    if w.ndim != 2:
        raise ValueError(f"w must be a matrix [out, in], got the shape {w.shape}")
    m, n = w.shape
    if not np.isfinite(w).all():
        raise ValueError("w must be finite")
    if (rank is None) == (match_svd_rank is None):
        raise ValueError(f"give either rank or match_svd_rank, got {rank} and {match_svd_rank}")
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be >= 1, got {rank}")
    wrong = [share for share in shares if not 0 <= share <= 1]
    if wrong or not shares:
        raise ValueError(f"shares must be one or more numbers in [0, 1], got {tuple(shares)}")
    check_hessian(h, n)
    seen, key = restrict(h, hessian), jax.random.key(0) if key is None else key
    tried = {}
    for scaled in (True, False) if columns is None else (columns,):
        terms = memory_match_rank(m, n, match_svd_rank, columns=scaled) if rank is None else rank
        tried |= dict.fromkeys((scaled, terms, round(share * terms)) for share in shares)
    capacity = max(terms for _, terms, _ in tried)  # one shape of arrays, so that one compiled program fits them all
    fits = [_fit(w, h, seen, quantize, *setting, capacity, passes, iterations, key) for setting in tried]
    return min(fits, key=lambda found: found.error)


def _fit(
    w: np.ndarray, h: Any, seen: Any, quantize: Quantize, columns: bool, rank: int, first: int, capacity: int,
    passes: int, iterations: int, key: Array,
) -> Fit:  # fmt: skip
    """One share: `first` terms absorb directions of W, the others fit what is left; then both are refined in turn."""
    n = w.shape[1]
    base, decoded = (None, np.zeros_like(w)) if first else quantize(w)
    b = sign_lowrank.column_scale(jnp.asarray(w - decoded)) if columns else None
    wide = np.ones(n, np.float32) if b is None else np.asarray(b, np.float32)
    metric = _scaled(seen, wide)
    terms = sign_lowrank.no_terms(*w.shape, capacity)

    def sweep(h: Array, begin: int, stop: int, fresh: bool) -> Any:
        return sign_lowrank.sweep(jnp.asarray((w - decoded) / wide), h, key, terms, begin, stop, fresh)

    if first:
        diagonal = _scaled(restrict(seen, "diag"), wide)
        terms = sweep(diagonal, 0, first, True)
        for _ in range(passes):
            terms = sweep(diagonal, 0, first, False)
        base, decoded = quantize(w - _dense(terms, wide))
    if rank > first:
        terms = sweep(metric, first, rank, True)
        for _ in range(passes):
            terms = sweep(metric, first, rank, False)
    history = [weighted_error(w, decoded + _dense(terms, wide), h)]
    best = (history[0], base, terms)
    for _ in range(iterations):
        terms = sweep(metric, 0, rank, False)
        history.append(weighted_error(w, decoded + _dense(terms, wide), h))
        if history[-1] < best[0]:
            best = (history[-1], base, terms)
        base, decoded = quantize(w - _dense(terms, wide))
        history.append(weighted_error(w, decoded + _dense(terms, wide), h))
        if history[-1] < best[0]:
            best = (history[-1], base, terms)
    error, base, (ut, vt, s) = best
    packed = pack_signs(ut[:rank]), pack_signs(vt[:rank]), s[:rank].astype(jnp.bfloat16)
    return Fit(base, SignLowRank(*packed, b, w.shape), error, first / rank, tuple(history))


def _scaled(h: Any, wide: np.ndarray) -> Array:
    """H in the coordinates of scaled columns, of mean diagonal one."""
    if h is None or np.ndim(h) == 1:
        inner = (np.ones_like(wide) if h is None else h) * wide**2
        return jnp.asarray(inner / np.mean(inner), jnp.float32)
    inner = h * wide[:, None] * wide[None, :]
    return jnp.asarray(inner / np.mean(np.diagonal(inner)), jnp.float32)


def _dense(terms: tuple[Array, Array, Array], wide: np.ndarray) -> np.ndarray:
    """L with scales as they will be stored, in bfloat16."""
    ut, vt, s = terms
    rounded = s.astype(jnp.bfloat16).astype(jnp.float32)
    return np.asarray((ut * rounded[:, None]).T @ vt) * wide


def matmul(
    x: Float[Array, "*batch n"], base: QTensor, correction: SignLowRank, *, implementation: str | None = None
) -> Float[Array, "*batch m"]:
    """x (Q + L)' from packed weights: both products accumulated in float32 and rounded once, to the dtype of x.

    Args:
      x: inputs.
      base: Q, as `fit` returns it with `gptq.quantizer`: NVFP4 or MXFP4 along the inputs.
      correction: L.
      implementation: of `kernels.fp4_sign_matmul`; None for the backend's own.

    Returns:
      The layer's outputs.

    Raises:
      ValueError: for a base in another format or along another axis, or shapes that do not fit.
    """
    name = base.format.name
    if name not in BLOCKS or base.axis != -1:
        raise ValueError(f"base must be {' or '.join(BLOCKS)} along axis -1, got {base.checkpoint_meta}")
    tensor_scale = jnp.float32(1) if base.tensor_scale is None else base.tensor_scale
    c = correction
    return fp4_sign_matmul(
        x, base.codes, base.scale, tensor_scale, c.u, c.v, c.scale, c.column, format=name, implementation=implementation
    )
