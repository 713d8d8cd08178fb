"""A constraint that begins within an answer: at a marker, such as `<tool_call>`, or when the model's thinking is over.

Until then every token may follow, and nothing is computed but whether a token may begin the marker. A marker is one
special token, or a text, whose bytes may begin and end inside tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from offspec.scheduler.params import Trigger
from offspec.scheduler.trees.constraint import MaskBits
from offspec.scheduler.trees.token_tree import BoolArray, IntArray

from ..errors import ConstraintError
from .grammar_constraint import GrammarConstraint

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Marker:
    """A trigger in one vocabulary. token_bytes: the tokens' bytes.

    may_begin [V]: tokens that may begin a text, or are it. overrunning: by the end of a text, tokens that begin with it
    and go on.
    """

    texts: tuple[bytes, ...]
    token: int | None
    is_at_start: bool
    token_bytes: Mapping[int, bytes]
    may_begin: BoolArray
    overrunning: Mapping[bytes, Sequence[int]]

    @cached_property
    def starters(self) -> frozenset[int]:
        """The tokens of `may_begin`."""
        return frozenset(np.flatnonzero(self.may_begin).tolist())

    @classmethod
    def of(cls, trigger: Trigger, token_bytes: Mapping[int, bytes], vocab_size: int) -> Marker:
        """token_bytes: the bytes of each token that stands for text."""
        texts = tuple(text.encode() for text in trigger.texts)
        may_begin = np.zeros(vocab_size, dtype=np.bool_)
        for token, content in token_bytes.items():
            if token < vocab_size and any(text[:1] in content for text in texts):
                may_begin[token] = any(text in content or _num_begun(content, text) > 0 for text in texts)
        if trigger.token is not None:
            may_begin[trigger.token] = True
        ends = tuple({text[size:] for text in texts for size in range(1, len(text))})
        overrunning: dict[bytes, list[int]] = {end: [] for end in ends}
        for token, content in token_bytes.items():
            if token < vocab_size and content.startswith(ends):
                for end in ends:
                    if content.startswith(end) and content != end:
                        overrunning[end].append(token)
        return cls(texts, trigger.token, trigger.is_at_start, token_bytes, may_begin, overrunning)

    def overrun(self, held: Tokens) -> list[int]:
        """The tokens that complete the marker after `held`, and go on."""
        content = b"".join(self.token_bytes.get(each, b"") for each in held)
        ends = [text[size:] for text in self.texts if (size := _num_begun(content, text))]
        return [token for end in ends for token in self.overrunning[end]]

    def read(self, held: Tokens, token: int) -> tuple[bool, Tokens | None]:
        """Whether the marker is complete with `token`; and the tokens from the one on that it begins in, if it may.

        held: the tokens of an incomplete marker before. None: it cannot come any more.
        """
        tokens = (*held, token)
        content = b"".join(self.token_bytes.get(each, b"") for each in tokens)
        if self.is_at_start:
            visible = b"".join(content.split())
            if (token == self.token and not visible) or (
                token in self.token_bytes and any(visible.startswith(text) for text in self.texts)
            ):
                return True, tokens
            may_come = token in self.token_bytes and any(text.startswith(visible) for text in self.texts)
            return False, tokens if may_come else None
        if token == self.token:
            return True, (token,)
        if token not in self.token_bytes:  # another special token
            return False, ()
        positions = [at for text in self.texts if (at := content.find(text)) >= 0]
        if positions:
            return True, self._from(tokens, min(positions))
        size = max((_num_begun(content, text) for text in self.texts), default=0)
        return False, self._from(tokens, len(content) - size)

    def _from(self, tokens: Tokens, at: int) -> Tokens:
        """The tokens from the one on that has byte `at` of their text; none if it is the text's end."""
        end = 0
        for place, token in enumerate(tokens):
            end += len(self.token_bytes.get(token, b""))
            if end > at:
                return tokens[place:]
        return ()


def _num_begun(content: bytes, text: bytes) -> int:
    """How many bytes at the end of `content` may be the first of `text`, which it does not have whole."""
    most = min(len(text) - 1, len(content))
    return next((size for size in range(most, 0, -1) if content.endswith(text[:size])), 0)


@dataclass(frozen=True)
class Opening:
    """What an answer may begin with instead: thinking, which then has to be closed.

    grammar: of an answer that begins with it, or not; None if every token may follow.
    """

    marker: Marker
    grammar: GrammarConstraint | None = None


class TextState(NamedTuple):
    """Where a text stands. grammar: what it has to obey now, or None if every token may follow.

    tokens: of the grammar's text, beyond those that it has accepted; without a grammar, of a marker that may have
    begun. stage: the index of the marker that is looked for; UNDECIDED while the text may be an opening. is_over: no
    marker is looked for any more.
    """

    tokens: Tokens = ()
    grammar: GrammarConstraint | None = None
    stage: int = 0
    is_over: bool = False


UNDECIDED = -1
OVER = TextState(is_over=True)


