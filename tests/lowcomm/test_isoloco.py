"""IsoLoCo's outer step: the published numbers, the authors' rule in both orders, equality with optax, its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.lowcomm import MatrixSpec, isoloco, isotropize
from tests.lowcomm.test_diloco import trajectory
from tests.reference.lowcomm_np import OuterStep

RNG = np.random.default_rng(1)
SHAPES = {"wide": (2, 5), "tall": (4, 3), "b": (3,), "s": ()}
DELTAS = [{n: jnp.asarray(RNG.normal(size=shape), jnp.float32) for n, shape in SHAPES.items()} for _ in range(3)]


def test_two_rounds_of_published_settings():
    """eta 1.8, mu 0.8, from zero, with mean pseudo-gradients [[1, 2], [3, 4]] and [[0, 2], [2, 0]]."""
    first, second = trajectory(isoloco(), [jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0.0, 2.0], [2.0, 0.0]])])
    np.testing.assert_allclose(first, [[4.86, -8.1], [-8.1, -4.86]], atol=2e-5)
    np.testing.assert_allclose(second, [[6.588, -17.46], [-17.46, -6.588]], atol=4e-5)


@pytest.mark.parametrize("order", ["gradient", "update"])
@pytest.mark.parametrize("mu, nesterov", [(0.8, True), (0.8, False), (0.0, False)])
def test_three_rounds_of_the_authors_rule(order, mu, nesterov):
    thetas = trajectory(isoloco(1.8, mu, nesterov=nesterov, order=order), DELTAS)
    for leaf in SHAPES:
        step, theta = OuterStep(1.8, mu, nesterov, True, order), np.zeros(SHAPES[leaf])
        for t, delta in enumerate(DELTAS):
            theta = step(theta, np.asarray(delta[leaf], np.float64))
            np.testing.assert_allclose(thetas[t][leaf], theta, rtol=1e-5, atol=2e-5, err_msg=f"{leaf} {t}")


def test_the_two_orders_differ_from_the_second_round_on():
    a, b = (trajectory(isoloco(1.8, 0.8, order=order), DELTAS) for order in ("gradient", "update"))
    np.testing.assert_allclose(a[0]["tall"], b[0]["tall"], rtol=1e-4)
    assert np.abs(a[1]["tall"] - b[1]["tall"]).max() > 0.1


@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_the_chain_with_optax_sgd_exactly(nesterov):
    ours = trajectory(isoloco(1.8, 0.8, nesterov=nesterov), DELTAS)
    theirs = trajectory(optax.chain(isotropize(), optax.sgd(1.8, 0.8, nesterov=nesterov)), DELTAS)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_options_reach_isotropize():
    heads = jnp.asarray(RNG.normal(size=(4, 2, 3)), jnp.float32)
    for spec in (1, MatrixSpec((0,), (1, 2))):
        ours, theirs = isoloco(1.0, 0.0, nesterov=False, specs={"q": spec}), isotropize(specs={"q": spec})
        both = jax.jit(lambda d, a=ours, b=theirs: (a.update(d, a.init(d))[0], b.update(d, b.init(d))[0]))
        update, expected = both({"q": heads})
        np.testing.assert_array_equal(update["q"], -expected["q"])
    off = isoloco(1.0, 0.0, nesterov=False, mask=lambda tree: jax.tree.map(lambda _: False, tree))
    np.testing.assert_array_equal(off.update(DELTAS[0], off.init(DELTAS[0]))[0]["tall"], -DELTAS[0]["tall"])
    exact = trajectory(isoloco(), DELTAS[:1])[0]["tall"]
    steps = trajectory(isoloco(method="newton_schulz", ns_steps=14), DELTAS[:1])[0]["tall"]
    np.testing.assert_allclose(steps, exact, atol=1e-4)
    rank_one = jnp.outer(jnp.arange(1.0, 4.0), jnp.ones(3))
    kept, cut = (trajectory(isoloco(rtol=rtol), [rank_one])[0] for rtol in (None, "auto"))
    assert np.linalg.matrix_rank(cut, tol=1e-3) == 1 and np.linalg.matrix_rank(kept, tol=1e-3) == 3


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: isoloco(0.0), "learning_rate must be finite and > 0, got 0.0"),
        (lambda: isoloco(-1.8), "learning_rate must be finite and > 0"),
        (lambda: isoloco(1.8, 1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: isoloco(1.8, 0.0), "nesterov=True needs momentum > 0, got 0"),
        (lambda: isoloco(order="both"), r"order must be one of \('gradient', 'update'\), got 'both'"),
        (lambda: isoloco(method="lapack"), "unknown method 'lapack'"),
        (lambda: isoloco().init({"q": jnp.ones((2, 2, 2))}), "leaf 'q' has shape .* and no spec"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
