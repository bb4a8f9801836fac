"""The one training loop. It knows steps, batches, metrics and hooks, and nothing of models or methods.

`fit` calls a jitted step in order and never waits for the interval it is dispatching: metrics stay on the device and
are fetched one interval late. Steps are counted as done steps: the first step is step 1 in records, errors and hooks,
and a state saved "at step n" has seen the batches 0 .. n-1.
"""

import functools
import itertools
import math
import operator
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from jaxlab.core import mesh, prng
from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.errors import NonFiniteError

StepFn = Callable[[PyTree, PyTree, Key[Array, ""]], tuple[PyTree, dict[str, Any]]]


class FitResult(NamedTuple):
    """What `fit` returns.

    Attributes:
      state: the state after the last step.
      step: number of steps done, counted from the beginning of training.
      history: a record an interval: `step`, the mean of each metric, `steps_per_s`; values returned by hooks join the
        record of their step, or form one of their own where no interval ends.
      seconds: wall-clock time of this call.
    """

    state: PyTree
    step: int
    history: list[dict[str, float]]
    seconds: float


class Loop(NamedTuple):
    """What a hook sees. It must not keep `state`: the next step donates its buffers.

    Attributes:
      step: steps done.
      state: the state after them.
      key: the root key of the run.
      drain: fetches and checks all metrics up to this step; raises `NonFiniteError`.
      writer: the run's writer, or None.
      progress: the run's progress, or None.
      last: whether this is the last call of the run.
    """

    step: int
    state: PyTree
    key: Key[Array, ""]
    drain: Callable[[], None]
    writer: Any
    progress: Any
    last: bool


@runtime_checkable
class Hook(Protocol):
    """Called after step n when n % every == 0, and after the last step if it has a true `at_end`.

    A returned dict of numbers is written under that step. A hook with a method `save(loop)` is also called
    through it when the run is told to stop; one with `last_saved() -> int | None` tells errors where to resume.
    """

    every: int

    def __call__(self, loop: Loop) -> dict[str, float] | None: ...


class _Call:
    def __init__(self, fn: Callable[[Loop], dict[str, Any] | None], every: int, at_end: bool):
        self.every, self.at_end, self._fn = _positive("every", every), at_end, fn

    def __call__(self, loop: Loop) -> dict[str, Any] | None:
        return self._fn(loop)


class _Checkpoint:
    def __init__(self, checkpointer: Checkpointer, every: int, meta: Any, at_end: bool):
        self.every, self.at_end = _positive("every", every), at_end
        self._checkpointer, self._meta = checkpointer, meta

    def __call__(self, loop: Loop) -> None:
        loop.drain()  # a state whose metrics are not finite must not replace the last good one
        if self._checkpointer.latest() != loop.step:
            meta = self._meta(loop) if callable(self._meta) else self._meta
            self._checkpointer.save(loop.step, loop.state, meta)
        if loop.last:
            self._checkpointer.wait()

    def save(self, loop: Loop) -> None:
        self(loop)

    def last_saved(self) -> int | None:
        return self._checkpointer.latest()


def evaluate(
    eval_fn: Callable[[PyTree], dict[str, Any]], every: int, name: str = "eval", *, at_end: bool = True
) -> Hook:
    """A hook that writes `name/metric` for every metric of `eval_fn(state)` (arrays are averaged over elements).

    Raises:
      ValueError: when `every` < 1.
    """

    def run(loop: Loop) -> dict[str, float]:
        return {f"{name}/{k}": float(np.mean(v)) for k, v in mesh.to_host(eval_fn(loop.state)).items()}

    return _Call(run, every, at_end)


def checkpoint(
    checkpointer: Checkpointer,
    every: int,
    meta: dict[str, Any] | Callable[[Loop], dict[str, Any]] | None = None,
    *,
    at_end: bool = True,
) -> Hook:
    """A hook that saves the state, after checking that every metric up to it is finite.

    Args:
      checkpointer: where to.
      every: steps between checkpoints.
      meta: dict stored with the checkpoint, or a function of the `Loop` that makes it.
      at_end: whether to save after the last step, too.

    Raises:
      ValueError: when `every` < 1.
    """
    return _Checkpoint(checkpointer, every, meta, at_end)


