"""What draft rounds and target passes cost, learnt while running. Knows nothing of trees, models or tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .tree import FloatArray, IntArray

Predict = Callable[[int], float]
MAX_ROWS = 4096


class CostCurve:
    """Seconds of one forward as a function of its rows.

    A prior curve times a correction that is learnt: at knots half an octave apart, each observation moves those near it,
    and where none came near the mean correction holds. Never falls with the number of rows.
    """

    KNOTS = np.arange(0, 2 * np.log2(MAX_ROWS) + 1) / 2  # log2 of rows
    RATE = 0.15  # of each observation, at its own place
    OWN_WEIGHT = 0.05  # of the mean correction, against what was observed nearby

    def __init__(self, prior: Predict | None = None) -> None:
        """prior: predicted seconds for a number of rows; without it, as if they all cost the same, and unknown."""
        self._prior = np.array([prior(round(2**x)) if prior else 1.0 for x in self.KNOTS])
        self._has_prior = prior is not None
        self._moved, self._weights = np.zeros_like(self.KNOTS), np.zeros_like(self.KNOTS)
        self._mean, self._mean_weight = 0.0, 0.0
        self._seconds: FloatArray | None = None

    @property
    def is_known(self) -> bool:
        return self._has_prior or self._mean_weight > 0

    def observe(self, rows: int, seconds: float) -> None:
        place = math.log2(min(max(rows, 1), MAX_ROWS))
        ratio = seconds / float(np.interp(place, self.KNOTS, self._prior))
        rates = self.RATE * np.exp(-0.5 * ((self.KNOTS - place) / 0.5) ** 2)
        self._moved += rates * (ratio - self._moved)
        self._weights += rates * (1 - self._weights)
        self._mean += self.RATE * (ratio - self._mean)
        self._mean_weight += self.RATE * (1 - self._mean_weight)
        self._seconds = None

    def weight(self, rows: int) -> float:
        """How much has been observed near this number of rows, from 0 to 1."""
        return float(np.interp(math.log2(min(max(rows, 1), MAX_ROWS)), self.KNOTS, self._weights))

    def seconds(self, rows: IntArray) -> FloatArray:
        """Of forwards with these numbers of rows."""
        if self._seconds is None:
            mean = self._mean / self._mean_weight if self._mean_weight else 1.0
            correction = (self._moved + self.OWN_WEIGHT * mean) / (self._weights + self.OWN_WEIGHT)
            logs = np.log2(np.maximum(np.arange(MAX_ROWS + 1), 1))
            self._seconds = np.maximum.accumulate(np.interp(logs, self.KNOTS, self._prior * correction))
        curve: FloatArray = self._seconds[np.minimum(rows, MAX_ROWS)]
        return curve


class Costs:
    """Of one pair of models; kept from request to request."""

    def __init__(self, target: Predict | None = None, draft: Predict | None = None) -> None:
        self.target, self.draft = CostCurve(target), CostCurve(draft)
