"""The KV caches of one text, the target's and the draft's, kept from request to request.

A request that goes on from the text they hold scores only what is new. Knows nothing of where the text comes from.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import takewhile
from typing import Any, Protocol, TypeVar
from weakref import ref

from torch import Tensor

from offspec.scheduler.drafter import TreeModel

from ..errors import UsageError
from .decoder import BoolArray, CachedDecoder, Decoder, IntArray

G = TypeVar("G", bound=Generator[Any, None, None])


class SoleUser:
    """The one generator that may use something: until it has ended, is closed, or nobody has it any more."""

    def __init__(self, refusal: str) -> None:
        """refusal: what is said to whoever comes meanwhile."""
        self._refusal = refusal
        self._user: ref[Generator[Any, None, None]] | None = None

    def check_free(self) -> None:
        """Raises UsageError while the generator is under way."""
        if self._is_used():
            gc.collect()  # it may be out of everybody's reach, in a cycle of references
            if self._is_used():
                raise UsageError(self._refusal)

    def begin(self, user: G) -> G:
        """From now on it is this generator, which is given back."""
        self._user = ref(user)
        return user

    def _is_used(self) -> bool:
        user = None if self._user is None else self._user()
        return user is not None and getgeneratorstate(user) != GEN_CLOSED


class DraftText(TreeModel, Protocol):
    """A draft's side of a text: `CachedDecoder` is one, and whatever else a kind of draft makes of its decoder."""

    @property
    def decoder(self) -> Decoder: ...

    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray, before: int = 0
    ) -> Tensor:
        """As `CachedDecoder.states`, maybe without the rows `before`."""

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` of the target's tokens, committed and pending."""

    def truncate(self, length: int) -> None:
        """Forget the text from position `length` on."""


class TextCaches:
    """`text` is what has been scored or emitted so far; either cache holds a beginning of it, and maybe pending nodes.

    A request appends to `text`. It may be left anywhere (Ctrl-C): what the caches hold beyond `text` is forgotten by
    the next `rewind`. `user` is the steps of the request that is under way: one at a time, or their texts would mix.
    """

    def __init__(self, target: CachedDecoder, draft: DraftText | None) -> None:
        """Both of them empty."""
        self.text: list[int] = []
        self.target, self.draft = target, draft
        self.user = SoleUser(
            "these caches are in use by another request: end it or close its iterator first, or make caches of their "
            "own for this one (Engine.new_caches)"
        )

    def rewind(self, text: Sequence[int]) -> int:
        """Keep only what `text` begins with, and take it as the text; returns how many of its tokens are to be scored.

        Its last token is always among these, because its logits are what the next one follows from.
        """
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.text, text[:-1], strict=False)))
        for cached in (self.target, self.draft):
            if cached is not None:
                cached.truncate(min(cached.length, same))
        self.text = list(text)
        return len(text) - self.target.length

    def drop_target(self) -> None:
        """Give up the target's cache for its memory; `rewind` finds that all of the text is to be scored again."""
        self.target.cache = self.target.decoder.new_cache()
