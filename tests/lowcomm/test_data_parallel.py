"""Data-parallel training is plain optax training on the workers' batches together."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.core.mesh import make_mesh
from jaxlab.lowcomm import DataParallel, LowComm, local_sgd
from tests.lowcomm.problems import (
    adamw,
    assert_close,
    assert_same,
    compiled,
    loss_fn,
    make_batches,
    make_params,
    post_init,
    run,
)

K, STEPS = 3, 4
PARAMS = make_params()
BATCHES = make_batches(K, STEPS)
KEY = jax.random.key(7)


def test_equals_plain_training_on_the_whole_batch():
    inner = optax.chain(optax.clip_by_global_norm(0.5), adamw(0.03))
    algo = DataParallel(inner)
    state, metrics = compiled(algo, "round")(algo.init(PARAMS, K), BATCHES, KEY)
    params, opt, losses = PARAMS, inner.init(PARAMS), []

    @jax.jit
    def plain(params, opt, rows):
        loss, grads = jax.value_and_grad(loss_fn)(params, rows, None)
        updates, opt = inner.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    for t in range(STEPS):
        rows = {name: leaf[:, t].reshape(-1, leaf.shape[-1]) for name, leaf in BATCHES.items()}
        params, opt, loss = plain(params, opt, rows)
        losses.append(loss)
    assert_close(state.params, params, tol=1e-6)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-6)
    assert int(state.step) == STEPS and int(state.inner_state[1][0].count) == STEPS


def test_round_is_its_steps():
    algo = DataParallel(adamw())
    state = by_step = algo.init(PARAMS, K)
    state, metrics = compiled(algo, "round")(state, BATCHES, KEY)
    for t in range(STEPS):
        by_step, one = compiled(algo, "step")(by_step, {name: leaf[:, t] for name, leaf in BATCHES.items()}, KEY)
        np.testing.assert_array_equal(one["loss"], metrics["loss"][t])
    assert_same(by_step, state)


def test_sgd_with_one_step_rounds_is_low_comm():
    low = LowComm(optax.sgd(0.1), local_sgd(), 1)
    expected, metrics = run(low, low.init(PARAMS, K), BATCHES)
    algo = DataParallel(optax.sgd(0.1))
    state, losses = compiled(algo, "round")(algo.init(PARAMS, K), BATCHES, KEY)
    assert_close(state.params, expected.params, tol=1e-6)
    np.testing.assert_allclose(losses["loss"], metrics["loss"][:, :, 0].mean(1), rtol=1e-5)


def test_keys_differ_over_steps():
    algo = DataParallel(optax.sgd(0.0))

    def noisy(params, batch, key):
        return params["w"] * jax.random.normal(key) + 0 * jnp.sum(batch)

    _, metrics = algo.round(noisy)(algo.init({"w": jnp.array(1.0)}), jnp.zeros((2, 3, 1)), KEY)
    assert np.unique(metrics["loss"]).size == 3


def test_init_copies_the_parameters():
    params = make_params()
    algo = DataParallel(optax.sgd(0.1))
    state = algo.init(params)
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    assert_same(params, PARAMS)


def test_bad_input():
    algo = DataParallel(optax.sgd(0.1))
    with pytest.raises(TypeError, match="params must be a pytree with at least one array, got None"):
        algo.init(None)
    with pytest.raises(ValueError, match="num_workers must be >= 1, got 0"):
        algo.init(PARAMS, 0)
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation, got None"):
        post_init(DataParallel, inner=None)
    with pytest.raises(TypeError, match="'n' must be real floating point, got int32"):
        algo.init({"n": jnp.zeros(2, jnp.int32)})
    with pytest.raises(ValueError, match="axis 'site' is not in the mesh"):
        algo.round(loss_fn, mesh=make_mesh({"worker": 2}), axis="site")
    state, call = algo.init(PARAMS), algo.round(loss_fn)
    for y in (BATCHES["y"][:2], BATCHES["y"][:, :3], BATCHES["y"][:, :, 0, 0]):
        message = f"batch leaf 'y' must be [K, H, b, ...] with [3, 4] in front, got {y.shape}"
        with pytest.raises(ValueError, match=re.escape(message)):
            call(state, BATCHES | {"y": y}, KEY)
    with pytest.raises(ValueError, match=re.escape("batch leaf 'z' must be [K, b, ...] with [3] in front, got (3,)")):
        algo.step(loss_fn)(state, {"x": BATCHES["x"][:, 0], "z": np.zeros(3)}, KEY)


def test_bytes():
    n = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    assert DataParallel(adamw()).bytes_per_round(PARAMS, 4, steps=5) == {"payload": 20 * n, "ring": 30 * n}
