"""How long to draft and how many nodes to send: fixed, or by the marginal rate.

A controller sees probabilities and seconds, never tokens or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .averages import DecayingRatio
from .costs import WIDTHS, Costs
from .tree import FloatArray

RATE_FORGETTING = 0.95  # of tokens and seconds, each pass: what `recent rate` means


@dataclass(frozen=True)
class DraftingState:
    """What a drafter knows before its next round.

    best: probabilities of the best candidates, falling, at most the controller's limit. open: of those among them that
    could be expanded, falling. profile [C]: typical probabilities of a node's children. num_chain: rows that the
    target's pass has beside the nodes. spent_s: the drafting of this pass so far. overhead_s: what a pass with a tree
    takes beside drafting and scoring it; 0 once something has been drafted.
    """

    best: FloatArray
    open: FloatArray
    profile: FloatArray
    num_chain: int
    spent_s: float
    overhead_s: float = 0.0


class Controller(Protocol):
    @property
    def limit(self) -> int:
        """The most nodes that it would send."""

    def width(self, state: DraftingState) -> int:
        """How many nodes the next round of the draft is to expand; 0 ends the drafting."""

    def size(self, state: DraftingState) -> int:
        """How many of the best candidates to send."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """What a whole iteration brought and took."""


class FixedBudget:
    """Always the same number of nodes, drafted to the end."""

    def __init__(self, budget: int, width: int | None = None) -> None:
        """width: None is an eighth of the budget, from 16 to 64."""
        self.limit, self._width = budget, width or min(64, max(16, budget // 8))

    def width(self, state: DraftingState) -> int:
        return min(self._width, len(state.open))

    def size(self, state: DraftingState) -> int:
        return self.limit

    def observe(self, num_tokens: int, seconds: float) -> None:
        pass


class MarginalRate:
    """Tokens for seconds: nodes are sent, and rounds drafted, while they earn more than the recent rate.

    With R tokens/s over the last passes, a tree of k nodes is worth 1 + sum of the k best probabilities - R * seconds
    of its pass (the ratio of sums is maximal where this difference is, with R the best ratio: Dinkelbach 1967). A round
    is drafted when what it may add to that worth exceeds R * its own seconds. Before there is a rate, the tree at hand
    gives one.
    """

    FIRST_NODES = 64  # where nothing is known of the target's passes yet

    def __init__(self, costs: Costs, limit: int) -> None:
        self._limit, self._costs = limit, costs
        self._recent_rate = DecayingRatio(RATE_FORGETTING)

    @property
    def limit(self) -> int:
        return self._limit if self._costs.target.is_known else min(self._limit, self.FIRST_NODES)

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._recent_rate.observe(num_tokens, seconds)

    def rate(self, state: DraftingState) -> float:
        """Tokens/s: that of the last passes, or what the tree at hand promises."""
        if self._recent_rate.value:
            return self._recent_rate.value
        tokens, seconds = self._tokens_and_seconds(state)
        return float((tokens / (state.spent_s + seconds)).max())

    def size(self, state: DraftingState) -> int:
        tokens, seconds = self._tokens_and_seconds(state)
        return int((tokens - self.rate(state) * seconds).argmax())

    def width(self, state: DraftingState) -> int:
        if not len(state.open):
            return 0
        if not self._costs.draft.is_known or not self._costs.target.is_known:
            return min(16, len(state.open))
        rate = self.rate(state)
        if not len(state.best) and self._wants_plain(state, rate):
            return 0
        gains = self._gains(state, rate)
        widths = np.array([*WIDTHS[len(gains) > WIDTHS], min(len(gains), WIDTHS[-1])])
        worth = gains.cumsum()[widths - 1] - rate * (self._costs.draft.seconds(widths) + state.overhead_s)
        best = int(worth.argmax())
        return int(widths[best]) if worth[best] > 0 else 0

    def _wants_plain(self, state: DraftingState, rate: float) -> bool:
        """Whether a pass without a tree might be the best choice, and has hardly been tried."""
        curve = self._costs.target
        plain_s = float(curve.seconds(np.array([state.num_chain]))[0])
        return curve.weight(state.num_chain) < 0.25 and self._recent_rate.value > 0 and 1 / plain_s > 0.5 * rate

    def _tokens_and_seconds(self, state: DraftingState) -> tuple[FloatArray, FloatArray]:
        """Expected tokens, and seconds of the pass, for the k best candidates, k = 0 .. all."""
        tokens = np.concatenate(([1.0], 1 + state.best.cumsum()))
        return tokens, self._costs.target.seconds(np.arange(len(tokens)) + state.num_chain)

    def _gains(self, state: DraftingState, rate: float) -> FloatArray:
        """Tokens that expanding each open node may add: its likely children, less what a node must bring to be sent."""
        size = self.size(state)
        step = max(8, size // 8)
        now, then = self._costs.target.seconds(np.array([size, size + step]) + state.num_chain)
        price = rate * (then - now) / step
        if len(state.best) >= self.limit:
            price = max(price, state.best[-1])  # another one has to go
        children = state.open[: WIDTHS[-1], None] * state.profile
        gains: FloatArray = np.maximum(children - price, 0.0).sum(-1)
        return gains
