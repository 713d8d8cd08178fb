"""The memory of one text: a committed prefix, then a pending region with the nodes that wait for the verdict.

Slot i of the committed prefix holds the token at position i. Pending entries follow in the order of their computation.
`TextMemory` counts a text's entries; `LayerMemory`s store them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import cast

import torch
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device

from .kv_cache import KVLayout, LayerCache, MakeLayerCaches, MemoryLayout
from .layer_memory import Kept, LayerMemory


def split(numbers: Sequence[int], memories: Sequence[LayerMemory]) -> list[Sequence[int]]:
    """`numbers` of layers in consecutive groups, one for each of these memories."""
    ends = list(accumulate((memory.num_layers for memory in memories), initial=0))
    return [numbers[begin:end] for begin, end in pairwise(ends)]


def empty_memories(
    layouts: Mapping[int, MemoryLayout], make: MakeLayerCaches, dtype: torch.dtype, device: torch.device
) -> tuple[list[LayerMemory], list[Sequence[int]]]:
    """Empty memories for layers with these layouts, by number, and the numbers of each one's layers.

    make: for KV entries, in some format and place.
    """
    kv = {number: layout for number, layout in layouts.items() if isinstance(layout, KVLayout)}
    memories: list[LayerMemory] = list(make(list(kv.values()), dtype, device))
    numbers = split(list(kv), memories)
    states = {number: layout for number, layout in layouts.items() if not isinstance(layout, KVLayout)}
    for layout in dict.fromkeys(states.values()):
        numbers.append([number for number, other in states.items() if other == layout])
        memories.append(layout.new(len(numbers[-1]), dtype, device))
    return memories, numbers


class TextMemory:
    """What the layers keep of one text; grows as needed.

    `length` tokens are committed, followed by `pending` entries; `positions` [capacity] has each entry's position in
    the text (nodes of equal depth share a position). A draft may have entries in later slots, below `shared_end`. A
    text with a window has dropped `num_dropped` entries, so its slots are so many less than their positions
    (`model.memory.draft_window`).
    """

    def __init__(
        self, memories: Sequence[LayerMemory], device: torch.device, numbers: Sequence[Sequence[int]] | None = None
    ) -> None:
        """memories: of the layers, empty. device: the arithmetic's.

        numbers: of the layers of each memory; without it, they are in the layers' order, from 0. A layer that keeps
        nothing is in none of them.
        """
        self.length = 0
        self.pending = 0
        self.shared_end = 0  # `shared_cache.SharedCache` sets it
        self.num_dropped = 0
        self.positions = torch.empty(0, dtype=torch.long, device=device)
        self._memories = list(memories)
        if numbers is None:
            numbers = split(range(sum(memory.num_layers for memory in memories)), memories)
        pairs = zip(memories, numbers, strict=True)
        places = {number: (memory, place) for memory, group in pairs for place, number in enumerate(group)}
        self._places = dict(sorted(places.items()))  # by a layer's number: its memory, and its place there
        self._kv = cast(dict[int, tuple[LayerCache, int]], self._places)  # the same, for layers that attend

    @property
    def size(self) -> int:
        """Entries in use: committed and pending."""
        return self.length + self.pending

    @property
    def gap(self) -> slice:
        """Slots that no row attends to, behind those that all rows attend to. Here there are none."""
        return slice(self.length, self.length)

    @property
    def next_position(self) -> int:
        """The position of the next token, which is the number of the text's committed tokens."""
        return self.length + self.num_dropped

    @property
    def capacity(self) -> int:
        return len(self.positions)

    @property
    def layers(self) -> Collection[int]:
        """Numbers of the layers that keep something."""
        return self._places.keys()

    @property
    def num_layers(self) -> int:
        """Layers that keep something."""
        return len(self._places)

    @property
    def last_slot(self) -> int:
        """The slot of the last committed entry, -1 if there is none."""
        return self.length - 1

    @property
    def can_be_cut(self) -> bool:
        """`LayerMemory.can_be_cut` of all layers."""
        return all(memory.can_be_cut for memory in self._memories)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' memories."""
        return sum(memory.nbytes for memory in self._memories)

    @property
    def format(self) -> str:
        """How entries are stored, by groups of layers; texts of equal formats can copy each other's `stored`."""
        groups = groupby(memory.format for memory, _ in self._places.values())
        return ", ".join(f"{len(list(layers))} {form}" for form, layers in groups)

    def stored(self, end: int) -> list[Tensor]:
        """`LayerMemory.stored` of all layers, in their order."""
        return [view for memory, place in self._places.values() for view in memory.stored(place, end)]

    def memory_of(self, layer: int) -> tuple[LayerMemory, int]:
        """What a layer keeps, and its place there. A part knows the kind of its memory, and its functions."""
        return self._places[layer]

    def kv_of(self, layer: int) -> tuple[LayerCache, int]:
        """`memory_of` a layer that attends."""
        return self._kv[layer]

    def begin(self, length: int) -> None:
        """Commit the first `length` slots of an empty cache, which were written through `stored`."""
        assert not self.size, "the cache has entries"
        self.positions[:length] = torch.arange(length, device=self.positions.device)
        self.append(length, 0)

    @torch.inference_mode(False)  # outside inference mode, `keep` may not write to inference tensors
    def reserve(self, capacity: int) -> None:
        """Grow to at least `capacity` entries; keep the existing ones, also those of a draft."""
        if capacity <= self.capacity:
            return
        for memory in self._memories:
            memory.reserve(capacity, max(self.size, self.shared_end))
        self.positions = torch.cat((self.positions, self.positions.new_empty(capacity - self.capacity)))

    def extend(self, count: int) -> None:
        """Make room for `count` more entries.

        It grows by at least half, so that appending takes linear time.
        """
        if self.size + count > self.capacity:
            self.reserve(max(self.size + count, self.capacity * 3 // 2))

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Put keys and values [T, kv_heads, head_dim] of one layer into slots start .. start + T."""
        cache, place = self.kv_of(layer)
        cache.write(place, keys, values, start)

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """`write` into slots [T] on the device, without synchronising."""
        cache, place = self.kv_of(layer)
        cache.scatter(place, keys, values, slots)

    def read(self, layer: int, end: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, end - first, head_dim] of one layer; valid until this layer is written to."""
        cache, place = self.kv_of(layer)
        return cache.read(place, end, first)

    def most_read(self, layer: int) -> int | None:
        """The number of entries to read at once, see `LayerCache`."""
        return self.kv_of(layer)[0].most_read

    def append(self, num_committed: int, num_pending: int) -> None:
        """Count the entries that all layers have written: committed ones (if nothing is pending), then pending ones."""
        assert num_committed == 0 or self.pending == 0, "the committed prefix cannot grow behind pending entries"
        for memory in self._memories:
            memory.append(num_committed, num_pending)
        self.length += num_committed
        self.pending += num_pending
        assert self.size <= self.capacity

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """Commit the pending entries `path`, keep the entries `pending`, and drop the others.

        Both are ascending indices into the pending region; those of `pending` are above those of `path`.
        """
        kept = [*path, *pending]
        assert all(a < b for a, b in pairwise((-1, *kept, self.pending))), "kept entries must be pending and ascending"
        slots = None
        if kept != list(range(len(kept))):
            slots = to_device(torch.tensor(kept), self.positions.device) + self.length
            self.positions[self.length : self.length + len(kept)] = self.positions[slots]
        for memory in self._memories:
            memory.keep(Kept(self.length, path, pending, slots))
        self.length += len(path)
        self.pending = len(pending)

    def move(self, start: int, slots: Tensor) -> None:
        """Move the KV entries in slots [K] (ascending) to start .. start + K, in use or not."""
        for memory in self._memories:
            if memory.can_be_cut:
                cast(LayerCache, memory).move(start, slots)
        self.positions[start : start + len(slots)] = self.positions[slots]

    def drop(self, start: int, count: int) -> None:
        """Drop `count` committed entries from slot `start` on. Later ones move down and keep their positions."""
        assert start + count <= self.length
        self.move(start, torch.arange(start + count, self.size, device=self.positions.device))
        self.length -= count
        self.num_dropped += count

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed entries alone; fewer, if a layer can go back to fewer tokens only."""
        assert 0 <= length <= self.length
        length = self.restorable(length)
        for memory in self._memories:
            memory.rewind(length)
        self.length, self.pending = length, 0

    def restorable(self, length: int) -> int:
        """The largest number of first tokens, at most `length`, that all layers can go back to."""
        while (fewer := min((memory.restorable(length) for memory in self._memories), default=length)) < length:
            length = fewer
        return length

    def wipe(self) -> None:
        """Zero all unused slots. A text that ran into NaN left some there, and attention multiplies them by 0."""
        for rows in self.stored(self.capacity):
            rows[..., self.size :, :] = 0
