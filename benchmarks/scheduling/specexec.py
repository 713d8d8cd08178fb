"""SpecExec's drafting with the settings of its authors' code (2406.02532; `specdec/specexec.py` of its repository).

offspec's `--draft-scoring specexec` has its scoring, but none of these settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from offspec.scheduler.drafting.drafter import SequentialDrafter, TreeModel
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, IntArray, TokenTree, trimmed
from offspec.scheduler.trees.verify import TargetPass

UNEXPANDED = -2  # the row of a node without a row; ROOT (-1) is the root's row


@dataclass(frozen=True)
class SpecExecSettings:
    """The defaults are those of the authors' code.

    budget: nodes sent. max_width: nodes that a draft round expands (`max_n_beams`). max_depth: rounds (`max_beam_len`).
    children: candidates per expanded node (`max_branch_width`). decay: factor of a node's probability per level.
    least_log_probability: of a path; less likely candidates are dropped. draft_temperature: of the draft's logits.
    """

    budget: int
    max_width: int = 128
    max_depth: int = 32
    children: int = 16
    decay: float = 0.95
    least_log_probability: float = -math.inf
    draft_temperature: float = 1.0


class SpecExecDrafter(SequentialDrafter):
    """Proposes the likeliest nodes by the draft's cumulative probability; one per request."""

    def __init__(self, model: TreeModel, sampler: Sampler, settings: SpecExecSettings) -> None:
        self._model, self._sampler, self._settings = model, sampler, settings
        self._rows: dict[int, int] = {}  # of the last proposed tree: node → row of the draft's pending region

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        settings, max_depth = self._settings, min(max_depth, self._settings.max_depth)
        self._rows = {}
        if max_depth < 1 or settings.budget < 1:
            return TokenTree.empty()
        none = np.empty(0, dtype=np.int64)
        tree, rows, above = TokenTree.empty(), none, none  # above: the parents of all expanded nodes
        chain, chosen = self._model.vocabulary.text(text[self._model.length :]), np.array([ROOT])
        for level in range(max_depth):
            below = self._children(tree, chosen, chain if level == 0 else [], above)
            if len(tree) >= settings.budget and not (below.scores > np.sort(tree.scores)[-settings.budget]).any():
                break
            tree, rows = _joined(tree, below), np.append(rows, np.full(len(below), UNEXPANDED))
            best = np.argsort(-tree.scores, kind="stable")[: settings.budget]
            chosen = best[(rows[best] == UNEXPANDED) & (tree.depths[best] < max_depth)][: settings.max_width]
            if level == max_depth - 1 or not len(chosen):
                break
            above = np.append(above, np.append(rows, ROOT)[tree.parents[chosen]])
            rows[chosen] = np.arange(len(above) - len(chosen), len(above))
        kept = np.argsort(-tree.scores, kind="stable")[: settings.budget]
        self._rows = {place: int(rows[node]) for place, node in enumerate(kept) if rows[node] != UNEXPANDED}
        return trimmed(tree, settings.budget)

    def _children(self, tree: TokenTree, parents: IntArray, chain: Sequence[int], expanded: IntArray) -> TokenTree:
        """The candidates below `parents` (nodes, or the root alone), after one forward of the draft."""
        settings, vocabulary = self._settings, self._model.vocabulary
        nodes = parents[parents != ROOT]
        inputs = vocabulary.inputs(tree.tokens[nodes])
        logits = self._model.score(chain, inputs, tree.depths[nodes], expanded)
        logits = vocabulary.over_target(logits, self._sampler.vocab_size).double() / settings.draft_temperature
        found = torch.log_softmax(logits, -1).topk(min(settings.children, logits.shape[-1]))
        above, depths = (tree.scores[nodes], tree.depths[nodes]) if len(nodes) else (np.zeros(1), np.zeros(1, np.int64))
        scores = above[:, None] + math.log(settings.decay) + found.values.cpu().numpy()
        row, column = np.nonzero((scores >= settings.least_log_probability) & np.isfinite(scores))
        return TokenTree(found.indices.cpu().numpy()[row, column], parents[row], depths[row] + 1, scores[row, column])

    def observe(self, done: TargetPass) -> None:
        self._model.keep([self._rows[node] for node in done.verdict.path if node in self._rows])


def _joined(upper: TokenTree, lower: TokenTree) -> TokenTree:
    """The nodes `lower`, whose parents are nodes of `upper`, after those of `upper`."""
    return TokenTree(
        np.concatenate((upper.tokens, lower.tokens)),
        np.concatenate((upper.parents, lower.parents)),
        np.concatenate((upper.depths, lower.depths)),
        np.concatenate((upper.scores, lower.scores)),
    )
