"""Sums of rank-one sign matrices: the correction `L = U diag(s) V' diag(b)` with U, V in {-1, +1}, and its fit.

    minimise  || (R - U diag(s) V' diag(b)) H^(1/2) ||_F^2      R [m, n] a residual, H = E[x x'] of the layer's inputs

One term at a time: for a fixed v the best u is sign(E H v), E the current residual; for a fixed u and a diagonal H the
best v is sign(H E' u), and s = u' E H v / (m v' H v). These steps alternate until nothing changes; every one of them
lowers the objective. With a full H, sign(H E' u) is only a proposal, taken where it is better, and single signs are
flipped while that helps. After every block of terms all scales are solved for together,

    ((U'U) o (V' H V)) s = diag(U' R H V),

and passes over the terms refit each of them given all others. The residual is never formed: E x = R x - U (s o V' x).
A column scale b (the root mean square of the residual's columns) changes variables: R / b and b H b.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from jaxlab.kernels.lowbit import numerics, packing

_CG_STEPS = 40
Terms = tuple[Float[Array, "c m"], Float[Array, "c n"], Float[Array, " c"]]  # (U', V', s)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["u", "v", "scale", "column"], meta_fields=["shape"])
@dataclasses.dataclass(frozen=True)
class SignLowRank:
    """A sum of sign matrices; a pytree.

    Attributes:
      u: packed signs of U', `uint8 [r, ceil(m / 8)]`: row i of U in bit i % 8 of byte i // 8, 1 for -1.
      v: packed signs of V', `uint8 [r, ceil(n / 8)]`.
      scale: s, `bfloat16 [r]`.
      column: b, `bfloat16 [n]`, or None for ones.
      shape: (m, n).
    """

    u: Any
    v: Any
    scale: Any
    column: Any
    shape: tuple[int, int]

    @property
    def rank(self) -> int:
        """Number of terms r."""
        return self.scale.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays."""
        return sum(x.size * x.dtype.itemsize for x in (self.u, self.v, self.scale, self.column) if x is not None)

    def factors(self) -> tuple[Float[Array, "r m"], Float[Array, "r n"], Float[Array, " r"], Float[Array, " n"]]:
        """U' and V' as +-1, s and b, in float32."""
        m, n = self.shape
        b = jnp.ones(n, jnp.float32) if self.column is None else self.column.astype(jnp.float32)
        return unpack_signs(self.u, m), unpack_signs(self.v, n), self.scale.astype(jnp.float32), b

    def materialize(self) -> Float[Array, "m n"]:
        """The matrix L, in float32."""
        ut, vt, s, b = self.factors()
        return (ut * s[:, None]).T @ (vt * b)


def pack_signs(x: Float[Array, "*n k"]) -> Shaped[Array, "*n w"]:
    """Bits of the signs along the last axis, 8 a byte, lowest first: 1 where x < 0; padded with zeros.

    >>> pack_signs(jnp.array([1.0, -1, 1, 1, 1, 1, 1, -1, -1])).tolist()
    [130, 1]
    """
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 8)])
    return packing.pack(numerics.sign_encode(padded), 1)


def unpack_signs(words: Shaped[Array, "*n w"], size: int) -> Float[Array, "*n k"]:
    """The first `size` signs along the last axis as +1 and -1, float32.

    >>> unpack_signs(jnp.array([130, 1], jnp.uint8), 9).tolist()
    [1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    """
    return numerics.sign_decode(packing.unpack(words, 1), jnp.float32(1))[..., :size]


