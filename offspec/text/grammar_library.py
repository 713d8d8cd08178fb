"""Schemas, grammars and regexes in the form of the library llguidance, and its matchers.

This module imports neither torch nor a tokenizer: the processes that try constraints (`grammar_worker`) have it, too.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from offspec.scheduler.params import Constraint

from ..errors import UsageError

T = TypeVar("T")
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "grammar": "grammar",
    "regex": "regex",
    "tool_calls": "tools' schema",
}
MAX_BYTES = 1 << 18  # of a schema, grammar or regex: compiling a longer one takes seconds
STACK_BYTES = 1 << 27  # the library's compiler recurses along chains of rules; 1 << 18 bytes of them need half of this
NOTHING_FOLLOWS = "NoExtensionBias"  # the library's word for a dead end
MAX_MESSAGE = 200  # characters of the library's message


def check_size(constraint: Constraint) -> None:
    """Raises UsageError for a text that is too long, or that no bytes can express."""
    name = NAMES[constraint.kind]
    try:
        size = len(constraint.text.encode())
    except UnicodeEncodeError as exc:
        raise UsageError(f"the {name} is not valid Unicode (character {exc.start})") from exc
    if size > MAX_BYTES:
        raise UsageError(f"the {name} has {size} bytes, and {MAX_BYTES} are allowed; simplify it")


def new_matcher(tokens: Any, constraint: Constraint, start: str = "") -> Any:
    """The library's matcher, whose first mask it has computed. tokens: the library's tokenizer.

    start: rules in which `@answer` is the constraint's own grammar; "" for that alone. Raises UsageError for a
    constraint that cannot be compiled, and for one that no token can begin.
    """
    from llguidance import LLMatcher, LLParserLimits

    grammar = _grammar(constraint)
    if start:
        parts = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]
        whole = "%llguidance {}\n" + start.replace("@answer", f"@{parts[0].setdefault('name', 'answer')}")
        grammar = json.dumps({"grammars": [{"name": "offspec", "lark_grammar": whole}, *parts]})

    def compiled() -> Any:
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()
        return matcher

    matcher = _with_deep_stack(compiled)
    if matcher.is_error():
        raise UsageError(f"the {NAMES[constraint.kind]} cannot be used: {reason(matcher.get_error())}")
    if not any((first := matcher.deep_copy()).compute_bitmask()) or first.is_error():
        raise UsageError(dead_end(NAMES[constraint.kind], "as the answer's first", first.get_error()))
    return matcher


def _grammar(constraint: Constraint) -> str:
    """A constraint in the library's own form. Raises UsageError for a text that is not of its kind."""
    from llguidance import LLMatcher, grammar_from

    if constraint.kind == "regex":
        return str(grammar_from("regex", constraint.text))
    if constraint.kind in ("grammar", "tool_calls"):
        try:
            return str(grammar_from("grammar", constraint.text))
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"the {NAMES[constraint.kind]} cannot be used: {reason(str(exc))}") from exc
    text = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"the JSON schema is not JSON ({reason(str(exc))})") from exc
    if schema is False or not isinstance(schema, (dict, bool)):
        raise UsageError("the JSON schema must be an object, or true, which allows any JSON")
    layout: Any = LAYOUT
    try:
        return LLMatcher.grammar_from_json_schema("{}" if schema is True else text, layout)
    except ValueError as exc:  # such as half a surrogate pair, which Python's JSON allows
        raise UsageError(f"the JSON schema cannot be used: {reason(str(exc))}") from exc


_stack_size_lock = threading.Lock()


def _with_deep_stack(work: Callable[[], T]) -> T:
    """The result of `work`, run by a thread with STACK_BYTES of stack; a smaller one might overflow."""
    results: list[T] = []
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: results.append(work()), name="offspec-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return results[0]


def dead_end(name: str, where: str, error: str) -> str:
    """The message that no token may follow. error: the library's, if there is one."""
    why = f" ({reason(error)})" if error not in ("", NOTHING_FOLLOWS) else ""
    return f"the {name} allows no token of this model {where}{why}; change it"


def reason(message: str) -> str:
    """The library's message on one line, shortened."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown error"]
    first = lines[0] if len(lines[0]) <= MAX_MESSAGE else lines[0][:MAX_MESSAGE] + " …"
    details = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return ": ".join([first.rstrip(":"), *details[:1]])
