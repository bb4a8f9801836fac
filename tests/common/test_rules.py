"""The rules of the code base that a machine can hold: who imports whom, sizes, printing, links, the wheel's names."""

import ast
import configparser
import importlib
import importlib.metadata
import os
import re
import tokenize
from pathlib import Path

import pytest

import jaxlab
from jaxlab.core import config as configs

PACKAGE = Path(jaxlab.__file__).parent
ROOT = PACKAGE.parent
LINKS = ("configs", "experiments", "kernels")
BASE = ("core", "data", "nn", "quant")  # importable by every field package
# What each part may import of this package; any other part is a field package.
MAY_IMPORT = {
    "kernels": {"kernels"},
    **{part: {"kernels", *BASE} for part in BASE},
    "configs": set(),
    "cli": {"core", "configs", "experiments"},
    "__main__": {"cli"},
}
PRINTERS = {"cli.py", "core/progress.py", "core/run.py"}
checkout = pytest.mark.skipif(not (ROOT / "setup.cfg").exists(), reason="the rules are about the checkout")


def sources() -> list[Path]:
    """Every module of the package, those behind the links included, relative to the package."""
    found = [Path(folder) / name for folder, _, names in os.walk(PACKAGE, followlinks=True) for name in names]
    return sorted(path.relative_to(PACKAGE) for path in found if path.suffix == ".py")


def tree(path: Path) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text(encoding="utf-8"), str(path))


def part_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imported(module: ast.Module) -> set[str]:
    """Dotted names of everything a module imports, at any depth; `from a import b` counts as `a.b`."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def allowed(part: str) -> set[str]:
    if part == "experiments":  # everything but the command
        return {part_of(path) for path in sources()} - {"cli", "__main__"}
    return MAY_IMPORT.get(part, {"kernels", *BASE, "optim", part})


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_point_down(path: Path) -> None:
    part, names = part_of(path), imported(tree(path))
    parts = {name.split(".")[1] for name in names if name.startswith("jaxlab.")} - {"__version__"}
    assert parts <= allowed(part), f"{part} may import {sorted(allowed(part))}"
    outside = {name.split(".")[0] for name in names} - {"jaxlab"}
    assert not outside & set(LINKS), "a package called kernels exists elsewhere: write jaxlab.kernels"
    if part == "kernels":
        assert outside & {"flax", "optax", "orbax", "chex", "ml_collections", "matplotlib"} == set()
    if part == "configs":
        assert outside <= {"ml_collections"}
    assert not outside & {"tensorflow", "torch"}


@pytest.mark.parametrize("path", sources(), ids=str)
def test_modules_are_small_and_silent(path: Path) -> None:
    text = (PACKAGE / path).read_text(encoding="utf-8")
    limit = 150 if path.parent.name == "experiments" and path.stem in configs.names() else 600
    assert text.count("\n") <= limit, f"at most {limit} lines"
    assert ast.get_docstring(tree(path)), "a module needs a docstring"
    calls = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    prints = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    assert not prints or str(path) in PRINTERS, "library code returns or raises; it does not print"


@pytest.mark.parametrize("path", sources(), ids=str)
def test_functions_take_few_arguments(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            assert len(arguments) < 20, f"{node.name} takes {len(arguments)} arguments; group them in a dataclass"


@pytest.mark.parametrize("name", configs.names())
def test_configs_are_short_and_explained(name: str) -> None:
    found = configs.method(name)
    for variant in found.variants:
        keys = configs.flatten(configs.load(name, variant))
        assert len(keys) <= 40, f"{name}:{variant} has {len(keys)} keys"
        configs.to_json(configs.load(name, variant))
    with tokenize.open(found.path) as file:
        tokens = list(tokenize.generate_tokens(file.readline))
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    for line, key in _defined_keys(ast.parse(found.path.read_text(encoding="utf-8"))):
        assert line in comments or line - 1 in comments, f"{found.path.name}:{line}: {key} has no comment"


def _defined_keys(module: ast.Module) -> list[tuple[int, str]]:
    """(line, key) where a config file first defines each setting: `c.a.b = value`, a dict literal, or a keyword."""
    found: dict[str, int] = {}
    for node in ast.walk(module):
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            pairs = [(ast.unparse(node.targets[0]), node.value)]
        if isinstance(node, ast.Dict):
            pairs = [(ast.unparse(k), v) for k, v in zip(node.keys, node.values, strict=True) if k is not None]
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("ConfigDict", "dict"):
            pairs = [(k.arg, k.value) for k in node.keywords if k.arg]
        for key, value in pairs:
            is_group = isinstance(value, ast.Dict) or (
                isinstance(value, ast.Call) and "Dict" in ast.unparse(value.func)
            )
            if not is_group:
                found[key] = min(value.lineno, found.get(key, value.lineno))
    return sorted((line, key) for key, line in found.items())


@checkout
def test_methods_have_their_four_files() -> None:
    for name in configs.names():
        assert (ROOT / "experiments" / f"{name}.py").exists()
        assert list(PACKAGE.glob(f"*/{name}.py")), f"no package has {name}.py"
        assert list((ROOT / "tests").glob(f"*/test_{name}.py")), f"no folder of tests has test_{name}.py"


@checkout
def test_there_are_enough_tests() -> None:
    def lines(paths: list[Path]) -> int:
        return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)

    source = lines([PACKAGE / path for path in sources()])
    tests = lines(list((ROOT / "tests").rglob("*.py")))
    assert tests >= 0.6 * source, f"{tests} lines of tests for {source} lines of source"


@checkout
def test_links_make_the_top_folders_importable() -> None:
    for name in LINKS:
        assert os.readlink(PACKAGE / name) == f"../{name}"
        module = importlib.import_module(f"jaxlab.{name}")
        assert Path(module.__file__).samefile(ROOT / name / "__init__.py")


@checkout
def test_every_folder_of_modules_is_a_package() -> None:
    for path in sources():
        assert (PACKAGE / path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py: no wheel has it"


@checkout
def test_one_place_says_what_is_needed() -> None:
    """Extras that errors name exist, and the tested set has every direct dependency."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    for path in sources():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "require":
                named = [k.value.value for k in node.keywords if k.arg == "extra" and isinstance(k.value, ast.Constant)]
                assert set(named) <= set(extras), f"{path}: no extra {named}"
    wanted = setup["options"]["install_requires"].split() + extras["test"].split()
    pinned = {re.split("==", line)[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    missing = {re.split("[>=<]", line)[0].lower() for line in wanted} - {name.replace("_", "-") for name in pinned}
    assert not {name for name in missing if name.replace("-", "_") not in pinned}


def test_the_installed_package_has_one_top_level_name() -> None:
    """Another package called `kernels` exists: nothing but `jaxlab` may land beside it."""
    try:
        installed_as = importlib.metadata.distribution("jaxlab")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed")
    # An editable install leaves `jaxlab.egg-info` in the checkout, which lists sources and has no RECORD.
    files = installed_as.files or [] if installed_as.read_text("RECORD") else []
    if not any(file.as_posix() == "jaxlab/__init__.py" for file in files):
        pytest.skip("not installed from a wheel")
    tops = {file.parts[0] for file in files if not file.parts[0].endswith(".dist-info")} - {"..", "__pycache__"}
    assert tops == {"jaxlab"}
    installed = {file.as_posix() for file in files}
    assert {f"jaxlab/{link}/__init__.py" for link in LINKS} <= installed
    assert "jaxlab/experiments/launch/slurm.sh" in installed
