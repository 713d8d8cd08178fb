"""KV entries of layers, by slots: `LayerCache`s store them, each for one layer or for several that share memory.

Another format or place of entries is another `LayerCache`; a `Decoder` gets the function that makes them
(`MakeLayerCaches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from .layer_memory import Kept, LayerMemory, StateLayout


@dataclass(frozen=True)
class KVLayout:
    """The shape of a token's KV entry in one layer: a key and a value, [num_heads, head_dim] each.

    has_values: False if the key is also the value, and is stored once (latent attention). window: how many positions
    back a row of a later token sees them, itself included; None: all.
    """

    num_heads: int
    head_dim: int
    has_values: bool = True
    window: int | None = None

    @property
    def without_window(self) -> KVLayout:
        """The layout of entries that are all kept."""
        return replace(self, window=None)

    @property
    def num_stored(self) -> int:
        """How many of key and value are stored."""
        return 2 if self.has_values else 1

    @property
    def numbers(self) -> int:
        """Numbers of an entry."""
        return self.num_stored * self.num_heads * self.head_dim


MemoryLayout: TypeAlias = KVLayout | StateLayout  # of what a layer keeps of a text


class LayerCache(LayerMemory, Protocol):
    """The KV entries of layers, each in a slot of its own.

    It manages slots, and does not know which of them are committed or pending. Arguments and results have attention's
    dtype and device, for any format and place of storage, except those of `stored`. `write` and `read` are called for
    each layer in the order of a pass; `reserve` and `move` are called once for all layers. An entry depends on what was
    written to its slot alone, so that a text does not depend on what shared its passes.

    A draft that shares the cache calls `write` and `read` while the target's pass does. They write to different slots.
    """

    @property
    def most_read(self) -> int | None:
        """The number of entries to read at once, if `read` makes them; None if it returns views of any number."""

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Put keys and values [T, kv_heads, head_dim] into slots start .. start + T."""

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """`write` into slots [T] on the device, without synchronising (CUDA graphs)."""

    def read(self, layer: int, end: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, end - first, head_dim] of the slots first .. end."""

    def move(self, start: int, slots: Tensor) -> None:
        """Move the entries in slots [K] (ascending, on the compute device) to start .. start + K, in use or not."""

    def empty(self) -> LayerCache:
        """A cache of the same kind, for the same layers, without slots."""

    def stored(self, layer: int, end: int, first: int = 0) -> list[Tensor]:
        """`LayerMemory.stored` of the slots first .. end: tensors [..., end - first, width]."""


class EntriesBySlot:
    """What all caches of entries by slots have in common, as kinds of `LayerMemory`."""

    def least_cut(self, length: int) -> int:
        return 0

    def copyable(self, length: int) -> int:
        return length

    def move(self, start: int, slots: Tensor) -> None:
        """`LayerCache.move`."""
        raise NotImplementedError

    def append(self, num_committed: int, num_pending: int) -> None:
        """Nothing: the entries are in their slots."""

    def keep(self, kept: Kept) -> None:
        if kept.slots is not None:
            self.move(kept.length, kept.slots)

    def restorable(self, length: int) -> int:
        return length

    def rewind(self, length: int) -> None:
        """Nothing: entries behind those that are counted are overwritten."""


Rows = TypeVar("Rows", bound="StoredRows")


class StoredRows(EntriesBySlot):
    """The memory of layers that are stored together: tensors [layers, ..., capacity, width] with a row for each slot.

    by_slot: everything of one slot lies side by side in a layer, so that a stretch of slots is one stretch of memory,
    for copies between RAM and a device. Otherwise a head's slots lie side by side, which attention reads faster.
    """

    def __init__(self, num_layers: int, empty: Sequence[Tensor], *, by_slot: bool = False) -> None:
        """empty: the tensors with a capacity of 0."""
        self.num_layers = num_layers
        self._by_slot = by_slot
        self._rows = list(empty)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows)

    def empty(self: Rows) -> Rows:
        other = copy(self)
        other._rows = [rows.new_empty(rows[..., :0, :].shape) for rows in self._rows]
        return other

    def stored(self, layer: int, end: int, first: int = 0) -> list[Tensor]:
        return [rows[layer, ..., first:end, :] for rows in self._rows]

    @property
    def by_slot(self) -> list[Tensor]:
        """Everything stored, [layers, capacity, ..., width]."""
        return [rows.movedim(-2, 1) for rows in self._rows]

    def reserve(self, capacity: int, in_use: int) -> None:
        for index, rows in enumerate(self._rows):
            first, *middle, _, width = rows.shape
            if self._by_slot:
                grown = rows.new_zeros(first, capacity, *middle, width).movedim(1, -2)
            else:
                grown = rows.new_zeros(first, *middle, capacity, width)
            grown[..., :in_use, :] = rows[..., :in_use, :]
            self._rows[index] = grown

    def move(self, start: int, slots: Tensor) -> None:
        for rows in self._rows:
            rows[..., start : start + len(slots), :] = rows[..., slots, :]


class PlainLayers(StoredRows):
    """Layers of one layout as one tensor [layers, 2, kv_heads, capacity, head_dim] in attention's dtype.

    It is [layers, 1, ...] if keys are also the values.
    """

    format, most_read = "plain", None

    def __init__(
        self, num_layers: int, layout: KVLayout, *, dtype: torch.dtype, device: torch.device, by_slot: bool = False
    ) -> None:
        shape = num_layers, layout.num_stored, layout.num_heads, 0, layout.head_dim
        super().__init__(num_layers, [torch.empty(shape, dtype=dtype, device=device)], by_slot=by_slot)

    @property
    def _data(self) -> Tensor:
        return self._rows[0]

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        if len(keys) == 1:  # with fewer views
            for stored, given in zip(self._data[layer], (keys, values), strict=False):
                stored[:, start] = given[0]
            return
        slots = slice(start, start + keys.shape[0])
        for stored, given in zip(self._data[layer], (keys, values), strict=False):
            stored[:, slots] = given.transpose(0, 1)

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for stored, given in zip(self._data[layer], (keys, values), strict=False):
            stored.index_copy_(1, slots, given.transpose(0, 1))

    def read(self, layer: int, end: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Views of the entries."""
        return self._data[layer, 0, :, first:end], self._data[layer, -1, :, first:end]


MakeLayerCaches = Callable[[Sequence[KVLayout], torch.dtype, torch.device], Sequence[LayerCache]]


def plain_layers(layouts: Sequence[KVLayout], dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    """A `MakeLayerCaches`: empty caches for these layers; neighbours with equal layouts share a tensor."""
    return [PlainLayers(count, layout, dtype=dtype, device=device) for layout, count in neighbours(layouts)]


def neighbours(layouts: Sequence[KVLayout]) -> list[tuple[KVLayout, int]]:
    """Layers in a row with equal layouts: the layout, and their number."""
    return [(layout, len(list(layers))) for layout, layers in groupby(layouts)]
