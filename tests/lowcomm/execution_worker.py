"""One of the processes that test_execution.py starts: execution_worker.py COORDINATOR COUNT INDEX FOLDER."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxlab import lowcomm
from jaxlab.core import mesh as meshes
from tests.lowcomm import small

H, ROUNDS = 3, 5
SPECS = {"hidden": {"w": PartitionSpec(None, "data")}, "out": {"w": PartitionSpec("data"), "b": PartitionSpec()}}


def algorithm():
    """IsoLoCo with AdamW: matrices, a vector, momentum and worker states."""
    return lowcomm.LowComm(optax.adamw(0.02), lowcomm.isoloco(1.2, 0.5), H)


def train(algo, mesh, spec=("worker",), param_specs=None, weights=None, rounds=ROUNDS):
    """The state after some rounds on a mesh (or on one device) and the losses of each round [K, H]."""
    state = algo.init(small.params(), small.WORKERS, mesh=mesh, param_specs=param_specs)
    call = jax.jit(algo.round(small.loss_fn, mesh=mesh, param_specs=param_specs), donate_argnums=0)
    losses = []
    for i in range(rounds):
        rows = small.place(small.batch(i, steps=algo.sync_every), mesh, *spec)
        state, metrics = call(state, rows, jax.random.key(0), weights)
        losses.append(metrics["loss"])
    assert call._cache_size() == 1, "one compilation a configuration"
    return state, meshes.to_host(losses)


def check_copies(state):
    """After a synchronisation every copy of every parameter holds the same bits, the workers' copies too."""
    assert all(small.copies_agree(leaf) for leaf in jax.tree.leaves(state))
    for merged, workers in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.worker_params), strict=True):
        merged, workers = meshes.to_host((merged, workers))
        np.testing.assert_array_equal(workers, np.broadcast_to(merged, workers.shape))


def main(coordinator, count, index, folder):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    meshes.initialize(coordinator, count, index)
    found = {}
    # A worker a device; then two workers, each spread over the two processes.
    for name, axes in (("flat", {"worker": 2 * count}), ("transposed", {"data": count, "worker": 2})):
        mesh = meshes.make_mesh(axes)
        spec = ("worker",) if name == "flat" else ("worker", None, "data")
        state, losses = train(algorithm(), mesh, spec, None if name == "flat" else SPECS)
        check_copies(state)
        found[name] = {"losses": losses, "state": meshes.to_host(state)}
    np.savez(
        Path(folder) / f"{index}.npz",
        **{f"{name}{i}": leaf for name, part in found.items() for i, leaf in enumerate(jax.tree.leaves(part))},
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
