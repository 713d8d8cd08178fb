"""`--help` and `-h`, and what follows from the declaration of a flag."""

from __future__ import annotations

from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from offspec.cli import flag_declarations
from offspec.cli.flag_declarations import MEMORY, FlagRecord, OffspecCommand, all_of, option, where_is
from offspec.cli.main import COMMANDS, cli
from offspec.cli.settings import Settings


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


@dataclass(frozen=True)
class Brew:
    """A record as a command of somebody else might have."""

    cup_size: int = 3
    leaves: str | None = None
    milk: bool = True


def brew_command(received: list[Brew]) -> OffspecCommand:
    """A command with these flags, and more than FEW of them."""
    brewing = FlagRecord("brew", Brew, Brew)

    @click.command(cls=OffspecCommand, name="make-tea")
    @brewing.argument("leaves", required=False)
    @brewing.option("cup_size", group=MEMORY, type=int, help="Cups.")
    @brewing.option("milk", "--milk/--no-milk", is_rare=True, help="With milk.")
    @all_of(*(option(f"--other-{letter}", is_flag=True, help="Nothing.") for letter in "abcdefghijklmnop"))
    def command(brew: Brew, **others: object) -> None:
        received.append(brew)
        assert set(others) == {f"other_{letter}" for letter in "abcdefghijklmnop"}

    assert isinstance(command, OffspecCommand)
    return command


def test_from_one_declaration_follows_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flag_declarations, "FLAGS", {})
    received: list[Brew] = []
    command = brew_command(received)
    shown, everything = (CliRunner().invoke(command, [flag]).output for flag in ("--help", "--help-all"))
    assert "\nMemory:\n  --cup-size INTEGER" in shown
    assert "[default: 3]" in shown
    assert ("--no-milk" in shown, "--no-milk" in everything) == (False, True)
    assert CliRunner().invoke(command, []).exit_code == 0
    assert CliRunner().invoke(command, ["oolong", "--cup-size", "5", "--no-milk"]).exit_code == 0
    assert received == [Brew(), Brew(5, "oolong", milk=False)]
    settings = Settings({"make-tea": command}, {"OFFSPEC_CONFIG": "", "OFFSPEC_CUP_SIZE": "4"})
    assert settings.defaults("make-tea") == {"cup_size": "4"}
    assert flag_declarations.FLAGS["cup_size"] == "--cup-size"
    assert where_is("--cup-size", {"make-tea": command}) == "offspec make-tea has it"
