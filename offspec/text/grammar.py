"""Schemas, grammars and regexes as constraints on tokens, by the library llguidance.

The library parses the answer's bytes, and knows which of a vocabulary's tokens may follow. Where the next bytes are
certain, it allows only the token that the tokenizer would write there, so that an answer has the tokens that the model
knows from training. JSON has one layout, that of Python's `json.dumps`: `{"a": 1, "b": [2, 3]}`. A free choice of
spaces would leave little that is certain, and small models repeat spaces without end.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from offspec.scheduler.params import Constraint, Trigger
from offspec.scheduler.trees.constraint import TokenConstraint

from ..errors import TokenizerError, UsageError
from .grammar_constraint import GrammarConstraint, GrammarVocabulary, Start, reason
from .late_constraint import LateConstraint, Marker, Opening
from .thinking import CLOSE, OPEN, ThinkingStyle
from .tokenizer import Tokenizer

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
# Thinking before an answer, as triggers and as the rules of an answer that may begin with it, or follows it.
THINKS, THOUGHT = Trigger((OPEN,), is_at_start=True), Trigger((CLOSE,))
MAY_THINK = f'start: @answer | "{OPEN}" rest\nrest: /(.|\\n)*/'
AFTER_THINKING = "start: first gap @answer\ngap: /\\n{0,2}/\nfirst[lazy]: /(.|\\n)*<\\/think>/"
# Matchers that are kept, because requests of one program repeat their constraints; and refusals, a message each.
MOST_COMPILED, MOST_COMPILED_BYTES, MOST_REFUSED = 16, 1 << 28, 1024
Key = tuple[Constraint, str]


class ConstraintCompiler:
    """Compiles constraints for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: the target's, which may exceed the tokenizer's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = Lock()  # guards the next three
        self._kept = OrderedDict[Key, Start]()  # the last used last
        self._used = WeakValueDictionary[Key, Start]()  # these, and those of requests that wait or are under way
        self._refused = OrderedDict[bytes, str]()  # messages, by the constraint's digest
        self._markers = dict[Trigger, Marker]()  # a model has one format of calls, so these are few

    def compile(
        self, constraint: Constraint, prompt: Sequence[int] = (), *, gives_forced: bool = True
    ) -> TokenConstraint:
        """A constraint on one answer. prompt: its token ids, whose end says whether the model thinks before.

        gives_forced: whether its `forced` finds any tokens.

        Raises UsageError for a schema, grammar or regex that cannot be compiled, and for one that no token can begin.
        Raises TokenizerError for a model whose tokens have no fixed bytes, or that has no end-of-text token.
        """
        plain = replace(constraint, thinks=False)
        parser = self._parser(plain, "", gives_forced)
        thinking = ThinkingStyle.of(prompt, self._tokenizer) if constraint.thinks else None
        final, trigger = self._vocabulary.final, constraint.trigger
        if thinking is None or thinking.is_over:
            return parser if trigger is None else LateConstraint(parser, [self._marker(trigger)], trigger, final)
        stages = [self._marker(THOUGHT)]
        opening = None
        if trigger is not None:
            stages.append(self._marker(trigger))
            opening = None if thinking.is_open else Opening(self._marker(THINKS))
        else:
            if not thinking.is_open:
                opening = Opening(self._marker(THINKS), self._parser(plain, MAY_THINK, gives_forced))
            parser = self._parser(plain, AFTER_THINKING, gives_forced)
        return LateConstraint(parser, stages, trigger or THOUGHT, final, opening, must_begin=trigger is None)

    def _parser(self, constraint: Constraint, start: str, gives_forced: bool) -> GrammarConstraint:
        """start: rules in which `@answer` is the constraint's own grammar; "" for that alone."""
        flag_name, key, vocabulary = NAMES[constraint.kind], (constraint, start), self._vocabulary
        digest = hashlib.sha256(repr(key).encode(errors="backslashreplace")).digest()
        with self._lock:
            if (message := self._refused.get(digest)) is not None:
                raise UsageError(message)
            compiled = self._used.get(key)
        if compiled is None:
            try:
                compiled = self._compiled(constraint, start, flag_name)
            except UsageError as exc:
                self._refuse(digest, str(exc))
                raise
        self._keep(key, compiled)
        return GrammarConstraint(compiled, vocabulary, flag_name, gives_forced=gives_forced)

    def _compiled(self, constraint: Constraint, start: str, what: str) -> Start:
        """A new matcher with its first mask. Raises UsageError; nothing of the matcher is then kept."""
        before = _resident_bytes()
        matcher = self._new_matcher(constraint, start, what)
        nbytes = max(_resident_bytes() - before, len(constraint.text))
        parser = GrammarConstraint(Start(matcher), self._vocabulary, what, gives_forced=False)
        mask = parser.mask([])
        if mask is not None and not mask.any():
            raise UsageError(str(parser.dead_end([])))
        return Start(matcher, nbytes, mask)

    def _refuse(self, digest: bytes, message: str) -> None:
        with self._lock:
            self._refused[digest] = message
            while len(self._refused) > MOST_REFUSED:
                self._refused.popitem(last=False)

    def _keep(self, key: Key, compiled: Start) -> None:
        """Keep the matcher beyond its requests, as long as it is among the last used ones and there is room."""
        with self._lock:
            kept, self._used[key] = self._kept, compiled
            kept[key] = compiled
            kept.move_to_end(key)
            while len(kept) > MOST_COMPILED or (kept and sum(s.nbytes for s in kept.values()) > MOST_COMPILED_BYTES):
                kept.popitem(last=False)

    def _marker(self, trigger: Trigger) -> Marker:
        if trigger not in self._markers:
            self._markers[trigger] = Marker.of(trigger, self._vocabulary.known, self._vocab_size)
        return self._markers[trigger]

    def _new_matcher(self, constraint: Constraint, start: str, what: str) -> Any:
        try:
            size = len(constraint.text.encode())
        except UnicodeEncodeError as exc:
            raise UsageError(f"the {what} is not valid Unicode (character {exc.start})") from exc
        if size > MAX_BYTES:
            raise UsageError(f"the {what} has {size} bytes, and {MAX_BYTES} are allowed; simplify it")
        tokens, grammar = self._vocabulary.tokens, _grammar(constraint)
        grammar = _within(start, grammar) if start else grammar
        matcher = _with_deep_stack(lambda: _matcher(tokens, grammar))
        if matcher.is_error():
            raise UsageError(f"the {what} cannot be used: {reason(matcher.get_error())}")
        return matcher

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        tokenizer, size = self._tokenizer, self._vocab_size
        if (token_bytes := tokenizer.token_bytes) is None:
            raise TokenizerError(
                f"the tokens of {tokenizer.folder} have no fixed text, so answers cannot be constrained; "
                "use another model, or omit the constraint"
            )
        final = sorted(token for token in tokenizer.eos_ids if token < size)
        if not final:
            raise TokenizerError(
                f"{tokenizer.folder} names no end-of-text token, so a constrained answer could not end; "
                "set eos_token_id in its generation_config.json"
            )
        eos = tokenizer.eos_id if tokenizer.eos_id in final else final[0]
        from llguidance import LLTokenizer  # here, because few requests need it

        tokens: Any = _Tokens(tokenizer, token_bytes, size)  # it has what the library reads of its own wrapper class
        return GrammarVocabulary(LLTokenizer(tokens, eos_token=final), token_bytes, size, eos, final)


