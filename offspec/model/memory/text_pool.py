"""KV caches of several conversations: those of running requests, and copies in RAM of texts that had to leave them.

A request begins with the longest beginning of its text that any of them has: its caches' own, a copy's, or that of a
request that is running. So a chat continues where it was, although other requests came between, and texts with a common
beginning score it once. Caches share its entries (`kv_beginning`), or have copies with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.backends.device_kinds import kind_of

from ..cuda_graphs import StaticText
from ..decoder import CachedDecoder
from .draft_window import WindowedText
from .request_caches import DraftText, RequestCaches
from .sequence_cache import SequenceCache, total_entries

WORTHWHILE = 32  # tokens; scoring fewer of them again is as fast as copying entries
Ids = NDArray[np.int64]


class Entries:
    """A copy in RAM of what a `SequenceCache` has of its committed tokens."""

    def __init__(self, cache: SequenceCache) -> None:
        self.length = cache.length
        self._least = cache.least_cut(cache.length)
        self._stored = [view.to("cpu", copy=True) for view in cache.stored(self.length)]

    def restorable(self, length: int) -> int:
        """The largest number of first tokens, at most `length`, with which a text can begin."""
        length = min(length, self.length)
        return length if length >= self._least else 0

    def begin(self, cache: SequenceCache, length: int) -> None:
        """Make the first `length` tokens, a result of `restorable`, those of an empty cache."""
        num_copied = self.length if self._least else length
        cache.reserve(num_copied)
        for mine, others in zip(cache.stored(num_copied), self._stored, strict=True):
            mine.copy_(others if self._least else others[..., :length, :])
        cache.begin(num_copied)
        cache.truncate(length)


@dataclass(frozen=True)
class ParkedText:
    """A text whose caches were given to another one. draft: None if the draft has to read the text again."""

    ids: Ids
    target: Entries
    draft: Entries | None
    nbytes: int


class TextPool:
    """The caches of running requests, and parked texts of at most `most_bytes`. Not thread-safe.

    A plan reserves KV entries for running requests only. So a text whose request is over stays in its caches until the
    next request begins. Then it is parked, unless it goes on. Parked texts leave in the order of their last use.
    """

    def __init__(self, new_caches: Callable[[], RequestCaches], most_bytes: int) -> None:
        """new_caches: makes empty caches."""
        self._new_caches = new_caches
        self._most_bytes = most_bytes
        self._free = list[RequestCaches]()  # least recently used first
        self._used = list[RequestCaches]()  # least recently used first
        self._parked: list[ParkedText] = []

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def parked_bytes(self) -> int:
        return sum(parked.nbytes for parked in self._parked)

    @property
    def num_used(self) -> int:
        """Caches that requests use."""
        return len(self._used)

    @property
    def num_entries(self) -> int:
        """KV entries of the target that the used caches have room for."""
        return total_entries(_target_caches(self._used))

    @property
    def can_copy(self) -> bool:
        """Whether a text can begin with entries of another one that is running."""
        return any(map(has_all_entries, self._used))

    @property
    def num_idle_entries(self) -> int:
        """KV entries of the target that no request uses."""
        return total_entries(self.targets) - self.num_entries

    @property
    def targets(self) -> list[SequenceCache]:
        """The target's caches of requests and of texts whose requests are over."""
        return _target_caches((*self._used, *self._free))

    def park_idle(self) -> None:
        """Free the caches that no request uses, because running requests need their room."""
        for caches in self._free:
            self._park(caches)
        self._free.clear()

    def borrow(self, text: Sequence[int]) -> RequestCaches:
        """Caches that no other request uses, with the longest known beginning of `text`."""
        wanted = np.asarray(text[:-1], dtype=np.int64)  # the last token is always scored
        if not self._free:
            self._free.append(self._new_caches())
        nearest = max(self._free, key=lambda caches: num_common(_ids(caches), wanted))
        num_own = num_common(_ids(nearest), wanted)
        source, num_tokens = self._longest(wanted)
        goes_on = num_own and max(_num_known(nearest), num_tokens) < num_own + WORTHWHILE
        caches = nearest if goes_on else self._free[0]
        for idle in self._free:
            if not (goes_on and idle is nearest):
                self._park(idle)
        num_kept = num_common(_ids(caches), wanted)
        if self._used and has_all_entries(caches):
            caches.target.truncate(num_kept)
            caches.target.cache.shrink()  # others than the last request share the plan's entries
        if source is not caches and num_tokens >= num_kept + WORTHWHILE:
            _fill(caches, source, wanted[:num_tokens])
        self._free.clear()
        self._used.append(caches)
        return caches

    def num_shareable(self, text: Ids) -> int:
        """How many of the text's first KV entries it would share with a request that is running."""
        source, num_tokens = self._longest_running(text)
        return 0 if source is None or not _shares_target(source) else source.target.cache.num_lendable(num_tokens)

    @torch.inference_mode()
    def refill(self, caches: RequestCaches) -> None:
        """Give used caches without entries of the target those of other requests that begin alike."""
        source, num_tokens = self._longest_running(np.asarray(caches.text[:-1], dtype=np.int64), but=caches)
        if source is not None and num_tokens >= WORTHWHILE and has_all_entries(caches):
            _copy(caches.target.cache, source.target.cache, num_tokens, shares=_shares_target(caches))

    def give_back(self, caches: RequestCaches) -> None:
        """The request is over; its text stays in the caches until another request begins."""
        self._used.remove(caches)
        self._free.append(caches)

    def _longest(self, wanted: Ids) -> tuple[ParkedText | RequestCaches | None, int]:
        """The text with the longest beginning of `wanted`, of those that can be copied, and its number of tokens."""
        longest: tuple[ParkedText | RequestCaches | None, int] = (None, 0)
        for index, parked in enumerate(self._parked):
            if (num_tokens := parked.target.restorable(num_common(parked.ids, wanted))) > longest[1]:
                longest, latest = (parked, num_tokens), index
        running = self._longest_running(wanted)
        if running[1] and running[1] >= longest[1]:  # its entries are shared, and a parked text's are copied
            longest = running
        for caches in filter(has_all_entries, self._free):
            if (num_tokens := _num_restorable(caches, wanted)) > longest[1]:
                longest = (caches, num_tokens)
        if isinstance(longest[0], ParkedText):
            self._parked.append(self._parked.pop(latest))
        return longest

    def _longest_running(self, wanted: Ids, but: RequestCaches | None = None) -> tuple[RequestCaches | None, int]:
        """`_longest` of the texts of other requests that are running."""
        others = (caches for caches in self._used if caches is not but and has_all_entries(caches))
        lengths = [(caches, _num_restorable(caches, wanted)) for caches in others]
        return max(lengths, key=lambda pair: pair[1], default=(None, 0))

    @torch.inference_mode()
    def _park(self, caches: RequestCaches) -> None:
        """Copy a text's entries to RAM, unless it is short, or too long, or a parked text begins with it."""
        ids = _ids(caches)
        held = [cache for cache in (caches.target.cache, own_cache(caches.draft)) if cache is not None]
        if len(ids) < WORTHWHILE or not has_all_entries(caches):
            return
        nbytes = sum(view.nbytes for cache in held for view in cache.stored(cache.length))
        if nbytes > self._most_bytes or any(cache.copyable(cache.length) < cache.length for cache in held):
            return
        if any(num_common(parked.ids, ids) == len(ids) for parked in self._parked):
            return
        self._parked = [parked for parked in self._parked if num_common(parked.ids, ids) < len(parked.ids)]
        while self.parked_bytes + nbytes > self._most_bytes:
            self._parked.pop(0)
        target, *draft = map(Entries, held)
        self._parked.append(ParkedText(ids, target, draft[0] if draft else None, nbytes))


