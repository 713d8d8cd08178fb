"""KV entries of layers with a sliding window, without those that no later row can see.

Slot i of a text is row i modulo the number of rows, so that new entries overwrite the oldest ones and nothing is ever
moved to make room. Texts of up to WHOLE tokens keep all of their entries. A longer one may be rewound as far as the
entries of the shorter text's window are still there; otherwise it is read again from its beginning, as a text with
recurrent states is (`layer_memory`). A copy of it has what the last CUT tokens need. Any format of entries can be used.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from offspec.backends.x86.row_attention import BLOCK
from offspec.scheduler.params import MAX_NODES

from .kv_cache import KVLayout, LayerCache
from .layer_memory import CHUNK_ROWS, Kept

WHOLE = 4096  # tokens of a text that keeps all entries; a pass reads so many again, where a rewind goes too far back
CUT = 512  # tokens by which a copy of a longer text may be shortened: a question behind a document


def most_rows(window: int) -> int:
    """Rows of a layer: what a text keeps in whole blocks, rows that go through the layer together, a tree's nodes."""
    return (-(-(max(WHOLE, window + CUT) + CHUNK_ROWS + MAX_NODES) // BLOCK) + 1) * BLOCK


def most_pending(window: int) -> int:
    """The most nodes that may be pending in a text."""
    return most_rows(window) - window - CHUNK_ROWS - BLOCK


def kept_rows(layout: KVLayout, num_entries: int, num_texts: int = 1) -> int:
    """Rows of a layer for texts with `num_entries` entries together; all of them without a window."""
    return num_entries if layout.window is None else min(num_entries, num_texts * most_rows(layout.window))


class WindowLayers:
    """Layers with one window (a `LayerCache`). Slots are those of the text; `entries` stores rows."""

    def __init__(self, entries: LayerCache, window: int) -> None:
        """entries: empty, used by nobody else."""
        self._entries = entries
        self._window = window
        self._most = most_rows(window)
        self._num_rows = 0
        self._length = 0
        self._ends = [0] * entries.num_layers  # of the slots that were written to since the text was empty
        self._first_copied = 0  # of the slots that came from another text

    @property
    def num_layers(self) -> int:
        return self._entries.num_layers

    @property
    def format(self) -> str:
        return f"{self._entries.format} in a window of {self._window}"

    @property
    def most_read(self) -> int | None:
        return self._entries.most_read

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes

    def empty(self) -> WindowLayers:
        return WindowLayers(self._entries.empty(), self._window)

    def reserve(self, capacity: int, in_use: int) -> None:
        if (num_rows := min(capacity, self._most)) != self._num_rows:
            self._entries.reserve(num_rows, min(in_use, num_rows))
            self._num_rows = num_rows

    # ------------------------------------------------------------------------------------------------ slots and rows

    def cuts(self, first: int, end: int) -> list[int]:
        """The slots between first and end where rows begin again from 0: `read` copies what has one inside."""
        return list(range((first // self._most + 1) * self._most, end, self._most))

    def _stretches(self, first: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Which of the slots first .. end are side by side: their numbers among these, and their rows."""
        inside = self.cuts(first, end)
        for begin, until in zip((first, *inside), (*inside, end), strict=True):
            row = begin % self._most
            yield slice(begin - first, until - first), slice(row, row + until - begin)

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        end = start + len(keys)
        for some, rows in self._stretches(start, end):
            self._entries.write(layer, keys[some], values[some], rows.start)
        self._ends[layer] = max(self._ends[layer], end)

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        raise NotImplementedError("rounds with static shapes need all entries")

    def read(self, layer: int, end: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Of slots on both sides of a cut, new tensors."""
        assert first >= self._first_of(layer), "entries that the layer does not have any more"
        parts = [self._entries.read(layer, rows.stop, rows.start) for _, rows in self._stretches(first, end)]
        if len(parts) == 1:
            return parts[0]
        keys, values = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        return keys, values

    def move(self, start: int, slots: Tensor) -> None:
        """`LayerCache.move`. No slot is below its new one, so no stretch overwrites what a later one needs."""
        for some, rows in self._stretches(start, start + len(slots)):
            self._entries.move(rows.start, slots[some] % self._most)

    # ------------------------------------------------------------------------------------------------ a text

    def _first_of(self, layer: int) -> int:
        """The first slot whose entry is still there; layers differ during a pass, and after an interrupted one."""
        return max(self._ends[layer] - self._most, self._first_copied)

    def _first_needed(self, length: int) -> int:
        """The first slot that rows behind so many tokens see, in whole blocks, because these are read together."""
        return max(0, length - self._window + 1) // BLOCK * BLOCK

    def _first_stored(self, length: int) -> int:
        """The first slot that a copy of so many tokens has."""
        return 0 if length <= WHOLE else self._first_needed(length - CUT)

    def least_cut(self, length: int) -> int:
        return length - CUT if self._first_stored(length) else 0

    def append(self, num_committed: int, num_pending: int) -> None:
        self._length += num_committed
        if self._ends[0] < self._length:  # it was copied from another text
            self._ends = [self._length] * self.num_layers
            self._first_copied = self._first_stored(self._length)

    def keep(self, kept: Kept) -> None:
        if kept.slots is not None:
            self.move(kept.length, kept.slots)
        self._length += len(kept.path)

    def restorable(self, length: int) -> int:
        return length if max(map(self._first_of, range(self.num_layers))) <= self._first_needed(length) else 0

    def copyable(self, length: int) -> int:
        return length if max(map(self._first_of, range(self.num_layers))) <= self._first_stored(length) else 0

    def rewind(self, length: int) -> None:
        self._length = length
        if length == 0:
            self._ends, self._first_copied = [0] * self.num_layers, 0

    def stored(self, layer: int, end: int) -> list[Tensor]:
        """`LayerMemory.stored`, by stretches; of more than WHOLE tokens, the entries that the last CUT ones need."""
        stretches = self._stretches(self._first_stored(end), end)
        return [view for _, rows in stretches for view in self._entries.stored(layer, rows.stop, rows.start)]
