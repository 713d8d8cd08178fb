"""KV entries in RAM, for a GPU whose memory is too small for those of all layers.

A streamed layer's entries are copied to the device beside its weights, the next layer's while one is in use. A pass
writes its new entries to the device, and from there to RAM. Attention, drafts and files see a `LayerCache` like any
other, with the same bits. On a CPU, both places are RAM; tests use it so.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from offspec.loaders.accelerators.accelerator import DeviceEvent
from offspec.loaders.streaming.link import CopyStream, PinnedTables

from .kv_cache import EntriesBySlot, KVLayout, MakeLayerCaches, MemoryLayout, PlainLayers
from .kv_formats import KVFormat, PackedLayers
from .sequence_cache import LayerLayout, SequenceCache, empty_memories

NUM_SLOTS = 2  # layers whose entries are on the device: one in use, and the next one


class LayersInRam(EntriesBySlot):
    """Layers of one layout with their entries in RAM, and slots on the device for NUM_SLOTS of them.

    Passes use the layers in their order. When a pass turns to a layer, the next one's entries follow into the other
    slot, behind all work that still reads it; after the last layer, the first one's for the next pass.
    """

    def __init__(
        self,
        num_layers: int,
        layout: KVLayout,
        kv: KVFormat,
        *,
        dtype: torch.dtype,
        device: torch.device,
        copies: CopyStream,
    ) -> None:
        self.num_layers = num_layers
        self._copies = copies
        self._new = partial(LayersInRam, num_layers, layout, kv, dtype=dtype, device=device, copies=copies)
        made = [kv.of_layout(1, layout, dtype, device, by_slot=True) for _ in range(min(NUM_SLOTS, num_layers))]
        self._slots = [LayerSlot(cache) for cache in made]  # the first one is in use
        self.format = made[0].format
        self.most_read = made[0].most_read
        self._kept = [PinnedTables(num_layers, rows[0], device) for rows in made[0].by_slot]
        # Copies may be under way, which read these tables and write to the slots.
        weakref.finalize(self, _free, copies, self._kept).atexit = False

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept) + sum(slot.cache.nbytes for slot in self._slots)

    def empty(self) -> LayersInRam:
        return self._new()

    def stored(self, layer: int, end: int, first: int = 0) -> list[Tensor]:
        # Somebody else reads or writes the layer's rows in RAM.
        self._copies.finish_writes()
        for slot in self._slots:
            if slot.layer == layer:
                slot.num_known = 0
        return [kept.tables[layer][first:end].movedim(0, -2) for kept in self._kept]

    def reserve(self, capacity: int, in_use: int) -> None:
        self._copies.finish()
        for kept in self._kept:
            kept.reserve(capacity, in_use)
        for slot in self._slots:
            slot.layer, slot.num_known, slot.arrival = None, 0, None
            slot.cache.reserve(capacity, 0)

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        slot, end = self._turn_to(layer, start), start + len(keys)
        slot.cache.write(0, keys, values, start)
        for kept, rows in zip(self._kept, slot.rows, strict=True):
            kept.tables[layer][start:end].copy_(rows[start:end], non_blocking=True)
        slot.num_known = max(slot.num_known, end)

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        raise NotImplementedError("rounds with static shapes need resident layers, whose entries are on the device")

    def read(self, layer: int, end: int, first: int = 0) -> tuple[Tensor, Tensor]:
        return self._turn_to(layer, end).cache.read(0, end, first)

    @torch.inference_mode()
    def move(self, start: int, slots: Tensor) -> None:
        self._copies.finish_writes()
        chosen = slots.cpu()
        for table in (table for kept in self._kept for table in kept.tables):
            table[start : start + len(chosen)] = table[chosen]
        for slot in self._slots:
            slot.num_known = min(slot.num_known, start)

    def _turn_to(self, layer: int, end: int) -> LayerSlot:
        """The slot with the first `end` entries of a layer, and maybe later ones."""
        if self._slots[0].layer != layer:
            self._slots.reverse()
            self._bring(self._slots[0], layer, end)
            self._bring(self._slots[-1], (layer + 1) % self.num_layers, end)
        elif self._slots[0].num_known < end:
            self._bring(self._slots[0], layer, end)
        slot = self._slots[0]
        if slot.arrival is not None:
            self._copies.wait(slot.arrival)
            slot.arrival = None
        return slot

    def _bring(self, slot: LayerSlot, layer: int, end: int) -> None:
        """Copy those of a layer's first `end` entries that the slot does not have."""
        if slot.layer != layer:
            slot.layer, slot.num_known = layer, 0
        if (begin := slot.num_known) >= end:
            return
        tables = zip(slot.rows, self._kept, strict=True)
        slot.arrival = self._copies.run([(rows[begin:end], kept.tables[layer][begin:end]) for rows, kept in tables])
        slot.num_known = end


class LayerSlot:
    """Entries of one layer on the device: the first `num_known` of layer `layer` are those in RAM.

    arrival: of the last copy, if nothing has waited for it yet.
    """

    def __init__(self, cache: PlainLayers | PackedLayers) -> None:
        self.cache = cache
        self.layer: int | None = None
        self.num_known = 0
        self.arrival: DeviceEvent | None = None

    @property
    def rows(self) -> list[Tensor]:
        """Everything stored, [capacity, ..., width]: contiguous."""
        return [rows[0] for rows in self.cache.by_slot]


def _free(copies: CopyStream, parts: Sequence[PinnedTables]) -> None:
    copies.finish()
    for kept in parts:
        kept.free()


def may_be_far(layout: MemoryLayout) -> TypeGuard[KVLayout]:
    """Whether what a layer keeps of a text may lie in RAM: KV entries whose number grows with the text."""
    return isinstance(layout, KVLayout) and layout.window is None


@dataclass(frozen=True)
class EntriesInRam:
    """The layers of a decoder whose KV entries lie in RAM, and their format."""

    layers: frozenset[int]
    kv: KVFormat
    copies: CopyStream

    def new_cache(self, layouts: Sequence[LayerLayout], make: MakeLayerCaches, dtype: torch.dtype) -> SequenceCache:
        """An empty cache for layers with these layouts.

        make: for KV entries on the device.
        """
        device = self.copies.device
        far = {n: layout for n, layout in layouts if n in self.layers and may_be_far(layout)}
        near = [(n, layout) for n, layout in layouts if n not in far or layout != far[n]]
        memories, numbers = empty_memories(near, make, dtype, device)
        for layout in dict.fromkeys(far.values()):
            numbers.append([number for number, other in far.items() if other == layout])
            count = len(numbers[-1])
            memories.append(LayersInRam(count, layout, self.kv, dtype=dtype, device=device, copies=self.copies))
        return SequenceCache(memories, device, numbers)
