"""The round against a NumPy re-implementation, its exact special cases, its guarantees, and its errors."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.core import tree
from jaxlab.lowcomm import LowComm, diloco, isoloco, local_sgd, merging
from jaxlab.lowcomm.lowcomm import check_params, nonfinite_leaf
from tests.lowcomm.problems import (
    adamw,
    assert_close,
    assert_same,
    compiled,
    flat,
    loss_fn,
    make_batches,
    make_params,
    post_init,
    run,
    worker,
)
from tests.reference import lowcomm_np as ref
from tests.reference import merging_np

K, H = 3, 4
PARAMS = make_params()
BATCHES = make_batches(K, 3 * H)
SGD = optax.sgd(0.1)
DILOCO = LowComm(adamw(), diloco(0.7, 0.9), H)
SCHEDULE = optax.linear_schedule(0.1, 0.0, 2 * H)


def oracle(batches=BATCHES, params=PARAMS, **options):
    options = {"inner": lambda: ref.AdamW(lambda t: 0.01), "period": H} | options
    return ref.train(flat(params), np.float64(batches["x"]), np.float64(batches["y"]), **options)


@pytest.mark.parametrize(
    "algo, options",
    [
        (DILOCO, {"outer": lambda: ref.OuterStep(0.7, 0.9, True, False)}),
        (LowComm(adamw(), isoloco(1.8, 0.8), H), {"outer": lambda: ref.OuterStep(1.8, 0.8, True, True)}),
        (
            LowComm(optax.sgd(SCHEDULE), isoloco(1.2, 0.5, nesterov=False, order="update"), H, mix=0.25),
            {
                "inner": lambda: ref.SGD(lambda t: max(0.0, 0.1 * (1 - t / (2 * H)))),
                "outer": lambda: ref.OuterStep(1.2, 0.5, False, True, "update"),
                "mix": 0.25,
            },
        ),
    ],
    ids=["diloco", "isoloco", "schedule_update_order_mix"],
)
def test_three_rounds_equal_numpy(algo, options):
    expected = oracle(**options)
    state, metrics = run(algo, algo.init(PARAMS, K), BATCHES)
    np.testing.assert_allclose(np.moveaxis(metrics["loss"], 0, 1).reshape(K, -1), expected["losses"], rtol=1e-4)
    assert_close(state.params, expected["params"])
    for k in range(K):
        assert_close(worker(state, k), expected["workers"][k])


def test_weights_equal_numpy_and_only_ratios_matter():
    expected = oracle(outer=lambda: ref.OuterStep(0.7, 0.9, True, False), weights=[1, 0, 3])
    for weights in ([1.0, 0.0, 3.0], [10.0, 0.0, 30.0]):
        state, _ = run(DILOCO, DILOCO.init(PARAMS, K), BATCHES, weights=jnp.array(weights))
        assert_close(state.params, expected["params"])


def test_maxtext_vector():
    def loss(params, batch, key):
        out = params["w"] @ batch["x"] + params["b"]
        return (out - batch["y"]) ** 2

    # Two replicas, Linear(2 -> 1) with w = [2, 1], b = 1, one mean-squared-error batch of two rows each.
    def batch_loss(params, batch, key):
        return jnp.mean(jax.vmap(lambda x, y: loss(params, {"x": x, "y": y}, key))(batch["x"], batch["y"]))

    x = jnp.array([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
    y = jnp.array([[1.0, 2.0], [2.0, 3.0]])
    batches = {"x": jnp.repeat(x[:, None], 6, 1), "y": jnp.repeat(y[:, None], 6, 1)}
    algo = LowComm(optax.sgd(0.1), diloco(1.0, 0.9), 3)
    state = algo.init({"w": jnp.array([2.0, 1.0]), "b": jnp.array(1.0)}, 2)
    round_fn = jax.jit(algo.round(batch_loss))
    first = jax.tree.map(lambda leaf: leaf[:, :3], batches)
    state, metrics = round_fn(state, first, jax.random.key(0))
    np.testing.assert_allclose(metrics["loss"][0], [1.0, 0.49, 0.2401], atol=1e-4)
    np.testing.assert_allclose(state.params["w"], [1.5345, 1.0494], atol=1e-4)
    np.testing.assert_allclose(state.params["b"], 0.5839, atol=1e-4)
    _, metrics = round_fn(state, first, jax.random.key(0))
    np.testing.assert_allclose(metrics["loss"][0, 0], 0.2075, atol=1e-4)


def test_one_step_rounds_with_sgd_are_data_parallel_sgd():
    algo = LowComm(SGD, local_sgd(), 1)
    state, _ = run(algo, algo.init(PARAMS, K), BATCHES)
    params = PARAMS
    for t in range(3 * H):
        rows = {name: leaf[:, t].reshape(-1, leaf.shape[-1]) for name, leaf in BATCHES.items()}
        grads = jax.grad(loss_fn)(params, rows, None)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert_close(state.params, params, tol=1e-6)


def test_local_sgd_averages_what_workers_reach_alone():
    algo = LowComm(adamw(), local_sgd(), H)
    first = {name: leaf[:, :H] for name, leaf in BATCHES.items()}
    state, _ = run(algo, algo.init(PARAMS, K), first)
    alone = [
        ref.train(
            flat(PARAMS), np.float64(first["x"][k : k + 1]), np.float64(first["y"][k : k + 1]), period=10**6,
            inner=lambda: ref.AdamW(lambda t: 0.01), outer=lambda: None,
        )["workers"][0]
        for k in range(K)
    ]  # fmt: skip
    assert_close(state.params, {path: np.mean([w[path] for w in alone], 0) for path in alone[0]}, tol=2e-6)


def test_fedavg_weights_workers_by_their_samples():
    algo = LowComm(SGD, local_sgd(), H)
    samples = jnp.array([5.0, 1.0, 2.0])
    state, _ = run(algo, algo.init(PARAMS, K), BATCHES, weights=samples)
    expected = oracle(inner=lambda: ref.SGD(lambda t: 0.1), outer=lambda: ref.OuterStep(1, 0, False, False),
                      weights=[5, 1, 2])  # fmt: skip
    assert_close(state.params, expected["params"])


def test_identical_workers_are_one_worker():
    same = {name: np.repeat(leaf[:1], K, 0) for name, leaf in BATCHES.items()}
    one = {name: leaf[:1] for name, leaf in BATCHES.items()}
    many_state, _ = run(DILOCO, DILOCO.init(PARAMS, K), same)
    one_state, _ = run(DILOCO, DILOCO.init(PARAMS, 1), one)
    assert_close(many_state.params, one_state.params, tol=2e-6)


@pytest.mark.parametrize(
    "inner, outer, unit",
    [
        (SGD, local_sgd(), "round"),
        (adamw(), diloco(1.0, 0.0, nesterov=False), "round"),
        (adamw(0.03), optax.sgd(1.0), "step"),
    ],
    ids=["sgd", "adamw", "adamw_stepwise"],
)
def test_one_worker_with_unit_step_is_plain_training_bit_for_bit(inner, outer, unit):
    algo = LowComm(inner, outer, H)
    batches = {name: leaf[:1] for name, leaf in BATCHES.items()}
    state, metrics = run(algo, algo.init(PARAMS, 1), batches, unit=unit)

    @jax.jit
    def plain(params, opt, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, None)
        updates, opt = inner.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    params, opt, losses = PARAMS, inner.init(PARAMS), []
    for t in range(3 * H):
        params, opt, loss = plain(params, opt, {name: leaf[0, t] for name, leaf in batches.items()})
        losses.append(loss)
    assert_same(state.params, params)
    assert_same(worker(state, 0), params)
    np.testing.assert_array_equal(metrics["loss"].ravel(), np.array(losses))


def test_the_outer_step_of_one_worker_is_the_identity_bit_for_bit():
    """Whatever the inner optimizer: the same program with and without synchronisations."""
    inner = optax.chain(optax.clip_by_global_norm(0.1), adamw(0.03))
    batches = {name: leaf[:1] for name, leaf in BATCHES.items()}
    runs = []
    for every in (H, 10**6):
        algo = LowComm(inner, local_sgd(), every)
        state, metrics = run(algo, algo.init(PARAMS, 1), batches, unit="step")
        runs.append((state.worker_params, state.inner_state, metrics["loss"]))
        assert (metrics["merged_sq"] > 0).sum() == (3 if every == H else 0)
    assert_same(*runs)


def test_inner_state_persists_and_workers_are_equal_after_a_round():
    state, _ = run(DILOCO, DILOCO.init(PARAMS, K), BATCHES)
    assert int(state.step) == 3 * H
    adam = state.inner_state[0]
    np.testing.assert_array_equal(adam.count, [3 * H] * K)
    expected = oracle(outer=lambda: ref.OuterStep(0.7, 0.9, True, False))
    for k in range(K):
        moments = expected["optimizers"][k]
        assert_close(jax.tree.map(lambda leaf, k=k: leaf[k], adam.mu), moments.m)
        assert_close(jax.tree.map(lambda leaf, k=k: leaf[k], adam.nu), moments.v)
        assert_same(worker(state, k), state.params)


def test_random_keys_differ_over_workers_and_steps_not_over_rounds_or_units():
    def noisy(params, batch, key):
        return params["w"] * jax.random.normal(key) + 0 * batch

    algo = LowComm(optax.sgd(0.1), local_sgd(), 2)
    state = algo.init({"w": jnp.array(1.0)}, 2)
    batches = jnp.zeros((2, 4))
    by_round, a = run(algo, state, batches, loss=noisy)
    by_step, b = run(algo, state, batches, unit="step", loss=noisy)
    assert_same(by_round, by_step)
    draws = np.unique(np.round(np.moveaxis(a["loss"], 0, 1), 7))
    assert draws.size == 8
    np.testing.assert_array_equal(np.moveaxis(a["loss"], 2, 1).reshape(4, 2), b["loss"])


@pytest.mark.parametrize("outer", [diloco(0.7, 0.9), isoloco(1.8, 0.8)])
def test_order_of_workers_does_not_matter(outer):
    algo = LowComm(SGD, outer, H)
    weights = jnp.array([1.0, 2.0, 3.0])
    state, _ = run(algo, algo.init(PARAMS, K), BATCHES, weights=weights)
    order = np.array([2, 0, 1])
    permuted, _ = run(algo, algo.init(PARAMS, K), {n: leaf[order] for n, leaf in BATCHES.items()},
                      weights=weights[order])  # fmt: skip
    assert_close(state.params, permuted.params, tol=1e-6)


def linear(params, batch, key):
    """The gradient is the batch."""
    return sum(jnp.sum(p * b) for p, b in zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True))


@pytest.mark.parametrize("name", sorted(merging.AGGREGATORS))
def test_every_aggregator(name):
    rng = np.random.default_rng(0)
    deltas = {"b": rng.normal(size=(K, 1, 3)).astype(np.float32), "w": rng.normal(size=(K, 1, 4, 4)).astype(np.float32)}
    weights = np.array([1.0, 0.0, 2.0], np.float32)
    algo = LowComm(optax.sgd(1.0), local_sgd(), 1, name)
    state = algo.init({"b": jnp.zeros(3), "w": jnp.zeros((4, 4))}, K)
    state, metrics = compiled(algo, "round", linear)(state, deltas, jax.random.key(3), weights)
    merged = {leaf: -np.asarray(state.params[leaf], np.float64) for leaf in deltas}
    plain = {leaf: merging_np.mean(d[:, 0], weights) for leaf, d in deltas.items()}
    if name == "dare":  # an entry of a worker is dropped or rescaled, alike for the whole leaf
        w = weights / weights.sum()
        for leaf, d in deltas.items():
            n = d[0, 0].size
            scale = n / (n - round(0.1 * n))
            options = [scale * (w[0] * a * d[0, 0] + w[2] * b * d[2, 0]) for a in (0, 1) for b in (0, 1)]
            assert np.all(np.min([np.abs(merged[leaf] - o) for o in options], 0) < 1e-5)
        assert not np.allclose(merged["w"], 16 / 14 * plain["w"], atol=1e-3)
    else:
        rules = {
            "mean": lambda d: merging_np.mean(d, weights),
            "task_arithmetic": lambda d: 2 * merging_np.mean(d, weights),
            "ties": lambda d: merging_np.ties(d, weights=weights),
            "iso_c": lambda d: merging_np.iso(merging_np.mean(d, weights)),
            "iso_cts": lambda d: merging_np.iso_cts(d, weights=weights),
            "tsv_m": lambda d: merging_np.tsv_m(d, weights=weights),
        }
        np.testing.assert_allclose(merged["w"], rules[name](deltas["w"][:, 0]), atol=1e-5)
        on_vector = rules[name] if name in ("mean", "task_arithmetic", "ties") else rules["mean"]
        np.testing.assert_allclose(merged["b"], on_vector(deltas["b"][:, 0]), atol=1e-5)
    norms = sum(np.square(d).reshape(K, -1).sum(1) for d in deltas.values())
    np.testing.assert_allclose(metrics["delta_sq"], norms * (weights > 0), rtol=1e-5)
    np.testing.assert_allclose(metrics["merged_sq"], sum((m**2).sum() for m in merged.values()), rtol=1e-5)


def test_dare_draws_another_mask_each_round():
    algo = LowComm(SGD, local_sgd(), 1, merging.get("dare", drop=0.5))

    def loss(params, batch, key):
        return jnp.sum(params["w"])

    state, moved = algo.init({"w": jnp.zeros(32)}, 1), []
    for _ in range(2):
        before = state.params["w"]
        state, _ = compiled(algo, "round", loss)(state, jnp.zeros((1, 1)), jax.random.key(0))
        moved.append(np.asarray(state.params["w"] != before))
    assert moved[0].sum() == moved[1].sum() == 16
    assert (moved[0] != moved[1]).any()


def test_partition_averages_statistics_and_isotropises_weights():
    """A normalisation layer's statistics must not get momentum: they are averaged."""
    label = lambda params: {"w": "weights", "var": "statistics"}  # noqa: E731
    outer = optax.partition({"weights": isoloco(1.8, 0.8), "statistics": local_sgd()}, label)

    def loss(params, batch, key):
        return jnp.sum(params["w"] * batch) + jnp.sum(params["var"]) * jnp.mean(batch)

    algo = LowComm(optax.sgd(1.0), outer, 1)
    params = {"w": jnp.zeros((2, 2)), "var": jnp.ones(2)}
    deltas = np.random.default_rng(0).normal(size=(2, 2, 1, 2, 2)).astype(np.float32)  # rounds, K, H
    expected, iso = np.zeros((2, 2)), ref.OuterStep(1.8, 0.8, True, True)
    state, var = algo.init(params, 2), np.ones(2)
    for r in range(2):
        state, _ = compiled(algo, "round", loss)(state, jnp.asarray(deltas[r]), jax.random.key(0))
        expected = iso(expected, np.float64(deltas[r]).mean((0, 1)))
        var = var - deltas[r].mean()
        np.testing.assert_allclose(state.params["w"], expected, atol=1e-5)
        np.testing.assert_allclose(state.params["var"], var, atol=1e-6)


