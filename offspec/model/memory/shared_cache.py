"""`SharedCache`: a draft's entries inside its target's KV cache (SubSpec, 2509.18344).

Slots: the target's committed entries; a gap, where the target's next pass puts its rows; then the draft's own entries.
The draft does not attend to the gap, so both may write at the same time. After a verdict the target commits what it
accepted, and the gap and the draft's own entries move on behind it.

A recurrent layer of the draft has states of its own, which go on from the target's: states are never written to, so
both share them. This module knows nothing of layers' weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.params import MAX_NODES

from ..decoder import CachedDecoder
from ..parts.kv_attention import Visibility
from .kv_beginning import SharedBeginning
from .kv_cache import LayerCache
from .recurrent_states import RecurrentStates, State
from .sequence_cache import SequenceCache


class SharedCache(SequenceCache):
    """A text's entries as a draft sees them: `num_exact` of the target's, then its own, committed and pending.

    `length` and `pending` count as in any KV cache. `size` is the slot of the next entry, behind the gap. layers: the
    target's, one for each of the draft's. Only `begin` and rows of a chain may make the target's cache grow, which must
    not happen during a pass; so requests reserve the entries of a chain and of all nodes before.
    """

    def __init__(self, target: CachedDecoder, layers: Sequence[int]) -> None:
        self._target = target
        self._numbers = tuple(layers)
        # Memories of the recurrent layers, and the draft's layers in each of them.
        groups: dict[RecurrentStates, list[int]] = {}
        cache = self._target.cache
        for layer, number in enumerate(self._numbers):
            memory = cache.state_of(number)[0] if number in cache.layers_with_states else None
            if isinstance(memory, RecurrentStates):
                groups.setdefault(memory, []).append(layer)
        self._own_states = {memory.like(len(group)): group for memory, group in groups.items()}
        super().__init__(list(self._own_states), target.device, list(self._own_states.values()))
        self.num_exact = 0
        self._room = MAX_NODES
        self._start = 0  # the slot of the first own entry

    def _target_states(self, layers: Sequence[int]) -> list[State]:
        """The target's states in these layers of the draft."""
        states = list[State]()
        for layer in layers:
            memory, place = self._target.cache.state_of(self._numbers[layer])
            assert isinstance(memory, RecurrentStates)
            states.append(memory.state(place))
        return states

    @property
    def size(self) -> int:
        return self._start + self.length - self.num_exact + self.pending

    @property
    def gap(self) -> slice:
        """Slots that belong to the target's next pass, behind the target's entries."""
        return slice(self.num_exact, self._start)

    @property
    def last_slot(self) -> int:
        num_own = self.length - self.num_exact
        return self._start + num_own - 1 if num_own else self.num_exact - 1

    @property
    def nbytes(self) -> int:
        """Those of recurrent layers alone: the target's cache counts all entries."""
        return sum(memory.nbytes for memory in self._own_states)

    @property
    def beginning(self) -> SharedBeginning | None:
        return self._target.cache.beginning

    @property
    def num_in_beginning(self) -> int:
        return self._target.cache.num_in_beginning

    def begin(self, room: int) -> None:
        """Take the target's entries as they are, and drop all others. room: the nodes of the target's largest tree."""
        self._room = room
        self.truncate(self._target.length)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` slots."""
        self._target.cache.reserve(capacity)

    def extend(self, count: int) -> None:
        """Make room for `count` more entries. The first own entries are a chain, which the target will score too.

        It never writes to the gap: the target's pass may be doing so.
        """
        if self.length == self.num_exact and not self.pending:
            self._start = self.num_exact + count + self._room
        self.reserve(self.size + count)
        cache = self._target.cache
        self.positions, cache.shared_end = cache.positions, max(cache.shared_end, self.size + count)

    def kv_of(self, layer: int) -> tuple[LayerCache, int]:
        return self._target.cache.kv_of(self._numbers[layer])

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """As `SequenceCache.keep`, to be called after the target's. The target's entries replace those of `path`.

        The target has not scored the last token of a pass, which it chose itself. If `path` ends with this token, its
        entry stays the draft's, and the entries `pending` below it stay too.
        """
        new_length, length = self.length + len(path), self._target.length
        first = self.size - self.pending
        if new_length <= length:
            assert not pending, "nodes below a token that the draft has not scored"
            self.truncate(length)
            return
        assert new_length == length + 1, "the target scores all but the last token"
        for memory, layers in self._own_states.items():
            memory.follow_with_last(self._target_states(layers), path, pending)
        start = length + 1 + self._room
        slots = to_device(torch.tensor([path[-1], *pending]), self.positions.device) + first
        self._target.cache.move(start, slots)
        self.num_exact, self._start, self.length, self.pending = length, start, new_length, len(pending)

    def truncate(self, length: int) -> None:
        """Drop all own entries, and the target's from position `length` on."""
        self.length = self.num_exact = self._start = min(length, self._target.length)
        self.pending = 0
        for memory, layers in self._own_states.items():
            memory.follow(self._target_states(layers))


@dataclass(frozen=True)
class GapVisibility(Visibility):
    """The attention mask of a pass over a cache with a gap: slots that no row attends to."""

    gap: slice

    def num_certain(self, first: int) -> int:
        before_gap: int = self.gap.start
        return min(super().num_certain(first), before_gap)

    def mask(self, first: int, last: int, window: int | None, begin: int = 0, until: int | None = None) -> Tensor:
        mask = super().mask(first, last, window, begin, until)
        if mask is None:
            end = self.start + last if until is None else until
            mask = torch.ones(1, end - begin, dtype=torch.bool, device=self.positions.device)
        mask[:, max(0, self.gap.start - begin) : max(0, self.gap.stop - begin)] = False
        return mask
