"""`offspec models`: the models on this machine; download one, remove one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offspec import format_size

from . import terminal
from .flag_declarations import OffspecCommand, option, with_flags

if TYPE_CHECKING:
    from offspec.tools.local_models import LocalModel

ACTIONS = ("list", "pull", "rm")
HELP = """List the models on this machine, download one, or remove one.

`list` shows those of the hub's cache, and of the folder MODEL if it is given: size, format, whether offspec runs them,
and the drafts that were made for them. `pull` downloads a hub id, and continues after an interruption; other commands
download it by themselves. `rm` removes a hub id from the cache, or a folder or file, after a question.

\b
Examples:
  offspec models list
  offspec models list ./models
  offspec models pull Qwen/Qwen3-8B
  offspec models rm Qwen/Qwen3-8B
"""


@click.command(cls=OffspecCommand, name="models", help=HELP)
@click.argument("action", type=click.Choice(ACTIONS), default="list")
@click.argument("model", required=False)
@option("-y", "--yes", is_flag=True, help="Remove without a question.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object for each model.")
@option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
def command(action: str, model: str | None, yes: bool, as_json: bool, verbose: bool) -> None:
    if action == "list":
        _list(model, as_json=as_json)
        return
    if model is None:
        raise click.UsageError(f"name a model: offspec models {action} ORG/NAME")
    if action == "pull":
        from offspec.tools.local_models import pull

        click.echo(str(pull(model)))
    else:
        _remove(model, yes=yes)


def _list(folder: str | None, *, as_json: bool) -> None:
    from offspec.tools.local_models import hub_models, models_in, named_models

    models = [*named_models(), *hub_models()] if folder is None else models_in(Path(folder))
    if as_json:
        for each in models:
            click.echo(json.dumps({**each.as_dict(), "fault": with_flags(each.fault)}))
    else:
        click.echo(table(models))


def table(models: Sequence[LocalModel]) -> str:
    """A line for each model: name, size, format, drafts; below it why it does not run."""
    if not models:
        return "no models here; offspec models pull ORG/NAME downloads one"
    rows = [("model", "size", "format", "draft")]
    for each in models:
        rows.append((each.name, format_size(each.size_bytes), each.form or "-", ", ".join(each.drafts) or "lookup"))
    lines = terminal.table(rows, 4)
    for place in range(len(models), 0, -1):
        if fault := models[place - 1].fault:
            lines[place] = "  ".join(lines[place].split("  ")[:-1]).rstrip() + "  does not run"
            lines.insert(place + 1, f"    {with_flags(fault)}")
    return "\n".join(lines)


def _remove(model: str, *, yes: bool) -> None:
    from offspec.tools.local_models import removable, remove

    path, size = removable(model)
    if not yes:
        click.confirm(f"Remove {path} ({format_size(size)})?", abort=True, err=True)
    remove(path)
    click.echo(f"removed {path} ({format_size(size)})", err=True)
