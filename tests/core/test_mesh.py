import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxlab.core import mesh
from jaxlab.core.checkpoint import Checkpointer

# New processes import the package from where this one does.
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

needs_8 = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def run_processes(script, count, folder, timeout=100):
    """Starts `count` processes of a script that takes coordinator, count, index, folder; returns their outputs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, *script, f"127.0.0.1:{port}", str(count)]
    running = [
        subprocess.Popen(
            [*command, str(i), str(folder)], stdout=subprocess.PIPE, env=ENV, stderr=subprocess.STDOUT, text=True
        )
        for i in range(count)
    ]
    try:
        return [(p.communicate(timeout=timeout)[0], p.returncode) for p in running]
    finally:
        for process in running:
            process.kill()


@needs_8
def test_axes_are_auto_and_in_order():
    made = mesh.make_mesh({"worker": 4, "data": 2})
    assert dict(made.shape) == {"worker": 4, "data": 2} and made.axis_names == ("worker", "data")
    assert set(made.axis_types) == {AxisType.Auto}
    assert list(made.devices.flat) == jax.devices()[:8]


@needs_8
def test_devices_default_to_the_first_and_may_be_chosen():
    assert list(mesh.make_mesh({"d": 2}).devices.flat) == jax.devices()[:2]
    chosen = jax.devices()[5:8]
    assert list(mesh.make_mesh({"d": 3}, chosen).devices.flat) == chosen


@pytest.mark.parametrize(
    "axes, match",
    [
        ({}, "at least one mesh axis"),
        ({"a": 0}, r"axes\['a'\] must be an integer >= 1, got 0"),
        ({"a": True}, r"axes\['a'\] must be an integer >= 1, got True"),
        ({"a": 100, "b": 7}, r"a=100 x b=7 need 700 devices, but there are \d+ \(cpu\); .*XLA_FLAGS=.*--distributed"),
    ],
)
def test_bad_axes(axes, match):
    with pytest.raises(ValueError, match=match):
        mesh.make_mesh(axes)


def test_chosen_devices_must_fit_exactly():
    with pytest.raises(ValueError, match="a=2 need exactly 2 devices, got a list of 1"):
        mesh.make_mesh({"a": 2}, jax.devices()[:1])


def test_named():
    one = mesh.make_mesh({"a": 1, "b": 1})
    assert mesh.named(one).spec == PartitionSpec()
    assert mesh.named(one, None, ("a", "b")).spec == PartitionSpec(None, ("a", "b"))
    with pytest.raises(ValueError, match="spec names mesh axis 'c'; the mesh has a, b"):
        mesh.named(one, None, ("a", "c"))


@needs_8
def test_put_and_to_host_are_inverse():
    made = mesh.make_mesh({"w": 4, "d": 2})
    tree = {"x": np.arange(16, dtype=np.float32).reshape(4, 4), "y": [np.int32(3)], "h": jnp.ones(8, jnp.bfloat16)}
    shardings = {"x": mesh.named(made, "w", "d"), "y": mesh.named(made), "h": mesh.named(made, "w")}
    placed = mesh.put(tree, shardings)
    assert placed["x"].sharding.shard_shape((4, 4)) == (1, 2) and placed["y"][0].is_fully_replicated
    back = mesh.to_host(placed)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(back)) and back["h"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_to_host_gives_the_words_of_typed_keys():
    key = jax.random.key(7)
    np.testing.assert_array_equal(mesh.to_host([key])[0], jax.random.key_data(key))


def test_describe_devices():
    text = mesh.describe_devices()
    assert (
        text.startswith(f"{jax.local_device_count()} cpu device") and jax.__version__ in text and "process" not in text
    )


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"coordinator": "localhost"}, "coordinator must be host:port, got 'localhost'"),
        ({"num_processes": 0}, "num_processes must be >= 1, got 0"),
        ({"num_processes": 2, "process_id": 2}, r"process_id must be in \[0, num_processes=2\), got 2"),
        ({"process_id": -1}, "process_id must be in"),
    ],
)
def test_initialize_rejects_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        mesh.initialize(**arguments)


def test_initialize_without_a_cluster_says_what_to_give():
    script = "from jaxlab.core import mesh; mesh.initialize()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=ENV)
    assert done.returncode == 1 and "give coordinator (host:port), num_processes and process_id" in done.stderr


def test_two_processes_of_two_devices(tmp_path):
    outputs = run_processes([str(Path(__file__).with_name("mesh_worker.py"))], 2, tmp_path)
    for text, code in outputs:
        assert code == 0, text
    np.testing.assert_array_equal(np.load(tmp_path / "full0.npy"), np.load(tmp_path / "full1.npy"))
    # What two processes saved, one process reads onto one device.
    with Checkpointer(tmp_path / "run") as saver:
        back = saver.restore(jax.ShapeDtypeStruct((4, 3), jnp.float32))
    np.testing.assert_array_equal(back.state, np.load(tmp_path / "full0.npy"))
