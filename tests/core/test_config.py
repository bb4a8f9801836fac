"""Configs: found without imports, changed with checked types, and equal to themselves after JSON."""

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict, FrozenConfigDict
from ml_collections.config_dict import placeholder

from jaxlab.core import config as configs
from jaxlab.core.errors import ConfigError


def example() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "limit": placeholder(int),
            "anything": None,
            "flag": False,
            "optim": {"lr": 0.1, "betas": (0.9, 0.95), "name": "adamw"},
            "model": {"layers": (1, 2), "name": "mlp", "mixed": (1, "a"), "pairs": ((1, 2),), "empty": ()},
        }
    ).lock()


def test_methods_are_read_without_importing_them(fakelab: Path) -> None:
    found = configs.methods("fakelab")
    assert configs.names("fakelab") == ["toy", "toys"]
    assert found["toy"].summary == "Toy method: halves a number."
    assert found["toy"].variants == ("tiny", "large") and found["toy"].default == "tiny"
    assert configs.variants("toys", package="fakelab") == ("wide", "deep") and found["toys"].default == "deep"
    assert "fakelab.configs.toy" not in sys.modules


def test_load_takes_the_variant_and_the_default(fakelab: Path) -> None:
    assert configs.load("toy", package="fakelab").steps == 3
    assert configs.load("toy", "large", package="fakelab").steps == 30
    assert configs.split_name("toys", package="fakelab") == ("toys", "deep")
    config = configs.load("toy", package="fakelab")
    with pytest.raises(AttributeError):
        config.new_key = 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tooy", "unknown method 'tooy'; did you mean 'toy'?"),
        ("zzzz", "unknown method 'zzzz'; allowed: toy, toys"),
        ("toy:lrge", "unknown variant 'lrge' of 'toy'; did you mean 'large'?"),
    ],
)
def test_unknown_names(fakelab: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        configs.split_name(name, package="fakelab")
    assert str(error.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "VARIANTS = ('a',)\ndef get_config(variant='a'): pass",  # no docstring
        "'''Doc.'''\ndef get_config(variant='a'): pass",  # no VARIANTS
        "'''Doc.'''\nVARIANTS = ('a',)\ndef get_config(variant='b'): pass",  # default is no variant
        "'''Doc.'''\nVARIANTS = ('a',)\ndef get_config(variant): pass",  # no default
    ],
)
def test_a_malformed_config_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.py needs a docstring, VARIANTS and get_config"):
        configs.read_method(path)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=7", "seed", 7),
        ("seed=-7", "seed", -7),
        ("optim.lr=3", "optim.lr", 3.0),
        ("lr=1e-3", "optim.lr", 1e-3),
        ("flag=True", "flag", True),
        ("flag=false", "flag", False),
        ("optim.name=7", "optim.name", "7"),
        ("optim.name=a=b", "optim.name", "a=b"),
        ("optim.name=", "optim.name", ""),
        ("betas=0.8,1", "optim.betas", (0.8, 1.0)),
        ("betas=(0.8, 0.9)", "optim.betas", (0.8, 0.9)),
        ("layers=4", "model.layers", (4,)),
        ("layers=4,", "model.layers", (4,)),
        ("layers=[4,5,6]", "model.layers", (4, 5, 6)),
        ("layers=", "model.layers", ()),
        ("model.empty=1,2.5,x", "model.empty", (1, 2.5, "x")),
        ("limit=5", "limit", 5),
        ("limit=none", "limit", None),
        ("anything=None", "anything", None),
        ("anything=2.5", "anything", 2.5),
        ("anything=words", "anything", "words"),
    ],
)
def test_values_take_the_type_of_what_they_replace(override: str, path: str, value: object) -> None:
    config = example()
    new = configs.apply_overrides(config, [override])
    got = configs.flatten(new)[path]
    assert got == value and type(got) is type(value)
    if isinstance(value, tuple):
        assert [type(x) for x in got] == [type(x) for x in value]
    others = {k: v for k, v in configs.flatten(new).items() if k != path}
    assert others == {k: v for k, v in configs.flatten(example()).items() if k != path}
    assert configs.flatten(config) == configs.flatten(example()), "the original was changed"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=3.5", "seed must be an integer, got '3.5'"),
        ("seed=1e3", "seed must be an integer, got '1e3'"),
        ("seed=", "seed must be an integer, got ''"),
        ("seed=none", "seed must be an integer, got 'none'"),
        ("seed=true", "seed must be an integer, got 'true'"),
        ("limit=3.5", "limit must be an integer, got '3.5'"),
        ("lr=fast", "optim.lr must be a number, got 'fast'"),
        ("lr=nan", "optim.lr must be a number, got 'nan'"),
        ("flag=1", "flag must be true or false, got '1'"),
        ("layers=1,x", "model.layers[1] must be an integer, got 'x'"),
        ("model.mixed=1,b", "model.mixed is a tuple of mixed types"),
        ("pairs=1,2", "model.pairs is a tuple of tuples"),
        ("optim=3", "'optim' is a group; set one of its keys: optim.betas, optim.lr, optim.name"),
        ("name=x", "config key 'name' is ambiguous; write one of: model.name, optim.name"),
        ("optim.l=1", "unknown config key 'optim.l'; did you mean 'optim.lr'?"),
        ("optm.name=1", "unknown config key 'optm.name'; did you mean 'optim.name'?"),
        ("layer=1", "unknown config key 'layer'; did you mean 'model.layers'?"),
        ("zzz=1", "unknown config key 'zzz'; allowed: anything, flag, limit"),
        ("seed", "expected key=value, got 'seed'"),
        ("=3", "expected key=value, got '=3'"),
    ],
)
def test_bad_overrides_say_what_is_allowed(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        configs.apply_overrides(example(), [override])
    assert message in str(error.value)


def test_the_result_is_frozen_and_can_be_changed_again() -> None:
    new = configs.apply_overrides(example(), ["seed=1"])
    assert isinstance(new, FrozenConfigDict)
    with pytest.raises(AttributeError):
        new.seed = 2
    again = configs.apply_overrides(new, ["seed=3", "seed=4"])
    assert (new.seed, again.seed) == (1, 4), "the last of two wins"


def test_references_follow_the_key_that_they_point_to() -> None:
    config = example().unlock()
    config.model.steps = config.get_ref("seed")
    assert configs.apply_overrides(config, ["seed=5"]).model.steps == 5
    assert config.model.steps == 0


leaves = st.one_of(
    st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text(max_size=8), st.none()
)
values = st.one_of(leaves, st.lists(leaves, max_size=3).map(tuple))
keys = st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(lambda key: not hasattr(ConfigDict, key))
trees = st.recursive(
    st.dictionaries(keys, values, max_size=4), lambda sub: st.dictionaries(keys, sub, max_size=3), max_leaves=8
)


@given(trees)
def test_json_gives_back_equal_values_of_equal_types(tree: dict) -> None:
    back = configs.from_json(configs.to_json(FrozenConfigDict(tree)))
    assert repr(configs.flatten(back)) == repr(configs.flatten(FrozenConfigDict(tree)))
    assert configs.differences(FrozenConfigDict(tree), back) == []


def test_json_refuses_what_it_could_not_give_back() -> None:
    with pytest.raises(ConfigError, match="config key 'path' holds a PosixPath; allowed: bool, int, float, str"):
        configs.to_json(ConfigDict({"a": {"path": Path("x")}}))


def test_differences_see_values_types_and_keys() -> None:
    old, new = ConfigDict({"a": {"b": 1, "c": 2}, "d": (1,)}), ConfigDict({"a": {"b": 1.0}, "d": (2,), "e": None})
    assert configs.differences(old, new) == [
        "a.b: was 1, is 1.0",
        "a.c: was 2, is absent",
        "d: was (1,), is (2,)",
        "e: was absent, is None",
    ]


def test_infinity_is_a_number() -> None:
    assert math.isinf(configs.apply_overrides(example(), ["lr=inf"]).optim.lr)
