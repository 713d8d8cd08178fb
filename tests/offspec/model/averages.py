"""A second kind of part and of memory: an exponential moving average of the text, which is a recurrent state.

Its state after a row comes from that of the row's parent. Of a text there is one state, not one for each token, so it
goes back only to the ends of earlier passes and verdicts, of which it keeps copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offspec.model.memory.kv_cache import MemoryLayout
from offspec.model.memory.layer_memory import Kept
from offspec.model.parts.part import LayerWeights, NativePart, PassRows
from offspec.model.pass_rows import by_text
from offspec.scheduler.trees.token_tree import IntArray

DECAY, WIDTH = 0.75, 6


@dataclass(frozen=True)
class AverageLayout:
    """The state of a layer: `width` numbers."""

    width: int

    def nbytes(self, num_entries: int, itemsize: int) -> int:
        return self.width * itemsize

    def new(self, num_layers: int, dtype: torch.dtype, device: torch.device) -> Averages:
        return Averages(torch.zeros(num_layers, self.width, dtype=dtype, device=device))


class Averages:
    """The states of layers: after the committed tokens, with copies at earlier ones, and after each pending node."""

    format = "averages"

    def least_cut(self, length: int) -> int:
        return length

    def copyable(self, length: int) -> int:
        return self.restorable(length)

    def __init__(self, zero: Tensor) -> None:
        """zero: the states [layers, width] before the first token."""
        self.num_layers = len(zero)
        self._length = 0
        self._after = {0: zero}  # by the number of tokens
        self._pending = zero[:, None][:, :0]
        self._rows: list[list[Tensor]] = [[] for _ in zero]  # by layer: states after the rows of the pass
        self._copied: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self._pending.nbytes + sum(state.nbytes for state in self._after.values())

    def advance(self, layer: int, numbers: Tensor, parents: IntArray, first: int) -> Tensor:
        """The states [T, width] after rows of a pass, from row `first` on, in which these numbers are averaged."""
        rows = self._rows[layer]
        del rows[first:]  # of a pass that was interrupted
        for row, parent in zip(numbers, parents.tolist(), strict=True):
            rows.append(DECAY * self._state(layer, parent) + (1 - DECAY) * row)
        return torch.stack(rows[first:])

    def _state(self, layer: int, slot: int) -> Tensor:
        node, num_pending = slot - self._length, self._pending.shape[1]
        if node < 0:
            assert node == -1, "a row that does not follow the text"
            return self._after[self._length][layer]
        return self._pending[layer, node] if node < num_pending else self._rows[layer][node - num_pending]

    def reserve(self, capacity: int, in_use: int) -> None:
        pass

    def append(self, num_committed: int, num_pending: int) -> None:
        if not num_committed + num_pending:
            return
        if self._copied is not None:
            states, self._copied = self._copied[:, None].expand(-1, num_committed, -1), None
        else:
            states = torch.stack([torch.stack(rows) for rows in self._rows])
        assert states.shape[1] == num_committed + num_pending
        if num_committed:
            self._length += num_committed
            self._after[self._length] = states[:, num_committed - 1].clone()
        self._pending = torch.cat((self._pending, states[:, num_committed:]), dim=1)
        self._rows = [[] for _ in self._rows]

    def keep(self, kept: Kept) -> None:
        assert kept.length == self._length
        if kept.path:
            self._length += len(kept.path)
            self._after[self._length] = self._pending[:, kept.path[-1]]
        self._pending = self._pending[:, list(kept.pending)]

    def restorable(self, length: int) -> int:
        return max(tokens for tokens in self._after if tokens <= length)

    def rewind(self, length: int) -> None:
        self._length = length
        self._after = {tokens: state for tokens, state in self._after.items() if tokens <= length}
        self._pending = self._pending[:, :0]
        self._rows = [[] for _ in self._rows]

    def stored(self, layer: int, end: int) -> list[Tensor]:
        if end in self._after:
            return [self._after[end][layer]]
        assert not self._length, "no copy of the state is kept there"
        if self._copied is None:
            self._copied = torch.zeros_like(self._after[0])
        return [self._copied[layer]]


class Average(NativePart):
    """Adds a projection of the average of the text's normed and projected states."""

    is_static = False
    memory: MemoryLayout | None = AverageLayout(WIDTH)

    @property
    def norms(self) -> list[str]:
        return ["average.norm"]

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        hidden = self.config.hidden_size
        return {"average.in_proj": (WIDTH, hidden), "average.out_proj": (hidden, WIDTH)}

    @property
    def row_numbers(self) -> int:
        return 2 * WIDTH

    def has_bias(self, matrix: str) -> bool:
        return False

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        numbers, states = self.numbers(x, weights), list[Tensor]()
        for text, begin, end, some in by_text(rows, first, last):
            memory, place = text.cache.state_of(self.layer)
            assert isinstance(memory, Averages)
            states.append(memory.advance(place, numbers[some], text.parents[begin:end], begin))
        return self.added(x, weights.linear("average.out_proj", torch.cat(states)))

    def numbers(self, x: Tensor, weights: LayerWeights) -> Tensor:
        return weights.linear("average.in_proj", self.norm(x, weights, "average.norm"))
