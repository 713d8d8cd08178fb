"""Messages: Python's arguments below the terminal, flags in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from offspec.cli.flag_declarations import FLAGS, with_flags
from offspec.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
BELOW = [file for folder in ("offspec", "loaders", "scheduler") for file in (ROOT / folder).rglob("*.py")]
# The terminal says --draft self:FILE, org/name@REVISION and --arithmetic deterministic.
PYTHON_ONLY = {"exit_file", "revision", "deterministic"}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def flags_of_the_program() -> set[str]:
    found = set[str]()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        found |= {flag for parameter in command.params for flag in parameter.opts}
    return found


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines, an f-string as one, without docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inner = set[int]()
    for node in ast.walk(tree):  # what holds others comes before them
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            inner |= set(map(id, node.values))
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


@pytest.mark.slow
def test_messages_below_the_terminal_name_arguments_that_have_a_flag() -> None:
    """A command line as a whole may stand there: `offspec distill MODEL --exit-layer N`, `pip install --no-deps`.

    What stands between backticks is a setting that the terminal knows, or only Python.
    """
    flags_of_the_program()
    found = [(file.relative_to(ROOT), line, text) for file in BELOW for line, text in texts(file)]
    flags = [each for each in found if FLAG.search(re.sub(r"(offspec [a-z]+ [A-Z]|pip install ).*", "", each[2]))]
    assert flags == []
    named = {name for *_, text in found for name in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", text)}
    words = {"values", "sized"}  # in a sample text and in an assertion
    assert named - words - PYTHON_ONLY <= FLAGS.keys()
    assert not PYTHON_ONLY & FLAGS.keys()


def test_declared_flags_are_the_programs() -> None:
    flags = flags_of_the_program()
    assert FLAGS["learn_file"] == "--learn-file"
    assert set(FLAGS.values()) <= flags


def test_arguments_become_flags() -> None:
    flags_of_the_program()
    message = "set a smaller `context`, `draft=lookup`, or `learn_file=/a b/c`; `foo` and `vocab=1` stay, as texts do"
    assert with_flags(message) == (
        "set a smaller --context, --draft lookup, or --learn-file /a b/c; `foo` and `vocab=1` stay, as texts do"
    )
    assert with_flags("`vram=80 GiB` and `texts`") == "--vram 80 GiB and --text"
