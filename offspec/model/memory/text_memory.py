"""The memory of one text: a committed prefix, then a pending region with the nodes that wait for the verdict.

Slot i of the committed prefix holds the token at position i. Pending entries follow in the order of their computation.
`TextMemory` counts a text's entries; `LayerCache`s store them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device

from .kv_cache import LayerCache


class TextMemory:
    """The KV entries of one text in all layers; grows as needed.

    `length` tokens are committed, followed by `pending` entries; `positions` [capacity] has each entry's position in
    the text (nodes of equal depth share a position). A draft may have entries in later slots, below `shared_end`. A
    text with a window has dropped `num_dropped` entries, so its slots are so many less than their positions
    (`model.memory.draft_window`).
    """

    def __init__(
        self, parts: Sequence[LayerCache], device: torch.device, numbers: Sequence[Sequence[int]] | None = None
    ) -> None:
        """parts: the layers' caches, empty. device: attention's.

        numbers: of the layers of each part, from 0; without it, the parts are in the layers' order.
        """
        self.length = 0
        self.pending = 0
        self.shared_end = 0  # `shared_cache.SharedCache` sets it
        self.num_dropped = 0
        self.positions = torch.empty(0, dtype=torch.long, device=device)
        self._parts = list(parts)
        self._layers = [(part, layer) for part in parts for layer in range(part.num_layers)]
        if numbers is not None:
            order = [number for part in numbers for number in part]
            self._layers = [self._layers[order.index(number)] for number in range(len(order))]

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
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(part.nbytes for part in self._parts)

    @property
    def format(self) -> str:
        """How entries are stored, by groups of layers; caches of equal formats can copy each other's `stored`."""
        groups = groupby(part.format for part, _ in self._layers)
        return ", ".join(f"{len(list(layers))} {form}" for form, layers in groups)

    def stored(self, end: int) -> list[Tensor]:
        """`LayerCache.stored` of all layers, in their order."""
        return [view for part, layer in self._layers for view in part.stored(layer, end)]

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
        for part in self._parts:
            part.reserve(capacity, max(self.size, self.shared_end))
        self.positions = torch.cat((self.positions, self.positions.new_empty(capacity - self.capacity)))

    def extend(self, count: int) -> None:
        """Make room for `count` more entries.

        It grows by at least half, so that appending takes linear time.
        """
        if self.size + count > self.capacity:
            self.reserve(max(self.size + count, self.capacity * 3 // 2))

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Put keys and values [T, kv_heads, head_dim] of one layer into slots start .. start + T."""
        part, layer = self._layers[layer]
        part.write(layer, keys, values, start)

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """`write` into slots [T] on the device, without synchronising."""
        part, layer = self._layers[layer]
        part.scatter(layer, keys, values, slots)

    def read(self, layer: int, end: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, end - first, head_dim] of one layer; valid until this layer is written to."""
        part, layer = self._layers[layer]
        return part.read(layer, end, first)

    def most_read(self, layer: int) -> int | None:
        """The number of entries to read at once, see `LayerCache`."""
        return self._layers[layer][0].most_read

    def append(self, num_committed: int, num_pending: int) -> None:
        """Count the entries that all layers have written: committed ones (if nothing is pending), then pending ones."""
        assert num_committed == 0 or self.pending == 0, "the committed prefix cannot grow behind pending entries"
        self.length += num_committed
        self.pending += num_pending
        assert self.size <= self.capacity

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """Commit the pending entries `path`, keep the entries `pending`, and drop the others.

        Both are ascending indices into the pending region; those of `pending` are above those of `path`.
        """
        kept = [*path, *pending]
        assert all(a < b for a, b in pairwise((-1, *kept, self.pending))), "kept entries must be pending and ascending"
        if kept != list(range(len(kept))):
            slots = to_device(torch.tensor(kept), self.positions.device) + self.length
            self.move(self.length, slots)
        self.length += len(path)
        self.pending = len(pending)

    def move(self, start: int, slots: Tensor) -> None:
        """Move the entries in slots [K] (ascending) to start .. start + K, in use or not."""
        for part in self._parts:
            part.keep(start, slots)
        self.positions[start : start + len(slots)] = self.positions[slots]

    def drop(self, start: int, count: int) -> None:
        """Drop `count` committed entries from slot `start` on. Later ones move down and keep their positions."""
        assert start + count <= self.length
        self.move(start, torch.arange(start + count, self.size, device=self.positions.device))
        self.length -= count
        self.num_dropped += count

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed entries alone."""
        assert 0 <= length <= self.length
        self.length, self.pending = length, 0

    def wipe(self) -> None:
        """Zero all unused slots. A text that ran into NaN left some there, and attention multiplies them by 0."""
        for rows in self.stored(self.capacity):
            rows[..., self.size :, :] = 0
