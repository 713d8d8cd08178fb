"""Calls of tools in answers: the formats that chat templates teach, as grammars and as parsers.

Three formats are known: that of Hermes and Qwen (`<tool_call>` around an object of `name` and `arguments`), that of
Llama 3.x (an object of `name` and `parameters`, alone) and that of Mistral (a list of objects after `[TOOL_CALLS]`).
The template's source tells which one its model was trained on. This module does not know the API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from offspec.scheduler.params import Constraint

from ..errors import TokenizerError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Style = Literal["hermes", "llama", "mistral"]
OPEN, CLOSE, CALLS, PYTHON = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
LLAMA = '"parameters": dictionary of argument name'  # how the templates of Llama 3.1 and 3.2 describe their format
OTHER_STYLES = ("<function=", "<arg_key>", "[ARGS]", "[CALL_ID]")  # Qwen3-Coder's, GLM's, Mistral's of 2025
KNOWN = "Hermes and Qwen (<tool_call>), Llama 3.x (JSON) and Mistral ([TOOL_CALLS])"
BETWEEN = re.compile(rf"(?:[\s;,]|{OPEN}|{CLOSE})*")  # calls of one text
FORCED_HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "(?:arguments|parameters)": ')  # as constraints write it
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Call:
    """A call of a tool. arguments: a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call, whose arguments follow in parts."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A part of the arguments of the call that began last."""

    text: str


@dataclass(frozen=True)
class ToolFormat:
    """How one model writes calls. marker: the text before a call or a list of calls; "" if there is none.

    marker_id, close_id: ids of the marker, and of a call's end, if they are special tokens, which texts omit.
    """

    style: Style
    marker: str = ""
    marker_id: int | None = None
    close_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ToolFormat:
        """The format that the chat template teaches. Raises TokenizerError for one that is not known, or for none."""
        template = tokenizer.chat_template
        if "tools" not in template:
            raise TokenizerError("the model's chat template knows no tools; omit them, or choose another model")
        if any(mark in template for mark in OTHER_STYLES):
            raise TokenizerError(f"the model's format of tool calls is not supported; known are {KNOWN}")
        special = {mark: tokenizer.token_id(mark) for mark in (OPEN, CLOSE, CALLS)}
        ids = {mark: found if found in tokenizer.special_ids else None for mark, found in special.items()}
        if OPEN in template:
            return cls("hermes", OPEN, ids[OPEN], ids[CLOSE])
        if CALLS in template:
            return cls("mistral", f"{CALLS} " if f"{CALLS} [" in template else CALLS, ids[CALLS])
        if LLAMA in template:
            return cls("llama")
        raise TokenizerError(f"the model's format of tool calls is not known; known are {KNOWN}")

    @property
    def arguments_key(self) -> str:
        return "parameters" if self.style == "llama" else "arguments"

    def constraint(self, schemas: Mapping[str, Mapping[str, Any]], *, allows_several: bool) -> Constraint:
        """An answer that is a call, or several. schemas: of the arguments by the functions' names."""
        rules = [f"c{i}: {_literal(self._head(name))} a{i} {_literal('}')}" for i, name in enumerate(schemas)]
        rules += [f"a{i}: %json {json.dumps(_with_layout(schema))}" for i, schema in enumerate(schemas.values())]
        one_of = "call: " + " | ".join(f"c{i}" for i in range(len(schemas)))
        return Constraint.grammar("\n".join(["%llguidance {}", self._start(allows_several), one_of, *rules]))

    def _head(self, name: str) -> str:
        return f'{{"name": {json.dumps(name)}, "{self.arguments_key}": '

    def _start(self, allows_several: bool) -> str:
        if self.style == "llama":  # Llama 3.x calls one function at a time
            return "start: call"
        marker = _literal(self.marker) if self.marker_id is None else f"<[{self.marker_id}]>"
        if self.style == "mistral":
            space = "" if self.marker_id is None else self.marker.removeprefix(CALLS)
            more = ' (", " call)*' if allows_several else ""
            return f'start: {marker} {_literal(space + "[")} call{more} "]"'
        close = _literal(CLOSE) if self.close_id is None else f"<[{self.close_id}]>"
        tagged = f'{marker} "\\n" call "\\n" {close}'
        return f'start: {tagged} ("\\n" {tagged})*' if allows_several else f"start: {tagged}"

    def reader(self, names: Sequence[str]) -> CallReader:
        """A reader of one answer. names: the functions that may be called."""
        return CallReader(self, frozenset(names))


def _literal(text: str) -> str:
    """A text as Lark has it."""
    return json.dumps(text)


def _with_layout(schema: Mapping[str, Any]) -> dict[str, Any]:
    own = schema.get("x-guidance")
    from .grammar import LAYOUT  # imports a tokenizer library

    return {**schema, "x-guidance": {**LAYOUT, **(own if isinstance(own, Mapping) else {})}}


