"""Flags and JSON keys that say what an answer must be: a JSON schema, a JSON object, a grammar, a regex."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from offspec import Constraint, SamplingParams
from offspec.errors import UsageError
from offspec.user_files import parse_json

from .flag_declarations import FLAGS, SAMPLING, FlagRecord, all_of
from .reading import read_file

NAMES = ("json_schema", "json_object", "grammar", "regex")  # of a JSON object
OFF = "none"  # unsets a flag: in a chat's /set, or over a setting of the user's file
ANY_OBJECT = "object"  # in place of a schema


@dataclass(frozen=True)
class ConstraintFlags:
    """What the answer must be, as flags say it: names of files, or texts. At most one is given."""

    json_schema: str | None = None
    grammar: str | None = None

    def applied_to(self, sampling: SamplingParams) -> SamplingParams:
        """Raises click.UsageError for a file that cannot be read, or for several flags."""
        given = {name: text for name, text in asdict(self).items() if text not in (None, OFF)}
        if len(given) > 1:
            raise click.UsageError(f"Give only one of {', '.join(FLAGS[name] for name in asdict(self))}.")
        if not given:
            return sampling
        ((name, text),) = given.items()
        if name == "grammar":
            is_regex = len(text) > 1 and text[0] == text[-1] == "/"  # a path that ends so is no file
            constraint = Constraint.regex(text[1:-1]) if is_regex else Constraint.grammar(_text(Path(text)))
        elif text == ANY_OBJECT:
            constraint = Constraint.json_object()
        else:
            is_schema = text.lstrip().startswith("{") or text.strip() in ("true", "false")
            constraint = Constraint.json_schema(text if is_schema else _json_text(Path(text)))
        return replace(sampling, constraint=constraint)


CONSTRAINT = FlagRecord("constraint", ConstraintFlags, ConstraintFlags, group=SAMPLING)
constraint_options = all_of(
    CONSTRAINT.option(
        "json_schema",
        metavar="FILE|TEXT|object",
        help="Answer in JSON that is valid by this schema: a file, the schema itself, or object for any JSON object.",
    ),
    CONSTRAINT.option(
        "grammar",
        metavar="FILE|/REGEX/",
        help="Answer with a text of this grammar (GBNF as in llama.cpp, or Lark), or one that is all of a REGEX.",
    ),
)


def constraint_in(content: Mapping[str, object], default: Constraint | None) -> Constraint | None:
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
