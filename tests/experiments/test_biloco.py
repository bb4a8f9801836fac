"""The BiLoCo experiment: on a model, on a file, its report, bad settings and bad weights."""

import numpy as np
import pytest

from jaxlab import cli
from jaxlab.core import config as configs
from jaxlab.core.report import read_result
from jaxlab.experiments import biloco as experiment
from jaxlab.nn import transformer
from tests.quant.planted import generate

MICRO = transformer.TransformerConfig(vocab=256, dim=16, layers=1, heads=1, kv_heads=1, ffn=32)
SMALL = (
    "model.preset=micro", "data.seq_len=8", "data.eval_windows=8", "data.calibration=8", "train.steps=20",
    "train.batch=4", "ranks=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text("".join(f"line {i} says {i * i % 97}\n" for i in range(4000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transformer.PRESETS, "micro", MICRO)
        yield path


def test_the_experiment_on_a_model(corpus, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = tmp_path / "run"
    assert cli.main(["run", "biloco", *SMALL, f"data.path={corpus}", f"--workdir={folder}"]) == 0
    result = read_result(folder)
    error = {row.labels["method"]: row.values["error"] for row in result.rows}
    assert error["biloco"] < error["rtn"] and error["gptq"] < error["rtn"] and error["bf16"] < error["biloco"]
    bits = {row.labels["method"]: row.values["bits a weight"] for row in result.rows}
    assert bits["bf16"] == 16 and bits["biloco"] <= bits["svdquant"] and bits["rtn"] < 5
    text = (folder / "report.md").read_text()
    assert "mlp/down/kernel" in text and (folder / "plots" / "error_bits.png").exists()
    saved = safetensors.load_file(folder / "quantized.safetensors")
    codes = [x for name, x in saved.items() if name.endswith("kernel.codes")]
    assert len(codes) == 8 and all(x.dtype == np.uint8 for x in codes)
    assert sum(x.nbytes for x in saved.values()) == next(
        row.values["bytes"] for row in result.rows if row.labels["method"] == "biloco"
    )
    # A second start finds everything done.
    before = {p: p.stat().st_mtime_ns for p in folder.glob("cells/*/cell.json")}
    again = ["run", "biloco", *SMALL, f"data.path={corpus}", f"--workdir={folder}", "--resume"]
    assert cli.main(again) == 0 and before == {p: p.stat().st_mtime_ns for p in folder.glob("cells/*/cell.json")}


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
def test_the_experiment_on_a_file(tmp_path, layout):
    safetensors = pytest.importorskip("safetensors.numpy")
    w = {"a.weight": generate(0, 32, 48)[0], "b.weight": generate(1, 48, 32)[0], "norm.weight": np.ones(8, np.float32)}
    if layout == "in_out":
        w = {name: np.ascontiguousarray(x.T) for name, x in w.items()}
    safetensors.save_file(w, tmp_path / "m.safetensors")
    overrides = [f"weights={tmp_path / 'm.safetensors'}", f"layout={layout}", "ranks=1", "methods=rtn,biloco"]
    assert cli.main(["run", "biloco", *overrides, f"--workdir={tmp_path / 'w'}"]) == 0
    saved = safetensors.load_file(tmp_path / "w" / "quantized.safetensors")
    assert {name.rsplit(".", 1)[0] for name in saved} == {"a.weight", "b.weight"}
    assert saved["a.weight.codes"].shape == (32, 24)
    error = {row.labels["method"]: row.values["error"] for row in read_result(tmp_path / "w").rows}
    assert set(error) == {"rtn", "biloco"} and error["biloco"] < error["rtn"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("methods=bilico", "did you mean 'biloco'"),
        ("format=int4", "format must be one of"),
        ("rounding=up", "rounding must be one of"),
        ("hessian=half", "hessian must be one of"),
        ("layout=x", "layout must be"),
        ("ranks=0", "ranks must be >= 1"),
        ("save=awk", "save must be one of the methods"),
        ("weights=/nowhere.safetensors", "cannot read '/nowhere.safetensors'"),
        ("data.calibration=0", "data.calibration must be >= 1"),
    ],
)
def test_bad_settings(override, message, tmp_path, capsys):
    assert cli.main(["run", "biloco", override, f"--workdir={tmp_path / 'w'}"]) != 0
    assert message in capsys.readouterr().err


def test_bad_weights_are_named(tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.numpy")
    bad = np.ones((8, 32), np.float32)
    bad[3, 4] = np.nan
    for number, (w, message) in enumerate(
        ((bad, "'a.weight' holds NaN"), (np.ones((1, 16), np.float32), "'a.weight': "))
    ):
        safetensors.save_file({"a.weight": w}, tmp_path / f"{number}.safetensors")
        command = ["run", "biloco", f"weights={tmp_path / f'{number}.safetensors'}", "methods=biloco", "ranks=1"]
        assert cli.main([*command, f"--workdir={tmp_path / str(number)}"]) != 0
        assert message in capsys.readouterr().err


def test_describe():
    facts = experiment.describe(configs.load("biloco", "tiny"))
    assert facts["matrices"] == 15 and facts["weights quantised"] < facts["parameters"]
