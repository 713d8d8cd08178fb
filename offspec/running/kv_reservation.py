"""How many KV entries a text needs for its next passes, and their memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from offspec.backends.device_kinds import kind_of
from offspec.scheduler.params import DRAFT_ROWS, MAX_ROWS, SpeculationParams, tree_room

from ..model.memory.request_caches import RequestCaches
from ..model.memory.sequence_cache import SequenceCache, total_entries
from ..planning.plan import Plan
from .models import Models

GRANT = 256  # new tokens for which a request that shares passes reserves KV entries at a time


@dataclass(frozen=True)
class PlannedEntries:
    """KV entries that a plan has for all texts.

    of_windows: of each layer that drops those outside of its window, and keeps `most_of_window` of a text.
    """

    entries: int
    of_windows: int
    most_of_window: int

    @classmethod
    def by(cls, plan: Plan) -> PlannedEntries:
        return cls(plan.kv_entries, plan.reservation.texts * plan.window_rows, plan.window_rows)

    def holds(self, texts: Collection[SequenceCache], wanted: int, *, now: int = 0, num_shared: int = 0) -> bool:
        """Whether a text may have `wanted` entries beside those of `texts`, which are its present `now` ones, too.

        num_shared: of its entries, those of a beginning that others have.
        """
        in_windows = sum(map(self._in_window, [text.capacity for text in texts])) - self._in_window(now)
        return (
            total_entries(texts) - now + wanted - num_shared <= self.entries
            and in_windows + self._in_window(wanted) <= self.of_windows
        )

    def _in_window(self, num_entries: int) -> int:
        return min(num_entries, self.most_of_window)


class KVReservation:
    """The KV entries of one text, in the target's cache and in the draft's."""

    def __init__(
        self, models: Models, caches: RequestCaches, speculation: SpeculationParams, longest: int, *, is_alone: bool
    ) -> None:
        """longest: tokens of prompt and answer. is_alone: no other text has entries; it reserves all at once."""
        self._models, self._caches, self._longest, self._is_alone = models, caches, longest, is_alone
        self._tree_room = tree_room(speculation, kind_of(models.device).useful_rows)
        self._num_draft_tokens = 0  # tokens for which the draft's cache has room
        self.draft_rows = MAX_ROWS if is_alone else DRAFT_ROWS  # pending nodes of the draft

    @property
    def num_entries(self) -> int:
        """KV entries that the target's cache has room for."""
        return self._caches.target.cache.capacity

    @property
    def granted(self) -> int:
        """Tokens of the text, now and in a while, that need KV entries."""
        return self._longest if self._is_alone else min(self._longest, len(self._caches.text) + GRANT)

    def needed(self, num_tokens: int, num_nodes: int) -> int:
        """KV entries that a text of `num_tokens` and a tree of `num_nodes` need, with those of a draft among them."""
        num_shared = self._caches.num_shared
        num_nodes = self._tree_room if num_shared else min(num_nodes, self._tree_room)
        return num_tokens + num_nodes + num_shared

    def begin(self) -> None:
        """Reserve what a text that has just begun, or begun again, needs at once."""
        self._num_draft_tokens = num_entries = 0
        if self._is_alone:
            longest, most = (self.needed(n, self._tree_room) for n in (self._longest, self._models.loaded.max_context))
            num_entries = longest
            if longest > self.num_entries:  # caches that a conversation has outgrown grow by half, so as to grow seldom
                num_entries = max(longest, min(self.num_entries * 3 // 2, most))
        self.reserve(num_entries)

    def reserve(self, num_entries: int) -> None:
        """Make room for `num_entries` in the target's KV cache, and in the draft's for the granted text and all rounds.

        On a GPU the draft's must not grow during the target's pass.
        """
        caches = self._caches
        if num_entries > self.num_entries:
            self._models.loaded.make_kv_room(caches.target.cache, num_entries)
            caches.target.cache.reserve(num_entries)
        if caches.draft is not None and len(caches.text) > self._num_draft_tokens:
            self._num_draft_tokens = self.granted
            caches.draft.reserve(self.granted + self.draft_rows)
