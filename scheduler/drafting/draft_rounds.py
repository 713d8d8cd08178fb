"""Rounds of the draft: its scored nodes, the scores of their children, and its KV entries for them.

Best-first growth in batches (SpecExec, 2406.02532, section 4). The caller decides how many rounds to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ..pace.calibration import DraftCalibration
from ..pace.costs import WIDTHS
from ..trees.token_tree import ROOT, FloatArray, IntArray
from ..trees.verify import TargetStates
from .candidate_tree import CandidateTree, ChildScores
from .child_scores import ChildScorer
from .drafter import Drafting, DraftRequest, LogitCorrector, ScoreCall, TreeModel

MAX_CORRECTED = int(WIDTHS[-1])  # the likeliest nodes, whose logits are corrected after a pass
MAX_FORCED = 64  # the likeliest nodes, below which forced tokens are looked for


class DraftRounds:
    """A candidate tree below the text's last token, and the draft that scores its nodes.

    If the target's next token is an expanded node, the subtree below it stays, with its KV entries.
    """

    def __init__(
        self,
        model: TreeModel,
        request: DraftRequest,
        scorer: ChildScorer,
        calibration: DraftCalibration,
        corrector: LogitCorrector | None = None,
    ) -> None:
        """scorer, calibration, corrector: of the model; None for a model without a corrector."""
        self._model = model
        self._sampler, self._final, self._most_rows = request.sampler, request.final, request.most_rows
        self._scorer, self._calibration, self._corrector = scorer, calibration, corrector
        self._text: Sequence[int] = ()
        self._position = 0  # of the root's children
        self.tree = CandidateTree(self._final)
        self._constraint = request.sampler.constraint
        self._asked: set[int] = set()  # nodes below which forced tokens were looked for
        self.max_depth = self.model_depth = 0

    def begin(self, text: Sequence[int], max_depth: int) -> None:
        """Start a tree of continuations of `text`, at most max_depth deep."""
        self._text, self._position, self.max_depth, self._asked = text, len(text), max_depth, set()
        # The draft predicts positions beyond its context badly, or not at all.
        self.model_depth = min(max_depth, self._model.max_context - len(text))

    @property
    def is_untouched(self) -> bool:
        """Whether the tree is empty: no candidates, and no row that the draft has scored."""
        return not len(self.tree.nodes) and not self.tree.is_rooted

    @property
    def num_unscored(self) -> int:
        """Tokens of the text that the draft has not scored yet."""
        return len(self._text) - self._model.length

    @property
    def room(self) -> int:
        """The number of nodes that can still be expanded."""
        return self._most_rows - self.tree.num_expanded

    def best(self, count: int) -> IntArray:
        """The best `count` candidates, best first, with what the constraint forces below the likeliest of them."""
        nodes = self.tree.best(count, self.max_depth)
        if self._add_forced(nodes[:MAX_FORCED]):
            nodes = self.tree.best(count, self.max_depth)
        return nodes

    def open_among(self, nodes: IntArray) -> IntArray:
        """Those of `nodes` that the draft can expand, in the same order."""
        return self.tree.open_among(nodes, self.model_depth)

    def probabilities(self, nodes: IntArray) -> FloatArray:
        """The acceptance probabilities of these nodes."""
        return self.tree.probabilities(nodes, self._calibration.trust.value)

    # ------------------------------------------------------------------------------------------------ growing

    def expand_root(self, nodes: IntArray | None = None) -> Drafting[int]:
        """Score the text's tokens that are new to the draft, and add the root's children; returns the number of rows.

        nodes: forced candidates to expand in the same round.
        """
        chain = self._model.vocabulary.text(self._text[self._model.length :])
        return self._expand(chain, np.empty(0, dtype=np.int64) if nodes is None else nodes)

    def expand(self, nodes: IntArray) -> Drafting[int]:
        """One round: score these nodes and add their children; returns the node count."""
        return self._expand([], nodes)

    def _expand(self, chain: Sequence[int], nodes: IntArray) -> Drafting[int]:
        parents = self.tree.expand(nodes)
        picked = self.tree.nodes[nodes]
        tokens = self._model.vocabulary.inputs(picked["token"])  # guessers may know more tokens than the draft
        logits = yield ScoreCall(self._model, chain, tokens, picked["depth"], parents)
        scored = np.append(np.array([ROOT]), nodes) if chain else nodes
        self.tree.add(scored, self._children(scored, logits), self._calibration.index)
        return len(chain) + len(nodes)

    def extend(self, width: int, is_over: Callable[[], bool]) -> Drafting[None]:
        """Run rounds of `width` nodes until `is_over`. They expand the candidates that are likeliest to be kept."""
        tree = self.tree
        while not is_over() and tree.is_rooted and width <= self.room:
            nodes = self.open_among(tree.best(tree.num_expanded + 8 * width, self.model_depth))
            if not len(nodes):
                break
            yield from self.expand(nodes[:width])

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens that the constraint forces after the text."""
        return [] if self._constraint is None else self._constraint.forced([], most)

    def begin_forced(self) -> None:
        """Add the tokens that the constraint forces below the root."""
        self._add_forced(np.empty(0, dtype=np.int64))

    def _add_forced(self, nodes: IntArray) -> bool:
        """Add the tokens that the constraint forces below the root and below `nodes`; whether there were any."""
        if self._constraint is None or self._constraint.is_idle(self.tree.tokens_above(nodes)):
            return False
        is_any = False
        for node in (ROOT, *nodes.tolist()):
            if node in self._asked:
                continue
            self._asked.add(node)
            path = [] if node == ROOT else self.tree.path_tokens(np.array([node]))[0]
            if tokens := self._constraint.forced(path, self.max_depth - len(path)):
                self._asked.update(self.tree.add_forced(node, tokens, self._calibration.index))
                is_any = True
        return is_any

    def rejudge(self) -> None:
        """Rescore the kept part of the last tree, which was drafted before the last verdict."""
        tree = self.tree
        if self._corrector is None:
            tree.rescore(self._calibration.index)
            return
        expanded = tree.expanded(MAX_CORRECTED - 1)
        nodes = np.append(ROOT, expanded)
        logits = self._corrector.corrected(np.append(ROOT, tree.nodes["row"][expanded]))
        tree.revise(nodes, self._children(nodes, logits), self._calibration.index)

    def _children(self, nodes: IntArray, logits: Tensor) -> ChildScores:
        """Scores of the children of `nodes` [R] (ROOT first, if it is among them), from draft logits [R, C]."""
        needs_paths = self._sampler.needs_paths(self.tree.tokens_above(nodes))
        paths = self.tree.path_tokens(nodes) if needs_paths else [[]] * len(nodes)
        return self._scorer.score(logits, paths, self._position + self.tree.depths(nodes))

    # ------------------------------------------------------------------------------------------------ a verdict

    def correct(self, sent: IntArray, places: IntArray, states: TargetStates) -> None:
        """Give the corrector the target's states at the root and at those of the nodes `sent` that the draft scored.

        states: of the target's pass; row 0 is the root's. places: the rows of `sent`.
        """
        if self._corrector is None or not self.tree.is_rooted:
            return
        rows: IntArray = self.tree.nodes["row"][sent]
        scored = np.flatnonzero(rows >= 0)
        others = np.append(np.array([0]), places[scored])
        self._corrector.observe(np.append(np.array([ROOT]), rows[scored]), others, states)

    def keep_nothing(self) -> None:
        """The pass is over, and nothing was drafted: a model that shares the target's KV entries takes the new ones."""
        self._model.keep([])

    def keep(self, path: IntArray, tokens: Sequence[int], *, reuse: bool) -> None:
        """Commit the accepted nodes `path`; with `reuse`, keep the subtree below the last of `tokens`, the new root."""
        tree = self.tree
        rows = tree.rows(path)
        if reuse and len(rows) == len(path):
            last = tree.child(int(path[-1]) if len(path) else ROOT, tokens[-1])
            if last is not None and (node := tree.nodes[last])["row"] >= 0 and node["score"] > -np.inf:
                rows.append(int(node["row"]))
                self._model.keep(rows, tree.reroot(last).tolist())
                return
        self._model.keep(rows)
        self.tree = CandidateTree(self._final)
