"""Exceptions that name what was wrong, and the small helpers that build their messages."""

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class NonFiniteError(FloatingPointError):
    """A metric became NaN or infinite during training.

    Attributes:
      step: the step whose metric was not finite.
      metric: the metric's name.
      value: what it was.
      hint: what is known about the last checkpoint; empty where the raiser does not know.
    """

    def __init__(self, step: int, metric: str, value: float, hint: str = ""):
        self.step, self.metric, self.value, self.hint = step, metric, value, hint
        super().__init__(f"metric {metric!r} is {value} at step {step}" + (f"; {hint}" if hint else ""))


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not fit the state it is restored into."""


class ConfigError(ValueError):
    """A config key or value is not allowed."""


class MissingExtraError(ImportError):
    """An optional dependency is absent; the message holds the command that adds it."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the option nearest to `name`, or a list of all options.

    >>> did_you_mean("isolco", ["isoloco", "diloco"])
    "; did you mean 'isoloco'?"
    >>> did_you_mean("zzz", ["isoloco", "diloco"])
    '; allowed: diloco, isoloco'
    """
    options = sorted(options)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(options)}"


def require(module: str, *, extra: str) -> ModuleType:
    """Imports an optional dependency, or says which extra provides it.

    Args:
      module: the module to import, such as `"tensorflow_datasets"`.
      extra: the extra of this package that installs it.

    Raises:
      MissingExtraError: when the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise MissingExtraError(f"{module!r} is not installed; add it with: pip install 'jaxlab[{extra}]'") from error
