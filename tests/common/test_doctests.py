"""Every example in a docstring of the package runs and prints what it says."""

import ast
import doctest
import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jaxlab

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
ROOT = Path(jaxlab.__file__).parent


def modules() -> list[str]:
    """Names of all modules of the package, those behind links included; none is imported for it."""
    paths = [Path(folder) / file for folder, _, files in os.walk(ROOT, followlinks=True) for file in files]
    names = {
        ".".join(("jaxlab", *path.relative_to(ROOT).with_suffix("").parts)) for path in paths if path.suffix == ".py"
    }
    return sorted(name.removesuffix(".__init__") for name in names if not name.endswith("__main__"))


class Finder(doctest.DocTestFinder):
    """Also finds functions that a decorator has wrapped, whose globals are the decorator's module's."""

    def _from_module(self, module: ModuleType | None, object: Any) -> bool:
        if module is not None and getattr(object, "__module__", None) == module.__name__:
            return True
        return super()._from_module(module, object)


def examples_in_source(module: ModuleType) -> int:
    """Number of doctest examples in the docstrings of a file, read without running it."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    docs = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return sum(len(doctest.DocTestParser().get_examples(doc)) for doc in docs if doc)


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in Finder().find(module, name):
        runner.run(test)
    failed, attempted = runner.summarize(verbose=False)
    assert failed == 0, capsys.readouterr().out
    assert attempted == examples_in_source(module), "some examples were not found, so they never ran"
