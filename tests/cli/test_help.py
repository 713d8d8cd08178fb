"""`--help` and `-h`."""

from __future__ import annotations

import click
import pytest

from offspec.cli.main import COMMANDS, cli


@pytest.mark.parametrize("name", COMMANDS)
def test_short_help_whatever_context_came_first(name: str) -> None:
    """click makes a command's help option once, and keeps it; the settings' checks use a context without a parent."""
    group = click.Context(cli, info_name="offspec")
    command = cli.get_command(group, name)
    assert command is not None
    command._help_option = None  # as in a new process
    option = command.get_help_option(click.Context(command))
    assert option is not None
    assert set(option.opts) == {"-h", "--help"}
