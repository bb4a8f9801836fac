"""Several short runs in one run folder: each is done once, resumes where it stopped, and reports into one progress.

A `Cell` is one setting and seed. `run_cells` gives each its own folder `cells/NAME` and writes `cell.json` there when
it ends; a sweep that is started again reads the cells that are done and goes on with the first that is not. A cell
that was made from other data or with other settings is an error: one report never mixes two experiments.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from jaxlab.core.checkpoint import Checkpointer
from jaxlab.core.errors import CheckpointError, NonFiniteError
from jaxlab.core.metrics import atomic_write
from jaxlab.core.progress import NullProgress, Progress
from jaxlab.core.report import Row


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
      labels: the setting; rows with equal labels are repetitions over seeds.
      seed: the seed.
      steps: how much of the sweep's progress this cell is, in the sweep's unit.
      settings: what the run needs and the report shows but does not group by, such as a tuned learning rate; they are
        kept as JSON would read them back, so NumPy and JAX scalars become Python numbers and tuples become lists.

    Raises:
      TypeError: when a setting cannot be written as JSON.
      ValueError: when a label holds a path separator, which would lead out of the cell's folder.

    >>> Cell({"method": "isoloco", "K": 8}, seed=0, steps=450).name
    'method=isoloco,K=8,seed=0'
    """

    labels: Mapping[str, str | int | float]
    seed: int
    steps: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for label, value in self.labels.items():
            if set(f"{label}{value}") & set("/\\\0"):
                raise ValueError(f"labels must hold no path separators, got {label}={value!r}")
        # Here, and not when the cell is recorded: what was trained by then would be lost.
        settings = {name: _as_json(f"setting {name!r}", value) for name, value in self.settings.items()}
        object.__setattr__(self, "settings", settings)

    @property
    def name(self) -> str:
        """A folder name that tells the cell apart."""
        return ",".join(f"{key}={value}" for key, value in [*self.labels.items(), ("seed", self.seed)])


@dataclasses.dataclass(frozen=True)
class CellResult:
    """What a cell measured.

    Attributes:
      values: final numbers.
      curves: numbers over time, each a list; a plot pairs two of them.
    """

    values: Mapping[str, int | float]
    curves: Mapping[str, Sequence[int | float]] = dataclasses.field(default_factory=dict)


class CellProgress:
    """A cell's part of the sweep's progress, with the interface of `Progress`."""

    def __init__(self, whole: Progress | NullProgress, offset: int, scale: int, prefix: str):
        self._whole, self._offset, self._scale, self._prefix = whole, offset, scale, prefix

    def update(self, done: int, fields: Mapping[str, Any] | None = None) -> None:
        """Reports that `done` steps of this cell are done."""
        self._whole.label = self._prefix
        self._whole.update(self._offset + done * self._scale, fields)

    def line(self, text: str) -> None:
        """Prints one line."""
        self._whole.line(f"{self._prefix}: {text}")


