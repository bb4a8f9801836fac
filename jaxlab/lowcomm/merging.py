"""Model merging as aggregation: pytrees of stacked task vectors (leading axis K, one a worker) in, one pytree out.

A task vector is a difference of parameters from a common anchor; on pseudo-gradients (`anchor - worker`) the same
functions aggregate one round of DiLoCo. All of them are called as `f(deltas, *, weights=None, key=None, **options)`
where they use weights or a key, and `get(name, **options)` returns any of them as `Aggregator.fn(deltas, weights,
key)`.

`weights` `[K]` are always divided by their sum, so only their ratios matter: merging one worker with weight 0.1 returns
that worker's delta, not a tenth of it. Multiply the result (or use `scale`) for a shorter step. A worker of weight 0 is
absent: it takes part in nothing, and may hold NaN. Weights that are all zero, and a weight that is negative, infinite
or NaN, are an error where they are concrete and give NaN in all entries under a trace.

    mean             sum_k w_k D_k
    task_arithmetic  scale * K * sum_k w_k D_k                       (scale * sum_k D_k for equal weights)
    ties             trim small entries, elect signs, average the entries that agree
    dare             drop random entries, rescale the others, average
    iso_c            scale * Iso(mean), see `isotropize`
    iso_cts          Iso-C with some of the directions taken from the single workers
    tsv_m            each worker's leading singular vectors, orthogonalised together

The first four work on entries. The last three work on matrices (`specs` and `mask` as in `isotropize`), and average
leaves that are none. Only `iso_cts` and `tsv_m` need every worker's matrix in one place; the others are elementwise
work on one worker's delta and sums over workers.

Sources: Ilharco et al., "Editing Models with Task Arithmetic", arXiv 2212.04089; Yadav et al., "TIES-Merging", arXiv
2306.01708; Yu et al., "Language Models are Super Mario" (DARE), arXiv 2311.03099; Gargiulo et al., "Task Singular
Vectors", arXiv 2412.00081; Marczak et al. (Iso-C, Iso-CTS), arXiv 2502.04959; all of them used on pseudo-gradients in
Horoi et al., arXiv 2607.03011, whose variants these are.
"""

import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Num, PyTree

from jaxlab.core import linalg, prng
from jaxlab.core import tree as trees
from jaxlab.lowcomm.isotropize import (
    MatrixSpec,
    Method,
    Rtol,
    Specs,
    Steps,
    auto_rtol,
    check_float,
    check_options,
    cutoff,
    from_matrices,
    in_range,
    iso,
    isotropize_tree,
    matmul,
    polar,
    resolve_specs,
    to_matrices,
)

Weights = Num[Array | np.ndarray, "..."] | list[float] | tuple[float, ...] | None  # [K], checked with its own message
Leaf = Array | np.ndarray
Mask = PyTree | Callable[[PyTree], PyTree] | None


@dataclasses.dataclass(frozen=True)
class Aggregator:
    """A merging rule with its options bound.

    Attributes:
      name: its name in `AGGREGATORS`.
      fn: `(deltas [K, ...], weights [K] or None, key or None) -> merged`.
      needs_all: True where a device needs all workers' deltas (an all-gather); False where sums over workers do.
      sums: how many sums over workers, each as large as the parameters, it takes where `needs_all` is False.
      needs_key: True where `fn` raises without a key.
    """

    name: str
    fn: Callable[[PyTree, Weights, Key[Array, ""] | None], PyTree]
    needs_all: bool
    sums: int = 1
    needs_key: bool = False

    def __call__(self, deltas: PyTree, weights: Weights = None, key: Key[Array, ""] | None = None) -> PyTree:
        """The merged tree."""
        return self.fn(deltas, weights, key)


