"""The calls of offspec in README and docs, as they stand there: so many that each flag occurs, nightly all."""

from __future__ import annotations

import pytest

from ..each_value import covering
from ..fixed_choices import end_with_test
from ..pages import Command, commands
from .sandbox import Sandbox, check_runs


@pytest.fixture(autouse=True)
def _fixed_until_the_test_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    end_with_test(monkeypatch)


def parts_of(command: Command) -> set[tuple[str, str]]:
    """The subcommand, alone and with each variable and flag."""
    subcommand, *args = command.args
    return {(subcommand, word) for word in ("", *command.environment, *args) if not word or word.startswith("-")}


SHOWN = [command for command in commands() if command.program == "offspec"]
CHOSEN = covering({command: parts_of(command) for command in SHOWN})


@pytest.mark.slow
@pytest.mark.usefixtures("learning_takes_no_time")
@pytest.mark.parametrize(
    "command", [pytest.param(each, id=str(each), marks=() if each in CHOSEN else pytest.mark.nightly) for each in SHOWN]
)
def test_commands_run(command: Command, sandbox: Sandbox) -> None:
    check_runs(command, sandbox)
