"""`offspec config`: every setting with its value and source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from os.path import isfile
from typing import Any

import click

from .flag_declarations import Commands, OffspecCommand
from .options import output_options
from .settings import Settings, settable
from .terminal import table

SECRETS = ("api-key",)  # values that are not printed: people paste this output into questions


@click.command(
    cls=OffspecCommand,
    name="config",
    help="""Show every setting with its value and source.

A flag overrides the environment, the environment overrides the file, and the file overrides the default. Keys of the
file are flags without their dashes; a table like [chat] applies to one command. The same key in the environment is
OFFSPEC_TEMPERATURE, or OFFSPEC_CHAT_TEMPERATURE for one command. OFFSPEC_CONFIG names another file; if it is empty,
no file is read.

\b
Examples:
  offspec config chat
  OFFSPEC_TEMPERATURE=0.7 offspec config

\b
The file, for example:
  draft = "./Llama-3.2-1B-Instruct"
  [chat]
  temperature = 0.7
""",
)
@click.argument("name", metavar="[COMMAND]", required=False)
@output_options(json="Print one JSON object instead of the table.", quiet="", verbose="Show tracebacks.")
@click.pass_context
def command(ctx: click.Context, name: str | None, as_json: bool, verbose: bool) -> None:
    commands = Commands(ctx)
    if name is not None and name not in commands:
        raise click.UsageError(f"unknown command {name!r}; choose one of {', '.join(commands)}")
    faults: list[click.UsageError] = []
    settings = Settings(commands, on_fault=faults.append)
    rows = list(_rows(settings, commands if name is None else {name: commands[name]}))
    if as_json:
        click.echo(json.dumps({"file": None if settings.file is None else str(settings.file), "settings": rows}))
    else:
        file = settings.file or "no file (OFFSPEC_CONFIG is empty)"
        is_missing = settings.file is not None and not isfile(settings.file)  # which is false for a closed folder
        cells = [(row["key"], _shown(row["value"]), row["source"], ", ".join(row["commands"])) for row in rows]
        click.echo(f"{file}{' (does not exist)' * is_missing}\n")
        click.echo("\n".join(table([("setting", "value", "from", ""), *cells], 4)))
    for fault in faults[:-1]:
        click.echo(f"offspec: {' '.join(fault.message.split())}", err=True)
    if faults:
        raise faults[-1]


def _rows(settings: Settings, commands: Mapping[str, click.Command]) -> Iterator[dict[str, Any]]:
    """One row per setting; several, with their commands, if these differ."""
    by_key: dict[str, dict[tuple[str, str], list[str]]] = {}
    values: dict[tuple[str, str], object] = {}
    for name, command in commands.items():
        given = settings.for_command(name)
        for key, parameter in settable(command).items():
            value: object = parameter.get_default(click.Context(command))
            if isinstance(described := getattr(parameter, "show_default", None), str):
                value = described
            source = "default"
            if key in given:
                value, source = given[key].value, given[key].source
                if key in SECRETS:
                    value = "(set)"
            shown = _shown(value)
            values[shown, source] = None if shown == "-" else value
            by_key.setdefault(key, {}).setdefault((shown, source), []).append(name)
    for key, groups in by_key.items():
        for (shown, source), names in groups.items():
            which = names if len(groups) > 1 else []
            yield {"key": key, "value": values[shown, source], "source": source, "commands": which}


def _shown(value: object) -> str:
    """A value as text; `-` if it is not set."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return json.dumps(list(value)) if value else "-"
    return str(value) if isinstance(value, (int, float, str)) else "-"