def mean(deltas: PyTree, *, weights: Weights = None) -> PyTree:
    """Weighted mean over workers, `sum_k w_k D_k / sum_k w_k`.

    Args:
      deltas: pytree of real floating-point arrays `[K, ...]`. float16 and bfloat16 are summed in float32.
      weights: `[K]`, non-negative; None is equal weights. See the module's head.

    Returns:
      A pytree like one worker's, in the dtypes of `deltas`.

    Raises:
      TypeError: a leaf that is not real floating point; the message names its path.
      ValueError: no leaf, leaves with different K, weights of another shape, negative, not finite, or all zero.

    >>> mean({"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])}, weights=jnp.array([3.0, 1.0]))["w"].tolist()
    [1.5, 3.0]
    """
    workers = _Workers.of(deltas, weights)
    return jax.tree.map(lambda d: workers.finish(workers.mean(workers.select(d)), d), deltas)


def task_arithmetic(deltas: PyTree, *, scale: float | Float[Array, ""] = 1.0, weights: Weights = None) -> PyTree:
    """Scaled sum over workers: `scale * sum_k D_k`.

    With weights, `scale * K' * sum_k w_k D_k / sum_k w_k` where K' workers are present: equal weights are a plain sum.
    On pseudo-gradients it is DiLoCo's mean with the outer learning rate times K.

    Args:
      deltas, weights: as in `mean`.
      scale: the coefficient lambda of task arithmetic.

    Returns, Raises: as `mean`.

    >>> task_arithmetic({"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])}, scale=0.5)["w"].tolist()
    [2.0, 4.0]
    """
    workers = _Workers.of(deltas, weights)
    factor = scale * workers.count
    return jax.tree.map(lambda d: workers.finish(factor * workers.mean(workers.select(d)), d), deltas)


def ties(
    deltas: PyTree,
    *,
    density: float = 0.9,
    sign: str = "mass",
    weights: Weights = None,
) -> PyTree:
    """TIES: trims each worker's small entries, elects a sign an entry, averages the workers that have this sign.

    For each leaf and worker the `round((1 - density) n)` entries of smallest magnitude become 0 (entries equal to the
    smallest that is kept are kept too). The elected sign is that of the sum over workers (`"mass"`) or of the sum of
    signs (`"count"`); where it is 0 the result is 0. Weights enter the average of the agreeing entries, not the
    election.

    Args: deltas, weights: as in `mean`. density: fraction of entries kept, in (0, 1]. The pseudo-gradient variant
      keeps 0.9, TIES on fine-tuned models 0.2. sign: how signs are elected, `"mass"` or `"count"`.

    Returns, Raises: as `mean`; and ValueError for `density` outside (0, 1] or an unknown `sign`.

    >>> ties({"w": jnp.array([[4.0, 1.0], [2.0, -3.0], [-1.0, -1.0]])}, density=1.0)["w"].tolist()
    [3.0, -2.0]
    """
    _check_option("density", density)
    _check_option("sign", sign)
    workers = _Workers.of(deltas, weights)

    def merge(leaf: Leaf) -> Array:
        d = workers.select(leaf)
        n = math.prod(d.shape[1:])
        drop = min(round((1 - density) * n), n - 1)
        if n and drop > 0:
            magnitude = jnp.abs(d).reshape(workers.k, n)
            threshold = jnp.sort(magnitude, axis=1)[:, drop].reshape(workers.k, *[1] * (d.ndim - 1))
            d = jnp.where((jnp.abs(d) >= threshold) | jnp.isnan(d), d, 0)  # a NaN must not be trimmed away
        elected = jnp.sign(jnp.sum(d if sign == "mass" else jnp.sign(d), axis=0))
        share = workers.column(d) * ((jnp.sign(d) == elected) & (d != 0))
        total = jnp.sum(share, axis=0)
        merged = jnp.sum(share * d, axis=0) / jnp.where(total == 0, 1, total)
        return workers.finish(jnp.where(jnp.isnan(elected), jnp.nan, merged), leaf)

    return jax.tree.map(merge, deltas)


