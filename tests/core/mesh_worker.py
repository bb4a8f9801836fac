"""One of the processes that test_mesh.py starts: mesh_worker.py COORDINATOR COUNT INDEX FOLDER."""

import os
import signal
import sys
import types
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlab.core import checkpoint, mesh, train


def main(coordinator: str, count: int, index: int, folder: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    mesh.initialize(coordinator, count, index)
    mesh.initialize()  # again, without arguments: nothing
    try:
        mesh.initialize(coordinator, count, index)
    except RuntimeError as error:
        assert f"already is process {index} of {count}" in str(error)
    else:
        raise AssertionError("a second initialize with arguments must fail")
    assert f"process {index} of {count}, {2 * count} devices in all" in mesh.describe_devices()
    try:
        mesh.make_mesh({"worker": 2})
    except ValueError as error:
        assert "must use all of them" in str(error)
    else:
        raise AssertionError("a mesh that leaves processes out must fail")

    workers = mesh.make_mesh({"worker": 2 * count})
    split, whole = mesh.named(workers, "worker"), mesh.named(workers)
    plain = {
        "x": np.arange(8 * count, dtype=np.float32).reshape(-1, 2),
        "k": jax.random.split(jax.random.key(0), 2 * count),
    }
    tree = mesh.put(plain, split)
    assert not tree["x"].is_fully_addressable and tree["x"].sharding == split
    back = mesh.to_host(mesh.put(tree, whole)), mesh.to_host(tree)
    for got in back:
        np.testing.assert_array_equal(got["x"], plain["x"])
        np.testing.assert_array_equal(got["k"], jax.random.key_data(plain["k"]))

    total = jax.jit(lambda x: x.sum(axis=0), out_shardings=whole)(tree["x"])
    np.testing.assert_array_equal(mesh.to_host(total), plain["x"].sum(axis=0))

    # A run over both processes; only process 1 is told to stop, both must save the same step.
    @jax.jit
    def step(state, batch, key):
        new = state + batch + jax.random.normal(key, state.shape)
        return new, {"mean": new.mean(), "each": new}

    def batches(i):
        return mesh.put(np.full((2 * count, 3), i, np.float32), split)

    lines = []
    screen = types.SimpleNamespace(line=lines.append, update=lambda done, fields: None)

    def tell(loop):
        if loop.step == 5 and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    start, key = mesh.put(np.zeros((2 * count, 3), np.float32), split), jax.random.key(1)
    saver = checkpoint.Checkpointer(Path(folder) / "run")
    try:
        hooks = [train.checkpoint(saver, 4), train.call_every(tell, 1)]
        train.fit(start, step, batches, steps=40, key=key, log_every=2, hooks=hooks, progress=screen)
    except SystemExit as stop:
        assert stop.code == 0
    else:
        raise AssertionError("the run did not stop")
    name = "SIGTERM" if index == 1 else "a signal to another process"
    assert lines == [f"stopped by {name} at step 8; resume with: start=8 and the checkpoint of this step"], lines

    back = saver.restore(start)
    assert back.step == 8 and back.state.sharding == split
    rest = train.fit(back.state, step, batches, steps=10, start=8, key=key, log_every=2)
    full = train.fit(start, step, batches, steps=10, key=key, log_every=2)
    np.testing.assert_array_equal(mesh.to_host(rest.state), mesh.to_host(full.state))
    assert [type(r["step"]) for r in full.history] == [int] * 5
    assert abs(full.history[-1]["mean"] - full.history[-1]["each"]) < 1e-4

    # A damaged checkpoint: all processes take the previous one.
    messages = []
    saver.close()
    if index == 0:
        (Path(folder) / "run" / "8" / "meta" / "metadata").write_bytes(b"")
    multihost_utils.sync_global_devices("damaged")
    with checkpoint.Checkpointer(Path(folder) / "run", on_message=messages.append) as saver:
        assert saver.restore(start).step == 4 and len(messages) == 1
        saver.save(8, full.state)
        saver.wait()
        np.testing.assert_array_equal(mesh.to_host(saver.restore(start).state), mesh.to_host(full.state))
    np.save(Path(folder) / f"full{index}.npy", mesh.to_host(full.state))
    print("done", index, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
