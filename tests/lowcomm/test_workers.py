"""Workers that leave, join, count differently or diverge."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.core.errors import NonFiniteError
from jaxlab.lowcomm import (
    Compression,
    Fragments,
    LowComm,
    check_metrics,
    check_weights,
    diloco,
    isoloco,
    local_sgd,
    resize,
)
from tests.lowcomm.problems import (
    adamw,
    assert_close,
    assert_same,
    compiled,
    loss_fn,
    make_batches,
    make_params,
    run,
    worker,
)

K, H = 3, 2
PARAMS = make_params()
BATCHES = make_batches(K, 2 * H)
KEY = jax.random.key(7)
ALGO = LowComm(adamw(), diloco(0.7, 0.9), H)


def take(batches, workers, start=0):
    return {name: leaf[list(workers), start : start + H] for name, leaf in batches.items()}


def poisoned(workers, batches=BATCHES, value=np.nan):
    bad = {name: leaf.copy() for name, leaf in batches.items()}
    for k in workers:
        bad["x"][k, 0, 0, 0] = value
    return bad


# Elastic membership.


def test_a_worker_of_weight_zero_is_as_good_as_absent():
    without, _ = compiled(ALGO, "round")(ALGO.init(PARAMS, 2), take(BATCHES, [0, 2]), KEY)
    weights = check_weights([1, 0, 1], K)
    state, metrics = compiled(ALGO, "round")(ALGO.init(PARAMS, K), take(BATCHES, range(K)), KEY, weights)
    assert_close(state.params, without.params, tol=1e-6)
    assert metrics["delta_sq"][1] == 0 and (metrics["delta_sq"][jnp.array([0, 2])] > 0).all()
    assert_same(worker(state, 1), state.params)  # it takes the merged parameters all the same
    # One that holds NaN takes part in nothing, and is no error.
    state, metrics = compiled(ALGO, "round")(ALGO.init(PARAMS, K), take(poisoned([1]), range(K)), KEY, weights)
    assert_close(state.params, without.params, tol=1e-6)
    check_metrics({"nonfinite_leaf": metrics["nonfinite_leaf"]}, PARAMS)


def test_resize_keeps_and_reorders_workers():
    state, _ = run(ALGO, ALGO.init(PARAMS, K), take(BATCHES, range(K)))
    smaller = resize(ALGO, state, keep=[2, 0])
    for new, old in enumerate([2, 0]):
        assert_same(worker(smaller, new), worker(state, old))
        assert_same(
            *(jax.tree.map(lambda leaf, k=k: leaf[k], s.inner_state) for s, k in ((smaller, new), (state, old)))
        )
    assert_same((smaller.params, smaller.outer_state, smaller.step), (state.params, state.outer_state, state.step))
    after, _ = compiled(ALGO, "round")(smaller, take(BATCHES, [2, 0], H), KEY)
    weighted, _ = compiled(ALGO, "round")(state, take(BATCHES, range(K), H), KEY, jnp.array([1.0, 0.0, 1.0]))
    assert_close(after.params, weighted.params, tol=1e-6)


def test_new_workers_start_from_the_merged_parameters_with_the_others_step_count():
    algo = LowComm(adamw(), diloco(0.7, 0.9), H, compress=Compression("int4"))
    state, _ = compiled(algo, "round")(algo.init(PARAMS, K), take(BATCHES, range(K)), KEY, jnp.ones(K))
    larger = resize(algo, state, keep=[1], join=2)
    assert_same(worker(larger, 0), worker(state, 1))
    for k in (1, 2):
        assert_same(worker(larger, k), state.params)
    adam = larger.inner_state[0]
    np.testing.assert_array_equal(adam.count, [H] * 3)
    for moments, old in ((adam.mu, state.inner_state[0].mu), (larger.residual, state.residual)):
        for new, before in zip(jax.tree.leaves(moments), jax.tree.leaves(old), strict=True):
            np.testing.assert_array_equal(new[0], before[1])
            assert not np.asarray(new[1:]).any()
    same_shape = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), larger)
    assert same_shape == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), algo.init(PARAMS, 3))
    compiled(algo, "round")(larger, take(BATCHES, range(K), H), KEY, jnp.ones(3))


@pytest.mark.parametrize("keep", [[], [0, 0], [3], [-1]])
def test_bad_keep(keep):
    with pytest.raises(ValueError, match=r"keep must name at least one worker in \[0, 3\), each once, got \["):
        resize(ALGO, ALGO.init(PARAMS, K), keep=keep)


def test_bad_join():
    with pytest.raises(ValueError, match="join must be >= 0, got -1"):
        resize(ALGO, ALGO.init(PARAMS, K), keep=[0], join=-1)


@pytest.mark.parametrize(
    "weights, message",
    [
        ([1, 2], r"weights must have shape \(3,\), got \(2,\)"),
        (1.0, r"weights must have shape \(3,\), got \(\)"),
        ([1, -1, 1], "weights must be finite and >= 0"),
        ([1, math.nan, 1], "weights must be finite and >= 0"),
        ([1, math.inf, 1], "weights must be finite and >= 0"),
        ([0, 0, 0], "weights must not all be 0"),
        ([3e38, 3e38, 0], "finite float32 sum"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        check_weights(weights, 3)


def test_good_weights():
    assert check_weights(np.array([5, 0, 2]), 3).dtype == np.float32


# Divergence.


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("unit", ["round", "step"])
def test_error_names_worker_and_leaf(unit, value):
    bad = {name: leaf[:, :H] for name, leaf in poisoned([1], value=value).items()}
    _, metrics = run(ALGO, ALGO.init(PARAMS, K), bad, unit=unit)
    last = jax.tree.map(lambda leaf: leaf[-1], metrics)
    with pytest.raises(NonFiniteError, match=r"leaf .*embed/w.* of worker 1. is nan at step 12") as error:
        check_metrics(last, PARAMS, step=12)
    assert error.value.step == 12
    good = {name: leaf[:, :H] for name, leaf in BATCHES.items()}
    _, metrics = run(ALGO, ALGO.init(PARAMS, K), good, unit=unit)
    check_metrics(jax.tree.map(lambda leaf: leaf[-1], metrics), PARAMS)
    check_metrics({"loss": np.nan}, PARAMS)  # nothing to say about metrics without the entry


def test_error_names_the_leaf_of_a_fragment():
    """The number is that of the leaf among all parameters, also where a fragment begins in the middle."""
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2), "c": jnp.zeros(2)}
    fragments = Fragments.by_patterns(params, [["a"], ["c", "b"]])
    algo = LowComm(optax.sgd(1.0), local_sgd(), 2, fragments=fragments)

    def loss(params, batch, key):
        return sum(jnp.sum(params[name] * batch[name]) for name in params)

    batch = {name: np.ones((2, 2, 2), np.float32) for name in params}
    batch["c"][1, 0, 0] = np.nan
    _, metrics = compiled(algo, "round", loss)(algo.init(params, 2), batch, KEY)
    with pytest.raises(NonFiniteError, match=r"leaf .*c.* of worker 1"):
        check_metrics(metrics, params)
    assert metrics["nonfinite_leaf"].tolist() == [-1, 2]


@pytest.mark.parametrize("aggregate", ["mean", "iso_cts"])
def test_drop_goes_on_with_the_others(aggregate):
    algo = LowComm(adamw(), isoloco(1.8, 0.8), H, aggregate, nonfinite="drop")
    good = {name: leaf[:, :H] for name, leaf in BATCHES.items()}
    start = algo.init(PARAMS, K)
    state, metrics = compiled(algo, "round")(start, {n: leaf[:, :H] for n, leaf in poisoned([1]).items()}, KEY)
    healthy, _ = compiled(algo, "round")(start, good, KEY, jnp.array([1.0, 0.0, 1.0]))
    assert_close(state.params, healthy.params, tol=1e-6)
    assert metrics["delta_sq"][1] == 0 and np.isfinite(metrics["merged_sq"])
    assert "nonfinite_leaf" not in metrics and np.isnan(metrics["loss"][1]).any()
    adam, expected = state.inner_state[0], healthy.inner_state[0]
    np.testing.assert_array_equal(adam.count, [H] * K)  # learning-rate schedules go on
    for new, old in zip(jax.tree.leaves((adam.mu, adam.nu)), jax.tree.leaves((expected.mu, expected.nu)), strict=True):
        assert not np.asarray(new[1]).any()
        np.testing.assert_allclose(new[np.array([0, 2])], old[np.array([0, 2])], atol=1e-7)
    for k in range(K):
        assert_same(worker(state, k), state.params)
    again, metrics = compiled(algo, "round")(state, {n: leaf[:, H:] for n, leaf in BATCHES.items()}, KEY)
    assert np.isfinite(metrics["loss"]).all() and (metrics["delta_sq"] > 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(again.params))


def test_drop_with_fragments_gives_back_all_of_the_parameters():
    fragments = Fragments.by_layer(PARAMS, 2)
    algo = LowComm(optax.sgd(0.1), local_sgd(), H, fragments=fragments, nonfinite="drop")
    state, metrics = run(algo, algo.init(PARAMS, K), {n: v[:, :H] for n, v in poisoned([0]).items()})
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.worker_params)))
    assert np.isfinite(metrics["merged_sq"]).all()


def test_drop_of_everyone_reaches_the_metrics():
    algo = LowComm(adamw(), isoloco(1.8, 0.8), H, nonfinite="drop")
    state, metrics = compiled(algo, "round")(algo.init(PARAMS, K), take(poisoned(range(K)), range(K)), KEY)
    assert np.isnan(metrics["merged_sq"]) and np.isnan(state.params["head"]["w"]).all()
    eager = LowComm(optax.sgd(0.1), local_sgd(), H, nonfinite="drop")
    with pytest.raises(ValueError, match=f"nonfinite='drop' has no worker left to merge: {K} diverged"):
        eager.round(loss_fn)(eager.init(PARAMS, K), take(poisoned(range(K)), range(K)), KEY)


def test_drop_respects_the_weights_of_the_others():
    algo = LowComm(optax.sgd(0.1), local_sgd(), 1, nonfinite="drop")
    one = {n: leaf[:, :1] for n, leaf in poisoned([2]).items()}
    state, _ = compiled(algo, "round")(algo.init(PARAMS, K), one, KEY, jnp.array([3.0, 1.0, 9.0]))
    grads = [jax.grad(loss_fn)(PARAMS, {n: leaf[k, 0] for n, leaf in one.items()}, None) for k in (0, 1)]
    expected = jax.tree.map(lambda p, a, b: p - 0.1 * (0.75 * a + 0.25 * b), PARAMS, *grads)
    assert_close(state.params, expected, tol=1e-6)