def dare(deltas: PyTree, *, key: Key[Array, ""] | None, drop: float = 0.1, weights: Weights = None) -> PyTree:
    """DARE: sets random entries of each worker's delta to 0, rescales the others, then averages.

    Of the n entries of a leaf exactly `round(drop n)` are dropped (never all of them) and the others multiplied by
    `n / (n - dropped)`, which is `1 / (1 - drop)` up to that rounding and makes the result unbiased. Masks are
    independent over workers and leaves; a worker's mask does not depend on how many workers there are.

    Args:
      deltas, weights: as in `mean`.
      key: typed key; use another one each round.
      drop: fraction of entries dropped, in [0, 1).

    Returns, Raises: as `mean`; and ValueError for `drop` outside [0, 1) or no key.

    >>> merged = dare({"w": jnp.ones((2, 10))}, key=jax.random.key(0), drop=0.5)["w"]
    >>> set(merged.tolist()) <= {0.0, 1.0, 2.0}, float(merged.sum())
    (True, 10.0)
    """
    _check_option("drop", drop)
    if key is None:
        raise ValueError("dare needs a random key: pass key=jax.random.key(seed), folded with the round")
    workers = _Workers.of(deltas, weights)
    leaves, treedef = jax.tree.flatten(deltas)

    def merge(index: int, leaf: Leaf) -> Array:
        d = workers.select(leaf)
        n = math.prod(d.shape[1:])
        dropped = min(round(drop * n), n - 1)
        if n and dropped > 0:
            keys = prng.worker_keys(jax.random.fold_in(key, index), workers.k)
            keep = jax.vmap(lambda k: jax.random.permutation(k, jnp.arange(n) >= dropped))(keys)
            d = d * keep.reshape(d.shape) * (n / (n - dropped))
        return workers.finish(workers.mean(d), leaf)

    return treedef.unflatten([merge(i, leaf) for i, leaf in enumerate(leaves)])


def iso_c(
    deltas: PyTree,
    *,
    scale: float | Float[Array, ""] = 1.0,
    specs: Specs = None,
    mask: Mask = None,
    method: Method = "svd",
    rtol: Rtol = "auto",
    ns_steps: Steps = 12,
    weights: Weights = None,
) -> PyTree:
    """Iso-C: `scale * Iso(mean_k D_k)` for matrices, `scale * mean` for other leaves.

    The original sums the task vectors of matrices and averages the others. As `Iso(cA) = c Iso(A)`, its sum is
    `scale = K` here for matrices; the mean keeps the step independent of K.

    Args:
      deltas, weights: as in `mean`.
      scale: multiplies the result.
      specs, mask, method, rtol, ns_steps: as in `isotropize`.

    Returns, Raises: as `mean` and `isotropize`.

    >>> iso_c({"w": jnp.array([[[1.0, 2.0], [3.0, 4.0]]])})["w"].round(4).tolist()
    [[-1.5, 2.5], [2.5, 1.5]]
    """
    check_options(method, rtol, ns_steps)
    workers = _Workers.of(deltas, weights)
    # In float32 to the end: a mean rounded to bfloat16 would lose more of its null space than its deltas have.
    merged = jax.tree.map(lambda d: workers.mean(workers.select(d)), deltas)
    merged = isotropize_tree(merged, specs, mask=mask, method=method, rtol=rtol, ns_steps=ns_steps, stored=deltas)
    return jax.tree.map(lambda m, d: workers.finish(scale * m, d), merged, deltas)


