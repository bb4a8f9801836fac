"""A run from start to report: its folder, its record of the environment, its exit code.

A run folder holds `config.json`, `env.json`, `metrics.jsonl`, `checkpoints/`, `plots/*.png` and `report.md`.
`launch` writes the first two, calls the experiment, and writes the report; the experiment writes the rest.
Exit codes: 0 done (also after SIGTERM, saved), 1 the run failed, 2 the command or the machine is not right,
130 interrupted.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict, FrozenConfigDict

import jaxlab
from jaxlab.core import config as configs
from jaxlab.core import doctor, mesh
from jaxlab.core.errors import CheckpointError, ConfigError, MissingExtraError, NonFiniteError
from jaxlab.core.metrics import atomic_write
from jaxlab.core.report import Result, write_report

RUNS = Path("runs")
_REPAIR = "put a copy of it back, or start a new run in another --workdir"


class DeviceError(RuntimeError):
    """The devices that were asked for are not there."""


def launch(
    main: Callable[[Any, Path], Result],
    config: ConfigDict,
    *,
    name: str,
    workdir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    seed: int | None = None,
    require: str | None = None,
    distributed: bool = False,
    command: Sequence[str] | None = None,
) -> int:
    """Runs an experiment in a run folder and writes its report.

    Args:
      main: the experiment, `main(config, workdir) -> Result`.
      config: its settings.
      name: `NAME` or `NAME:variant`, for the folder's name and the record.
      workdir: the run folder; None makes a new one below `runs/`, or with `resume` takes the newest of this name.
      resume: continue in a folder that holds a run with the same settings.
      seed: replaces `config.seed`, or `config.seeds` by this one.
      require: `"cpu"`, `"gpu"` or `"tpu"`; anything else than this backend is an error before the run starts.
      distributed: start `jax.distributed`; process 0 alone writes.
      command: the command that started this, for the line that says how to resume; None takes `sys.argv`.

    Returns:
      The process's exit code. SystemExit, which a run raises after SIGTERM, passes through.
    """
    command = list(sys.argv if command is None else command)
    folder = None
    try:
        start_devices(require, distributed=distributed)
        config = with_seed(config, seed)
        folder = _agree(lambda: _open_folder(config, name, workdir, resume, command))
        _say(f"run folder: {folder}")
        result = main(config, folder)
    except (ConfigError, DeviceError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except NonFiniteError as error:
        print(f"error: {error}{'' if error.hint else _last_checkpoint(folder)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        hint = f"; resume with: {resume_command(folder)}" if folder and (folder / "env.json").exists() else ""
        print(f"interrupted{hint}", file=sys.stderr)
        return 130
    if jax.process_index() == 0:
        for key, value in result.summary.items():
            _say(f"  {key}: {value:.6g}" if isinstance(value, float) else f"  {key}: {value}")
        _say(f"report: {write_report(folder, result)}")
    return 0


def start_devices(require: str | None, *, distributed: bool = False) -> None:
    """Starts JAX's backend, prints its devices, and holds it to `require`.

    Several processes find each other by the cluster they run on (Slurm, Open MPI, TPU, GKE), or by
    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`.

    Raises:
      DeviceError: when no backend starts or it is not the required one; says why and what to do.
    """
    if require not in (None, "cpu", "gpu", "tpu"):
        raise ConfigError(f"require must be cpu, gpu or tpu, got {require!r}")
    if distributed:
        try:
            mesh.initialize(os.environ.get("JAX_COORDINATOR_ADDRESS"), *map(_env_int, ("NUM_PROCESSES", "PROCESS_ID")))
        except (ValueError, RuntimeError) as error:
            raise DeviceError(f"--distributed: {error}") from error
    try:
        backend = jax.default_backend()
    except RuntimeError as error:
        why = f"; {doctor.advice(require, doctor.probe())}" if require else ""
        raise DeviceError(f"JAX could not start a backend: {error}{why}") from error
    _say(f"devices: {mesh.describe_devices()}")
    if require not in (None, backend):
        why = doctor.advice(require, doctor.probe())
        raise DeviceError(f"--require {require}: JAX runs on {backend}; {why}")


def with_seed(config: ConfigDict, seed: int | None) -> FrozenConfigDict:
    """A frozen copy with `seeds=(seed,)` where the config has `seeds`, else `seed=seed`; as it was for None.

    Raises:
      ConfigError: when the seed is negative or the config has neither key.

    >>> with_seed(ConfigDict({"seeds": (0, 1, 2)}), 7).seeds
    (7,)
    """
    new = ConfigDict(configs.to_dict(config))
    if seed is not None:
        if seed < 0:
            raise ConfigError(f"seed must be >= 0, got {seed}")
        if "seeds" in new:
            new.seeds = (seed,)
        elif "seed" in new:
            new.seed = seed
        else:
            raise ConfigError("--seed was given, but this config has neither seed nor seeds")
    return FrozenConfigDict(new)


def add_env(workdir: Path, facts: Mapping[str, Any]) -> None:
    """Adds facts that only the experiment knows, such as the corpus hash, to `env.json`; process 0 alone writes.

    Raises:
      CheckpointError: when a fact was another one before the run was resumed.
    """
    if jax.process_index() == 0:
        env, facts = _read_env(workdir), json.loads(json.dumps(dict(facts)))
        for name, value in facts.items():
            if env.get(name, value) != value:
                raise CheckpointError(
                    f"{workdir / 'env.json'}: the run was started with {name}={env[name]!r}, now it is {value!r}; "
                    "resuming would not continue the same run"
                )
        _write_json(workdir / "env.json", env | facts)


def resume_command(workdir: Path) -> str:
    """The shell command that continues the run in `workdir`."""
    return _read_env(workdir)["resume"]


def environment(name: str, config: ConfigDict, command: Sequence[str], workdir: Path) -> dict[str, Any]:
    """What `env.json` records: versions, code revision, devices, seed and the commands that start and resume."""
    started_with = _without_folder(command)
    return {
        "name": name,
        "started": datetime.now().astimezone().isoformat(timespec="microseconds"),
        "command": shlex.join(command),
        "resume": shlex.join([*started_with, f"--workdir={workdir}", "--resume"]),
        "seed": config.get("seeds", config.get("seed")),
        "versions": doctor.versions(),
        "git": git_state(Path(jaxlab.__file__).parent),
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "devices": [str(device) for device in jax.devices()],
        "device_kind": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Revision of the checkout that tracks `folder/__init__.py`, and whether it has changes; None elsewhere."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=20)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed package may lie below some other project's checkout, whose revision would say nothing.
    if git("ls-files", "--error-unmatch", "__init__.py") is None or (revision := git("rev-parse", "HEAD")) is None:
        return None
    return {"revision": revision, "dirty": git("status", "--porcelain") != ""}


def app(
    main: Callable[[Any, Path], Result], name: str, argv: Sequence[str] | None = None, *, package: str = "jaxlab"
) -> None:
    """Entry of `python -m jaxlab.experiments.NAME --config=configs/NAME.py:variant --config.key=value`; exits.

    The config file is loaded by `ml_collections.config_flags`; keys, types and messages of the overrides are those of
    `jaxlab run`, and so is everything after that.

    Args:
      main: the experiment.
      name: the method's name.
      argv: program and arguments; None takes `sys.argv`.
      package: the package that holds the method.
    """
    from absl import flags
    from ml_collections import config_flags

    program, *args = sys.argv if argv is None else argv
    method = configs.method(name, package=package)
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "Run folder.", flag_values=values)
    flags.DEFINE_boolean("resume", False, "Continue the run in its folder.", flag_values=values)
    flags.DEFINE_integer("seed", None, "Replaces the config's seed.", flag_values=values)
    flags.DEFINE_enum("require", None, ["cpu", "gpu", "tpu"], "Backend that must be there.", flag_values=values)
    flags.DEFINE_boolean("distributed", False, "Start jax.distributed.", flag_values=values)
    flags.DEFINE_boolean("help", False, "Show this.", short_name="h", flag_values=values)
    try:
        file, overrides, rest = _split_config_flags(args)
        path, _, variant = (file or str(method.path)).partition(":")
        if not Path(path).is_file():
            raise ConfigError(f"config file {path!r} does not exist; the installed one is {method.path}")
        found = configs.read_method(Path(path))
        variant = variant or found.default
        configs.check_variant(found, variant)
        holder = config_flags.DEFINE_config_file(
            "config", f"{path}:{variant}", "Config file, as NAME.py:variant.", flag_values=values, sys_argv=[program]
        )
        unused = values([program, *rest])[1:]
        if values.help:
            print(f"{method.summary}\n{values.get_help()}")
            sys.exit(0)
        if unused:
            raise ConfigError(f"unexpected argument {unused[0]!r}; settings are changed with --config.key=value")
        config = configs.apply_overrides(holder.value, overrides)
    except (ConfigError, flags.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(
        launch(
            main,
            config,
            name=f"{name}:{variant}",
            workdir=values.workdir,
            resume=values.resume,
            seed=values.seed,
            require=values.require,
            distributed=values.distributed,
            command=["python", "-m", f"{package}.experiments.{name}", *args],
        )
    )


def _split_config_flags(args: Sequence[str]) -> tuple[str | None, list[str], list[str]]:
    """Splits arguments into the file of `--config`, the `key=value` of each `--config.key`, and the others.

    As for other absl flags, a value may follow `=` or be the next argument, and `--config.key` and `--noconfig.key`
    alone set a boolean.
    """
    file, overrides, rest = None, [], []
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        match = re.fullmatch(r"--?(no)?config(?:\.([^=]+))?(?:=(.*))?", arg, re.DOTALL)
        if match is None:
            rest.append(arg)
            continue
        negated, key, value = match.groups()
        if value is None and key and (negated or not queue or queue[0].startswith("-")):
            value = "false" if negated else "true"
        elif value is None:
            if not queue:
                raise ConfigError("--config needs a file")
            value = queue.pop(0)
        if key:
            overrides.append(f"{key}={value}")
        else:
            file = value
    return file, overrides, rest


def _open_folder(
    config: ConfigDict, name: str, workdir: str | os.PathLike[str] | None, resume: bool, command: Sequence[str]
) -> Path:
    """Makes a new run folder, or checks the one to resume; writes `config.json` and `env.json`."""
    if resume:
        folder = Path(workdir) if workdir is not None else newest_run(name)
        if not os.path.isfile(folder / "config.json"):  # Path.exists raises for names that are too long
            raise ConfigError(f"cannot resume: {folder} holds no run (no config.json); start it without --resume")
        changed = configs.differences(_read_json(folder / "config.json"), config)
        if changed:
            raise ConfigError(f"cannot resume {folder} with other settings:\n  " + "\n  ".join(changed))
        env = _read_env(folder)
        again = environment(name, config, command, folder)
        _write_json(folder / "env.json", env | {"resumed": [*env.get("resumed", []), again]})
        return folder
    try:
        folder = Path(workdir) if workdir is not None else _new_folder(name)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"run folder {folder} is already used; continue it with --resume or name another --workdir"
            )
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "env.json", environment(name, config, command, folder))
        atomic_write(folder / "config.json", configs.to_json(config))
    except OSError as error:
        raise ConfigError(f"cannot make the run folder {workdir or RUNS}: {error}; name another --workdir") from error
    return folder


def newest_run(name: str, runs: Path = RUNS) -> Path:
    """The run of `name` below `runs` that started last; folders without a readable record are skipped, with a line.

    Raises:
      ConfigError: when there is none.
    """
    found = []
    for path in runs.glob("*/config.json"):
        try:
            env = _read_env(path.parent)
        except ConfigError as error:
            _say(f"skipped: {error}")
            continue
        if env["name"] == name:
            found.append((env["started"], path.parent))
    if not found:
        raise ConfigError(f"nothing to resume: {runs}/ holds no run of {name!r}; name its folder with --workdir")
    return max(found)[1]


def _new_folder(name: str) -> Path:
    """Creates `runs/NAME-VARIANT-time`, with a number behind it where two runs start in the same second."""
    stem = f"{name.replace(':', '-')}-{datetime.now():%Y%m%d-%H%M%S}"
    RUNS.mkdir(exist_ok=True)
    for number in range(1, 1000):
        folder = RUNS / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"{RUNS}/ already has 999 runs called {stem}")


def _env_int(name: str) -> int | None:
    text = os.environ.get(f"JAX_{name}")
    if text is not None and not text.isdigit():
        raise ConfigError(f"JAX_{name} must be a whole number, got {text!r}")
    return None if text is None else int(text)


def _agree(open_folder: Callable[[], Path]) -> Path:
    """Runs `open_folder` on process 0 and gives every process its path or its error."""
    if jax.process_count() == 1:
        return open_folder()
    reply = ""
    if jax.process_index() == 0:
        try:
            reply = f"ok {open_folder()}"
        except ConfigError as error:
            reply = f"error {error}"
    data = np.zeros(4096, np.uint8)
    encoded = reply.encode()[: data.size]
    data[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    agreed = bytes(np.asarray(multihost_utils.broadcast_one_to_all(data))).rstrip(b"\0").decode(errors="replace")
    kind, _, text = agreed.partition(" ")
    if kind == "error":
        raise ConfigError(text)
    return Path(text)


def _without_folder(command: Sequence[str]) -> list[str]:
    """The command less `--workdir` and `--resume`."""
    kept: list[str] = []
    skip = False
    for arg in command:
        if skip or re.fullmatch(r"--?(workdir=.*|resume(=.*)?)", arg, re.DOTALL):
            skip = False
        elif re.fullmatch(r"--?workdir", arg):
            skip = True
        else:
            kept.append(arg)
    return kept


def _last_checkpoint(folder: Path | None) -> str:
    # The cells of a sweep run one after the other: the one that stopped is the one that is not recorded as done.
    places = [folder / "checkpoints", *folder.glob("cells/*/checkpoints")] if folder else []
    for place in places:
        if place.is_dir() and any(place.iterdir()) and not (place.parent / "cell.json").exists():
            return f"; the last good checkpoint is in {place}"
    return "; no checkpoint was saved"


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it holds a {type(data).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is missing or damaged ({error}); {_REPAIR}") from error
    return data


def _read_env(folder: Path) -> dict[str, Any]:
    env = _read_json(folder / "env.json")
    for key in ("name", "started", "resume"):
        if not isinstance(env.get(key), str):
            raise ConfigError(f"{folder / 'env.json'} is damaged (it has no {key!r}); {_REPAIR}")
    return env


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    atomic_write(path, json.dumps(data, indent=2) + "\n")
