"""The `jaxlab` command as a user meets it: output, exit codes, and that it answers without JAX."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import jaxlab
from jaxlab import cli
from jaxlab.core import doctor

ROOT = Path(jaxlab.__file__).parents[1]


def call(*args: str) -> int:
    """Exit code of a command on the fake package, also where argparse exits by itself."""
    try:
        return cli.main(args, package="fakelab")
    except SystemExit as exit_:
        return exit_.code


def python(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path.cwd())])}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, timeout=120, **options)


@pytest.mark.parametrize("command", [["list"], ["--help"], ["run", "--help"], ["--version"], ["run", "isolco"]])
def test_light_commands_do_not_import_jax_and_are_quick(command: list[str]) -> None:
    code = (
        "import sys, time; from jaxlab.cli import main\n"
        f"try: code = main({command})\n"
        "except SystemExit as exit_: code = exit_.code\n"
        "print('JAX' if 'jax' in sys.modules else 'LIGHT', time.process_time())"
    )
    word, seconds = python("-c", code).stdout.splitlines()[-1].split()
    assert word == "LIGHT"
    assert float(seconds) < 0.5, "of the processor, from the interpreter's start: other tests may keep the machine busy"


def test_the_module_is_the_command() -> None:
    done = python("-m", "jaxlab", "--version")
    assert (done.returncode, done.stdout) == (0, f"jaxlab {jaxlab.__version__}\n")


def test_list(fakelab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list") == 0
    assert capsys.readouterr().out == (
        "toy   Toy method: halves a number.\n"
        "      variants: tiny (default), large\n"
        "toys  Second toy method.\n"
        "      variants: wide, deep (default)\n"
    )
    assert "fakelab.configs.toy" not in sys.modules


def test_show(fakelab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", "toy:large", "lr=2", "limit=7") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "toy:large Toy method: halves a number."
    for line in ("steps 30", "optim.lr 2.0", "limit 7", "model.layers (1, 2)", "parameters 160_000"):
        assert line in lines
    assert "FLOPs a step 1.5e+09" in lines
    assert not Path("runs").exists()


def test_run_then_resume_then_report(fakelab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Overrides may stand on both sides of the options.
    assert call("run", "toy", "lr=0.25", "--workdir", "a", "--seed", "1", "steps=4") == 0
    out = capsys.readouterr().out
    assert out.startswith("devices: 8 cpu devices") and "report: a/report.md" in out
    stored = json.loads(Path("a/config.json").read_text())
    assert (stored["seed"], stored["steps"], stored["optim"]["lr"]) == (1, 4, 0.25)
    resume = json.loads(Path("a/env.json").read_text())["resume"]
    assert resume == "jaxlab run toy:tiny lr=0.25 steps=4 --seed=1 --workdir=a --resume"
    assert call(*resume.split()[1:]) == 0, "the printed command works"
    assert call("run", "toy", "lr=0.25", "--workdir", "a", "--resume") == 2, "seed and steps differ"
    assert "seed: was 1, is 0" in capsys.readouterr().err
    assert call("run", "toy", "lr=0.25", "--workdir=b", "--seed=3") == 0
    capsys.readouterr()
    assert call("report", "a", "b") == 0
    out = capsys.readouterr().out
    assert re.search(r"\| 0.25 \| 3(\.0+)? ± 13 \| 2 \|", out), "the mean of 2.0 and 4.0 over two seeds"
    assert call("report", "nowhere") == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_bench(fakelab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("bench", "toy", "steps=8") == 0
    out = capsys.readouterr().out
    assert out.startswith("devices:") and "Speed" in out and "| ours | 8 |" in out
    assert call("bench", "toys") == 2
    assert "this method has no fakelab/experiments/bench/toys.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["rn", "toy"], "unknown command 'rn'; did you mean 'run'?"),
        (["run", "tyo"], "unknown method 'tyo'; did you mean 'toy'?"),
        (["run", "toy:tny"], "unknown variant 'tny' of 'toy'; did you mean 'tiny'?"),
        (["run", "toy", "stps=3"], "unknown config key 'stps'; did you mean 'steps'?"),
        (["run", "toy", "steps=3.5"], "steps must be an integer, got '3.5'"),
        (["run", "toy", "--wokdir=a"], "unexpected argument '--wokdir=a'; did you mean '--workdir'?"),
        (["run", "toy", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["run", "toy", "--seed", "-3"], "seed must be >= 0, got -3"),
        (["run", "toy", "--require", "npu"], "argument --require: invalid choice: 'npu'"),
        (["run"], "the following arguments are required: NAME[:variant]"),
        (["run", "toys"], "this method has no fakelab/experiments/toys.py"),
        (["show", "toys"], "this method has no fakelab/experiments/toys.py"),
        (["list", "extra"], "unexpected argument 'extra'"),
        (["report"], "the following arguments are required: DIR"),
    ],
)
def test_wrong_usage_exits_with_two(
    fakelab: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert call(*args) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert not Path("runs").exists()


def test_no_command_prints_the_help(fakelab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 2
    assert "examples:" in capsys.readouterr().out


def test_require_gpu_stops_before_training(fakelab: Path) -> None:
    code = "import sys; from jaxlab.cli import main; sys.exit(main(sys.argv[1:], package='fakelab'))"
    done = python("-c", code, "run", "toy", "--require", "gpu", "--workdir=w", cwd=fakelab)
    assert done.returncode == 2
    assert "--require gpu: JAX runs on cpu; JAX_PLATFORMS=cpu rules it out" in done.stderr
    assert done.stdout.startswith("devices:") and not (fakelab / "w").exists()


def test_sigterm_before_training_ends_the_process(fakelab: Path) -> None:
    """Outside the training loop nothing holds the signal back."""
    (fakelab / "fakelab/experiments/toy.py").write_text(
        "def main(config, workdir):\n    print('ready', flush=True)\n    import signal\n    signal.pause()\n"
    )
    code = "import sys; from jaxlab.cli import main; sys.exit(main(sys.argv[1:], package='fakelab'))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(fakelab)])}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", "toy", "--workdir=w"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=fakelab,
    )
    try:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted; resume with: jaxlab run toy:tiny --workdir=w --resume" in err


def test_doctor_prints_versions_devices_and_extras(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for section in ("versions", "machine", "devices", "extras"):
        assert f"{section}\n" in out
    for extra in ("cuda", "tpu", "data", "tb", "wandb", "test"):
        assert f"\n  {extra:<11} " in out
    assert "8 cpu devices" in out


def probe(modules: tuple[str, ...] = (), gpu: str | None = None, platforms: str = "") -> doctor.Probe:
    return doctor.Probe(lambda name: name in modules, gpu, None, platforms)


def test_doctor_warns_of_a_gpu_that_jax_does_not_use() -> None:
    text = "\n".join(doctor.report("cpu", "1 cpu device", probe(gpu="/dev/nvidia0")))
    assert "WARNING: a gpu is present but JAX does not use it: the system shows one (/dev/nvidia0)" in text
    assert text.count(doctor.install_command("cuda")) == 2, "in the warning and in the list of extras"
    used = "\n".join(doctor.report("gpu", "1 gpu device", probe(("jax_cuda12_plugin",), gpu="/dev/nvidia0")))
    assert "WARNING" not in used and "cuda        installed" in used
    assert "WARNING" not in "\n".join(doctor.report("cpu", "1 cpu device", probe()))


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (probe(), "gpu", "the system shows none, and JAX's cuda plugin is not installed"),
        (probe(gpu="/dev/nvidia0"), "gpu", "the system shows one (/dev/nvidia0) but JAX's cuda plugin is not"),
        (probe(("jax_cuda13_plugin",)), "gpu", "plugin is installed but the system shows no such device"),
        (probe(("jax_cuda12_plugin",), "/dev/nvidia0"), "gpu", "shows a device (/dev/nvidia0), but JAX could not"),
        (probe(platforms="cpu"), "gpu", "JAX_PLATFORMS=cpu rules it out; unset it or set JAX_PLATFORMS=cuda"),
        (probe(platforms="cpu"), "tpu", "set JAX_PLATFORMS=tpu"),
        (probe(), "tpu", "JAX's tpu plugin is not installed"),
        (probe(), "cpu", "set JAX_PLATFORMS=cpu"),
    ],
)
def test_doctor_says_why_a_backend_is_missing(found: doctor.Probe, kind: str, words: str) -> None:
    assert words in doctor.advice(kind, found)


def test_extras_of_the_doctor_are_those_of_the_package() -> None:
    metadata = ROOT / "setup.cfg"
    if not metadata.exists():
        pytest.skip("runs against an installed package; the checkout has setup.cfg")
    import configparser

    parser = configparser.ConfigParser()
    parser.read(metadata)
    assert set(parser["options.extras_require"]) == set(doctor.EXTRAS)