def iso_cts(
    deltas: PyTree, *, common: float = 0.8, specs: Specs = None, mask: Mask = None, weights: Weights = None
) -> PyTree:
    """Iso-CTS: a flat spectrum over directions of the mean and directions that single workers alone have.

    For a matrix with r singular values, `t = round((r - int(common r)) / K)` and `c = r - t K`:

        W = sum_k w_k D_k,  U_c, V_c = leading c singular vectors of W
        U_k, V_k = leading t singular vectors of (I - U_c U_c^T) w_k D_k
        U = [U_1 ... U_K U_c],  V likewise
        result = (mean of all r singular values used) polar(U) polar(V)^T

    With t = 0, which is so for `K >= 2 (r - int(common r))`, this is Iso-C. Singular vectors at rounding level are left
    out. K counts absent workers in t, not in the mean of singular values. Non-matrices are averaged.

    Args:
      deltas, weights: as in `mean`.
      common: fraction of directions taken from the mean, in [0, 1].
      specs, mask: as in `isotropize`.

    Returns, Raises: as `mean` and `isotropize`; and ValueError for `common` outside [0, 1].

    >>> d = jnp.array([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 4.0]]])
    >>> iso_cts({"w": d}, common=0.0)["w"].round(4).tolist()
    [[1.5, 0.0], [0.0, 1.5]]
    """
    _check_option("common", common)
    workers = _Workers.of(deltas, weights)

    def merge(d: Float[Array, "B K m n"], dtype: Any) -> Float[Array, "B m n"]:
        d = d * workers.column(d[0])
        whole = jnp.sum(d, axis=1)
        r = min(whole.shape[-2:])
        t = round((r - int(common * r)) / workers.k)
        t -= t * workers.k > r  # rounding up may ask for more directions than there are
        if t == 0:
            return iso(whole, rtol=auto_rtol(whole.shape, dtype))
        c = r - t * workers.k
        u, s, vt = _thin_svd(whole, c, dtype)
        rest = d - matmul(u, matmul(u.mT, d.swapaxes(0, 1))).swapaxes(0, 1)
        u_own, s_own, vt_own = _thin_svd(rest, t, dtype, jnp.linalg.norm(d, axis=(-2, -1), keepdims=True)[..., 0])
        u = jnp.concatenate([_join(u_own.mT).mT, u], axis=-1)
        vt = jnp.concatenate([_join(vt_own), vt], axis=-2)
        sigma_bar = (jnp.sum(s_own, axis=(1, 2)) + jnp.sum(s, axis=1)) / (c + t * workers.count)
        return sigma_bar[:, None, None] * matmul(_polar(u, dtype), _polar(vt, dtype))

    return _by_matrix(merge, deltas, workers, specs, mask)


