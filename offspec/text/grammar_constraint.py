"""One answer's parser: which tokens a grammar allows after a path of tokens, by the library llguidance."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from offspec.scheduler.params import Constraint
from offspec.scheduler.trees.constraint import MaskBits
from offspec.scheduler.trees.token_tree import IntArray

from ..errors import ConstraintError
from .grammar_library import dead_end

T = TypeVar("T")
# A constraint, and rules in which `@answer` is its grammar; "" for that alone. One matcher follows it.
Part = tuple[Constraint, str]
# CPU time of calls that take longer than SLOW_S is added up. Usual ones take microseconds; the library bounds each to
# seconds.
SLOW_S, MAX_SLOW_S = 0.005, 10.0


@dataclass(frozen=True)
class GrammarVocabulary:
    """A vocabulary in the library's form. final: the tokens that end a text; eos: the tokenizer's own.

    token_bytes: the bytes of each token that stands for text.
    """

    tokens: Any
    token_bytes: Mapping[int, bytes]
    size: int
    eos: int
    final: Sequence[int]


@dataclass(eq=False)
class Start:
    """A constraint before an answer. matcher: the library's, which stays there. mask: of the first token, if computed.

    nbytes: of the matcher, about. compile_s: how long it took to make.
    """

    matcher: Any
    nbytes: int = 0
    mask: MaskBits | None = None
    compile_s: float = 0.0


@dataclass
class SlowTime:
    """Seconds of CPU time of an answer's slow calls, over all its parsers."""

    seconds: float = 0.0


class GrammarConstraint:
    """A `TokenConstraint`: a parser of one answer's tokens, which moves along paths and back.

    Where only the end of the text may follow, the mask has the tokenizer's own EOS; elsewhere all that end a text.
    """

    def __init__(
        self,
        start: Start,
        vocabulary: GrammarVocabulary,
        description: str,
        *,
        gives_forced: bool,
        slow: SlowTime | None = None,
    ) -> None:
        """description: the constraint, for messages. slow: of the answer's other parsers as well."""
        self._start, self._vocabulary, self._what, self._gives_forced = start, vocabulary, description, gives_forced
        self._matcher, self.slow = start.matcher.deep_copy(), slow or SlowTime()
        self._text: list[int] = []
        self._path: list[int] = []  # the matcher has parsed text + path
        self._masks: dict[tuple[int, ...], MaskBits | None] = {} if start.mask is None else {(): start.mask}
        self._error, self._has_ended = "", False
        self._final = frozenset(vocabulary.final)
        self._ends = self._bits(vocabulary.final)
        self._end = self._bits([vocabulary.eos])

    def new(self) -> GrammarConstraint:
        """The same constraint on another part of the answer, whose time it shares."""
        return GrammarConstraint(
            self._start, self._vocabulary, self._what, gives_forced=self._gives_forced, slow=self.slow
        )

    @property
    def has_failed(self) -> bool:
        """Whether the library has reached one of its limits, or the constraint took too long."""
        return bool(self._error)

    def takes(self, path: Sequence[int]) -> bool:
        """Whether the constraint allows the path itself."""
        return self._is_after_end(path) or self._go(path)

    def _bits(self, tokens: Sequence[int]) -> MaskBits:
        allowed = np.zeros(self._vocabulary.size, dtype=np.bool_)
        allowed[list(tokens)] = True
        return np.packbits(allowed, bitorder="little")

    def mask(self, path: Sequence[int]) -> MaskBits | None:
        """As in `TokenConstraint`."""
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._new_mask(path)
        return self._masks[key]

    def barred(self, path: Sequence[int]) -> Sequence[int]:
        """As in `TokenConstraint`."""
        return ()

    def is_idle(self, tokens: IntArray) -> bool:
        """As in `TokenConstraint`."""
        return False

    def is_complete(self, path: Sequence[int]) -> bool:
        """Whether text and path are a whole text of the grammar."""
        return not self._is_after_end(path) and self._go(path) and bool(self._matcher.is_accepting())

    def _new_mask(self, path: Sequence[int]) -> MaskBits | None:
        if self._is_after_end(path):
            return self._end
        if not self._go(path):
            return np.zeros_like(self._end) if self._error else None
        mask = np.frombuffer(self._timed(self._matcher.compute_bitmask), dtype=np.uint8)
        if self._recovers():
            return np.zeros_like(self._end)
        mask = mask[: len(self._end)]
        return mask if (mask & ~self._ends).any() or not mask.any() else self._end

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """As in `TokenConstraint`. The library's answer after a path is the mask's only token there."""
        tokens = list[int]()
        if not self._gives_forced or self._is_after_end(path) or not self._go(path):
            return tokens
        while len(tokens) < most:
            forced = self._timed(self._matcher.compute_ff_tokens)
            if self._recovers():
                break
            if not forced:
                if self._matcher.is_stopped():
                    tokens.append(self._vocabulary.eos)
                break
            tokens.append(forced[0])
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
        return ConstraintError(dead_end(self._what, where, self._error))

    def _is_after_end(self, path: Sequence[int]) -> bool:
        return self._has_ended or not self._final.isdisjoint(path)

    def _go(self, path: Sequence[int]) -> bool:
        """Move the matcher to text + path; False if the constraint forbids the path, or the library has failed."""
        if self.slow.seconds > MAX_SLOW_S:
            self._error = f"too complex: {self.slow.seconds:.0f} s were spent on it"
            return False
        here = self._path
        differing = (at for at, (ours, theirs) in enumerate(zip(here, path, strict=False)) if ours != theirs)
        common = next(differing, min(len(here), len(path)))
        if len(here) > common:
            self._matcher.rollback(len(here) - common)
            self._path = here[:common]
        wanted = list(path[common:])
        if not wanted:
            return True
        count = self._timed(lambda: self._matcher.try_consume_tokens(wanted))
        if self._recovers():
            return False
        self._path = [*self._path, *wanted[:count]]
        return bool(count == len(wanted))

    def _recovers(self) -> bool:
        """Whether the library has just reached a limit. If so, start again: a matcher that failed stays failed."""
        if not self._matcher.is_error():
            return False
        self._error = self._matcher.get_error()
        self._matcher, self._path = self._start.matcher.deep_copy(), []
        self._matcher.try_consume_tokens(self._text)
        return True

    def _timed(self, call: Callable[[], T]) -> T:
        """The result of one of the library's calls; adds up the CPU time of slow ones."""
        began = time.thread_time()
        result = call()
        if (seconds := time.thread_time() - began) > SLOW_S:
            self.slow.seconds += seconds
        return result
