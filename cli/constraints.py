"""Flags and JSON keys that say what an answer must be: a JSON schema, a JSON object, a grammar, a regex."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from offspec import Constraint
from offspec.checkpoints.small_files import parse_json
from offspec.errors import UsageError

from .help_groups import option
from .options import read_file

F = TypeVar("F", bound=Callable[..., Any])
NAMES = ("json_schema", "json_object", "grammar", "regex")
FLAGS = ", ".join(f"--{name.replace('_', '-')}" for name in NAMES)
OFF = "none"  # unsets a flag: in a chat's /set, or over a setting of the user's file


def constraint_options(function: F) -> F:
    """--json-schema, --json-object, --grammar and --regex; `constraint_of` reads them."""
    decorators = (
        option(
            "--json-schema",
            metavar="FILE|TEXT",
            help="Answer in JSON that is valid by this schema: a file, or the schema itself.",
        ),
        option("--json-object", is_flag=True, help="Answer with a JSON object."),
        option("--grammar", metavar="FILE", help="Answer with a text of this grammar: GBNF as in llama.cpp, or Lark."),
        option("--regex", metavar="R", help="Answer with a text that matches this regular expression as a whole."),
    )
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def constraint_of(options: dict[str, Any]) -> Constraint | None:
    """Remove the values of `constraint_options` from `options`. Raises click.UsageError."""
    values = {name: options.pop(name) for name in NAMES}
    given = {name: value for name, value in values.items() if value not in (None, False, OFF)}
    if len(given) > 1:
        raise click.UsageError(f"Give only one of {FLAGS}.")
    for name, value in given.items():
        if name == "json_object":
            return Constraint.json_object()
        if name == "regex":
            return Constraint.regex(value)
        if name == "grammar":
            return Constraint.grammar(_text(Path(value)))
        is_text = value.lstrip().startswith("{") or value.strip() in ("true", "false")
        return Constraint.json_schema(value if is_text else _json_text(Path(value)))
    return None


def constraint_in(content: Mapping[str, Any], default: Constraint | None) -> Constraint | None:
    """The constraint that a JSON object's keys name, else `default`. Raises UsageError, which names the key.

    json_schema: the schema, as an object or as text. json_object: true. grammar, regex: text.
    """
    given = {name: content[name] for name in NAMES if content.get(name) not in (None, False)}
    if len(given) > 1:
        raise UsageError(f"only one of {', '.join(given)} may be given")
    for name, value in given.items():
        if name == "json_object":
            if value is not True:
                raise UsageError(f"json_object must be true or false, not {json.dumps(value)}")
            return Constraint.json_object()
        if name == "json_schema":
            if not isinstance(value, (str, dict, bool)):
                raise UsageError("json_schema must be an object, or its text")
            return Constraint.json_schema(value)
        if not isinstance(value, str):
            raise UsageError(f"{name} must be a string")
        return Constraint.grammar(value) if name == "grammar" else Constraint.regex(value)
    return default


def _json_text(file: Path) -> str:
    """Raises click.UsageError for text that is not JSON: the engine's error could not name the file."""
    text = _text(file)
    try:
        parse_json(text.encode())
    except (ValueError, RecursionError) as exc:
        raise click.UsageError(f"{file} is not JSON ({exc}); --json-schema needs a JSON schema.") from exc
    return text


def _text(file: Path) -> str:
    if not file.is_file():
        raise click.UsageError(f"{file} is not a file.")
    return read_file(file)
