"""Fair timing on a machine that others use too: several callables in one process, taken in turn, compared by ratios.

Times of one run are comparable with each other, not with those of another run: every repetition visits all callables,
so that a slow moment hits each of them, and the order turns by one each time. Three numbers sum up a comparison: the
ratio of the fastest times, the median of the ratios within a repetition, and the quartiles of those. CPU time, of all
threads of this process, is measured beside: where other processes compete for the cores it is the steadier number.
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long one callable took, a number a repetition.

    Attributes:
      name: what was timed.
      seconds: wall-clock time.
      cpu_seconds: CPU time of all threads of this process; on an accelerator, that of the host.

    >>> Timing("f", (0.3, 0.1, 0.2), (0.2, 0.1, 0.1)).best
    0.1
    """

    name: str
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        """The shortest wall-clock time, in seconds: what the machine can do when nothing disturbs it."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The median wall-clock time, in seconds."""
        return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One callable's time over another's.

    Attributes:
      best: ratio of the shortest times.
      median: median of the ratios within each repetition.
      low, high: first and third quartile of those ratios.
      cpu: ratio of the smallest CPU times.
    """

    best: float
    median: float
    low: float
    high: float
    cpu: float


def measure(calls: Mapping[str, Callable[[], Any]], *, repeats: int = 7, warmup: int = 1) -> dict[str, Timing]:
    """Times callables in turn, each until its result is ready.

    Args:
      calls: by name; each returns a pytree of arrays, or None. One that donates its state is made with `stepper`.
      repeats: timed calls of each, >= 1.
      warmup: calls of each before that, which compile, >= 0.

    Returns:
      One `Timing` a name, in the order given.

    Raises:
      ValueError: for no callables, `repeats < 1` or `warmup < 0`.

    >>> timings = measure({"sum": lambda: jnp.arange(8).sum()}, repeats=3)
    >>> len(timings["sum"].seconds)
    3
    """
    if not calls or repeats < 1 or warmup < 0:
        raise ValueError(
            "need at least one callable, repeats >= 1 and warmup >= 0, "
            f"got {list(calls)}, repeats={repeats}, warmup={warmup}"
        )
    names = list(calls)
    for name in names:
        for _ in range(warmup):
            jax.block_until_ready(calls[name]())
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for i in range(repeats):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            start, cpu_start = time.perf_counter(), time.process_time()
            jax.block_until_ready(calls[name]())
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    return {name: Timing(name, tuple(wall[name]), tuple(cpu[name])) for name in names}


def ratio(a: Timing, b: Timing) -> Ratio:
    """How much longer `a` took than `b`; both from one `measure`.

    Raises:
      ValueError: when they have different numbers of repetitions.

    >>> ratio(Timing("a", (2.0, 4.0, 9.0), (1.0, 1.0, 1.0)), Timing("b", (1.0, 4.0, 3.0), (2.0, 2.0, 2.0)))
    Ratio(best=2.0, median=2.0, low=1.5, high=2.5, cpu=0.5)
    """
    if len(a.seconds) != len(b.seconds):
        raise ValueError(f"{a.name!r} has {len(a.seconds)} repetitions and {b.name!r} {len(b.seconds)}: not one run")
    paired = [x / y for x, y in zip(a.seconds, b.seconds, strict=True)]
    low, median, high = statistics.quantiles(paired, n=4, method="inclusive") if len(paired) > 1 else paired * 3
    cpu = min(a.cpu_seconds) / max(min(b.cpu_seconds), 1e-9)  # a clock may not tick during a short call
    return Ratio(a.best / b.best, median, low, high, cpu)


def stepper(f: Callable[..., Any], state: PyTree, *args: Any) -> Callable[[], Any]:
    """A callable without arguments that runs `state, out = f(state, *args)` and keeps the state, for a donating `f`.

    >>> call = stepper(lambda state, x: (state + x, state), 0, 2)
    >>> call(), call()
    ((2, 0), (4, 2))
    """
    box = [state]

    def call() -> Any:
        out = f(box[0], *args)
        box[0] = out[0]
        return out

    return call


def matmul_peak(dtype: Any = "float32", sizes: Sequence[int] = (512, 1024, 2048), *, repeats: int = 5) -> float:
    """The most floating-point operations a second that a square matrix product reaches here, on the default device.

    `max over n of 2 n^3 / (shortest time of A @ B)`: what is left of the peak in the data sheet after this compiler,
    this number of cores and this load.

    Args:
      dtype: of the operands.
      sizes: values of n.
      repeats: timed products of each size.

    Returns:
      FLOP/s.
    """
    product = jax.jit(lambda a: a @ a)
    calls = {str(n): functools.partial(product, jnp.full((n, n), 1 / n, dtype)) for n in sizes}
    timings = measure(calls, repeats=repeats)
    return max(2 * n**3 / timings[str(n)].best for n in sizes)


@contextlib.contextmanager
def count_compilations() -> Iterator[list[float]]:
    """Collects the seconds of every program that XLA compiles inside the `with` block, read from a cache or not.

    >>> with count_compilations() as compiled:
    ...     f = jax.jit(lambda x: 3 * x + 1)
    ...     _ = f(1.0), f(2.0)
    >>> len(compiled)
    1
    """
    found: list[float] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == _COMPILED:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
