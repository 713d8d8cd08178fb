"""Token recycling (2408.08696): reuses the target's earlier top-k predictions after the same token.

Every verified node gives the target's likeliest successors of its token, which other methods discard. The successors of
the last token, their successors and so on form a tree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from ..trees.sampling import Sampler
from ..trees.token_tree import RECYCLING, ROOT, FloatArray, IntArray, TokenTree, trimmed
from ..trees.verify import TargetPass
from .reliability import ConsideredGuesses, Reliability, waits_of


class SuccessorTable:
    """The target's likeliest successors of recently seen tokens, with their probabilities, in bounded memory.

    Each new token gets a row; if all rows are in use, it replaces the token whose row was assigned first. With a
    vocabulary of 128k the table has 1.1 MB; one row per token would need 6 MB.
    """

    NUM_ROWS = 1 << 14
    NUM_SUCCESSORS = 8  # as in the paper, section 4.2

    def __init__(self, vocab_size: int) -> None:
        num_rows = min(self.NUM_ROWS, vocab_size)
        self._row_of = np.full(vocab_size, -1, dtype=np.int16)
        self._token_of = np.full(num_rows, -1, dtype=np.int32)
        self._successors = np.full((num_rows, min(self.NUM_SUCCESSORS, vocab_size)), -1, dtype=np.int32)
        self._probabilities = np.zeros(self._successors.shape, dtype=np.float16)
        self._next_row = 0

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self._row_of, self._token_of, self._successors, self._probabilities))

    def store(self, tokens: IntArray, logits: torch.Tensor) -> None:
        """Store the target's logits [R, V] after each of `tokens` [R]; the last row of a repeated token counts."""
        best, successors = logits.topk(self._successors.shape[1])
        probabilities = (best - logits.logsumexp(-1, keepdim=True)).exp().cpu().numpy()
        rows = [self._row(int(token)) for token in tokens]
        for row, successor, probability in zip(rows, successors.cpu().numpy(), probabilities, strict=True):
            self._successors[row], self._probabilities[row] = successor, probability

    def _row(self, token: int) -> int:
        """The row of a token, a new one if it has none."""
        if self._row_of[token] < 0:
            row = self._next_row
            if (former := self._token_of[row]) >= 0:
                self._row_of[former] = -1
            self._row_of[token], self._token_of[row] = row, token
            self._next_row = (row + 1) % len(self._token_of)
        return int(self._row_of[token])

    def successors(self, tokens: IntArray) -> tuple[IntArray, FloatArray]:
        """Likeliest successors [R, K] of each token [R], best first, -1 for unknown ones; their probabilities."""
        rows = self._row_of[tokens]
        has_row = (rows >= 0)[:, None]
        successors = np.where(has_row, self._successors[rows], -1).astype(np.int64)
        return successors, self._probabilities[rows].astype(np.float64)


class TokenRecycling:
    """Proposes the target's earlier successors, best first. One instance may serve all requests of one target.

    A proposal's kind is its rank among the successors and its stored probability. num_spare_rows: number of the first
    rows of a pass that are stored even if the text did not reach them. The engine computes logits in blocks of 64 rows,
    and the root is in the first block, so these rows are free; without them, acceptance is much lower.
    """

    PROBABILITIES = np.array([0.0, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9, 0.98])  # lower bounds of the classes
    RANKS = np.array([0, 1, 2, 4])  # lower bounds of the classes
    MOST_WAITING = 16  # rows of plain passes that are stored by the next guess; older ones are dropped

    def __init__(self, vocab_size: int, num_spare_rows: int = 64) -> None:
        self.table = SuccessorTable(vocab_size)
        self._num_spare_rows = num_spare_rows
        # At first, each kind has half of its stored probability.
        middle = np.sqrt(np.maximum(self.PROBABILITIES, 0.003) * np.append(self.PROBABILITIES[1:], 1.0))
        self._reliability = Reliability(np.tile(middle / 2, len(self.RANKS)))
        self._last: ConsideredGuesses | None = None
        # Tokens of plain passes, and the target's logits after them.
        self._waiting = deque[tuple[int, torch.Tensor]](maxlen=self.MOST_WAITING)

    def guess(self, text: Sequence[int], sampler: Sampler, max_nodes: int, max_depth: int) -> TokenTree:
        self._store_waiting()
        tree, kinds, waits = TokenTree.empty(), np.empty(0, dtype=np.int64), np.empty(0)
        open_nodes, tokens = np.array([ROOT]), np.array([text[-1]], dtype=np.int64)
        # Scores fall along a path, so a node outside the best has no child among the best: levels suffice.
        for depth in range(1, max_depth + 1):
            level, level_kinds, level_waits = self._level(tree, open_nodes, tokens, depth, sampler, len(text))
            first, tree = len(tree), _joined(tree, level)
            kinds = np.concatenate((kinds, level_kinds))
            waits = np.concatenate((waits, np.empty(0) if level_waits is None else level_waits))
            best = np.argsort(-tree.scores, kind="stable")[:max_nodes]
            open_nodes = best[best >= first]
            tokens = tree.tokens[open_nodes]
            if not len(open_nodes):
                break
        self._last = ConsideredGuesses(tree, kinds, None if sampler.is_greedy else waits)
        return trimmed(tree, max_nodes).from_source(RECYCLING)

    def _level(
        self, tree: TokenTree, parents: IntArray, tokens: IntArray, depth: int, sampler: Sampler, position: int
    ) -> tuple[TokenTree, IntArray, FloatArray | None]:
        """The children of the nodes `parents` with `tokens`: nodes, kinds, waits."""
        successors, probabilities = self.table.successors(tokens)
        row, rank = np.nonzero(successors >= 0)
        successors = successors[row, rank]
        rank_class = np.searchsorted(self.RANKS, rank, side="right") - 1
        probability_class = np.searchsorted(self.PROBABILITIES, probabilities[row, rank], side="right") - 1
        kinds = rank_class * len(self.PROBABILITIES) + probability_class
        depths = np.full(len(row), depth)
        waits = waits_of(successors, depths, sampler, position)
        scores = self._reliability.log_probabilities(kinds, waits)
        if depth > 1:
            scores = scores + tree.scores[parents[row]]
        return TokenTree(successors, parents[row], depths, scores), kinds, waits

    def observe(self, done: TargetPass) -> None:
        if self._last is not None:
            self._reliability.observe(self._last, done.verdict)
        self._last = None
        if not len(done.tree):
            self._waiting.append((done.text[-1], done.logits[0]))
            return
        self._store_waiting()
        tokens = np.concatenate(([done.text[-1]], done.tree.tokens))
        spare = set(range(min(self._num_spare_rows, len(tokens))))
        path = [0, *(node + 1 for node in done.verdict.path)]
        rows = [*sorted(spare.difference(path)), *path]  # rows of the text come last, so they count
        self.table.store(tokens[rows], torch.stack([done.logits[row] for row in rows]))

    def _store_waiting(self) -> None:
        """Store the rows of plain passes, which takes a few percent of a small target's pass, when they are needed."""
        if self._waiting:
            tokens, rows = zip(*self._waiting, strict=True)
            self.table.store(np.array(tokens), torch.stack(rows))
            self._waiting.clear()


def _joined(upper: TokenTree, lower: TokenTree) -> TokenTree:
    """Append the nodes `lower`, whose parents are indices into `upper`, to `upper`."""
    return TokenTree(
        np.concatenate((upper.tokens, lower.tokens)),
        np.concatenate((upper.parents, lower.parents)),
        np.concatenate((upper.depths, lower.depths)),
        np.concatenate((upper.scores, lower.scores)),
    )
