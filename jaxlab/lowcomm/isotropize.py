"""Isotropisation: a matrix update becomes its polar factor times its mean singular value (Iso-C, the core of IsoLoCo).

For `A = U diag(s) V^T` with `r = min(m, n)` singular values

    polar(A) = U V^T        Iso(A) = mean(s) U V^T = (<polar(A), A> / r) polar(A)

so any polar routine gives the mean singular value as well, and no singular value decomposition is needed. Iso is odd,
idempotent, equivariant to scale, to transposition and to orthogonal maps on either side, and shrinks the Frobenius
norm by `mean(s) / rms(s)`.

Three routines compute the polar factor. `svd` is exact and the right default on CPU (LAPACK). `newton_schulz` uses
matrix products only, seven tuned quintic steps and then `x (15 - 10 x^2 + 3 x^4) / 8`, and is the right choice on
accelerators; with twelve steps it is as accurate as `svd` for condition numbers up to about 1e4. `qdwh` is JAX's
QR-based Halley iteration.

Rank: where a matrix has singular values at rounding level, `U V^T` is arbitrary there, and an SVD would give these
directions the full mean singular value (rows of an embedding that no token touched would get a larger update than the
others, in a direction that depends on the LAPACK build). `rtol` sets such singular values to 0; the mean still runs
over all r. The other two routines do not see singular values one by one: they leave exact zeros at zero and values
below about 1e-5 of the largest one somewhere between 0 and 1. Rows and columns that are exactly zero stay exactly
zero with all three.

Sources: Marczak et al., "No Task Left Behind: Isotropic Model Merging", arXiv 2502.04959 (Iso-C); Horoi et al., "Can
Model Merging Improve Aggregation in DiLoCo?", arXiv 2607.03011 (on pseudo-gradients); Amsel et al., "The Polar
Express", arXiv 2505.16932 (coefficients of the matrix-product iteration, for singular values in [1e-3, 1]). The rank
cut is this library's.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree, Real

from jaxlab.core import errors, linalg
from jaxlab.core import tree as trees
from jaxlab.lowcomm import checks

Method = str  # one of METHODS
METHODS = ("svd", "newton_schulz", "qdwh")
Rtol = float | Real[Array | np.ndarray | np.generic, ""] | str | None  # a number >= 0, "auto", or None
Steps = int | Real[Array, ""]  # an array only where it is not used: optax.inject_hyperparams makes one

_TUNED = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_TAYLOR = (1.875, -1.25, 0.375)
# float32 products on every backend: TF32 or bfloat16 would lose the small singular values.
matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
_SHARED = 2**20  # elements up to which leaves of one shape are decomposed together
_SAFETY = 1.01  # the tuned polynomials diverge just above 1: every step is taken at x / 1.01


@dataclasses.dataclass(frozen=True)
class MatrixSpec:
    """Which axes of a leaf form the rows and which the columns of a matrix; the remaining axes are a stack of matrices.

    An attention kernel `(d, heads, hd)` as one d x (heads hd) matrix is `MatrixSpec(rows=(0,), cols=(1, 2))`, and as
    one d x hd matrix per head `MatrixSpec(rows=(0,), cols=(2,))`.

    Attributes:
      rows: axes of the leaf, flattened in this order.
      cols: axes of the leaf, flattened in this order.
    """

    rows: tuple[int, ...]
    cols: tuple[int, ...]

    def __post_init__(self):
        for name, axes in (("rows", self.rows), ("cols", self.cols)):
            if not isinstance(axes, tuple):
                raise TypeError(f"{name} must be a tuple of axes such as (0,), got {axes!r}")
            for axis in axes:
                checks.integer(f"an axis in {name}", axis)


Spec = None | int | MatrixSpec
Specs = None | Mapping[str, Any] | Callable[[str, Any], Spec] | PyTree


class MatrixStats(NamedTuple):
    """Mean singular value and `||Iso(A)||_F / ||A||_F` of a leaf, averaged over its stack of matrices."""

    sigma_bar: Float[Array, ""]
    norm_ratio: Float[Array, ""]


def polar(
    a: Float[Array, "*stack m n"], method: Method = "svd", rtol: Rtol = "auto", ns_steps: Steps = 12
) -> Float[Array, "*stack m n"]:
    """The orthogonal polar factor `U V^T` of each matrix of a stack.

    Args:
      a: matrices `[..., m, n]`. float16 and bfloat16 are computed in float32.
      method: `"svd"`, `"newton_schulz"` or `"qdwh"`, see the module's head.
      rtol: with `"svd"`, singular values `<= rtol * max` get 0 instead of 1: `"auto"` is `auto_rtol` of the shape and
        dtype, `max(m, n) * eps` for float32 and at least `eps / sqrt(12)` for float16 and bfloat16; `None` cuts
        nothing, so a null space is filled with the vectors LAPACK happens to return (this is what the reference
        implementations do). The other methods have no cut, so they magnify the rounding noise of float16 and bfloat16
        matrices of low rank, and accept only `"auto"`.
      ns_steps: number of `"newton_schulz"` steps; 12 reaches float32 accuracy for condition numbers up to about 1e4.

    Returns:
      Matrices like `a`: all singular values 1, or 0 in the null space. A zero matrix gives zero; a matrix that holds a
      NaN or an infinity gives NaN everywhere.

    Raises:
      ValueError: unknown `method`, `rtol < 0`, `rtol` given to a method without cut, or `ns_steps < 1`.
      TypeError: `a` is not real floating point, or `ns_steps` is not a Python integer.

    >>> polar(jnp.array([[0.0, 2.0], [3.0, 0.0]])).round(3).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    check_options(method, rtol, ns_steps)
    check_matrices(a, "a")
    return _factors(a, method, rtol, ns_steps)[0].astype(a.dtype)


