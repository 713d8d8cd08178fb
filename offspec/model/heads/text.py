"""A head's view of one text (a `DraftText`): its KV entries, and what it continues from.

After each pass, `feed` gets the target's states of the rows that the verdict kept. The next round computes the head's
rows of these places, so that the text's entries always come from the target's states. Entries of the head's own
guesses, which are less exact, are dropped after each verdict.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.trees.token_tree import IntArray
from offspec.scheduler.trees.verify import TargetPass, TargetStates
from offspec.scheduler.trees.vocabulary import Vocabulary

from ..memory.layer_memory import CHUNK_ROWS
from ..memory.sequence_cache import SequenceCache
from ..parts.part import PassRows
from ..pass_rows import TextRows
from .head import Head, Inputs

T = TypeVar("T")


@dataclass(frozen=True)
class _Row:
    """A row of the text that is not computed yet: features [1, F] of the place before `position`, and its token."""

    features: Tensor
    token: int
    position: int


class HeadText:
    """The cached text of a head. `length`: the text's tokens whose states the target has computed for the head.

    Positions that the head was not told of (they came from another conversation's cache) are left out.
    """

    def __init__(self, head: Head, capacity: int = 0, cache: SequenceCache | None = None) -> None:
        """capacity: entries to reserve. cache: the head's, empty; None: one that needs no target."""
        self.decoder = head
        self.cache = head.new_cache() if cache is None else cache
        self.cache.reserve(capacity)
        self.length = 0
        self._positions: list[int] = []  # of the committed entries' tokens
        self._waiting: list[_Row] = []
        self._last: Tensor | None = None  # features [1, F] of the last place, `length` - 1
        self._root: int | None = None  # the token at position `length`, if its entry is the last committed one
        self._features: list[Tensor] = []  # of the root's row and of the pending nodes, in parts

    @property
    def vocabulary(self) -> Vocabulary:
        return self.decoder.vocabulary

    @property
    def max_context(self) -> int:
        """The longest text with which the head can draft now; 0 before the target's first pass."""
        if self._last is None:
            return 0
        longest, steps = self.decoder.target.config.max_context, self.decoder.num_steps
        return longest if steps is None else min(longest, self.length + 1 + steps)

    def reserve(self, capacity: int) -> None:
        """Reserve room for `capacity` tokens, committed and pending."""
        self.cache.reserve(capacity)

    # ------------------------------------------------------------------------------------------------ the target's pass

    @torch.inference_mode()
    def feed(self, done: TargetPass) -> None:
        """Take over the target's states at the places of a pass that the verdict kept."""
        rows = [0, *(node + 1 for node in done.verdict.path)]
        num_before = done.states.num_before
        if not self.decoder.reads_text:
            rows, num_before = rows[-1:], 0
        states = self.decoder.fused(target_states(done.states, self.decoder.target_layers, num_before, rows))
        length = len(done.text) + len(done.verdict.tokens)
        text = [*done.text, *done.verdict.tokens][length - 1 - len(states) : -1]
        self._feed(states, self.vocabulary.text(text), length - 1)

    def _feed(self, features: Tensor, tokens: Sequence[int], end: int) -> None:
        """features [K, F]: of the last K places before position `end` of the text. tokens: at these places."""
        first = end - len(features)
        if self._last is not None and first == self.length and self._root != tokens[0]:
            if self._root is not None:
                self._cut(self.length)
            self._wait(self._last, tokens[:1], first)
        self._wait(features[:-1], tokens[1:], first + 1)
        self._last, self.length, self._root = features[-1:], end, None

    def _wait(self, features: Tensor, tokens: Sequence[int], first: int) -> None:
        """Add rows of the text from position `first` on, without those that are known."""
        if not self.decoder.reads_text:
            return
        last_position = self._waiting[-1].position if self._waiting else self._positions[-1] if self._positions else -1
        self._waiting += [
            _Row(features[i : i + 1], token, first + i) for i, token in enumerate(tokens) if first + i > last_position
        ]

    def _cut(self, position: int) -> None:
        """Drop the committed entries from this position of the text on, and all pending ones."""
        count = bisect_left(self._positions, position)
        self.cache.truncate(count)
        del self._positions[count:]
        self._features, self._root = [], None

    # ------------------------------------------------------------------------------------------------ rounds

    @torch.inference_mode()
    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        """`TreeModel.score`; the chain is the text's last token."""
        return self.decoder.head(self.states(chain, tokens, depths, parents))

    def joining(self, chain: Sequence[int]) -> None:
        """It reads the target's states."""

    @torch.inference_mode()
    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray, before: int = 0
    ) -> Tensor:
        """States [(1 if chain) + R, hidden], see `CachedDecoder.states`; those of rows `before` are left out."""
        parts = [self._of_root(chain[-1])] if chain else []
        num_before = self.cache.pending
        for first, last in _runs(parents[num_before:] - num_before):
            some = slice(first, last)
            parts.append(self._of_nodes(TextRows((), tokens[some], depths[some], parents[: num_before + last])))
        return torch.cat(parts)

    def _of_root(self, token: int) -> Tensor:
        """The state [1, hidden] after the text's last token, with the rows that wait before it."""
        assert self._last is not None
        self._cut(self.length)
        rows = [*self._waiting, _Row(self._last, token, self.length)]
        self._waiting = []
        num_read = (len(rows) - 1) // CHUNK_ROWS * CHUNK_ROWS  # in parts, so that a long prompt takes no more memory
        for first in range(0, num_read, CHUNK_ROWS):
            self._append(rows[first : first + CHUNK_ROWS], self.decoder.read)
        states, features = self._append(rows[num_read:], self.decoder.advance)
        self._root, self._features = token, [features[-1:]]
        return states[-1:]

    def _append(self, rows: Sequence[_Row], compute: Callable[[Inputs, PassRows], T]) -> T:
        """Append entries of rows of the text, and return what `compute` makes of them."""
        tokens = np.array([row.token for row in rows], dtype=np.int64)
        appended = self.decoder.rows(TextRows.of_chain(tokens.tolist()), self.cache)
        features = torch.cat([row.features for row in rows])
        result = compute(Inputs(features, tokens, np.zeros_like(tokens)), appended)
        self.cache.append(len(rows), 0)
        self._positions += [row.position for row in rows]
        return result

    def _of_nodes(self, nodes: TextRows) -> Tensor:
        """The states [R, hidden] after these nodes, which become pending; no one is another's child."""
        appended = self.decoder.rows(nodes, self.cache)
        joined = self._features = [torch.cat(self._features)]
        parents = torch.from_numpy(nodes.parents[nodes.num_before :] + 1)
        above = joined[0][to_device(parents, self.decoder.device)]
        states, features = self.decoder.advance(Inputs(above, nodes.tokens, np.asarray(nodes.depths)), appended)
        self.cache.append(0, len(nodes))
        self._features.append(features)
        return states

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """Drop all pending entries: those of accepted nodes are computed again, from the target's states."""
        assert not pending, "a head's tree does not live on"
        self.cache.keep([])
        self._features = self._features[:1]

    def truncate(self, length: int) -> None:
        """Drop the text from position `length` on."""
        self._cut(length)
        self._waiting = [row for row in self._waiting if row.position < length]
        if length != self.length:
            self._last, self.length = None, length


def _runs(parents: IntArray) -> list[tuple[int, int]]:
    """Ranges (first, last) of consecutive nodes without parents among them; parents [R] count from the first node.

    A round has a node and its child only if a guesser proposed both.
    """
    starts = [0]
    for node, parent in enumerate(parents.tolist()):
        if parent >= starts[-1]:
            starts.append(node)
    return [(first, last) for first, last in zip(starts, [*starts[1:], len(parents)], strict=True) if first < last]


def target_states(states: TargetStates, layers: Sequence[int], num_before: int, rows: Sequence[int]) -> Tensor:
    """[num_before + len(rows), S]: the target's states of the last `num_before` rows before the root, and of `rows`.

    layers: side by side; empty: the final states.
    """
    if not layers:
        new_states = states.states(rows)
        return torch.cat((states.states_before(num_before), new_states)) if num_before else new_states
    root = states.num_before
    wanted = torch.tensor([*range(root - num_before, root), *(root + row for row in rows)])
    parts = [states.layer_states[layer] for layer in layers]
    return torch.cat([part[to_device(wanted, part.device)] for part in parts], dim=-1)
