import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.errors import CheckpointError
from jaxlab.core.mesh import make_mesh, named

# New processes import the package from where this one does.
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

# Orbax abandons its other reads when one fails, and Python reports them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Pair(NamedTuple):
    first: Any
    second: Any


def host(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert host(x).tobytes() == host(y).tobytes()


def rich_state():
    params = {"w": jax.random.normal(jax.random.key(0), (5, 3)), "b": jnp.array([0.1, jnp.pi], jnp.bfloat16)}
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
        "codes": jnp.arange(7, dtype=jnp.uint8),
        "count": jnp.int32(7),
        "bits": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-42], jnp.float32),
        "mask": jnp.array([True, False]),
        "fp8": jnp.array([0.5, 2.0], jnp.float8_e4m3fn),
        "zero": Pair(jnp.zeros((0, 2)), jax.random.split(jax.random.key(4), 0)),
        "keys": Pair(jax.random.key(3), jax.random.split(jax.random.key(4), 3)),
        "empty": {"dict": {}, "list": [], "tuple": (), "none": None},
        "nested": (Pair(jnp.ones(()), None), [jnp.zeros((1, 1), jnp.int8)]),
        "host": np.arange(4, dtype=np.int16),
        "a/b": {"c.d": jnp.ones(2)},
    }


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def small(step):
    key = jax.random.fold_in(jax.random.key(1), step)
    return {"w": jax.random.normal(key, (64, 33)), "n": jnp.int32(step), "key": key}


def fill(directory, steps=(1, 2, 3)):
    with Checkpointer(directory, keep=3) as saver:
        for step in steps:
            saver.save(step, small(step), {"step": step})


def files(directory, step):
    return sorted(p for p in (Path(directory) / str(step)).rglob("*") if p.is_file())


def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path):
    state = rich_state()
    with Checkpointer(tmp_path) as saver:
        saver.save(3, state, {"tokens": 12, "name": "é"})
        back = saver.restore(state)
        assert (back.step, back.meta) == (3, {"tokens": 12, "name": "é"})
        assert_same(back.state, state)
        assert isinstance(back.state["host"], np.ndarray) and isinstance(back.state["count"], jax.Array)
    with Checkpointer(tmp_path) as fresh:
        assert_same(fresh.restore(abstract(state)).state, state)


@pytest.mark.parametrize("state", [{}, None, jnp.arange(3), (None, [])], ids=["dict", "none", "leaf", "empties"])
def test_degenerate_states(tmp_path, state):
    with Checkpointer(tmp_path) as saver:
        saver.save(0, state)
        assert_same(saver.restore(state).state, state)


def test_empty_directory_latest_and_keep(tmp_path):
    with Checkpointer(tmp_path / "new" / "folder", keep=2) as saver:
        assert saver.restore(small(0)) is None and saver.latest() is None
        for step in range(1, 5):
            saver.save(step, small(step))
        saver.wait()
        assert saver.latest() == 4
        assert_same(saver.restore(small(0), step=3).state, small(3))
        with pytest.raises(CheckpointError, match=r"no step 1; it holds \[3, 4\]"):
            saver.restore(small(0), step=1)


@pytest.mark.parametrize("wait", [False, True])
def test_saving_then_donating_does_not_corrupt(tmp_path, wait):
    step = jax.jit(lambda x: jax.tree.map(lambda y: y * 0 - 1, x), donate_argnums=0)
    state = {"w": jnp.arange(1 << 18, dtype=jnp.float32), "v": jnp.arange(9.0)}
    want = jax.tree.map(np.array, state)
    with Checkpointer(tmp_path) as saver:
        saver.save(1, state)
        if wait:
            saver.wait()
        after = jax.block_until_ready(step(state))
        if wait:  # while the files are being written, JAX on CPU refuses to reuse the buffer; then it must again
            assert state["w"].is_deleted()
        back = saver.restore(after)
    assert_same(jax.tree.map(np.asarray, back.state), want)


