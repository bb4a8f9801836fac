"""BiLoCo: a 4-bit base and a correction whose factors are sign bits.

Paper: "BiLoCo" (abstract only). Weights W are stored as a quantised base Q plus L = U diag(s) V' with U and V
in {-1, +1}: a term costs m + n + 16 bits, a sixteenth of a bfloat16 rank-one term, so a correction of the same size has
sixteen times as many terms. The correction is found in the metric of the layer's inputs,

    minimise  tr((W - A) H (W - A)'),   H = E[x x'] on calibration data,   A what is stored.

What is reconstructed, and why. The fit of the terms is in `sign_lowrank`. What they are fitted to is ours:

  residual   Q = quantise(W), all terms fit W - Q. Best where the weights have no dominant directions.
  absorb     some terms are fitted to W itself; Q = quantise(W - L_1); the others then fit W - L_1 - Q with all of H.
             The error of a 4-bit base is proportional to what it has to represent, and that is what the first terms
             take away. This is the counterpart of SVDQuant's first step, and what a planted low-rank part asks for: 16
             sign terms hold more of it than the bfloat16 rank that they cost.

And one vector of an entry an input may be stored, which counts as part of the correction:

  column     A = Q + L diag(b), b the root mean square of the residual's columns.
  smooth     A = (Q + L) diag(1 / t): the smoothing of SVDQuant (see `smooth`), best where channels differ in size. The
             base gains by it, and it takes the place of b: in these coordinates the residual's columns are alike.

`fit` tries all vectors with a short fit, then the shares of absorbing terms with the two best, and refines the best of
all: passes over the terms, terms against the base and base against the terms. What has the smallest weighted error on
the calibration H is kept.

When it wins. Signs store 16 times the terms, and each takes about half of what a singular vector takes of a residual
that looks like noise; so the more bytes, the larger the lead over SVDQuant. It is small where bytes are few and the
residual is white, as smoothing makes it: no code of R bits a weight takes more than 1 - 2^(-2 R) of white noise, which
at rank 2 of a 384 x 1536 matrix (0.1 bits) is 13 %. A planted low-rank part is what singular vectors are made for:
without terms that absorb, BiLoCo loses there.

Neighbours: SVDQuant (arXiv 2411.05007); LittleBit and double binary factorisation for sign factors that replace W.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxlab.kernels.fp4_sign_matmul.api import fp4_sign_matmul
from jaxlab.quant import sign_stack, smooth
from jaxlab.quant.calibrate import HESSIANS, check_hessian, restrict
from jaxlab.quant.gptq import BLOCKS
from jaxlab.quant.qtensor import QTensor
from jaxlab.quant.sign_lowrank import SignLowRank, check_matrix, memory_match_rank, pack_signs
from jaxlab.quant.svdquant import Quantizer

SHARES = (0.0, 0.25, 0.5, 0.75)
FINALISTS = 2  # vectors with which all shares are tried
SMOOTHING: tuple[smooth.Exponents, ...] = ((0.3, 0.0), (0.45, 0.0), (0.5, 0.5))


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `fit` tries.

    Attributes:
      hessian: what the fit may see of H: "none", "diag" or "full". The error is always measured with all of it.
      columns: whether to use a column scale where there is no smoothing; None tries both.
      smoothing: exponents (a, b) of smoothings to try, see `smooth`; () for none.
      shares: shares of absorbing terms to try; (0.0,) for the plain residual fit.
      passes: refits of every term given all others.
      iterations: of refitting the terms against the base, and the base against the terms; 0 for none.

    Raises:
      ValueError: for a share outside [0, 1], no shares, another hessian, or negative numbers.
    """

    hessian: str = "full"
    columns: bool | None = None
    smoothing: Sequence[smooth.Exponents] = SMOOTHING
    shares: Sequence[float] = SHARES
    passes: int = 1
    iterations: int = 2

    def __post_init__(self) -> None:
        if self.hessian not in HESSIANS:
            raise ValueError(f"hessian must be one of {HESSIANS}, got {self.hessian!r}")
        if self.columns not in (None, True, False):
            raise ValueError(f"columns must be True, False or None for both, got {self.columns!r}")
        if not self.shares or any(not 0 <= share <= 1 for share in self.shares):
            raise ValueError(f"shares must be one or more numbers in [0, 1], got {tuple(self.shares)}")
        for name in ("passes", "iterations"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer >= 0, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Fit:
    """What `fit` found: W ~ (base + correction) diag(1 / smooth).

    Attributes:
      base: what the quantiser stores.
      correction: the sign matrices.
      smooth: t `[in]`, numbers of bfloat16, or None for no smoothing.
      decoded: what all of it stands for, `[out, in]`.
      error: its weighted error, relative to the energy of the weights.
      share: of the terms that absorbed directions of the weights.
      history: error after each step of the refinement.
    """

    base: Any
    correction: SignLowRank
    smooth: Float[np.ndarray, " n"] | None
    decoded: Float[np.ndarray, "m n"]
    error: float
    share: float
    history: tuple[float, ...]

    @property
    def extra_bytes(self) -> int:
        """Bytes of the correction, its vector included: all that is stored beside the base."""
        return self.correction.nbytes + (0 if self.smooth is None else 2 * self.smooth.size)


def fit(
    w: Float[np.ndarray, "m n"],
    h: Float[np.ndarray, "*h"] | None,
    quantizer: Quantizer,
    *,
    rank: int | None = None,
    match_svd_rank: int | None = None,
    settings: Settings | None = None,
    key: Key[Array, ""] | None = None,
) -> Fit:
    """Fits base and correction of one layer.

    Args:
      w: weights `[out, in]`.
      h: H of the inputs, `[in, in]` or its diagonal; None for the identity.
      quantizer: H -> how weights are quantised: weights -> (what is stored, what it decodes to).
      rank: number of terms.
      match_svd_rank: instead of `rank`: as many terms as, with the vector, take the bytes of a bfloat16 correction of
        this rank.
      settings: what to try; None for `Settings()`.
      key: a typed key.

    Returns:
      The best of all that was tried.

    Raises:
      TypeError, ValueError: for weights that are no finite float matrix, both or neither of `rank` and
        `match_svd_rank`, a rank that cannot be, and an H that does not fit.

    >>> import functools
    >>> from jaxlab.quant.gptq import quantizer
    >>> w = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    >>> found = fit(w, None, functools.partial(quantizer, "nvfp4"), rank=8, settings=Settings("none", False, ()))
    >>> found.correction.nbytes, found.error < 0.01
    (64, True)
    """
    return fit_stack(
        [w], [h], quantizer, rank=rank, match_svd_rank=match_svd_rank, settings=settings, key=key, together=1
    )[0]


def fit_stack(
    ws: Sequence[Float[np.ndarray, "m n"]],
    hs: Sequence[Float[np.ndarray, "*h"] | None],
    quantizer: Quantizer,
    *,
    rank: int | None = None,
    match_svd_rank: int | None = None,
    settings: Settings | None = None,
    key: Key[Array, ""] | None = None,
    together: int | None = None,
) -> list[Fit]:
    """Fits layers of equal shape, several at once: `fit` of each, but for rounding.

    Args:
      ws, hs: of each layer, as `fit` takes them.
      quantizer, rank, match_svd_rank, settings, key: as `fit` takes them.
      together: how many fits one call of the compiled program does, vmapped; None for `sign_stack.together` of the
        shape: 1, one after the other, where that is faster.

    Raises:
      TypeError, ValueError: as `fit`; for layers of different shapes, or as many H as there are not layers.
    """
    settings, key = settings or Settings(), jax.random.key(0) if key is None else key
    if not ws or len(ws) != len(hs):
        raise ValueError(f"ws and hs must hold one or more layers each, got {len(ws)} and {len(hs)}")
    ws = [check_matrix(w) for w in ws]
    if len({w.shape for w in ws}) > 1:
        raise ValueError(f"ws must have one shape, got {sorted({w.shape for w in ws})}")
    m, n = ws[0].shape
    if (rank is None) == (match_svd_rank is None):
        raise ValueError(f"give either rank or match_svd_rank, got {rank} and {match_svd_rank}")
    for name, value in (("rank", rank), ("match_svd_rank", match_svd_rank)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
            raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    for h in hs:
        check_hessian(h, n)
    together = sign_stack.together(m, n) if together is None else together
    if isinstance(together, bool) or not isinstance(together, int) or together < 1:
        raise ValueError(f"together must be an integer >= 1, got {together!r}")

    def terms(vector: bool) -> int:
        return memory_match_rank(m, n, match_svd_rank, columns=vector) if rank is None else rank

    columns = (True, False) if settings.columns is None else (settings.columns,)
    capacity = max(terms(vector) for vector in (*columns, *([True] if settings.smoothing else [])))
    run = sign_stack.Run(key, capacity, together)

    def job(layer: int, vector: bool, t: Any, share: float) -> sign_stack.Job:
        seen, count = restrict(hs[layer], settings.hessian), terms(vector or t is not None)
        first = round(share * count)
        return sign_stack.start(ws[layer], hs[layer], seen, quantizer, t, vector, count, first, capacity)

    attempts = []
    for layer, (w, h) in enumerate(zip(ws, hs, strict=True)):
        found = [smooth.scales(w, restrict(h, settings.hessian), e) for e in settings.smoothing]
        distinct = {t.tobytes(): t for t in found if t is not None}.values()
        for vector in [*((c, None) for c in columns), *((False, t) for t in distinct)]:
            attempts.append((layer, vector, job(layer, *vector, settings.shares[0])))
    run.short([done for *_, done in attempts])
    more = []
    for layer in range(len(ws)):
        mine = sorted((a for a in attempts if a[0] == layer), key=lambda a: a[2].error)
        for _, vector, _ in mine[:FINALISTS]:
            more += [(layer, vector, job(layer, *vector, share)) for share in settings.shares[1:]]
    run.short([done for *_, done in more])
    winners = [
        min((done for at, _, done in attempts + more if at == layer), key=lambda done: done.error)
        for layer in range(len(ws))
    ]
    run.refine(winners, settings.passes, settings.iterations)
    return [_fit_of(done) for done in winners]


def _fit_of(job: sign_stack.Job) -> Fit:
    ut, vt, s = job.kept
    packed = pack_signs(ut[: job.rank]), pack_signs(vt[: job.rank]), s[: job.rank].astype(jnp.bfloat16)
    correction = SignLowRank(*packed, job.column, job.w.shape)
    # As it is stored: scales and vectors in bfloat16.
    return Fit(job.kept_base, correction, job.t, job.kept_decoded, job.error, job.first / job.rank, tuple(job.history))


def matmul(
    x: Float[Array, "*batch n"],
    base: QTensor,
    correction: SignLowRank,
    smooth: Float[Array, " n"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "*batch m"]:
    """x ((Q + L) diag(1 / t))' from packed weights: both products accumulated in float32 and rounded once.

    Args:
      x: inputs; x / t is rounded to the dtype of x, before the products.
      base: Q, as `fit` returns it with `gptq.quantizer`: NVFP4 or MXFP4 along the inputs.
      correction: L.
      smooth: t; None for ones.
      implementation: of `kernels.fp4_sign_matmul`; None for the backend's own.

    Returns:
      The layer's outputs, in the dtype of x.

    Raises:
      ValueError: for a base in another format or along another axis, or shapes that do not fit.
    """
    name = base.format.name
    if name not in BLOCKS or base.axis != -1:
        raise ValueError(f"base must be {' or '.join(BLOCKS)} along axis -1, got {base.checkpoint_meta}")
    if smooth is not None:
        if jnp.shape(smooth) != (base.shape[-1],):
            raise ValueError(f"smooth must have the shape [{base.shape[-1]}], got {list(jnp.shape(smooth))}")
        x = (x.astype(jnp.float32) / jnp.asarray(smooth, jnp.float32)).astype(x.dtype)
    tensor_scale = jnp.float32(1) if base.tensor_scale is None else base.tensor_scale
    c = correction
    return fp4_sign_matmul(
        x, base.codes, base.scale, tensor_scale, c.u, c.v, c.scale, c.column, format=name, implementation=implementation
    )
