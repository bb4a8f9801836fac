"""The BReD experiment: run folders, resuming, fine-tuning from a checkpoint, settings, the report, what is lost."""

import json
import math

import jax
import pytest

from jaxlab import cli
from jaxlab.core import config as configs
from jaxlab.core.errors import ConfigError
from jaxlab.core.metrics import read_jsonl
from jaxlab.core.report import read_result
from jaxlab.experiments import bred, bred_run, lm
from jaxlab.nn import transformer
from jaxlab.optim import bred as optim

MICRO = transformer.TransformerConfig(vocab=256, dim=16, layers=1, heads=1, kv_heads=1, ffn=16)
SMALL = {
    "model.preset": "micro", "data.seq_len": 8, "data.eval_windows": 8, "train.batch": 4, "train.steps": 60,
    "bred.min_size": 0, "train.checkpoint_every": 1, "finetune.steps": 55,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def corpus(tmp_path_factory):
    """The micro model among the presets, and two folders of small texts."""
    root = tmp_path_factory.mktemp("data")
    for group in ("alpha", "beta"):
        (root / group).mkdir()
        for n in range(60):
            text = "".join(f"{group} {i} says {i * i % 97} and {(i + n) % 7}\n" for i in range(120))
            (root / group / f"{n}.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transformer.PRESETS, "micro", MICRO)
        patch.setattr(bred_run, "INTERVAL", 20)
        yield root


def command(corpus, *overrides, variant="tiny", workdir=None, options=()):
    """`jaxlab run bred:variant` at a minimal size; returns the exit code."""
    given = {text.split("=")[0] for text in overrides}
    small = [f"{key}={value}" for key, value in {**SMALL, "data.path": str(corpus)}.items() if key not in given]
    folder = [] if workdir is None else [f"--workdir={workdir}"]
    return cli.main(["run", f"bred:{variant}", *small, *overrides, *folder, *options])


def cell_files(folder):
    """Name -> what `cell.json` of every finished cell holds."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("cells/*/cell.json"))}


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """All optimizers in two storages."""
    folder = tmp_path_factory.mktemp("runs") / "all"
    assert command(corpus, "storages=fp32,bred3", workdir=folder) == 0
    return folder


def test_a_run_leaves_tables_curves_and_plots(finished):
    cells = cell_files(finished)
    assert len(cells) == 10
    for name, record in cells.items():
        assert 1 < float(record["values"]["loss"]) < 6, name
        assert record["curves"]["steps"] == [20, 40, 60]
        assert ("error_m" in record["curves"]) == ("fp32" not in name)
    states = {name.split(",decay")[0]: float(r["values"]["state bytes"]) for name, r in cells.items()}
    assert states["optimizer=adamw,storage=bred3"] < 0.3 * states["optimizer=adamw,storage=fp32"]
    text = (finished / "report.md").read_text()
    assert "shift against fp32" in text and "SGD with momentum" in text and "ms a step" in text
    for name in ("valid_adamw", "error_m_lion", "error_v_ademamix"):
        assert (finished / "plots" / f"{name}.png").stat().st_size > 5000
    result = read_result(finished)
    row = {(r.labels["optimizer"], r.labels["storage"]): r.values["loss"] for r in result.rows}
    shift = row["lion", "bred3"] - row["lion", "fp32"]
    assert result.summary["Lion: bred3 - fp32"] == pytest.approx(shift, abs=1e-6)


def test_curves_hold_the_error_of_the_state(finished):
    for path in finished.glob("cells/*storage=bred3*/metrics.jsonl"):
        records = [r for r in read_jsonl(path) if "error_m" in r]
        assert len(records) == 3 and all(0 < r["error_m"] < 3 for r in records), path


def test_resume_is_bit_identical(corpus, tmp_path, monkeypatch):
    settings = ("optimizers=adamw", "storages=bred4")
    assert command(corpus, *settings, workdir=tmp_path / "whole") == 0
    original, calls = lm.fit, []

    def stopped(*args, **options):
        options["steps"] = 40  # two of the three intervals, then the process dies
        original(*args, **options)
        calls.append(1)
        raise RuntimeError("killed")

    monkeypatch.setattr(lm, "fit", stopped)
    with pytest.raises(RuntimeError, match="killed"):
        command(corpus, *settings, workdir=tmp_path / "cut")
    monkeypatch.setattr(lm, "fit", original)
    assert calls and not cell_files(tmp_path / "cut")
    assert command(corpus, *settings, workdir=tmp_path / "cut", options=("--resume",)) == 0
    (a,), (b,) = cell_files(tmp_path / "whole").values(), cell_files(tmp_path / "cut").values()
    assert a["values"]["loss"] == b["values"]["loss"] and a["curves"]["valid"] == b["curves"]["valid"]


def test_finetuning_goes_on_from_a_checkpoint(corpus, tmp_path):
    settings = ("finetune.group=beta", "optimizers=adamw", "storages=fp32,bred4")
    assert command(corpus, *settings, variant="finetune", workdir=tmp_path / "a") == 0
    cells = cell_files(tmp_path / "a")
    base = [name for name in cells if "part=base" in name]
    assert len(cells) == 3 and len(base) == 1
    first = {name: r["curves"]["valid"][0] for name, r in cells.items()}
    # It starts where the base ended: its first validation loss is far below that of a new model after as many steps.
    assert all(first[name] < 0.9 * first[base[0]] for name in cells if name not in base)
    folder = tmp_path / "a" / "cells" / base[0]
    assert command(corpus, *settings, f"finetune.checkpoint={folder}", variant="finetune", workdir=tmp_path / "b") == 0
    again = cell_files(tmp_path / "b")
    assert len(again) == 2
    for name, record in again.items():
        assert record["values"]["loss"] == cells[name]["values"]["loss"]


def test_several_devices_give_the_same_losses(corpus, tmp_path):
    settings = ("optimizers=adamw,lion", "storages=bred4", "train.steps=20")
    losses = []
    for devices in (1, 4):
        assert command(corpus, *settings, f"bred.devices={devices}", workdir=tmp_path / str(devices)) == 0
        losses.append([float(r["values"]["loss"]) for r in cell_files(tmp_path / str(devices)).values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_tuning_and_sweeps(corpus, tmp_path):
    assert command(corpus, "optimizers=lion", variant="tune", workdir=tmp_path / "t") == 0
    assert "settings.lion = (" in (tmp_path / "t" / "report.md").read_text()
    found = bred.cells(configs.load("bred", "decay"))
    assert {c.labels["decay"] for c in found} == {0.9, 0.99, 0.999} and len(found) == 2 * 3 * 5 * 3
    assert all(c.seed != 1000 for c in found)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("optimizers=adam",), "optimizers must be among"),
        (("storages=bred5",), "bits must be one of"),
        (("storages=int4",), "storages must be fp32 or ROUNDING BITS"),
        (("storages=bred4-x",), "option 'x' of 'bred4-x'"),
        (("storages=fp32,fp32",), "storages must be one or more different values"),
        (("seeds=-1",), "seeds must be integers >= 0"),
        (("train.steps=0",), "train.steps must be >= 1"),
        (("train.warmup=1.0",), "train.warmup must be in"),
        (("train.clip=0.0",), "train.clip must be > 0"),
        (("settings.decay=1.0",), "decays must be in"),
        (("settings.adamw=0.0,0.9",), "learning rates must be > 0"),
        (("finetune.group=gamma",), "the corpus has no 'gamma'"),
        (("finetune.lr=0.0",), "finetune.lr must be > 0"),
        (("bred.devices=3",), "bred.devices must divide train.batch=4"),
        (("bred.seed=-1",), "seed must be"),
        (("train.writers=json",), "did you mean 'jsonl'"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_trained(corpus, tmp_path, capsys, monkeypatch, overrides, message):
    monkeypatch.setattr(lm, "fit", lambda *args, **options: pytest.fail("nothing must be trained here"))
    assert command(corpus, *overrides, workdir=tmp_path / "w") != 0
    assert message in capsys.readouterr().err


def test_a_missing_checkpoint_is_an_error(corpus, tmp_path, capsys):
    assert command(corpus, f"finetune.checkpoint={tmp_path}", variant="finetune", workdir=tmp_path / "w") != 0
    assert "finetune.group" in capsys.readouterr().err  # the variant's package is not in this corpus
    settings = ("finetune.group=beta", f"finetune.checkpoint={tmp_path}")
    assert command(corpus, *settings, variant="finetune", workdir=tmp_path / "v") != 0
    assert "is no cell with checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(("variant", "parameters"), [("paper120m", 120_000_000), ("paper1b", 1_100_000_000)])
def test_describe_the_published_sizes(variant, parameters):
    facts = bred.describe(configs.load("bred", variant))
    assert facts["parameters"] == pytest.approx(parameters, rel=0.02)
    exact, packed = facts["state bytes, AdamW, fp32"], facts["state bytes, AdamW, bred4"]
    assert 1 - packed / exact == pytest.approx(0.867, abs=0.002)  # the paper: up to 86.0 %


def test_storage_names():
    spec = bred_run.storage("stochastic4-b32-bf16")
    assert spec == optim.QuantSpec(4, 32, "stochastic", scale_dtype="bfloat16")
    assert bred_run.storage("fp32") is None
    config = configs.load("bred", "tiny")
    config.grid = (("adamw", (1e-3,), (0.9,)),)
    with pytest.raises(ConfigError, match="got none for 'muon'"):
        bred.cells(config)


def test_errors_of_the_state_are_those_of_its_parts():
    params = {"w": jax.numpy.ones((64, 128))}
    tx, exact = optim.adamw(1e-3), bred_run.optax.adamw(1e-3)
    grads = {"w": jax.random.normal(jax.random.key(0), (64, 128))}
    _, packed = tx.update(grads, tx.init(params), params)
    _, full = exact.update(grads, exact.init(params), params)
    found = bred_run.state_error(packed, full)
    difference = optim.dequantize(packed)[0].mu["w"] - full[0].mu["w"]
    expected = math.sqrt(float((difference**2).sum() / (full[0].mu["w"] ** 2).sum()))
    assert float(found["error_m"]) == pytest.approx(expected, rel=1e-5) and 0 < float(found["error_v"]) < 1
