"""The calls of offspec in all pages but those of the two other files, as they stand there."""

from __future__ import annotations

import pytest

from ..pages import Command, offspec_commands
from . import test_commands_of_drafts, test_commands_of_readme
from .sandbox import Sandbox, check_runs

ELSEWHERE = (*test_commands_of_drafts.PAGES, *test_commands_of_readme.PAGES)


@pytest.mark.slow
@pytest.mark.parametrize("command", offspec_commands(*ELSEWHERE, others=True), ids=str)
def test_commands_run(command: Command, sandbox: Sandbox) -> None:
    check_runs(command, sandbox)