class CallReader:
    """Finds calls in an answer's text, which comes in parts. Text that may become part of a call is held back.

    What looks like a call but is not one, because its JSON is broken or no such function exists, stays text.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str]) -> None:
        self._form, self._names = form, names
        self._held = ""
        self._has_text, self._has_calls = False, False

    def push(self, text: str, *, is_end: bool) -> list[str | Call]:
        """Texts and calls that are certain now, in order."""
        self._held += text
        is_tagged = self._form.style == "hermes" and self._form.marker_id is None
        return self._tagged(is_end) if is_tagged else self._alone(is_end)

    def _tagged(self, is_end: bool) -> list[str | Call]:
        """Calls between tags, anywhere in the text. Spaces around calls are no text."""
        found = list[str | Call]()
        while OPEN in self._held:
            before, _, rest = self._held.partition(OPEN)
            inside, close, after = rest.partition(CLOSE)
            if not close and not is_end:
                break
            if calls := self._calls(inside):
                found += [*self._said(before.rstrip()), *calls]
                self._has_calls = True
            else:
                found += self._said(before + OPEN + inside + close)
            self._held = after
        at = len(self._held) if is_end else _num_certain(self._held)
        text, self._held = self._held[:at], self._held[at:]
        return [*found, *self._said("" if is_end and self._has_calls and not text.strip() else text)]

    def _alone(self, is_end: bool) -> list[str | Call]:
        """Calls that are the whole text, behind a marker that may be omitted."""
        begun = self._held.lstrip()
        if not self._has_text and not is_end and (not begun or self._may_be_call(begun)):
            return []
        calls = None if self._has_text else self._calls(_without(begun, self._form.marker.strip(), PYTHON))
        text, self._held = self._held, ""
        return [*calls] if calls else self._said(text)

    def _said(self, text: str) -> list[str | Call]:
        self._has_text |= bool(text)
        return [text] if text else []

    def _may_be_call(self, begun: str) -> bool:
        starts = ["[" if self._form.style == "mistral" else "{", self._form.marker.strip(), PYTHON]
        return any(begun.startswith(start) or start.startswith(begun) for start in filter(None, starts))

    def _calls(self, text: str) -> list[Call] | None:
        """The calls that a text consists of; None if it has anything else."""
        values, at, decoder = list[Any](), _after_space(text, 0), json.JSONDecoder()
        try:
            while at < len(text):
                value, at = decoder.raw_decode(text, at)
                values += value if isinstance(value, list) else [value]
                at = _after_space(text, at)
        except (ValueError, RecursionError):
            return None
        calls = [self._call(value) for value in values]
        return [call for call in calls if call is not None] if calls and None not in calls else None

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if value["name"] not in self._names or not isinstance(arguments, dict):
            return None
        return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


class ForcedCallReader:
    """Finds calls in an answer that a constraint makes calls and nothing else: their arguments as they come.

    A limit may cut the last one. Text before the first call is held back, and is text if no call follows.
    """

    def __init__(self) -> None:
        self._held = ""
        self._has_calls = False
        self._arguments: ObjectScanner | None = None  # of the call that began last

    def push(self, text: str, *, is_end: bool) -> list[str | CallStart | Arguments]:
        """What is certain now, in order."""
        self._held += text
        found = list[str | CallStart | Arguments]()
        while self._held:
            if self._arguments is None:
                if (head := FORCED_HEAD.search(self._held)) is None:
                    break
                found.append(CallStart(json.loads(head[1])))
                self._held, self._has_calls = self._held[head.end() :], True
                self._arguments = ObjectScanner()
                continue
            size = self._arguments.num_inside(self._held)
            found += [Arguments(self._held[:size])] if size else []
            self._held = self._held[size:]
            if self._arguments.is_over:
                self._arguments = None
        if is_end and not self._has_calls and self._held:
            found.append(self._held)
        return found


class ObjectScanner:
    """Finds the end of a JSON object whose text comes in parts."""

    def __init__(self) -> None:
        self._depth, self._is_in_string, self._is_escaped = 0, False, False
        self.is_over = False

    def num_inside(self, text: str) -> int:
        """How many of the next characters belong to the object."""
        for place, char in enumerate(text):
            if self._is_in_string:
                self._is_in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.is_over = True
                    return place + 1
        return len(text)


def _num_certain(text: str) -> int:
    """Characters of a text before those that may belong to a call: spaces at its end, and a tag's beginning or all."""
    at = text.find(OPEN)
    if at < 0:
        at = len(text) - max(size for size in range(len(OPEN)) if text.endswith(OPEN[:size]))
    return len(text[:at].rstrip())


def _without(text: str, *marks: str) -> str:
    for mark in filter(None, marks):
        text = text.removeprefix(mark).lstrip()
    return text


def _after_space(text: str, at: int) -> int:
    found = BETWEEN.match(text, at)
    return found.end() if found else at
