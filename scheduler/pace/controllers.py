"""Controllers decide how long to draft and how many nodes to send: a fixed number, or by the marginal rate.

A controller's input is probabilities and seconds, not tokens or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..params import MAX_NODES, SpeculationParams
from ..trees.token_tree import FloatArray
from .averages import DecayingRatio
from .costs import WIDTHS, Costs

PLAIN_ROWS = 1
FIRST_LONGER = 1.3  # than a plain pass may the first pass of a text take together with its drafting
FIRST_NODES = 32  # of the first tree of all texts, at most
RATE_FORGETTING = 0.95  # of tokens and seconds per pass; defines the recent rate


@dataclass(frozen=True)
class DraftingState:
    """The input of a controller before the next draft round.

    best: probabilities of the best candidates, descending, at most the controller's limit. open: probabilities of those
    among them that can be expanded, descending. profile [C]: typical probabilities of a node's children. num_chain:
    rows of the target's pass in addition to the nodes. spent_s: seconds of drafting for this pass so far. overhead_s:
    seconds of a pass with a tree in addition to drafting and scoring; 0 once a round has run. tokens_per_s: the rate of
    all texts of the pass, if it has several and the rate is known, otherwise 0. num_drafting: texts that share a draft
    round. is_first: no pass of the text has ended; its first token is waited for.
    """

    best: FloatArray
    open: FloatArray
    profile: FloatArray
    num_chain: int
    spent_s: float
    overhead_s: float = 0.0
    tokens_per_s: float = 0.0
    num_drafting: int = 1
    is_first: bool = False


class Controller(Protocol):
    @property
    def limit(self) -> int:
        """The maximum number of nodes to send."""

    def width(self, state: DraftingState) -> int:
        """The number of nodes to expand in the next draft round; 0 ends the drafting."""

    def size(self, state: DraftingState) -> int:
        """The number of the best candidates to send."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record the tokens and seconds of one iteration: drafting, pass and verdict."""


class FixedBudget:
    """Sends a fixed number of nodes, and drafts until no candidate is open."""

    def __init__(self, budget: int, width: int | None = None) -> None:
        """width: nodes per draft round; None is an eighth of the budget, from 16 to 64."""
        self.limit, self._width = budget, width or min(64, max(16, budget // 8))

    def width(self, state: DraftingState) -> int:
        return min(self._width, len(state.open))

    def size(self, state: DraftingState) -> int:
        return self.limit

    def observe(self, num_tokens: int, seconds: float) -> None:
        pass


class MarginalRate:
    """Sends nodes and drafts rounds as long as they add more tokens per second than the recent rate.

    With R tokens/s over the last passes, the worth of a tree of k nodes is 1 + the sum of the k best probabilities
    - R * seconds of its pass. (With R the best ratio, the difference and the ratio of the sums have the same maximum:
    Dinkelbach 1967.) A round runs if its possible gain in worth exceeds R * its seconds. Before the first pass, R is
    the predicted rate of the current tree.
    """

    GROWTH = 2  # of trees, over the most rows of a pass so far: a wrong prediction of further rows costs one pass

    def __init__(self, costs: Costs, limit: int) -> None:
        self._limit, self._costs = limit, costs
        self._recent_rate = DecayingRatio(RATE_FORGETTING)

    @property
    def limit(self) -> int:
        return min(self._limit, max(FIRST_NODES, self.GROWTH * self._costs.target.most_rows))

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._recent_rate.observe(num_tokens, seconds)

    def rate(self, state: DraftingState) -> float:
        """Tokens/s of the last passes; before the first, the predicted rate of the tree or of plain decoding."""
        if state.tokens_per_s:
            return state.tokens_per_s
        if self._recent_rate.value:
            return self._recent_rate.value
        tokens, seconds = self._tokens_and_seconds(state)
        rate = float((tokens / (state.spent_s + seconds)).max())
        curve = self._costs.target
        if self._is_new(PLAIN_ROWS) and not curve.is_predicted:
            return rate
        return max(rate, 1 / float(curve.seconds(np.array([PLAIN_ROWS]))[0]))

    def _is_new(self, rows: int) -> bool:
        """Whether few passes with about this number of rows were measured."""
        return self._costs.target.weight(rows) < 0.25

    def size(self, state: DraftingState) -> int:
        if not len(state.best):
            return 0
        tokens, seconds = self._tokens_and_seconds(state)
        size = int((tokens - self.rate(state) * seconds).argmax())
        return min(size, self._hidden_nodes(state)) if state.is_first else size

    def _hidden_nodes(self, state: DraftingState, more_s: float = 0.0) -> int:
        """The number of nodes that hardly delay the first token, after `more_s` further seconds of drafting."""
        curve = self._costs.target
        longer = FIRST_LONGER - (state.spent_s + more_s) / curve.least_seconds(state.num_chain)
        return curve.hidden_rows(state.num_chain, longer) if longer > 1 else 0

    def width(self, state: DraftingState) -> int:
        if not len(state.open):
            return 0
        if not self._costs.draft.is_known or not self._costs.target.is_known:
            return min(16, len(state.open))
        draft = self._costs.draft
        if state.is_first and not self._hidden_nodes(state, float(draft.seconds(np.array([draft.best_width()]))[0])):
            return 0  # a round would delay the first token
        rate = self.rate(state)
        if not len(state.best) and self._recent_rate.value and self._is_new(state.num_chain):
            plain_s = float(self._costs.target.seconds(np.array([state.num_chain]))[0])
            if 1 / plain_s > 0.5 * rate:  # a pass without a tree could be the best choice, and has hardly been tried
                return 0
        gains = self._gains(state, rate)
        widths = np.array([*WIDTHS[len(gains) > WIDTHS], min(len(gains), WIDTHS[-1])])
        round_s = draft.seconds(widths * state.num_drafting) / state.num_drafting
        worth = gains.cumsum()[widths - 1] - rate * (round_s + state.overhead_s)
        best = int(worth.argmax())
        return int(widths[best]) if worth[best] > 0 else 0

    def _tokens_and_seconds(self, state: DraftingState) -> tuple[FloatArray, FloatArray]:
        """Expected tokens, and seconds of the pass, for the k best candidates, k = 0 to all."""
        tokens = np.concatenate(([1.0], 1 + state.best.cumsum()))
        return tokens, self._costs.target.seconds(np.arange(len(tokens)) + state.num_chain)

    def _gains(self, state: DraftingState, rate: float) -> FloatArray:
        """Tokens that the expansion of each open node may add: its likely children minus the price of their rows."""
        size = self.size(state)
        step = max(8, size // 8)
        now, then = self._costs.target.seconds(np.array([size, size + step]) + state.num_chain)
        price = rate * (then - now) / step
        if size:  # where the curve bends, the new node rather replaces the least likely one that is sent
            price = min(price, state.best[size - 1])
        if len(state.best) >= self.limit:
            price = max(price, state.best[-1])  # the new node replaces the least likely one
        children = state.open[: WIDTHS[-1], None] * state.profile
        gains: FloatArray = np.maximum(children - price, 0.0).sum(-1)
        return gains


def controller_for(params: SpeculationParams, costs: Costs, max_nodes: int = MAX_NODES) -> Controller:
    """By the budget. max_nodes: limit of a tree whose budget is found at run time."""
    return MarginalRate(costs, max_nodes) if params.budget is None else FixedBudget(params.budget, params.width)
