"""Quantised inner states in DiLoCo and IsoLoCo: the same result on one device and on several, nothing more sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.core import config as configs
from jaxlab.core import mesh as meshes
from jaxlab.core import tree
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.experiments import isoloco
from jaxlab.lowcomm import LowComm, collectives, diloco
from jaxlab.lowcomm import isoloco as isoloco_outer
from jaxlab.optim import bred
from tests.lowcomm import small

H, ROUNDS = 3, 3
QUANTISED = bred.quantize_state(optax.adamw(0.02), select=bred.default_select(min_size=0))


def algorithm(outer=None, inner=QUANTISED):
    return LowComm(inner, diloco(0.7, 0.9) if outer is None else outer, H)


def train(algo, mesh=None, rounds=ROUNDS, state=None, start=0):
    state = algo.init(small.params(), small.WORKERS, mesh=mesh) if state is None else state
    step = jax.jit(algo.round(small.loss_fn, mesh=mesh))
    losses = []
    for r in range(start, start + rounds):
        rows = small.place(small.batch(r, steps=H), mesh, "worker")
        state, metrics = step(state, rows, jax.random.key(1))
        losses.append(float(np.mean(metrics["loss"])))
    return state, losses


@pytest.mark.parametrize("outer", [None, isoloco_outer(1.2, 0.6)], ids=["diloco", "isoloco"])
def test_workers_on_devices_equal_workers_on_one(outer):
    algo = algorithm(outer)
    one, losses = train(algo)
    mesh = meshes.make_mesh({"worker": 4})
    spread, others = train(algo, mesh)
    for path, a, b in zip(tree.leaf_paths(one), jax.tree.leaves(one), jax.tree.leaves(spread), strict=True):
        if a.dtype != jnp.uint8:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=path)
    np.testing.assert_allclose(losses, others, rtol=1e-5)
    codes = [(p, x) for p, x in zip(tree.leaf_paths(one), jax.tree.leaves(one), strict=True) if x.dtype == jnp.uint8]
    assert codes and all(x.shape[0] == small.WORKERS for _, x in codes)


def test_a_round_still_moves_one_all_reduce_of_the_parameters():
    mesh = meshes.make_mesh({"worker": 4})
    algo = algorithm()
    state = algo.init(small.params(), small.WORKERS, mesh=mesh)
    rows = small.place(small.batch(0, steps=H), mesh, "worker")
    compiled = jax.jit(algo.round(small.loss_fn, mesh=mesh)).lower(state, rows, jax.random.key(0)).compile()
    reduced = [c for c in collectives(compiled.as_text()) if c.nbytes > 64]
    assert {c.kind for c in reduced} == {"all-reduce"} and sum(c.nbytes for c in reduced) == small.NBYTES


def test_it_learns_as_in_full_precision_and_resumes(tmp_path):
    algo = algorithm()
    whole, losses = train(algo, rounds=12)
    _, exact = train(algorithm(inner=optax.adamw(0.02)), rounds=12)
    _, nothing = train(algorithm(inner=optax.sgd(0.0)), rounds=12)
    gain = np.mean(np.subtract(nothing, exact))
    assert gain > 0.05 and abs(np.mean(np.subtract(losses, exact))) < 0.05 * gain
    half, _ = train(algo, rounds=5)
    with Checkpointer(tmp_path) as saver:
        saver.save(5, half)
    with Checkpointer(tmp_path) as loader:
        state = loader.restore(algo.init(small.params(), small.WORKERS)).state
    again, _ = train(algo, rounds=7, state=state, start=5)
    for path, a, b in zip(tree.leaf_paths(whole), jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


def test_one_config_key_quantises_the_inner_states():
    config = configs.load("isoloco", "tiny")
    config.methods = ("isoloco",)
    sizes = {}
    for bits in (32, 4, 3):
        config.lowcomm.state_bits = bits
        facts = isoloco.describe(config)
        sizes[bits] = facts["state bytes, IsoLoCo"]
    averages = 8 * 2 * 4 * facts["parameters"]
    assert 0.8 * averages < sizes[32] - sizes[4] < averages and sizes[3] < sizes[4]
    config.lowcomm.state_bits = 5
    with pytest.raises(ValueError, match=r"lowcomm.state_bits must be one of \(32, 8, 4, 3\), got 5"):
        isoloco.cells(config)
