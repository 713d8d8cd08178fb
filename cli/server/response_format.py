"""What a request says that its answer must be: OpenAI's `response_format`, and the names of other local servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offspec import Constraint
from offspec.errors import UsageError

from ..constraints import NAMES, constraint_in

# vLLM's names of older releases → those of prompt files, which are llama.cpp's as well.
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "grammar"}
TYPES = ("text", "json_object", "json_schema")


def requested_constraint(body: Mapping[str, Any], default: Constraint | None) -> Constraint | None:
    """The constraint that a request states, else `default`. Raises UsageError, which names the field."""
    stated = {name: body[name] for name in (*NAMES, *GUIDED) if body.get(name) not in (None, False, "")}
    requested = body.get("response_format")
    if requested is None:
        if len(stated) > 1:
            raise UsageError(f"only one of {', '.join(stated)} may be given")
        return constraint_in({GUIDED.get(name, name): value for name, value in stated.items()}, default)
    if not isinstance(requested, dict) or requested.get("type") not in TYPES:
        raise UsageError(f"response_format must be an object whose type is one of {', '.join(TYPES)}")
    if stated:
        raise UsageError(f"only one of response_format, {', '.join(stated)} may be given")
    return _of_format(requested)


def _of_format(response_format: Mapping[str, Any]) -> Constraint | None:
    if response_format["type"] == "text":
        return None
    if response_format["type"] == "json_schema":
        return _of_schema(response_format.get("json_schema"))
    if response_format.get("schema") is not None:  # as llama.cpp's server has it
        return Constraint.json_schema(_schema(response_format["schema"], "response_format.schema"))
    return Constraint.json_object()


def _of_schema(described: Any) -> Constraint:
    """The schema always holds. `strict: false` ignores those keywords that the library does not implement."""
    where = "response_format.json_schema"
    if not isinstance(described, dict):
        raise UsageError(f"{where} must be an object with a schema")
    strict = described.get("strict")
    if not (strict is None or isinstance(strict, bool)):
        raise UsageError(f"{where}.strict must be true or false")
    schema = _schema(described.get("schema"), f"{where}.schema")
    return Constraint.json_schema(lenient(schema) if strict is False else schema)


def _schema(schema: Any, where: str) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise UsageError(f"{where} must be an object: a JSON schema")
    return schema


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without those keywords that the library does not implement."""
    guidance = schema.get("x-guidance")
    return {**schema, "x-guidance": {"lenient": True, **(guidance if isinstance(guidance, dict) else {})}}
