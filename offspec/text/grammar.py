"""Schemas, grammars and regexes as constraints on tokens, by the library llguidance.

The library parses the answer's bytes, and knows which of a vocabulary's tokens may follow. Where the next bytes are
certain, it allows only the token that the tokenizer would write there, so that an answer has the tokens that the model
knows from training. JSON has one layout, that of Python's `json.dumps`: `{"a": 1, "b": [2, 3]}`. A free choice of
spaces would leave little that is certain, and small models repeat spaces without end.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from offspec.scheduler.constraint import MaskBits
from offspec.scheduler.params import Constraint

from ..errors import ConstraintError, TokenizerError, UsageError
from .tokenizer import Tokenizer

T = TypeVar("T")
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NAMES = {"json_schema": "JSON schema", "json_object": "JSON object", "grammar": "grammar", "regex": "regex"}
MAX_BYTES = 1 << 18  # of a schema, grammar or regex: compiling a longer one takes seconds
STACK_BYTES = 1 << 27  # the library's compiler recurses along chains of rules; 1 << 18 bytes of them need half of this
# Calls that take longer than SLOW_S are added up. Usual ones take microseconds; the library bounds each to seconds.
SLOW_S, MAX_SLOW_S = 0.05, 10.0
NOTHING_FOLLOWS = "NoExtensionBias"  # the library's word for a dead end
MOST_COMPILED = 8  # constraints whose matchers are kept: requests of one program repeat theirs
MAX_MESSAGE = 200  # characters of the library's message


class ConstraintCompiler:
    """Compiles constraints for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: the target's, which may exceed the tokenizer's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._compiled = OrderedDict[Constraint, Any]()  # the library's matchers, the last used last

    def compile(self, constraint: Constraint, *, gives_forced: bool = True) -> GrammarConstraint:
        """A constraint on one answer. gives_forced: whether `GrammarConstraint.forced` finds any tokens.

        Raises UsageError for a schema, grammar or regex that cannot be compiled, and for one that no token can begin.
        Raises TokenizerError for a model whose tokens have no fixed bytes, or that has no end-of-text token.
        """
        what = NAMES[constraint.kind]
        vocabulary = self._vocabulary
        start = self._compiled.pop(constraint, None) or self._new_matcher(constraint, what)
        found = GrammarConstraint(start, vocabulary, what, gives_forced=gives_forced)
        if not found.mask([]).any():
            raise UsageError(str(found.dead_end([])))
        self._compiled[constraint] = start
        while len(self._compiled) > MOST_COMPILED:
            self._compiled.popitem(last=False)
        return found

    def _new_matcher(self, constraint: Constraint, what: str) -> Any:
        try:
            size = len(constraint.text.encode())
        except UnicodeEncodeError as exc:
            raise UsageError(f"the {what} is not valid Unicode (character {exc.start})") from exc
        if size > MAX_BYTES:
            raise UsageError(f"the {what} has {size} bytes, and {MAX_BYTES} are allowed; simplify it")
        tokens, grammar = self._vocabulary.tokens, _grammar(constraint)
        start = _with_deep_stack(lambda: _matcher(tokens, grammar))
        if start.is_error():
            raise UsageError(f"the {what} cannot be used: {_reason(start.get_error())}")
        return start

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        tokenizer, size = self._tokenizer, self._vocab_size
        if (known := tokenizer.token_bytes) is None:
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

        tokens: Any = _Tokens(tokenizer, known, size)  # it has what the library reads of its own wrapper class
        return Vocabulary(LLTokenizer(tokens, eos_token=final), size, eos, final)


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary in the library's form. final: the tokens that end a text; eos: the tokenizer's own."""

    tokens: Any
    size: int
    eos: int
    final: Sequence[int]


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
        said = wanted.decode()
        ids = self._tokenizer.encode(said, add_special_tokens=False)
        if self._bytes(ids) != wanted:  # sentencepiece's tokenizers add a space at the start
            ids = self._tokenizer.encode_after("\n", said)
        return ids if self._bytes(ids) == wanted else []

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._known.get(token, b"") for token in ids)


# ------------------------------------------------------------------------------------------------ one answer


class GrammarConstraint:
    """A `TokenConstraint`: a parser of one answer's tokens, which moves along paths and back.

    Where only the end of the text may follow, the mask has the tokenizer's own EOS; elsewhere all that end a text.
    """

    def __init__(self, start: Any, vocabulary: Vocabulary, what: str, *, gives_forced: bool) -> None:
        """start: the library's matcher at the answer's start; it stays there. what: the constraint, for messages."""
        self._start, self._vocabulary, self._what, self._gives_forced = start, vocabulary, what, gives_forced
        self._matcher = start.deep_copy()
        self._text: list[int] = []
        self._path: list[int] = []  # the matcher has parsed text + path
        self._masks: dict[tuple[int, ...], MaskBits] = {}
        self._slow_s, self._error, self._has_ended = 0.0, "", False
        self._final = frozenset(vocabulary.final)
        self._ends = self._bits(vocabulary.final)
        self._end = self._bits([vocabulary.eos])

    def _bits(self, tokens: Sequence[int]) -> MaskBits:
        allowed = np.zeros(self._vocabulary.size, dtype=np.bool_)
        allowed[list(tokens)] = True
        return np.packbits(allowed, bitorder="little")

    def mask(self, path: Sequence[int]) -> MaskBits:
        """As in `TokenConstraint`."""
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._new_mask(path)
        return self._masks[key]

    def _new_mask(self, path: Sequence[int]) -> MaskBits:
        if self._is_after_end(path):
            return self._end
        if not self._go(path):
            return np.zeros_like(self._end) if self._error else np.full_like(self._end, 255)
        found = np.frombuffer(self._timed(self._matcher.compute_bitmask), dtype=np.uint8)
        if self._has_failed():
            return np.zeros_like(self._end)
        found = found[: len(self._end)]
        return found if (found & ~self._ends).any() or not found.any() else self._end

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """As in `TokenConstraint`. The library's answer after a path is the mask's only token there."""
        tokens = list[int]()
        if not self._gives_forced or self._is_after_end(path) or not self._go(path):
            return tokens
        while len(tokens) < most:
            found = self._timed(self._matcher.compute_ff_tokens)
            if self._has_failed():
                break
            if not found:
                if self._matcher.is_stopped():
                    tokens.append(self._vocabulary.eos)
                break
            tokens.append(found[0])
            if not self._go([*path, *tokens]):
                return tokens[:-1]
        return tokens

    def accept(self, tokens: Sequence[int]) -> None:
        """As in `TokenConstraint`."""
        for at, token in enumerate(tokens):
            if self._has_ended or token in self._final:
                self._has_ended = True
                tokens = tokens[:at]
                break
        self._go(tokens)
        self._text += tokens
        self._path = self._path[len(tokens) :]
        taken, size = tuple(tokens), len(tokens)
        self._masks = {path[size:]: mask for path, mask in self._masks.items() if path[:size] == taken}

    def dead_end(self, path: Sequence[int]) -> ConstraintError:
        """As in `TokenConstraint`."""
        at = len(self._text) + len(path)
        where = f"after {at} tokens of the answer" if at else "as the answer's first"
        why = f" ({_reason(self._error)})" if self._error not in ("", NOTHING_FOLLOWS) else ""
        return ConstraintError(f"the {self._what} allows no token of this model {where}{why}; change it")

    def _is_after_end(self, path: Sequence[int]) -> bool:
        return self._has_ended or not self._final.isdisjoint(path)

    def _go(self, path: Sequence[int]) -> bool:
        """Move the matcher to text + path; False if the constraint forbids the path, or the library has failed."""
        if self._slow_s > MAX_SLOW_S:
            self._error = f"too complex: {self._slow_s:.0f} s were spent on it"
            return False
        here = self._path
        common = _num_common(here, path)
        if len(here) > common:
            self._matcher.rollback(len(here) - common)
            self._path = here[:common]
        wanted = list(path[common:])
        if not wanted:
            return True
        count = self._timed(lambda: self._matcher.try_consume_tokens(wanted))
        if self._has_failed():
            return False
        self._path = [*self._path, *wanted[:count]]
        return bool(count == len(wanted))

    def _has_failed(self) -> bool:
        """Whether the library has reached one of its limits. If so, start again: a matcher that failed stays failed."""
        if not self._matcher.is_error():
            return False
        self._error = self._matcher.get_error()
        self._matcher, self._path = self._start.deep_copy(), []
        self._matcher.try_consume_tokens(self._text)
        return True

    def _timed(self, call: Callable[[], T]) -> T:
        """The result of one of the library's calls; adds up the CPU time of slow ones."""
        began = time.thread_time()
        found = call()
        if (seconds := time.thread_time() - began) > SLOW_S:
            self._slow_s += seconds
        return found


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of tokens that two paths have in common at their start."""
    for at, (ours, theirs) in enumerate(zip(a, b, strict=False)):
        if ours != theirs:
            return at
    return min(len(a), len(b))


# ------------------------------------------------------------------------------------------------ the library


def _grammar(constraint: Constraint) -> str:
    """A constraint in the library's own form. Raises UsageError for a text that is not of its kind."""
    from llguidance import LLMatcher, grammar_from

    if constraint.kind == "regex":
        return str(grammar_from("regex", constraint.text))
    if constraint.kind == "grammar":
        try:
            return str(grammar_from("grammar", constraint.text))
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"the grammar cannot be used: {_reason(str(exc))}") from exc
    text = constraint.text if constraint.kind == "json_schema" else '{"type": "object"}'
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"the JSON schema is not JSON ({_reason(str(exc))})") from exc
    if schema is False or not isinstance(schema, (dict, bool)):
        raise UsageError("the JSON schema must be an object, or true, which allows any JSON")
    layout: Any = LAYOUT
    return LLMatcher.grammar_from_json_schema("{}" if schema is True else text, layout)


def _matcher(tokens: Any, grammar: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if not matcher.is_error():
        matcher.deep_copy().compute_bitmask()
    return matcher


_stack_size_lock = threading.Lock()


def _with_deep_stack(work: Callable[[], T]) -> T:
    """The result of `work`, run by a thread with STACK_BYTES of stack; a smaller one might overflow."""
    found: list[T] = []
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: found.append(work()), name="offspec-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return found[0]


def _reason(message: str) -> str:
    """The library's message on one line, shortened."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["unknown error"]
    first = lines[0] if len(lines[0]) <= MAX_MESSAGE else lines[0][:MAX_MESSAGE] + " …"
    details = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return ": ".join([first.rstrip(":"), *details[:1]])
