"""OpenAI's `tools` and `tool_choice`: what a chat may call, and the calls of an answer as JSON.

The prompt describes the tools through the chat template. A constraint makes arguments valid by their schema. Under
`required`, and if one function is named, it covers the whole answer; under `auto` what follows the beginning of a call.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offspec import Constraint
from offspec.errors import UsageError
from offspec.text.grammar_library import MAX_BYTES
from offspec.text.tool_calls import (
    NO_ARGUMENTS,
    Arguments,
    CallReader,
    LateCallReader,
    ToolCall,
    ToolFormat,
)

from .request_parts import Json, field_of

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHOICES = ("none", "auto", "required")
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9  # as the templates of Mistral ask for them
MOST_TOOLS = 128  # as at OpenAI
ANY_OBJECT: Json = {"type": "object"}
MOST_DEPTH = 64  # of nested values; templates and grammars recurse


@dataclass(frozen=True)
class Tools:
    """The tools of a request. described: as the client sent them. choice: of CHOICES, or a function's name."""

    described: Sequence[Json]
    choice: str = "auto"
    allows_several: bool = True

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.described]

    @property
    def are_strict(self) -> bool:
        """Whether the arguments of some function have to be valid by its schema, or the request is refused."""
        return self.choice != "auto" or any(tool["function"].get("strict") for tool in self.described)

    def constraint(self, form: ToolFormat, unbound: Collection[str] = ()) -> Constraint:
        """What the answer must be: a call, or several; under `auto` only where the model begins one.

        unbound: functions whose arguments may be any object.
        """
        functions = [tool["function"] for tool in self.described]
        chosen = [each for each in functions if self.choice not in self.names or self.choice == each["name"]]
        schemas = {tool["name"]: ANY_OBJECT if tool["name"] in unbound else _schema(tool) for tool in chosen}
        if self.choice == "auto":
            return form.late_constraint(schemas, allows_several=self.allows_several, yields=not self.are_strict)
        return form.constraint(schemas, allows_several=self.allows_several and self.choice == "required")

    async def looser_constraint(
        self, form: ToolFormat, compiles: Callable[[Constraint], Awaitable[bool]]
    ) -> Constraint | None:
        """The constraint without those schemas that do not compile; None if there is no such constraint."""
        alone = [replace(self, described=[tool]) for tool in self.described]
        unbound = [tools.names[0] for tools in alone if not await compiles(tools.constraint(form))]
        constraint = self.constraint(form, unbound)
        return constraint if await compiles(constraint) else None


def tools_of(body: Mapping[str, Any]) -> Tools | None:
    """The tools of a request that may be called; None if there are none. Raises UsageError, which names the field."""
    described, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(described, list) or len(described) > MOST_TOOLS:
        raise UsageError(f"tools must be a list of at most {MOST_TOOLS} tools")
    for number, tool in enumerate(described):
        _check(tool, f"tools[{number}]")
    if choice != "none":
        _check_sizes(described)
    tools = Tools(described, _choice(choice), field_of(body, "parallel_tool_calls", bool) is not False)
    if len(set(tools.names)) < len(tools.names):
        raise UsageError("tools has two functions with one name")
    if tools.choice not in (*CHOICES, *tools.names):
        raise UsageError("tool_choice names a function that tools does not have")
    if tools.choice == "required" and not described:
        raise UsageError("tool_choice is required, but there are no tools")
    return tools if described and tools.choice != "none" else None


def _check_sizes(described: Sequence[Json]) -> None:
    """Raises UsageError for parameters that are too large or too deep, before anything is made of them."""
    try:
        size = sum(len(json.dumps(tool["function"].get("parameters"))) for tool in described)
    except RecursionError:
        size = 0  # too deep
    if size > MAX_BYTES:
        raise UsageError(f"tools have {size} bytes of parameters, and {MAX_BYTES} are allowed; describe fewer")
    for number, tool in enumerate(described):
        check_depth(tool, f"tools[{number}]")


