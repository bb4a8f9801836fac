import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.core import prng, train
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.errors import NonFiniteError

# New processes import the package from where this one does.
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
KEY = jax.random.key(5)


class Recorder:
    """Writer and progress in one."""

    def __init__(self):
        self.rows, self.lines, self.updates = [], [], []

    def write(self, step, scalars):
        self.rows.append((step, dict(scalars)))

    def update(self, done, fields=None):
        self.updates.append(done)

    def line(self, text):
        self.lines.append(text)


@jax.jit
def plus(state, batch, key):
    return {"sum": state["sum"] + batch, "noise": state["noise"] + jax.random.normal(key)}, {"loss": batch}


donating = jax.jit(plus.__wrapped__, donate_argnums=0)


def zeros():
    return {"sum": jnp.float32(0), "noise": jnp.float32(0)}


def batch_of(i):
    return np.float32(i)


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "jaxlab-prefetch"]


@pytest.fixture(autouse=True)
def no_threads_and_same_handlers():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert not prefetch_threads()
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_equals_a_plain_loop_bit_for_bit(prefetch):
    state = zeros()
    for i in range(7):
        state, _ = plus(state, batch_of(i), prng.step_key(KEY, i))
    got = train.fit(zeros(), donating, batch_of, steps=7, key=KEY, prefetch=prefetch, log_every=3)
    assert got.step == 7 and jax.tree.map(float, got.state) == jax.tree.map(float, state)


def test_records_are_means_over_elements_then_steps():
    writer = Recorder()
    step = jax.jit(lambda s, b, k: (s, {"loss": b * jnp.ones((2, 3)) + jnp.arange(3), "i": jnp.int32(b)}))
    out = train.fit(0, step, batch_of, steps=7, key=KEY, log_every=3, writer=writer, progress=writer)
    assert [r["step"] for r in out.history] == [3, 6, 7]
    assert [r["loss"] for r in out.history] == [2, 5, 7]
    assert [r["i"] for r in out.history] == [1, 4, 6]
    assert all(set(r) == {"step", "loss", "i", "steps_per_s"} and r["steps_per_s"] > 0 for r in out.history)
    assert writer.rows == [(r["step"], {k: v for k, v in r.items() if k != "step"}) for r in out.history]
    assert writer.updates == [3, 6, 7] and out.seconds > 0


class Lazy:
    """A metric that notes after which dispatched step it was fetched, and fails when fetched too soon."""

    def __init__(self, made, log, clock):
        self.made, self.log, self.clock = made, log, clock

    def __array__(self, dtype=None, copy=None):
        self.log.append((self.made, self.clock[0]))
        return np.array(1, np.float32)


def test_metrics_are_fetched_one_interval_late():
    log, clock = [], [0]

    def step(state, batch, key):
        clock[0] += 1
        return state, {"loss": Lazy(clock[0], log, clock)}

    train.fit(0, step, batch_of, steps=12, key=KEY, log_every=4)
    fetched_at = {made: max(at for m, at in log if m == made) for made in range(1, 13)}
    assert fetched_at == {n: 8 if n <= 4 else 12 for n in range(1, 13)}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [1, 5, 6, 8])
def test_non_finite_metric_names_its_step(bad, at):
    step = jax.jit(
        lambda s, b, k: (s, {"ok": b, "norms": jnp.where(b == at - 1, bad, jnp.ones((2, 2))).at[0].set(0.0)})
    )
    with pytest.raises(NonFiniteError, match=f"'norms' is {bad} at step {at}; no checkpoint was saved") as caught:
        train.fit(0, step, batch_of, steps=8, key=KEY, log_every=3)
    assert (caught.value.step, caught.value.metric) == (at, "norms") and not np.isfinite(caught.value.value)


def test_a_bad_state_is_never_saved_and_the_error_names_the_last_good_one(tmp_path):
    step = jax.jit(lambda s, b, k: (s + b, {"loss": jnp.where(b == 5, jnp.nan, 1.0)}))
    with Checkpointer(tmp_path) as saver:
        with pytest.raises(NonFiniteError, match="step 6; the last good checkpoint is of step 4"):
            train.fit(
                jnp.float32(0), step, batch_of, steps=20, key=KEY, log_every=10, hooks=[train.checkpoint(saver, 2)]
            )
        assert saver.latest() == 4


