"""Stops drafting by Thompson sampling (EESD, 2406.03853), in both of its ways, or with measured costs.

A baseline for `budget.MarginalRate`.
"""

from __future__ import annotations

import numpy as np

from ..trees.token_tree import FloatArray
from .averages import DecayingRatio
from .budget import Controller, DraftingState
from .costs import Costs

THOMPSON_WIDTH = 16  # nodes that a round expands


class ThompsonSampling:
    """Another controller's trees; Thompson sampling decides when drafting stops (EESD, 2406.03853, section 3.3).

    After each round, theta is drawn from Beta(alpha, beta), and a coin with that bias decides whether to continue. Each
    round makes the tree one level deeper. A verdict of r accepted tokens after n rounds adds r to alpha and n - r to
    beta.

    That coin ignores the cost of a round and the draft's confidence. The calibrated variant has `costs` and interprets
    theta as the probability that a level is accepted if the level above it is. Its beta counts the walks that ended
    within the tree; older walks count less. Another round then adds theta ** (n + 1) tokens, and runs while these
    exceed the recent rate * its seconds. `CONFIDENCE` additional counts are divided by the level probability that the
    open nodes imply. Until costs are known, the coin decides with these counts.
    """

    CONFIDENCE = 4.0
    FORGETTING = 0.98

    def __init__(self, inner: Controller, costs: Costs | None = None, *, seed: int = 0) -> None:
        self._inner, self._costs = inner, costs
        self._random = np.random.default_rng(seed)
        self._accepted = self._against = 1.0
        self._num_rounds, self._recent_rate = 0, DecayingRatio(self.FORGETTING)

    @property
    def counts(self) -> tuple[float, float]:
        """alpha and beta: counts for another round and against it."""
        return self._accepted, self._against

    @property
    def limit(self) -> int:
        return self._inner.limit

    def width(self, state: DraftingState) -> int:
        if not len(state.open):
            return 0
        width = min(THOMPSON_WIDTH, len(state.open))
        if len(state.best) and not self._goes_on(state.open, width):  # the root is always expanded
            return 0
        self._num_rounds += 1
        return width

    def _goes_on(self, open_nodes: FloatArray, width: int) -> bool:
        if self._costs is None:
            return bool(self._random.random() < self._bias(open_nodes))
        reached = min(1.0, float(open_nodes[:width].sum()))
        likely = reached ** (1 / max(1, self._num_rounds))
        theta = self._random.beta(
            self._accepted + self.CONFIDENCE * likely, self._against + self.CONFIDENCE * (1 - likely)
        )
        if not self._costs.draft.is_known or not self._recent_rate.value:
            return bool(self._random.random() < theta)
        price = self._recent_rate.value * float(self._costs.draft.seconds(np.array([width]))[0])
        return bool(theta ** (self._num_rounds + 1) > price)

    def _bias(self, open_nodes: FloatArray) -> float:
        """theta, drawn from what is known of acceptance. open_nodes: probabilities of paths, descending."""
        return float(self._random.beta(self._accepted, self._against))

    def size(self, state: DraftingState) -> int:
        return self._inner.size(state)

    def observe(self, num_tokens: int, seconds: float) -> None:
        accepted = min(num_tokens - 1, self._num_rounds)
        rejected = self._num_rounds - accepted
        if self._costs is None:
            self._accepted, self._against = self._accepted + accepted, self._against + rejected
        else:
            self._accepted = max(1.0, self.FORGETTING * self._accepted) + accepted
            self._against = max(1.0, self.FORGETTING * self._against) + (rejected > 0)
        self._recent_rate.observe(num_tokens, seconds)
        self._num_rounds = 0
        self._inner.observe(num_tokens, seconds)
