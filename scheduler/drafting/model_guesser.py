"""A smaller draft that guesses ahead of the draft: before each round it continues the draft's best paths.

Staged speculation (2308.04623) and cascade drafting (2312.11462) let a smaller model draft for the draft: one round of
the draft then scores several levels. Minions (2402.15678) merges the trees of several drafts by how far each is
trusted: here a candidate keeps its best score, and each smaller draft has a sharpness and a trust of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..pace.averages import MovingAverage, Retry
from ..pace.calibration import Trust
from ..params import SpeculationParams
from ..trees.token_tree import ROOT, IntArray, TokenTree
from ..trees.verify import TargetPass
from .candidate_tree import CandidateTree
from .child_scores import ChildScorer
from .draft_rounds import DraftRounds
from .drafter import DraftRequest, LogitCorrector, TreeModel
from .learnt import RunningEstimates
from .pricing import Clock
from .score_calls import run_alone
from .verdict_learning import learn_children

MOST_NODES = 64  # of the draft's best candidates that are continued, and of the guesses
WIDTH = 32  # nodes per round
MOST_ROUNDS = 8  # before a round of the draft
ROUNDS = 3  # where trees must not depend on measured times
BELOW_ANY = -2  # the parent of no node


def best_number(chance: float, round_s: float, own_s: float) -> int:
    """How many rounds of a smaller draft before one of the draft bring the most levels per second (2312.11462).

    chance: that one more level holds. round_s, own_s: of the draft's round, and of the smaller one's.
    """
    numbers = np.arange(MOST_ROUNDS + 1)
    levels = np.cumsum(chance**numbers)
    return int((levels / (round_s + numbers * own_s)).argmax())


class ModelGuesser:
    """Continues another draft's candidates; one per request. Its own scored nodes live on from pass to pass.

    trust: in its guesses for candidates that the draft scores lower, kept from request to request.
    """

    def __init__(
        self,
        model: TreeModel,
        request: DraftRequest,
        params: SpeculationParams,
        learnt: RunningEstimates,
        corrector: LogitCorrector | None = None,
    ) -> None:
        """learnt: about this model alone. corrector: the model's, or None."""
        is_coupled = params.scoring == "coupled"
        self._calibration = learnt.calibration.of(greedy=request.sampler.is_greedy, coupled=is_coupled)
        scorer = ChildScorer(model.vocabulary, request.sampler, params.children, coupled=is_coupled)
        self._rounds = DraftRounds(model, request, scorer, self._calibration, corrector)
        self._reuse = params.reuse
        self.num_rounds = 0  # so far, without those that read the text

    @property
    def trust(self) -> Trust:
        return self._calibration.guesser_trust

    @property
    def chance(self) -> float:
        """That its likeliest continuation holds."""
        return min(1.0, float(self.trust.value * self._calibration.profile.values[0]))

    @property
    def has_read(self) -> bool:
        """Whether the text has been read, so that only candidates are left to score."""
        return self._rounds.tree.is_rooted

    def begin(self, text: Sequence[int], max_depth: int) -> None:
        """Start with continuations of `text`, at most max_depth deep."""
        self._rounds.begin(text, max_depth)
        if self._rounds.tree.is_rooted:
            self._rounds.rejudge()

    def continued(self, tree: CandidateTree, nodes: IntArray, num_rounds: int) -> TokenTree:
        """Guesses below `nodes`, the best candidates of the draft's tree, after so many rounds.

        Scores are log-probabilities; those of the draft's own candidates are -inf, because nothing is said of them.
        """
        rounds = self._rounds
        if rounds.model_depth < 1:
            return TokenTree.empty()
        if not rounds.tree.is_rooted:
            run_alone(rounds.expand_root())
        rounds.follow(tree, nodes)
        for _ in range(num_rounds):
            best = rounds.open_among(rounds.best(MOST_NODES))[: min(WIDTH, rounds.room)]
            if not len(best):
                break
            run_alone(rounds.expand(best))
            self.num_rounds += 1
        best_nodes = rounds.best(MOST_NODES)
        guesses = rounds.tree.tree(best_nodes)
        return replace(guesses, scores=np.where(rounds.tree.is_fixed(best_nodes), -np.inf, guesses.scores))

    def observe(self, done: TargetPass) -> None:
        """Learn from the verdict, and keep what is left."""
        rounds, tokens = self._rounds, done.verdict.tokens
        if rounds.is_untouched:
            rounds.keep_nothing()
            return
        path = self._path(tokens)[: len(tokens) - 1]
        rounds.correct(*self._shared_with(done.tree), states=done.states)
        learn_children(self._calibration, rounds.tree, path, tokens)
        rounds.keep(path, tokens, reuse=self._reuse and len(path) == len(tokens) - 1)

    def _path(self, tokens: Sequence[int]) -> IntArray:
        """The scored candidates on the target's text, and the first one that is not."""
        tree, node, path = self._rounds.tree, ROOT, list[int]()
        for token in tokens:
            child = tree.child(node, token)
            if child is None:
                break
            node = child
            path.append(node)
            if tree.nodes["row"][node] < 0:
                break
        return np.array(path, dtype=np.int64)

    def _shared_with(self, other: TokenTree) -> tuple[IntArray, IntArray]:
        """Own scored candidates that are also in the target's tree, and their rows in its pass."""
        tree, node_of = self._rounds.tree, {ROOT: ROOT}  # nodes of the other tree → own ones
        scored = np.flatnonzero(tree.nodes["row"] >= 0)
        picked = tree.nodes[scored]
        pairs = zip(picked["parent"].tolist(), picked["token"].tolist(), strict=True)
        nodes = dict(zip(pairs, scored.tolist(), strict=True))
        for node, (parent, token) in enumerate(zip(other.parents.tolist(), other.tokens.tolist(), strict=True)):
            if (same := nodes.get((node_of.get(parent, BELOW_ANY), token))) is not None:
                node_of[node] = same
        del node_of[ROOT]
        return np.array([*node_of.values()], dtype=np.int64), np.array(list(node_of), dtype=np.int64) + 1