def call_every(fn: Callable[[Loop], dict[str, Any] | None], every: int, *, at_end: bool = False) -> Hook:
    """A hook that calls `fn(loop)`; numbers it returns are written under that step.

    Raises:
      ValueError: when `every` < 1.
    """
    return _Call(fn, every, at_end)


def fit(
    state: PyTree,
    step_fn: StepFn,
    batches: Callable[[int], PyTree],
    *,
    steps: int,
    key: Key[Array, ""],
    start: int = 0,
    log_every: int = 10,
    hooks: Sequence[Hook] = (),
    writer: Any = None,
    progress: Any = None,
    prefetch: int = 2,
    resume_command: str = "",
) -> FitResult:
    """Runs steps `start` .. `steps - 1`: `state, metrics = step_fn(state, batches(i), prng.step_key(key, i))`.

    SIGTERM or Ctrl-C ends the run after the current step: the hooks' `save` is called, `progress` gets a line that says
    how to resume, and `SystemExit(0)` is raised; a second Ctrl-C aborts at once. With several processes they agree on
    the step through an all-reduce at each interval. Handlers are installed in the main thread only.

    Args:
      state: pytree of arrays; consumed when `step_fn` donates it.
      step_fn: the jitted step; its metrics are numbers or arrays (averaged over elements in the records).
      batches: i -> batch of step i, a pure function of i, called in a background thread.
      steps: number of steps of the whole run, those before `start` included.
      key: typed root key of the run.
      start: steps done before, as `Checkpointer.restore` said.
      log_every: steps in an interval.
      hooks: called in this order after a step; an evaluation before the checkpoint keeps a state that fails it unsaved.
      writer: gets `write(step, scalars)`, an interval late.
      progress: gets `update(done, fields)` per interval, and `line(text)`.
      prefetch: batches prepared ahead; 0 makes them in the loop's own thread.
      resume_command: what a user types to go on, for the line above.

    Returns:
      The final state, the step, the records and the time. Without steps to do it returns at once.

    Raises:
      ValueError: when a count is out of range. TypeError: when `step_fn` returns something else, or `key` is untyped.
      NonFiniteError: when a metric of any step is NaN or infinite; the last checkpoint stays as it is.
      SystemExit: after a signal.

    >>> step = jax.jit(lambda s, b, key: (s + b, {"loss": s}))
    >>> fit(0.0, step, float, steps=4, key=jax.random.key(0), log_every=2).state.item()
    6.0
    """
    if not 0 <= start <= steps:
        raise ValueError(f"start must be in [0, steps={steps}], got {start}")
    if prefetch < 0:
        raise ValueError(f"prefetch must be >= 0, got {prefetch}")
    _positive("log_every", log_every)
    if not (isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()):
        raise TypeError(f"key must be one typed key such as jax.random.key(0), got {key!r}")
    for hook in hooks:
        _positive(f"every of hook {type(hook).__name__}", hook.every)
    began = time.perf_counter()
    if start == steps:
        return FitResult(state, steps, [], 0.0)

    log = _Log(start, steps, log_every, hooks, writer, progress)
    fold, n = jax.jit(prng.step_key), start
    saving = [hook for hook in hooks if hasattr(hook, "save")]
    with _Batches(batches, start, steps, prefetch) as source, _Stop() as stop:
        for batch in source:
            out = step_fn(state, batch, fold(key, np.uint32(n)))
            if not (isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict)):
                raise TypeError(f"step_fn must return (state, dict of metrics), got {_shape_of(out)}")
            state, metrics = out
            del out, batch  # no reference to old buffers survives into the next step
            n += 1
            log.add(n, metrics)
            if stop.agreed(n % log_every == 0):
                log.flush(n)
                loop = Loop(n, state, key, functools.partial(log.drain, n), writer, progress, True)
                for hook in saving:
                    hook.save(loop)
                if progress is not None:
                    progress.line(_farewell(stop.name, n, bool(saving), resume_command))
                raise SystemExit(0)
            due = [h for h in hooks if n % h.every == 0 or (n == steps and getattr(h, "at_end", False))]
            if due:
                loop = Loop(n, state, key, functools.partial(log.drain, n), writer, progress, n == steps)
                for hook in due:
                    values = hook(loop)
                    if values:
                        log.extra(n, values)
                del loop
            if n % log_every == 0 and n < steps:
                log.boundary(n)
        log.drain(n)
    return FitResult(state, n, log.history, time.perf_counter() - began)


