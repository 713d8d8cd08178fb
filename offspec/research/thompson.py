"""Stops drafting by Thompson sampling, in both of EESD's ways (2406.03853, section 3.3).

Baselines for `controllers.MarginalRate`, which also knows what a round costs.
"""

from __future__ import annotations

import numpy as np

from offspec.scheduler.pace.controllers import Controller, DraftingState
from offspec.scheduler.trees.token_tree import FloatArray

THOMPSON_WIDTH = 16  # nodes that a round expands


class ThompsonSampling:
    """Another controller's trees; Thompson sampling decides when drafting stops.

    After each round, theta is drawn from Beta(alpha, beta), and a coin with that bias decides whether to continue. Each
    round makes the tree one level deeper. A verdict of r accepted tokens after n rounds adds r to alpha and n - r to
    beta. The coin ignores the cost of a round.
    """

    def __init__(self, inner: Controller, *, seed: int = 0) -> None:
        self._inner = inner
        self._random = np.random.default_rng(seed)
        self._accepted = self._against = 1.0
        self._num_rounds = 0

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
        if len(state.best) and self._random.random() >= self._bias(state.open):  # the root is always expanded
            return 0
        self._num_rounds += 1
        return min(THOMPSON_WIDTH, len(state.open))

    def _bias(self, open_nodes: FloatArray) -> float:
        """theta, drawn from what is known of acceptance. open_nodes: probabilities of paths, descending."""
        return float(self._random.beta(self._accepted, self._against))

    def size(self, state: DraftingState) -> int:
        return self._inner.size(state)

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._count(min(num_tokens - 1, self._num_rounds))
        self._num_rounds = 0
        self._inner.observe(num_tokens, seconds)

    def _count(self, num_accepted: int) -> None:
        """Counts a verdict. num_accepted: levels of the tree, of as many as there were rounds."""
        self._accepted += num_accepted
        self._against += self._num_rounds - num_accepted


class CalibrationSampling(ThompsonSampling):
    """Thompson sampling that begins with the draft's own confidence (Calibration-TS).

    theta is drawn from the normal posterior of a mean. The prior's mean is the probability that the draft gives to its
    best continuation, the likelihood's is the share of accepted levels so far. So the confidence decides while little
    is known, and always moves the coin somewhat. The paper's constants are not used: `PRIOR_DEVIATION` is the prior's,
    and older levels count less (`FORGETTING`).
    """

    PRIOR_DEVIATION = 0.15
    FORGETTING = 0.98

    def __init__(self, inner: Controller, *, seed: int = 0) -> None:
        super().__init__(inner, seed=seed)
        self._accepted = self._against = 0.5
        self._above = 1.0  # probability of the best path a round before

    def _bias(self, open_nodes: FloatArray) -> float:
        confidence, self._above = float(open_nodes[0]) / self._above, float(open_nodes[0])
        count = self._accepted + self._against
        share = self._accepted / count
        evidence, prior = count / (share * (1 - share)), self.PRIOR_DEVIATION**-2  # precisions
        mean = (prior * min(1.0, confidence) + evidence * share) / (prior + evidence)
        return float(np.clip(self._random.normal(mean, (prior + evidence) ** -0.5), 0.0, 1.0))

    def _count(self, num_accepted: int) -> None:
        self._accepted, self._against = (
            max(0.5, self.FORGETTING**self._num_rounds * counts) for counts in (self._accepted, self._against)
        )
        super()._count(num_accepted)
        self._above = 1.0
