"""Calls of tools in answers: the formats that chat templates teach, as grammars and as parsers.

Three formats are known: that of Hermes and Qwen (`<tool_call>` around an object of `name` and `arguments`), that of
Llama 3.x (an object of `name` and `parameters`, alone) and that of Mistral (a list of objects after `[TOOL_CALLS]`).
The template's source tells which one its model was trained on. This module does not know the API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from offspec.scheduler.params import Constraint, Trigger

from ..errors import TokenizerError
from .grammar_library import LAYOUT

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Style = Literal["hermes", "llama", "mistral"]
OPEN, CLOSE, CALLS, PYTHON = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
LLAMA = '"parameters": dictionary of argument name'  # how the templates of Llama 3.1 and 3.2 describe their format
OTHER_STYLES = ("<function=", "<arg_key>", "[ARGS]", "[CALL_ID]")  # Qwen3-Coder's, GLM's, Mistral's of 2025
KNOWN = "Hermes and Qwen (<tool_call>), Llama 3.x (JSON) and Mistral ([TOOL_CALLS])"
BETWEEN = re.compile(rf"(?:[\s;,]|{OPEN}|{CLOSE})*")  # calls of one text
NEWLINE = "\n"
NAME_KEY = '{"name": '
GAP = r"/[ \n]{0,2}/"  # between a marker and a call, where the model chooses
CALL_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_literal = json.dumps  # a text as Lark has it
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolCall:
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

    python_id: of `<|python_tag|>`, which may stand before Llama's calls, if it is a special token, which texts omit.
    """

    style: Style
    marker: str = ""
    python_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ToolFormat:
        """The format that the chat template teaches. Raises TokenizerError for one that is not known, or for none."""
        template = tokenizer.chat_template
        if "tools" not in template:
            raise TokenizerError("the model's chat template knows no tools; omit them, or choose another model")
        if any(mark in template for mark in OTHER_STYLES):
            raise TokenizerError(f"the model's format of tool calls is not supported; known are {KNOWN}")
        if OPEN in template:
            return cls("hermes", OPEN)
        if CALLS in template:
            return cls("mistral", f"{CALLS} " if f"{CALLS} [" in template else CALLS)
        if LLAMA in template:
            python_id = tokenizer.token_id(PYTHON)
            return cls("llama", python_id=python_id if python_id in tokenizer.special_ids else None)
        raise TokenizerError(f"the model's format of tool calls is not known; known are {KNOWN}")

    def constraint(self, schemas: Mapping[str, Mapping[str, Any]], *, allows_several: bool) -> Constraint:
        """An answer that is a call, or several. schemas: of the arguments by the functions' names."""
        return Constraint("tool_calls", self._grammar(schemas, self._start(allows_several)))

    def late_constraint(
        self, schemas: Mapping[str, Mapping[str, Any]], *, allows_several: bool, yields: bool
    ) -> Constraint:
        """An answer that is free until it calls a function, and then a call, or several. yields: see `Trigger`."""
        trigger, start = self._late_start(allows_several)
        return Constraint("tool_calls", self._grammar(schemas, start), replace(trigger, yields=yields))

    def _grammar(self, schemas: Mapping[str, Mapping[str, Any]], start: str) -> str:
        """In Lark. start: the rules that say where calls stand; `named` is a call behind its key `name`."""
        key = ', "parameters": ' if self.style == "llama" else ', "arguments": '
        rules = [f"n{i}: {_literal(json.dumps(name) + key)} a{i} {_literal('}')}" for i, name in enumerate(schemas)]
        for i, schema in enumerate(schemas.values()):
            guidance = schema.get("x-guidance")
            layout = {**LAYOUT, **(guidance if isinstance(guidance, Mapping) else {})}
            rules.append(f"a{i}: %json {json.dumps({**schema, 'x-guidance': layout})}")
        named = "named: " + " | ".join(f"n{i}" for i in range(len(schemas)))
        call = f"call: {_literal(NAME_KEY)} named"
        return "\n".join(["%llguidance {}", start, call, named, *rules])

    def _start(self, allows_several: bool) -> str:
        if self.style == "llama":  # Llama 3.x calls one function at a time
            return "start: call"
        if self.style == "mistral":
            more = ' (", " call)*' if allows_several else ""
            return f'start: {_literal(self.marker + "[")} call{more} "]"'
        tagged = f"{_literal(OPEN + NEWLINE)} call {_literal(NEWLINE + CLOSE)}"
        return f'start: {tagged} ("\\n" {tagged})*' if allows_several else f"start: {tagged}"

    def _late_start(self, allows_several: bool) -> tuple[Trigger, str]:
        """The trigger, and the rules of the text from its first token on."""
        if self.style == "llama":
            more = ' ("; " call)*' if allows_several else ""
            begun = f"first {GAP} named" + ("" if self.python_id is None else f" | <[{self.python_id}]> {GAP} call")
            rules = [f"start: begun{more}", f"begun: {begun}", r'first: /\s*\{\s*"name"\s*:/']
            return Trigger(('{"name":',), self.python_id, is_at_start=True), "\n".join(rules)
        marker = self.marker.strip()
        first = rf"first[lazy]: /(.|\n)*{re.escape(marker)}/"
        if self.style == "mistral":
            more = ' (", " call)*' if allows_several else ""
            return Trigger((marker,)), "\n".join([f'start: first {GAP} "[" call{more} "]"', first])
        rest = " rest" if allows_several else ""
        rules = [f"start: first {GAP} call {GAP} {_literal(CLOSE)}{rest}", first, r"rest: /(.|\n)*/"]
        return Trigger((marker,), repeats=allows_several), "\n".join(rules)

    def reader(self, names: Sequence[str]) -> CallReader:
        """A reader of one answer. names: the functions that may be called."""
        return CallReader(self, frozenset(names))


