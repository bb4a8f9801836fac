"""Run folders, exit codes, resuming, and the absl entry of an experiment."""

import importlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxlab.core import config as configs
from jaxlab.core import doctor, run
from jaxlab.core.errors import CheckpointError, ConfigError, NonFiniteError


@pytest.fixture
def toy(fakelab: Path) -> ModuleType:
    return importlib.import_module("fakelab.experiments.toy")


def config(*overrides: str) -> ConfigDict:
    return configs.apply_overrides(configs.load("toy", package="fakelab"), overrides)


def start(toy: ModuleType, *overrides: str, **options: object) -> int:
    options = {"name": "toy:tiny", "command": ["jaxlab", "run", "toy:tiny", *overrides]} | options
    return run.launch(toy.main, config(*overrides), **options)


def test_a_run_leaves_its_record(toy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(toy, "lr=0.25", workdir="a b", seed=4) == 0
    out = capsys.readouterr().out
    assert out.startswith("devices: 8 cpu devices"), "devices come first"
    assert "report: a b/report.md" in out and "loss: 1.25" in out
    folder = Path("a b")
    stored = configs.from_json((folder / "config.json").read_text())
    assert (stored.seed, stored.optim.lr, stored.optim.betas, stored.limit) == (4, 0.25, (0.9, 0.95), None)
    env = json.loads((folder / "env.json").read_text())
    assert env["name"] == "toy:tiny" and env["seed"] == 4 and env["corpus_sha256"] == "abc"
    assert env["backend"] == "cpu" and len(env["devices"]) == 8 and env["processes"] == 1
    assert env["versions"]["jax"] == jax.__version__ and env["versions"]["numpy"] == np.__version__
    assert env["resume"] == "jaxlab run toy:tiny lr=0.25 '--workdir=a b' --resume"
    assert run.resume_command(folder) == env["resume"]
    assert (folder / "report.md").exists() and (folder / "result.json").exists()
    assert (folder / "calls.txt").read_text() == "4 0.25\n"


def test_default_folders_are_new_each_time(toy: ModuleType) -> None:
    assert [start(toy), start(toy)] == [0, 0]
    names = sorted(path.name for path in Path("runs").iterdir())
    assert len(names) == 2
    assert all(re.fullmatch(r"toy-tiny-\d{8}-\d{6}(-2)?", name) for name in names)


def test_a_used_folder_is_refused(toy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    Path("used").mkdir()
    Path("used/mine.txt").write_text("keep")
    assert start(toy, workdir="used") == 2
    assert "run folder used is already used; continue it with --resume" in capsys.readouterr().err
    assert sorted(path.name for path in Path("used").iterdir()) == ["mine.txt"]
    Path("empty").mkdir()
    assert start(toy, workdir="empty") == 0


def test_resume_continues_the_same_settings_only(toy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(toy, "steps=5", workdir="w") == 0
    assert start(toy, "steps=6", "lr=0.1", workdir="w", resume=True) == 2
    err = capsys.readouterr().err
    assert "cannot resume w with other settings" in err
    assert "optim.lr: was 0.5, is 0.1" in err and "steps: was 5, is 6" in err
    assert start(toy, "steps=5", workdir="w", resume=True) == 0
    env = json.loads(Path("w/env.json").read_text())
    assert len(env["resumed"]) == 1 and env["resumed"][0]["started"] > env["started"]
    assert len(Path("w/calls.txt").read_text().splitlines()) == 2


def test_resume_without_a_folder_takes_the_newest_of_the_name(
    toy: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(toy, resume=True) == 2
    assert "nothing to resume: runs/ holds no run of 'toy:tiny'" in capsys.readouterr().err
    for name in ("toy:tiny", "toy:tiny", "toy:large"):
        assert start(toy, name=name) == 0
    newest = sorted(Path("runs").glob("toy-tiny-*"))[-1]
    assert start(toy, resume=True) == 0
    assert len((newest / "calls.txt").read_text().splitlines()) == 2
    assert start(toy, workdir="nowhere", resume=True) == 2
    assert "nowhere holds no run" in capsys.readouterr().err and not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("fail", "code", "message"),
    [
        ("nan", 1, "metric 'loss' is nan at step 7; no checkpoint was saved"),
        ("config", 2, "error: optim.lr must be positive"),
        ("interrupt", 130, "interrupted; resume with: jaxlab run toy:tiny fail=interrupt --workdir=w --resume"),
    ],
)
def test_failures_have_exit_codes_and_messages(
    toy: ModuleType, capsys: pytest.CaptureFixture[str], fail: str, code: int, message: str
) -> None:
    assert start(toy, f"fail={fail}", workdir="w") == code
    assert message in capsys.readouterr().err
    assert not Path("w/report.md").exists()


def test_the_last_good_checkpoint_is_named(toy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(toy, "fail=nan", workdir="w") == 1
    Path("w/checkpoints/3").mkdir(parents=True)
    capsys.readouterr()
    assert start(toy, "fail=nan", workdir="w", resume=True) == 1
    assert "the last good checkpoint is in w/checkpoints" in capsys.readouterr().err


def test_one_statement_about_the_last_checkpoint(toy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Sweeps keep checkpoints in their cells, and a training loop that knows the step has said so itself."""

    def main(config: ConfigDict, workdir: Path) -> run.Result:
        for cell, done in (("a", True), ("b", False)):
            (workdir / f"cells/{cell}/checkpoints/1").mkdir(parents=True)
            if done:
                (workdir / f"cells/{cell}/cell.json").touch()
        raise NonFiniteError(2, "loss", float("nan"), hint=hints.pop())

    hints = ["", "the last good checkpoint is of step 1"]
    assert run.launch(main, config(), name="toy:tiny", workdir="hint") == 1
    err = capsys.readouterr().err
    assert err == "error: metric 'loss' is nan at step 2; the last good checkpoint is of step 1\n"
    assert run.launch(main, config(), name="toy:tiny", workdir="none") == 1
    err = capsys.readouterr().err
    assert err == "error: metric 'loss' is nan at step 2; the last good checkpoint is in none/cells/b/checkpoints\n"

    def refused(config: ConfigDict, workdir: Path) -> run.Result:
        raise CheckpointError("does not fit")

    assert run.launch(refused, config(), name="toy:tiny", workdir="refused") == 1
    assert capsys.readouterr().err == "error: does not fit\n"


def test_facts_of_a_run_do_not_change(toy: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(toy, workdir="w") == 0
    run.add_env(Path("w"), {"corpus_sha256": "abc", "sizes": (1, 2)})
    run.add_env(Path("w"), {"sizes": (1, 2)})
    with pytest.raises(
        CheckpointError, match=r"w/env\.json: the run was started with corpus_sha256='abc', now it is 'd'"
    ):
        run.add_env(Path("w"), {"corpus_sha256": "d"})
    assert json.loads(Path("w/env.json").read_text())["corpus_sha256"] == "abc"


@pytest.mark.parametrize("text", [None, "", '{"name": "toy', "[]", "{}"])
@pytest.mark.parametrize("file", ["config.json", "env.json"])
def test_damaged_files_of_a_run_are_named(
    toy: ModuleType, capsys: pytest.CaptureFixture[str], file: str, text: str | None
) -> None:
    assert start(toy, workdir="w") == 0
    path = Path("w") / file
    path.unlink() if text is None else path.write_text(text)
    assert start(toy, workdir="w", resume=True) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "Traceback" not in err
    if (file, text) == ("config.json", "{}"):
        assert "optim.lr: was absent, is 0.5" in err
    elif (file, text) == ("config.json", None):
        assert "w holds no run (no config.json)" in err
    else:
        assert re.search(f"w/{file} is (missing or )?damaged", err)
        assert "put a copy of it back, or start a new run in another --workdir" in err
    assert len(Path("w/calls.txt").read_text().splitlines()) == 1


def test_resume_without_a_folder_skips_what_holds_no_record(
    toy: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(toy) == 0
    for name, text in (("foo", None), ("bar", "{"), ("baz", "{}")):
        Path("runs", name).mkdir()
        Path("runs", name, "config.json").write_text("{}")
        if text is not None:
            Path("runs", name, "env.json").write_text(text)
    assert start(toy, resume=True) == 0
    out = capsys.readouterr().out
    assert all(f"skipped: runs/{name}/env.json is " in out for name in ("foo", "bar", "baz"))


@pytest.mark.parametrize("workdir", ["afile/sub", "afile", "/proc/xx/y", "n" * 300])
def test_a_folder_that_cannot_be_made(toy: ModuleType, capsys: pytest.CaptureFixture[str], workdir: str) -> None:
    Path("afile").touch()
    for resume in (False, True):
        assert start(toy, workdir=workdir, resume=resume) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and workdir in err
    Path("runs").touch()
    assert start(toy) == 2
    assert "cannot make the run folder runs: " in capsys.readouterr().err


def test_system_exit_and_bugs_pass_through(toy: ModuleType) -> None:
    with pytest.raises(SystemExit) as stopped:
        start(toy, "fail=stopped", workdir="w")
    assert stopped.value.code == 0
    with pytest.raises(IndexError, match="a bug"):
        start(toy, "fail=bug", workdir="v")


def test_requirements_stop_the_run_before_it_starts(
    toy: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS")
    for kind, plugin in (("gpu", "cuda"), ("tpu", "tpu")):
        monkeypatch.setattr(doctor, "probe", lambda: doctor.Probe(lambda name: False, None, None, ""))
        assert start(toy, workdir="w", require=kind) == 2
        err = capsys.readouterr().err
        assert f"--require {kind}: JAX runs on cpu; the system shows none, and JAX's {plugin} plugin" in err
        assert f"[{plugin}]'" in err, "the command that adds it"
    assert not Path("w").exists()
    assert start(toy, workdir="w", require="cpu") == 0
    assert start(toy, workdir="v", require="npu") == 2


def test_distributed_without_a_cluster_says_what_is_missing(
    toy: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def initialize(*args: object) -> None:
        seen.append(args)
        raise ValueError("no cluster was found")

    monkeypatch.setattr(run.mesh, "initialize", initialize)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    assert start(toy, workdir="w", distributed=True) == 2
    assert seen == [("localhost:1234", 2, 1)]
    assert "--distributed: no cluster was found" in capsys.readouterr().err
    monkeypatch.setenv("JAX_PROCESS_ID", "one")
    assert start(toy, workdir="w", distributed=True) == 2
    assert "JAX_PROCESS_ID must be a whole number, got 'one'" in capsys.readouterr().err


def test_only_process_zero_writes(
    toy: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two processes gets the folder from the first and leaves no file of its own."""
    sent = np.zeros(4096, np.uint8)
    sent[: len(b"ok elsewhere")] = np.frombuffer(b"ok elsewhere", np.uint8)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(run.multihost_utils, "broadcast_one_to_all", lambda data: sent)
    folders = []

    def main(config: ConfigDict, workdir: Path) -> run.Result:
        folders.append(workdir)
        run.add_env(workdir, {"fact": 1})
        return run.Result(title="Toy", summary={"loss": 1.0})

    assert run.launch(main, config(), name="toy:tiny") == 0
    assert folders == [Path("elsewhere")]
    assert not Path("elsewhere").exists() and not Path("runs").exists()
    assert capsys.readouterr().out == ""
    sent[:] = 0
    sent[: len(b"error used")] = np.frombuffer(b"error used", np.uint8)
    assert run.launch(main, config(), name="toy:tiny") == 2, "an error of process 0 stops the others too"


def test_seed_replaces_seed_or_seeds() -> None:
    assert run.with_seed(ConfigDict({"seed": 0}), 5).seed == 5
    assert run.with_seed(ConfigDict({"seed": 3}), None).seed == 3
    assert run.with_seed(ConfigDict({"seeds": (0, 1)}), 5).seeds == (5,)
    with pytest.raises(ConfigError, match="seed must be >= 0, got -1"):
        run.with_seed(ConfigDict({"seed": 0}), -1)
    with pytest.raises(ConfigError, match="neither seed nor seeds"):
        run.with_seed(ConfigDict({"steps": 0}), 1)


def test_git_state_is_that_of_the_checkout_that_tracks_the_code(tmp_path: Path) -> None:
    def git(*args: str) -> None:
        identity = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        subprocess.run(["git", "-C", str(tmp_path), *args], check=True, capture_output=True, env=os.environ | identity)

    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("")
    assert run.git_state(tmp_path / "pkg") is None, "no checkout"
    git("init")
    (tmp_path / "other.txt").write_text("")
    git("add", "other.txt")
    git("commit", "-m", "first")
    assert run.git_state(tmp_path / "pkg") is None, "a checkout of something else"
    git("add", ".")
    git("commit", "-m", "second")
    state = run.git_state(tmp_path / "pkg")
    assert state is not None and len(state["revision"]) == 40 and state["dirty"] is False
    (tmp_path / "pkg/__init__.py").write_text("changed")
    assert run.git_state(tmp_path / "pkg") == state | {"dirty": True}


App = Callable[..., int]


@pytest.fixture
def app(toy: ModuleType) -> App:
    def call(*args: str) -> int:
        with pytest.raises(SystemExit) as exit_:
            run.app(toy.main, "toy", ["toy.py", *args], package="fakelab")
        return exit_.value.code

    return call


def stored(workdir: str) -> dict:
    return configs.flatten(configs.from_json((Path(workdir) / "config.json").read_text()))


def test_absl_flags_do_what_the_command_does(app: App, toy: ModuleType) -> None:
    file = "fakelab/configs/toy.py"
    args = [f"--config={file}:large", "--config.optim.lr=3", "--config.layers=4,5", "--config.nesterov=false"]
    assert app(*args, "--workdir=flags", "--seed=2") == 0
    overrides = ["optim.lr=3", "layers=4,5", "nesterov=false"]
    settings = configs.apply_overrides(configs.load("toy", "large", package="fakelab"), overrides)
    assert run.launch(toy.main, settings, name="toy:large", workdir="command", seed=2) == 0
    assert repr(stored("flags")) == repr(stored("command"))
    env = json.loads(Path("flags/env.json").read_text())
    assert env["name"] == "toy:large"
    assert env["resume"].startswith("python -m fakelab.experiments.toy --config=fakelab/configs/toy.py:large")
    assert env["resume"].endswith("--seed=2 --workdir=flags --resume")
    assert app(*args, "--workdir=flags", "--seed=2", "--resume") == 0


def test_absl_flags_in_their_other_spellings(app: App) -> None:
    file = "fakelab/configs/toy.py"
    assert app("--config", file, "--config.optim.lr", "2", "--noconfig.optim.nesterov", "--workdir", "w") == 0
    assert (stored("w")["optim.lr"], stored("w")["optim.nesterov"], stored("w")["steps"]) == (2.0, False, 3)
    assert app("--workdir=v") == 0, "the method's own file is the default"
    assert stored("v")["optim.lr"] == 0.5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config=missing.py"], "config file 'missing.py' does not exist; the installed one is"),
        (["--config=fakelab/configs/toy.py:lage"], "unknown variant 'lage' of 'toy'; did you mean 'large'?"),
        (["--config.optim.rl=3"], "unknown config key 'optim.rl'; did you mean 'optim.lr'?"),
        (["--config.steps=3.5"], "steps must be an integer, got '3.5'"),
        (["--wrkdir=w"], "Unknown command line flag 'wrkdir'"),
        (["--require=npu"], "npu"),
        (["steps=3"], "unexpected argument 'steps=3'; settings are changed with --config.key=value"),
        (["--config"], "--config needs a file"),
    ],
)
def test_absl_flags_errors(app: App, capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert app(*args) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert not Path("runs").exists()


def test_absl_help(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    assert app("--help") == 0
    out = capsys.readouterr().out
    assert out.startswith("Toy method: halves a number.") and "--config" in out and "--workdir" in out
