"""Workers mapped over one device, several devices and several processes: the same results."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from jaxlab import lowcomm
from jaxlab.core.mesh import make_mesh, named, to_host
from tests.core.test_mesh import run_processes
from tests.lowcomm import small
from tests.lowcomm.execution_worker import SPECS, algorithm, check_copies, train

WORKER = Path(__file__).with_name("execution_worker.py")


def assert_close(a, b, tolerance=1e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(to_host(a)), jax.tree.leaves(to_host(b)), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def alone():
    """The whole state and the losses on one device."""
    state, losses = train(algorithm(), None)
    assert losses[-1].mean() < 0.8 * losses[0].mean(), "it must learn something, or equal results say little"
    check_copies(state)
    return to_host(state), losses


@pytest.mark.parametrize("devices", [4, 2])
def test_workers_over_devices(alone, devices):
    """A worker a device, and two workers a device."""
    mesh = make_mesh({"worker": devices})
    state, losses = train(algorithm(), mesh)
    assert_close((state, losses), alone)
    check_copies(state)
    for leaf in jax.tree.leaves((state.worker_params, state.inner_state)):
        assert leaf.sharding.shard_shape(leaf.shape)[0] == small.WORKERS // devices
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves((state.params, state.outer_state)))


@pytest.mark.parametrize("param_specs", [None, SPECS], ids=["data", "data and parameters"])
def test_a_worker_of_several_devices(alone, param_specs):
    """The batch of a worker, or its batch and its parameters, over a second axis of the mesh."""
    mesh = make_mesh({"worker": 2, "data": 2})
    state, losses = train(algorithm(), mesh, ("worker", None, "data"), param_specs)
    assert_close((state, losses), alone)
    check_copies(state)
    if param_specs is None:
        return
    for part in (state.worker_params, state.inner_state[0].mu):
        assert part["hidden"]["w"].sharding == named(mesh, "worker", None, "data")
    assert state.params["out"]["w"].sharding == named(mesh, "data")
    momentum = next(x for x in jax.tree.leaves(state.outer_state) if x.shape == (4, 2))
    assert momentum.sharding.shard_shape(momentum.shape) == (2, 2), "the outer state is split as the parameters are"


def test_streaming_over_devices():
    """Fragments, overlap, mixing and weights: rounds on a mesh, and single steps on one device."""
    groups = lowcomm.Fragments.by_patterns(small.params(), (["hidden"], ["out"]))
    algo = lowcomm.LowComm(optax.adamw(0.02), lowcomm.diloco(0.5, 0.6), 4, "mean", groups, overlap=1, mix=0.25)
    weights = np.array([3.0, 1.0, 0.0, 2.0], np.float32)
    state, losses = train(algo, make_mesh({"worker": 4}), weights=weights, rounds=3)
    by_step, call = algo.init(small.params(), small.WORKERS), jax.jit(algo.step(small.loss_fn), donate_argnums=0)
    singles = []
    for i in range(12):
        by_step, metrics = call(by_step, small.batch(i), jax.random.key(0), weights)
        singles.append(metrics["loss"])
    assert call._cache_size() == 1
    assert_close(state, by_step)
    assert_close(np.concatenate(losses, axis=1), np.stack(singles, axis=1))


def test_data_parallel_over_devices():
    algo, mesh = lowcomm.DataParallel(optax.adamw(0.02)), make_mesh({"worker": 4})
    found = []
    for where in (None, mesh):
        state, call = algo.init(small.params(), 4, mesh=where), jax.jit(algo.round(small.loss_fn), donate_argnums=0)
        for i in range(5):
            state, metrics = call(state, small.place(small.batch(i, steps=3), where, "worker"), jax.random.key(0))
        assert call._cache_size() == 1
        found.append((state, metrics))
    assert_close(*found)
    assert all(small.copies_agree(leaf) for leaf in jax.tree.leaves(found[1][0]))


def test_several_processes(alone, tmp_path):
    """Two processes of two devices: a worker a device, and workers that each span both processes."""
    for text, code in run_processes([str(WORKER)], 2, tmp_path):
        assert code == 0, text
    files = [np.load(tmp_path / f"{index}.npz") for index in range(2)]
    assert sorted(files[0]) == sorted(files[1])
    for name in files[0]:
        np.testing.assert_array_equal(files[0][name], files[1][name], err_msg="the processes must agree bit for bit")
    wanted = jax.tree.leaves({"losses": alone[1], "state": alone[0]})
    assert len(files[0]) == 2 * len(wanted)
    for mode in ("flat", "transposed"):
        for i, leaf in enumerate(wanted):
            np.testing.assert_allclose(files[0][f"{mode}{i}"], leaf, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_a_mesh_is_refused():
    algo, mesh = algorithm(), make_mesh({"worker": 4})
    with pytest.raises(ValueError, match="6 workers do not divide over the 4 devices of mesh axis 'worker'"):
        algo.init(small.params(), 6, mesh=mesh)
    with pytest.raises(ValueError, match=r"axis 'workers' is not in the mesh; it has \('worker',\)"):
        algo.init(small.params(), 4, mesh=mesh, axis="workers")