class CallReader:
    """Finds calls in an answer's text, which comes in parts. Text that may become part of a call is held back.

    What looks like a call but is not one, because its JSON is broken or no such function exists, stays text.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str]) -> None:
        self._form, self._names = form, names
        self._held = ""
        self._has_text, self._has_calls = False, False

    def push(self, text: str, *, is_end: bool) -> list[str | ToolCall]:
        """Texts and calls that are certain now, in order."""
        self._held += text
        by_style = {"hermes": self._tagged, "mistral": self._listed, "llama": self._alone}
        return by_style[self._form.style](is_end)

    def _tagged(self, is_end: bool) -> list[str | ToolCall]:
        """Calls between tags, anywhere in the text. Spaces around calls are no text."""
        parts = list[str | ToolCall]()
        while OPEN in self._held:
            before, _, rest = self._held.partition(OPEN)
            inside, close, after = rest.partition(CLOSE)
            if not close and not is_end:
                break
            if calls := self._calls(inside):
                parts += [*self._said(before.rstrip()), *calls]
                self._has_calls = True
            else:
                parts += self._said(before + OPEN + inside + close)
            self._held = after
        at = len(self._held) if is_end else _num_certain(self._held, OPEN)
        text, self._held = self._held[:at], self._held[at:]
        return [*parts, *self._said("" if is_end and self._has_calls and not text.strip() else text)]

    def _listed(self, is_end: bool) -> list[str | ToolCall]:
        """A list of calls behind a marker, which ends the text. A list that is the whole text needs no marker."""
        if CALLS not in self._held:
            if not self._has_text and "[".startswith(self._held.lstrip()[:1]):
                return self._alone(is_end)
            text = self._held if is_end else self._held[: _num_certain(self._held, CALLS)]
            self._held = self._held[len(text) :]
            return self._said(text)
        before = self._held[: self._held.index(CALLS)].rstrip()
        self._held = self._held[len(before) :]
        parts = self._said(before)
        if is_end:
            calls = self._calls(self._held.lstrip().removeprefix(CALLS))
            parts += calls or self._said(self._held)
        return parts

    def _alone(self, is_end: bool) -> list[str | ToolCall]:
        """Calls that are the whole text."""
        begun = self._held.lstrip()
        starts = ["["] if self._form.style == "mistral" else ["{", PYTHON]
        may_be_call = any(begun.startswith(start) or start.startswith(begun) for start in starts)
        if not self._has_text and not is_end and may_be_call:
            return []
        calls = None if self._has_text else self._calls(begun.removeprefix(PYTHON))
        text, self._held = self._held, ""
        return [*calls] if calls else self._said(text)

    def _said(self, text: str) -> list[str | ToolCall]:
        self._has_text |= bool(text)
        return [text] if text else []

    def _calls(self, text: str) -> list[ToolCall] | None:
        """The calls that a text consists of; None if it has anything else."""
        values, rest, decoder = list[Any](), BETWEEN.sub("", text, count=1), json.JSONDecoder()
        try:
            while rest:
                value, end = decoder.raw_decode(rest)
                values += value if isinstance(value, list) else [value]
                rest = BETWEEN.sub("", rest[end:], count=1)
        except (ValueError, RecursionError):
            return None
        calls = list[ToolCall]()
        for value in values:
            name = value.get("name") if isinstance(value, dict) else None
            arguments = value.get("arguments", value.get("parameters")) if isinstance(name, str) else None
            if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
                return None
            calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
        return calls or None


class LateCallReader:
    """Finds calls in an answer that a constraint binds from each call's beginning on: their arguments as they come.

    Texts and calls are those of `CallReader`, but for a call that a limit cuts within its arguments.
    """

    def __init__(self, form: ToolFormat | None) -> None:
        """form: None for an answer that a constraint makes calls and nothing else."""
        self._style, self._marker = (form.style, form.marker.strip()) if form is not None else ("", "")
        self._held = ""
        readers = {"": self._head, "llama": self._start}
        self._read: Callable[[bool], list[str | CallStart | Arguments]] = readers.get(self._style, self._text)
        self._arguments = ObjectScanner()
        self._has_calls = False

    def push(self, text: str, *, is_end: bool) -> list[str | CallStart | Arguments]:
        """What is certain now, in order."""
        self._held += text
        parts = list[str | CallStart | Arguments]()
        before = None
        while self._held and before != (self._held, self._read):
            before = self._held, self._read
            parts += self._read(is_end)
        return parts

    def _start(self, is_end: bool) -> list[str | CallStart | Arguments]:
        """The beginning of an answer that may be a call without a marker."""
        key = "".join(self._held.lstrip().removeprefix(PYTHON).split())
        if key.startswith(NAME_KEY.rstrip()):
            self._read = self._head
        elif is_end or not (NAME_KEY.startswith(key) or PYTHON.startswith(key)):
            self._read = self._rest
        return []

    def _rest(self, is_end: bool) -> list[str | CallStart | Arguments]:
        """Text that no call follows."""
        return self._said(len(self._held))

    def _text(self, is_end: bool) -> list[str | CallStart | Arguments]:
        """Text up to where a call begins. Spaces around calls are no text."""
        at = self._held.find(self._marker)
        if at >= 0:
            self._read = self._head
            return self._said(len(self._held[:at].rstrip()))
        if is_end and self._has_calls and not self._held.strip():
            self._held = ""
        return self._said(len(self._held) if is_end else _num_certain(self._held, self._marker))

    def _head(self, is_end: bool) -> list[str | CallStart | Arguments]:
        """A call up to its arguments. What a limit cuts here is text."""
        if (head := CALL_HEAD.search(self._held)) is None:
            return self._said(len(self._held)) if is_end else []
        self._held, self._has_calls = self._held[head.end() :], True
        self._read, self._arguments = self._inside, ObjectScanner()
        return [CallStart(json.loads(head[1]))]

    def _inside(self, is_end: bool) -> list[str | CallStart | Arguments]:
        size = self._arguments.num_inside(self._held)
        text, self._held = self._held[:size], self._held[size:]
        if self._arguments.is_over:
            self._read = self._after
        return [Arguments(text)]

    def _after(self, is_end: bool) -> list[str | CallStart | Arguments]:
        """What ends a call: a tag before text, or another call, or nothing."""
        if self._style == "hermes" and CLOSE in self._held:
            self._held, self._read = self._held.partition(CLOSE)[2], self._text
        elif self._style != "hermes" and CALL_HEAD.search(self._held):
            self._read = self._head
        return []

    def _said(self, size: int) -> list[str | CallStart | Arguments]:
        text, self._held = self._held[:size], self._held[size:]
        return [text] if text else []


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


def _num_certain(text: str, tag: str) -> int:
    """Characters of a text before those that may belong to a call: spaces at its end, and a tag's beginning or all."""
    at = text.find(tag)
    if at < 0:
        at = len(text) - max(size for size in range(len(tag)) if text.endswith(tag[:size]))
    return len(text[:at].rstrip())
