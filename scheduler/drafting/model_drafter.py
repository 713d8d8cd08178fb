"""Best-first drafting with a small model (SpecExec, 2406.02532, section 4), with guessers, or with both.

The tree contains the best of all candidates. `draft_rounds` runs the model and `guesser_pool` the guessers. `pricing`
measures passes and asks a `Controller` how long to draft and how many nodes to send; `pace.trials` decides whether to
draft during the pass. After the verdict, `verdict_learning` updates the calibration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ..guessing.lookup import Guesser
from ..pace.controllers import Controller, controller_for
from ..pace.trials import Overlap
from ..params import SpeculationParams
from ..trees.token_tree import CONSTRAINT, ROOT, FloatArray, IntArray, TokenTree
from ..trees.verify import TargetPass
from .candidate_tree import CandidateTree
from .child_scores import ChildScorer
from .draft_rounds import DraftRounds
from .drafter import Drafting, DraftRequest, ExactDrafter, LogitCorrector, NoModel, Rest, TreeModel
from .estimates import RunningEstimates
from .guesser_pool import GuesserPool
from .pricing import Clock, PassPricing
from .score_calls import run_alone
from .verdict_learning import learn_children, learn_trust, learn_trust_unsent

EMPTY_TREE = TokenTree.empty()
NO_NODES: IntArray = np.empty(0, dtype=np.int64)
ROOT_WIDTH = 16  # forced nodes that are scored together with the text


class ModelDrafter(ExactDrafter):
    """Proposes trees of the likeliest candidates of draft and guessers; one drafter per request.

    Each round expands the best open candidates with one forward of the draft. If the target's next token is an expanded
    candidate, the subtree below it stays with its KV entries (`reuse=False` drops it).
    """

    def __init__(
        self,
        model: TreeModel | None,
        request: DraftRequest,
        params: SpeculationParams,
        estimates: RunningEstimates,
        *,
        guessers: Sequence[Guesser] = (),
        corrector: LogitCorrector | None = None,
        controller: Controller | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """model: None drafts with guessers alone; otherwise their trees are merged with the model's.

        corrector: the model's, or None. controller: None selects one by `params`.
        """
        self._params, self._request = params, request
        is_coupled = params.scoring == "coupled"
        self._calibration = estimates.calibration.of(greedy=request.sampler.is_greedy, coupled=is_coupled)
        model = model or NoModel()
        scorer = ChildScorer(model.vocabulary, request.sampler, params.children, coupled=is_coupled)
        self._rounds = DraftRounds(model, request, scorer, self._calibration, corrector)
        self._guessers = GuesserPool(guessers, request.sampler, self._calibration, clock)
        controller = controller or controller_for(params, estimates.costs)
        calibration = self._calibration
        retry, switch = (calibration.retry, calibration.switch) if params.budget is None else (None, None)
        self._pricing = PassPricing(controller, estimates.costs, calibration, clock, retry, switch, request.shared)
        self._draft_costs = estimates.costs.draft
        self._overlap = Overlap(allowed=params.overlap and params.reuse, switch=estimates.overlap_switch)
        self._text: Sequence[int] = ()
        self._may_draft = False
        self._best = self._sent = NO_NODES  # candidates, the best first
        self._is_plain = False  # this pass does not speculate, but for what a constraint forces
        self._forced: list[int] = []

    @property
    def candidates(self) -> CandidateTree:
        """All candidates below the text's last token."""
        return self._rounds.tree

    @property
    def sent(self) -> IntArray:
        """The candidates in the last proposed tree, in the order of its nodes."""
        return self._sent

    @property
    def rest(self) -> Rest | None:
        """None also with a given budget."""
        return self._pricing.rest if self._is_priced else None

    # ------------------------------------------------------------------------------------------------ a tree

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        run_alone(self.prepare(text, max_depth))
        return self.send()

    def prepare(self, text: Sequence[int], max_depth: int) -> Drafting[FloatArray | None]:
        rounds, pricing = self._rounds, self._pricing
        self._best = self._sent = NO_NODES
        self._is_plain = not pricing.speculates
        if self._is_plain:
            pricing.begin_plain()
            self._forced = rounds.forced(min(max_depth, self._params.max_depth, pricing.limit))
            return None
        self._text = text
        rounds.begin(text, min(max_depth, self._params.max_depth))
        num_chain = 1  # rows of the target's pass beside the nodes: the last token; in the first pass, all new tokens
        if pricing.is_first:
            unscored = self._request.num_unscored
            num_chain = rounds.num_unscored if unscored is None else unscored
        pricing.begin(num_chain)
        self._may_draft = rounds.max_depth > 0 and pricing.limit > 0
        if self._may_draft:
            yield from self._draft()
            if not rounds.is_untouched:
                self._best = rounds.best(pricing.limit)
        return rounds.probabilities(self._best) if self._is_priced else None

    def send(self, num_nodes: int | None = None) -> TokenTree:
        if self._is_plain:
            self._overlap.begin(is_on=False)
            return TokenTree.chain(self._forced).from_source(CONSTRAINT) if self._forced else EMPTY_TREE
        rounds, pricing = self._rounds, self._pricing
        if len(self._best):
            self._sent = self._best[
                : pricing.size(rounds.probabilities(self._best)) if num_nodes is None else num_nodes
            ]
        # The first pass indexes all the text, which says nothing about the guessers' worth.
        if self._may_draft and self._is_priced and self._guessers.was_asked and not pricing.is_first:
            guessed = self._sent[rounds.tree.is_claimed(self._sent)]
            num_tokens = float(rounds.probabilities(guessed).sum())
            self._guessers.learn_worth(pricing.worth(num_tokens, len(guessed), len(self._sent)))
        tree, num_expected = EMPTY_TREE, 0.0
        if len(self._sent):
            tree, num_expected = rounds.tree.tree(self._sent), float(rounds.probabilities(self._sent).sum())
        cycle_s = pricing.send(num_expected)
        if self._overlap.is_learning and not pricing.is_first and not pricing.is_shared:
            self._overlap.observe(1 + num_expected, cycle_s)
        self._overlap.begin(is_on=self.wants_overlap)
        return tree

    def _draft(self) -> Drafting[None]:
        """Add what is forced, run the guessers, then the draft."""
        rounds, pricing = self._rounds, self._pricing
        rounds.begin_forced()
        rate = pricing.tokens_per_s if self._is_priced and not pricing.is_catching_up else None
        self._guessers.ask(rounds.tree, self._text, pricing.limit, rounds.max_depth, rate)
        most_read = self._request.most_read
        if rounds.model_depth <= 0 or (most_read is not None and rounds.num_unscored > most_read):
            return
        if rounds.tree.is_rooted:
            rounds.rejudge()
        elif pricing.is_worth_a_round(rounds.num_unscored):
            forced: IntArray | None = None  # after the text: scored together with it
            if self._request.sampler.constraint is not None:
                forced = rounds.open_among(rounds.best(pricing.limit))
                forced = forced[rounds.tree.is_certain(forced)][:ROOT_WIDTH]
            yield from pricing.round(rounds.expand_root(forced))
        else:
            return
        while rounds.room > 0:
            best = rounds.best(pricing.limit)
            nodes = rounds.open_among(best)
            width = min(pricing.width(rounds.probabilities(best), rounds.probabilities(nodes)), rounds.room)
            if width < 1 or not len(nodes):
                break
            yield from pricing.round(rounds.expand(nodes[:width]))

    @property
    def _is_priced(self) -> bool:
        """Whether measured times decide; with a given budget, trees must not depend on them."""
        return self._params.budget is None

    @property
    def wants_overlap(self) -> bool:
        if self._is_plain or not self._rounds.tree.is_rooted:
            return False
        shared = self._request.shared
        return self._overlap.is_allowed and shared.overlaps if shared and shared.is_shared else self._overlap.is_on

    def extend(self, is_over: Callable[[], bool]) -> None:
        """Continue the rounds of `propose` during the pass."""
        run_alone(self.extending(is_over))

    def extending(self, is_over: Callable[[], bool]) -> Drafting[None]:
        return self._rounds.extend(self._draft_costs.best_width(), is_over)

    # ------------------------------------------------------------------------------------------------ a verdict

    def observe(self, done: TargetPass) -> None:
        if self._is_plain:
            # After a pass without speculation: record only what a later trial needs.
            self._guessers.observe(done)
            if self._rounds.is_untouched:
                self._rounds.keep_nothing()
            else:  # of the last tree
                self._rounds.keep(NO_NODES, done.verdict.tokens, reuse=self._params.reuse and not done.verdict.path)
            self._pricing.end_plain()
            return
        self._pricing.judged(len(done.tree), is_usual=not self._overlap.was_slowing)
        self._guessers.observe(done)
        if not self._rounds.is_untouched:  # where nothing pays, passes follow each other as in plain decoding
            tree, verdict = done.tree, done.verdict
            rounds, path = self._rounds, self._sent[verdict.path]
            if len(tree):
                learn_trust(self._calibration.trust, rounds.tree, self._sent, tree, verdict)
            elif rounds.tree.is_rooted:
                learn_trust_unsent(self._calibration.trust, rounds.tree, rounds.best(1), verdict)
            self._guessers.learn_trust(rounds.tree, np.append(ROOT, path), verdict.tokens)
            rounds.correct(self._sent, np.arange(len(self._sent)) + 1, done.states)
            learn_children(self._calibration, rounds.tree, path, verdict.tokens)
            rounds.keep(path, verdict.tokens, reuse=self._params.reuse)
        else:
            self._rounds.keep_nothing()
        self._pricing.end(len(done.verdict.tokens))
