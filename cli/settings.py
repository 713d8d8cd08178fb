"""Settings from the environment and the user's file. Priority: flag, environment, file, default.

The file is `config.toml` in the user's configuration folder, or the file that OFFSPEC_CONFIG names (empty: none). Keys
are flags without their dashes, and `model`; a table applies to one command:

    draft = "./Llama-3.2-1B-Instruct"
    [chat]
    temperature = 0.7

OFFSPEC_DRAFT and OFFSPEC_CHAT_TEMPERATURE have the same effect. An unknown key is an error, because a misspelt
default would go unnoticed. The same click parameters check these values and flags.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

import click

from offspec.errors import OffspecError
from offspec.user_files import expand_home, read_small_file, user_folder

from .flag_declarations import where_is

FILE_VARIABLE, PREFIX = "OFFSPEC_CONFIG", "OFFSPEC_"


@dataclass(frozen=True)
class Given:
    """A value for `key`, for one command or (None) for all commands that have the key. source: file or variable."""

    command: str | None
    key: str
    value: object
    source: str


def _refuse(fault: click.UsageError) -> None:
    raise fault


class Settings:
    """The settings of the environment and the user's file."""

    def __init__(
        self,
        commands: Mapping[str, click.Command],
        environment: Mapping[str, str] = os.environ,
        on_fault: Callable[[click.UsageError], object] = _refuse,
    ) -> None:
        """commands: every command of the program by its name.

        on_fault: called once for each invalid value; the value is then ignored.
        """
        self._commands, self._environment, self._on_fault = commands, environment, on_fault
        self._told: set[tuple[str, str]] = set()  # sources and keys of values that several commands refuse

    @cached_property
    def file(self) -> Path | None:
        """The user's file, which may not exist; None if OFFSPEC_CONFIG is empty."""
        named = self._environment.get(FILE_VARIABLE)
        if named is not None:
            return expand_home(named) if named else None
        return user_folder("config") / "config.toml"

    @cached_property
    def given(self) -> list[Given]:
        """All settings with known keys, highest priority first."""
        values = [given for given in (*self._from_environment(), *self._from_file()) if self._is_known(given)]
        # The environment before the file; in each of them, one command's settings before those of all commands.
        return sorted(values, key=lambda given: (given.source == str(self.file), given.command is None))

    def for_command(self, name: str) -> dict[str, Given]:
        """The valid settings of one command, by key."""
        parameters = settable(self._commands[name])
        values: dict[str, Given] = {}
        for given in self.given:
            if given.command in (None, name) and given.key in parameters and given.key not in values:
                try:
                    check(parameters[given.key], given, self._commands[name])
                except click.UsageError as fault:
                    if (given.source, given.key) not in self._told:
                        self._told.add((given.source, given.key))
                        self._on_fault(fault)
                else:
                    values[given.key] = given
        return values

    def defaults(self, name: str) -> dict[str, object]:
        """The settings of one command in the form of click's default_map."""
        parameters = settable(self._commands[name])
        given = self.for_command(name)
        return {str(parameters[key].name): plain(parameters[key], given[key].value) for key in given}

    def _from_environment(self) -> Iterator[Given]:
        for variable, value in sorted(self._environment.items()):
            if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or not value:
                continue
            key = variable.removeprefix(PREFIX).lower().replace("_", "-")
            command, _, rest = key.partition("-")
            if command in self._commands and rest:
                yield Given(command, rest, value, variable)
            else:
                yield Given(None, key, value, variable)

    def _from_file(self) -> Iterator[Given]:
        for key, value in self._read().items():
            if not isinstance(value, dict):
                yield Given(None, _dashed(key), value, str(self.file))
            elif key in self._commands:
                for inner, given in value.items():
                    yield Given(key, _dashed(inner), given, str(self.file))
            else:
                fault = f"{self.file}: unknown command [{key}]{_instead(key, self._commands)}"
                self._on_fault(click.UsageError(fault))

    def _read(self) -> dict[str, object]:
        file = self.file
        if file is None or not (os.path.exists(file) or FILE_VARIABLE in self._environment):
            return {}
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        try:
            return tomllib.loads(read_small_file(file).decode("utf-8-sig"))
        except OSError as exc:
            remedy = "; correct or unset OFFSPEC_CONFIG" if FILE_VARIABLE in self._environment else ""
            self._on_fault(click.UsageError(f"cannot read the settings file {file}: {exc.strerror}{remedy}"))
        except (ValueError, RecursionError) as exc:  # TOMLDecodeError, and bytes that are not UTF-8
            self._on_fault(click.UsageError(f"the settings file {file} is not valid TOML: {exc}"))
        return {}

    def _is_known(self, given: Given) -> bool:
        names = self._commands if given.command is None else [given.command]
        keys = {key for name in names for key in settable(self._commands[name])}
        if given.key not in keys:
            of = "" if given.command is None else f" of offspec {given.command}"
            place = where_is(f"--{given.key}", self._commands)
            remedy = f"; {place}" if place else f"{_instead(given.key, keys)}; `offspec config` lists all settings"
            fault = f"{given.source}: unknown setting {given.key!r}{of}{remedy}"
            self._on_fault(click.UsageError(fault))
        return given.key in keys


def settable(command: click.Command) -> dict[str, click.Parameter]:
    """The parameters that file and environment may set, by key: flags without dashes, and MODEL."""
    parameters: dict[str, click.Parameter] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_eager:
            parameters[max(parameter.opts, key=len).lstrip("-")] = parameter
        elif parameter.name == "model":
            parameters["model"] = parameter
    return parameters


def parsed_value(parameter: click.Parameter, value: object, command: click.Command) -> object:
    """A value from file or environment, parsed like the flag's. Raises click.BadParameter or OffspecError."""
    if isinstance(value, bool) and not (isinstance(parameter, click.Option) and parameter.is_flag):
        raise click.BadParameter(f"{str(value).lower()} is neither a number nor a string")
    if not isinstance(value, (bool, int, float, str)) and not (parameter.multiple and isinstance(value, list)):
        raise click.BadParameter(f"invalid value {value!r}")
    return parameter.process_value(click.Context(command), plain(parameter, value))


def plain(parameter: click.Parameter, value: object) -> bool | str | list[str]:
    """A value as on the command line: numbers as strings, a list for a flag that may be repeated."""
    if parameter.multiple:
        return [str(part) for part in (value if isinstance(value, list) else [value])]
    return value if isinstance(value, bool) else str(value)


def check(parameter: click.Parameter, given: Given, command: click.Command) -> None:
    """Raises click.UsageError for an invalid value; the error names the value's source."""
    try:
        parsed_value(parameter, given.value, command)
    except (click.ClickException, OffspecError) as exc:
        reason = exc.message if isinstance(exc, click.ClickException) else str(exc)
        raise click.UsageError(f"{given.source}: {given.key}: {reason}") from exc


def nearest(word: str, words: Collection[str]) -> str | None:
    """The word most similar to a misspelt one, or None."""
    return next(iter(get_close_matches(word, words, n=1)), None)


def _instead(word: str, words: Collection[str]) -> str:
    close = nearest(word, words)
    return "" if close is None else f"; did you mean {close!r}?"


def _dashed(key: str) -> str:
    return key.replace("_", "-")
