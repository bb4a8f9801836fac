"""A run that is killed or stopped in the middle of a DiLoCo round goes on bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlab.core import tree
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.errors import CheckpointError
from jaxlab.core.mesh import to_host
from tests.lowcomm import small
from tests.lowcomm.resume_worker import EVERY, H, algorithm, run

SCRIPT = Path(__file__).with_name("resume_worker.py")
# New processes import the packages from where this one does, and share its compilation cache.
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
}


def start(folder, step):
    """A process that trains into `folder` and waits after `step`; returns when it is there."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), str(step)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV,
    )  # fmt: skip
    line = process.stdout.readline()  # blocks until it says so or ends
    if line != "reached\n":
        raise AssertionError(line + "".join(process.communicate(timeout=60)))
    return process


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path, x, y in zip(tree.leaf_paths(a), jax.tree.leaves(to_host(a)), jax.tree.leaves(to_host(b)), strict=True):
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), path


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    result, first = run(tmp_path_factory.mktemp("whole"), until=15)
    assert (result.step, first) == (15, 0)
    state = to_host(result.state)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(state.residual)), "error feedback must hold something"
    assert all(count == 15 for count in np.ravel(state.inner_state[0].count))
    return state, [record["loss"] for record in result.history]


def test_killed_in_the_middle_of_a_round(uninterrupted, tmp_path):
    """kill -9 after step 9; the newest whole checkpoint, of step 8, is in the middle of the second round."""
    process = start(tmp_path, 9)
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.communicate()
    with Checkpointer(tmp_path) as saver:
        found = saver.latest()
    # The last save runs in the background: the kill may come before it is complete, never in a way that breaks it.
    assert found in (EVERY, 2 * EVERY) and found % H
    result, first = run(tmp_path, until=15)
    assert first == found
    assert_same_bits(to_host(result.state), uninterrupted[0])
    assert [record["loss"] for record in result.history] == uninterrupted[1][first:]


def test_told_to_stop_in_the_middle_of_a_round(uninterrupted, tmp_path):
    process = start(tmp_path, 6)
    process.send_signal(signal.SIGTERM)  # it waits in the hook of step 6, and notices after step 7
    out, err = process.communicate(input="\n", timeout=100)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "stopped by SIGTERM at step 7; resume with: the same again"
    result, first = run(tmp_path, until=15)
    assert first == 7
    assert_same_bits(to_host(result.state), uninterrupted[0])


def test_every_part_of_the_state_matters(tmp_path):
    """At the checkpoint that the killed run resumes, no part is what a fresh state has: losing one would be noticed."""
    run(tmp_path, until=2 * EVERY)
    fresh = algorithm().init(small.params(), small.WORKERS)
    with Checkpointer(tmp_path) as saver:
        state = saver.restore(fresh).state
    for name, old, new in zip(state._fields, fresh, state, strict=True):
        same = [np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (old, new)), strict=True)]
        assert not any(same) and same, name


def test_fewer_devices(tmp_path):
    """Four devices up to step 7, two up to step 12, then one: the same run, but for rounding."""
    wanted, _ = run(tmp_path / "one", until=15, feedback=False)
    folder = tmp_path / "several"
    for devices, until, begins in ((4, 7, 0), (2, 12, 7), (1, 15, 12)):
        result, first = run(folder, until=until, devices=devices, feedback=False)
        assert (result.step, first) == (until, begins)
        workers = jax.tree.leaves(result.state.worker_params)[0]
        assert len(workers.sharding.device_set) == devices
    for path, x, y in zip(
        tree.leaf_paths(wanted.state), *map(jax.tree.leaves, (result.state, wanted.state)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6, err_msg=path)


def test_another_algorithm_is_refused(tmp_path):
    """The message names what the checkpoint has and the algorithm has not."""
    run(tmp_path, until=EVERY)
    other = algorithm(feedback=False).init(small.params(), small.WORKERS)
    with Checkpointer(tmp_path) as saver, pytest.raises(CheckpointError, match=r"residual/hidden/w: .* like absent"):
        saver.restore(other)
