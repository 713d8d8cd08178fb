"""How far a draft is to be believed, learnt from every verified node and kept from request to request.

Knows nothing of models, trees' growth or time.
"""

from __future__ import annotations

import numpy as np

from .tree import FloatArray

# Sixths, so that exp(v / s) is a power of exp(v / 6) for each s: `draft.log_normalisers` multiplies instead.
SIXTHS = (20, 15, 12, 10, 9, 7, 6, 5, 3, 2)
GRID = 6 / np.array(SIXTHS)
UNIT = SIXTHS.index(6)  # where GRID is 1: the draft's own probabilities


class Sharpness:
    """Online maximum likelihood of s over `GRID`, with exponential forgetting.

    s says how far draft and target log-probabilities typically lie apart: the draft believes log softmax(v / s). The
    prior counts as `PRIOR_NODES` nodes that speak for `prior`, so that the first verified nodes already move it.
    """

    FORGETTING = 0.99
    PRIOR_NODES = 4.0

    def __init__(self, prior: float) -> None:
        self._prior = -self.PRIOR_NODES * np.log(GRID / prior) ** 2
        self._log_likelihood = np.zeros_like(GRID)

    @property
    def index(self) -> int:
        """Index of the likeliest s in GRID."""
        return int(np.argmax(self._prior + self._log_likelihood))

    @property
    def value(self) -> float:
        return float(GRID[self.index])

    def observe(self, log_probabilities: FloatArray) -> None:
        """log p_s(the token that the target chose) for each s of GRID, at one verified node."""
        self._log_likelihood = self.FORGETTING * self._log_likelihood + log_probabilities


class Trust:
    """Accepted over predicted nodes: what is left to correct when the sharpness has done what it can.

    A draft that is worth nothing stays far too sure of itself at every sharpness of the grid; its trust goes to zero.
    """

    FORGETTING = 0.9
    PRIOR_NODES = 2.0

    def __init__(self) -> None:
        self._predicted = self._accepted = self.PRIOR_NODES

    @property
    def value(self) -> float:
        return min(1.0, self._accepted / self._predicted)

    def observe(self, predicted: float, accepted: int) -> None:
        """One tree: the sum of its nodes' probabilities, and how many were accepted."""
        forgetting = self.FORGETTING ** min(1.0, predicted)  # little evidence does not displace much
        self._predicted = forgetting * self._predicted + predicted
        self._accepted = forgetting * self._accepted + accepted


class Profile:
    """The typical probabilities of a node's children, best first: what one more expanded node may bring."""

    RATE = 0.02  # of each expanded node

    def __init__(self) -> None:
        self.values: FloatArray = np.power(0.5, np.arange(1, 17))

    def observe(self, probabilities: FloatArray) -> None:
        """Children's probabilities [R, C] of R expanded nodes."""
        num_rows, num_children = probabilities.shape
        mean: FloatArray = probabilities.mean(0)
        size = max(num_children, len(self.values))
        rate = 1 - (1 - self.RATE) ** num_rows
        old, new = (np.pad(values, (0, size - len(values))) for values in (self.values, mean))
        self.values = old * (1 - rate) + new * rate


class Belief:
    """All that is learnt about a draft in one mode of choosing. guests: of others' guesses, where the draft knows better."""

    def __init__(self, sharpness: float) -> None:
        self.sharpness, self.trust, self.guests, self.profile = Sharpness(sharpness), Trust(), Trust(), Profile()


class Calibration:
    """A belief for greedy and one for sampling, each for coupled scoring and for SpecExec's, whose values lack the noise."""

    def __init__(self) -> None:
        self._beliefs = {
            (greedy, coupled): Belief(0.5 if greedy else 0.6) for greedy in (True, False) for coupled in (True, False)
        }

    def belief(self, *, greedy: bool, coupled: bool = True) -> Belief:
        return self._beliefs[greedy, coupled]

    def sharpness(self, *, greedy: bool) -> Sharpness:
        return self.belief(greedy=greedy).sharpness
