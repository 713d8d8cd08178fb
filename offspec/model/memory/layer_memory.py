"""What layers keep of one text: the protocol of every kind of memory, and the shape of what a layer keeps.

A text has committed tokens and, behind them, pending nodes of trees. A pass appends rows. A verdict commits a path of
pending nodes, keeps some below it, and drops the others. A text may be rewound to fewer tokens.

KV entries (`kv_cache.LayerCache`) are one kind: one entry for each row, so that a text may be cut at any token, unless
layers with a window have dropped old ones (`window_layers`). A recurrent state can be another kind. It is one value for
all tokens so far, a node's comes from its parent's (`pass_rows.AppendedRows.parents`), and it goes back only to tokens
where a copy of it was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK_ROWS = 512  # rows of a long chain that go through a layer together, at most; limits activations


@dataclass(frozen=True)
class Kept:
    """What a verdict keeps of the pending nodes behind `length` committed tokens.

    path: indices of nodes that are committed now; pending: of nodes that stay pending. Both are ascending, those of
    `pending` above those of `path`. slots: of all these, on the compute device; None: they are the first ones already.
    """

    length: int
    path: Sequence[int]
    pending: Sequence[int]
    slots: Tensor | None


class LayerMemory(Protocol):
    """What `num_layers` layers keep of a text, stored together; `layer` counts from the first of them.

    Layers write their rows during a pass, each kind of part by its memory's own functions. Until `append`, a pass may
    be interrupted, and other rows written.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """All allocated bytes, on any device."""

    @property
    def format(self) -> str:
        """What the bytes of `stored` mean, beside their dtypes; files name it. It changes whenever the meaning does.

        It does not depend on where they lie.
        """

    def least_cut(self, length: int) -> int:
        """The fewest tokens that a copy of `length` tokens can go back to.

        0: `stored` of fewer tokens is the beginning of `stored` of `length` tokens. Otherwise the copy is made whole,
        and then rewound.
        """

    def reserve(self, capacity: int, in_use: int) -> None:
        """Grow to `capacity` rows, and keep the first `in_use` ones. All others read as zeros until written to.

        Attention multiplies masked values by 0, and 0 times what memory may contain can be NaN.
        """

    def append(self, num_committed: int, num_pending: int) -> None:
        """All layers have written these rows: committed tokens (if nothing is pending), then pending nodes."""

    def keep(self, kept: Kept) -> None:
        """Commit a path of pending nodes, keep others pending, and drop the rest."""

    def restorable(self, length: int) -> int:
        """The largest number of first tokens, at most `length`, that `rewind` can go back to."""

    def copyable(self, length: int) -> int:
        """The largest number of first tokens, at most `length`, that `stored` can show."""

    def rewind(self, length: int) -> None:
        """Drop all but the first `length` tokens, a result of `restorable`."""

    def stored(self, layer: int, end: int) -> list[Tensor]:
        """Everything that is stored of a layer's first `end` tokens, a result of `copyable`, as writable views.

        In an empty memory with room, they are written to and then appended: so texts are copied to other caches and to
        files, and no entry is quantised twice. They are valid until the memory is used otherwise.
        """


class StateLayout(Protocol):
    """The shape of what a layer keeps of a text, if it is no KV entry. Layers with equal layouts share a memory."""

    def nbytes(self, num_entries: int, itemsize: int) -> int:
        """Bytes of one layer with room for `num_entries` rows, with numbers of `itemsize` bytes."""

    def new(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> LayerMemory:
        """An empty memory of so many layers. dtype: of the arithmetic."""
