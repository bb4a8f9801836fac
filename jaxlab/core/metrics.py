"""Metric writers: one scalar dict a step goes to JSONL, CSV, TensorBoard, Weights & Biases or the terminal.

Every writer has `write(step, scalars)` and `close()`, so the training loop needs to know only the `Writer` protocol.
Files are flushed at every write: what was reported survives a kill. A resumed run opens the same files with
`resume_step=n`, which drops what the interrupted run wrote after the checkpoint at step n: no step appears twice.
"""

import contextlib
import csv
import io
import json
import math
import operator
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, SupportsFloat, SupportsIndex, runtime_checkable

from jaxlab.core.errors import did_you_mean, require

KINDS = ("jsonl", "csv", "tb", "wandb", "terminal")
_RESERVED = ("step", "nonfinite")


@runtime_checkable
class Writer(Protocol):
    """What the training loop asks of a writer."""

    def write(self, step: SupportsIndex, scalars: Mapping[str, SupportsFloat]) -> None:
        """Records the scalars of one step."""

    def close(self) -> None:
        """Releases files and connections; a second call does nothing."""


def atomic_write(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Replaces a file in one step: a reader, or a crash, sees the old content or the new, never a part.

    The bytes go to `<name>.tmp` beside the file, are synced, and are renamed over it.

    Args:
      path: the file; its folder must exist.
      data: the whole new content; text is stored as UTF-8 with `\\n` line ends.

    Raises:
      OSError: when the folder does not exist or cannot be written.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> atomic_write(target, "one"); atomic_write(target, b"two"); target.read_text()
    'two'
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a metrics file, oldest first: `{"step": n, name: value, ...}`, with NaN and infinities restored.

    A last line that a kill cut short is left out; any other unreadable line is an error.

    Args:
      path: a file that `JsonlWriter` wrote.

    Returns:
      One dict a record.

    Raises:
      ValueError: when a line before the last one is not a JSON object with an integer `step`; names file and line.
      FileNotFoundError: when there is no such file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> with JsonlWriter(path) as writer:
    ...     writer.write(10, {"loss": 1.5, "lr": float("inf")})
    >>> path.read_text()
    '{"step": 10, "loss": 1.5, "lr": null, "nonfinite": {"lr": "inf"}}\\n'
    >>> read_jsonl(path)
    [{'step': 10, 'loss': 1.5, 'lr': inf}]
    """
    return [record for record, _ in _read_lines(Path(path))]


def _read_lines(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """(decoded record, its line without the line end) for every complete line."""
    lines = path.read_bytes().split(b"\n")
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError("not an object with an integer 'step'")
            odd = record.pop("nonfinite", {})
            if not isinstance(odd, dict) or not all(isinstance(text, str) for text in odd.values()):
                raise ValueError("'nonfinite' is not an object of strings")
            record |= {name: float(text) for name, text in odd.items()}
        except ValueError as error:
            # `split` leaves the text after the last line end in the last item: only that one can be half written.
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: {error}; the line reads {line[:80]!r}") from error
        pairs.append((record, line))
    return pairs


def _number(value: SupportsFloat) -> int | float:
    """A Python number: integers (of Python, numpy or jax) stay integers, everything else becomes a double."""
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    return int(value) if isinstance(value, int) or kind in ("i", "u", "b") else float(value)


def _checked(step: SupportsIndex, scalars: Mapping[str, SupportsFloat]) -> tuple[int, dict[str, int | float]]:
    """The arguments of `write` as plain numbers, or an error that names the argument."""
    step = operator.index(step)
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}")
    taken = [name for name in scalars if name in _RESERVED]
    if taken:
        raise ValueError(f"scalars must not use the reserved name {taken[0]!r}; reserved: {', '.join(_RESERVED)}")
    return step, {name: _number(value) for name, value in scalars.items()}


class _Closing(contextlib.AbstractContextManager):
    """`with` support for anything that has `close()`."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class JsonlWriter(_Closing):
    """Appends one JSON object a write to a file, and flushes it.

    Each line is strict JSON: a NaN or an infinity is stored as `null`, with its name and kind under `"nonfinite"`, so
    that any JSON reader parses the file and `read_jsonl` still gives the value back.

    Args:
      path: the file; missing folders are made. An existing file is continued.
      resume_step: when given, records with a larger step are dropped first (the file is replaced atomically).

    Raises:
      ValueError: when the existing file holds a line that is not a record.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> with JsonlWriter(path) as writer:
    ...     writer.write(1, {"loss": 3.0}); writer.write(2, {"loss": 2.0})
    >>> with JsonlWriter(path, resume_step=1) as writer:
    ...     writer.write(2, {"loss": 2.5})
    >>> [record["loss"] for record in read_jsonl(path)]
    [3.0, 2.5]
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            before = self.path.read_bytes()
            last = math.inf if resume_step is None else resume_step
            after = b"".join(line + b"\n" for record, line in _read_lines(self.path) if record["step"] <= last)
            if after != before:
                atomic_write(self.path, after)
        self._file = open(self.path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115 - open until close()

    def write(self, step: SupportsIndex, scalars: Mapping[str, SupportsFloat]) -> None:
        """Appends one record.

        Raises:
          ValueError: for a negative step, a reserved name, or a closed writer.
        """
        step, values = _checked(step, scalars)
        record: dict[str, Any] = {"step": step} | {k: v if math.isfinite(v) else None for k, v in values.items()}
        odd = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
        if odd:
            record["nonfinite"] = odd
        # One write call a record: a kill leaves at most one line cut short, and that line is the last.
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()


class CsvWriter(_Closing):
    """Appends one row a write to a CSV file whose first column is `step`, and flushes it.

    A metric that appears later adds a column: the file is rewritten atomically with the longer header, and earlier rows
    are empty there. Two writes of the same step (training and evaluation) stay two rows. NaN and infinities read `nan`,
    `inf`, `-inf`.

    Args:
      path: the file; missing folders are made. An existing file is continued.
      resume_step: when given, rows with a larger step are dropped first.

    Raises:
      ValueError: when the existing file is not a CSV file with `step` first.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.csv"
    >>> with CsvWriter(path) as writer:
    ...     writer.write(1, {"loss": 3.0}); writer.write(2, {"eval": 2.5})
    >>> print(path.read_text().strip())
    step,loss,eval
    1,3.0,
    2,,2.5
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns: list[str] = ["step"]
        if self.path.exists():
            before = self.path.read_bytes()
            rows = self._read()
            rows = [row for row in rows if resume_step is None or int(row[0]) <= resume_step]
            after = self._text([self._columns, *rows])
            if after.encode("utf-8") != before:
                atomic_write(self.path, after)
        else:
            atomic_write(self.path, self._text([self._columns]))
        self._file = self._open()

    def _open(self) -> io.TextIOWrapper:
        return open(self.path, "a", encoding="utf-8", newline="")

    @staticmethod
    def _text(rows: Iterable[Sequence[str | int | float]]) -> str:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()

    def _read(self) -> list[list[str]]:
        """Sets the columns from the header and returns the rows, without a last row that was cut short."""
        text = self.path.read_bytes().decode("utf-8", errors="replace")
        # Without a line end even a parsable number may have lost digits, so the whole row goes.
        complete = text[: text.rfind("\n") + 1]
        header, *rows = [row for row in csv.reader(io.StringIO(complete, newline="")) if row] or [self._columns]
        if header[0] != "step":
            raise ValueError(f"{self.path}: the first column must be 'step', got {header[0]!r}")
        for row in rows:
            if len(row) > len(header) or not row[0].isdigit():
                raise ValueError(f"{self.path}: the row {row} does not fit the header {header}")
        self._columns = header
        return [row + [""] * (len(header) - len(row)) for row in rows]

    def write(self, step: SupportsIndex, scalars: Mapping[str, SupportsFloat]) -> None:
        """Appends one row, widening the header when a metric is new.

        Raises:
          ValueError: for a negative step, a reserved name, one with a carriage return (which CSV readers take for the
            end of the header), or a closed writer.
        """
        step, values = _checked(step, scalars)
        broken = [name for name in values if "\r" in name]
        if broken:
            raise ValueError(f"scalars must have names without a carriage return in {self.path}, got {broken[0]!r}")
        if self._file.closed:
            raise ValueError(f"write to a closed CsvWriter ({self.path})")
        new = [name for name in values if name not in self._columns]
        if new:
            self._file.close()
            rows = self._read()
            self._columns = self._columns + new
            atomic_write(self.path, self._text([self._columns, *(row + [""] * len(new) for row in rows)]))
            self._file = self._open()
        self._file.write(self._text([[step, *(values.get(name, "") for name in self._columns[1:])]]))
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()


class TensorBoardWriter(_Closing):
    """Writes scalars as TensorBoard events, through tensorboardX (extra `tb`; no TensorFlow).

    Args:
      logdir: the event folder.
      resume_step: when given, TensorBoard hides events of the interrupted run with a larger step.

    Raises:
      MissingExtraError: when tensorboardX is not installed.
    """

    def __init__(self, logdir: str | os.PathLike[str], resume_step: int | None = None):
        module = require("tensorboardX", extra="tb")
        # purge_step hides the events at that step and after.
        purge = None if resume_step is None else resume_step + 1
        self._writer = module.SummaryWriter(logdir=os.fspath(logdir), purge_step=purge)
        self._closed = False

    def write(self, step: SupportsIndex, scalars: Mapping[str, SupportsFloat]) -> None:
        """Adds one point to the curve of every scalar, and flushes.

        Raises:
          ValueError: for a negative step, a reserved name, or a closed writer.
        """
        step, values = _checked(step, scalars)
        if self._closed:
            raise ValueError("write to a closed TensorBoardWriter")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._writer.close()


class WandbWriter(_Closing):
    """Logs scalars to a Weights & Biases run (extra `wandb`); environment variables such as WANDB_MODE apply.

    The run's id is kept in `<workdir>/wandb_id.txt`, so that a resumed job continues the same run. Curves use the
    logged `step` as their x axis rather than the service's own counter, which refuses steps that come out of order;
    points that an interrupted run logged after its checkpoint cannot be taken back there and are drawn over.

    Args:
      workdir: the run folder; its name is the run's display name.
      resume_step: when given, the run whose id the folder holds is continued.
      project: the project to log to.
      config: stored with the run.

    Raises:
      MissingExtraError: when wandb is not installed.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        resume_step: int | None = None,
        project: str = "jaxlab",
        config: Mapping[str, Any] | None = None,
    ):
        module = require("wandb", extra="wandb")
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        id_file = workdir / "wandb_id.txt"
        if resume_step is None or not id_file.exists():
            atomic_write(id_file, uuid.uuid4().hex[:12])
        self._run = module.init(
            project=project,
            name=workdir.resolve().name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(workdir),
            config=dict(config or {}),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._closed = False

    def write(self, step: SupportsIndex, scalars: Mapping[str, SupportsFloat]) -> None:
        """Logs the scalars of one step.

        Raises:
          ValueError: for a negative step, a reserved name, or a closed writer.
        """
        step, values = _checked(step, scalars)
        if self._closed:
            raise ValueError("write to a closed WandbWriter")
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Finishes the run; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._run.finish()


class TerminalWriter(_Closing):
    """Formats every write as one line and hands it to a printer, such as `Progress.line`.

    Args:
      line: called with each line, without a line end.

    >>> TerminalWriter(print).write(20, {"loss": 1.23456, "tokens": 4096})
    step 20: loss 1.235, tokens 4096
    """

    def __init__(self, line: Callable[[str], object]):
        self._line = line

    def write(self, step: SupportsIndex, scalars: Mapping[str, SupportsFloat]) -> None:
        """Prints the scalars of one step.

        Raises:
          ValueError: for a negative step or a reserved name.
        """
        step, values = _checked(step, scalars)
        shown = [f"{name} {v if isinstance(v, int) else format(v, '.4g')}" for name, v in values.items()]
        self._line(f"step {step}: {', '.join(shown)}")

    def close(self) -> None:
        """Does nothing: the printer belongs to the caller."""


class MultiWriter(_Closing):
    """Passes every call on to several writers; one that fails does not keep the others from being written or closed.

    Args:
      writers: where to write; none at all is allowed.

    Raises:
      Exception: what a writer raised, after all others had their turn; an `ExceptionGroup` when several did.
    """

    def __init__(self, *writers: Writer):
        self.writers = writers

    @staticmethod
    def _each(calls: Iterable[Callable[[], None]], action: str) -> None:
        errors = []
        for call in calls:
            try:
                call()
            except Exception as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup(f"{len(errors)} metric writers failed to {action}", errors)

    def write(self, step: SupportsIndex, scalars: Mapping[str, SupportsFloat]) -> None:
        """Writes to all."""
        self._each([lambda w=w: w.write(step, scalars) for w in self.writers], "write")

    def close(self) -> None:
        """Closes all."""
        self._each([w.close for w in self.writers], "close")


def make_writer(
    workdir: str | os.PathLike[str],
    kinds: Sequence[str] = ("jsonl", "csv"),
    resume_step: int | None = None,
    line: Callable[[str], object] | None = None,
) -> MultiWriter:
    """Opens the metric writers of a run folder.

    Files: `metrics.jsonl`, `metrics.csv`, `tensorboard/`, `wandb/`.

    Args:
      workdir: the run folder; made when absent.
      kinds: any of `"jsonl"`, `"csv"`, `"tb"`, `"wandb"`, `"terminal"`.
      resume_step: the step of the checkpoint that the run continues from (0 drops everything); None for a new run.
      line: the printer of `"terminal"`, such as `Progress.line`.

    Returns:
      One writer that writes to all of them.

    Raises:
      ValueError: for an unknown or repeated kind, or `"terminal"` without `line`.
      MissingExtraError: when a kind needs a package that is not installed.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with make_writer(folder) as writer:
    ...     writer.write(1, {"loss": 3.0})
    >>> sorted(path.name for path in Path(folder).iterdir())
    ['metrics.csv', 'metrics.jsonl']
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"unknown metric writer {kind!r}{did_you_mean(kind, KINDS)}")
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"kinds must not repeat, got {list(kinds)}")
    if "terminal" in kinds and line is None:
        raise ValueError("the metric writer 'terminal' needs line=, a function that prints one line")
    workdir = Path(workdir)
    makers: dict[str, Callable[[], Writer]] = {
        "jsonl": lambda: JsonlWriter(workdir / "metrics.jsonl", resume_step),
        "csv": lambda: CsvWriter(workdir / "metrics.csv", resume_step),
        "tb": lambda: TensorBoardWriter(workdir / "tensorboard", resume_step),
        "wandb": lambda: WandbWriter(workdir, resume_step),
        "terminal": lambda: TerminalWriter(line),
    }
    opened: list[Writer] = []
    try:
        for kind in kinds:
            opened.append(makers[kind]())
    except BaseException:
        MultiWriter(*opened).close()
        raise
    return MultiWriter(*opened)