class _Tokens:
    """A tokenizer as the library asks for it: bytes by token id, and a function from text to ids."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, known: Any, size: int) -> None:
        self._tokenizer, self._known = tokenizer, known
        self.eos_token_id = min(tokenizer.eos_ids)
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < size)
        self.tokens = [known.get(token, b"") for token in range(size)]
        for token in self.special_token_ids:  # Lark grammars may name them
            self.tokens[token] = tokenizer.token_text(token).encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text inside an answer; none if the tokenizer changes it there."""
        wanted = text if isinstance(text, bytes) else text.encode()
        text = wanted.decode()
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._bytes(ids) != wanted:  # sentencepiece's tokenizers add a space at the start
            ids = self._tokenizer.encode_after("\n", text)
        return ids if self._bytes(ids) == wanted else []

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._known.get(token, b"") for token in ids)


# ------------------------------------------------------------------------------------------------ the library


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


def _resident_bytes() -> int:
    """This process's memory, where the system tells it; else 0."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _within(start: str, grammar: str) -> str:
    """A grammar inside another: `start` has the rules of the whole, and `@answer` for the grammar."""
    parts = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]
    name = parts[0].setdefault("name", "answer")
    whole = "%llguidance {}\n" + start.replace("@answer", f"@{name}")
    return json.dumps({"grammars": [{"name": "offspec", "lark_grammar": whole}, *parts]})


def _matcher(tokens: Any, grammar: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.deep_copy().compute_bitmask()
    return matcher


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