def test_numpy_leaf_changed_after_saving(tmp_path):
    state = {"x": np.arange(1 << 16)}
    with Checkpointer(tmp_path) as saver:
        saver.save(1, state)
        state["x"][:] = -1
        assert_same(saver.restore(state).state, {"x": np.arange(1 << 16)})


def test_restores_onto_other_numbers_of_devices(tmp_path):
    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip("needs 8 devices")

    def place(tree, mesh):
        return jax.device_put(tree, {"w": named(mesh, "d"), "key": named(mesh, "d"), "r": named(mesh)})

    plain = {
        "w": jax.random.normal(jax.random.key(0), (8, 6)).astype(jnp.bfloat16),
        "key": jax.random.split(jax.random.key(1), 8),
        "r": jnp.arange(5),
    }
    directory, state = tmp_path / "8", place(plain, make_mesh({"d": 8}))
    for step, count in enumerate([2, 1, 4, 8]):
        with Checkpointer(directory) as saver:
            saver.save(step, state)
            like = place(plain, make_mesh({"d": count}, devices[-count:]))
            state = saver.restore(like).state
        assert_same(state, plain)
        assert state["w"].sharding == like["w"].sharding and len(state["w"].sharding.device_set) == count


def test_mismatch_lists_every_differing_path(tmp_path):
    with Checkpointer(tmp_path) as saver:
        saver.save(1, {"a": jnp.zeros(2), "b": [jnp.zeros(3), None], "c": {}, "gone": jnp.zeros(1)})
        like = {"a": jnp.zeros(2, jnp.bfloat16), "b": [jnp.zeros(4), jnp.zeros(1)], "c": {"new": jnp.zeros(())}}
        with pytest.raises(CheckpointError) as caught:
            saver.restore(like)
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "a: checkpoint float32[2], like bfloat16[2]",
        "b/0: checkpoint float32[3], like float32[4]",
        "b/1: checkpoint None, like float32[1]",
        "c: checkpoint empty, like absent",
        "gone: checkpoint float32[1], like absent",
        "c/new: checkpoint absent, like float32[]",
    ]


def test_key_implementations_are_not_confused(tmp_path):
    with Checkpointer(tmp_path) as saver:
        saver.save(1, {"k": jax.random.key(0)})
        with pytest.raises(CheckpointError, match=r"k: checkpoint key<fry>\[\], like key<rbg>\[\]"):
            saver.restore({"k": jax.random.key(0, impl="rbg")})


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)


def garbage(path):
    path.write_bytes(b"\xff{garbage" * 9)


BIGGEST = {"biggest": lambda found: max(found, key=lambda p: p.stat().st_size)}
META = {
    name: lambda found, name=name: next(p for p in found if p.as_posix().endswith(name))
    for name in ("meta/metadata", "state/_METADATA", "state/manifest.ocdbt")
}