def run_cells(
    cells: Sequence[Cell],
    run: Callable[[Cell, Path, CellProgress], CellResult],
    workdir: Path,
    *,
    progress: Progress | NullProgress,
    facts: Mapping[str, Any] | None = None,
    steps_per_update: Callable[[Cell], int] = lambda cell: 1,
    allow_divergence: bool = False,
) -> list[CellResult]:
    """Runs every cell that is not done yet.

    Args:
      cells: in the order in which they run; names must differ.
      run: `(cell, folder, progress) -> CellResult`; it resumes from what it finds in its folder.
      workdir: the run folder.
      progress: of the whole sweep; its total is the sum of the cells' steps.
      facts: what must be the same for all cells, such as the corpus hash; recorded with each cell.
      steps_per_update: how many of the sweep's units one step of the cell's own loop is.
      allow_divergence: a cell that stops with `NonFiniteError` counts as done, with an infinite `loss` (for tuning
        grids, where some points diverge); otherwise the error ends the sweep.

    Returns:
      One result a cell, in order.

    Raises:
      ValueError: when two cells have the same name.
      CheckpointError: before anything runs, when the record of a cell that is done is damaged, or was made with other
        settings or facts.
    """
    names = [cell.name for cell in cells]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"cells must have different names, got {twice[0]!r} {names.count(twice[0])} times")
    facts = {name: _as_json(f"fact {name!r}", value) for name, value in (facts or {}).items()}
    finished = [_read_record(workdir / "cells" / cell.name / "cell.json", cell, facts) for cell in cells]
    results, offset = [], 0
    for number, (cell, result) in enumerate(zip(cells, finished, strict=True), 1):
        folder = workdir / "cells" / cell.name
        if result is None:
            folder.mkdir(parents=True, exist_ok=True)
            view = CellProgress(progress, offset, steps_per_update(cell), f"[{number}/{len(cells)}] {cell.name}")
            try:
                result = run(cell, folder, view)
            except NonFiniteError as error:
                if not allow_divergence:
                    raise
                view.line(f"diverged: {error}")
                result = CellResult({"loss": float("inf")})
            if jax.process_index() == 0:
                record = {
                    # JSON has no infinity; repr keeps every float and reads back with float().
                    "values": {name: repr(float(value)) for name, value in result.values.items()},
                    "curves": {name: [float(x) for x in curve] for name, curve in result.curves.items()},
                    "settings": dict(cell.settings),
                    "facts": facts,
                }
                atomic_write(folder / "cell.json", json.dumps(record, indent=1) + "\n")
        results.append(result)
        offset += cell.steps
    return results


def rows(cells: Sequence[Cell], results: Sequence[CellResult]) -> list[Row]:
    """The measurements for a report, one row a cell."""
    return [Row(cell.labels, cell.seed, result.values) for cell, result in zip(cells, results, strict=True)]


def restore(
    folder: Path, state: PyTree, facts: Mapping[str, Any], *, keep: int, on_message: Callable[[str], Any]
) -> tuple[Checkpointer, PyTree, int]:
    """Opens a cell's checkpoints and restores the newest one, if any.

    Args:
      folder: the cell's folder.
      state: the freshly initialised state, with the shardings to restore onto; returned where there is no checkpoint.
      facts: what must not have changed since, such as the corpus hash; save it as the checkpoints' `meta`.
      keep: checkpoints to keep.
      on_message: told which checkpoint is resumed, and when a damaged one is skipped.

    Returns:
      `(checkpointer, state, steps done)`.

    Raises:
      CheckpointError: when a fact differs from the one saved, or the checkpoints do not fit or cannot be read.
    """
    facts = {name: _as_json(f"fact {name!r}", value) for name, value in facts.items()}
    checkpointer = Checkpointer(folder / "checkpoints", keep=keep, on_message=on_message)
    try:
        restored = checkpointer.restore(state)
        if restored is None:
            return checkpointer, state, 0
        for name, value in facts.items():
            _same(f"{folder}: the checkpoint", name, restored.meta.get(name), value)
    except CheckpointError:
        checkpointer.close()
        raise
    on_message(f"resumed after step {restored.step}")
    return checkpointer, restored.state, restored.step


def _read_record(path: Path, cell: Cell, facts: Mapping[str, Any]) -> CellResult | None:
    """What a finished cell measured; None when it is not finished."""
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        values = {name: float(value) for name, value in record["values"].items()}
        curves = {name: [float(x) for x in curve] for name, curve in record["curves"].items()}
        settings, known = record["settings"], dict(record.get("facts", {}))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is damaged ({why}); delete it to train that cell again") from error
    _same(f"{path}: the cell", "settings", settings, cell.settings)
    for name, value in facts.items():
        # Records of before facts were kept say nothing about them.
        _same(f"{path}: the cell", name, known.get(name, value), value)
    return CellResult(values, curves)


def _same(what: str, name: str, old: Any, new: Any) -> None:
    if old != new:
        raise CheckpointError(
            f"{what} was made with {name}={old!r}, now it is {new!r}; resuming would not continue the same run"
        )


def _as_json(what: str, value: Any) -> Any:
    """The value as JSON reads it back, so that it equals what is stored."""
    try:
        return json.loads(json.dumps(value, default=lambda scalar: scalar.item()))
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(
            f"{what} must be a number, a string, or lists and dicts of these, got {type(value).__name__}"
        ) from error
