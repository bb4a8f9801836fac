"""README keeps its word: its Python runs, and its commands name things that exist and settings that resolve."""

import re
import shlex
from pathlib import Path

import pytest

from jaxlab import cli
from jaxlab.core import config as configs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
if not README.exists():
    pytest.skip("no README.md beside the tests", allow_module_level=True)
TEXT = README.read_text(encoding="utf-8")


def block(marker: str) -> str:
    """The fenced block behind an HTML comment."""
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", TEXT, re.DOTALL)
    assert found, f"README has no block behind <!-- {marker} -->"
    return found.group(1)


def commands() -> list[list[str]]:
    """Every `jaxlab ...` command in code, as words without comments."""
    code = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)) + "\n".join(re.findall(r"`([^`\n]+)`", TEXT))
    found = re.findall(r"(?:^|/|&& )(jaxlab (?:run|show|bench|list|doctor)\b[^\n|&]*)", code, re.MULTILINE)
    return [shlex.split(text, comments=True) for text in found]


def test_the_example_is_short_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = block("example")
    assert len(code.strip().splitlines()) <= 11
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == "(4, 10) (16, 4)\n"


def test_there_are_commands() -> None:
    assert {words[1] for words in commands()} >= {"run", "show", "bench", "list", "doctor"}


@pytest.mark.parametrize(
    "words", [w for w in commands() if w[1] in ("run", "show", "bench") and "NAME" not in w], ids=" ".join
)
def test_commands_resolve(words: list[str]) -> None:
    """Names, variants, keys and options of each command are accepted, without training."""
    args, extra = cli._parser().parse_known_args(words[1:])
    assert not [text for text in extra if text.startswith("-")]
    name, variant = configs.split_name(args.name)
    configs.apply_overrides(configs.load(name, variant), args.overrides)


def test_scripts_and_modules_exist() -> None:
    for path in re.findall(r"experiments/launch/\w+\.sh", TEXT):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"--config=(configs/\w+\.py)", TEXT):
        assert (ROOT / path).is_file(), path


def test_start_is_two_commands_of_one_line() -> None:
    for marker in ("run-command", "test-command"):
        assert len(block(marker).strip().splitlines()) == 1
