"""The `jaxlab` command: list, show, run, report, bench, doctor.

Nothing here imports JAX before a command needs it, so that `jaxlab list` and `jaxlab --help` answer at once.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

import jaxlab
from jaxlab.core import config as configs
from jaxlab.core.errors import ConfigError, MissingExtraError, did_you_mean

_EXAMPLES = """\
examples:
  jaxlab list
  jaxlab show isoloco:tiny lowcomm.workers=4
  jaxlab run isoloco lowcomm.workers=4 --seed 1 --workdir runs/four
  jaxlab run isoloco lowcomm.workers=4 --seed 1 --workdir runs/four --resume
  jaxlab report runs/four runs/eight
"""


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong in one line, as every other error of this command."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nsee: {self.prog} --help\n")


def main(argv: Sequence[str] | None = None, *, package: str = "jaxlab") -> int:
    """Runs one command and returns its exit code: 0 done, 1 the run failed, 2 wrong usage, 130 interrupted.

    Args:
      argv: the arguments after the program's name; None takes `sys.argv`.
      package: the package whose `configs` and `experiments` are used.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    commands = list(_COMMANDS)
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        parser.error(f"unknown command {argv[0]!r}{did_you_mean(argv[0], commands)}")
    args, extra = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    # argparse takes positionals in one block only; overrides may also stand behind options.
    for text in extra:
        if text.startswith("-") or not hasattr(args, "overrides"):
            options = [option for action in args.options for option in action.option_strings]
            hint = did_you_mean(text.split("=")[0], options) if text.startswith("-") else ""
            parser.error(f"unexpected argument {text!r}{hint}")
        args.overrides.append(text)
    try:
        return _COMMANDS[args.command](args, package)
    except (ConfigError, MissingExtraError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has what it wanted
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxlab",
        description=jaxlab.__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxlab {jaxlab.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, summary: str, *, takes_config: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.set_defaults(options=command._actions)
        if takes_config:
            command.add_argument("name", metavar="NAME[:variant]", help="a method of `jaxlab list`")
            command.add_argument("overrides", metavar="key=value", nargs="*", help="config keys to change")
        return command

    add("list", "list the methods and their variants", takes_config=False)
    add("show", "print a method's settings and sizes without running it")
    run = add("run", "run an experiment and write its report")
    run.add_argument("--workdir", metavar="DIR", help="run folder (default: a new one below runs/)")
    run.add_argument("--resume", action="store_true", help="continue the run in DIR, or the newest of this name")
    run.add_argument("--seed", type=int, metavar="N", help="replaces the config's seed")
    run.add_argument("--require", choices=("cpu", "gpu", "tpu"), help="stop unless JAX runs on this")
    run.add_argument("--distributed", action="store_true", help="one of several processes (Slurm, MPI, TPU, GKE, ...)")
    report = add("report", "compare finished runs: mean and 95%% interval over seeds", takes_config=False)
    report.add_argument("dirs", metavar="DIR", nargs="+", help="run folders")
    add("bench", "measure a method's speed")
    add("doctor", "print versions and devices, what is missing and how to add it", takes_config=False)
    return parser


def _list(args: argparse.Namespace, package: str) -> int:
    found = configs.methods(package)
    width = max((len(name) for name in found), default=0)
    for name, method in found.items():
        shown = ", ".join(f"{v} (default)" if v == method.default else v for v in method.variants)
        print(f"{name:<{width}}  {method.summary}\n{'':<{width}}  variants: {shown}")
    return 0


def _show(args: argparse.Namespace, package: str) -> int:
    name, variant = configs.split_name(args.name, package=package)
    config = configs.apply_overrides(configs.load(name, variant, package=package), args.overrides)
    print(f"{name}:{variant}  {configs.method(name, package=package).summary}\n\nsettings")
    print(_columns(configs.flatten(config)))
    print(f"\nsizes\n{_columns(_experiment(name, package).describe(config))}")
    return 0


def _run(args: argparse.Namespace, package: str) -> int:
    name, variant = configs.split_name(args.name, package=package)
    config = configs.apply_overrides(configs.load(name, variant, package=package), args.overrides)
    from jaxlab.core.run import launch  # imports JAX

    seed = [] if args.seed is None else [f"--seed={args.seed}"]
    require = [] if args.require is None else [f"--require={args.require}"]
    distributed = ["--distributed"] if args.distributed else []
    return launch(
        _experiment(name, package).main,
        config,
        name=f"{name}:{variant}",
        workdir=args.workdir,
        resume=args.resume,
        seed=args.seed,
        require=args.require,
        distributed=args.distributed,
        command=["jaxlab", "run", f"{name}:{variant}", *args.overrides, *seed, *require, *distributed],
    )


def _report(args: argparse.Namespace, package: str) -> int:
    from jaxlab.core.report import compare

    try:
        markdown, _ = compare(args.dirs)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
    print(markdown)
    return 0


def _bench(args: argparse.Namespace, package: str) -> int:
    name, config = args.name, None
    # A bench of kernels alone has no method, and so no settings.
    if name in configs.names(package) or args.overrides or not _exists(f"{package}.experiments.bench.{name}"):
        name, variant = configs.split_name(args.name, package=package)
        config = configs.apply_overrides(configs.load(name, variant, package=package), args.overrides)
    from jaxlab.core.report import to_markdown
    from jaxlab.core.run import start_devices

    start_devices(None)
    for table in _module(f"{package}.experiments.bench.{name}").main(config):
        print(f"\n{to_markdown(table)}")
    return 0


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # such as a name with a variant behind it
        return False


def _doctor(args: argparse.Namespace, package: str) -> int:
    import jax

    from jaxlab.core import doctor, mesh

    try:
        backend, devices = jax.default_backend(), mesh.describe_devices()
    except RuntimeError as error:
        backend, devices = "", f"JAX could not start a backend: {error}"
    print("\n".join(doctor.report(backend, devices, doctor.probe())))
    return 0 if backend else 1


_COMMANDS = {"list": _list, "show": _show, "run": _run, "report": _report, "bench": _bench, "doctor": _doctor}


def _experiment(name: str, package: str) -> ModuleType:
    return _module(f"{package}.experiments.{name}")


def _module(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise ConfigError(f"this method has no {path.replace('.', '/')}.py") from error


def _columns(values: dict[str, Any]) -> str:
    width = max((len(key) for key in values), default=0)
    return "\n".join(f"  {key:<{width}}  {_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    """As Python writes it, but thousands separated and long fractions cut."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}".replace(",", "_") if abs(value) >= 10_000 else str(value)
    if isinstance(value, float) and len(repr(value)) > 8:
        return f"{value:.6g}"
    return value if isinstance(value, str) else repr(value)
