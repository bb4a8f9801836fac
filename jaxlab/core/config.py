"""Settings of an experiment: found by name, changed from the command line with types checked, written as JSON.

A method `NAME` has one file `configs/NAME.py` with a docstring, `VARIANTS` (a tuple of names) and
`get_config(variant="tiny")`. What a list needs is read from the file's syntax tree, so nothing is imported for it.
"""

import ast
import copy
import difflib
import importlib
import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from jaxlab.core.errors import ConfigError, did_you_mean

_LEAF_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Method:
    """What a config file says about itself.

    Attributes:
      name: the method's name, which is the file's.
      summary: first line of the file's docstring.
      variants: the names that `get_config` knows.
      default: the variant that `get_config()` returns without an argument.
      path: the file.
    """

    name: str
    summary: str
    variants: tuple[str, ...]
    default: str
    path: Path


def read_method(path: Path) -> Method:
    """Reads a config file's docstring, `VARIANTS` and default variant without running it.

    Raises:
      ConfigError: when the file has no docstring, no `VARIANTS`, or no `get_config` with a default among them.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    doc = ast.get_docstring(tree)
    variants: tuple[str, ...] = ()
    default = None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "VARIANTS" for t in node.targets):
            variants = tuple(ast.literal_eval(node.value))
        if isinstance(node, ast.FunctionDef) and node.name == "get_config" and node.args.defaults:
            default = ast.literal_eval(node.args.defaults[0])
    if not doc or default not in variants:
        raise ConfigError(
            f"{path} needs a docstring, VARIANTS and get_config(variant=...) whose default is one of VARIANTS; "
            f"it has VARIANTS={variants!r} and default {default!r}"
        )
    return Method(path.stem, doc.splitlines()[0], variants, default, path)


def methods(package: str = "jaxlab") -> dict[str, Method]:
    """Every method of `package` by name, from its `configs` folder, sorted; imports none of them.

    >>> all(method.summary for method in methods().values())
    True
    """
    spec = importlib.util.find_spec(f"{package}.configs")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    paths = sorted(path for folder in folders for path in Path(folder).glob("[a-z]*.py"))
    return {path.stem: read_method(path) for path in paths}


def method(name: str, *, package: str = "jaxlab") -> Method:
    """The method called `name`.

    Raises:
      ConfigError: when there is none; the message names the nearest.
    """
    found = methods(package)
    if name not in found:
        raise ConfigError(f"unknown method {name!r}{did_you_mean(name, found)}")
    return found[name]


def names(package: str = "jaxlab") -> list[str]:
    """Names of all methods, sorted."""
    return list(methods(package))


def variants(name: str, *, package: str = "jaxlab") -> tuple[str, ...]:
    """Names of a method's variants, in the order of its file."""
    return method(name, package=package).variants


def split_name(text: str, *, package: str = "jaxlab") -> tuple[str, str]:
    """Splits `NAME[:variant]`, checks both, and fills in the default variant.

    Raises:
      ConfigError: for an unknown name or variant; the message names the nearest.
    """
    name, _, variant = text.partition(":")
    found = method(name, package=package)
    variant = variant or found.default
    check_variant(found, variant)
    return name, variant


def check_variant(found: Method, variant: str) -> None:
    """Raises `ConfigError` naming the nearest where the method has no such variant."""
    if variant not in found.variants:
        raise ConfigError(f"unknown variant {variant!r} of {found.name!r}{did_you_mean(variant, found.variants)}")


def load(name: str, variant: str | None = None, *, package: str = "jaxlab") -> ConfigDict:
    """The config of a method's variant, as its file gives it.

    Args:
      name: a name from `names()`.
      variant: a name from `variants(name)`; None takes the default.
      package: the package whose `configs` are searched.

    Returns:
      A mutable, locked `ConfigDict`; `apply_overrides` freezes it.

    Raises:
      ConfigError: for an unknown name or variant.
    """
    name, variant = split_name(f"{name}:{variant or ''}", package=package)
    config = importlib.import_module(f"{package}.configs.{name}").get_config(variant)
    return config.lock()