def _choice(choice: Any) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in CHOICES:
        return choice
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name in CHOICES:
        raise UsageError(f'tool_choice must be one of {", ".join(CHOICES)}, or {{"type": "function", "function": …}}')
    return name


def _check(tool: Any, where: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise UsageError(f"{where} must be an object of type function, with a function")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in CHOICES:
        raise UsageError(f"{where}.function.name must have 1 to 64 letters, digits, dots, dashes or underscores")
    if not isinstance(function.get("parameters") or {}, dict):
        raise UsageError(f"{where}.function.parameters must be an object: a JSON schema")
    if not (function.get("strict") is None or isinstance(function["strict"], bool)):
        raise UsageError(f"{where}.function.strict must be true or false")


def check_depth(value: Any, where: str, most: int = MOST_DEPTH) -> None:
    """Raises UsageError for a value that is nested too deeply."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if parts and not most:
        raise UsageError(f"{where} is nested too deeply: {MOST_DEPTH} levels are allowed")
    for part in parts:
        check_depth(part, where, most - 1)


def _schema(function: Json) -> Json:
    """A function's schema. Unless `strict`, keywords that the library does not implement are ignored."""
    schema = {**(function.get("parameters") or NO_ARGUMENTS), "type": "object"}  # no other arguments can be called with
    return schema if function.get("strict") else lenient(schema)


def lenient(schema: Json) -> Json:
    """The schema without those keywords that the library does not implement."""
    guidance = schema.get("x-guidance")
    return {**schema, "x-guidance": {"lenient": True, **(guidance if isinstance(guidance, dict) else {})}}


# ------------------------------------------------------------------------------------------------ messages


def called_before(message: Mapping[str, Any], where: str) -> list[Json]:
    """An assistant's earlier calls as templates read them: with arguments as objects. Raises UsageError."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise UsageError(f"{where}: tool_calls must be a list")
    return [_called(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]


def _called(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where} needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"{where}: arguments are not JSON") from exc
    if not isinstance(arguments, dict):
        raise UsageError(f"{where}: arguments must be an object, as text")
    check_depth(arguments, where)
    called_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**called_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


# ------------------------------------------------------------------------------------------------ answers


class CalledTools:
    """The calls of one answer as JSON."""

    def __init__(self, tools: Tools, form: ToolFormat, *, are_bound: bool) -> None:
        """are_bound: whether a constraint makes calls what they have to be."""
        self._reader = form.reader(tools.names)
        self._streamed: CallReader | LateCallReader = self._reader
        if are_bound:
            self._streamed = LateCallReader(form if tools.choice == "auto" else None)
        self.num_calls = 0

    def whole(self, text: str) -> Json:
        """The message of a whole answer, without its role."""
        pieces = self._reader.push(text, is_end=True)
        content, calls = "".join(piece for piece in pieces if isinstance(piece, str)), list[Json]()
        for piece in pieces:
            if isinstance(piece, ToolCall):
                calls.append(self._described(piece))
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def deltas(self, text: str, *, is_end: bool) -> list[Json]:
        """What a part of a stream adds to the message: texts, and calls. A call's first delta has its name and id.

        If a constraint binds calls, arguments come in parts. Else what looks like a call may still be text, so they
        come at once.
        """
        deltas = list[Json]()
        for piece in self._streamed.push(text, is_end=is_end):
            if isinstance(piece, str):
                deltas.append({"content": piece})
            elif isinstance(piece, Arguments):
                deltas.append(self._more_arguments(piece.text))
            else:
                call = self._described(ToolCall(piece.name, ""))
                deltas.append({"tool_calls": [{"index": self.num_calls - 1, **call}]})
                if isinstance(piece, ToolCall):
                    deltas.append(self._more_arguments(piece.arguments))
        return deltas

    def _more_arguments(self, text: str) -> Json:
        return {"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": text}}]}

    def _described(self, call: ToolCall) -> Json:
        self.num_calls += 1
        call_id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
