"""Checks of arguments that the algorithms share: concrete scalars, integers and transformations."""

import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def scalar(name: str, value: Any, allowed: str = "a real number") -> float | None:
    """A hyper-parameter as a float to check, or None for a traced one, whose value is not known yet.

    Args:
      name, value: the argument.
      allowed: what it may be, for the message.

    Raises:
      TypeError: for what is no real scalar.

    Example:
      >>> scalar("momentum", np.array(0.5))
      0.5
    """
    if isinstance(value, jax.core.Tracer):
        return None
    array = np.asarray(value)
    real = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
    if array.ndim or not real:
        raise TypeError(f"{name} must be {allowed}, got {value!r}")
    return float(array)


def integer(name: str, value: Any) -> int:
    """A Python or NumPy integer as `int`.

    Raises:
      TypeError: for anything else, `True` and 2.0 included.

    Example:
      >>> integer("sync_every", np.int64(3))
      3
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except (TypeError, jax.errors.JAXTypeError):
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def count(name: str, value: Any) -> None:
    """Raises as `integer`, and `ValueError` for less than 1.

    Example:
      >>> count("num_workers", 2)
    """
    if integer(name, value) < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


def pattern(name: str, value: str) -> re.Pattern[str]:
    """A compiled regular expression; raises `ValueError` with `name` and the text for one that is none.

    Example:
      >>> pattern("layers", "layers/").pattern
      'layers/'
    """
    try:
        return re.compile(value)
    except re.error as error:
        raise ValueError(f"{name} must be a regular expression, got {value!r}: {error}") from error


def transformation(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` is an optax transformation.

    Example:
      >>> import optax
      >>> transformation("inner", optax.sgd(0.1))
    """
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        raise TypeError(f"{name} must be an optax.GradientTransformation, got {value!r}")
