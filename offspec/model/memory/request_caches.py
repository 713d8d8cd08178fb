"""The KV caches of one text, the target's and the draft's, kept from request to request.

A request that continues their text scores only its new tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Sequence
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import takewhile
from typing import Any, Protocol, TypeVar
from weakref import ref

from torch import Tensor

from offspec.scheduler.drafting.drafter import TreeModel
from offspec.scheduler.trees.token_tree import IntArray

from ...errors import UsageError
from ..decoder import CachedDecoder, Decoder, SharedForward

G = TypeVar("G", bound=Generator[Any, None, None])


class SoleUser:
    """The only generator that may use an object, until it has ended, is closed, or is no longer referenced."""

    def __init__(self, refusal: str) -> None:
        """refusal: the message of the UsageError for another user."""
        self._refusal = refusal
        self._user: ref[Generator[Any, None, None]] | None = None

    def check_free(self) -> None:
        """Raises UsageError while the generator is running."""
        if self._is_used():
            gc.collect()  # it may be unreachable, in a cycle of references
            if self._is_used():
                raise UsageError(self._refusal)

    def begin(self, user: G) -> G:
        """Make this generator the user, and return it."""
        self._user = ref(user)
        return user

    def _is_used(self) -> bool:
        user = None if self._user is None else self._user()
        return user is not None and getgeneratorstate(user) != GEN_CLOSED


class RoundText(TreeModel, Protocol):
    """A `TreeModel` that says whether its rounds may join those of other texts."""

    def joining(self, chain: Sequence[int]) -> SharedForward | None:
        """As `CachedDecoder.joining`."""


class DraftText(RoundText, Protocol):
    """The draft's view of a text. `CachedDecoder` is one; a kind of draft may have another."""

    @property
    def decoder(self) -> Decoder: ...

    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray, before: int = 0
    ) -> Tensor:
        """`CachedDecoder.states`; the rows `before` may be missing."""

    def reserve(self, capacity: int) -> None:
        """Reserve room for `capacity` of the target's tokens, committed and pending."""

    def truncate(self, length: int) -> None:
        """Drop the text from position `length` on."""


class RequestCaches:
    """The caches of `text`: all tokens scored or emitted so far. Each cache has a prefix of it, and pending nodes.

    A request appends to `text`. It may be interrupted anywhere (Ctrl-C); the next `rewind` drops all entries beyond
    `text`. `user` is the generator of the running request; two at once would mix their texts.
    """

    def __init__(self, target: CachedDecoder, draft: DraftText | None, num_shared: int = 0) -> None:
        """target, draft: both empty. num_shared: entries of the target's cache that are the draft's own."""
        self.text: list[int] = []
        self.target = target
        self.draft = draft
        self.num_shared = num_shared
        self.user = SoleUser(
            "another request is using these caches; finish it, close its iterator, or use other caches "
            "(Engine.new_caches)"
        )

    def rewind(self, text: Sequence[int]) -> int:
        """Make `text` the text; keep the entries of the common prefix. Returns how many tokens must be scored.

        The last token is always scored, because its logits predict the next one.
        """
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.text, text[:-1], strict=False)))
        for cached in (self.target, self.draft):
            if cached is not None:
                cached.truncate(min(cached.length, same))
        self.text = list(text)
        return len(text) - self.target.length
