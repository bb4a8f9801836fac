"""Timing: order of the calls, warm-up, ratios, donated state, and the counter of compilations."""

import time

import jax
import jax.numpy as jnp
import pytest

from jaxlab.core.timing import Timing, count_compilations, matmul_peak, measure, ratio, stepper


def test_calls_are_interleaved_after_the_warm_up() -> None:
    order: list[str] = []
    timings = measure({name: lambda name=name: order.append(name) for name in "abc"}, repeats=3, warmup=2)
    assert order[:6] == list("aabbcc")
    assert order[6:] == list("abcbcacab")  # every callable is first once
    assert list(timings) == list("abc")
    assert all(len(t.seconds) == len(t.cpu_seconds) == 3 for t in timings.values())


def test_wall_and_cpu_time_are_told_apart() -> None:
    def work() -> None:
        stop = time.process_time() + 0.01
        while time.process_time() < stop:
            pass

    timings = measure({"wait": lambda: time.sleep(0.02), "work": work}, repeats=2, warmup=0)
    assert timings["wait"].best >= 0.02
    assert min(timings["wait"].cpu_seconds) < 0.01 <= min(timings["work"].cpu_seconds)


def test_a_call_ends_when_its_result_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    measure({"f": lambda: "result"}, repeats=2, warmup=1)
    assert waited == ["result"] * 3


def test_ratio() -> None:
    a = Timing("a", (2.0, 4.0, 9.0, 8.0, 5.0), (3.0, 6.0, 4.0, 5.0, 9.0))
    b = Timing("b", (1.0, 4.0, 3.0, 2.0, 5.0), (2.0, 2.0, 3.0, 9.0, 9.0))
    r = ratio(a, b)  # within the repetitions: 2, 1, 3, 4, 1
    assert (r.best, r.median, r.low, r.high, r.cpu) == (2.0, 2.0, 1.0, 3.0, 1.5)
    assert ratio(a, a).high == ratio(a, a).low == 1.0
    one = ratio(Timing("x", (3.0,), (1.0,)), Timing("y", (2.0,), (0.0,)))
    assert (one.low, one.median, one.high) == (1.5, 1.5, 1.5)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="at least one callable"):
        measure({})
    with pytest.raises(ValueError, match="repeats=0"):
        measure({"f": lambda: None}, repeats=0)
    with pytest.raises(ValueError, match="warmup=-1"):
        measure({"f": lambda: None}, warmup=-1)
    with pytest.raises(ValueError, match="'a' has 1 repetitions and 'b' 2"):
        ratio(Timing("a", (1.0,), (1.0,)), Timing("b", (1.0, 1.0), (1.0, 1.0)))


def test_stepper_passes_on_a_donated_state() -> None:
    add = jax.jit(lambda state, x: (state + x, 2 * state), donate_argnums=0)
    first = jnp.zeros(3)
    call = stepper(add, first, 1.0)
    for _ in range(3):
        state, out = call()
    assert first.is_deleted()
    assert (float(state[0]), float(out[0])) == (3.0, 4.0)


def test_matmul_peak_is_the_best_size() -> None:
    assert matmul_peak(sizes=(8, 64), repeats=3) > 1e6
    assert matmul_peak("bfloat16", sizes=(16,), repeats=1) > 0


def test_compilations_are_counted_also_when_the_cache_has_them() -> None:
    x, y = jnp.ones(5), jnp.ones(6)
    with count_compilations() as compiled:
        f = jax.jit(lambda a: jnp.sin(a) * 2.5)
        f(x)
        assert len(compiled) == 1
        f(x)
        assert len(compiled) == 1
        f(y)
        assert len(compiled) == 2
        jax.clear_caches()
        f(y)
        assert len(compiled) == 3
    jax.jit(lambda a: jnp.cos(a) * 2.5)(x)
    assert len(compiled) == 3  # the listener is gone
