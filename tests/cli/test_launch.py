"""The launch scripts, run here with stand-ins for ssh, gcloud, srun and the installed command."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import jaxlab

SCRIPTS = Path(jaxlab.__file__).parent / "experiments" / "launch"
ARGS = ["isoloco:tiny", "lowcomm.workers=4", "data.path=a b"]

# The command writes what it was started with, one file a process, then waits where the test asks for it.
JAXLAB = """#!/bin/bash
out="$LOG/${JAX_PROCESS_ID:-0}"
[[ -z ${HOLD:-} ]] || trap 'kill $!; echo saved >"$out.saved"; exit 0' TERM
{ printf '%s\\n' "$@"; echo "${JAX_COORDINATOR_ADDRESS:-}|${JAX_NUM_PROCESSES:-}|$PWD"; } >"$out.part"
if [[ -n ${HOLD:-} ]]; then sleep 60 & fi
mv "$out.part" "$out"
wait
"""
SSH = '#!/bin/bash\nshift\nexec bash -c "$1"\n'
GCLOUD = """#!/bin/bash
for arg; do case $arg in --command=*) exec bash -c "${arg#--command=}";; esac; done
cp "$5" "$HOME/jaxlab.tar.gz"
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the scripts and a stand-in for its virtual environment; stand-ins come first on the PATH."""
    shutil.copytree(SCRIPTS, tmp_path / "lab/experiments/launch")
    stand_ins = {
        "lab/.venv/bin/jaxlab": JAXLAB,
        "bin/ssh": SSH,
        "bin/gcloud": GCLOUD,
        "bin/srun": '#!/bin/bash\nshift\nexec "$@"\n',
        "bin/scontrol": '#!/bin/bash\necho "$@" >"$LOG/requeued"\n',
        "bin/python3": '#!/bin/bash\nmkdir -p "$3/bin" && cp "$LOG/../lab/.venv/bin/jaxlab" "$3/bin/"\n'
        'printf "#!/bin/bash\\n" >"$3/bin/pip" && chmod +x "$3/bin/pip"\n',
    }
    for name, text in stand_ins.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for folder in ("log", "home"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def launch(site: Path, script: str, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(site / "lab/experiments/launch" / script), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd or site)


def read(site: Path, process: int = 0) -> list[str]:
    return (site / "log" / str(process)).read_text().splitlines()


@pytest.mark.parametrize("script", ["slurm.sh", "tpu_pod.sh", "gpu_hosts.sh"])
def test_without_arguments_they_say_how_to_use_them(site: Path, script: str) -> None:
    done = launch(site, script)
    assert done.returncode == 2 and done.stderr.startswith("usage:")
    assert not any((site / "log").iterdir())


def test_gpu_hosts_starts_one_process_a_host(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTS", "node0 node1")
    monkeypatch.setenv("WORKDIR", str(site / "run dir"))
    assert launch(site, "gpu_hosts.sh", *ARGS).returncode == 0
    for process in (0, 1):
        *args, where = read(site, process)
        assert args == ["run", *ARGS, "--distributed", "--require", "gpu", "--workdir", str(site / "run dir")]
        assert where == f"node0:12355|2|{site / 'lab'}"


def test_gpu_hosts_lets_the_processes_save(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTS", "node0 node1")
    monkeypatch.setenv("WORKDIR", str(site / "run"))
    monkeypatch.setenv("HOLD", "1")
    process = subprocess.Popen(["bash", str(site / "lab/experiments/launch/gpu_hosts.sh"), *ARGS])
    try:
        deadline = time.monotonic() + 30
        while not all((site / "log" / name).exists() for name in ("0", "1")):
            assert time.monotonic() < deadline and process.poll() is None
            os.sched_yield()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
    assert {path.name for path in (site / "log").glob("*.saved")} == {"0.saved", "1.saved"}


def test_tpu_pod_installs_and_runs_on_the_slice(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TPU_NAME": "pod", "ZONE": "zone", "WORKDIR": "/mnt/run", "RESUME": "1"}.items():
        monkeypatch.setenv(name, value)
    done = launch(site, "tpu_pod.sh", *ARGS, cwd=site / "home")
    assert done.returncode == 0, done.stderr
    *args, where = read(site)
    assert args == ["run", *ARGS, "--distributed", "--require", "tpu", "--workdir", "/mnt/run", "--resume"]
    assert where.endswith("home/jaxlab"), "the copy on the host, not the checkout here"


def test_slurm_resumes_its_own_folder_until_there_is_a_report(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    expected = ["run", *ARGS, "--distributed", "--require", "gpu", "--workdir", "runs/slurm-7"]
    assert launch(site, "slurm.sh", *ARGS, cwd=site / "lab").returncode == 0
    assert read(site)[:-1] == expected
    assert (site / "log/requeued").read_text() == "requeue 7\n"
    (site / "log/requeued").unlink()
    run = site / "lab/runs/slurm-7"
    run.mkdir(parents=True)
    for name in ("config.json", "report.md"):
        (run / name).write_text("")
    assert launch(site, "slurm.sh", *ARGS, cwd=site / "lab").returncode == 0
    assert read(site)[:-1] == [*expected, "--resume"]
    assert not (site / "log/requeued").exists()
