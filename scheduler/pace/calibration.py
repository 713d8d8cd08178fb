"""Calibration of a draft's probabilities against the target's choices, learnt from every verified node.

It is kept from request to request.
"""

from __future__ import annotations

import numpy as np

from ..trees.token_tree import FloatArray
from .averages import CatchingUp, DecayingRatio, DecayingSum, Retry
from .speculation_switch import SpeculationSwitch

# Sixths, so that exp(v / s) is a power of exp(v / 6) for each s: `child_scores.log_normalisers` multiplies instead.
SIXTHS = (20, 15, 12, 10, 9, 7, 6, 5, 3, 2)
GRID = 6 / np.array(SIXTHS)
UNIT = SIXTHS.index(6)  # GRID[UNIT] is 1: the draft's own probabilities


class Sharpness:
    """Online maximum likelihood of s over `GRID`, with exponential forgetting.

    s measures how far the log-probabilities of draft and target typically differ: the estimate of a child's
    log-probability is log softmax(v / s). The prior counts as `PRIOR_NODES` nodes for `prior`, so the first verified
    nodes already change s.
    """

    FORGETTING = 0.99
    PRIOR_NODES = 4.0

    def __init__(self, prior: float) -> None:
        self._prior = -self.PRIOR_NODES * np.log(GRID / prior) ** 2
        self._log_likelihood = DecayingSum(self.FORGETTING, np.zeros_like(GRID))

    @property
    def index(self) -> int:
        """Index of the likeliest s in GRID."""
        return int(np.argmax(self._prior + self._log_likelihood.value))

    @property
    def value(self) -> float:
        return float(GRID[self.index])

    def observe(self, log_probabilities: FloatArray) -> None:
        """log p_s(the token that the target chose) for each s of GRID, at one verified node."""
        self._log_likelihood.add(log_probabilities)


class Trust:
    """Accepted over predicted nodes: the correction that remains after the sharpness.

    A useless draft is overconfident at every sharpness of the grid; its trust goes to zero.
    """

    FORGETTING = 0.9
    PRIOR_NODES = 2.0

    def __init__(self) -> None:
        self._ratio = DecayingRatio(self.FORGETTING, self.PRIOR_NODES)

    @property
    def value(self) -> float:
        return min(1.0, self._ratio.value)

    def observe(self, predicted: float, accepted: int) -> None:
        """Record one tree: the sum of its nodes' probabilities, and the number of accepted nodes."""
        forgetting = self.FORGETTING ** min(1.0, predicted)  # little evidence replaces little of the past
        self._ratio.observe(accepted, predicted, forgetting)


class Profile:
    """The typical probabilities of a node's children, best first: the possible gain of expanding one more node."""

    RATE = 0.02  # weight of each expanded node

    def __init__(self) -> None:
        self._mean = DecayingSum(1 - self.RATE, np.power(0.5, np.arange(1, 17)))

    @property
    def values(self) -> FloatArray:
        return np.asarray(self._mean.value)

    def observe(self, probabilities: FloatArray) -> None:
        """Record the children's probabilities [R, C] of R expanded nodes."""
        num_rows, num_children = probabilities.shape
        size = max(num_children, len(self.values))
        rate = 1 - (1 - self.RATE) ** num_rows
        new = np.pad(probabilities.mean(0), (0, size - num_children))
        self._mean.value = np.pad(self.values, (0, size - len(self.values)))
        self._mean.add(new * rate, forgetting=1 - rate)


class DraftCalibration:
    """The calibration of a draft in one mode: greedy or sampled, coupled or not.

    trust: in the draft's probabilities. guesser_trust: in guessers' claims for candidates that the draft scores lower.
    retry, catching_up: when to try a draft again that did not pay off. switch: whether to speculate at all.
    """

    def __init__(self, sharpness: float, *, coupled: bool) -> None:
        """coupled: the draft uses the target's noise; otherwise the sharpness is always 1."""
        self._coupled = coupled
        self.sharpness, self.trust, self.guesser_trust, self.profile = Sharpness(sharpness), Trust(), Trust(), Profile()
        self.retry, self.catching_up, self.switch = Retry(), CatchingUp(), SpeculationSwitch()

    @property
    def index(self) -> int:
        """Index in GRID of the sharpness to use."""
        return self.sharpness.index if self._coupled else UNIT

    def observe_choice(self, log_probabilities: FloatArray) -> None:
        """As `Sharpness.observe`; does nothing in a mode without sharpness."""
        if self._coupled:  # values without noise give no information about values with noise
            self.sharpness.observe(log_probabilities)


class Calibration:
    """The calibrations of greedy and sampled requests, each for coupled scoring and for SpecExec's, without noise."""

    def __init__(self) -> None:
        self._modes = {
            (greedy, coupled): DraftCalibration(0.5 if greedy else 0.6, coupled=coupled)
            for greedy in (True, False)
            for coupled in (True, False)
        }

    def of(self, *, greedy: bool, coupled: bool = True) -> DraftCalibration:
        return self._modes[greedy, coupled]

    def sharpness(self, *, greedy: bool) -> Sharpness:
        return self.of(greedy=greedy).sharpness
