"""A constraint that begins within an answer: at a marker, such as `<tool_call>`, or when the model's thinking is over.

Until then every token may follow, and nothing is computed but whether a token may begin the marker. A marker is one
special token, or a text, whose bytes may begin and end inside tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from offspec.scheduler.constraint import MaskBits
from offspec.scheduler.params import Trigger
from offspec.scheduler.tree import BoolArray, IntArray

from ..errors import ConstraintError
from .grammar_constraint import GrammarConstraint

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Marker:
    """A trigger in one vocabulary. known: the tokens' bytes. may_begin [V]: tokens that may begin a text, or are it."""

    texts: tuple[bytes, ...]
    token: int | None
    is_at_start: bool
    known: Mapping[int, bytes]
    may_begin: BoolArray

    @classmethod
    def of(cls, trigger: Trigger, known: Mapping[int, bytes], vocab_size: int) -> Marker:
        """known: the bytes of each token that stands for text."""
        texts = tuple(text.encode() for text in trigger.texts)
        may_begin = np.zeros(vocab_size, dtype=np.bool_)
        begins = [token for token, content in known.items() if token < vocab_size and _begins_any(content, texts)]
        may_begin[begins] = True
        if trigger.token is not None:
            may_begin[trigger.token] = True
        return cls(texts, trigger.token, trigger.is_at_start, known, may_begin)

    def read(self, held: Tokens, token: int) -> tuple[bool, Tokens | None]:
        """Whether the marker is complete with `token`; and the tokens from the one on that it begins in, if it may.

        held: the tokens of an incomplete marker before. None: it cannot come any more.
        """
        tokens = (*held, token)
        content = b"".join(self.known.get(each, b"") for each in tokens)
        if self.is_at_start:
            return self._read_start(tokens, content)
        if token == self.token:
            return True, (token,)
        if token not in self.known:  # another special token
            return False, ()
        found = [at for text in self.texts if (at := content.find(text)) >= 0]
        if found:
            return True, self._from(tokens, min(found))
        size = max((_num_begun(content, text) for text in self.texts), default=0)
        return False, self._from(tokens, len(content) - size)

    def _read_start(self, tokens: Tokens, content: bytes) -> tuple[bool, Tokens | None]:
        said = b"".join(content.split())
        if tokens[-1] == self.token and not said:
            return True, tokens
        if tokens[-1] not in self.known:
            return False, None
        if any(said.startswith(text) for text in self.texts):
            return True, tokens
        return False, tokens if any(text.startswith(said) for text in self.texts) else None

    def _from(self, tokens: Tokens, at: int) -> Tokens:
        """The tokens from the one on that has byte `at` of their text; none if it is the text's end."""
        end = 0
        for place, token in enumerate(tokens):
            end += len(self.known.get(token, b""))
            if end > at:
                return tokens[place:]
        return ()


def _num_begun(content: bytes, text: bytes) -> int:
    """How many bytes at the end of `content` may be the first of `text`, which it does not have whole."""
    most = min(len(text) - 1, len(content))
    return next((size for size in range(most, 0, -1) if content.endswith(text[:size])), 0)


def _begins_any(content: bytes, texts: Sequence[bytes]) -> bool:
    return any(text[:1] in content and (text in content or _num_begun(content, text) > 0) for text in texts)


class Place(NamedTuple):
    """Where a text stands. grammar: what it has to obey now, or None if every token may follow.

    tokens: of the grammar's text, beyond those that it has accepted; without a grammar, of a marker that may have
    begun. is_over: no marker is looked for any more.
    """

    tokens: Tokens = ()
    grammar: GrammarConstraint | None = None
    is_over: bool = False


class LateConstraint:
    """A `TokenConstraint` that begins at a marker."""

    def __init__(self, grammar: GrammarConstraint, marker: Marker, trigger: Trigger, final: Sequence[int]) -> None:
        """grammar: of the text from the marker's first token on, at its start. final: the tokens that end a text."""
        self._fresh, self._marker, self._trigger = grammar, marker, trigger
        self._final = frozenset(final)
        self._here = Place()
        self._places: dict[Tokens, Place] = {}  # below `_here`, by path

    def mask(self, path: Sequence[int]) -> MaskBits | None:
        """As in `TokenConstraint`."""
        place = self._place(path)
        if place.grammar is None:
            return None
        found = place.grammar.mask(place.tokens)
        is_dead_end = found is not None and not found.any()
        return None if is_dead_end and self._trigger.yields else found

    def is_idle(self, tokens: IntArray) -> bool:
        """As in `TokenConstraint`."""
        here = self._here
        if here.is_over:
            return True
        is_waiting = here.grammar is None and not here.tokens and not self._marker.is_at_start
        return is_waiting and not self._marker.may_begin[tokens].any()

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """As in `TokenConstraint`."""
        place = self._place(path)
        return [] if place.grammar is None else place.grammar.forced(place.tokens, most)

    def accept(self, tokens: Sequence[int]) -> None:
        """As in `TokenConstraint`."""
        place = self._here
        for token in tokens:
            place = self._next(place, token)
        self._places.clear()
        if (grammar := place.grammar) is not None:
            grammar.accept(place.tokens)
            place = Place(grammar=grammar)
            if grammar is self._fresh:
                self._fresh = grammar.new()
        self._here = place

    def dead_end(self, path: Sequence[int]) -> ConstraintError:
        """As in `TokenConstraint`."""
        place = self._place(path)
        return (place.grammar or self._fresh).dead_end(place.tokens)

    def _place(self, path: Sequence[int]) -> Place:
        """Where the text stands after `path`."""
        if self._here.is_over:
            return self._here
        key = tuple(path)
        known = len(key)
        while known and key[:known] not in self._places:
            known -= 1
        place = self._places[key[:known]] if known else self._here
        for size in range(known + 1, len(key) + 1):
            place = self._places[key[:size]] = self._next(place, key[size - 1])
        return place

    def _next(self, place: Place, token: int) -> Place:
        if place.is_over:
            return place
        if place.grammar is not None:
            return self._within(place.grammar, (*place.tokens, token))
        is_complete, tokens = self._marker.read(place.tokens, token)
        if tokens is None or token in self._final:
            return Place(is_over=True)
        return self._within(self._fresh, tokens) if is_complete else Place(tokens)

    def _within(self, grammar: GrammarConstraint, tokens: Tokens) -> Place:
        """The place after tokens of a grammar's text."""
        if not grammar.takes(tokens):
            may_end = self._trigger.yields or not grammar.has_failed
            return Place(is_over=True) if may_end else Place(tokens, grammar)
        if self._trigger.repeats and grammar.is_complete(tokens):
            _, begun = self._marker.read((), tokens[-1])
            return Place(begun or ())
        return Place(tokens, grammar)
