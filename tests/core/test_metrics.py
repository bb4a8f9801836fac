"""Metric files survive kills and resumes, stay readable by anyone, and every writer gets its turn."""

import csv
import json
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.core import metrics
from jaxlab.core.errors import MissingExtraError


def strict(text):
    """JSON as other languages read it: without NaN and Infinity."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", [metrics.JsonlWriter, metrics.CsvWriter])
def test_is_on_disk_after_every_write(tmp_path, kind):
    path = tmp_path / "deep" / "metrics"
    writer = kind(path)
    writer.write(1, {"loss": 1.5})
    assert "1.5" in path.read_text()  # not closed yet
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(2, {"loss": 1.0})


def test_jsonl_is_strict_json_and_keeps_nonfinite_values(tmp_path):
    path = tmp_path / "m.jsonl"
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1, "tokens": 2**60, 'quote\n"': 1.0}
    with metrics.JsonlWriter(path) as writer:
        writer.write(7, values)
    (line,) = path.read_text().splitlines()
    record = strict(line)
    assert record["a"] is None and record["nonfinite"] == {"a": "nan", "b": "inf", "c": "-inf"}
    (back,) = metrics.read_jsonl(path)
    assert math.isnan(back.pop("a")) and values.pop("a")
    assert back == {"step": 7, **values}
    assert isinstance(back["tokens"], int)


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), jnp.float32(0.5), jnp.bfloat16(0.5), np.array(0.5)]
)
def test_takes_array_scalars(tmp_path, value):
    with metrics.make_writer(tmp_path) as writer:
        writer.write(np.int64(3), {"x": value, "n": np.int32(4), "k": jnp.int32(5)})
    assert metrics.read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 3, "x": 0.5, "n": 4, "k": 5}]
    assert rows(tmp_path / "metrics.csv") == [{"step": "3", "x": "0.5", "n": "4", "k": "5"}]


@pytest.mark.parametrize("resume, kept", [(None, [1, 2, 2, 3]), (2, [1, 2, 2]), (0, []), (9, [1, 2, 2, 3])])
def test_resume_drops_later_steps(tmp_path, resume, kept):
    with metrics.make_writer(tmp_path) as writer:
        for step in (1, 2, 2, 3):
            writer.write(step, {"loss": 1.0 / step})
    with metrics.make_writer(tmp_path, resume_step=resume) as writer:
        writer.write(10, {"loss": 0.5})
    assert [r["step"] for r in metrics.read_jsonl(tmp_path / "metrics.jsonl")] == [*kept, 10]
    assert [int(r["step"]) for r in rows(tmp_path / "metrics.csv")] == [*kept, 10]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]  # no temporary file stays


@pytest.mark.parametrize("cut", range(1, 29))
def test_any_cut_of_the_last_jsonl_line_is_repaired(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    first, second = b'{"step": 1, "loss": 2.0}\n', b'{"step": 2, "loss": 1.0625}\n'
    path.write_bytes(first + second[:-cut])
    whole = cut == 1  # only the line end is missing: the record is complete
    assert [r["step"] for r in metrics.read_jsonl(path)] == ([1, 2] if whole else [1])
    with metrics.JsonlWriter(path, resume_step=5) as writer:
        writer.write(6, {"loss": 0.5})
    assert path.read_bytes() == first + (second if whole else b"") + b'{"step": 6, "loss": 0.5}\n'


def test_a_cut_csv_row_is_dropped(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("step,loss\n1,2.0\n2,1.06")  # perhaps 1.0625
    with metrics.CsvWriter(path) as writer:
        writer.write(3, {"loss": 0.5})
    assert path.read_text() == "step,loss\n1,2.0\n3,0.5\n"


def test_damage_before_the_last_line_is_an_error(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2"):
        metrics.JsonlWriter(path, resume_step=3)
    assert path.read_text().count("\n") == 3  # untouched
    (tmp_path / "m.csv").write_text("time,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"first column must be 'step', got 'time'"):
        metrics.CsvWriter(tmp_path / "m.csv")
    (tmp_path / "m.csv").write_text("step,loss\n1,2,3\n")
    with pytest.raises(ValueError, match=r"does not fit the header"):
        metrics.CsvWriter(tmp_path / "m.csv")


@pytest.mark.parametrize("odd", ["3", "[1]", '{"loss": 3}', '{"loss": "many"}'])
def test_damaged_nonfinite_values_are_an_error(tmp_path, odd):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1, "nonfinite": {odd}}}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 1: "):
        metrics.read_jsonl(path)


def test_csv_refuses_names_that_it_could_not_read_back(tmp_path):
    path = tmp_path / "m.csv"
    with metrics.CsvWriter(path) as writer:
        writer.write(1, {"a\nb": 1.0})
        with pytest.raises(ValueError, match=r"names without a carriage return in .*m\.csv, got 'a\\rb'"):
            writer.write(2, {"a\rb": 1.0})
    with metrics.CsvWriter(path) as writer:
        writer.write(2, {"a\nb": 2.0})
    assert [row["a\nb"] for row in rows(path)] == ["1.0", "2.0"]


def test_csv_columns_may_appear_later(tmp_path):
    path = tmp_path / "m.csv"
    with metrics.CsvWriter(path) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"eval, held out": math.nan, "loss": 0.5})
        writer.write(3, {"lr": 0.1})
    with metrics.CsvWriter(path, resume_step=1) as writer:  # the header stays
        writer.write(2, {"lr": 0.2, "acc": 1.0})
    assert path.read_text().splitlines() == ['step,loss,"eval, held out",lr,acc', "1,1.0,,,", "2,,,0.2,1.0"]


def test_a_failed_replacement_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.csv"
    with metrics.CsvWriter(path) as writer:
        writer.write(1, {"loss": 1.0})
    before = path.read_text()

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(metrics.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        metrics.CsvWriter(path, resume_step=0)
    assert path.read_text() == before


@pytest.mark.parametrize(
    "scalars, message", [({"step": 1.0}, "reserved name 'step'"), ({"nonfinite": 1.0}, "nonfinite")]
)
def test_reserved_names(tmp_path, scalars, message):
    with metrics.make_writer(tmp_path, ("jsonl",)) as writer, pytest.raises(ValueError, match=message):
        writer.write(1, scalars)
    with (
        metrics.make_writer(tmp_path, ("csv",)) as writer,
        pytest.raises(ValueError, match="step must be >= 0, got -1"),
    ):
        writer.write(-1, {"a": 1.0})


def module(name, **content):
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


class Recorder:
    def __init__(self, fail=False):
        self.fail, self.calls = fail, []

    def write(self, step, scalars):
        self.calls.append((step, dict(scalars)))
        if self.fail:
            raise OSError("cannot write")

    def close(self):
        self.calls.append("close")
        if self.fail:
            raise OSError("cannot close")


def test_multi_writer_reaches_everyone():
    first, second, third = Recorder(fail=True), Recorder(), Recorder(fail=True)
    assert isinstance(first, metrics.Writer)
    with pytest.raises(OSError, match="cannot write"):
        metrics.MultiWriter(first, second).write(1, {"a": 2.0})
    with pytest.raises(ExceptionGroup, match="2 metric writers failed to close") as caught:
        metrics.MultiWriter(first, second, third).close()
    assert len(caught.value.exceptions) == 2
    assert second.calls == [(1, {"a": 2.0}), "close"]
    assert third.calls == ["close"]


def test_make_writer_names_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="unknown metric writer 'jsonL'; did you mean 'jsonl'"):
        metrics.make_writer(tmp_path, ("csv", "jsonL"))
    with pytest.raises(ValueError, match="repeat"):
        metrics.make_writer(tmp_path, ("csv", "csv"))
    with pytest.raises(ValueError, match="'terminal' needs line="):
        metrics.make_writer(tmp_path, ("csv", "terminal"))
    assert not list(tmp_path.iterdir())  # checked before a file is made


@pytest.mark.parametrize("kind, package", [("tb", "tensorboardX"), ("wandb", "wandb")])
def test_missing_extras_name_the_command_and_close_what_was_open(tmp_path, monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    recorder = Recorder()
    monkeypatch.setattr(metrics, "JsonlWriter", lambda *arguments: recorder)
    with pytest.raises(MissingExtraError, match=rf"{package}.*jaxlab\[{kind}\]"):
        metrics.make_writer(tmp_path, ("jsonl", kind))
    assert recorder.calls == ["close"]


def test_terminal_writer_prints_lines(tmp_path):
    lines = []
    with metrics.make_writer(tmp_path, ("terminal",), line=lines.append) as writer:
        writer.write(5, {"loss": 0.123456, "n": 12345678})
    assert lines == ["step 5: loss 0.1235, n 12345678"]


def test_tensorboard_calls(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, **options):
            calls.append(options)

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def flush(self):
            calls.append("flush")

        def close(self):
            calls.append("close")

    monkeypatch.setitem(sys.modules, "tensorboardX", module("tensorboardX", SummaryWriter=SummaryWriter))
    writer = metrics.make_writer(tmp_path, ("tb",), resume_step=6)
    writer.write(7, {"loss": 1.0})
    writer.close()
    writer.close()
    options = {"logdir": str(tmp_path / "tensorboard"), "purge_step": 7}
    assert calls == [options, ("loss", 1.0, 7), "flush", "close"]


def test_tensorboard_events_can_be_read(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401 - the real package, not a fake
    from tensorboardX.proto.event_pb2 import Event

    with metrics.TensorBoardWriter(tmp_path) as writer:
        writer.write(3, {"loss": 1.5, "bad": math.nan})
    (path,) = tmp_path.iterdir()
    data, found = path.read_bytes(), {}
    while data:  # a record: length (8 bytes), its check sum (4), the event, its check sum (4)
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        data = data[16 + length :]
    assert found["loss"] == (3, 1.5) and math.isnan(found["bad"][1])


def test_wandb_run_is_continued(tmp_path, monkeypatch):
    calls = []

    class Run:
        def define_metric(self, name, step_metric=None):
            calls.append(("define", name, step_metric))

        def log(self, values):
            calls.append(values)

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", module("wandb", init=init))
    with metrics.make_writer(tmp_path / "run7", ("wandb",)) as writer:
        writer.write(2, {"loss": 1.0})
    writer.close()
    first = calls[0]
    assert first["name"] == "run7" and first["resume"] == "allow" and first["project"] == "jaxlab"
    assert calls[1:] == [("define", "step", None), ("define", "*", "step"), {"step": 2, "loss": 1.0}, "finish"]
    metrics.make_writer(tmp_path / "run7", ("wandb",), resume_step=2).close()
    metrics.make_writer(tmp_path / "run8", ("wandb",)).close()
    ids = [call["id"] for call in calls if isinstance(call, dict) and "id" in call]
    assert ids[0] == ids[1] != ids[2]
