"""How long to draft and how many nodes to send: fixed, by the marginal rate, or by Thompson sampling.

A controller sees probabilities and seconds, never tokens or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .costs import WIDTHS, Costs
from .params import MAX_NODES, SpeculationParams
from .tree import FloatArray


@dataclass(frozen=True)
class Prospect:
    """What a drafter knows before its next round.

    best: probabilities of the best candidates, falling, at most the controller's limit. open: of those among them that
    could be expanded, falling. profile [C]: typical probabilities of a node's children. chain: rows that the target's
    pass has beside the nodes. spent_s: the drafting of this pass so far. overhead_s: what a pass with a tree takes
    beside drafting and scoring it; 0 once something has been drafted.
    """

    best: FloatArray
    open: FloatArray
    profile: FloatArray
    chain: int
    spent_s: float
    overhead_s: float = 0.0


class Controller(Protocol):
    @property
    def limit(self) -> int:
        """The most nodes that it would send."""

    def width(self, prospect: Prospect) -> int:
        """How many nodes the next round of the draft is to expand; 0 ends the drafting."""

    def size(self, prospect: Prospect) -> int:
        """How many of the best candidates to send."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """What a whole iteration brought and took."""


class GoingRate:
    """Tokens/s over the last passes; 0 before the first."""

    def __init__(self, forgetting: float = 0.95) -> None:
        self._forgetting = forgetting
        self._tokens = self._seconds = 0.0

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def observe(self, num_tokens: float, seconds: float) -> None:
        self._tokens = self._forgetting * self._tokens + num_tokens
        self._seconds = self._forgetting * self._seconds + seconds


class FixedBudget:
    """Always the same number of nodes, drafted to the end."""

    def __init__(self, budget: int, width: int | None = None) -> None:
        """width: None is an eighth of the budget, from 16 to 64."""
        self.limit, self._width = budget, width or min(64, max(16, budget // 8))

    def width(self, prospect: Prospect) -> int:
        return min(self._width, len(prospect.open))

    def size(self, prospect: Prospect) -> int:
        return self.limit

    def observe(self, num_tokens: int, seconds: float) -> None:
        pass


class MarginalRate:
    """Tokens for seconds: nodes are sent, and rounds drafted, while they earn more than the going rate.

    With R tokens/s over the last passes, a tree of k nodes is worth 1 + sum of the k best probabilities - R * seconds of
    its pass (the ratio of sums is maximal where this difference is, with R the best ratio: Dinkelbach 1967). A round is
    drafted when what it may add to that worth exceeds R * its own seconds. Before there is a rate, the tree at hand
    gives one.
    """

    FIRST_NODES = 64  # where nothing is known of the target's passes yet

    def __init__(self, costs: Costs, limit: int) -> None:
        self._limit, self._costs, self._going = limit, costs, GoingRate()

    @property
    def limit(self) -> int:
        return self._limit if self._costs.target.is_known else min(self._limit, self.FIRST_NODES)

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._going.observe(num_tokens, seconds)

    def rate(self, prospect: Prospect) -> float:
        """Tokens/s: that of the last passes, or what the tree at hand promises."""
        if self._going.value:
            return self._going.value
        tokens, seconds = self._tokens_and_seconds(prospect)
        return float((tokens / (prospect.spent_s + seconds)).max())

    def size(self, prospect: Prospect) -> int:
        tokens, seconds = self._tokens_and_seconds(prospect)
        return int((tokens - self.rate(prospect) * seconds).argmax())

    def width(self, prospect: Prospect) -> int:
        if not len(prospect.open):
            return 0
        if not self._costs.draft.is_known or not self._costs.target.is_known:
            return min(16, len(prospect.open))
        rate = self.rate(prospect)
        if not len(prospect.best) and self._wants_plain(prospect, rate):
            return 0
        gains = self._gains(prospect, rate)
        widths = np.array([*WIDTHS[len(gains) > WIDTHS], min(len(gains), WIDTHS[-1])])
        worth = gains.cumsum()[widths - 1] - rate * (self._costs.draft.seconds(widths) + prospect.overhead_s)
        best = int(worth.argmax())
        return int(widths[best]) if worth[best] > 0 else 0

    def _wants_plain(self, prospect: Prospect, rate: float) -> bool:
        """Whether a pass without a tree might be the best choice, and has hardly been tried."""
        curve = self._costs.target
        plain_s = float(curve.seconds(np.array([prospect.chain]))[0])
        return curve.weight(prospect.chain) < 0.25 and self._going.value > 0 and 1 / plain_s > 0.5 * rate

    def _tokens_and_seconds(self, prospect: Prospect) -> tuple[FloatArray, FloatArray]:
        """Expected tokens, and seconds of the pass, for the k best candidates, k = 0 .. all."""
        tokens = np.concatenate(([1.0], 1 + prospect.best.cumsum()))
        return tokens, self._costs.target.seconds(np.arange(len(tokens)) + prospect.chain)

    def _gains(self, prospect: Prospect, rate: float) -> FloatArray:
        """Tokens that expanding each open node may add: its likely children, less what a node must bring to be sent."""
        size = self.size(prospect)
        step = max(8, size // 8)
        now, then = self._costs.target.seconds(np.array([size, size + step]) + prospect.chain)
        price = rate * (then - now) / step
        if len(prospect.best) >= self.limit:
            price = max(price, prospect.best[-1])  # another one has to go
        children = prospect.open[: WIDTHS[-1], None] * prospect.profile
        gains: FloatArray = np.maximum(children - price, 0.0).sum(-1)
        return gains


THOMPSON_WIDTH = 16


class ThompsonSampling:
    """Another controller's trees, with the drafting stopped by Thompson sampling (EESD, 2406.03853, section 3.3).

    After each round theta is drawn from Beta(alpha, beta) and a coin with that bias decides whether to draft on. A verdict
    of r accepted tokens after n rounds, each of which made the tree a level deeper, adds r to alpha and n - r to beta.

    That coin is blind to what a round costs, and to what the draft thinks of its guesses. The calibrated variant, which is
    given `costs`, acts on what was drawn as if it were so: theta is the chance that a level holds if the one above it did
    (beta counts the walks that ended within the tree, older ones less and less), another round adds theta ** (n + 1) tokens, and
    is drafted while these exceed the going rate * its seconds. `CONFIDENCE` further counts are shared out by the chance of a level
    that the nodes still open imply. Until costs are known it tosses the coin with these counts.
    """

    CONFIDENCE = 4.0
    FORGETTING = 0.98

    def __init__(self, inner: Controller, costs: Costs | None = None, *, seed: int = 0) -> None:
        self._inner, self._costs = inner, costs
        self._random = np.random.default_rng(seed)
        self._accepted = self._against = 1.0
        self._num_rounds, self._going = 0, GoingRate(self.FORGETTING)

    @property
    def limit(self) -> int:
        return self._inner.limit

    def width(self, prospect: Prospect) -> int:
        if not len(prospect.open):
            return 0
        width = min(THOMPSON_WIDTH, len(prospect.open))
        if len(prospect.best) and not self._goes_on(prospect.open, width):  # the root is always asked
            return 0
        self._num_rounds += 1
        return width

    def _goes_on(self, open_nodes: FloatArray, width: int) -> bool:
        if self._costs is None:
            return bool(self._random.random() < self._random.beta(self._accepted, self._against))
        reached = min(1.0, float(open_nodes[:width].sum()))
        likely = reached ** (1 / max(1, self._num_rounds))
        theta = self._random.beta(
            self._accepted + self.CONFIDENCE * likely, self._against + self.CONFIDENCE * (1 - likely)
        )
        if not self._costs.draft.is_known or not self._going.value:
            return bool(self._random.random() < theta)
        price = self._going.value * float(self._costs.draft.seconds(np.array([width]))[0])
        return bool(theta ** (self._num_rounds + 1) > price)

    def size(self, prospect: Prospect) -> int:
        return self._inner.size(prospect)

    def observe(self, num_tokens: int, seconds: float) -> None:
        accepted = min(num_tokens - 1, self._num_rounds)
        rejected = self._num_rounds - accepted
        if self._costs is None:
            self._accepted, self._against = self._accepted + accepted, self._against + rejected
        else:
            self._accepted = max(1.0, self.FORGETTING * self._accepted) + accepted
            self._against = max(1.0, self.FORGETTING * self._against) + (rejected > 0)
        self._going.observe(num_tokens, seconds)
        self._num_rounds = 0
        self._inner.observe(num_tokens, seconds)


def controller_for(params: SpeculationParams, costs: Costs, max_nodes: int = MAX_NODES) -> Controller:
    """What the parameters call for. max_nodes: of a tree where they leave the budget to be found."""
    budget = params.budget
    inner = MarginalRate(costs, max_nodes) if budget is None else FixedBudget(budget, params.width)
    if params.stopping == "default":
        return inner
    return ThompsonSampling(inner, costs if params.stopping == "thompson-calibrated" else None)


class Switch:
    """Whether drafting beside the target's pass pays: both ways are tried, then the better one, the other now and then.

    Where the pass leaves nothing idle it does not. It hides the drafting at best, and at worst takes half of the pass's cores:
    so a machine that computes both on the same cores starts without, and tries late.
    """

    TRIALS = 2
    AGAIN = 32  # cycles after which the other way is tried once
    FORGETTING = 0.9

    def __init__(self, *, shares_cores: bool = False) -> None:
        """shares_cores: draft and target are computed by the same cores."""
        self._starts_on, self._patience = not shares_cores, self.AGAIN if shares_cores else self.TRIALS
        self._going = {on: GoingRate(self.FORGETTING) for on in (True, False)}
        self._cycles = 0

    def is_on(self) -> bool:
        """For the next cycle: a pass, and the drafting of the tree after it."""
        if self._cycles < self._patience + self.TRIALS:
            return self._starts_on == (self._cycles < self._patience)
        better = self._going[True].value > self._going[False].value
        return better != (self._cycles % self.AGAIN == 0)

    def observe(self, was_on: bool, num_tokens: float, seconds: float) -> None:
        """num_tokens: expected of the tree that came out of the cycle."""
        self._going[was_on].observe(num_tokens, seconds)
        self._cycles += 1
