"""How a draft's probabilities compare with what the target chooses, learnt from every verified node.

Kept from request to request. Knows nothing of models, trees or time.
"""

from __future__ import annotations

import numpy as np

from .averages import DecayingRatio, DecayingSum
from .tree import FloatArray

# Sixths, so that exp(v / s) is a power of exp(v / 6) for each s: `child_scores.log_normalisers` multiplies instead.
SIXTHS = (20, 15, 12, 10, 9, 7, 6, 5, 3, 2)
GRID = 6 / np.array(SIXTHS)
UNIT = SIXTHS.index(6)  # where GRID is 1: the draft's own probabilities


class Sharpness:
    """Online maximum likelihood of s over `GRID`, with exponential forgetting.

    s says how far draft and target log-probabilities typically lie apart: a child's log-probability is taken to be log
    softmax(v / s). The prior counts as `PRIOR_NODES` nodes that speak for `prior`, so that the first verified nodes
    already move it.
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
    """Accepted over predicted nodes: what is left to correct when the sharpness has done what it can.

    A draft that is worth nothing stays far too sure of itself at every sharpness of the grid; its trust goes to zero.
    """

    FORGETTING = 0.9
    PRIOR_NODES = 2.0

    def __init__(self) -> None:
        self._ratio = DecayingRatio(self.FORGETTING, self.PRIOR_NODES)

    @property
    def value(self) -> float:
        return min(1.0, self._ratio.value)

    def observe(self, predicted: float, accepted: int) -> None:
        """One tree: the sum of its nodes' probabilities, and how many were accepted."""
        forgetting = self.FORGETTING ** min(1.0, predicted)  # little evidence does not displace much
        self._ratio.observe(accepted, predicted, forgetting)


class Profile:
    """The typical probabilities of a node's children, best first: what one more expanded node may bring."""

    RATE = 0.02  # of each expanded node

    def __init__(self) -> None:
        self._mean = DecayingSum(1 - self.RATE, np.power(0.5, np.arange(1, 17)))

    @property
    def values(self) -> FloatArray:
        return np.asarray(self._mean.value)

    def observe(self, probabilities: FloatArray) -> None:
        """Children's probabilities [R, C] of R expanded nodes."""
        num_rows, num_children = probabilities.shape
        size = max(num_children, len(self.values))
        rate = 1 - (1 - self.RATE) ** num_rows
        new = np.pad(probabilities.mean(0), (0, size - num_children))
        self._mean.value = np.pad(self.values, (0, size - len(self.values)))
        self._mean.add(new * rate, forgetting=1 - rate)


class DraftCalibration:
    """All that is learnt about a draft in one mode of choosing.

    trust: in what the draft says. guesser_trust: in guessers, where the draft was asked about their guess and thinks
    less of it.
    """

    def __init__(self, sharpness: float, *, coupled: bool) -> None:
        """coupled: the draft sees the target's noise; else its probabilities count as they are, at a sharpness of 1."""
        self._coupled = coupled
        self.sharpness, self.trust, self.guesser_trust, self.profile = Sharpness(sharpness), Trust(), Trust(), Profile()

    @property
    def index(self) -> int:
        """Of GRID: the sharpness to judge by."""
        return self.sharpness.index if self._coupled else UNIT

    def observe_choice(self, log_probabilities: FloatArray) -> None:
        """As `Sharpness.observe`, in a mode that has a sharpness."""
        if self._coupled:  # values without the noise would say nothing about values with it
            self.sharpness.observe(log_probabilities)


class Calibration:
    """Of greedy and of sampled requests, each for coupled scoring and for SpecExec's, whose values lack the noise."""

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
