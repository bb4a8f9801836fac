"""Sweeps of short runs: each cell once, in its own folder, resumed where it stopped."""

import io
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.core import sweep
from jaxlab.core.errors import CheckpointError, NonFiniteError
from jaxlab.core.progress import NullProgress, Progress
from jaxlab.core.sweep import Cell, CellResult

CELLS = [Cell({"method": m}, seed, steps, {"lr": 0.1}) for m, steps in (("a", 4), ("b", 6)) for seed in (0, 1)]


def measure(cell, folder, progress):
    """A run that needs nothing but its cell."""
    return CellResult({"loss": cell.seed + len(cell.labels["method"])}, {"tokens": [1, 2], "loss": [0.5, 0.25]})


def test_names_tell_cells_apart():
    assert Cell({"method": "isoloco", "K": 8, "lr": 4e-3}, 1, 5).name == "method=isoloco,K=8,lr=0.004,seed=1"
    assert len({cell.name for cell in CELLS}) == 4
    assert Cell({"a": 1}, 0, 5, {"lr": 1.0}).name == Cell({"a": 1}, 0, 5, {"lr": 2.0}).name, "settings do not count"


def test_cells_run_in_order_and_are_recorded(tmp_path):
    seen = []

    def run(cell, folder, progress):
        assert folder.is_dir() and folder == tmp_path / "cells" / cell.name
        seen.append(cell)
        return measure(cell, folder, progress)

    results = sweep.run_cells(CELLS, run, tmp_path, progress=NullProgress())
    assert seen == CELLS and [r.values["loss"] for r in results] == [1, 2, 1, 2]
    record = json.loads((tmp_path / "cells" / "method=b,seed=1" / "cell.json").read_text())
    assert record["settings"] == {"lr": 0.1} and record["curves"] == {"tokens": [1.0, 2.0], "loss": [0.5, 0.25]}
    rows = sweep.rows(CELLS, results)
    assert [(row.labels, row.seed, row.values) for row in rows][3] == ({"method": "b"}, 1, {"loss": 2.0})


def test_a_second_start_does_what_is_left(tmp_path):
    """Stopped in the third cell: the first two are read back with all their digits."""
    value, seen = 1 / 3, []

    def run(cell, folder, progress):
        seen.append(cell.name)
        if cell.labels["method"] == "b" and not (folder / "again").exists():
            (folder / "again").touch()
            raise KeyboardInterrupt
        return CellResult({"loss": value, "odd": math.nan}, {"loss": [value]})

    with pytest.raises(KeyboardInterrupt):
        sweep.run_cells(CELLS, run, tmp_path, progress=NullProgress())
    assert seen == ["method=a,seed=0", "method=a,seed=1", "method=b,seed=0"]
    seen.clear()
    (tmp_path / "cells" / "method=b,seed=1").mkdir()
    (tmp_path / "cells" / "method=b,seed=1" / "again").touch()
    results = sweep.run_cells(CELLS, run, tmp_path, progress=NullProgress())
    assert seen == ["method=b,seed=0", "method=b,seed=1"]
    assert all(r.values["loss"] == value and math.isnan(r.values["odd"]) for r in results)
    assert [list(r.curves["loss"]) for r in results] == [[value]] * 4
    assert not list(tmp_path.rglob("*.tmp"))


def test_progress_covers_the_whole_sweep(tmp_path):
    """Cells that are done count; a step of a cell's loop may stand for several of the sweep's."""
    out = io.StringIO()

    def run(cell, folder, progress):
        for done in range(1, cell.steps // 2 + 1):
            progress.update(done, {"loss": 0.5})
        progress.line("half time")
        return measure(cell, folder, progress)

    sweep.run_cells(CELLS[:1], measure, tmp_path, progress=NullProgress())
    with Progress(20, stream=out) as progress:
        sweep.run_cells(CELLS, run, tmp_path, progress=progress, steps_per_update=lambda cell: 2)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("[2/4] method=a,seed=1  step 6/20")
    assert lines[2] == "[2/4] method=a,seed=1: half time"
    steps = [int(line.split("step ")[1].split("/")[0]) for line in lines if "/20" in line]
    assert steps == [6, 8, 10, 12, 14, 16, 18, 20]


def diverging(cell, folder, progress):
    if cell.seed == 1:
        raise NonFiniteError(3, "loss", math.nan)
    return measure(cell, folder, progress)


def test_a_cell_that_diverges_ends_the_sweep_unless_allowed(tmp_path):
    with pytest.raises(NonFiniteError):
        sweep.run_cells(CELLS, diverging, tmp_path / "strict", progress=NullProgress())
    assert not (tmp_path / "strict" / "cells" / "method=a,seed=1" / "cell.json").exists()
    out = io.StringIO()
    for _ in range(2):  # the second time from the records
        with Progress(20, stream=out) as progress:
            results = sweep.run_cells(CELLS, diverging, tmp_path, progress=progress, allow_divergence=True)
        assert [r.values["loss"] for r in results] == [1, math.inf, 1, math.inf]
    assert out.getvalue().count("diverged: metric 'loss' is nan at step 3") == 2


def test_other_errors_are_never_taken_for_divergence(tmp_path):
    def broken(cell, folder, progress):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sweep.run_cells(CELLS, broken, tmp_path, progress=NullProgress(), allow_divergence=True)


def test_equal_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="different names, got 'method=a,seed=0' 2 times"):
        sweep.run_cells([*CELLS, CELLS[0]], measure, tmp_path, progress=NullProgress())
    assert not (tmp_path / "cells").exists()


