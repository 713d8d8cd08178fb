"""What the requests of several APIs have in common: fields of JSON objects, and the texts of lists of parts."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from offspec.errors import UsageError

Json = dict[str, Any]
NUMBER = (int, float)
KINDS = {str: "a string", dict: "an object", bool: "true or false", int: "a whole number", NUMBER: "a number"}


def object_of(body: Any) -> Json:
    """A request's body. Raises UsageError for one that is no object."""
    if not isinstance(body, dict):
        raise UsageError("the request is not a JSON object")
    return body


def field_of(body: Mapping[str, Any], name: str, kind: Any) -> Any:
    """A field's value, or None if it is absent. kind: of KINDS. Raises UsageError, which names the field."""
    value = body.get(name)
    is_wrong_bool = isinstance(value, bool) and kind is not bool  # in Python, bool is a subclass of int
    if value is not None and (is_wrong_bool or not isinstance(value, kind)):
        raise UsageError(f"{name} must be {KINDS[kind]}, not {reprlib.repr(value)}")
    if isinstance(value, int) and value.bit_length() > 64:
        raise UsageError(f"{name} is too large: it must fit into 64 bits")
    return value


def refuse_fields(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises UsageError for a field that is not supported and would change the answer. neutral: harmless values."""
    for name, values in neutral.items():
        value = body.get(name)
        if value is not None and not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in values
        ):
            raise UsageError(f"{name} is not supported; omit it")


def text_of(content: Any, where: str, types: Sequence[str]) -> str:
    """The text of a string or of a list of parts of these types. Raises UsageError for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{where} must be a string or a list of parts")
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in types or not isinstance(part.get("text"), str):
            raise UsageError(f"{where}[{number}] must be a part of type {' or '.join(types)}: only texts are supported")
    return "".join(part["text"] for part in content)


def list_of_objects(body: Mapping[str, Any], name: str) -> list[Json]:
    """A field that is a list of objects; empty if it is absent."""
    objects = body.get(name)
    if objects is None:
        return []
    if not isinstance(objects, list) or not all(isinstance(each, dict) for each in objects):
        raise UsageError(f"{name} must be a list of objects")
    return objects


def call_of(call_id: Any, name: Any, arguments: Any) -> Json:
    """An assistant's call of a tool, as chats have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistants(text: str, thoughts: str, calls: Sequence[Json]) -> Json:
    """An assistant's message."""
    message: Json = {"role": "assistant", "content": text} | ({"reasoning_content": thoughts} if thoughts else {})
    return {**message, "tool_calls": calls} if calls else message