def test_hooks_run_when_due_in_order_and_at_the_end():
    calls, writer = [], Recorder()

    def note(name):
        return lambda loop: calls.append((loop.step, name, loop.last, float(loop.state["sum"])))

    hooks = [
        train.call_every(note("a"), 2),
        train.call_every(note("b"), 4, at_end=True),
        train.evaluate(lambda s: {"sum": s["sum"], "pair": jnp.array([1.0, 3.0])}, 3, at_end=False),
    ]
    out = train.fit(zeros(), donating, batch_of, steps=5, key=KEY, log_every=2, hooks=hooks, writer=writer)
    assert calls == [(2, "a", False, 1), (4, "a", False, 6), (4, "b", False, 6), (5, "b", True, 10)]
    assert [step for step, _ in writer.rows] == [2, 3, 4, 5]
    assert writer.rows[1] == (3, {"eval/sum": 3.0, "eval/pair": 2.0})
    assert {"step": 3, "eval/sum": 3.0, "eval/pair": 2.0} in out.history


def test_evaluation_joins_the_record_of_its_step_and_is_checked():
    out = train.fit(zeros(), plus, batch_of, steps=4, key=KEY, log_every=2, hooks=[train.evaluate(lambda s: s, 2, "e")])
    assert [r["step"] for r in out.history] == [2, 4]
    assert [r["e/sum"] for r in out.history] == [1, 6] and all("loss" in r for r in out.history)
    with pytest.raises(NonFiniteError, match="'eval/x' is nan at step 2"):
        train.fit(zeros(), plus, batch_of, steps=4, key=KEY, hooks=[train.evaluate(lambda s: {"x": jnp.nan}, 2)])


def test_resume_is_bit_for_bit(tmp_path):
    whole = train.fit(zeros(), donating, batch_of, steps=9, key=KEY, log_every=3)
    with Checkpointer(tmp_path) as saver:
        train.fit(zeros(), donating, batch_of, steps=4, key=KEY, hooks=[train.checkpoint(saver, 2, {"seed": 5})])
        back = saver.restore(zeros())
        assert (back.step, back.meta) == (4, {"seed": 5})
        rest = train.fit(back.state, donating, batch_of, steps=9, start=back.step, key=KEY, log_every=3)
    assert jax.tree.map(float, rest.state) == jax.tree.map(float, whole.state)
    assert [r["step"] for r in rest.history] == [6, 9]
    assert rest.history[1]["loss"] == whole.history[2]["loss"]


def test_nothing_to_do_returns_at_once():
    def forbidden(*_):
        raise AssertionError("must not be called")

    out = train.fit("state", forbidden, forbidden, steps=3, start=3, key=KEY)
    assert out == ("state", 3, [], 0.0)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_batches_reaches_the_loop_after_the_steps_before_it(prefetch):
    done = []

    def batches(i):
        if i == 3:
            raise KeyError("no such document")
        return batch_of(i)

    def step(state, batch, key):
        done.append(batch)
        return state, {}

    with pytest.raises(KeyError, match="no such document") as caught:
        train.fit(0, step, batches, steps=9, key=KEY, prefetch=prefetch)
    assert done == [0, 1, 2] and caught.value.__notes__ == ["raised by batches(3)"]


def test_prefetch_is_bounded_and_drops_used_batches():
    made, alive = [], weakref.WeakSet()

    def batches(i):
        made.append(i)
        batch = np.full(3, i)
        alive.add(Box := type("Box", (), {})())
        Box.array = batch
        return Box

    def step(state, batch, key):
        n = int(batch.array[0])
        assert len(made) <= n + 1 + 2 + 1 and len(alive) <= 1 + 2 + 1
        return state, {"loss": 1.0}

    train.fit(0, step, batches, steps=50, key=KEY, prefetch=2)
    assert made == list(range(50)) and not alive


def test_thread_stops_when_the_step_fails():
    def step(state, batch, key):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        train.fit(0, step, batch_of, steps=10**6, key=KEY)
    assert not prefetch_threads()


@pytest.mark.parametrize(
    "changes, error, match",
    [
        ({"steps": 1, "start": 2}, ValueError, r"start must be in \[0, steps=1\], got 2"),
        ({"start": -1}, ValueError, "start must be"),
        ({"log_every": 0}, ValueError, "log_every must be an integer >= 1, got 0"),
        ({"prefetch": -1}, ValueError, "prefetch must be >= 0, got -1"),
    ],
)
def test_bad_arguments(changes, error, match):
    with pytest.raises(error, match=match):
        train.fit(zeros(), plus, batch_of, **{"steps": 3, "key": KEY, **changes})


@pytest.mark.parametrize("out", [0, (0, 1), (0, {}, {}), [0, {}]])
def test_step_fn_must_return_state_and_dict(out):
    with pytest.raises(TypeError, match=r"step_fn must return \(state, dict of metrics\), got"):
        train.fit(0, lambda s, b, k: out, batch_of, steps=3, key=KEY)


