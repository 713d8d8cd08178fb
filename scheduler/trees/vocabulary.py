"""The vocabulary of a draft: the target's tokens that it reads and predicts.

A draft may have the target's token ids, or a few fewer or more of them (models of one family differ in padding). It may
also have a selection: drafts cut to the frequent tokens (FR-Spec, 2502.14856), and EAGLE-3 heads (2503.01840), whose
logits have columns for some 32k tokens and a table d2t from column to token. Text, trees and noise use the target's
ids; this module translates only the draft's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .token_tree import IntArray
from .transfer import ToDevice, copied


class Vocabulary:
    """A draft's vocabulary in terms of the target's token ids. `Vocabulary(size)` has the target's ids below `size`.

    Column i of the logits is then token i, and an unknown token is read as the draft's last one.
    """

    def __init__(
        self,
        size: int,
        columns: IntArray | None = None,
        input_of: IntArray | None = None,
        to_device: ToDevice = copied,
    ) -> None:
        """size: rows of the draft's embedding. columns, input_of: created by `mapped`. to_device: transfers tables."""
        self._size, self._columns, self._input_of, self._to_device = size, columns, input_of, to_device
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    @classmethod
    def mapped(
        cls, columns: Sequence[int] | IntArray, num_inputs: int | None = None, to_device: ToDevice = copied
    ) -> Vocabulary:
        """Column i of the draft's logits [.., C] is the target's token columns[i].

        num_inputs: rows of the draft's embedding, if it uses the target's ids (EAGLE-3 uses the target's embedding).
        None: the embedding is cut like the head, with row i for token columns[i], and other tokens are read as the last
        row. Raises ValueError for a table that is empty, or has a negative or repeated id.
        """
        table = np.asarray(columns, dtype=np.int64)
        if table.ndim != 1 or not len(table) or table.min() < 0 or len(np.unique(table)) < len(table):
            raise ValueError("a draft's vocabulary is a list of different token ids of the target, one for each column")
        if num_inputs is not None:
            return cls(num_inputs, table, to_device=to_device)
        input_of = np.full(int(table.max()) + 2, len(table) - 1)  # the last entry is for all greater ids
        input_of[table] = np.arange(len(table))
        return cls(len(table), table, input_of, to_device)

    @classmethod
    def from_offsets(
        cls, offsets: Sequence[int] | IntArray, num_inputs: int | None = None, to_device: ToDevice = copied
    ) -> Vocabulary:
        """As `mapped`, from the table d2t [C] of EAGLE-3's checkpoints: column i is token i + d2t[i]."""
        return cls.mapped(np.arange(len(offsets)) + np.asarray(offsets, dtype=np.int64), num_inputs, to_device)

    def num_known(self, target_size: int) -> int:
        """The number of the target's `target_size` tokens that the draft can predict."""
        if self._columns is None:
            return min(self._size, target_size)
        return int((self._columns < target_size).sum())

    def inputs(self, tokens: IntArray) -> IntArray:
        """The draft's input ids [N] for the target's tokens [N]."""
        if self._input_of is None:
            return np.minimum(tokens, self._size - 1)
        return self._input_of[np.minimum(tokens, len(self._input_of) - 1)]

    def text(self, tokens: Iterable[int]) -> list[int]:
        """As `inputs`, for a sequence of tokens of a text."""
        ids: list[int] = self.inputs(np.array(list(tokens), dtype=np.int64)).tolist()
        return ids

    def over_target(self, logits: Tensor, target_size: int) -> Tensor:
        """The draft's logits [R, C] over the target's ids: [R, T] with T <= target_size, column i for token i.

        Unknown tokens have -inf. There are no columns after the last known token.
        """
        if self._columns is None:
            return logits[:, :target_size]
        columns, tokens = self._table(target_size, logits.device)
        width = int(self._columns[self._columns < target_size].max(initial=-1)) + 1
        target_logits = logits.new_full((len(logits), width), -torch.inf)
        return target_logits.index_copy_(1, tokens, logits[:, columns])

    def columns_of(self, tokens: Tensor) -> Tensor:
        """The columns of the draft's logits for the target's tokens [...]; -1 for tokens that it cannot predict."""
        if self._columns is None:
            return torch.where(tokens < self._size, tokens, -1)
        table = torch.full((max(int(self._columns.max()), int(tokens.max())) + 1,), -1, device=tokens.device)
        columns = self._to_device(torch.from_numpy(self._columns), tokens.device)
        return table.index_copy_(0, columns, torch.arange(len(columns), device=tokens.device))[tokens]

    def add_target(self, logits: Tensor, target_logits: Tensor) -> None:
        """Add to the draft's logits [R, C], in place, the target's logits [R, V] for the same tokens."""
        size = target_logits.shape[1]
        if self._columns is None:
            num_shared = min(self._size, size)
            logits[:, :num_shared] += target_logits[:, :num_shared]
        else:
            columns, tokens = self._table(size, logits.device)
            logits.index_add_(1, columns, target_logits[:, tokens].to(logits.dtype))

    def _table(self, target_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Columns [K] of the draft's logits, and their target tokens [K]."""
        if (target_size, device) not in self._tables:
            assert self._columns is not None
            columns = np.flatnonzero(self._columns < target_size)
            of_draft, of_target = (torch.from_numpy(ids) for ids in (columns, self._columns[columns]))
            self._tables[target_size, device] = self._to_device(of_draft, device), self._to_device(of_target, device)
        return self._tables[target_size, device]