def nuclear_norm(a: Float[Array, "*stack m n"], method: Method = "svd", ns_steps: Steps = 12) -> Float[Array, "*stack"]:
    """Sum of singular values, `<polar(A), A>`.

    Args:
      a: matrices `[..., m, n]`.
      method, ns_steps: as in `polar`.

    Returns:
      One number for each matrix, in the dtype computed in (at least float32).

    >>> float(nuclear_norm(jnp.array([[0.0, 2.0], [3.0, 0.0]])))
    5.0
    """
    check_options(method, "auto", ns_steps)
    check_matrices(a, "a")
    return _factors(a, method, "auto", ns_steps)[1] * min(a.shape[-2:])


def iso(
    a: Float[Array, "*stack m n"], method: Method = "svd", rtol: Rtol = "auto", ns_steps: Steps = 12
) -> Float[Array, "*stack m n"]:
    """`Iso(A) = mean(s) U V^T` of each matrix of a stack; arguments and errors as in `polar`.

    >>> iso(jnp.array([[1.0, 2.0], [3.0, 4.0]])).round(4).tolist()
    [[-1.5, 2.5], [2.5, 1.5]]
    """
    check_options(method, rtol, ns_steps)
    check_matrices(a, "a")
    factor, sigma_bar = _factors(a, method, rtol, ns_steps)
    return (sigma_bar[..., None, None] * factor).astype(a.dtype)


