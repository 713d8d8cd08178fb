"""The calls of offspec in the pages on drafts, as they stand there."""

from __future__ import annotations

import pytest

from ..pages import Command, offspec_commands
from .sandbox import Sandbox, check_runs

PAGES = ("docs/alignment.md", "docs/drafts.md", "docs/early-exit.md", "docs/joint.md")


@pytest.mark.slow
@pytest.mark.usefixtures("learning_takes_no_time")
@pytest.mark.parametrize("command", offspec_commands(*PAGES), ids=str)
def test_commands_run(command: Command, sandbox: Sandbox) -> None:
    check_runs(command, sandbox)