def _positive(name: str, value: int) -> int:
    if operator.index(value) < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value}")
    return value


def _shape_of(out: Any) -> str:
    return f"a tuple of {', '.join(type(x).__name__ for x in out)}" if isinstance(out, tuple) else type(out).__name__


def _farewell(name: str, step: int, saved: bool, command: str) -> str:
    if not saved:
        return f"stopped by {name} at step {step}; nothing was saved (there is no checkpoint hook)"
    return (
        f"stopped by {name} at step {step}; resume with: {command or f'start={step} and the checkpoint of this step'}"
    )


class _Log:
    """Metrics on their way from the device to the records."""

    def __init__(self, start: int, steps: int, log_every: int, hooks: Sequence[Hook], writer: Any, progress: Any):
        self.history: list[dict[str, float]] = []
        self._steps, self._log_every, self._hooks = steps, log_every, hooks
        self._writer, self._progress = writer, progress
        self._device: deque[tuple[int, dict[str, Any]]] = deque()
        self._rows: list[dict[str, float]] = []
        self._mark = (time.perf_counter(), start)
        self._local = jax.process_count() == 1
        self._copies = self._local and jax.default_backend() != "cpu"  # on CPU there is nothing to copy

    def add(self, n: int, metrics: dict[str, Any]) -> None:
        self._device.append((n, metrics))

    def boundary(self, n: int) -> None:
        """At the end of an interval: starts copying it to the host, and fetches the one before."""
        if self._copies:
            for _, metrics in itertools.islice(self._device, max(0, len(self._device) - self._log_every), None):
                for value in metrics.values():
                    if isinstance(value, jax.Array):
                        value.copy_to_host_async()
        self._fetch(n - self._log_every)

    def drain(self, n: int) -> None:
        """Fetches and checks everything up to step n."""
        self._fetch(n)

    def extra(self, n: int, values: dict[str, Any]) -> None:
        """Records what a hook returned after step n."""
        self.drain(n)  # keeps the written steps in order; the hook has waited for this step already
        values = {name: float(value) for name, value in values.items()}
        for name, value in values.items():
            self._check(n, name, value)
        if self.history and self.history[-1]["step"] == n:
            self.history[-1].update(values)
        else:
            self.history.append({"step": n, **values})
        if self._writer is not None:
            self._writer.write(n, values)

    def flush(self, n: int) -> None:
        """Like `drain`, and ends the unfinished interval with a record, so that stopping loses nothing."""
        self._fetch(n, last=n)

    def _fetch(self, upto: int, last: int | None = None) -> None:
        taken = []
        while self._device and self._device[0][0] <= upto:
            taken.append(self._device.popleft())
        records = []
        rows = [metrics for _, metrics in taken]
        for (n, _), metrics in zip(taken, rows if self._local else mesh.to_host(rows), strict=True):
            self._rows.append({name: self._check(n, name, value) for name, value in metrics.items()})
            if n % self._log_every == 0 or n in (self._steps, last):
                records.append({"step": n, **_means(self._rows)})
                self._rows = []
        if not records:
            return
        # Steps that finished since the last record, whether or not they have been fetched: right when the device is
        # the slower side and when the host is.
        now, done = time.perf_counter(), upto
        for n, metrics in reversed(self._device):
            if all(value.is_ready() for value in metrics.values() if isinstance(value, jax.Array)):
                done = n
                break
        rate = (done - self._mark[1]) / max(now - self._mark[0], 1e-9)
        self._mark = (now, done)
        for record in records:
            record["steps_per_s"] = rate
            self.history.append(record)
            fields = {name: value for name, value in record.items() if name != "step"}
            if self._writer is not None:
                self._writer.write(record["step"], fields)
            if self._progress is not None:
                self._progress.update(record["step"], fields)

    def _check(self, n: int, name: str, value: Any) -> float:
        """The mean over elements; raises when any of them is not finite."""
        value = np.asarray(value)
        if value.size == 1 and math.isfinite(number := float(value.item())):
            return number
        if value.size == 0:
            raise ValueError(f"metric {name!r} of step {n} is empty: its shape is {list(value.shape)}")
        bad = value[~np.isfinite(value)]
        if bad.size:
            saved = [
                step for hook in self._hooks if hasattr(hook, "last_saved") and (step := hook.last_saved()) is not None
            ]
            hint = f"the last good checkpoint is of step {max(saved)}" if saved else "no checkpoint was saved"
            raise NonFiniteError(n, name, float(bad[0]), hint)
        return float(np.mean(value, dtype=np.float64))


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the steps that reported it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


