"""Iso(A) and its polar routines: vectors, invariances, rank, matrix specs, and use inside optax."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.lowcomm.isotropize import (
    METHODS,
    MatrixSpec,
    auto_rtol,
    check_matrices,
    isotropize,
    isotropize_tree,
    matrix_diagnostics,
    nuclear_norm,
    polar,
    resolve_specs,
)
from jaxlab.lowcomm.isotropize import iso as iso_eager
from tests.lowcomm.problems import post_init
from tests.reference import merging_np

# Jitted, for one compilation a shape: run op by op, every shape compiles twenty programs.
iso = jax.jit(iso_eager, static_argnums=(1, 2, 3))
iso_tree = jax.jit(isotropize_tree, static_argnames=("specs", "mask", "method"))

A22 = np.array([[1.0, 2.0], [3.0, 4.0]])
ISO22 = np.array([[-1.5, 2.5], [2.5, 1.5]])
A23 = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
ISO23 = np.array([[-2.97011047, 0.59175171, 4.15361389], [3.63299316, 2.90824829, 2.18350342]])


def matrix(rng, m, n, condition=None, dtype=np.float32):
    """A random matrix; with a condition number, geometrically spaced singular values from 1 down."""
    a = rng.normal(size=(m, n))
    if condition is not None:
        u, _, vt = np.linalg.svd(a, full_matrices=False)
        a = (u * np.geomspace(1, 1 / condition, min(m, n))) @ vt
    return a.astype(dtype)


def orthogonal(rng, n):
    return np.linalg.qr(rng.normal(size=(n, n)))[0].astype(np.float32)


def relative(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


# Values.


@pytest.mark.parametrize("method", METHODS)
def test_known_values(method):
    np.testing.assert_allclose(iso(jnp.float32(A22), method), ISO22, rtol=0, atol=3e-6)
    np.testing.assert_allclose(iso(jnp.float32(A23), method), ISO23, rtol=0, atol=3e-6)


@pytest.mark.parametrize("method", METHODS)
def test_known_values_in_float64(method):
    with jax.enable_x64(True):
        np.testing.assert_allclose(iso(jnp.asarray(A22), method), ISO22, rtol=0, atol=1e-12)
        out = np.asarray(iso(jnp.asarray(A23), method))
        s = np.linalg.svd(out, compute_uv=False)
        np.testing.assert_allclose(s, np.linalg.svd(A23, compute_uv=False).mean(), rtol=1e-12)
        np.testing.assert_allclose(out, merging_np.iso(A23), rtol=0, atol=1e-12)


SHAPES = [(1, 1), (1, 7), (7, 1), (2, 2), (33, 33), (16, 40), (40, 16), (4096, 16)]


def random_shapes():
    rng = np.random.default_rng(3)
    return SHAPES + [tuple(int(x) for x in rng.integers(1, 40, 2)) for _ in range(30 - len(SHAPES))]


def test_all_singular_values_become_the_mean():
    matrices = [matrix(np.random.default_rng(i), *shape) for i, shape in enumerate(random_shapes())]
    assert len(matrices) == 30
    for a, out in zip(matrices, jax.jit(lambda xs: [iso_eager(x) for x in xs])(matrices), strict=True):
        sigma_bar = np.linalg.svd(a.astype(np.float64), compute_uv=False).mean()
        s = np.linalg.svd(np.asarray(out, np.float64), compute_uv=False)
        np.testing.assert_allclose(s, sigma_bar, rtol=1e-5, err_msg=str(a.shape))
        assert relative(out, merging_np.iso(a)) < 1e-4, a.shape


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)])
def test_methods_agree_with_the_oracle_up_to_condition_1e3(method, shape):
    a = matrix(np.random.default_rng(0), *shape, condition=1e3)
    assert relative(iso(jnp.asarray(a), method), merging_np.iso(a)) < 1e-4


def test_muons_five_steps_are_not_isotropisation():
    a = matrix(np.random.default_rng(0), 24, 24, condition=1e3)
    sigma_bar = np.linalg.svd(a, compute_uv=False).mean()
    assert relative(sigma_bar * merging_np.muon_newton_schulz(a), merging_np.iso(a)) > 0.1
    # The same shortcut with our coefficients fails too: 12 steps are needed, not 5.
    assert relative(iso(jnp.asarray(a), "newton_schulz", "auto", 5), merging_np.iso(a)) > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_nuclear_norm_is_the_sum_of_singular_values(method):
    a = np.stack([matrix(np.random.default_rng(i), 20, 30) for i in range(3)])
    expected = np.linalg.svd(a.astype(np.float64), compute_uv=False).sum(-1)
    np.testing.assert_allclose(jax.jit(nuclear_norm, static_argnums=1)(a, method), expected, rtol=1e-6)
    np.testing.assert_allclose(expected / 20, np.sum(polar(jnp.asarray(a), method) * a, (1, 2)) / 20, rtol=1e-6)


# Invariances.


@pytest.mark.parametrize("method", METHODS)
def test_equivariance(method):
    rng = np.random.default_rng(5)
    a = jnp.asarray(matrix(rng, 8, 13))
    p, q = orthogonal(rng, 8), orthogonal(rng, 13)

    def f(x):
        return iso(x, method)

    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)

    base = f(a)
    close(f(p @ a @ q), p @ base @ q)
    close(f(a.T), base.T)
    close(f(-a), -base)
    close(f(base), base)
    for scale in (1e-30, 1e-3, 1e3, 1e30):
        close(f(scale * a) / scale, base)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    shape=st.sampled_from([(1, 4), (3, 3), (6, 4)]),
    seed=st.integers(0, 10**6),
    method=st.sampled_from(METHODS),
    exponent=st.integers(-12, 12),
)
def test_any_matrix_against_the_oracle(shape, seed, method, exponent):
    a = matrix(np.random.default_rng(seed), *shape, condition=100.0) * np.float32(10.0**exponent)
    assert relative(iso(jnp.asarray(a), method), merging_np.iso(a)) < 1e-4


# Rank.


def touched_embedding(vocab=64, d=16, touched=6):
    rng = np.random.default_rng(0)
    a = np.zeros((vocab, d), np.float32)
    rows = np.sort(rng.choice(vocab, touched, replace=False))
    a[rows] = rng.normal(size=(touched, d))
    return a, rows


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("transpose", [False, True])
def test_untouched_rows_and_columns_get_exactly_zero(method, transpose):
    a, rows = touched_embedding()
    a = a.T if transpose else a
    out = np.asarray(iso(jnp.asarray(a), method))
    out = out.T if transpose else out
    assert np.all(np.delete(out, rows, axis=0) == 0)
    assert relative(out[rows], merging_np.iso(a.T if transpose else a)[rows]) < 1e-4
    s = np.linalg.svd(out, compute_uv=False)
    np.testing.assert_allclose(s[: len(rows)], np.linalg.svd(a, compute_uv=False).mean(), rtol=1e-4)
    np.testing.assert_allclose(s[len(rows) :], 0, atol=1e-6)


def test_without_rank_cut_the_untouched_rows_get_the_larger_update():
    rng = np.random.default_rng(0)
    a = np.zeros((256, 64), np.float32)
    a[:20] = rng.normal(size=(20, 64))
    out = np.asarray(iso(jnp.asarray(a), "svd", None))
    sigma_bar = np.linalg.svd(a, compute_uv=False).mean()
    # 20 directions live on the touched rows, the arbitrary other 44 on the untouched ones.
    np.testing.assert_allclose(np.linalg.norm(out[:20]), np.sqrt(20) * sigma_bar, rtol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(out[20:]), np.sqrt(44) * sigma_bar, rtol=1e-4)
    np.testing.assert_allclose(out[:20], np.asarray(iso(jnp.asarray(a)))[:20], atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_permuted_rows_permute_the_result(method):
    a, _ = touched_embedding()
    order = np.random.default_rng(1).permutation(len(a))
    np.testing.assert_allclose(
        iso(jnp.asarray(a[order]), method), np.asarray(iso(jnp.asarray(a), method))[order], atol=2e-5
    )


def test_rank_cut_removes_directions_below_rtol():
    rng = np.random.default_rng(2)
    u, v = orthogonal(rng, 6), orthogonal(rng, 6)
    s = np.array([1, 0.5, 0.25, 1e-2, 1e-3, 1e-4], np.float32)
    a = jnp.asarray((u * s) @ v)
    for rtol, kept in ((0.1, 3), (3e-3, 4), (0.0, 6), ("auto", 6), (None, 6)):
        out = np.linalg.svd(np.asarray(iso(a, "svd", rtol)), compute_uv=False)
        np.testing.assert_allclose(out[:kept], s.mean() if kept == 6 else s[:kept].sum() / 6, rtol=1e-3)
        np.testing.assert_allclose(out[kept:], 0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_zero_and_empty_matrices(method):
    assert np.all(np.asarray(iso(jnp.zeros((5, 3)), method)) == 0)
    assert polar(jnp.zeros((0, 3)), method).shape == (0, 3)
    assert np.all(np.asarray(nuclear_norm(jnp.zeros((2, 5, 3)), method)) == 0)
    stack = jnp.stack([jnp.zeros((4, 4)), jnp.eye(4)])
    np.testing.assert_allclose(iso(stack, method), stack, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_matrix_gives_nan_and_spares_its_neighbours(method, bad):
    stack = jnp.stack([jnp.eye(3).at[0, 1].set(bad), jnp.eye(3)])
    out = np.asarray(iso(stack, method))
    assert np.all(np.isnan(out[0]))
    np.testing.assert_allclose(out[1], np.eye(3), atol=1e-6)


# Trees, specs and masks.


def test_leaves_of_rank_below_two_pass_and_shapes_are_batched():
    rng = np.random.default_rng(4)
    tree = {
        "embed": jnp.asarray(matrix(rng, 12, 5)),
        "head": jnp.asarray(matrix(rng, 5, 12)),
        "w": jnp.asarray(matrix(rng, 5, 5)),
        "bias": jnp.arange(4.0),
        "scale": jnp.float32(3.0),
        "empty": jnp.zeros((0, 3)),
    }
    out = iso_tree(tree)
    for name in ("embed", "head", "w"):
        assert relative(out[name], merging_np.iso(np.asarray(tree[name]))) < 1e-5
    for name in ("bias", "scale", "empty"):
        np.testing.assert_array_equal(out[name], tree[name])
    # The 12 x 5 matrix and the transposed 5 x 12 one make one batch, the square one needs none.
    assert str(jax.make_jaxpr(isotropize_tree)(tree)).count("concatenate[") == 1


def test_specs_equal_a_loop_over_slices():
    rng = np.random.default_rng(5)
    attention = rng.normal(size=(8, 2, 3)).astype(np.float32)  # d, heads, hd
    layers = rng.normal(size=(3, 4, 6)).astype(np.float32)  # layer, m, n
    norms = rng.normal(size=(3, 4)).astype(np.float32)  # layer, d: a stack of vectors, not a matrix
    out_kernel = rng.normal(size=(2, 3, 8)).astype(np.float32)  # heads, hd, d
    experts = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)  # layer, expert, m, n
    tree = {"a": attention, "h": attention, "o": out_kernel, "layers": {"w": layers, "norm": norms}, "x": experts}
    specs = {
        "^a$": MatrixSpec((0,), (1, 2)),
        "^h$": MatrixSpec((0,), (-1,)),
        "^o$": MatrixSpec((0, 1), (2,)),
        "^layers/": 1,
        "^x$": 2,
    }
    out = jax.jit(lambda t: isotropize_tree(t, specs))(tree)
    assert relative(out["a"], merging_np.iso(attention.reshape(8, 6)).reshape(8, 2, 3)) < 1e-5
    per_head = np.stack([merging_np.iso(attention[:, h]) for h in range(2)], axis=1)
    assert relative(out["h"], per_head) < 1e-5
    assert relative(out["o"], merging_np.iso(out_kernel.reshape(6, 8)).reshape(2, 3, 8)) < 1e-5
    assert relative(out["layers"]["w"], np.stack([merging_np.iso(w) for w in layers])) < 1e-5
    np.testing.assert_array_equal(out["layers"]["norm"], norms)
    assert relative(out["x"], np.stack([[merging_np.iso(w) for w in layer] for layer in experts])) < 1e-5


def test_specs_may_be_a_dict_a_function_or_a_tree():
    tree = {"a": {"w": jnp.ones((2, 3, 4))}, "b": jnp.ones((2, 3))}
    expected = {"a/w": MatrixSpec((1,), (2,)), "b": None}
    assert resolve_specs(tree, {"w$": 1, "b": None}) == expected
    assert resolve_specs(tree, lambda path, leaf: 1 if leaf.ndim == 3 else None) == expected
    assert resolve_specs(tree, {"a": {"w": 1}, "b": None}) == expected
    assert resolve_specs(tree, {"a/w": 1, "b": None}) == expected
    assert resolve_specs(tree, {"w$": 1}, {"a": True, "b": False}) == expected
    assert resolve_specs(tree, {"w$": 1}, lambda t: jax.tree.map(lambda x: x.ndim > 2, t)) == expected
    # The first matching pattern wins.
    assert resolve_specs(tree, {"a": 1, ".": None})["a/w"] == MatrixSpec((1,), (2,))
    assert resolve_specs(tree, {"b": None, ".": 1})["b"] is None


def test_exact_paths_are_not_patterns():
    tree = {"w": jnp.ones((2, 2)), "w2": jnp.ones((2, 2))}
    assert resolve_specs(tree, {"w": None, "w2": 0}) == {"w": None, "w2": MatrixSpec((0,), (1,))}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (None, "'a/w'.*no spec"),
        ({"b": None}, "'a/w'.*no spec"),
        ({"w": 1, "nothing": 1}, "'nothing' matches no leaf"),
        ({"w": 0}, "spec 0 of leaf 'a/w'"),
        ({"w": -1}, "spec -1 of leaf 'a/w'"),
        ({"w": MatrixSpec((0,), (0,))}, "does not fit leaf 'a/w'"),
        ({"w": MatrixSpec((0,), ())}, "does not fit leaf 'a/w'"),
        ({"w": MatrixSpec((0,), (3,))}, "does not fit leaf 'a/w'"),
        (lambda path, leaf: "matrix", "spec of leaf 'a/w' must be"),
        (lambda path, leaf: True, "spec of leaf 'a/w' must be"),
        ({"a": {"v": 1}, "b": None}, "does not match the tree"),
    ],
)
def test_specs_that_do_not_fit(specs, message):
    tree = {"a": {"w": jnp.ones((2, 3, 4))}, "b": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=message):
        isotropize(specs=specs).init(tree)
    with pytest.raises(ValueError, match=message):
        isotropize(specs=specs).update(tree, optax.EmptyState())


@pytest.mark.parametrize(
    "leaf", [jnp.ones((2, 2), int), jnp.ones(2, bool), jnp.ones((2, 2), complex), jax.random.key(0)]
)
def test_leaves_that_are_not_real_floating_point(leaf):
    tree = {"layer": {"count": leaf}, "w": jnp.eye(2)}
    with pytest.raises(TypeError, match="'layer/count'"):
        isotropize_tree(tree)
    out = isotropize_tree(tree, mask={"layer": False, "w": True})
    assert out["layer"]["count"] is leaf


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "svdd"}, ValueError, "did you mean 'svd'"),
        ({"rtol": -1.0}, ValueError, "rtol"),
        ({"rtol": float("nan")}, ValueError, "rtol"),
        ({"rtol": "none"}, ValueError, "rtol"),
        ({"method": "qdwh", "rtol": 1e-3}, ValueError, "only method 'svd'"),
        ({"method": "newton_schulz", "rtol": None}, ValueError, "only method 'svd'"),
        ({"method": "newton_schulz", "ns_steps": 0}, ValueError, "ns_steps"),
        ({"method": "newton_schulz", "ns_steps": 2.0}, TypeError, "ns_steps"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises((error, TypeError), match=message):
        isotropize(**options)


def test_what_is_no_matrix_no_axes_and_no_pattern():
    with pytest.raises(ValueError, match=r"'a' must be matrices \[..., m, n\], got shape \(3,\)"):
        check_matrices(jnp.ones(3), "a")
    with pytest.raises(TypeError, match=r"rows must be a tuple of axes such as \(0,\), got 0"):
        post_init(MatrixSpec, rows=0, cols=1)
    with pytest.raises(TypeError, match="an axis in cols must be an integer, got 'x'"):
        post_init(MatrixSpec, rows=(0,), cols=("x",))
    with pytest.raises(ValueError, match=r"spec pattern must be a regular expression, got '\(w'"):
        resolve_specs({"w": jnp.ones((2, 3))}, {"(w": None})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    a = jnp.asarray(matrix(np.random.default_rng(6), 6, 9, condition=50.0), dtype)
    out = iso_tree({"w": a})["w"]
    assert out.dtype == dtype
    expected = jnp.asarray(merging_np.iso(np.asarray(a, np.float32)), jnp.float32).astype(dtype)
    ulp = float(jnp.finfo(dtype).eps) * float(jnp.abs(expected).max())
    np.testing.assert_allclose(np.float32(out), np.float32(expected), rtol=0, atol=ulp)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(8, 8), (4, 64), (256, 256)])
def test_the_rounding_of_half_precision_is_no_direction(dtype, shape):
    """A matrix of rank 1 rounded to half precision has full rank, but Iso keeps rank 1; the diagnostics agree."""
    rows, cols = (np.linspace(0.13, 1.0, n) for n in shape)
    a = jnp.asarray(np.outer(rows, cols * 2.8), dtype)
    out = np.linalg.svd(np.float32(iso(a)), compute_uv=False)
    assert out[1] < 0.01 * out[0]
    whole = np.linalg.norm(out) / np.linalg.norm(np.float32(a))
    np.testing.assert_allclose(matrix_diagnostics({"w": a})["w"].norm_ratio, whole, rtol=0.02)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(64, 64), (256, 64)])
def test_half_precision_keeps_well_conditioned_matrices_whole(dtype, shape):
    a = jnp.asarray(matrix(np.random.default_rng(0), *shape), dtype)
    out = np.linalg.svd(np.float32(polar(a)), compute_uv=False)
    assert out.min() > 0.9


def test_automatic_cut_by_dtype():
    """float32 and float64: max(m, n) eps. Half precision: storage, or the decomposition where that is coarser."""
    eps = {name: float(jnp.finfo(name).eps) for name in ("float64", "float32", "bfloat16", "float16")}
    assert auto_rtol((3, 1024, 8), jnp.float32) == 1024 * eps["float32"]
    assert auto_rtol((8, 9), jnp.dtype("float64")) == 9 * eps["float64"]
    assert auto_rtol((1024, 1024), jnp.bfloat16) == eps["bfloat16"] / math.sqrt(12)
    assert auto_rtol((2**16, 8), jnp.float16) == 2**16 * eps["float32"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [2.4e38, 1e30, 1e-30])
def test_sizes_at_the_ends_of_the_range(method, scale):
    a = np.float32(A22 / 4 * scale)
    np.testing.assert_allclose(np.asarray(iso(a, method)) / scale, ISO22 / 4, rtol=1e-4)
    np.testing.assert_allclose(polar(jnp.asarray(a)), merging_np.polar(A22), atol=1e-5)
    stats = matrix_diagnostics({"w": jnp.eye(2) * scale})["w"]
    np.testing.assert_allclose([stats.sigma_bar / scale, stats.norm_ratio], 1, rtol=1e-5)


def test_gradients():
    """Of the nuclear norm it is the polar factor; of the polar factor, a finite difference."""
    rng = np.random.default_rng(8)
    for shape in ((4, 4), (7, 3), (2, 3, 5)):
        a, direction = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
        grad = jax.jit(jax.grad(lambda x: jnp.sum(nuclear_norm(x))))(a)
        np.testing.assert_allclose(grad, polar(a), atol=2e-5)
        f = jax.jit(lambda x, w=direction: jnp.sum(polar(x) * w))
        step = 1e-2 * direction
        slope = (f(a + step) - f(a - step)) / 2e-2
        np.testing.assert_allclose(jnp.vdot(jax.jit(jax.grad(f))(a), direction), slope, rtol=0.02, atol=0.02)


def test_diagnostics():
    rng = np.random.default_rng(7)
    tree = {
        "w": jnp.asarray(matrix(rng, 6, 9)),
        "zero": jnp.zeros((3, 3)),
        "b": jnp.ones(3),
        "e": touched_embedding()[0],
    }
    stats = jax.jit(matrix_diagnostics)(tree)
    assert set(stats) == {"w", "zero", "e"}
    for name in ("w", "e"):
        out = merging_np.iso(np.asarray(tree[name]))
        np.testing.assert_allclose(stats[name].norm_ratio, np.linalg.norm(out) / np.linalg.norm(tree[name]), rtol=1e-5)
        np.testing.assert_allclose(
            stats[name].sigma_bar, np.linalg.svd(np.asarray(tree[name]), compute_uv=False).mean(), rtol=1e-5
        )
    assert float(stats["zero"].norm_ratio) == 0.0


# Inside optax.


def isoloco_steps(outer, wrap=lambda f: f):
    """Two outer steps from zero on the pseudo-gradients of the published example."""
    theta = {"w": jnp.zeros((2, 2))}
    state = outer.init(theta)
    update = wrap(outer.update)
    trace = []
    for delta in (A22, [[0.0, 2.0], [2.0, 0.0]]):
        updates, state = update({"w": jnp.asarray(delta, jnp.float32)}, state, theta)
        theta = optax.apply_updates(theta, updates)
        trace.append(np.asarray(theta["w"]))
    return trace


EXPECTED_STEPS = [[[2.7 * 1.8, -4.5 * 1.8], [-4.5 * 1.8, -2.7 * 1.8]], [[6.588, -17.46], [-17.46, -6.588]]]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_chained_with_nesterov_it_is_isoloco(wrap):
    trace = isoloco_steps(optax.chain(isotropize(), optax.sgd(1.8, momentum=0.8, nesterov=True)), wrap)
    np.testing.assert_allclose(trace, EXPECTED_STEPS, rtol=2e-6)


def test_under_inject_hyperparams_masked_and_scan():
    def make(learning_rate, rtol):
        return optax.chain(isotropize(rtol=rtol), optax.sgd(learning_rate, momentum=0.8, nesterov=True))

    trace = isoloco_steps(optax.inject_hyperparams(make)(learning_rate=1.8, rtol=1e-6), jax.jit)
    np.testing.assert_allclose(trace, EXPECTED_STEPS, rtol=2e-6)

    injected = optax.inject_hyperparams(isotropize)()
    tree = {"w": jnp.asarray(A22, jnp.float32), "v": jnp.ones((2, 2))}
    np.testing.assert_allclose(injected.update(tree, injected.init(tree))[0]["w"], ISO22, atol=3e-6)

    masked = optax.masked(isotropize(), {"w": True, "v": False})
    out, _ = masked.update(tree, masked.init(tree))
    np.testing.assert_allclose(out["w"], ISO22, atol=3e-6)
    np.testing.assert_array_equal(out["v"], tree["v"])

    stateless = isotropize()

    def body(state, a):
        return stateless.update({"w": a}, state)[::-1]

    _, outs = jax.lax.scan(body, stateless.init({"w": tree["w"]}), jnp.stack([tree["w"], 2 * tree["w"]]))
    np.testing.assert_allclose(outs["w"], [ISO22, 2 * ISO22], atol=6e-6)


def test_a_traced_number_of_steps_says_what_to_do():
    injected = optax.inject_hyperparams(isotropize)(method="newton_schulz")
    state = injected.init({"w": jnp.eye(2)})
    with pytest.raises(TypeError, match="static_args"):
        jax.jit(injected.update)({"w": jnp.eye(2)}, state)
    static = optax.inject_hyperparams(isotropize, static_args=("ns_steps",))(method="newton_schulz")
    out, _ = static.update({"w": jnp.eye(2)}, static.init({"w": jnp.eye(2)}))
    np.testing.assert_allclose(out["w"], np.eye(2), atol=1e-6)


def test_the_same_on_one_and_two_devices():
    a, _ = touched_embedding()
    tree = {"e": jnp.asarray(a), "w": jnp.asarray(matrix(np.random.default_rng(8), 8, 8))}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    one = iso_tree(tree)
    two = iso_tree(jax.device_put(tree, sharding))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_vmap_equals_a_loop():
    stack = jnp.asarray(np.random.default_rng(9).normal(size=(3, 4, 6)), jnp.float32)
    for method in METHODS:
        mapped = jax.vmap(lambda a, method=method: iso(a, method))(stack)
        np.testing.assert_allclose(mapped, [iso(a, method) for a in stack], atol=1e-5)


def test_state_mapping_of_optax_accepts_specs() -> None:
    """`optax.tree.map_params` calls `init` with an empty stand-in, which no pattern can match."""
    params = {"q": {"kernel": jnp.ones((3, 2))}}
    outer = optax.chain(isotropize(specs={"kernel$": 0}), optax.trace(0.9))
    mapped = optax.tree.map_params(outer, lambda x: x + 1, outer.init(params))
    assert mapped[1].trace["q"]["kernel"].tolist() == [[1.0, 1.0]] * 3
    with pytest.raises(ValueError, match="matches no leaf"):
        isotropize(specs={"absent": 0}).init(params)


@pytest.mark.parametrize("shape", [(4, 3), (8, 3), (16, 8)])
def test_more_matrix_product_steps_never_hurt(shape):
    """Small tall matrices, compiled: here a sum `a x + x (...)` was carried along twice and drifted apart."""
    a = matrix(np.random.default_rng(1), *shape, condition=4)
    for steps in (12, 18, 40):
        factor = jax.jit(lambda x, n=steps: polar(x, "newton_schulz", ns_steps=n))(jnp.asarray(a)[None])[0]
        np.testing.assert_allclose(factor, merging_np.polar(a), atol=2e-6)
