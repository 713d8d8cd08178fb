"""Keys and values of one text: a committed prefix, then a pending region where a tree's nodes wait for the verdict.

Slot i of the committed prefix holds the token at position i. Pending entries follow in the order they were computed.
`KVCache` counts a text's entries; the entries themselves lie in `LayerCache`s, each of one layer or of several layers
that share memory. Another format of entries, or another place for them, is another `LayerCache`; a `Decoder` is given
the function that makes them (`MakeLayerCaches`). Knows nothing of models, trees' shapes or masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import Tensor

from offspec.loaders.small_transfers import to_device


@dataclass(frozen=True)
class KVLayout:
    """What one layer puts in a cache for a token: a key and a value [num_heads, head_dim] each."""

    num_heads: int
    head_dim: int

    def nbytes(self, num_entries: int, itemsize: int) -> int:
        """Of a layer's `num_entries` entries whose numbers take `itemsize` bytes each."""
        return 2 * self.num_heads * self.head_dim * num_entries * itemsize


class LayerCache(Protocol):
    """The entries of `num_layers` layers that lie together; `layer` counts from the first of them.

    It knows slots, not what is committed or pending.
    Keys and values come and go in the dtype and on the device that attention computes with, whatever they lie in.
    `write` and `read` are called for one layer after the other, `reserve`, `keep` and `wipe` once for all of them.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """All memory that was allocated, on whatever device."""

    def reserve(self, capacity: int, in_use: int) -> None:
        """Make room for `capacity` entries, more than there are; the first `in_use` stay."""

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Put keys and values [T, kv_heads, head_dim] into slots start .. start + T."""

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """As `write`, into slots [T] that only the device knows; nothing may wait for it (CUDA graphs)."""

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, end, head_dim] of the first `end` slots."""

    def keep(self, start: int, slots: Tensor) -> None:
        """Move the entries in slots [K] (ascending, on the compute device) to start .. start + K."""

    def wipe(self, start: int) -> None:
        """Make whatever lies from slot `start` on read as zeros."""


class PlainLayers:
    """Layers of one layout as one tensor [layers, 2, kv_heads, capacity, head_dim] in the dtype of the arithmetic."""

    def __init__(self, num_layers: int, layout: KVLayout, *, dtype: torch.dtype, device: torch.device) -> None:
        self.num_layers = num_layers
        self._data = torch.empty(num_layers, 2, layout.num_heads, 0, layout.head_dim, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def reserve(self, capacity: int, in_use: int) -> None:
        shape = list(self._data.shape)
        shape[3] = capacity
        grown = self._data.new_empty(shape)
        grown[:, :, :, :in_use] = self._data[:, :, :, :in_use]
        self._data = grown

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        slots = slice(start, start + keys.shape[0])
        self._data[layer, 0, :, slots] = keys.transpose(0, 1)
        self._data[layer, 1, :, slots] = values.transpose(0, 1)

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self._data[layer, 0].index_copy_(1, slots, keys.transpose(0, 1))
        self._data[layer, 1].index_copy_(1, slots, values.transpose(0, 1))

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """As views."""
        return self._data[layer, 0, :, :end], self._data[layer, 1, :, :end]

    def keep(self, start: int, slots: Tensor) -> None:
        self._data[:, :, :, start : start + len(slots)] = self._data[:, :, :, slots]

    def wipe(self, start: int) -> None:
        self._data[:, :, :, start:] = 0


MakeLayerCaches = Callable[[Sequence[KVLayout], torch.dtype, torch.device], Sequence[LayerCache]]


def plain_layers(layouts: Sequence[KVLayout], dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    """A `MakeLayerCaches`: empty caches for these layers; neighbours of one layout lie together."""
    groups = [(layout, len(list(layers))) for layout, layers in groupby(layouts)]
    return [PlainLayers(count, layout, dtype=dtype, device=device) for layout, count in groups]


class KVCache:
    """The KV entries of one text in all layers; grows as needed.

    `length` tokens are committed, `pending` entries wait behind them; `positions` [capacity] says where each stands in
    its text (nodes of equal depth share a position).
    """

    def __init__(self, parts: Sequence[LayerCache], device: torch.device) -> None:
        """parts: the layers' caches, empty, in the layers' order. device: where attention computes."""
        self.length = 0
        self.pending = 0
        self.positions = torch.empty(0, dtype=torch.long, device=device)
        self._parts = list(parts)
        self._layers = [(part, layer) for part in parts for layer in range(part.num_layers)]

    @property
    def size(self) -> int:
        """Entries in use: committed and pending."""
        return self.length + self.pending

    @property
    def capacity(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return sum(part.nbytes for part in self._parts)

    @torch.inference_mode(False)  # in inference mode this would make tensors that `keep` may not write to outside it
    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` entries, no more; what is there stays."""
        if capacity <= self.capacity:
            return
        for part in self._parts:
            part.reserve(capacity, self.size)
        self.positions = torch.cat((self.positions, self.positions.new_empty(capacity - self.capacity)))

    def extend(self, count: int) -> None:
        """Make room for `count` entries more.

        Where nobody reserved it, for half as many again, so that appending is linear.
        """
        if self.size + count > self.capacity:
            self.reserve(max(self.size + count, self.capacity * 3 // 2))

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Put keys and values [T, kv_heads, head_dim] of one layer into slots start .. start + T."""
        part, layer = self._layers[layer]
        part.write(layer, keys, values, start)

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """As `write`, into slots [T] that only the device knows."""
        part, layer = self._layers[layer]
        part.scatter(layer, keys, values, slots)

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, end, head_dim] of one layer; valid until this layer is written to."""
        part, layer = self._layers[layer]
        return part.read(layer, end)

    def copy(self, other: KVCache, layers: Sequence[int], start: int, stop: int) -> None:
        """Overwrite the entries in slots start .. stop by those of `other`. layers: those of `other`, one for each."""
        for layer, theirs in enumerate(layers):
            keys, values = (entries[:, start:].transpose(0, 1) for entries in other.read(theirs, stop))
            self.write(layer, keys, values, start)
        self.positions[start:stop] = other.positions[start:stop]

    def append(self, num_committed: int, num_pending: int) -> None:
        """Count entries that every layer has now written: committed ones (nothing may be pending), then pending."""
        assert num_committed == 0 or self.pending == 0, "the committed prefix cannot grow behind pending entries"
        self.length += num_committed
        self.pending += num_pending
        assert self.size <= self.capacity

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """Commit the pending entries `path`, leave the entries `pending` behind them pending; forget the other ones.

        Indices into the pending region, ascending, those of `pending` above those of `path`.
        """
        stay = [*path, *pending]
        assert all(a < b for a, b in pairwise((-1, *stay, self.pending))), "what stays is not ascending pending entries"
        if stay != list(range(len(stay))):
            slots = to_device(torch.tensor(stay), self.positions.device) + self.length
            for part in self._parts:
                part.keep(self.length, slots)
            self.positions[self.length : self.length + len(stay)] = self.positions[slots]
        self.length += len(path)
        self.pending = len(pending)

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on, and whatever is pending."""
        assert 0 <= length <= self.length
        self.length, self.pending = length, 0

    def wipe(self) -> None:
        """Zeros wherever nothing is in use.

        Attention over all of the capacity weighs it with 0, and 0 times NaN is NaN.
        """
        for part in self._parts:
            part.wipe(self.size)