def _ids(caches: RequestCaches) -> Ids:
    """The tokens of a text whose entries the target's cache has."""
    return np.asarray(caches.text[: _num_known(caches)], dtype=np.int64)


def _num_restorable(caches: RequestCaches, wanted: Ids) -> int:
    """How many first tokens of `wanted` can be copied from the target's cache."""
    return caches.target.cache.copyable(num_common(_ids(caches), wanted))


def _target_caches(texts: Iterable[RequestCaches]) -> list[SequenceCache]:
    return [caches.target.cache for caches in texts]


def _num_known(caches: RequestCaches) -> int:
    return min(caches.target.length, len(caches.text))  # an interrupted request may have more entries than tokens


def num_common(one: Ids, other: Ids) -> int:
    """The number of first tokens that two texts have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def has_all_entries(caches: RequestCaches) -> bool:
    """Whether one cache has the target's entries. An early exit shares those of the first layers with the target."""
    return type(caches.target) is CachedDecoder


def own_cache(draft: DraftText | None) -> SequenceCache | None:
    """The draft's cache, if its entries depend on nothing but the target's tokens, of which it has all."""
    return None if (text := _whole_text(draft)) is None else text.cache


def _whole_text(draft: DraftText | None) -> CachedDecoder | None:
    """The draft's text, if its entries depend on nothing but the target's tokens, of which it has all."""
    text: object = draft.without_window if isinstance(draft, WindowedText) else draft
    return text if isinstance(text, CachedDecoder) and type(text) in (CachedDecoder, StaticText) else None


@torch.inference_mode()
def _fill(caches: RequestCaches, source: ParkedText | RequestCaches | None, ids: Ids) -> None:
    """Make `ids` the caches' text, with the entries of `source`. A draft that `source` has none of is left empty."""
    assert source is not None
    caches.rewind(ids[:1].tolist())
    caches.text = ids.tolist()
    target = source.target if isinstance(source, ParkedText) else source.target.cache
    _copy(caches.target.cache, target, len(ids), shares=_shares_target(caches))
    draft = source.draft if isinstance(source, ParkedText) else own_cache(source.draft)
    if (cache := own_cache(caches.draft)) is not None and draft is not None:
        texts = (_whole_text(caches.draft), _whole_text(None if isinstance(source, ParkedText) else source.draft))
        shares = all(map(_shares, texts))
        length = min(len(ids), draft.length)
        length = draft.restorable(length) if isinstance(draft, Entries) else draft.copyable(length)
        _copy(cache, draft, length, shares=shares)


def _shares(text: CachedDecoder | None) -> bool:
    """Whether a text may share KV entries: its passes take keys in parts, and replay nothing recorded."""
    return type(text) is CachedDecoder and not text.decoder.config.has_whole_attention


def _shares_target(caches: RequestCaches) -> bool:
    """`_shares` of the target's text. A draft that reads its entries may have recorded rounds."""
    records = kind_of(caches.target.device).records
    return _shares(caches.target) and not (caches.num_shared and records)


def _copy(cache: SequenceCache, other: Entries | SequenceCache, length: int, *, shares: bool) -> None:
    """Make the first `length` entries of `other` those of an empty cache. shares: see `SequenceCache.begin_like`."""
    if isinstance(other, SequenceCache):
        cache.begin_like(other, length, shares=shares)
    else:
        other.begin(cache, length)