def flatten(config: ConfigDict | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All values by dotted path, sorted within each group.

    >>> flatten(ConfigDict({"seed": 0, "lowcomm": {"workers": 8}}))
    {'lowcomm.workers': 8, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key in config:
        value = config[key]
        flat.update(flatten(value, f"{prefix}{key}.") if _is_group(value) else {f"{prefix}{key}": value})
    return flat


def apply_overrides(config: ConfigDict, overrides: Iterable[str]) -> FrozenConfigDict:
    """Sets `key=value` pairs, each value converted to the type of the one it replaces.

    A key is a dotted path, or its last part where only one path ends so. Booleans are `true` or `false`, tuples
    `1,2,4`, and `none` is allowed where the config has None.

    Args:
      config: the config to start from; it is left as it was.
      overrides: strings such as `"lowcomm.workers=8"`.

    Returns:
      A frozen copy with the new values.

    Raises:
      ConfigError: for a text without `=`, an unknown or ambiguous key, or a value of another type.

    >>> config = ConfigDict({"seed": 0, "lowcomm": {"workers": 8, "betas": (0.9, 0.95)}})
    >>> new = apply_overrides(config, ["workers=4", "lowcomm.betas=0.8,0.9"])
    >>> new.lowcomm.workers, new.lowcomm.betas
    (4, (0.8, 0.9))
    """
    new = copy.deepcopy(ConfigDict(config))  # a copy by ConfigDict alone shares its field references
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"expected key=value, got {override!r}")
        path = resolve_key(new, key)
        *groups, leaf = path.split(".")
        parent = new
        for group in groups:
            parent = parent[group]
        parent[leaf] = coerce(path, text, parent[leaf], parent.get_type(leaf))
    return FrozenConfigDict(new)


def resolve_key(config: ConfigDict, key: str) -> str:
    """The full dotted path that `key` stands for: itself, or the one path that ends in it.

    Raises:
      ConfigError: when it is unknown (names the nearest), a group, or the end of several paths (lists them).
    """
    paths = list(flatten(config))
    if key in paths:
        return key
    below = [path for path in paths if path.startswith(f"{key}.")]
    if below:
        raise ConfigError(f"{key!r} is a group; set one of its keys: {', '.join(below)}")
    ends = [path for path in paths if path.endswith(f".{key}")]
    if len(ends) > 1:
        raise ConfigError(f"config key {key!r} is ambiguous; write one of: {', '.join(ends)}")
    if ends:
        return ends[0]
    hint = did_you_mean(key, paths)
    leaves = {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}
    near = difflib.get_close_matches(key.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.7)
    if near and "did you mean" not in hint:
        hint = f"; did you mean {leaves[near[0]]!r}?"
    raise ConfigError(f"unknown config key {key!r}{hint}")


def coerce(key: str, text: str, current: Any, kind: type | None = None) -> Any:
    """Converts `text` to the type of `current`.

    Args:
      key: the dotted path, for messages.
      text: what the user wrote.
      current: the value that it replaces.
      kind: the declared type of a placeholder, used when `current` is None.

    Raises:
      ConfigError: when `text` is not such a value.

    >>> coerce("lr", "3", 0.1), coerce("sizes", "1,2", (4,)), coerce("on", "true", False)
    (3.0, (1, 2), True)
    """
    if current is None:
        if text.lower() == "none":
            return None
        if kind in (None, type(None), object):
            return _literal(text)
        current = kind()
    if isinstance(current, tuple | list):
        return _coerce_tuple(key, text, tuple(current))
    if isinstance(current, bool):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{key} must be true or false, got {text!r}")
        return text.lower() == "true"
    if isinstance(current, int | float):
        kind = type(current)
        try:
            value = kind(text)
        except ValueError:
            raise ConfigError(f"{key} must be {_article(kind)}, got {text!r}") from None
        if math.isnan(value):
            raise ConfigError(f"{key} must be a number, got {text!r}")
        return value
    if isinstance(current, str):
        return text
    raise ConfigError(f"{key} is of type {type(current).__name__}, which cannot be set from the command line")


def to_dict(config: ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
    """Nested plain dicts with sequences as tuples, as `to_json` and `from_json` agree on.

    Raises:
      ConfigError: when a value is not a number, a string, a boolean, None, or a sequence of these.
    """
    return {k: to_dict(config[k]) if _is_group(config[k]) else _plain(k, config[k]) for k in config}


def to_json(config: ConfigDict | Mapping[str, Any]) -> str:
    """The config as indented JSON; `from_json` gives back equal values of equal types."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def from_json(text: str) -> FrozenConfigDict:
    """Reads what `to_json` wrote: sequences become tuples, whole numbers stay int and 1.0 stays float.

    >>> from_json(to_json(ConfigDict({"a": (1, 2.0), "b": {"c": None}}))).to_dict()
    {'a': (1, 2.0), 'b': {'c': None}}
    """
    return FrozenConfigDict(to_dict(json.loads(text)))


def differences(old: Mapping[str, Any] | ConfigDict, new: Mapping[str, Any] | ConfigDict) -> list[str]:
    """One line for each key whose value or type differs, or that only one of the two has.

    >>> differences({"a": 1, "b": 2}, {"a": 1.0, "c": 3})
    ['a: was 1, is 1.0', 'b: was 2, is absent', 'c: was absent, is 3']
    """
    left, right = flatten(to_dict(old)), flatten(to_dict(new))
    left, right = ({key: repr(value) for key, value in flat.items()} for flat in (left, right))
    return [
        f"{key}: was {left.get(key, 'absent')}, is {right.get(key, 'absent')}"
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    ]


def _is_group(value: Any) -> bool:
    return isinstance(value, ConfigDict | Mapping)


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_plain(key, item) for item in value)
    if type(value) not in _LEAF_TYPES:
        allowed = ", ".join(kind.__name__ for kind in _LEAF_TYPES)
        raise ConfigError(f"config key {key!r} holds a {type(value).__name__}; allowed: {allowed}, or tuples of these")
    return value


def _coerce_tuple(key: str, text: str, current: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(isinstance(item, tuple) for item in current):
        raise ConfigError(f"{key} is a tuple of tuples, which cannot be set from the command line")
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("()", "[]"):
        inner = inner[1:-1]
    items = [item.strip().strip("'\"") for item in inner.split(",")]
    if items[-1] == "":  # "1," is a tuple of one and "" is the empty tuple, as in Python
        items.pop()
    if not current:
        return tuple(_literal(item) for item in items)
    kinds = {type(item) for item in current}
    like = current[0] if len(kinds) == 1 else 0.0 if kinds == {int, float} else None
    if like is None:
        raise ConfigError(f"{key} is a tuple of mixed types, which cannot be set from the command line")
    return tuple(coerce(f"{key}[{i}]", item, like) for i, item in enumerate(items))


def _literal(text: str) -> Any:
    """The value of a Python literal or of true, false, none; else the text itself."""
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, int | float | str | tuple) else text


def _article(kind: type) -> str:
    return "an integer" if kind is int else "a number"