@pytest.mark.parametrize("inject", [False, True])
def test_outer_learning_rate_schedules_count_rounds(inject):
    rate = optax.piecewise_constant_schedule(1.0, {1: 0.5})  # 1 in the first round, 0.5 later
    outer = optax.inject_hyperparams(isoloco)(learning_rate=rate, momentum=0.5) if inject else isoloco(rate, 0.5)
    algo = LowComm(optax.sgd(1.0), outer, 1)
    deltas = np.random.default_rng(0).normal(size=(3, 2, 1, 3, 2)).astype(np.float32)  # rounds, K, H
    state, theta, step = algo.init(jnp.zeros((3, 2)), 2), np.zeros((3, 2)), ref.OuterStep(1.0, 0.5, True, True)
    for r in range(3):
        step.eta = 1.0 if r == 0 else 0.5
        theta = step(theta, np.float64(deltas[r]).mean((0, 1)))
        state, _ = compiled(algo, "round", linear)(state, deltas[r], jax.random.key(0))
        np.testing.assert_allclose(state.params, theta, atol=1e-5)


def test_init_copies_and_rounds_may_donate():
    params = make_params()
    state = DILOCO.init(params, K)
    round_fn = jax.jit(DILOCO.round(loss_fn), donate_argnums=0)
    first = {n: leaf[:, :H] for n, leaf in BATCHES.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new, _ = round_fn(state, first, jax.random.key(0))
        new, _ = round_fn(new, first, jax.random.key(0))
    assert round_fn._cache_size() == 1
    assert_same(params, PARAMS)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.worker_params)))


