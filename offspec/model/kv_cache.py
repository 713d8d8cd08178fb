"""Keys and values of one text: a committed prefix, then a pending region where a tree's nodes wait for the verdict.

Slot i of the committed prefix holds the token at position i. Pending entries follow in the order they were computed.
`keep(path)` commits the accepted path, `truncate` forgets a tail. Knows nothing of models, trees' shapes or masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from offspec.loaders.small_transfers import to_device


class KVCache:
    """Keys and values [layers, 2, kv_heads, capacity, head_dim] of one text; grows as needed.

    `length` tokens are committed, `pending` entries wait behind them; `positions` [capacity] says where each stands in
    its text (nodes of equal depth share a position).
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = 0
        self.pending = 0
        self.positions = torch.empty(0, dtype=torch.long, device=device)
        self._data = torch.empty(num_layers, 2, num_kv_heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def size(self) -> int:
        """Entries in use: committed and pending."""
        return self.length + self.pending

    @property
    def capacity(self) -> int:
        return self._data.shape[3]

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    @torch.inference_mode(False)  # in inference mode this would make tensors that `keep` may not write to outside it
    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` entries, no more; what is there stays."""
        if capacity <= self.capacity:
            return
        shape = list(self._data.shape)
        shape[3] = capacity
        grown = self._data.new_empty(shape)
        grown[:, :, :, : self.size] = self._data[:, :, :, : self.size]
        self._data = grown
        self.positions = torch.cat((self.positions, self.positions.new_empty(shape[3] - len(self.positions))))

    def extend(self, count: int) -> None:
        """Make room for `count` entries more. Where nobody reserved it, for half as many again, so that appending is linear."""
        if self.size + count > self.capacity:
            self.reserve(max(self.size + count, self.capacity * 3 // 2))

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        """Put keys and values [T, kv_heads, head_dim] of one layer into slots start .. start + T."""
        slots = slice(start, start + keys.shape[0])
        self._data[layer, 0, :, slots] = keys.transpose(0, 1)
        self._data[layer, 1, :, slots] = values.transpose(0, 1)

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """As `write`, into slots [T] that only the device knows."""
        self._data[layer, 0].index_copy_(1, slots, keys.transpose(0, 1))
        self._data[layer, 1].index_copy_(1, slots, values.transpose(0, 1))

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, end, head_dim] of one layer, as views."""
        return self._data[layer, 0, :, :end], self._data[layer, 1, :, :end]

    def append(self, num_committed: int, num_pending: int) -> None:
        """Count entries that every layer has now written: committed ones first (nothing may be pending), then pending."""
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
            slots = to_device(torch.tensor(stay), self._data.device) + self.length
            kept = slice(self.length, self.length + len(stay))
            self._data[:, :, :, kept] = self._data[:, :, :, slots]
            self.positions[kept] = self.positions[slots]
        self.length += len(path)
        self.pending = len(pending)

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on, and whatever is pending."""
        assert 0 <= length <= self.length
        self.length, self.pending = length, 0

    def wipe(self) -> None:
        """Zeros wherever nothing is in use: attention over all of the capacity weighs it with 0, and 0 times NaN is NaN."""
        self._data[:, :, :, self.size :] = 0