def isotropize(
    method: Method = "svd",
    *,
    rtol: Rtol = "auto",
    ns_steps: Steps = 12,
    specs: Specs = None,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
) -> optax.GradientTransformation:
    """Replaces every matrix of the updates by `Iso(A) = mean(s) U V^T`; stateless.

    `optax.chain(isotropize(), optax.sgd(1.8, momentum=0.8, nesterov=True))` on the mean pseudo-gradient is IsoLoCo's
    outer optimizer. Leaves of rank 0 and 1 pass through; leaves of rank 2 are matrices, embeddings and output layers
    too; leaves of higher rank need a spec. Matrices of one shape are computed as one batch.

    Args:
      method, rtol, ns_steps: as in `polar`. Under `optax.inject_hyperparams`, list `ns_steps`, and `specs` or `mask`
        where they are functions, in its `static_args`.
      specs: how leaves are matrices, see `resolve_specs`.
      mask: a pytree of bool (or a prefix of one), or a function from the updates to it; False passes a leaf through.

    Returns:
      A gradient transformation that keeps shapes and dtypes (float16 and bfloat16 are computed in float32).

    Raises: ValueError: as in `polar`; in `init` and `update`, a leaf of rank >= 3 without a spec, a spec that does
      not fit, or a
        pattern that matches no leaf.
      TypeError: in `init` and `update`, a leaf that is not real floating point; the message names its path.

    >>> import optax
    >>> outer = optax.chain(isotropize(), optax.sgd(1.0))
    >>> grads = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "b": jnp.array([1.0])}
    >>> updates, _ = outer.update(grads, outer.init(grads))
    >>> updates["w"].round(4).tolist(), updates["b"].tolist()
    ([[1.5, -2.5], [-2.5, -1.5]], [-1.0])
    """
    check_options(method, rtol, ns_steps)

    def init(params: PyTree) -> optax.EmptyState:
        if jax.tree.leaves(params):  # optax.tree.map_params calls init with a tree that has none
            resolve_specs(params, specs, mask)
        return optax.EmptyState()

    def update(updates: PyTree, state: optax.EmptyState, params: PyTree | None = None) -> tuple[PyTree, Any]:
        del params
        return isotropize_tree(updates, specs, mask=mask, method=method, rtol=rtol, ns_steps=ns_steps), state

    return optax.GradientTransformation(init, update)


def isotropize_tree(
    tree: PyTree,
    specs: Specs = None,
    *,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    method: Method = "svd",
    rtol: Rtol = "auto",
    ns_steps: Steps = 12,
    stored: PyTree | None = None,
) -> PyTree:
    """`isotropize` as a function of a pytree; arguments and errors as there.

    `stored`, shaped like `tree`, has the dtypes that the numbers were once rounded to, for `rtol="auto"`.
    """
    check_options(method, rtol, ns_steps)
    leaves, treedef = jax.tree.flatten(tree)
    dtypes = [getattr(leaf, "dtype", None) for leaf in (leaves if stored is None else jax.tree.leaves(stored))]
    layouts = list(resolve_specs(tree, specs, mask).values())
    # Equal shapes (up to transposition) share one batched decomposition: faster to run, and far fewer ops to compile.
    # Large leaves stand alone: they fill the device by themselves, and a common batch would hold them all at once.
    groups: dict[Any, list[int]] = {}
    stacks: dict[int, Array] = {}
    for i, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True)):
        if layout is not None and leaf.size:
            stack = to_matrices(jnp.asarray(leaf), layout)
            stacks[i] = stack if stack.shape[1] >= stack.shape[2] else stack.mT
            alone = i if leaf.size > _SHARED else None
            groups.setdefault((stacks[i].shape[1:], stack.dtype, dtypes[i], alone), []).append(i)
    for (shape, _, dtype, _), members in groups.items():
        batch = jnp.concatenate([stacks[i] for i in members]) if len(members) > 1 else stacks[members[0]]
        cut = isinstance(rtol, str) and method == "svd"
        batch = iso(batch, method, auto_rtol(shape, dtype) if cut else rtol, ns_steps)
        start = 0
        for i in members:
            stop = start + stacks[i].shape[0]
            part = batch[start:stop]
            rows, cols = _matrix_shape(leaves[i].shape, layouts[i])
            leaves[i] = from_matrices(part if rows >= cols else part.mT, layouts[i], leaves[i].shape)
            start = stop
    return treedef.unflatten(leaves)


