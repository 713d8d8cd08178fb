"""OPT-Tree (2406.17276): the likeliest nodes under the draft in each step, found layer by layer.

As published, it uses the draft's own probabilities. `coupled` also uses the target's noise (see `child_scores`), which
is a stronger baseline than the paper's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from offspec.scheduler.drafting.drafter import SequentialDrafter, TreeModel
from offspec.scheduler.drafting.estimates import RunningEstimates
from offspec.scheduler.drafting.layered_draft import UNEXPANDED, LayeredDraft, subtree
from offspec.scheduler.params import DEFAULT_NODES, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, IntArray, TokenTree
from offspec.scheduler.trees.verify import TargetPass

from ..drafts.base import DraftTask


def opt_tree_drafter(text: TreeModel, task: DraftTask, stats: RunningEstimates) -> OptTreeDrafter:
    """The drafter of one request with a draft model (`drafts.base.MakeDrafter`)."""
    params = task.speculation
    return OptTreeDrafter(text, task.sampler, params, task.final, coupled=params.scoring == "coupled")


class OptTreeDrafter(SequentialDrafter):
    """Proposes the draft's likeliest nodes within the budget (OPT-Tree, 2406.17276, section 3); one per request.

    Each layer adds its best `budget` candidates to a pool. The tree is the best `budget` nodes of the pool by path
    probability; their sum is the expected number of accepted tokens. Drafting ends when a layer adds at most
    `threshold` tokens to that sum. A layer pays off if it adds more tokens than the loop emits in the same time. The
    authors use 0.5 for a resident 7B; for a streamed target, some hundredths are right. The paper keeps `budget`
    candidates per node, this class keeps `children`.
    """

    def __init__(
        self,
        model: TreeModel,
        sampler: Sampler,
        params: SpeculationParams,
        final: Collection[int] = (),
        *,
        threshold: float = 0.02,
        coupled: bool = False,
    ) -> None:
        self._draft = LayeredDraft(model, sampler, params.children, coupled=coupled)
        self._params, self._final = params, sorted(final)
        self._budget = DEFAULT_NODES if params.budget is None else params.budget
        self._threshold = threshold
        self._rows: IntArray = np.empty(0, dtype=np.int64)

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        draft, budget = self._draft, self._budget
        max_depth = min(draft.room(text, max_depth), self._params.max_depth)
        draft.forget()
        if max_depth < 1 or budget < 1:
            return TokenTree.empty()
        none = np.empty(0, dtype=np.int64)
        tokens, parents, depths, scores, rows = none, none, none, np.empty(0), none
        nodes, expected = np.array([ROOT]), 0.0
        candidates = draft.begin(text)
        for depth in range(1, max_depth + 1):
            above = scores[nodes] if depth > 1 else np.zeros(1)
            values = candidates.log_probabilities + above[:, None]
            chosen = np.argsort(-values, axis=None, kind="stable")[:budget]
            row, column = np.unravel_index(chosen[np.isfinite(values.ravel()[chosen])], values.shape)
            first = len(tokens)
            tokens = np.concatenate((tokens, candidates.tokens[row, column]))
            parents = np.concatenate((parents, nodes[row]))
            depths = np.concatenate((depths, np.full(len(row), depth)))
            scores = np.concatenate((scores, values[row, column]))
            rows = np.concatenate((rows, np.full(len(row), UNEXPANDED)))
            # Scores fall along a path and the sort is stable, so these form a tree, parents first.
            best = np.argsort(-scores, kind="stable")[:budget]
            before, expected = expected, float(np.exp(scores[best]).sum())
            # A node outside the best has no child among the best.
            nodes = best[(best >= first) & ~np.isin(tokens[best], self._final)]
            if depth == max_depth or expected - before <= self._threshold or not len(nodes):
                break
            parent_rows = np.where(parents[nodes] == ROOT, ROOT, rows[parents[nodes]])
            rows[nodes], candidates = draft.expand(parent_rows, tokens[nodes])
        self._rows = rows[best]
        return subtree(best, tokens, parents, depths, scores)

    def observe(self, done: TargetPass) -> None:
        if self._draft.layers:
            self._draft.model.keep([int(row) for row in self._rows[done.verdict.path] if row >= 0])
