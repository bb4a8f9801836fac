"""Merging rules against NumPy, by their identities, with absent workers, and for what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.lowcomm import merging
from jaxlab.lowcomm.communication import collectives
from jaxlab.lowcomm.isotropize import MatrixSpec, iso
from tests.reference import merging_np

K, M, N = 4, 6, 9
DETERMINISTIC = ("mean", "task_arithmetic", "ties", "iso_c", "iso_cts", "tsv_m")
KEY = jax.random.key(0)


@functools.cache
def compiled(name, **options):
    """The rule, jitted once a set of options."""
    return jax.jit(merging.get(name, **options).fn)


def stacked(seed=0, k=K, shape=(M, N)):
    return np.random.default_rng(seed).normal(size=(k, *shape)).astype(np.float32)


def oracle(name, d, weights=None):
    count = len(d) if weights is None else np.count_nonzero(weights)
    return {
        "mean": lambda: merging_np.mean(d, weights),
        "task_arithmetic": lambda: count * merging_np.mean(d, weights),
        "ties": lambda: merging_np.ties(d, weights=weights),
        "iso_c": lambda: merging_np.iso(merging_np.mean(d, weights)),
        "iso_cts": lambda: merging_np.iso_cts(d, weights=weights),
        "tsv_m": lambda: merging_np.tsv_m(d, weights),
    }[name]()


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=tolerance * max(1e-30, np.abs(b).max()))


# Values.


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_against_the_oracle(name):
    d = stacked()
    close(compiled(name)({"w": d}, None, None)["w"], oracle(name, d), 2e-5)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    name=st.sampled_from(DETERMINISTIC),
    seed=st.integers(0, 10**6),
    weights=st.lists(st.integers(0, 5), min_size=K, max_size=K).filter(any),
    exponent=st.integers(-8, 8),
)
def test_any_weights_against_the_oracle(name, seed, weights, exponent):
    d = stacked(seed) * np.float32(10.0**exponent)
    close(compiled(name)({"w": d}, np.float32(weights), None)["w"], oracle(name, d, weights), 1e-4)


@pytest.mark.parametrize("density", [1e-6, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("sign", ["mass", "count"])
def test_ties_options(density, sign):
    d = stacked(1)
    d[:, 0, :3] = np.round(d[:, 0, :3])  # ties between magnitudes, and votes that are a draw
    close(compiled("ties", density=density, sign=sign)({"w": d}, None, None)["w"], merging_np.ties(d, density, sign))


def test_ties_by_hand():
    d = {"w": jnp.array([[4.0, 1.0, -1.0], [2.0, -3.0, 1.0], [-1.0, -1.0, 0.0]])}
    np.testing.assert_array_equal(merging.ties(d, density=1.0)["w"], [3.0, -2.0, 0.0])
    # A third trimmed: worker 0 keeps both its tied entries, workers 1 and 2 lose their last one.
    np.testing.assert_array_equal(merging.ties(d, density=0.67)["w"], [3.0, -2.0, -1.0])
    # Weights move the average, never the sign that is elected.
    heavy = merging.ties(d, density=1.0, weights=jnp.array([1.0, 3.0, 100.0]))["w"]
    np.testing.assert_allclose(heavy, [(4 + 3 * 2) / 4, -(3 * 3 + 100 * 1) / 103, 0.0], rtol=1e-6)


def test_ties_without_trimming_and_with_equal_signs_is_the_mean():
    d = np.abs(stacked(2)) * np.sign(stacked(3, 1))
    close(compiled("ties", density=1.0)({"w": d}, None, None)["w"], d.mean(0))


@pytest.mark.parametrize("common", [0.0, 0.4, 0.8, 1.0])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5)])
def test_iso_cts_options(common, shape):
    d = stacked(4, 3, shape)
    out = compiled("iso_cts", common=common)({"w": d}, None, None)["w"]
    close(out, merging_np.iso_cts(d, common), 3e-5)
    s = np.linalg.svd(np.asarray(out), compute_uv=False)
    np.testing.assert_allclose(s, s.mean(), rtol=1e-4)


def test_iso_cts_with_many_workers_is_iso_c():
    r = M
    k = 2 * (r - int(0.8 * r))
    assert k == 4
    d = {"w": stacked(5, k)}
    close(compiled("iso_cts")(d, None, None)["w"], np.asarray(compiled("iso_c")(d, None, None)["w"]), 1e-6)
    fewer = {"w": d["w"][:2]}
    difference = compiled("iso_cts")(fewer, None, None)["w"] - compiled("iso_c")(fewer, None, None)["w"]
    assert np.abs(difference).max() > 1e-2


def test_one_worker():
    d = {"w": stacked(6, 1), "b": stacked(6, 1, (3,))}
    for name in ("mean", "task_arithmetic", "tsv_m"):
        np.testing.assert_array_equal(compiled(name)(d, None, None)["w"], d["w"][0])
        np.testing.assert_allclose(compiled(name)(d, np.float32([0.1]), None)["w"], d["w"][0], rtol=1e-6)
    for name in ("iso_c", "iso_cts"):
        close(compiled(name)(d, None, None)["w"], merging_np.iso(d["w"][0]))


@pytest.mark.parametrize("name", ["mean", "iso_c", "ties", "iso_cts", "tsv_m"])
def test_identical_workers(name):
    one = stacked(7, 1)[0]
    options = {"density": 1.0} if name == "ties" else {}
    out = compiled(name, **options)({"w": np.stack([one] * K)}, None, None)["w"]
    if name == "tsv_m":  # all of them keep the same leading direction, which then counts once
        u, s, vt = np.linalg.svd(one)
        close(out, s[0] * np.outer(u[:, 0], vt[0]))
    elif name in ("mean", "ties"):
        close(out, one)
    else:
        close(out, merging_np.iso(one))


def test_scales():
    d = {"w": stacked(8), "b": stacked(8, K, (5,))}
    full = merging.iso_c(d)
    half = merging.iso_c(d, scale=0.5)
    jax.tree.map(lambda a, b: close(a, 0.5 * np.asarray(b)), half, full)
    # The original Iso-C sums matrices: K times the mean.
    close(K * full["w"], merging_np.iso(d["w"].sum(0)))
    close(full["b"], d["b"].mean(0))
    close(merging.task_arithmetic(d, scale=0.3)["w"], 0.3 * d["w"].sum(0))


# DARE.


def test_dare_drops_a_fixed_number_and_rescales():
    for drop, n in ((0.0, 10), (0.1, 10), (0.5, 7), (0.99, 5), (0.3, 1)):
        dropped = min(round(drop * n), n - 1)
        out = np.asarray(merging.dare({"w": jnp.ones((1, n))}, key=KEY, drop=drop)["w"])
        assert np.count_nonzero(out == 0) == dropped
        np.testing.assert_allclose(out[out != 0], n / (n - dropped), rtol=1e-6)


def test_dare_is_unbiased():
    # 2000 keys, 24 entries within 3.9 standard errors each: a correct rule fails with probability below 0.0024
    # (24 * 9.6e-5, Gaussian); the seeds are fixed, so it passes always or never. Without the rescaling, all are 5 away.
    d = stacked(9, 3, (24,)) + 3.0
    draws = jax.jit(jax.vmap(lambda key: merging.dare({"w": d}, key=key, drop=0.25)["w"]))(jax.random.split(KEY, 2000))
    draws = np.asarray(draws, np.float64)
    error = (draws.mean(0) - d.mean(0)) / (draws.std(0, ddof=1) / np.sqrt(2000))
    assert np.abs(error).max() < 3.9
    assert np.abs(0.75 * draws.mean(0) - d.mean(0)).min() / (draws.std(0).max() / np.sqrt(2000)) > 5


def test_dare_masks_are_independent_over_workers_leaves_and_keys():
    def mask(key, k, leaf, worker):
        weights = np.eye(k, dtype=np.float32)[worker]
        return np.asarray(merging.dare({"a": ones[:k], "b": ones[:k]}, key=key, drop=0.5, weights=weights)[leaf]) > 0

    ones = np.ones((3, 64), np.float32)
    base = mask(KEY, 3, "a", 0)
    assert not np.array_equal(base, mask(KEY, 3, "a", 1))
    assert not np.array_equal(base, mask(KEY, 3, "b", 0))
    assert not np.array_equal(base, mask(jax.random.key(1), 3, "a", 0))
    np.testing.assert_array_equal(base, mask(KEY, 2, "a", 0))
    np.testing.assert_array_equal(base, mask(KEY, 3, "a", 0))


def test_dare_needs_a_key():
    with pytest.raises(ValueError, match="key"):
        merging.dare({"w": jnp.ones((2, 3))}, key=None)
    assert merging.get("dare").needs_key and not merging.get("mean").needs_key


# Workers that are absent.


@pytest.mark.parametrize("name", [*DETERMINISTIC, "dare"])
def test_a_worker_of_weight_zero_is_absent_even_with_nan(name):
    d = stacked(10, 3)
    tree = {"w": d, "b": d[:, 0]}
    broken = {"w": d.copy(), "b": d[:, 0].copy()}
    for leaf in broken.values():
        leaf[1] = np.nan
    weights = np.float32([1.0, 0.0, 2.0])
    run = compiled(name)
    out, expected = run(broken, weights, KEY), run(tree, weights, KEY)
    jax.tree.map(np.testing.assert_array_equal, out, expected)
    if name in ("mean", "ties", "iso_c", "task_arithmetic"):
        survivors = jax.tree.map(lambda x: x[[0, 2]], tree)
        close(out["w"], np.asarray(run(survivors, weights[[0, 2]], KEY)["w"]))


@pytest.mark.parametrize("name", [*DETERMINISTIC, "dare"])
def test_only_the_ratio_of_weights_matters_and_equal_ones_change_nothing(name):
    tree = {"w": stacked(11, 3)}
    run = compiled(name)
    base = np.asarray(run(tree, None, KEY)["w"])
    close(run(tree, np.float32([0.1, 0.1, 0.1]), KEY)["w"], base)
    close(run(tree, np.float32([7, 7, 7]), KEY)["w"], base)


@pytest.mark.parametrize("name", [*DETERMINISTIC, "dare"])
def test_all_weights_zero(name):
    tree = {"w": stacked(12, 3)}
    with pytest.raises(ValueError, match="not all 0"):
        merging.get(name)(tree, np.zeros(3, np.float32), KEY)
    assert np.all(np.isnan(compiled(name)(tree, jnp.zeros(3), KEY)["w"]))


@pytest.mark.parametrize("name", [*DETERMINISTIC, "dare"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_traced_weights_that_are_none_give_nan(name, bad):
    assert np.all(np.isnan(compiled(name)({"w": stacked(12, 3)}, jnp.array([2.0, bad, 1.0]), KEY)["w"]))


@pytest.mark.parametrize("name", ["mean", "ties"])
@pytest.mark.parametrize("size", [3e38, 1e300, 1.7e308, 1e-60])
def test_weights_of_any_size(name, size):
    d = {"w": jnp.array([[1.0], [3.0]])}
    np.testing.assert_allclose(merging.get(name)(d, [size, size])["w"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(merging.get(name)(d, np.array([size, size / 3]))["w"], 1.5, rtol=1e-6)
    if size == 3e38:
        np.testing.assert_allclose(compiled(name)(d, jnp.array([size, size]), None)["w"], 2.0, rtol=1e-6)


@pytest.mark.parametrize(("name", "options"), [("iso_cts", {"common": 0.0}), ("tsv_m", {}), ("iso_c", {})])
@pytest.mark.parametrize("scale", [2.0**100, 2.0**-100])
def test_deltas_at_the_ends_of_the_range(name, options, scale):
    d = np.arange(1, 9, dtype=np.float32).reshape(2, 2, 2)
    run = compiled(name, **options)
    wanted = np.asarray(run({"w": d}, None, None)["w"])
    close(np.asarray(run({"w": d * np.float32(scale)}, None, None)["w"]) / scale, wanted)


@pytest.mark.parametrize("name", ["iso_c", "iso_cts", "tsv_m"])
def test_the_rounding_of_bfloat16_deltas_is_no_direction(name):
    """All workers agree on a matrix of rank 1, up to the rounding of what they send."""
    a = np.outer(np.linspace(0.13, 1, 8), np.linspace(0.37, 3, 9))
    d = jnp.asarray(np.stack([a, 1.1 * a]), jnp.bfloat16)
    s = np.linalg.svd(np.float32(compiled(name)({"w": d}, None, None)["w"]), compute_uv=False)
    assert s[1] < 0.02 * s[0]


@pytest.mark.parametrize("name", [*DETERMINISTIC, "dare"])
def test_a_nan_in_a_present_worker_is_not_lost(name):
    d = stacked(13, 3)
    d[1, 2, 3] = np.nan
    out = np.asarray(compiled(name)({"w": d}, None, KEY)["w"])
    assert np.isnan(out[2, 3])


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_order_of_workers_does_not_matter(name):
    d, weights = stacked(14), np.float32([1, 2, 3, 4])
    order = [2, 0, 3, 1]
    run = compiled(name)
    close(run({"w": d[order]}, weights[order], None)["w"], np.asarray(run({"w": d}, weights, None)["w"]), 1e-5)


# Trees.


@pytest.mark.parametrize("name", ["iso_c", "iso_cts", "tsv_m"])
def test_specs_masks_and_leaves_that_are_no_matrices(name):
    rng = np.random.default_rng(15)
    heads = rng.normal(size=(3, 6, 2, 5)).astype(np.float32)  # K, d, heads, hd
    tree = {"attn": heads, "joint": heads, "norm": heads[:, :, 0, 0], "skip": heads[:, 0], "scalar": heads[:, 0, 0, 0]}
    specs = {"attn": MatrixSpec((0,), (2,)), "joint": MatrixSpec((0,), (1, 2))}
    run = compiled.__wrapped__(name, specs=specs, mask=lambda t: {path: path != "skip" for path in t})
    out = run(tree, None, None)
    for leaf in ("norm", "skip", "scalar"):
        close(out[leaf], tree[leaf].mean(0))
    per_head = np.stack([oracle(name, heads[:, :, h]) for h in range(2)], axis=1)
    close(out["attn"], per_head, 2e-5)
    close(out["joint"], oracle(name, heads.reshape(3, 6, 10)).reshape(6, 2, 5), 2e-5)
    with pytest.raises(ValueError, match=r"'attn'.*no spec"):
        merging.get(name)(tree)


@pytest.mark.parametrize("name", ["iso_c", "iso_cts", "tsv_m"])
def test_rows_that_no_worker_touched_stay_zero_and_rank_deficiency_is_finite(name):
    d = np.zeros((3, 20, 8), np.float32)
    d[:, 3:6] = stacked(16, 3, (3, 8))
    out = np.asarray(compiled(name)({"w": d, "zero": np.zeros((3, 4, 4), np.float32)}, None, None)["w"])
    assert np.all(np.isfinite(out)) and np.any(out[3:6] != 0)
    assert np.all(np.delete(out, [3, 4, 5], axis=0) == 0)


@pytest.mark.parametrize("name", [*DETERMINISTIC, "dare"])
def test_dtypes_are_kept_and_bfloat16_is_merged_in_float32(name):
    d = jnp.asarray(stacked(17, 3), jnp.bfloat16)
    out = compiled(name)({"w": d}, None, KEY)["w"]
    assert out.dtype == jnp.bfloat16 and out.shape == (M, N)
    if name in DETERMINISTIC:
        expected = oracle(name, np.asarray(d, np.float32))
        close(np.asarray(out, np.float32), expected, 2**-8)


def test_vmap_over_rounds():
    d = stacked(18, 2 * 3).reshape(2, 3, M, N)
    for name in ("ties", "iso_cts", "tsv_m"):
        out = jax.jit(jax.vmap(lambda x, name=name: merging.get(name).fn({"w": x}, None, None)["w"]))(d)
        for i in range(2):
            close(out[i], oracle(name, d[i]), 2e-5)


@pytest.mark.parametrize("name", ["mean", "task_arithmetic", "dare", "iso_c", "ties"])
def test_rules_that_do_not_need_all_deltas_send_sums_only(name):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("worker",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("worker"))
    d = stacked(19)
    placed = jax.device_put({"w": d}, sharding)
    rule = merging.get(name)
    out_sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    program = jax.jit(rule.fn, out_shardings=out_sharding).lower(placed, None, KEY).compile()
    sent = collectives(program.as_text())
    assert {c.kind for c in sent} == {"all-reduce"}
    assert sum(c.nbytes for c in sent) == rule.sums * d[0].nbytes
    close(program(placed, None, KEY)["w"], np.asarray(compiled(name)({"w": d}, None, KEY)["w"]))


# Bad input.


@pytest.mark.parametrize("name", [*DETERMINISTIC, "dare"])
@pytest.mark.parametrize("leaf", [np.ones((2, 3), np.int32), np.ones((2, 3), np.complex64), jax.random.split(KEY, 2)])
def test_leaves_that_are_not_real_floating_point(name, leaf):
    with pytest.raises(TypeError, match="'layer/x'"):
        merging.get(name)({"layer": {"x": leaf}, "w": jnp.ones((2, 3))}, None, KEY)


@pytest.mark.parametrize(
    ("deltas", "message"),
    [
        ({}, "no leaves"),
        ({"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))}, "2 at 'a', 3 at 'b'"),
        ({"a": jnp.float32(1.0)}, "'a'"),
        ({"a": jnp.ones((0, 3))}, "K >= 1"),
    ],
)
def test_deltas_that_are_not_stacked(deltas, message):
    with pytest.raises(ValueError, match=message):
        merging.mean(deltas)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0], [[1.0, 1.0]]])
def test_bad_weights(weights):
    with pytest.raises(ValueError, match="weights must"):
        merging.get("mean").fn({"w": jnp.ones((2, 3))}, np.asarray(weights), None)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dare-ties", {}, "allowed: dare, iso_c, iso_cts, mean, task_arithmetic, ties, tsv_m"),
        ("mean", {"scale": 1.0}, "no option 'scale'; allowed: none"),
        ("ties", {"weights": None}, "no option 'weights'"),
        ("dare", {"key": KEY}, "no option 'key'"),
        ("ties", {"density": 0.0}, r"density must be in \(0, 1\]"),
        ("ties", {"density": 1.1}, r"density must be in \(0, 1\]"),
        ("ties", {"sign": "sum"}, "sign must be"),
        ("dare", {"drop": 1.0}, r"drop must be in \[0, 1\)"),
        ("dare", {"drop": -0.1}, r"drop must be in \[0, 1\)"),
        ("iso_cts", {"common": 1.5}, "common must be"),
        ("iso_c", {"method": "svdd"}, "did you mean 'svd'"),
        ("iso_c", {"rtol": -1.0}, "rtol"),
    ],
)
def test_names_and_options_are_checked_before_any_work(name, options, message):
    with pytest.raises(ValueError, match=message):
        merging.get(name, **options)


@pytest.mark.parametrize(("name", "option"), [("ties", "density"), ("dare", "drop"), ("iso_cts", "common")])
@pytest.mark.parametrize("value", [None, "0.5"])
def test_fractions_are_numbers(name, option, value):
    with pytest.raises(TypeError, match=f"{option} must be a number in .*, got {value!r}"):
        merging.get(name, **{option: value})


def test_options_are_checked_in_the_functions_too():
    d = {"w": jnp.ones((2, 3))}
    for call in (
        lambda: merging.ties(d, density=float("nan")),
        lambda: merging.dare(d, key=KEY, drop=1.0),
        lambda: merging.iso_cts(d, common=-0.1),
        lambda: merging.iso_c(d, method="nothing"),
    ):
        with pytest.raises(ValueError):
            call()


def test_iso_c_methods_agree():
    d = {"w": stacked(20)}
    base = np.asarray(iso(jnp.asarray(d["w"].mean(0))))
    for method in ("newton_schulz", "qdwh"):
        close(compiled("iso_c", method=method)(d, None, None)["w"], base, 1e-4)


def test_every_rule_has_a_name():
    assert set(merging.AGGREGATORS) == {*DETERMINISTIC, "dare"}
    assert {name for name in merging.AGGREGATORS if merging.get(name).needs_all} == {"iso_cts", "tsv_m"}
