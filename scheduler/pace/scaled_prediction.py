"""Which multiples of predicted costs fit the observed ones: a posterior over the factors of floor and slope."""

from __future__ import annotations

import numpy as np

from ..trees.token_tree import FloatArray


class ScaledPrediction:
    """A predicted curve whose floor (seconds of few rows) and slope (of each further row) may be wrong by factors.

    With floor times a and slope times b, a pass of n rows takes a · predicted(n · b / a) seconds: exact for the maximum
    and for the sum of a constant and a part proportional to rows. The factors are unknown; each observation changes
    their probabilities (a grid, log-normal before, errors of Student's t, so that one slow pass proves little).
    """

    FACTORS = np.arange(-12, 13) / 4  # log2 of each factor
    SPREAD = 1.0  # standard deviation of a factor's log2 before the first observation
    ERROR, TAIL = 0.15, 3.0  # scale of the errors of log2 seconds, and their degrees of freedom
    FORGETTING = 0.98

    def __init__(self, places: FloatArray, predicted: FloatArray) -> None:
        """places [K]: log2 of rows, from 0 on; predicted [K]: seconds there."""
        floor, slope = (each.ravel() for each in np.meshgrid(self.FACTORS, self.FACTORS))
        at = places + (slope - floor)[:, None]
        beyond = np.maximum(at - places[-1], 0.0)  # proportional to rows there
        self._places = places
        self._logs = floor[:, None] + beyond + np.log2(np.interp(at, places, predicted))  # of seconds, each pair's [K]
        self._squares = self._logs**2
        self._before = -0.5 * (floor**2 + slope**2) / self.SPREAD**2
        self._evidence = np.zeros_like(self._before)

    def observe(self, place: float, seconds: float) -> None:
        """Record the seconds of a pass with 2**place rows."""
        errors = (np.log2(seconds) - self._logs_at(place)) / self.ERROR
        likelihood = -0.5 * (self.TAIL + 1) * np.log1p(errors**2 / self.TAIL)
        self._evidence = self.FORGETTING * self._evidence + likelihood

    def _logs_at(self, place: float) -> FloatArray:
        """log2 of the seconds of 2**place rows, for each pair of factors."""
        right = min(max(int(np.searchsorted(self._places, place)), 1), len(self._places) - 1)
        low, high = self._places[right - 1], self._places[right]
        share = (place - low) / (high - low)
        logs: FloatArray = (1 - share) * self._logs[:, right - 1] + share * self._logs[:, right]
        return logs

    def _weights(self) -> FloatArray:
        """The probabilities of the factors."""
        logs = self._before + self._evidence
        weights: FloatArray = np.exp(logs - logs.max())
        weights /= weights.sum()
        return weights

    def surely(self, place: float, longer: float) -> FloatArray:
        """At all places, the probability that a pass takes at most `longer` times as long as one of 2**place rows."""
        most = self._logs_at(place) + np.log2(longer)
        probability: FloatArray = self._weights() @ (self._logs <= most[:, None])
        return probability

    def seconds(self, optimism: float = 0.0) -> FloatArray:
        """Expected seconds at all places, minus `optimism` standard deviations."""
        weights = self._weights()
        mean = weights @ self._logs
        spread = np.sqrt(np.maximum(weights @ self._squares - mean**2, 0.0))
        curve: FloatArray = 2 ** (mean - optimism * spread)
        return curve
