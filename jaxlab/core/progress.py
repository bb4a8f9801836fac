"""Progress: one line with a bar on a terminal, plain lines elsewhere. The only place of the library that prints."""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, SupportsFloat, runtime_checkable

_WINDOW = 20  # updates over which the rate is measured: recent enough to follow a change, long enough to be steady
_BAR = 24  # widest bar, characters


@runtime_checkable
class Stream(Protocol):
    """What is asked of an output stream; every text file has it."""

    def write(self, text: str, /) -> Any:
        """Adds text."""

    def flush(self) -> Any:
        """Hands the text on."""

    def isatty(self) -> bool:
        """Whether a person sees it on a terminal."""


def format_duration(seconds: SupportsFloat) -> str:
    """A time span for people: `7s`, `3:07`, `2:03:04`, `1d 02:03:04`.

    Args:
      seconds: a finite number of seconds, >= 0; rounded to whole seconds.

    Raises:
      ValueError: for a negative or non-finite number.

    >>> [format_duration(s) for s in (7, 187, 7384, 93784)]
    ['7s', '3:07', '2:03:04', '1d 02:03:04']
    """
    seconds = float(seconds)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"seconds must be finite and >= 0, got {seconds}")
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02}:{m:02}:{s:02}"
    if h:
        return f"{h}:{m:02}:{s:02}"
    return f"{m}:{s:02}" if m else f"{s}s"


