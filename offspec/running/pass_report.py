"""What a pass shows to people: where its tokens come from, and its tree. Used as a request's observer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import Verdict

from .steps import Step

MOST_NODES = 64  # shown of a tree: those accepted, and the likeliest others
BY_TARGET = "target"  # the source of a token that was not in the tree


@dataclass(frozen=True)
class PassReport:
    """token_sources: of the step's tokens, one of SOURCES or BY_TARGET each. num_nodes: of the whole tree.

    Of each node shown, parents first: its token, its parent's place here (-1 is the text's end), the guessed
    probability that it follows its parent, and one of SOURCES. accepted: the places of the accepted nodes, downwards.
    """

    token_sources: Sequence[str]
    num_nodes: int
    tokens: Sequence[int]
    parents: Sequence[int]
    probabilities: Sequence[float]
    sources: Sequence[str]
    accepted: Sequence[int]


class LastPass:
    """An observer of one request's passes, which keeps the last one."""

    def __init__(self) -> None:
        self._tree, self._verdict = TokenTree.empty(), Verdict([], [])

    def __call__(self, tree: TokenTree, verdict: Verdict) -> None:
        self._tree, self._verdict = tree, verdict

    def report(self, step: Step) -> PassReport:
        """The report of the pass that `step` is the result of."""
        tree, path = self._tree, self._verdict.path[: step.num_accepted]
        # The accepted nodes and the likeliest others, ascending: parents first, as scores do not rise along a path.
        best = np.argsort(-tree.scores, kind="stable")
        others = best[~np.isin(best, path)][: max(0, MOST_NODES - len(path))]
        kept = np.sort(np.concatenate((np.array(path, dtype=np.int64), others)))
        shown = tree.picked(kept)
        below_root = np.append(shown.scores, 0.0)[shown.parents]  # the last entry is for parent ROOT
        probabilities = np.exp(np.minimum(shown.scores - below_root, 0.0)).round(4)
        sources = [*(tree.source(node) for node in path), BY_TARGET]
        return PassReport(
            sources[: len(step.token_ids)],
            len(tree),
            shown.tokens.tolist(),
            shown.parents.tolist(),
            probabilities.tolist(),
            [shown.source(node) for node in range(len(shown))],
            np.searchsorted(kept, path).tolist(),
        )