@pytest.mark.parametrize("how", [truncate, flip, garbage, Path.unlink], ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", ["biggest", *META])
def test_damaged_newest_falls_back_and_says_so(tmp_path, which, how):
    fill(tmp_path)
    target = (BIGGEST | META)[which](files(tmp_path, 3))
    how(target)
    messages = []
    with Checkpointer(tmp_path, on_message=messages.append) as saver:
        back = saver.restore(small(0))
        if which == "state/_METADATA" and how is Path.unlink and back.step == 3:
            assert_same(back.state, small(3))  # orbax may do without it
            return
        assert back.step == 2 and back.meta == {"step": 2}
        assert_same(back.state, small(2))
        assert len(messages) == 1 and "step 3" in messages[0] and "using step 2" in messages[0]
        assert saver.latest() == 2
        with pytest.raises(CheckpointError, match="step 3"):
            saver.restore(small(0), step=3)


def test_no_single_damage_goes_unnoticed(tmp_path):
    fill(tmp_path, steps=(1,))
    for path in files(tmp_path, 1):
        raw = path.read_bytes()
        for how in (truncate, flip, Path.unlink):
            how(path)
            with Checkpointer(tmp_path, on_message=lambda _: None) as saver:
                try:
                    back = saver.restore(small(0))
                except CheckpointError as error:
                    assert "step 1" in str(error)
                else:
                    assert_same(back.state, small(1))  # a file that the values do not depend on
            path.write_bytes(raw)


def test_continues_after_a_damaged_newest(tmp_path):
    fill(tmp_path)
    truncate(BIGGEST["biggest"](files(tmp_path, 3)))
    messages = []
    with Checkpointer(tmp_path, keep=3, on_message=messages.append) as saver:
        assert saver.restore(small(0)).step == 2
        saver.save(3, small(30))  # the damaged step is out of the way
        saver.wait()
        assert saver.latest() == 3
    with Checkpointer(tmp_path, keep=3, on_message=messages.append) as saver:
        assert_same(saver.restore(small(0)).state, small(30))
        assert_same(saver.restore(small(0), step=1).state, small(1))
    assert len(messages) == 1


def test_all_damaged_is_an_error_naming_each(tmp_path):
    fill(tmp_path, steps=(1, 2))
    for step in (1, 2):
        garbage(BIGGEST["biggest"](files(tmp_path, step)))
    quiet = Checkpointer(tmp_path, on_message=lambda _: None)
    with quiet as saver, pytest.raises(CheckpointError, match=r"(?s)no checkpoint.*step 2: .*step 1: "):
        saver.restore(small(0))


def test_default_message_is_a_warning(tmp_path):
    fill(tmp_path, steps=(1, 2))
    garbage(BIGGEST["biggest"](files(tmp_path, 2)))
    with Checkpointer(tmp_path) as saver, pytest.warns(UserWarning, match="using step 1"):
        saver.restore(small(0))


def test_saving_into_the_past_needs_force(tmp_path):
    fill(tmp_path)
    with Checkpointer(tmp_path) as saver:
        for step in (2, 3):
            with pytest.raises(CheckpointError, match=f"cannot save step {step}: .* holds step 3"):
                saver.save(step, small(0))
        saver.save(2, small(20), force=True)
        saver.wait()
        assert saver.latest() == 2
        assert_same(saver.restore(small(0)).state, small(20))


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="keep must be >= 1, got 0"):
        Checkpointer(tmp_path, keep=0)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"directory must be a folder, got the file .*/file"):
        Checkpointer(tmp_path / "file")
    (tmp_path / "file").unlink()
    with Checkpointer(tmp_path) as saver:
        with pytest.raises(TypeError, match="a/1 must be an array, got int"):
            saver.save(1, {"a": [jnp.zeros(1), 3]})
        with pytest.raises(TypeError, match="meta must be JSON"):
            saver.save(1, small(0), {"x": object()})
        with pytest.raises(ValueError, match="step must be >= 0, got -1"):
            saver.save(-1, small(0))
        with pytest.raises(ValueError, match="two leaves of the state have the path 'a/b'"):
            saver.save(1, {"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)})
        assert saver.latest() is None


def test_killed_while_saving_leaves_the_previous_one(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys
        import jax.numpy as jnp
        from orbax.checkpoint._src.path import atomicity
        from jaxlab.core.checkpoint import Checkpointer
        saver = Checkpointer(sys.argv[1])
        saver.save(1, {"w": jnp.arange(4.0)})
        saver.wait()
        async def die(self):
            os.kill(os.getpid(), signal.SIGKILL)  # every file is written, the rename has not happened
        atomicity.AtomicRenameTemporaryPath.finalize = die
        saver.save(2, {"w": jnp.arange(4.0) + 1})
        saver.wait()
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, env=ENV)
    assert done.returncode == -signal.SIGKILL
    assert any(p.name.startswith("2.") for p in tmp_path.iterdir()), "the kill came too early: this test shows nothing"
    messages = []
    with Checkpointer(tmp_path, on_message=messages.append) as saver:
        assert saver.latest() == 1
        assert_same(saver.restore({"w": jnp.zeros(4)}).state, {"w": jnp.arange(4.0)})
        saver.save(2, {"w": jnp.ones(4)})
        assert saver.restore({"w": jnp.zeros(4)}).step == 2
    assert not messages
