"""The calls of offspec in README and docs/usage.md, as they stand there."""

from __future__ import annotations

import pytest

from ..pages import Command, offspec_commands
from .sandbox import Sandbox, check_runs

PAGES = ("README.md", "docs/usage.md")


@pytest.mark.slow
@pytest.mark.parametrize("command", offspec_commands(*PAGES), ids=str)
def test_commands_run(command: Command, sandbox: Sandbox) -> None:
    check_runs(command, sandbox)
