"""A draft's text with a window: its KV cache keeps a few first tokens and the last ones, so that rounds stay fast.

MagicDec (2408.11049) and TriForce (2404.11912) draft with StreamingLLM's cache (2309.17453): the first tokens, which
models attend to whatever they are (attention sinks), and the last N. Memory and time of a round do not grow with the
text then, and the draft may continue texts that are longer than its context. Only the draft forgets: the target
verifies with all of its entries, so the text is the same.

The last entries keep their positions. The first tokens move along: they are computed again at the positions just before
the window, because RoPE shows only distances, and a draft was not trained on long ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offspec.scheduler.params import MAX_ROWS, SpeculationParams
from offspec.scheduler.trees.token_tree import IntArray
from offspec.scheduler.trees.vocabulary import Vocabulary

from ..config import ModelConfig
from ..decoder import CachedDecoder, Decoder, SharedForward
from .chunk_attention import NUM_SINKS
from .sequence_cache import SequenceCache

LEAST_WINDOW = 64
SLACK_SHARE, LEAST_SLACK = 4, 64  # entries move once for each 1/SLACK_SHARE of the window, at least for so many tokens
ENDLESS = 2**40  # tokens; the context of a draft that forgets


def slack(window: int) -> int:
    """Entries that the cache keeps beyond the window until it drops them together."""
    return max(LEAST_SLACK, window // SLACK_SHARE)


def most_entries(window: int) -> int:
    """The most committed entries of a text with this window."""
    return NUM_SINKS + window + slack(window)


def context_window(config: ModelConfig) -> int | None:
    """The longest window of which a draft's context holds the entries and the deepest nodes; None if that is short."""
    free_entries = config.max_context - NUM_SINKS - SpeculationParams.max_depth
    window = min(free_entries * SLACK_SHARE // (SLACK_SHARE + 1), free_entries - LEAST_SLACK)
    return window if window >= LEAST_WINDOW else None


class WindowedText:
    """A cached text that keeps NUM_SINKS first entries and at least the last `window` ones (a `DraftText`).

    `length` counts the text's tokens, whether their entries are kept or not.
    """

    def __init__(self, text: CachedDecoder, window: int | None) -> None:
        """text: empty; used by nobody else. window: None keeps all entries, until `begin` says otherwise."""
        self._text = text
        self.window = window
        self._sinks: list[int] = []  # the text's first tokens
        self._capacity = 0

    @property
    def _most(self) -> int:
        return ENDLESS if self.window is None else most_entries(self.window)

    def begin(self, text: Sequence[int], window: int | None) -> None:
        """Use this window from now on, for a text that begins as the entries do. Dropped entries are computed again."""
        is_longer = self.window is not None and (window is None or window > self.window)
        self.window, self._sinks = window, list(text[:NUM_SINKS])
        if is_longer and self._text.cache.num_dropped:
            self._restart(0)
        self.reserve(self._capacity)

    @property
    def cache(self) -> SequenceCache:
        """The entries that it keeps: all of the text's without a window."""
        return self._text.cache

    @property
    def without_window(self) -> CachedDecoder | None:
        """The text, if it keeps all entries."""
        return self._text if self.window is None else None

    @property
    def decoder(self) -> Decoder:
        return self._text.decoder

    @property
    def vocabulary(self) -> Vocabulary:
        return self._text.vocabulary

    @property
    def max_context(self) -> int:
        return self._text.max_context if self.window is None else ENDLESS

    @property
    def length(self) -> int:
        return self._text.length

    def reserve(self, capacity: int) -> None:
        """As `CachedDecoder.reserve`; there are never more entries than the window's and MAX_ROWS nodes."""
        self._capacity = capacity
        self._text.reserve(min(capacity, self._most + MAX_ROWS))

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        """As `CachedDecoder.score`."""
        return self.decoder.head(self.states(chain, tokens, depths, parents))

    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray, before: int = 0
    ) -> Tensor:
        """As `CachedDecoder.states`; of a chain longer than the window, it reads the last tokens only."""
        if (whole := self.whole(chain)) is not None:
            return whole.states(chain, tokens, depths, parents, before)
        assert self.window is not None
        tail = chain[-self.window :]
        self._restart(self.length + len(chain) - len(self._sinks) - len(tail))
        return self._text.states([*self._sinks, *tail], tokens, depths, parents, min(before, len(tail) - 1))

    def whole(self, chain: Sequence[int]) -> CachedDecoder | None:
        """The text to score this chain with, to which it will be appended; None if the chain is too long for that.

        Entries that the window does not need are dropped for it.
        """
        if not self.length:
            self._sinks = list(chain[:NUM_SINKS])
        if self.window is not None and self._text.cache.length + len(chain) > self._most:
            if len(chain) >= self.window:
                return None
            self._forget(len(chain))
        return self._text

    def joining(self, chain: Sequence[int]) -> SharedForward | None:
        """As `CachedDecoder.joining`."""
        whole = self.whole(chain)
        return None if whole is None else whole.joining(chain)

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """As `CachedDecoder.keep`."""
        self._text.keep(path, pending)
        if self._text.cache.length > self._most:
            self._forget(0)

    def truncate(self, length: int) -> None:
        """Drop the text from position `length` on. If too few entries are left, the text is read again."""
        cache = self._text.cache
        kept = length - cache.num_dropped
        if kept < len(self._sinks) + ((self.window or 0) // 2 if cache.num_dropped else 0):
            self._restart(0)
        else:
            self._text.truncate(length)

    def _restart(self, num_dropped: int) -> None:
        """Drop all entries; the next one is at position `num_dropped`."""
        self._text.cache.truncate(0)
        self._text.cache.num_dropped = num_dropped

    def _forget(self, num_new: int) -> None:
        """Drop the oldest entries, so that with `num_new` more the window is full."""
        assert self.window is not None
        cache, num_sinks = self._text.cache, len(self._sinks)
        cache.drop(num_sinks, cache.length - num_sinks - (self.window - num_new))
        self._place_sinks()

    @torch.inference_mode()
    def _place_sinks(self) -> None:
        """Compute the first tokens' entries again, at the positions of their slots."""
        cache, decoder, number = self._text.cache, self.decoder, len(self._sinks)
        sink_cache = decoder.new_cache()
        positions = torch.arange(cache.num_dropped, cache.num_dropped + number, device=decoder.device)
        decoder.forward(torch.tensor(self._sinks), positions, sink_cache)
        for mine, others in zip(cache.stored(number), sink_cache.stored(number), strict=True):
            mine.copy_(others)
        cache.positions[:number] = positions
