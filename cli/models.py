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
from .options import output_options

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
@output_options(json="Print one JSON object for each model.", quiet="", verbose="Show tracebacks.")
def command(action: str, model: str | None, yes: bool, as_json: bool, verbose: bool) -> None:
    from offspec.tools import local_models

    if action == "list":
        if model is not None:
            models = local_models.models_in(Path(model))
        else:
            models = [*local_models.named_models(), *local_models.hub_models()]
        if as_json:
            for each in models:
                click.echo(json.dumps({**each.as_dict(), "fault": with_flags(each.fault)}))
        else:
            click.echo(table(models))
    elif model is None:
        raise click.UsageError(f"name a model: offspec models {action} ORG/NAME")
    elif action == "pull":
        click.echo(str(local_models.pull(model)))
    else:
        path, size = local_models.removable(model)
        if not yes:
            click.confirm(f"Remove {path} ({format_size(size)})?", abort=True, err=True)
        local_models.remove(path)
        click.echo(f"removed {path} ({format_size(size)})", err=True)


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
