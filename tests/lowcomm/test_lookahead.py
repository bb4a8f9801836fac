"""`lookahead` is `LowComm` with one worker, as an optax optimizer that composes with the others."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.lowcomm import LowComm, diloco, isoloco, local_sgd, lookahead
from tests.lowcomm.problems import adamw, assert_close, assert_same, loss_fn, make_batches, make_params, run

H, STEPS = 3, 9
PARAMS = make_params()
BATCHES = {name: leaf[:1] for name, leaf in make_batches(1, STEPS).items()}
ROWS = {name: leaf[0] for name, leaf in BATCHES.items()}


def train(tx, params=PARAMS, rows=ROWS):
    """A plain optax loop in one scan: (parameters, optimizer state)."""

    def body(carry, batch):
        params, state = carry
        updates, state = tx.update(jax.grad(loss_fn)(params, batch, None), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda p: jax.lax.scan(body, (p, tx.init(p)), rows)[0])(params)


@pytest.mark.parametrize(
    "inner, outer",
    [(adamw(), diloco(0.7, 0.9)), (optax.sgd(0.1), isoloco(1.8, 0.8)), (optax.sgd(0.1), local_sgd(0.5))],
    ids=["diloco", "isoloco", "lookahead"],
)
def test_equals_low_comm_with_one_worker(inner, outer):
    params, state = train(lookahead(inner, outer, H))
    algo = LowComm(inner, outer, H)
    expected, _ = run(algo, algo.init(PARAMS, 1), BATCHES)
    assert_close(params, expected.params)  # isotropisation magnifies rounding in weak directions
    assert int(state.count) == STEPS
    assert_same(state.anchor, params)  # right after an outer step, bit for bit


def test_an_outer_step_of_size_one_is_the_identity_bit_for_bit():
    """The compiler rounds the same arithmetic differently in another program, so both sides are `lookahead`."""
    params, _ = train(lookahead(adamw(), local_sgd(), H))
    assert_same(params, train(lookahead(adamw(), local_sgd(), 10**6))[0])
    assert_close(params, train(adamw())[0], tol=1e-6)


def test_between_outer_steps_the_inner_optimizer_alone_moves():
    rows = {name: leaf[: H - 1] for name, leaf in ROWS.items()}
    params, state = train(lookahead(optax.sgd(0.1), local_sgd(0.5), H), rows=rows)
    assert_close(params, train(optax.sgd(0.1), rows=rows)[0], tol=1e-6)
    assert_same(state.anchor, PARAMS)


def test_inside_chain_and_multi_steps():
    """Two micro-batches a step: the outer step comes after H optimizer steps, not after H micro-batches."""
    inner = lookahead(optax.sgd(0.1), local_sgd(0.5), 2)
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.5), inner), every_k_schedule=2)
    rows = {name: np.repeat(leaf[:4], 2, 0) for name, leaf in ROWS.items()}  # equal pairs: their mean is each of them
    params, state = train(tx, rows=rows)
    chained = optax.chain(optax.clip_by_global_norm(0.5), lookahead(optax.sgd(0.1), local_sgd(0.5), 2))
    expected, _ = train(chained, rows={name: leaf[:4] for name, leaf in ROWS.items()})
    assert_close(params, expected, tol=2e-6)
    assert int(state.inner_opt_state[1].count) == 4


def test_low_precision_parameters_with_full_precision_updates():
    """What the caller holds is the anchor, also where updates and parameters differ in dtype."""
    tx = lookahead(optax.sgd(0.1), local_sgd(0.5), 1)
    params = {"w": jnp.array([1.0, -2.0], jnp.bfloat16)}
    updates, state = tx.update({"w": jnp.array([0.3, 0.7], jnp.float32)}, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert new["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.anchor["w"], new["w"])
    np.testing.assert_allclose(np.float32(new["w"]), [0.985, -2.035], atol=0.01)


def test_donated_parameters_leave_the_anchor_alone():
    tx = lookahead(optax.sgd(0.1), local_sgd(0.5), 2)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params)
    np.testing.assert_array_equal(state.anchor["w"], np.ones(3))


def test_arguments_of_the_wrong_kind():
    """Without the type checks of the tests, which come first for the transformations and the number of steps."""
    make = inspect.unwrap(lookahead)
    for options, message in (
        ((optax.sgd(0.1), optax.sgd(0.5), 2.5), "sync_every must be an integer, got 2.5"),
        ((optax.sgd(0.1), optax.sgd(0.5), True), "sync_every must be an integer, got True"),
        ((None, optax.sgd(0.5), 2), "inner must be an optax.GradientTransformation, got None"),
        ((optax.sgd(0.1), optax.sgd, 2), "outer must be an optax.GradientTransformation, got <function sgd"),
    ):
        with pytest.raises(TypeError, match=message):
            make(*options)
    lookahead(optax.sgd(0.1), optax.sgd(0.5), 2)


def test_errors():
    with pytest.raises(ValueError, match="sync_every must be >= 1, got 0"):
        lookahead(optax.sgd(0.1), local_sgd(), 0)
    tx = lookahead(optax.sgd(0.1), local_sgd(), 2)
    with pytest.raises(ValueError, match=r"lookahead needs params in update\(grads, state, params\), got None"):
        tx.update(PARAMS, tx.init(PARAMS))
