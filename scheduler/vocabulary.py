"""Which of the target's tokens a draft can read and guess. Knows nothing of trees, texts or models.

A draft may have the target's token ids, a few fewer or a few more of them (models of one family padded differently), or
a selection: drafts that were cut to the frequent tokens (FR-Spec, 2502.14856), and EAGLE-3 heads (2503.01840), whose
logits have a column for each of some 32k tokens, with a table d2t from column to token. Text, trees and noise go by the
target's ids; only what goes into the draft and what comes out of it is translated here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .tree import IntArray


class Vocabulary:
    """A draft's vocabulary, in terms of the target's token ids: `Vocabulary(size)` has the target's ids, up to `size`.

    Column i of the logits is then token i, and a token that the draft does not know is read as its last one.
    """

    def __init__(self, size: int, columns: IntArray | None = None, input_of: IntArray | None = None) -> None:
        """size: of the draft's embedding. columns, input_of: see `mapped`, which makes them."""
        self._size, self._columns, self._input_of = size, columns, input_of
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    @classmethod
    def mapped(cls, columns: Sequence[int] | IntArray, num_inputs: int | None = None) -> Vocabulary:
        """Column i of the draft's logits [.., C] is the target's token columns[i].

        num_inputs: rows of its embedding, where that goes by the target's ids (EAGLE-3's is the target's own). None: it
        was cut like the head, row i for token columns[i], and a token that has none is read as the last one. Raises
        ValueError where the table is none: empty, a negative id, or an id twice.
        """
        table = np.asarray(columns, dtype=np.int64)
        if table.ndim != 1 or not len(table) or table.min() < 0 or len(np.unique(table)) < len(table):
            raise ValueError("a draft's vocabulary is a list of different token ids of the target, one for each column")
        if num_inputs is not None:
            return cls(num_inputs, table)
        input_of = np.full(int(table.max()) + 2, len(table) - 1)  # the last entry: every token of a greater id
        input_of[table] = np.arange(len(table))
        return cls(len(table), table, input_of)

    @classmethod
    def from_offsets(cls, offsets: Sequence[int] | IntArray, num_inputs: int | None = None) -> Vocabulary:
        """As `mapped`, of a table as EAGLE-3's checkpoints store it: d2t [C], column i being token i + d2t[i]."""
        return cls.mapped(np.arange(len(offsets)) + np.asarray(offsets, dtype=np.int64), num_inputs)

    def num_known(self, target_size: int) -> int:
        """How many of the target's `target_size` tokens the draft can guess."""
        if self._columns is None:
            return min(self._size, target_size)
        return int((self._columns < target_size).sum())

    def inputs(self, tokens: IntArray) -> IntArray:
        """The ids [N] that the draft's embedding is given for the target's tokens [N]."""
        if self._input_of is None:
            return np.minimum(tokens, self._size - 1)
        return self._input_of[np.minimum(tokens, len(self._input_of) - 1)]

    def text(self, tokens: Iterable[int]) -> list[int]:
        """As `inputs`, of a stretch of text."""
        found: list[int] = self.inputs(np.array(list(tokens), dtype=np.int64)).tolist()
        return found

    def over_target(self, logits: Tensor, target_size: int) -> Tensor:
        """Logits [R, T], column i the target's token i, T <= target_size, of the draft's logits [R, C].

        Tokens that the draft does not know have -inf, or no column where none of a greater id is known either.
        """
        if self._columns is None:
            return logits[:, :target_size]
        columns, tokens = self._table(target_size, logits.device)
        width = int(self._columns[self._columns < target_size].max(initial=-1)) + 1
        found = logits.new_full((len(logits), width), -torch.inf)
        return found.index_copy_(1, tokens, logits[:, columns])

    def add_target(self, logits: Tensor, target_logits: Tensor) -> None:
        """Add to the draft's logits [R, C], in place, the target's logits [R, V] for the same tokens."""
        size = target_logits.shape[1]
        if self._columns is None:
            known = min(self._size, size)
            logits[:, :known] += target_logits[:, :known]
        else:
            columns, tokens = self._table(size, logits.device)
            logits.index_add_(1, columns, target_logits[:, tokens].to(logits.dtype))

    def _table(self, target_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Columns [K] of the draft's logits and the target's tokens [K] that they stand for."""
        if (target_size, device) not in self._tables:
            assert self._columns is not None
            columns = np.flatnonzero(self._columns < target_size)
            tables = torch.from_numpy(columns), torch.from_numpy(self._columns[columns])
            self._tables[target_size, device] = tables[0].to(device), tables[1].to(device)
        return self._tables[target_size, device]