def tsv_m(deltas: PyTree, *, specs: Specs = None, mask: Mask = None, weights: Weights = None) -> PyTree:
    """TSV-Merge: each worker's leading singular vectors, made orthogonal to the others', summed with their values.

    With `k = max(1, r // K)` and K' workers present:

        U_k, S_k, V_k = leading k singular triples of D_k;  U = [U_1 ... U_K], V likewise
        result = polar(U) diag(K' w_1 S_1, ..., K' w_K S_K) polar(V)^T

    so for equal weights matrices are summed, not averaged (non-matrices are averaged). One worker alone is returned
    unchanged. Singular vectors at rounding level are left out.

    Args:
      deltas, weights: as in `mean`.
      specs, mask: as in `isotropize`.

    Returns, Raises: as `mean` and `isotropize`.

    >>> d = jnp.array([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 4.0]]])
    >>> tsv_m({"w": d})["w"].round(4).tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    workers = _Workers.of(deltas, weights)

    def merge(d: Float[Array, "B K m n"], dtype: Any) -> Float[Array, "B m n"]:
        if workers.k == 1:
            return workers.mean(d.swapaxes(0, 1))
        u, s, vt = _thin_svd(d, max(1, min(d.shape[-2:]) // workers.k), dtype)
        s = (s * workers.count * workers.column(s[0])).reshape(s.shape[0], 1, -1)
        u, vt = _polar(_join(u.mT).mT, dtype), _polar(_join(vt), dtype)
        return matmul(u * s, vt)

    return _by_matrix(merge, deltas, workers, specs, mask)


class _Rule(NamedTuple):
    fn: Callable[..., PyTree]
    needs_all: bool = False
    sums: int = 1


AGGREGATORS: Mapping[str, _Rule] = MappingProxyType(
    {
        "mean": _Rule(mean),
        "task_arithmetic": _Rule(task_arithmetic),
        "ties": _Rule(ties, sums=3),
        "dare": _Rule(dare),
        "iso_c": _Rule(iso_c),
        "iso_cts": _Rule(iso_cts, needs_all=True, sums=0),
        "tsv_m": _Rule(tsv_m, needs_all=True, sums=0),
    }
)


def get(name: str, **options: Any) -> Aggregator:
    """A merging rule by name, with its options checked and bound before any work is done.

    Args:
      name: a key of `AGGREGATORS`.
      options: keyword arguments of that function, other than `weights` and `key`.

    Raises:
      ValueError: unknown name (the message lists the valid ones), unknown option, or an option out of range.

    >>> get("ties", density=0.2)({"w": jnp.array([[1.0], [3.0]])})["w"].tolist()
    [2.0]
    >>> get("dare-ties")
    Traceback (most recent call last):
    ValueError: unknown aggregator 'dare-ties'; allowed: dare, iso_c, iso_cts, mean, task_arithmetic, ties, tsv_m
    """
    if name not in AGGREGATORS:
        raise ValueError(f"unknown aggregator {name!r}; allowed: {', '.join(sorted(AGGREGATORS))}")
    rule = AGGREGATORS[name]
    parameters = inspect.signature(rule.fn).parameters
    allowed = [option for option in parameters if option not in ("deltas", "weights", "key")]
    for option, value in options.items():
        if option not in allowed:
            raise ValueError(f"aggregator {name!r} has no option {option!r}; allowed: {', '.join(allowed) or 'none'}")
        _check_option(option, value)
    if "method" in allowed:
        check_options(**{k: options[k] for k in ("method", "rtol", "ns_steps") if k in options})
    needs_key = "key" in parameters

    def fn(deltas: PyTree, weights: Weights = None, key: Key[Array, ""] | None = None) -> PyTree:
        random = {"key": key} if needs_key else {}
        return rule.fn(deltas, weights=weights, **random, **options)

    return Aggregator(name, fn, rule.needs_all, rule.sums, needs_key)


class _Workers(NamedTuple):
    """How many workers are stacked, and their normalised weights (None: all equal and present)."""

    k: int
    weights: Float[Array, " K"] | None

    @classmethod
    def of(cls, deltas: PyTree, weights: Weights) -> "_Workers":
        """Checks the stacked deltas and the weights."""
        sizes: dict[int, str] = {}
        for path, leaf in zip(trees.leaf_paths(deltas), jax.tree.leaves(deltas), strict=True):
            check_float(leaf, path)
            if not leaf.ndim or not leaf.shape[0]:
                raise ValueError(f"leaf {path!r} has shape {leaf.shape}; expected [K, ...] with K >= 1 workers")
            sizes.setdefault(leaf.shape[0], path)
        if len(sizes) != 1:
            found = ", ".join(f"{k} at {path!r}" for k, path in sizes.items())
            raise ValueError(f"all leaves of deltas must have one leading axis K, got {found or 'no leaves'}")
        (k,) = sizes
        if weights is None:
            return cls(k, None)
        if np.shape(weights) != (k,):
            raise ValueError(f"weights must have shape ({k},), one a worker, got {np.shape(weights)}")
        if not isinstance(weights, jax.core.Tracer):
            values = np.asarray(weights, np.float64)
            if not (np.all(np.isfinite(values)) and np.all(values >= 0) and np.any(values > 0)):
                raise ValueError(f"weights must be finite, >= 0 and not all 0, got {values.tolist()}")
            # Here and not in float32, where a sum of weights may overflow and a small weight vanish.
            values = values / np.max(values)
            return cls(k, jnp.asarray(values / np.sum(values), float))
        w, _ = in_range(jnp.asarray(weights, float), (0,))
        valid = jnp.all(jnp.isfinite(w) & (w >= 0))
        return cls(k, w / jnp.where(valid, jnp.sum(w), jnp.nan))

    @property
    def count(self) -> int | Array:
        """Number of workers present."""
        return self.k if self.weights is None else jnp.sum(self.weights > 0)

    def column(self, like: Float[Array, "K ..."]) -> Array:
        """The weights, shaped to multiply `like`."""
        w = jnp.full(self.k, 1 / self.k) if self.weights is None else self.weights
        return w.astype(like.dtype).reshape(self.k, *[1] * (like.ndim - 1))

    def select(self, leaf: Float[Leaf, "K ..."]) -> Float[Array, "K ..."]:
        """A leaf in the dtype computed in (at least float32), 0 where the worker is absent."""
        d = jnp.asarray(leaf)
        d = d.astype(jnp.promote_types(d.dtype, jnp.float32))
        return d if self.weights is None else jnp.where(self.column(d) > 0, d, 0)

    def mean(self, d: Float[Array, "K ..."]) -> Float[Array, "..."]:
        """Weighted mean of a selected leaf."""
        return jnp.mean(d, axis=0) if self.weights is None else jnp.sum(self.column(d) * d, axis=0)

    def finish(self, merged: Float[Array, "..."], leaf: Float[Leaf, "K ..."]) -> Float[Array, "..."]:
        """The merged leaf in the dtype it came in; NaN where traced weights turn out to be invalid."""
        if self.weights is not None:
            # Explicit: in products with masks XLA may replace 0 * NaN by 0.
            merged = jnp.where(jnp.isnan(self.weights[0]), jnp.nan, merged)
        return merged.astype(leaf.dtype)


def _by_matrix(
    merge: Callable[[Array, Any], Array], deltas: PyTree, workers: _Workers, specs: Specs, mask: Mask
) -> PyTree:
    """Merges the matrices of each leaf, `[B, K, m, n] -> [B, m, n]`, and averages leaves that are none."""
    leaves, treedef = jax.tree.flatten(deltas)
    one = treedef.unflatten([jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves])
    layouts = resolve_specs(one, specs, mask).values()

    def leaf_merge(leaf: Leaf, layout: MatrixSpec | None) -> Array:
        d = workers.select(leaf)
        if layout is None or not d.size:
            return workers.finish(workers.mean(d), leaf)
        stack = jax.vmap(lambda x: to_matrices(x, layout), out_axes=1)(d)
        # As in `isotropize`: rows and columns that no worker touched stay exactly zero.
        used = jnp.any(stack != 0, axis=(1, 3))[:, :, None] & jnp.any(stack != 0, axis=(1, 2))[:, None, :]
        stack, factor = in_range(stack, (1, 2, 3))  # the rules are homogeneous; norms square the entries
        merged = jnp.where(used, merge(stack, leaf.dtype) / factor[:, 0], 0)
        return workers.finish(from_matrices(merged, layout, d.shape[1:]), leaf)

    return treedef.unflatten([leaf_merge(*pair) for pair in zip(leaves, layouts, strict=True)])


def _thin_svd(
    a: Float[Array, "*stack m n"], count: int, dtype: Any, size: Float[Array, "*stack 1"] | None = None
) -> tuple[Array, Array, Array]:
    """The leading `count` singular triples, vectors at `dtype`'s rounding level (of `size`, if given) set to zero."""
    finite = jnp.all(jnp.isfinite(a), axis=(-2, -1), keepdims=True)
    u, s, vt = linalg.svd(jnp.where(finite, a, 0))
    keep = (s > cutoff(s if size is None else size, auto_rtol(a.shape, dtype))).astype(a.dtype)
    u, s, vt = u * keep[..., None, :], jnp.where(finite[..., 0], s, jnp.nan), vt * keep[..., :, None]
    return u[..., :count], s[..., :count], vt[..., :count, :]


def _polar(x: Float[Array, "*stack m n"], dtype: Any) -> Float[Array, "*stack m n"]:
    """The polar factor of vectors that were computed from numbers stored as `dtype`."""
    return polar(x, rtol=auto_rtol(x.shape, dtype))


def _join(x: Float[Array, "B K t n"]) -> Float[Array, "B Kt n"]:
    return x.reshape(x.shape[0], -1, x.shape[-1])


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "density": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "drop": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "common": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "sign": (lambda x: x in ("mass", "count"), "'mass' or 'count'"),
}


def _check_option(name: str, value: Any) -> None:
    """These options set shapes and counts, so they are Python values, known before anything is traced."""
    valid, text = _RANGES.get(name, (lambda _: True, ""))
    if name in ("density", "drop", "common") and not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number {text}, got {value!r}")
    if not valid(value):
        raise ValueError(f"{name} must be {text}, got {value!r}")