def _sign(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    return jnp.where(x < 0, -1.0, 1.0)


def _weigh(h: Float[Array, "*h"], x: Float[Array, " n"]) -> Float[Array, " n"]:
    """H x, for a diagonal or a full H."""
    return h * x if h.ndim == 1 else h @ x


def _flips(v: Array, g: Array, h: Float[Array, "n n"], steps: int) -> Array:
    """Flips single signs of v, the best one first, while (g'v)^2 / (v'Hv) grows."""
    diagonal = jnp.diagonal(h)

    def body(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        i, v, hv, num, den, _ = carry
        nums, dens = num - 2 * v * g, den - 4 * v * hv + 4 * diagonal
        scores = nums**2 / jnp.maximum(dens, 1e-30)
        j = jnp.argmax(scores)
        better = scores[j] > (num**2 / den) * (1 + 1e-6)
        flipped = v.at[j].multiply(-1.0)
        hv_new = hv + 2 * flipped[j] * h[:, j]
        pick = lambda a, b: jnp.where(better, a, b)  # noqa: E731
        return i + 1, pick(flipped, v), pick(hv_new, hv), pick(nums[j], num), pick(dens[j], den), better

    hv = h @ v
    start = (0, v, hv, g @ v, v @ hv, jnp.bool_(True))
    return jax.lax.while_loop(lambda c: (c[0] < steps) & c[5], body, start)[1]


def _term(
    right: Any, left: Any, h: Array, u: Array, v: Array, *, alternations: int, flips: int
) -> tuple[Array, Array, Array]:
    """The best term near (u, v): alternating signs, until the objective stops growing.

    Args:
      right: x [n] -> E x. left: y [m] -> E' y.
      h: diagonal or full H.
      u, v: where to start.
      alternations: at most.
      flips: single signs of v tried in each, for a full H.

    Returns:
      (u, v, s).
    """
    m = u.shape[0]

    def quality(g: Array, v: Array) -> Array:
        return (g @ v) ** 2 / jnp.maximum(v @ _weigh(h, v), 1e-30)

    def body(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        i, _, v, old, _ = carry
        u = _sign(right(_weigh(h, v)))
        g = _weigh(h, left(u))
        if h.ndim == 1:
            new = _sign(g)
        else:
            proposal = _sign(g)
            v = v * jnp.where(g @ v < 0, -1.0, 1.0)
            new = jnp.where(quality(g, proposal) > quality(g, v), proposal, v)
            new = _flips(new, g, h, flips)
        now = quality(g, new)
        return i + 1, u, new, now, now > old * (1 + 1e-6)

    start = (0, u, v, jnp.float32(-1.0), jnp.bool_(True))
    _, u, v, _, _ = jax.lax.while_loop(lambda c: (c[0] < alternations) & c[4], body, start)
    g = _weigh(h, left(u))
    return u, v, (g @ v) / (m * jnp.maximum(v @ _weigh(h, v), 1e-30))


def _joint_scales(r: Array, h: Array, ut: Array, vt: Array, s: Array, active: Array) -> Array:
    """Least squares for the scales of all active terms, by conjugate gradients from the current ones."""
    hv = vt * h if h.ndim == 1 else vt @ h
    mask = active[:, None] * active[None, :]
    gram = (ut @ ut.T) * (hv @ vt.T) * mask
    # Every term has the same diagonal, about m sum(h): relative to it the system is well conditioned.
    top = jnp.maximum(jnp.max(jnp.diagonal(gram)), 1e-30)
    gram = gram / top + jnp.diag(1.0 - active)
    rhs = jnp.sum((ut @ r) * hv, axis=1) / top * active
    found, _ = jax.scipy.sparse.linalg.cg(lambda x: gram @ x, rhs, x0=s * active, maxiter=_CG_STEPS, tol=1e-7)
    error = lambda x: x @ (gram @ x) - 2 * x @ rhs  # noqa: E731
    return jnp.where(error(found) < error(s * active), found, s) * active


@functools.partial(jax.jit, static_argnames=("block", "alternations", "flips", "power"))
def sweep(
    r: Float[Array, "m n"],
    h: Float[Array, "*h"],
    key: Key[Array, ""],
    terms: Terms,
    begin: Int[Array, ""] | int,
    stop: Int[Array, ""] | int,
    fresh: Bool[Array, ""] | bool,
    *,
    block: int = 32,
    alternations: int = 15,
    flips: int = 24,
    power: int = 12,
) -> Terms:
    """Fits the terms `begin` .. `stop - 1` to R, one after the other: new ones, or those that are there once more.

    One compiled program serves new terms and refits of any number of terms up to the capacity of the arrays.

    Args:
      r: the residual R of all terms.
      h: diagonal `[n]` or full `[n, n]` H.
      key: for the start of every new term's power iteration.
      terms: (U' `[capacity, m]`, V' `[capacity, n]`, s `[capacity]`), s zero from `stop` on.
      begin, stop: which terms.
      fresh: whether they are new.
      block: terms between two joint solutions for the scales.
      alternations, flips: of one term.
      power: power iterations before a new term.

    Returns:
      The terms.
    """
    m = r.shape[0]

    def one(k: Array, terms: Terms) -> Terms:
        ut, vt, s = terms
        s = s.at[k].set(0.0)
        right = lambda x: r @ x - (s * (vt @ x)) @ ut  # noqa: E731
        left = lambda y: y @ r - (s * (ut @ y)) @ vt  # noqa: E731

        def new() -> tuple[Array, Array]:
            y = jax.random.normal(jax.random.fold_in(key, k), (m,))
            again = lambda _, y: (lambda z: z / (jnp.linalg.norm(z) + 1e-30))(right(_weigh(h, left(y))))  # noqa: E731
            u = _sign(jax.lax.fori_loop(0, power, again, y))
            return u, _sign(_weigh(h, left(u)))

        u, v = jax.lax.cond(fresh, new, lambda: (ut[k], vt[k]))
        u, v, value = _term(right, left, h, u, v, alternations=alternations, flips=flips)
        return ut.at[k].set(u), vt.at[k].set(v), s.at[k].set(value)

    def body(b: Array, terms: Terms) -> Terms:
        low = begin + b * block
        high = jnp.minimum(low + block, stop)
        ut, vt, s = jax.lax.fori_loop(low, high, one, terms)
        active = jnp.arange(s.shape[0]) < jnp.where(fresh, high, stop)
        return ut, vt, _joint_scales(r, h, ut, vt, s, active.astype(jnp.float32))

    return jax.lax.fori_loop(0, (stop - begin + block - 1) // block, body, terms)


sweeps = jax.jit(jax.vmap(sweep, in_axes=(0, 0, None, 0, None, None, None)))
"""`sweep` for layers of equal shape at once: r, h and terms have a leading axis, the rest is shared."""


def no_terms(m: int, n: int, capacity: int) -> Terms:
    """Arrays for `capacity` terms, none of them fitted."""
    return jnp.ones((capacity, m)), jnp.ones((capacity, n)), jnp.zeros(capacity)


def fit_terms(
    r: Float[Array, "m n"],
    h: Float[Array, "*h"],
    key: Key[Array, ""],
    *,
    rank: int,
    passes: int = 1,
) -> Terms:
    """Fits `rank` new terms to R and refits each of them `passes` times given all others.

    Args:
      r: the residual R.
      h: diagonal `[n]` or full `[n, n]` H.
      key: a typed key.
      rank: number of terms, >= 1.
      passes: of refitting.

    Returns:
      (U' `[r, m]`, V' `[r, n]`, s `[r]`).

    >>> r = jax.random.normal(jax.random.key(0), (32, 48))
    >>> ut, vt, s = fit_terms(r, jnp.ones(48), jax.random.key(1), rank=16)
    >>> bool(jnp.linalg.norm(r - (ut * s[:, None]).T @ vt) < 0.8 * jnp.linalg.norm(r))
    True
    """
    terms = sweep(r, h, key, no_terms(*r.shape, rank), 0, rank, True)
    for _ in range(passes):
        terms = sweep(r, h, key, terms, 0, rank, False)
    return terms


def column_scale(r: Float[Array, "m n"]) -> Float[Array, " n"]:
    """b: root mean square of every column over its mean, rounded to bfloat16; columns of zeros get the smallest."""
    rms = jnp.sqrt(jnp.mean(r * r, axis=0))
    mean = jnp.mean(rms)
    b = jnp.where(mean > 0, jnp.maximum(rms / jnp.maximum(mean, 1e-30), 1e-3), 1.0)
    return b.astype(jnp.bfloat16)


def memory_match_rank(m: int, n: int, svd_rank: int, *, columns: bool = True) -> int:
    """Sign terms that take as many bytes as a bfloat16 factorisation of rank `svd_rank`.

    r (8 ceil(m / 8) + 8 ceil(n / 8) + 16) + 16 n [column scale]  <=  16 svd_rank (m + n), rounded down.

    Raises:
      ValueError: when the budget is too small for one term.

    >>> memory_match_rank(1024, 1024, 32)
    500
    """
    term = 8 * (-(-m // 8) + -(-n // 8)) + 16
    rank = (16 * svd_rank * (m + n) - 16 * n * columns) // term
    if rank < 1:
        raise ValueError(f"svd_rank={svd_rank} of a {m} x {n} matrix is too small a budget for a sign term")
    return int(rank)


def check_matrix(w: Any) -> Float[np.ndarray, "m n"]:
    """Weights of any float dtype as a float32 matrix.

    Raises:
      TypeError: for weights that are not floating point.
      ValueError: for something that is no matrix `[out, in]`, has no elements, or is not finite in float32.
    """
    if not jnp.issubdtype(np.asarray(w).dtype, jnp.floating):
        raise TypeError(f"w must be floating point, got {np.asarray(w).dtype}")
    with np.errstate(over="ignore"):
        w = np.asarray(w).astype(np.float32)
    if w.ndim != 2 or not w.size:
        raise ValueError(f"w must be a matrix [out, in] with elements, got the shape {w.shape}")
    if not np.isfinite(w).all():
        raise ValueError("w must be finite")
    return w


def weighted_error(w: Any, approximation: Any, h: Any = None) -> float:
    """tr((W - A) H (W - A)') / tr(W H W'), in float64 on the host."""
    w, d = np.asarray(w, np.float64), np.asarray(w, np.float64) - np.asarray(approximation, np.float64)
    h = np.ones(w.shape[1]) if h is None else np.asarray(h, np.float64)
    energy = (lambda x: np.sum(x * x * h)) if h.ndim == 1 else (lambda x: np.sum((x @ h) * x))
    whole = energy(w)
    return float(energy(d) / whole) if whole > 0 else float(energy(d))  # weights that are all zero have no scale