def test_hooks_reject_bad_intervals(tmp_path):
    with Checkpointer(tmp_path) as saver:
        for make, what in ((train.evaluate, dict), (train.call_every, dict), (train.checkpoint, saver)):
            with pytest.raises(ValueError, match="every must be an integer >= 1, got 0"):
                make(what, 0)


def kill_at(n, number):
    return train.call_every(lambda loop: os.kill(os.getpid(), number) if loop.step == n else None, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_says_how_to_resume_and_exits_with_0(tmp_path, number):
    out = Recorder()
    with Checkpointer(tmp_path) as saver:
        hooks = [kill_at(3, number), train.checkpoint(saver, 100)]
        with pytest.raises(SystemExit) as caught:
            train.fit(
                zeros(),
                donating,
                batch_of,
                steps=99,
                key=KEY,
                log_every=10,
                hooks=hooks,
                writer=out,
                progress=out,
                resume_command="jaxlab run x --resume",
            )
        back = saver.restore(zeros())
    assert caught.value.code == 0
    assert out.lines == [f"stopped by {signal.Signals(number).name} at step 4; resume with: jaxlab run x --resume"]
    assert back.step == 4 and float(back.state["sum"]) == 6
    assert [step for step, _ in out.rows] == [4] and out.rows[0][1]["loss"] == 1.5


def test_signal_without_checkpoint_hook_says_that_nothing_was_saved():
    out = Recorder()
    with pytest.raises(SystemExit):
        train.fit(zeros(), plus, batch_of, steps=9, key=KEY, hooks=[kill_at(2, signal.SIGTERM)], progress=out)
    assert out.lines == ["stopped by SIGTERM at step 3; nothing was saved (there is no checkpoint hook)"]


def test_signal_does_not_save_a_bad_state(tmp_path):
    step = jax.jit(lambda s, b, k: (s, {"loss": jnp.where(b == 3, jnp.nan, 1.0)}))
    with Checkpointer(tmp_path) as saver:
        with pytest.raises(NonFiniteError):
            hooks = [kill_at(3, signal.SIGTERM), train.checkpoint(saver, 100)]
            train.fit(jnp.int32(0), step, batch_of, steps=99, key=KEY, hooks=hooks)
        assert saver.latest() is None


def test_second_interrupt_aborts_at_once():
    def step(state, batch, key):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        train.fit(0, step, batch_of, steps=9, key=KEY, prefetch=0)


def test_a_signal_after_the_last_step_goes_to_the_callers_handler():
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        train.fit(zeros(), plus, batch_of, steps=3, key=KEY, hooks=[kill_at(3, signal.SIGTERM)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]


def test_runs_outside_the_main_thread():
    result = []
    thread = threading.Thread(target=lambda: result.append(train.fit(zeros(), plus, batch_of, steps=3, key=KEY)))
    thread.start()
    thread.join(60)
    assert result[0].step == 3


def test_sigterm_from_outside_and_resume_in_new_processes(tmp_path):
    script = textwrap.dedent("""
        import sys, types
        import jax, jax.numpy as jnp, numpy as np
        from jaxlab.core import train
        from jaxlab.core.checkpoint import Checkpointer
        step = jax.jit(lambda s, b, k: (s + jax.random.normal(k), {"loss": s}), donate_argnums=0)
        out = types.SimpleNamespace(line=lambda t: print(t, flush=True), update=lambda n, f: print("at", n, flush=True))
        with Checkpointer(sys.argv[1]) as saver:
            back = saver.restore(jnp.float32(0))
            state, start = (back.state, back.step) if back else (jnp.float32(0), 0)
            stop = start + 5 if back else 10**9
            got = train.fit(state, step, np.float32, steps=stop, start=start, key=jax.random.key(0), progress=out,
                            hooks=[train.checkpoint(saver, 10**9)], resume_command="again")
            print("result", got.step, np.float32(got.state).tobytes().hex())
    """)
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENV, text=True) as first:
        assert first.stdout.readline() == "at 10\n"
        first.terminate()
        last = first.stdout.read().splitlines()[-1]
        assert first.wait(60) == 0
    assert last.endswith("; resume with: again")
    second = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=ENV, check=True
    ).stdout.splitlines()[-1]
    _, step, bits = second.split()
    state = jnp.float32(0)
    fold = jax.jit(lambda s, i: s + jax.random.normal(prng.step_key(jax.random.key(0), i)))
    for i in range(int(step)):
        state = fold(state, np.uint32(i))
    assert np.float32(state).tobytes().hex() == bits