def test_restore_finds_the_newest_checkpoint(tmp_path):
    lines, facts = [], {"corpus": "abc", "settings": {"lr": 0.1}}
    fresh = {"w": jnp.zeros(3)}
    checkpointer, state, start = sweep.restore(tmp_path, fresh, facts, keep=1, on_message=lines.append)
    with checkpointer:
        assert start == 0 and state is fresh and lines == []
        for step in (2, 5):
            checkpointer.save(step, {"w": jnp.full(3, step, jnp.float32)}, facts)
    checkpointer, state, start = sweep.restore(tmp_path, fresh, facts, keep=1, on_message=lines.append)
    with checkpointer:
        assert start == 5 and lines == ["resumed after step 5"]
        np.testing.assert_array_equal(state["w"], [5, 5, 5])


def test_restore_refuses_another_run(tmp_path):
    facts = {"corpus": "abc"}
    checkpointer, *_ = sweep.restore(tmp_path, {"w": jnp.zeros(3)}, facts, keep=1, on_message=print)
    with checkpointer:
        checkpointer.save(1, {"w": jnp.zeros(3)}, facts)
    with pytest.raises(CheckpointError, match="made with corpus='abc', now it is 'abd'"):
        sweep.restore(tmp_path, {"w": jnp.zeros(3)}, {"corpus": "abd"}, keep=1, on_message=print)
    with pytest.raises(CheckpointError, match=r"w: checkpoint float32\[3\], like float32\[4\]"):
        sweep.restore(tmp_path, {"w": jnp.zeros(4)}, facts, keep=1, on_message=print)


def started(tmp_path, cells=CELLS, **options):
    """A sweep that may read what is done, and must not run anything."""

    def run(cell, folder, progress):
        raise AssertionError("nothing must be trained here")

    return sweep.run_cells(cells, run, tmp_path, progress=NullProgress(), **options)


def test_a_finished_cell_of_another_experiment_is_refused(tmp_path):
    facts = {"corpus": "abc", "sizes": (1, np.int64(2))}
    results = sweep.run_cells(CELLS, measure, tmp_path, progress=NullProgress(), facts=facts)
    assert [r.values for r in started(tmp_path, facts=facts)] == [r.values for r in results]
    path = tmp_path / "cells" / CELLS[3].name / "cell.json"
    with pytest.raises(CheckpointError, match=r"cell\.json: the cell was made with corpus='abc', now it is 'abd'"):
        started(tmp_path, facts=facts | {"corpus": "abd"})
    other = [*CELLS[:3], Cell(CELLS[3].labels, CELLS[3].seed, 6, {"lr": 5})]
    with pytest.raises(CheckpointError, match=r"made with settings=\{'lr': 0.1\}, now it is \{'lr': 5\}") as caught:
        started(tmp_path, other, facts=facts)
    assert str(path) in str(caught.value)
    # Before the first cell runs, although only the last does not fit.
    (tmp_path / "cells" / CELLS[0].name / "cell.json").unlink()
    with pytest.raises(CheckpointError, match="made with settings"):
        started(tmp_path, other, facts=facts)


def test_records_without_facts_are_read(tmp_path):
    sweep.run_cells(CELLS, measure, tmp_path, progress=NullProgress())
    for path in tmp_path.glob("cells/*/cell.json"):
        record = json.loads(path.read_text())
        assert record.pop("facts") == {}
        path.write_text(json.dumps(record))
    assert len(started(tmp_path, facts={"corpus": "abc"})) == 4


@pytest.mark.parametrize("text", ["", '{"values": {"lo', "{}", "[]", '{"values": 1, "curves": {}, "settings": {}}'])
def test_a_damaged_record_is_named(tmp_path, text):
    sweep.run_cells(CELLS, measure, tmp_path, progress=NullProgress())
    path = tmp_path / "cells" / CELLS[2].name / "cell.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"is damaged \(.*\); delete it to train that cell again") as caught:
        started(tmp_path)
    assert str(path) in str(caught.value)
    path.unlink()
    assert len(sweep.run_cells(CELLS, measure, tmp_path, progress=NullProgress())) == 4


def test_settings_are_what_their_record_gives_back(tmp_path):
    cell = Cell({"a": 1}, 0, 1, {"lr": np.float32(5), "n": jnp.int32(3), "betas": (0.5, np.float64(0.25)), "b": True})
    assert cell.settings == {"lr": 5.0, "n": 3, "betas": [0.5, 0.25], "b": True}
    assert type(cell.settings["lr"]) is float and type(cell.settings["n"]) is int
    sweep.run_cells([cell], lambda *_: CellResult({"loss": 1.0}), tmp_path, progress=NullProgress())
    assert len(started(tmp_path, [cell])) == 1
    for value in (np.ones(2), object(), {1, 2}):
        with pytest.raises(
            TypeError, match="setting 'lr' must be a number, a string, or lists and dicts of these, got"
        ):
            Cell({"a": 1}, 0, 1, {"lr": value})


@pytest.mark.parametrize("labels", [{"m": "../../x"}, {"a/b": 1}, {"m": "a\\b"}])
def test_labels_stay_in_their_folder(labels):
    with pytest.raises(ValueError, match="labels must hold no path separators, got"):
        Cell(labels, 0, 1)
