"""Messages: Python's arguments below the terminal, flags in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from offspec.cli.flag_names import FLAGS, with_flags
from offspec.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
BELOW = [file for folder in ("offspec", "loaders", "scheduler") for file in (ROOT / folder).rglob("*.py")]
PYTHON_ONLY = {"exit_file", "revision"}  # the terminal says --draft self:FILE and org/name@REVISION
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def flags_of_the_program() -> set[str]:
    found = set[str]()
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        found |= {flag for parameter in command.params for flag in parameter.opts}
    return found


@cache
def texts(file: Path) -> list[tuple[int, str]]:
    """The strings of a module with their lines, an f-string as one, without docstrings."""
    return list(_texts(file))


def _texts(file: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["offspec", "loaders", "scheduler"])
def test_messages_below_the_terminal_name_arguments(folder: str) -> None:
    """A command line as a whole may stand there: `offspec distill MODEL --exit-layer N`, `pip install --no-deps`."""
    found = [
        (file.relative_to(ROOT), line, text)
        for file in (ROOT / folder).rglob("*.py")
        for line, text in texts(file)
        if FLAG.search(re.sub(r"(offspec [a-z]+ [A-Z]|pip install ).*", "", text))
    ]
    assert found == []


@pytest.mark.slow
def test_arguments_in_messages_have_a_flag() -> None:
    """What stands between backticks in a message is a setting that the terminal knows, or only Python."""
    flags_of_the_program()
    named = {name for file in BELOW for _, text in texts(file) for name in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", text)}
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