def matrix_diagnostics(
    tree: PyTree, specs: Specs = None, *, mask: PyTree | Callable[[PyTree], PyTree] | None = None
) -> dict[str, MatrixStats]:
    """Mean singular value and norm ratio `||Iso(A)||_F / ||A||_F` of every matrix leaf, for logs.

    Args:
      tree, specs, mask: as in `isotropize`.

    Returns:
      `{path: MatrixStats}`, leaves that pass through left out. A zero matrix has ratio 0.

    >>> stats = matrix_diagnostics({"w": jnp.diag(jnp.array([3.0, 1.0])), "b": jnp.ones(2)})["w"]
    >>> float(stats.sigma_bar), round(float(stats.norm_ratio), 4)
    (2.0, 0.8944)
    """
    stats = {}
    leaves = dict(zip(trees.leaf_paths(tree), jax.tree.leaves(tree), strict=True))
    for path, layout in resolve_specs(tree, specs, mask).items():
        if layout is None or not leaves[path].size:
            continue
        a = to_matrices(jnp.asarray(leaves[path]), layout)
        x, factor = in_range(_computed(a), (-2, -1))
        s = linalg.singular_values(x)
        kept = jnp.sum(s > cutoff(s, auto_rtol(a.shape, a.dtype)), axis=-1)
        sigma_bar = jnp.mean(s, axis=-1)
        norm = jnp.linalg.norm(s, axis=-1)
        ratio = jnp.where(norm == 0, 0, sigma_bar * jnp.sqrt(kept.astype(s.dtype)) / jnp.where(norm == 0, 1, norm))
        stats[path] = MatrixStats(jnp.mean(sigma_bar / factor[..., 0, 0]), jnp.mean(ratio))
    return stats


def resolve_specs(
    tree: PyTree, specs: Specs = None, mask: PyTree | Callable[[PyTree], PyTree] | None = None
) -> dict[str, MatrixSpec | None]:
    """How each leaf of a tree is a stack of matrices, in flattening order; None where it passes through.

    A spec is `None` (pass through), an integer (so many leading stack axes, then a matrix; a leaf whose remaining
    rank is 0 or 1 passes through, so that one pattern covers a stacked layer with its biases), or a `MatrixSpec`.
    Without a spec a leaf of rank 0 or 1 passes through and one of rank 2 is a matrix.

    Args: tree: arrays or `jax.ShapeDtypeStruct`. specs: a dict from regular expression to spec (`re.search` in the
      path; the first that matches wins; each must match
        something), a function `(path, leaf) -> spec` that decides for every leaf, a pytree of specs shaped like `tree`,
        or None. A dict whose keys are exactly the tree's paths is taken literally. To resolve on a whole tree and
        apply to parts of it, pass `lambda path, leaf: resolved[path]`.
      mask: as in `isotropize`.

    Raises:
      ValueError: a leaf of rank >= 3 without a spec, a spec that does not fit its leaf, a pattern that matches nothing.
      TypeError: a leaf that is not real floating point and not masked out.

    >>> resolve_specs({"attn": jnp.zeros((8, 2, 4)), "norm": jnp.zeros(8)}, {"attn": MatrixSpec((0,), (1, 2))})
    {'attn': MatrixSpec(rows=(0,), cols=(1, 2)), 'norm': None}
    """
    paths, leaves = trees.leaf_paths(tree), jax.tree.leaves(tree)
    chosen = _choose_specs(tree, paths, leaves, specs)
    kept = [True] * len(leaves) if mask is None else _broadcast_mask(tree, mask)
    resolved: dict[str, MatrixSpec | None] = {}
    for path, leaf, spec, keep in zip(paths, leaves, chosen, kept, strict=True):
        resolved[path] = _normalize_spec(path, leaf, spec) if keep else None
    return resolved


def to_matrices(leaf: Float[Array, "..."], spec: MatrixSpec) -> Float[Array, "stack m n"]:
    """A leaf as a stack of matrices; `spec` must be one that `resolve_specs` returned for its shape."""
    m, n = _matrix_shape(leaf.shape, spec)
    order = (*_stack_axes(leaf.ndim, spec), *spec.rows, *spec.cols)
    return leaf.transpose(order).reshape(-1, m, n)