class LateConstraint:
    """A `TokenConstraint` that begins at a marker."""

    def __init__(
        self,
        grammar: GrammarConstraint,
        markers: Sequence[Marker],
        trigger: Trigger,
        final: Sequence[int],
        opening: Opening | None = None,
        *,
        must_begin: bool = False,
    ) -> None:
        """grammar: of the text from the last marker's first token on, at its start; `trigger` says what it does.

        markers: they are looked for one after the other. final: the tokens that end a text. opening: if there is one,
        the first marker is looked for in answers that begin with it; others begin with the second. must_begin: no
        answer ends before.
        """
        self._fresh, self._markers, self._trigger, self._opening = grammar, markers, trigger, opening
        self._must_begin = must_begin
        self.slow = grammar.slow
        if opening is not None and opening.grammar is not None:
            opening.grammar.slow = grammar.slow
        self._final, self._ends = frozenset(final), final
        self._here = TextState(stage=0 if opening is None else UNDECIDED)
        self._places: dict[Tokens, TextState] = {}  # below `_here`, by path
        self._fitting: dict[Tokens, MaskBits | None] = {}  # by the tokens of an incomplete marker

    def mask(self, path: Sequence[int]) -> MaskBits | None:
        """As in `TokenConstraint`."""
        place = self._place(path)
        if place.stage == UNDECIDED and self._opening is not None and self._opening.grammar is not None:
            return self._opening.grammar.mask(place.tokens)
        if place.grammar is None:
            return self._fits(place) if place.tokens and place.stage == len(self._markers) - 1 else None
        allowed = place.grammar.mask(place.tokens)
        is_dead_end = allowed is not None and not allowed.any()
        return None if is_dead_end and self._trigger.yields else allowed

    def _fits(self, place: TextState) -> MaskBits | None:
        """All tokens but those that complete the last marker and go on as its grammar does not."""
        marker, held = self._markers[-1], place.tokens
        if marker.is_at_start:
            return None
        if held not in self._fitting:
            bad = [token for token in marker.overrun(held) if not self._fresh.takes((*held, token))]
            allowed = np.ones(len(marker.may_begin), dtype=np.bool_)
            allowed[bad] = False
            self._fitting[held] = np.packbits(allowed, bitorder="little") if bad else None
        return self._fitting[held]

    def barred(self, path: Sequence[int]) -> Sequence[int]:
        """As in `TokenConstraint`: an answer may not end within the thinking before it."""
        place = self._place(path)
        return self._ends if self._must_begin and place.grammar is None and not place.is_over else ()

    def is_idle(self, tokens: IntArray) -> bool:
        """As in `TokenConstraint`."""
        return self._here.is_over or (self._is_waiting and not self._markers[self._here.stage].may_begin[tokens].any())

    @property
    def _is_waiting(self) -> bool:
        """Whether every token may follow the text, and nothing depends on tokens that cannot begin a marker."""
        here = self._here
        if here.grammar is not None or here.tokens or here.stage == UNDECIDED:
            return False
        return not self._markers[here.stage].is_at_start

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """As in `TokenConstraint`."""
        place = self._place(path)
        grammar = place.grammar
        if place.stage == UNDECIDED and self._opening is not None:
            grammar = self._opening.grammar
        return [] if grammar is None else grammar.forced(place.tokens, most)

    def accept(self, tokens: Sequence[int]) -> None:
        """As in `TokenConstraint`."""
        place = self._here
        for token in tokens:
            place = self._next(place, token)
        self._places.clear()
        if (grammar := place.grammar) is not None:
            grammar.accept(place.tokens)
            place = place._replace(tokens=())
            if grammar is self._fresh:
                self._fresh = grammar.new()
        self._here = place

    def dead_end(self, path: Sequence[int]) -> ConstraintError:
        """As in `TokenConstraint`."""
        place = self._place(path)
        return (place.grammar or self._fresh).dead_end(place.tokens)

    def _place(self, path: Sequence[int]) -> TextState:
        """Where the text stands after `path`."""
        if self._here.is_over or (self._is_waiting and self._markers[self._here.stage].starters.isdisjoint(path)):
            return self._here
        key = tuple(path)
        size_of_known = len(key)
        while size_of_known and key[:size_of_known] not in self._places:
            size_of_known -= 1
        place = self._places[key[:size_of_known]] if size_of_known else self._here
        for size in range(size_of_known + 1, len(key) + 1):
            place = self._places[key[:size]] = self._next(place, key[size - 1])
        return place

    def _next(self, place: TextState, token: int) -> TextState:
        if place.is_over:
            return place
        if place.stage == UNDECIDED:
            return self._opened(place, token)
        if place.grammar is not None:
            return self._within(place.grammar, (*place.tokens, token), place.stage)
        is_complete, tokens = self._markers[place.stage].read(place.tokens, token)
        if tokens is None or token in self._final:
            return OVER
        if not is_complete:
            return TextState(tokens, stage=place.stage)
        if place.stage + 1 < len(self._markers):
            return self._after(place.stage, token)
        return self._within(self._fresh, tokens, place.stage)

    def _opened(self, place: TextState, token: int) -> TextState:
        """The place after tokens of an opening, complete or not, or of something else."""
        assert self._opening is not None
        is_complete, tokens = self._opening.marker.read(place.tokens, token)
        if is_complete:
            return self._after(UNDECIDED, token)
        if tokens is not None:
            return TextState(tokens, stage=UNDECIDED)
        path = (*place.tokens, token)
        if self._opening.grammar is not None:
            return self._within(self._opening.grammar, path, len(self._markers) - 1)
        place_reached = TextState(stage=1)
        for each in path:
            place_reached = self._next(place_reached, each)
        return place_reached

    def _within(self, grammar: GrammarConstraint, tokens: Tokens, stage: int) -> TextState:
        """The place after tokens of a grammar's text."""
        if not grammar.takes(tokens):
            may_end = self._trigger.yields or not grammar.has_failed
            return OVER if may_end else TextState(tokens, grammar, stage)
        if self._trigger.repeats and grammar.is_complete(tokens):
            return self._after(stage - 1, tokens[-1])
        return TextState(tokens, grammar, stage)

    def _after(self, stage: int, token: int) -> TextState:
        """The place behind a stage's end, which is in `token`; the next marker may begin there as well."""
        marker = self._markers[stage + 1]
        _, begun = (False, ()) if marker.is_at_start else marker.read((), token)
        return TextState(begun or (), stage=stage + 1)