class Progress(contextlib.AbstractContextManager):
    """Shows how far a run is, how fast it goes and how long it still takes.

    On a terminal one line with a bar is redrawn in place, at most once in `min_interval` seconds and never wider than
    the terminal. Elsewhere (a file, a pipe, CI) every update is one plain line. Methods may be called from any thread.

    rate = (done_now - done_then) / (time_now - time_then) over the last 20 updates;  time left = (total - done) / rate.
    The time before the first update, which holds the compilation, is not part of it: the rate appears with the second
    update, unless `start` says where the run began.

    Args:
      total: number of steps of the whole run, >= 0.
      label: put before everything, to tell runs that follow one another apart.
      unit: what is counted, singular.
      stream: where to print; the process's standard error when None.
      min_interval: least seconds between two updates that are shown (the last step is always shown); None means 0.1 on
        a terminal and 0 elsewhere.
      start: steps done before this object was made; then the first update has a rate too.
      clock: returns seconds; replaced in tests.
      width: terminal width in characters; None asks the terminal.

    Raises:
      ValueError: for a negative total, start or min_interval.

    >>> with Progress(100, label="run 1/2", stream=sys.stdout, clock=iter([0.0, 1.0, 3.0]).__next__) as progress:
    ...     progress.update(10, {"loss": 2.5})
    ...     progress.update(30, {"loss": 1.25})
    run 1/2  step 10/100 (10%)  loss 2.5
    run 1/2  step 30/100 (30%)  loss 1.25  10 step/s  7s left
    """

    def __init__(
        self,
        total: int,
        *,
        label: str = "",
        unit: str = "step",
        stream: Stream | None = None,
        min_interval: float | int | None = None,
        start: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
    ):
        for name, value in (("total", total), ("start", start), ("min_interval", min_interval)):
            if value is not None and value < 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        self.total, self.label, self.unit = total, label, unit
        self._stream = sys.stderr if stream is None else stream
        self._tty = bool(self._stream.isatty()) and os.environ.get("TERM") != "dumb"
        self._min_interval = (0.1 if self._tty else 0.0) if min_interval is None else min_interval
        self._clock, self._width = clock, width
        self._lock = threading.RLock()  # re-entrant: a signal handler may print while its own thread draws
        self._closed = False
        self._done, self._fields = start or 0, {}
        self._begin = clock()
        self._points: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._updates = 0
        if start is not None:
            self._points.append((self._begin, start))
        self._shown_at = self._begin
        self._pending = False  # an update that min_interval held back
        if self._tty:
            self._draw()  # something to look at during compilation

    def update(self, done: int, fields: Mapping[str, SupportsFloat] | None = None) -> None:
        """Reports that `done` steps of the whole run are done.

        Args:
          done: steps done so far, counted from the beginning of the run, >= 0.
          fields: numbers to show; None keeps those of the update before on a terminal.

        Raises:
          ValueError: for a negative `done`, or after `close()`.
        """
        if done < 0:
            raise ValueError(f"done must be >= 0, got {done}")
        with self._lock:
            if self._closed:
                raise ValueError("update of a closed Progress")
            now = self._clock()
            self._updates += 1
            if self._updates == 2 and len(self._points) == 2:
                self._points.popleft()  # from here on the first interval, with its compilation, is left out
            self._points.append((now, done))
            self._done = done
            if fields is not None or not self._tty:
                self._fields = {name: float(value) for name, value in (fields or {}).items()}
            first = self._updates == 1
            if first or done >= self.total or now - self._shown_at >= self._min_interval:
                self._show(now)
            else:
                self._pending = True

    def line(self, text: str) -> None:
        """Prints a line of its own; a bar moves below it. Works after `close()` too."""
        with self._lock:
            live = self._tty and not self._closed
            self._stream.write(("\r\x1b[K" if live else "") + text + "\n")
            if live:
                self._draw()
            self._stream.flush()

    def close(self) -> None:
        """Shows an update that was held back and ends the bar's line; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            if self._pending:
                self._show(self._shown_at)
            self._closed = True
            if self._tty:
                self._stream.write("\n")
                self._stream.flush()

    def __exit__(self, *error: object) -> None:
        self.close()

    def rate(self) -> float | None:
        """Steps a second over the recent updates, or None when there are too few to tell."""
        with self._lock:
            if len(self._points) < 2:
                return None
            (then, before), (now, done) = self._points[0], self._points[-1]
            return (done - before) / (now - then) if now > then and done > before else None

    def _show(self, now: float) -> None:
        self._shown_at, self._pending = now, False
        if self._tty:
            self._draw()
        else:
            self._stream.write("  ".join(part for part in (self.label, *self._parts()) if part) + "\n")
            self._stream.flush()

    def _parts(self) -> list[str]:
        """What is said after the label: count, fields, rate, time left (or time taken, at the end)."""
        percent = f" ({100 * self._done // self.total}%)" if self.total else ""
        parts = [f"{self.unit} {self._done}/{self.total}{percent}"]
        parts += [f"{name} {value:.4g}" for name, value in self._fields.items()]
        rate = self.rate()
        if rate is not None:
            # Below one step a second the inverse is easier to read.
            parts.append(f"{rate:.3g} {self.unit}/s" if rate >= 1 else f"{1 / rate:.3g} s/{self.unit}")
        if self._points and self._done >= self.total:
            parts.append(f"took {format_duration(max(self._points[-1][0] - self._begin, 0.0))}")
        elif rate is not None:
            parts.append(f"{format_duration((self.total - self._done) / rate)} left")
        return parts

    def _draw(self) -> None:
        """Redraws the bar; the caller holds the lock."""
        room = self._columns() - 1  # a full last column would make some terminals wrap
        head = f"{self.label} " if self.label else ""
        text = "  ".join(self._parts())
        cells = min(_BAR, room - len(head) - len(text) - 3)
        bar = self._bar(cells) + " " if cells >= 5 else ""
        shown = head + bar + text
        if len(shown) > room:
            shown = shown[: max(room - 1, 0)] + (">" if room > 0 else "")
        self._stream.write("\r" + shown + "\x1b[K")
        self._stream.flush()

    def _bar(self, cells: int) -> str:
        full = cells if self.total == 0 else min(cells * self._done // self.total, cells)
        fancy = "utf" in (getattr(self._stream, "encoding", None) or "").lower()
        on, off = ("━", "╌") if fancy else ("#", ".")
        return f"[{on * full}{off * (cells - full)}]"

    def _columns(self) -> int:
        if self._width is not None:
            return self._width
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, AttributeError):  # a terminal without a size, or a stream without a descriptor
            return 80


class NullProgress(contextlib.AbstractContextManager):
    """The interface of `Progress`, showing nothing.

    >>> with NullProgress() as progress:
    ...     progress.update(1, {"loss": 2.0}); progress.line("not shown")
    """

    def __init__(self, total: int = 0, **options: Any):
        self.total = total

    def update(self, done: int, fields: Mapping[str, SupportsFloat] | None = None) -> None:
        """Shows nothing."""

    def line(self, text: str) -> None:
        """Prints nothing."""

    def close(self) -> None:
        """Does nothing."""

    def rate(self) -> float | None:
        """Always None."""
        return None

    def __exit__(self, *error: object) -> None:
        self.close()
