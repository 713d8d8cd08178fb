"""The memory of one text: a committed prefix, then a pending region with the nodes that wait for the verdict.

Slot i of the committed prefix holds the token at position i. Pending entries follow in the order of their computation.
`SequenceCache` counts a text's entries; `LayerMemory`s store them. Texts that begin alike may share KV entries
(`kv_beginning`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import TypeAlias, cast

import torch
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device

from .kv_beginning import FEWEST_SHARED, ContinuedLayers, SharedBeginning, continued, most_shared, split_off
from .kv_cache import EntriesBySlot, KVLayout, LayerCache, MakeLayerCaches, MemoryLayout
from .layer_memory import Kept, LayerMemory
from .window_layers import WindowLayers

LayerLayout: TypeAlias = tuple[int, MemoryLayout]  # a layer's number, and the shape of something that it keeps


def split(numbers: Sequence[int], memories: Sequence[LayerMemory]) -> list[Sequence[int]]:
    """`numbers` of layers in consecutive groups, one for each of these memories."""
    ends = list(accumulate((memory.num_layers for memory in memories), initial=0))
    return [numbers[begin:end] for begin, end in pairwise(ends)]


def empty_memories(
    layouts: Iterable[LayerLayout], make: MakeLayerCaches, dtype: torch.dtype, device: torch.device
) -> tuple[list[LayerMemory], list[Sequence[int]]]:
    """Empty memories for layers with these layouts, and the numbers of each one's layers.

    make: for KV entries, in some format and place. Those of a layout with a window are dropped outside of it.
    """
    layouts = list(layouts)
    entries = {number: layout for number, layout in layouts if isinstance(layout, KVLayout)}
    whole = {number: layout for number, layout in entries.items() if layout.window is None}
    memories: list[LayerMemory] = list(make(list(whole.values()), dtype, device))
    numbers = split(list(whole), memories)
    for windowed in dict.fromkeys(layout for layout in entries.values() if layout.window is not None):
        assert windowed.window is not None
        group = [number for number, layout in entries.items() if layout == windowed]
        caches = make([windowed.without_window] * len(group), dtype, device)
        numbers += split(group, caches)
        memories += [WindowLayers(cache, windowed.window) for cache in caches]
    states = {number: layout for number, layout in layouts if not isinstance(layout, KVLayout)}
    for layout in dict.fromkeys(states.values()):
        numbers.append([number for number, other in states.items() if other == layout])
        memories.append(layout.new(len(numbers[-1]), dtype, device))
    return memories, numbers


def is_kv(memory: LayerMemory) -> bool:
    """Whether a memory has KV entries."""
    return isinstance(memory, (EntriesBySlot, WindowLayers))


def is_shareable(memory: LayerMemory) -> bool:
    """Whether texts that begin alike can share what a memory has of their beginning."""
    return isinstance(memory, EntriesBySlot)


class SequenceCache:
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
        nothing is in none of them; one that keeps KV entries and a state is in two.
        """
        self.length = 0
        self.pending = 0
        self.shared_end = 0  # `shared_cache.SharedCache` sets it
        self.num_dropped = 0
        self.positions = torch.empty(0, dtype=torch.long, device=device)
        if numbers is None:
            numbers = split(range(sum(memory.num_layers for memory in memories)), memories)
        self._groups = [tuple(group) for group in numbers]  # the layers of each memory
        self._beginning: SharedBeginning | None = None
        self._store_in(memories)

    def _store_in(self, memories: Sequence[LayerMemory], beginning: SharedBeginning | None = None) -> None:
        """Replace the layers' memories. beginning: what they share with other texts."""
        self._memories = list(memories)
        self._beginning = beginning
        pairs = zip(memories, self._groups, strict=True)
        places = [(number, memory, place) for memory, group in pairs for place, number in enumerate(group)]
        self._places = sorted(places, key=lambda each: each[0])  # a layer's number, its memory, and its place there
        self._kv = {
            number: (cast(LayerCache, memory), place) for number, memory, place in self._places if is_kv(memory)
        }
        self._kept_states = {number: (memory, place) for number, memory, place in self._places if not is_kv(memory)}

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
    def layers_with_states(self) -> Collection[int]:
        """Numbers of the layers for which there is a `state_of`."""
        return self._kept_states.keys()

    @property
    def num_layers(self) -> int:
        """Layers that keep something."""
        return len({number for number, _, _ in self._places})

    @property
    def last_slot(self) -> int:
        """The slot of the last committed entry, -1 if there is none."""
        return self.length - 1

    def least_cut(self, length: int) -> int:
        """`LayerMemory.least_cut` of all layers."""
        return max((memory.least_cut(length) for memory in self._memories), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' memories, with those of the beginning that the text shares."""
        return total_bytes([self])

    @property
    def own_bytes(self) -> int:
        """Bytes of all layers' memories, without the beginning that the text shares."""
        return sum(memory.nbytes for memory in self._memories)

    @property
    def beginning(self) -> SharedBeginning | None:
        """The first entries, if the text shares them."""
        return self._beginning

    @property
    def num_in_beginning(self) -> int:
        """How many entries the text shares: the first ones of `beginning`."""
        shared = (memory.num_shared for memory in self._memories if isinstance(memory, ContinuedLayers))
        return next(shared, 0)

    @property
    def format(self) -> str:
        """How entries are stored, by groups of layers; texts of equal formats can copy each other's `stored`."""
        groups = groupby(memory.format for _, memory, _ in self._places)
        return ", ".join(f"{len(list(layers))} {form}" for form, layers in groups)

    def stored(self, end: int) -> list[Tensor]:
        """`LayerMemory.stored` of all layers, in their order."""
        return [view for _, memory, place in self._places for view in memory.stored(place, end)]

    def state_of(self, layer: int) -> tuple[LayerMemory, int]:
        """A layer's memory that is not of KV entries, and its place there. A part knows the memory's functions."""
        return self._kept_states[layer]

    def kv_of(self, layer: int) -> tuple[LayerCache, int]:
        """The KV entries of a layer, and its place there."""
        return self._kv[layer]

    def begin(self, length: int) -> None:
        """Commit the first `length` slots of an empty cache, which were written through `stored`."""
        assert not self.size, "the cache has entries"
        self.positions[:length] = torch.arange(length, device=self.positions.device)
        self.append(length, 0)

    @torch.inference_mode(False)
    def begin_like(self, other: SequenceCache, length: int, *, shares: bool) -> None:
        """Make the first `length` tokens of `other`, a result of its `copyable`, those of this empty memory.

        shares: share as many KV entries as possible, and copy the rest. The other text is between two passes.
        """
        assert not self.size, "the cache has entries"
        num_shared = other._lend(length) if shares and self._groups == other._groups else 0
        if not num_shared:
            self.reserve(length)
            for mine, others in zip(self.stored(length), other.stored(length), strict=True):
                mine.copy_(others)
        else:
            self._continue(other, num_shared, length)
        self.begin(length)

    def num_lendable(self, length: int) -> int:
        """How many entries a text shares with this one that begins with its first `length` tokens."""
        if not any(map(is_shareable, self._memories)):
            return 0
        wanted = most_shared(length)
        return wanted if wanted >= self.num_in_beginning + FEWEST_SHARED else min(wanted, self.num_in_beginning)

    def _lend(self, length: int) -> int:
        """Let others share the first `length` entries; returns how many they share."""
        wanted = self.num_lendable(length)
        if wanted > self.num_in_beginning:
            in_use = max(self.size, self.shared_end)
            memories = [
                split_off(cast(LayerCache, memory), wanted, in_use, self.capacity) if is_shareable(memory) else memory
                for memory in self._memories
            ]
            layers = tuple(memory.beginning for memory in memories if isinstance(memory, ContinuedLayers))
            self._store_in(memories, SharedBeginning(layers, wanted))
            self.positions = self.positions.clone()  # other memory has other positions, see `cuda_graphs.StaticRounds`
        return wanted

    def _continue(self, other: SequenceCache, num_shared: int, length: int) -> None:
        """Take `length` entries of `other`, `num_shared` of its beginning among them, and room for no more."""
        memories = list[LayerMemory]()
        for mine, others in zip(self._memories, other._memories, strict=True):
            if is_shareable(others):
                memories.append(continued(cast(LayerCache, others), num_shared, length))
                continue
            memories.append(mine)
            mine.reserve(length, 0)
            for layer in range(mine.num_layers):
                for state, copied in zip(mine.stored(layer, length), others.stored(layer, length), strict=True):
                    state.copy_(copied)
        self._store_in(memories, other.beginning)
        self.positions, self.shared_end = other.positions[:length].clone(), 0

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

    def cuts(self, layer: int, first: int, end: int) -> list[int]:
        """The slots between first and end at which `read` of one layer copies entries that do not lie side by side."""
        cache, _ = self.kv_of(layer)
        inside = [self.num_in_beginning] if first < self.num_in_beginning < end else []
        return sorted({*inside, *(cache.cuts(first, end) if isinstance(cache, WindowLayers) else ())})

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
        if start < self.num_in_beginning:
            self._own_all()
        for memory in self._memories:
            if is_kv(memory):
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
        if length < self.num_in_beginning:
            self._go_back(length)
        for memory in self._memories:
            memory.rewind(length)
        self.length, self.pending = length, 0

    def restorable(self, length: int) -> int:
        """The largest number of first tokens, at most `length`, that all layers can go back to."""
        return self._common(length, [memory.restorable for memory in self._memories])

    def copyable(self, length: int) -> int:
        """The largest number of first tokens, at most `length`, that another memory can copy."""
        return self._common(length, [memory.copyable for memory in self._memories])

    @staticmethod
    def _common(length: int, of_layers: Sequence[Callable[[int], int]]) -> int:
        """The largest number, at most `length`, that all layers allow."""
        while (fewer := min((allowed(length) for allowed in of_layers), default=length)) < length:
            length = fewer
        return length

    @torch.inference_mode(False)
    def shrink(self) -> None:
        """Give up all room but that of the committed entries."""
        for memory in self._memories:
            memory.reserve(self.length, self.length)
        self.positions, self.pending, self.shared_end = self.positions[: self.length].clone(), 0, 0

    @torch.inference_mode(False)
    def _go_back(self, length: int) -> None:
        """Share fewer entries: those of the first `length`. There is room for no more, as other texts may need it."""
        num_shared = most_shared(length)
        memories = [
            continued(memory, num_shared, length) if isinstance(memory, ContinuedLayers) else memory
            for memory in self._memories
        ]
        self._store_in(memories, self._beginning if num_shared else None)
        self.positions, self.shared_end = self.positions[:length].clone(), 0

    @torch.inference_mode(False)
    def _own_all(self) -> None:
        """Copy what the text shares."""
        in_use, capacity = max(self.size, self.shared_end), self.capacity
        self._store_in(
            [
                continued(memory, 0, in_use) if isinstance(memory, ContinuedLayers) else memory
                for memory in self._memories
            ]
        )
        for memory in self._memories:
            memory.reserve(capacity, in_use)
        self.positions = self.positions.clone()

    def wipe(self) -> None:
        """Zero all unused slots. A text that ran into NaN left some there, and attention multiplies them by 0."""
        assert self._beginning is None, "what other texts have is not overwritten"
        for rows in self.stored(self.capacity):
            rows[..., self.size :, :] = 0


def total_bytes(texts: Iterable[SequenceCache]) -> int:
    """Bytes of these texts' memories; a beginning that several share counts once."""
    texts = list(texts)
    return sum(text.own_bytes for text in texts) + sum(beginning.nbytes for beginning in _beginnings(texts))


def total_entries(texts: Iterable[SequenceCache]) -> int:
    """Entries that these texts have room for; a beginning that several share counts once."""
    texts = list(texts)
    num_own = sum(text.capacity - text.num_in_beginning for text in texts)
    return num_own + sum(beginning.length for beginning in _beginnings(texts))


def _beginnings(texts: Iterable[SequenceCache]) -> set[SharedBeginning]:
    return {text.beginning for text in texts if text.beginning is not None}
