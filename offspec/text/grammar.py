"""Schemas, grammars and regexes as constraints on tokens, by the library llguidance.

The library parses the answer's bytes, and knows which of a vocabulary's tokens may follow. Where the next bytes are
certain, it allows only the token that the tokenizer would write there, so that an answer has the tokens that the model
knows from training. JSON has one layout, that of Python's `json.dumps`: `{"a": 1, "b": [2, 3]}`. A free choice of
spaces would leave little that is certain, and small models repeat spaces without end.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from offspec.scheduler.params import Constraint, Trigger
from offspec.scheduler.trees.constraint import TokenConstraint

from ..errors import TokenizerError, UsageError
from .grammar_constraint import GrammarConstraint, GrammarVocabulary, Part, Start
from .grammar_library import NAMES, check_size, new_matcher
from .late_constraint import LateConstraint, Marker, Opening
from .thinking import CLOSE, OPEN, ThinkingStyle
from .tokenizer import Tokenizer

# Thinking before an answer, as triggers and as the rules of an answer that may begin with it, or follows it.
THINKS, THOUGHT = Trigger((OPEN,), is_at_start=True), Trigger((CLOSE,))
MAY_THINK = f'start: @answer | "{OPEN}" rest\nrest: /(.|\\n)*/'
AFTER_THINKING = "start: first gap @answer\ngap: /\\n{0,2}/\nfirst[lazy]: /(.|\\n)*<\\/think>/"
# Matchers that are kept, because requests of one program repeat their constraints; and refusals, a message each.
MOST_COMPILED, MOST_COMPILED_BYTES, MOST_REFUSED = 16, 1 << 28, 1024


class ConstraintCompiler:
    """Compiles constraints for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: the target's, which may exceed the tokenizer's."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = Lock()  # guards the next three
        self._kept = OrderedDict[Part, Start]()  # the last used last
        self._used = WeakValueDictionary[Part, Start]()  # these, and those of requests that wait or are under way
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
        plain, thinking = replace(constraint, thinks=False), self._thinking(constraint, prompt)
        parser = self._parser(plain, "", gives_forced)
        final, trigger = self._vocabulary.final, constraint.trigger
        if thinking is None:
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

    def parts(self, constraint: Constraint, prompt: Sequence[int] = ()) -> dict[Part, Start | None]:
        """What `compile` needs; None is not compiled yet. Raises UsageError for what was refused before."""
        plain, thinking, starts = replace(constraint, thinks=False), self._thinking(constraint, prompt), [""]
        if thinking is not None and constraint.trigger is None:
            starts += [AFTER_THINKING] if thinking.is_open else [MAY_THINK, AFTER_THINKING]
        return {part: self._known(part) for part in ((plain, start) for start in starts)}

    def compile_part(self, part: Part) -> Start:
        """Compile a part, and keep it beyond its requests. Raises the errors of `compile`."""
        if (compiled := self._known(part)) is None:
            try:
                constraint, start = part
                check_size(constraint)
                tokens, before, began = self._vocabulary.tokens, _resident_bytes(), time.perf_counter()
                matcher = new_matcher(tokens, constraint, start)
                nbytes = max(_resident_bytes() - before, len(constraint.text))
                parser = GrammarConstraint(Start(matcher), self._vocabulary, NAMES[constraint.kind], gives_forced=False)
                compiled = Start(matcher, nbytes, parser.mask([]), time.perf_counter() - began)
            except UsageError as exc:
                self.refuse(part, str(exc))
                raise
        with self._lock:
            kept, self._used[part] = self._kept, compiled
            kept[part] = compiled
            kept.move_to_end(part)
            while len(kept) > MOST_COMPILED or (kept and sum(s.nbytes for s in kept.values()) > MOST_COMPILED_BYTES):
                kept.popitem(last=False)
        return compiled

    def _thinking(self, constraint: Constraint, prompt: Sequence[int]) -> ThinkingStyle | None:
        """How the model may think before the answer; None if it does not."""
        thinking = ThinkingStyle.of(prompt, self._tokenizer) if constraint.thinks else None
        return None if thinking is None or thinking.is_over else thinking

    def _known(self, part: Part) -> Start | None:
        with self._lock:
            if (message := self._refused.get(_digest(part))) is not None:
                raise UsageError(message)
            return self._used.get(part)

    def _parser(self, constraint: Constraint, start: str, gives_forced: bool) -> GrammarConstraint:
        """start: rules in which `@answer` is the constraint's own grammar; "" for that alone."""
        compiled = self.compile_part((constraint, start))
        return GrammarConstraint(compiled, self._vocabulary, NAMES[constraint.kind], gives_forced=gives_forced)

    def refuse(self, part: Part, message: str) -> None:
        """Remember why a part cannot be compiled."""
        with self._lock:
            self._refused[_digest(part)] = message
            while len(self._refused) > MOST_REFUSED:
                self._refused.popitem(last=False)

    def _marker(self, trigger: Trigger) -> Marker:
        if trigger not in self._markers:
            self._markers[trigger] = Marker.of(trigger, self._vocabulary.token_bytes, self._vocab_size)
        return self._markers[trigger]

    def vocabulary_for_trials(self) -> dict[str, Any]:
        """The vocabulary as JSON, for `GrammarTrials`. Raises TokenizerError as `compile` does."""
        final = list(self._vocabulary.final)
        tokens = _Tokens(self._tokenizer, self._vocabulary.token_bytes, self._vocab_size)
        texts = [content.decode("latin-1") for content in tokens.tokens]
        return {"tokens": texts, "special": tokens.special_token_ids, "eos": tokens.eos_token_id, "final": final}

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

    def __init__(self, tokenizer: Tokenizer, token_bytes: Any, size: int) -> None:
        self._tokenizer, self._known = tokenizer, token_bytes
        self.eos_token_id = min(tokenizer.eos_ids)
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < size)
        self.tokens = [token_bytes.get(token, b"") for token in range(size)]
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


def _digest(part: Part) -> bytes:
    return hashlib.sha256(repr(part).encode(errors="backslashreplace")).digest()


def _resident_bytes() -> int:
    """This process's memory, where the system tells it; else 0."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
