"""A draft with one forward per level of a tree, for beams and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..trees.sampling import Sampler
from ..trees.token_tree import ROOT, FloatArray, IntArray, TokenTree
from .child_scores import draft_not_finite
from .drafter import TreeModel

UNEXPANDED = -2  # the row of a node without a row; ROOT (-1) is the root's row


@dataclass(frozen=True)
class LayerCandidates:
    """The draft's candidates for the children of the R nodes of one layer, best first.

    tokens [R, C]: -1 for places that the sampling parameters exclude. log_probabilities [R, C]: -inf at these places,
    at most 0. first_row: the row of the layer's first node, ROOT (-1) for the root.
    """

    tokens: IntArray
    log_probabilities: FloatArray
    first_row: int


class LayeredDraft:
    """The draft's part of one tree: one forward per layer.

    An expanded node has a row, its place in the draft's pending region; the root's row is ROOT.
    """

    def __init__(
        self,
        model: TreeModel,
        sampler: Sampler,
        num_children: int,
        *,
        coupled: bool,
        keeps_distributions: bool = False,
    ) -> None:
        """coupled: rank candidates by the target's noise. keeps_distributions: for `log_probabilities`."""
        self.model, self.sampler = model, sampler
        self.num_children = min(num_children, model.vocabulary.num_known(sampler.vocab_size))
        self._has_noise = coupled and not sampler.is_greedy
        self.layers: list[LayerCandidates] = []
        self._keeps_distributions = keeps_distributions
        self._distributions: list[Tensor] = []

    def room(self, text: Sequence[int], max_depth: int) -> int:
        """The maximum depth of a tree below `text`, within the draft's context."""
        return min(max_depth, self.model.max_context - len(text))

    def forget(self) -> None:
        """Drop the current tree."""
        self.layers = []

    def begin(self, text: Sequence[int]) -> LayerCandidates:
        """Start a tree: the candidates for the root's children."""
        self._position, self._num_rows = len(text), 0
        self._paths: list[list[int]] = [[]]
        self._parents = np.empty(0, dtype=np.int64)  # of all rows so far
        self.layers = []
        chain = self.model.vocabulary.text(text[self.model.length :])
        assert chain, "propose was called twice without observe"
        none = np.empty(0, dtype=np.int64)
        return self._add(self.model.score(chain, none, none, none), ROOT)

    def expand(self, parent_rows: IntArray, tokens: IntArray) -> tuple[IntArray, LayerCandidates]:
        """Expand the next layer's nodes [W], each below a row of the last layer: their rows and their candidates."""
        rows = np.arange(self._num_rows, self._num_rows + len(tokens))
        self._parents = np.append(self._parents, parent_rows)
        if self.sampler.needs_history:
            parents = parent_rows - self.layers[-1].first_row
            self._paths = [[*self._paths[parent], int(token)] for parent, token in zip(parents, tokens, strict=True)]
        else:
            self._paths = [[]] * len(tokens)
        depths = np.full(len(tokens), len(self.layers))
        logits = self.model.score([], self.model.vocabulary.inputs(tokens), depths, self._parents)
        self._num_rows += len(tokens)
        return rows, self._add(logits, int(rows[0]))

    def _add(self, logits: Tensor, first_row: int) -> LayerCandidates:
        """The candidates from a layer's logits [R, V]; all children of a layer have the same position."""
        logits = self.model.vocabulary.over_target(logits, self.sampler.vocab_size)
        values = self.sampler.process(logits, self._paths)
        if self._keeps_distributions:
            self._distributions = [*self._distributions[: len(self.layers)], values.log_softmax(-1)]
        if self._has_noise:
            noise = self.sampler.noise(self._position + len(self.layers))
            values = values + noise[: values.shape[1]].float()
        best, tokens = values.topk(self.num_children, dim=-1)
        gains = (best - values.logsumexp(-1, keepdim=True)).double().cpu().numpy()
        if np.isnan(gains).any():
            raise draft_not_finite()
        proposed = tokens.cpu().numpy()
        gains = np.where(self.sampler.are_allowed(proposed, self._paths), gains, -np.inf)
        layer = LayerCandidates(np.where(np.isfinite(gains), proposed, -1), np.minimum(gains, 0.0), first_row)
        self.layers.append(layer)
        return layer

    def log_probabilities(self, row: int) -> Tensor:
        """log q [V] after the node of this row, without noise; ROOT's row is the root's."""
        layer = max(place for place, layer in enumerate(self.layers) if layer.first_row <= row)
        return self._distributions[layer][row - self.layers[layer].first_row]

    def ranks(self, rows: Sequence[int], tokens: Sequence[int]) -> list[int | None]:
        """For the root and then each of `rows`, the rank of the token that followed."""
        candidates = np.concatenate([layer.tokens for layer in self.layers])
        matches = (
            np.flatnonzero(candidates[row + 1] == token) for row, token in zip((ROOT, *rows), tokens, strict=False)
        )
        return [int(rank[0]) if len(rank) else None for rank in matches]


def subtree(kept: IntArray, tokens: IntArray, parents: IntArray, depths: IntArray, scores: FloatArray) -> TokenTree:
    """The nodes `kept`, in that order, as a tree. `kept` contains the parent of each node before the node."""
    return TokenTree(tokens, parents, depths, scores).picked(kept)