def test_low_precision_parameters_keep_their_dtype():
    algo = LowComm(SGD, diloco(0.7, 0.9), 1, mix=0.5)
    state = algo.init(jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS), K)
    batches = {n: leaf[:, :2] for n, leaf in BATCHES.items()}
    new, _ = run(algo, state, batches)
    assert jax.tree.map(lambda leaf: leaf.dtype, new) == jax.tree.map(lambda leaf: leaf.dtype, state)
    expected = oracle(batches=batches, inner=lambda: ref.SGD(lambda t: 0.1), period=1, mix=0.5,
                      outer=lambda: ref.OuterStep(0.7, 0.9, True, False))  # fmt: skip
    assert_close(new.params, expected["params"], tol=0.03)


# Bad input.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sync_every": 0}, "sync_every must be >= 1"),
        ({"sync_every": -3}, "sync_every must be >= 1"),
        ({"overlap": 4}, r"overlap must be in \[0, 4\)"),
        ({"overlap": -1}, "overlap must be in"),
        ({"mix": 1.5}, r"mix must be in \[0, 1\], got 1.5"),
        ({"mix": -0.1}, "mix must be in"),
        ({"mix": float("nan")}, "mix must be in"),
        ({"nonfinite": "skip"}, "nonfinite must be one of"),
        ({"aggregate": "means"}, "unknown aggregator 'means'; allowed: dare"),
        # The type checks of the tests come before our own.
        ({"aggregate": merging.mean}, "aggregate must be a name or|typechecking parameter 'aggregate'"),
        ({"compress": "int8"}, "compress must be a Compression|typechecking parameter 'compress'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LowComm(SGD, local_sgd(), **{"sync_every": H, **options})


@pytest.mark.parametrize("name", ["inner", "outer"])
@pytest.mark.parametrize("value", [None, optax.sgd])
def test_optimizers_are_transformations(name, value):
    options = {field.name: field.default for field in dataclasses.fields(LowComm)}
    options |= {"inner": SGD, "outer": local_sgd(), "sync_every": H}
    post_init(LowComm, **options)
    with pytest.raises(TypeError, match=f"{name} must be an optax.GradientTransformation, got {value!r}"):
        post_init(LowComm, **(options | {name: value}))


@pytest.mark.parametrize(
    "params, message",
    [
        (None, "params must be a pytree with at least one array, got None"),
        ({}, "at least one array"),
        ({"w": jnp.zeros(2), "n": jnp.zeros(2, jnp.int32)}, "'n' must be real floating point, got int32"),
        ({"a": {"z": jnp.zeros(2, jnp.complex64)}}, "'a/z' must be real floating point, got complex64"),
        ({"k": jax.random.key(0)}, "'k' must be real floating point"),
        ({"f": 1.0}, "'f' must be real floating point, got <class 'float'>"),
    ],
)
def test_bad_params(params, message):
    for call in (check_params, lambda p: LowComm(SGD, local_sgd(), H).init(p, 2)):
        with pytest.raises(TypeError, match=re.escape(message)):
            call(params)


def test_bad_workers_and_meshes():
    from jaxlab.core.mesh import make_mesh

    algo = LowComm(SGD, local_sgd(), H)
    with pytest.raises(ValueError, match="num_workers must be >= 1, got 0"):
        algo.init(PARAMS, 0)
    mesh = make_mesh({"worker": 2})
    with pytest.raises(ValueError, match="3 workers do not divide over the 2 devices of mesh axis 'worker'"):
        algo.init(PARAMS, 3, mesh=mesh)
    with pytest.raises(ValueError, match=r"axis 'site' is not in the mesh; it has \('worker',\)"):
        algo.init(PARAMS, 2, mesh=mesh, axis="site")
    batch = {n: leaf[:, :H] for n, leaf in BATCHES.items()}
    with pytest.raises(ValueError, match="3 workers do not divide"):
        algo.round(loss_fn, mesh=mesh)(algo.init(PARAMS, 3), batch, jax.random.key(0))
    with pytest.raises(ValueError, match="axis 'site' is not in the mesh"):
        algo.round(loss_fn, mesh=mesh, axis="site")(algo.init(PARAMS, 3), batch, jax.random.key(0))


def test_bad_batches_weights_and_states():
    algo = LowComm(SGD, local_sgd(), H)
    state, key = algo.init(PARAMS, K), jax.random.key(0)
    good = {n: leaf[:, :H] for n, leaf in BATCHES.items()}
    call = algo.round(loss_fn)
    for bad in (good | {"y": good["y"][:, :-1]}, good | {"y": good["y"][:-1]}, good | {"y": np.zeros(())}):
        with pytest.raises(ValueError, match=r"batch leaf 'y' must be \[K, H, ...\] with \[3, 4\] in front, got \("):
            call(state, bad, key)
    with pytest.raises(ValueError, match=r"batch leaf 'x' must be \[K, ...\] with \[3\]"):
        algo.step(loss_fn)(state, {n: leaf[:2, 0] for n, leaf in BATCHES.items()}, key)
    with pytest.raises(ValueError, match=r"batch leaf 'z' must be .* got \(\)"):
        call(state, good | {"z": 1.0}, key)
    for weights in (jnp.ones(2), jnp.ones(()), jnp.ones((3, 1))):
        with pytest.raises(ValueError, match=r"weights must have shape \(3,\)"):
            call(state, good, key, weights)
    drop = LowComm(SGD, local_sgd(), H, nonfinite="drop")
    with pytest.raises(ValueError, match=r"weights must have shape \(3,\)"):
        drop.round(loss_fn)(state, good, key, jnp.ones(1))
    workers = state.worker_params
    wrong = state._replace(worker_params=workers | {"head": {"w": workers["head"]["w"][:, :3]}})
    with pytest.raises(ValueError, match=r"head/w: params float32\[3, 4, 2\], worker_params float32\[3, 3, 2\]"):
        call(wrong, good, key)
    missing = state._replace(worker_params={"embed": workers["embed"], "layers": workers["layers"]})
    with pytest.raises(ValueError, match=r"head/w: params float32\[3, 4, 2\], worker_params absent"):
        call(missing, good, key)
    with pytest.raises(ValueError, match="made by another LowComm: 2 fragments"):
        call(state._replace(outer_state=state.outer_state * 2), good, key)


def test_all_zero_weights_are_an_error_on_the_host_and_nan_under_jit():
    algo = LowComm(optax.sgd(1.0), local_sgd(), 1)
    state, batch = algo.init(jnp.zeros((3, 2)), K), jnp.ones((K, 1, 3, 2))
    with pytest.raises(ValueError, match="not all 0"):
        algo.round(linear)(state, batch, jax.random.key(0), jnp.zeros(K))
    state, metrics = compiled(algo, "round", linear)(state, batch, jax.random.key(0), jnp.zeros(K))
    assert np.isnan(state.params).all()
    assert np.isnan(metrics["merged_sq"])


def test_nonfinite_leaf_finds_the_first_bad_leaf_of_each_worker():
    deltas = {"a": jnp.array([[1.0], [jnp.nan], [1.0]]), "b": jnp.array([[1.0], [jnp.inf], [-jnp.inf]])}
    assert nonfinite_leaf(deltas).tolist() == [-1, 0, 1]


def test_bytes_per_round():
    n = tree.size(PARAMS)
    assert DILOCO.bytes_per_round(PARAMS, 4) == {"payload": 4 * n, "ring": 6 * n}
    assert DILOCO.bytes_per_round(PARAMS, 1)["ring"] == 0
    assert LowComm(SGD, local_sgd(), H, "tsv_m").bytes_per_round(PARAMS, 4) == {"payload": 4 * n, "ring": 12 * n}
    assert LowComm(SGD, local_sgd(), H, "ties").bytes_per_round(PARAMS, 4)["payload"] == 12 * n