def from_matrices(matrices: Float[Array, "stack m n"], spec: MatrixSpec, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """The inverse of `to_matrices` for a leaf of `shape`."""
    order = (*_stack_axes(len(shape), spec), *spec.rows, *spec.cols)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return matrices.reshape([shape[i] for i in order]).transpose(inverse)


def _factors(a: Array, method: Method, rtol: Rtol, ns_steps: Steps) -> tuple[Array, Array]:
    """The polar factors of a stack and the mean singular values, in the dtype computed in."""
    if isinstance(rtol, str):
        rtol = auto_rtol(a.shape, a.dtype)
    a = _computed(a)
    r = min(a.shape[-2:])
    if not a.size:
        return a, jnp.zeros(a.shape[:-2], a.dtype)
    # Scaling by the largest entry keeps squares and norms in range, once its reciprocal is a normal number: a compiler
    # may multiply with that. Non-finite matrices are computed as zeros and overwritten with NaN: LAPACK may iterate
    # long or print on infinities.
    finite = jnp.all(jnp.isfinite(a), axis=(-2, -1), keepdims=True)
    a, factor_in = in_range(jnp.where(finite, a, 0), (-2, -1))
    scale = jnp.max(jnp.abs(a), axis=(-2, -1), keepdims=True)
    x = a / jnp.where(scale == 0, 1, scale)
    wide = x.shape[-2] < x.shape[-1]
    x = x.mT if wide else x
    if method == "svd":
        factor = _polar_svd(x, rtol)
    elif method == "newton_schulz":
        factor = _polar_newton_schulz(x, ns_steps)
    else:
        factor = _polar_qdwh(x)
    if rtol is not None:
        # Exact, not just to rounding: an untouched embedding row must not move.
        used = jnp.any(x != 0, axis=-1, keepdims=True) & jnp.any(x != 0, axis=-2, keepdims=True)
        factor = jnp.where(used, factor, 0)
    sigma_bar = scale * jnp.sum(factor * x, axis=(-2, -1), keepdims=True) / r / factor_in
    factor = jnp.where(finite, factor.mT if wide else factor, jnp.nan)
    return factor, jnp.where(finite, sigma_bar, jnp.nan)[..., 0, 0]


def _polar_svd(x: Float[Array, "*stack m n"], rtol: Rtol) -> Float[Array, "*stack m n"]:
    """Thin SVD of tall matrices; of the triangular factor only when they are tall enough for QR to pay."""
    m, n = x.shape[-2:]
    q, core = linalg.qr(x) if m >= 2 * n else (None, x)
    u, s, vt = linalg.svd(core)
    if rtol is not None:
        u = u * (s > cutoff(s, rtol)).astype(u.dtype)[..., None, :]
    factor = matmul(u, vt)
    return factor if q is None else matmul(q, factor)


def _polar_newton_schulz(x: Float[Array, "*stack m n"], steps: int) -> Float[Array, "*stack m n"]:
    """`X <- a X + X (b G + c G^2)` with `G = X^T X`, for tall matrices scaled to spectral norm at most 1."""
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    x = x / jnp.where(norm == 0, 1, norm)
    for i in range(steps):
        if i < len(_TUNED):
            a, b, c = (coefficient / _SAFETY**power for coefficient, power in zip(_TUNED[i], (1, 3, 5), strict=True))
        else:
            a, b, c = _TAYLOR
        gram = matmul(x.mT, x)
        # One product, not a * x + x (...): a compiler may carry that sum along twice, as x and as its transposed copy,
        # and their difference in rounding then grows by the factor a > 1 at every step.
        x = matmul(x, a * jnp.eye(x.shape[-1], dtype=x.dtype) + b * gram + c * matmul(gram, gram))
    return x


def _polar_qdwh(x: Float[Array, "*stack m n"]) -> Float[Array, "*stack m n"]:
    """One matrix at a time: each takes its own number of steps, and no batch reaches LAPACK (see `core.linalg`)."""
    one = jax.custom_batching.sequential_vmap(lambda a: jax.lax.linalg.qdwh(a)[0])
    return jax.vmap(one)(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)


def cutoff(s: Float[Array, "*stack r"], rtol: Rtol) -> Float[Array, "*stack 1"]:
    """The value at or below which singular values `s` count as zero, `rtol * max(s)`; `rtol` is a number."""
    return rtol * jnp.max(s, axis=-1, keepdims=True)


def auto_rtol(shape: tuple[int, ...], dtype: Any) -> float:
    """The rounding level of the singular values of matrices `[..., m, n]` stored as `dtype`, relative to the largest.

    Two roundings set it. That of the decomposition grows with the size, `max(m, n) * eps` of the dtype computed in.
    That of float16 and bfloat16 storage does not: it moves each entry by at most half a unit in the last place, evenly
    spread, so by `eps / sqrt(12)` of itself or less in the root mean square, and the matrix by as much of its
    Frobenius norm. Where one singular value dominates, the others are noise up to there (measured: at most 0.27 eps
    for matrices of rank 1 from 8 x 8 to 1024 x 1024). `max(m, n) * eps` of bfloat16 would exceed 1 and cut all.
    """
    computed = max(shape[-2:]) * float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
    if jnp.finfo(dtype).bits >= 32:
        return computed
    return max(computed, float(jnp.finfo(dtype).eps) / math.sqrt(12))


def in_range(a: Float[Array, "..."], axes: tuple[int, ...]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """`(a * f, f)` with f a power of two, 1 for ordinary sizes, that makes squares, sums and reciprocals representable.

    f is one number for all `axes`. In float32 it is 2^-80 above 2^40 and 2^80 below 2^-40, so nothing is rounded.
    """
    limit = 5 * jnp.finfo(a.dtype).maxexp // 16
    largest = jnp.max(jnp.abs(a), axis=axes, keepdims=True)
    factor = jnp.where(largest < 2.0**-limit, 2.0 ** (2 * limit), 1).astype(a.dtype)
    factor = jnp.where(largest > 2.0**limit, 2.0 ** (-2 * limit), factor).astype(a.dtype)
    return a * factor, factor


def _computed(a: Array) -> Array:
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def check_options(method: Method = "svd", rtol: Rtol = "auto", ns_steps: Steps = 12) -> None:
    """Raises what `polar` raises for its options."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}{errors.did_you_mean(str(method), METHODS)}")
    if method != "svd" and not (isinstance(rtol, str) and rtol == "auto"):
        raise ValueError(f"rtol={rtol!r}: only method 'svd' can cut singular values; leave rtol='auto' with {method!r}")
    if isinstance(rtol, str) and rtol != "auto":
        raise ValueError(f"rtol must be a number >= 0, 'auto' or None, got {rtol!r}")
    if rtol is None or isinstance(rtol, str):
        cut = None
    else:
        cut = checks.scalar("rtol", rtol, "a number >= 0, 'auto' or None")
    if cut is not None and not (cut >= 0 and math.isfinite(cut)):
        raise ValueError(f"rtol must be finite and >= 0, got {rtol!r}")
    if method == "newton_schulz":
        try:
            steps = operator.index(ns_steps)
        except (TypeError, jax.errors.JAXTypeError) as error:
            raise TypeError(
                f"ns_steps must be a Python integer, got {ns_steps!r}; "
                "under optax.inject_hyperparams list it in static_args"
            ) from error
        if steps < 1:
            raise ValueError(f"ns_steps must be >= 1, got {steps}")


def check_float(leaf: Any, path: str) -> None:
    """Raises `TypeError` naming the path of a leaf that is not a real floating-point array."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{path!r} must be real floating point, got {type(leaf).__name__ if dtype is None else dtype}")


def check_matrices(a: Any, path: str) -> None:
    """Raises as `check_float`, and `ValueError` for fewer than two axes."""
    check_float(a, path)
    if a.ndim < 2:
        raise ValueError(f"{path!r} must be matrices [..., m, n], got shape {a.shape}")


def _choose_specs(tree: PyTree, paths: list[str], leaves: list[Any], specs: Specs) -> list[Any]:
    """The spec given for each leaf, `_DEFAULT` where none was."""
    if specs is None:
        return [_DEFAULT] * len(leaves)
    if callable(specs):
        return [specs(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    if isinstance(specs, Mapping) and all(_is_spec(value) for value in specs.values()):
        if specs and set(specs) == set(paths):
            return [specs[path] for path in paths]
        return _match_patterns(paths, specs)
    try:
        return jax.tree.structure(tree).flatten_up_to(specs)
    except ValueError as error:
        raise ValueError(f"specs, taken as a pytree of specs, does not match the tree: {error}") from error


def _match_patterns(paths: list[str], specs: Mapping[str, Spec]) -> list[Any]:
    for pattern in specs:
        if not any(checks.pattern("spec pattern", pattern).search(path) for path in paths):
            raise ValueError(f"spec pattern {pattern!r} matches no leaf; paths: {', '.join(paths[:20]) or 'none'}")
    matching = (next((spec for pattern, spec in specs.items() if re.search(pattern, path)), _DEFAULT) for path in paths)
    return list(matching)


def _broadcast_mask(tree: PyTree, mask: PyTree | Callable[[PyTree], PyTree]) -> list[bool]:
    mask = mask(tree) if callable(mask) else mask
    try:
        full = jax.tree.map(lambda keep, part: jax.tree.map(lambda _: keep, part), mask, tree)
    except ValueError as error:
        raise ValueError(f"mask does not match the tree: {error}") from error
    return [bool(keep) for keep in jax.tree.leaves(full)]


def _normalize_spec(path: str, leaf: Any, spec: Any) -> MatrixSpec | None:
    """The spec as a MatrixSpec with non-negative axes, or None; checks that it fits the leaf."""
    check_float(leaf, path)
    ndim = len(leaf.shape)
    if spec is _DEFAULT:
        if ndim >= 3:
            raise ValueError(
                f"leaf {path!r} has shape {tuple(leaf.shape)} and no spec: say which axes form the matrix with "
                "specs={pattern: MatrixSpec(rows, cols)}, the number of leading stack axes, or None to pass it through"
            )
        spec = 0
    if not _is_spec(spec):
        raise ValueError(f"spec of leaf {path!r} must be None, an integer >= 0 or a MatrixSpec, got {spec!r}")
    if spec is None:
        return None
    if isinstance(spec, int):
        if spec < 0 or ndim - spec >= 3:
            raise ValueError(
                f"spec {spec} of leaf {path!r}: of the axes of shape {tuple(leaf.shape)} it must leave at most 2 "
                "after the stack axes"
            )
        return MatrixSpec((ndim - 2,), (ndim - 1,)) if ndim - spec == 2 else None
    axes = [*spec.rows, *spec.cols]
    positive = [axis + ndim if axis < 0 else axis for axis in axes]
    distinct = len(set(positive)) == len(positive) and all(0 <= axis < ndim for axis in positive)
    if not (spec.rows and spec.cols and distinct):
        raise ValueError(
            f"spec {spec} does not fit leaf {path!r} of shape {tuple(leaf.shape)}: "
            "rows and cols must be non-empty and name distinct axes of it"
        )
    return MatrixSpec(tuple(positive[: len(spec.rows)]), tuple(positive[len(spec.rows) :]))


class _Default:
    """Marks a leaf for which no spec was given (None means: pass through)."""


_DEFAULT = _Default()


def _is_spec(spec: Any) -> bool:
    return spec is None or isinstance(spec, MatrixSpec) or (isinstance(spec, int) and not isinstance(spec, bool))


def _matrix_shape(shape: tuple[int, ...], spec: MatrixSpec) -> tuple[int, int]:
    return math.prod(shape[i] for i in spec.rows), math.prod(shape[i] for i in spec.cols)


def _stack_axes(ndim: int, spec: MatrixSpec) -> list[int]:
    return [axis for axis in range(ndim) if axis not in (*spec.rows, *spec.cols)]