class _Batches:
    """Iterates over batches `start` .. `stop - 1`, made up to `ahead` in advance by a thread of its own."""

    def __init__(self, make: Callable[[int], PyTree], start: int, stop: int, ahead: int):
        self._make, self._range, self._ahead = make, range(start, stop), ahead
        self._ready: deque[PyTree] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="jaxlab-prefetch", daemon=True) if ahead else None

    def __enter__(self) -> "_Batches":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        # An abort does not wait for a batch in the making; the thread ends by itself after it.
        if self._thread is not None and not (kind is not None and issubclass(kind, KeyboardInterrupt)):
            self._thread.join()

    def __iter__(self) -> Iterator[PyTree]:
        for i in self._range:
            yield self._next() if self._thread is not None else self._one(i)

    def _one(self, i: int) -> PyTree:
        try:
            return self._make(i)
        except Exception as error:
            error.add_note(f"raised by batches({i})")
            raise

    def _next(self) -> PyTree:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None)
            if not self._ready:
                raise self._error
            batch = self._ready.popleft()
            # Each wake-up costs both threads a handover of the interpreter lock, so the maker refills in runs.
            if len(self._ready) <= (self._ahead - 1) // 2:
                self._changed.notify_all()
            return batch

    def _work(self) -> None:
        try:
            for i in self._range:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
                    if self._closed:
                        return
                batch = self._one(i)
                with self._changed:
                    if self._closed:
                        return
                    self._ready.append(batch)
                    self._changed.notify_all()
                del batch  # the queue alone keeps it alive
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


class _Stop:
    """Turns SIGTERM and the first SIGINT into a request that all processes act upon at the same step."""

    def __init__(self) -> None:
        self.name = ""
        self._signal: int | None = None
        self._previous: dict[int, Any] = {}
        self._vote: Array | None = None

    def __enter__(self) -> "_Stop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # None: installed by C code, which Python cannot put back. Ignored: the parent wants it ignored (nohup).
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._signal is not None and kind is None:
            signal.raise_signal(self._signal)  # it came too late for the loop: the caller's handler decides

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal, self.name = number, signal.Signals(number).name

    def agreed(self, boundary: bool) -> bool:
        """Whether to stop now. With several processes the answer comes an interval after the question."""
        if jax.process_count() == 1:
            return self._signal is not None
        if not boundary:
            return False
        asked, self._vote = self._vote, _sum_over_processes(self._signal is not None)
        if asked is None or int(np.asarray(asked.addressable_data(0))) == 0:
            return False
        self.name = self.name or "a signal to another process"
        return True


def _sum_over_processes(flag: bool) -> Array:
    everyone = mesh.make_mesh({"device": jax.device_count()})
    local = np.full(jax.local_device_count(), flag, np.int32)
    votes = jax.make_array_from_process_local_data(mesh.named(everyone, "device"), local)
    return jax.jit(jnp.sum, out_shardings=mesh.named(everyone))(votes)
