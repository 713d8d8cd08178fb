"""The calls of offspec in README and docs, as they stand there."""

from __future__ import annotations

import pytest

from ..fixed_choices import end_with_test
from ..pages import Command, commands
from .sandbox import Sandbox, check_runs


@pytest.fixture(autouse=True)
def _fixed_until_the_test_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    end_with_test(monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("learning_takes_no_time")
@pytest.mark.parametrize("command", [found for found in commands() if found.program == "offspec"], ids=str)
def test_commands_run(command: Command, sandbox: Sandbox) -> None:
    check_runs(command, sandbox)