class SmallerDrafts:
    """The smaller drafts of one request: whom to ask before a round of the draft, and for how many rounds."""

    RATE = 0.1  # weight of each measured round

    def __init__(self, guessers: Sequence[ModelGuesser], clock: Clock) -> None:
        self._guessers = [(guesser, MovingAverage(self.RATE), Retry()) for guesser in guessers]
        self._clock = clock

    def __len__(self) -> int:
        return len(self._guessers)

    @property
    def trusts(self) -> list[Trust]:
        return [guesser.trust for guesser, *_ in self._guessers]

    def begin(self, text: Sequence[int], max_depth: int) -> None:
        for guesser, *_ in self._guessers:
            guesser.begin(text, max_depth)

    def guess(self, tree: CandidateTree, nodes: IntArray, round_s: float | None) -> list[TokenTree]:
        """Guesses of each below `nodes`, the best candidates. round_s: of the draft's next round; None: not priced."""
        guesses = list[TokenTree]()
        for guesser, seconds, retry in self._guessers:
            number = ROUNDS
            if round_s is not None and seconds.value:
                number = best_number(guesser.chance, round_s, seconds.value)
                number = max(number, int(retry.is_worth_trying(pays=number > 0)))
            if not number:
                guesses.append(TokenTree.empty())
                continue
            began, before, has_read = self._clock(), guesser.num_rounds, guesser.has_read
            guesses.append(guesser.continued(tree, nodes[:MOST_NODES], number))
            if has_read and guesser.num_rounds > before:
                seconds.observe((self._clock() - began) / (guesser.num_rounds - before))
        return guesses

    def observe(self, done: TargetPass) -> None:
        for guesser, *_ in self._guessers:
            guesser.observe(done)
