"""The calls of offspec in README and docs, as they stand there; of those that differ in models alone, nightly all."""

from __future__ import annotations

import itertools
import re

import pytest

from ..fixed_choices import end_with_test
from ..pages import Command, commands
from .sandbox import Sandbox, check_runs


@pytest.fixture(autouse=True)
def _fixed_until_the_test_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    end_with_test(monkeypatch)


def kind_of(command: Command) -> tuple[str, frozenset[str]]:
    """The subcommand, and its environment and flags, with those of their values that are words."""
    subcommand, *args = command.args
    pairs = itertools.pairwise([*args, ""])
    words = {f"{flag} {value}" for flag, value in pairs if flag.startswith("-") and re.fullmatch(r"\w[\w-]*", value)}
    return subcommand, frozenset((*words, *command.environment, *(arg for arg in args if arg.startswith("-"))))


SHOWN = [command for command in commands() if command.program == "offspec"]
FIRSTS = {kind_of(command): command for command in reversed(SHOWN)}


@pytest.mark.slow
@pytest.mark.usefixtures("learning_takes_no_time")
@pytest.mark.parametrize(
    "command",
    [pytest.param(each, id=str(each), marks=() if each in FIRSTS.values() else pytest.mark.nightly) for each in SHOWN],
)
def test_commands_run(command: Command, sandbox: Sandbox) -> None:
    check_runs(command, sandbox)
