"""The results of a pass: hidden states of its rows, and their logits, computed on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device

HEAD_ROWS = 64  # rows whose logits are computed together


class LogitsHead(Protocol):
    """Computes logits from hidden states, as `Decoder` does."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] after the final norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [R, vocab] of hidden states [R, hidden]."""


class FirstSlices:
    """The first slices of several texts of a pass: each needs its first row, and the head is read once for all.

    It refers to no `RowLogits`: without a circle, logits are freed as soon as a pass's are.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._hidden: list[Tensor] = []
        self._computed: tuple[Tensor, ...] = ()

    def add(self, hidden: Tensor) -> int:
        """The number of a text with these hidden states [R, hidden]."""
        self.num_rows += len(hidden)
        self._hidden.append(hidden)
        return len(self._hidden) - 1

    def logits(self, head: LogitsHead, number: int) -> Tensor:
        """fp32 logits [R, vocab] of a text, with those of the others."""
        if not self._computed:
            whole = head.logits(self._hidden[0] if len(self._hidden) == 1 else torch.cat(self._hidden))
            self._computed = torch.split(whole, [len(each) for each in self._hidden])
        return self._computed[number]


class RowLogits:
    """fp32 logits [R, vocab] of hidden states, computed on first use in slices of HEAD_ROWS.

    A verdict uses few rows of a large tree, most of them near the start. All logits of a large vocabulary would take a
    gigabyte.

    layer_states: layer number (from 0) → hidden states [num_before + R, hidden] after that layer, for the layers that
    the caller of the pass requested; never normed.
    """

    def __init__(
        self, head: LogitsHead, hidden: Tensor, num_before: int = 0, layer_states: Mapping[int, Tensor] | None = None
    ) -> None:
        """hidden [num_before + R, hidden]: the first num_before are earlier rows of the pass, see `before`."""
        self._head = head
        self._hidden = hidden[num_before:]
        self._before = hidden[:num_before]
        self.num_before = num_before
        self.layer_states: Mapping[int, Tensor] = layer_states or {}
        self._slices: dict[int, Tensor] = {}
        self._first: tuple[FirstSlices, int] | None = None  # with the number of this text

    @staticmethod
    def share(texts: Sequence[RowLogits]) -> None:
        """Compute the first slices of several texts of one pass together, as many as have HEAD_ROWS rows."""
        slices = FirstSlices()
        for text in texts:
            hidden = text._hidden[:HEAD_ROWS]
            if slices.num_rows + len(hidden) > HEAD_ROWS:
                slices = FirstSlices()
            text._first = slices, slices.add(hidden)

    def before(self, first: int, last: int) -> Tensor:
        """[last - first, vocab]: logits of rows first .. last of the num_before: the chain without its last token.

        They are computed at each call.
        """
        return self._head.logits(self._before[first:last])

    @torch.inference_mode()
    def states(self, rows: Sequence[int]) -> Tensor:
        """`Decoder.normed` states [len(rows), hidden] of these rows."""
        return self._head.normed(self._hidden[to_device(torch.tensor(rows, dtype=torch.long), self._hidden.device)])

    @torch.inference_mode()
    def states_before(self, count: int) -> Tensor:
        """`Decoder.normed` states [count, hidden] of the last `count` of the num_before."""
        return self._head.normed(self._before[self.num_before - count :])

    def __len__(self) -> int:
        return self._hidden.shape[0]

    def __getitem__(self, row: int) -> Tensor:
        index = row // HEAD_ROWS
        if index not in self._slices:
            self._slices[index] = self._logits(index)
        return self._slices[index][row % HEAD_ROWS]

    def _logits(self, index: int) -> Tensor:
        """A slice's logits."""
        if index == 0 and self._first is not None:
            slices, number = self._first
            return slices.logits(self._head, number)
        return self._head.logits(self._hidden[index * HEAD_ROWS : (index + 1) * HEAD_ROWS])
