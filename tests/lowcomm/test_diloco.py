"""The outer optimizers that average: their formulas, their equality with optax, their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.lowcomm import diloco, isoloco, local_sgd
from jaxlab.lowcomm.diloco import check_outer
from tests.reference.lowcomm_np import OuterStep

RNG = np.random.default_rng(0)
DELTAS = [{"w": RNG.normal(size=(3, 2)), "b": RNG.normal(size=2), "s": RNG.normal()} for _ in range(3)]
DELTAS = [jax.tree.map(lambda d: jnp.asarray(d, jnp.float32), d) for d in DELTAS]


def trajectory(outer, deltas=DELTAS):
    """theta after every outer step, starting from zero."""
    theta = jax.tree.map(jnp.zeros_like, deltas[0])
    state, out = outer.init(theta), []
    update = jax.jit(outer.update)
    for delta in deltas:
        step, state = update(delta, state, theta)
        theta = optax.apply_updates(theta, step)
        out.append(theta)
    return out


@pytest.mark.parametrize(
    "outer, eta, mu, nesterov",
    [
        (diloco(), 0.7, 0.9, True),
        (diloco(1, 0.5), 1.0, 0.5, True),
        (diloco(0.3, 0.8, nesterov=False), 0.3, 0.8, False),
        (diloco(1.6, 0.0, nesterov=False), 1.6, 0.0, False),
        (local_sgd(), 1.0, 0.0, False),
        (local_sgd(np.float32(0.5)), 0.5, 0.0, False),
    ],
)
def test_three_outer_steps(outer, eta, mu, nesterov):
    thetas = trajectory(outer)
    for leaf in DELTAS[0]:
        step, theta = OuterStep(eta, mu, nesterov, False), np.zeros(DELTAS[0][leaf].shape)
        for t, delta in enumerate(DELTAS):
            theta = step(theta, np.asarray(delta[leaf], np.float64))
            np.testing.assert_allclose(thetas[t][leaf], theta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_optax_sgd_exactly(nesterov):
    ours = trajectory(diloco(0.7, 0.9, nesterov=nesterov))
    theirs = trajectory(optax.sgd(0.7, 0.9, nesterov=nesterov))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_momentum_there_is_no_state():
    params = DELTAS[0]
    assert not jax.tree.leaves(local_sgd().init(params))
    assert not jax.tree.leaves(diloco(0.7, 0.0, nesterov=False).init(params))
    assert len(jax.tree.leaves(diloco().init(params))) == 3


@pytest.mark.parametrize("make", [diloco, local_sgd])
@pytest.mark.parametrize("eta", [0, 0.0, -0.1, float("nan"), float("inf")])
def test_bad_learning_rates(make, eta):
    with pytest.raises(ValueError, match=f"learning_rate must be finite and > 0, got {eta}"):
        make(eta)


@pytest.mark.parametrize("mu", [1, 1.0, 1.5, -0.1, float("nan")])
def test_bad_momentum(mu):
    with pytest.raises(ValueError, match=rf"momentum must be in \[0, 1\), got {mu}"):
        diloco(0.7, mu)


@pytest.mark.parametrize("array", [jnp.array, np.array, np.float32])
def test_concrete_arrays_are_checked_like_numbers(array):
    for bad in (lambda: diloco(array(-1.0)), lambda: local_sgd(array(np.inf)), lambda: isoloco(array(-1.0))):
        with pytest.raises(ValueError, match="learning_rate must be finite and > 0"):
            bad()
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 2"):
        diloco(0.7, array(2.0))
    with pytest.raises(ValueError, match="rtol must be finite and >= 0"):
        isoloco(rtol=array(-1.0))
    diloco(array(0.7), array(0.9))


@pytest.mark.parametrize("value", ["0.7", None, 1j, True, [0.7, 0.7]])
def test_what_is_no_real_scalar(value):
    for name, options in (("learning_rate", (value, 0.9)), ("momentum", (0.7, value))):
        with pytest.raises(TypeError, match=f"{name} must be a real number, a scalar array or a schedule"):
            check_outer(*options, False)


def test_a_warm_up_from_zero_may_be_injected():
    outer = optax.inject_hyperparams(diloco)(learning_rate=optax.linear_schedule(0.0, 0.7, 4))
    assert not np.any(outer.update(DELTAS[0], outer.init(DELTAS[0]))[0]["w"])


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match="nesterov=True needs momentum > 0, got 0"):
        diloco(0.7, 0.0)


def test_schedules_and_traced_values_pass_the_checks():
    check_outer(optax.constant_schedule(-1.0), lambda step: 2.0, True)
    eta = jnp.array(0.7)
    traced = jax.jit(lambda eta, mu, d: diloco(eta, mu).update(d, diloco(eta, mu).init(d))[0])(eta, 0.9, DELTAS[0])
    plain = diloco(0.7, 0.9).update(DELTAS[0], diloco(0.7, 0.9).init(DELTAS[0]))[0]
    np.testing.assert_allclose(traced["w"], plain["w"], rtol=1e-6)
