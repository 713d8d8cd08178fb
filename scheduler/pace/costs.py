"""The cost of draft rounds and target passes by number of rows, learnt at run time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from ..trees.token_tree import FloatArray, IntArray
from .averages import MovingAverage
from .scaled_prediction import ScaledPrediction

Predict = Callable[[int], float]
MOST_ROWS, LEAST_S = 4096, 1e-9
_LOGS = np.log2(np.maximum(np.arange(MOST_ROWS + 1), 1))
WIDTHS = np.array([4, 8, 16, 32, 64])  # of draft rounds; so few that each can have a captured graph


class CostCurve:
    """Seconds of one forward as a non-decreasing function of its rows.

    The curve has knots half an octave apart; each observation updates the knots near it. Knots without observations
    follow the prior with the factors of floor and slope that fit the observed knots (`ScaledPrediction`), on the low
    side, so that numbers of rows which may be better are tried. Without a prior, their estimate is optimistic, so that
    better widths are tried: seconds proportional to rows below the observed knots, constant above them. If knots
    violate the order, those farther from the last observation change, because they may be stale.
    """

    KNOTS = np.arange(0, 2 * np.log2(MOST_ROWS) + 1) / 2  # log2 of rows
    RATE = 0.15  # weight of an observation at its own number of rows
    FORGETTING = 0.99  # so that a width not observed for some hundred passes may be tried again
    LITTLE = 0.02  # weight of an inferred value against observed ones
    OPTIMISM = 1.0  # standard deviations below what is expected at numbers of rows that were not observed
    CAUTION = 2.0  # standard deviations below, for what hardly happens
    SURELY = 0.85  # probability

    def __init__(self, prior: Predict | None = None) -> None:
        """prior: predicted seconds for a number of rows."""
        self._prior = self._scaled = None
        if prior is not None:
            self._prior = np.maximum([prior(round(2**x)) for x in self.KNOTS], LEAST_S)
            self._scaled = ScaledPrediction(self.KNOTS, self._prior)
        self._sums, self._weights = np.zeros_like(self.KNOTS), np.zeros_like(self.KNOTS)
        self._last = 0  # knot nearest to the last observation
        self._seconds: FloatArray | None = None  # at the knots
        self.most_rows = 0  # that were observed
        self.is_predicted = self.is_known = prior is not None

    def observe(self, rows: int, seconds: float) -> None:
        place = math.log2(min(max(rows, 1), MOST_ROWS))
        rates, self._last = self._nearness(place)
        if self._scaled is not None:
            self._scaled.observe(place, max(seconds, LEAST_S))
            self._prior = self._scaled.seconds(self.OPTIMISM)
        shape = 1.0 if self._prior is None else self._prior / np.interp(place, self.KNOTS, self._prior)
        self._sums = self.FORGETTING * self._sums + rates * (seconds * shape - self._sums)
        self._weights = self.FORGETTING * self._weights + rates * (1 - self._weights)
        self._seconds, self.is_known, self.most_rows = None, True, max(self.most_rows, min(rows, MOST_ROWS))

    def observed(self) -> list[tuple[int, float]]:
        """Numbers of rows and their seconds, at the knots that were observed more than a little."""
        seen = np.flatnonzero(self._weights > self.RATE / 2)
        return [(round(2 ** self.KNOTS[i]), float(self._sums[i] / self._weights[i])) for i in seen]

    def expect(self, observed: Iterable[tuple[int, float]]) -> None:
        """Correct the prediction by what an earlier process observed, each as one observation. Knots stay unknown."""
        for rows, seconds in observed:
            if self._scaled is not None:
                self._scaled.observe(math.log2(min(rows, MOST_ROWS)), seconds)
                self._prior, self._seconds = self._scaled.seconds(self.OPTIMISM), None

    @classmethod
    @cache
    def _nearness(cls, place: float) -> tuple[FloatArray, int]:
        """How much an observation at `place` counts for each knot, and which knot is the nearest."""
        rates: FloatArray = cls.RATE * np.exp(-0.5 * ((cls.KNOTS - place) / 0.25) ** 2)
        rates[rates < cls.LITTLE * cls.RATE] = 0.0
        return rates, int(np.abs(cls.KNOTS - place).argmin())

    def weight(self, rows: int) -> float:
        """The weight of observations near this number of rows, from 0 to 1."""
        return float(np.interp(math.log2(min(max(rows, 1), MOST_ROWS)), self.KNOTS, self._weights))

    def best_width(self) -> int:
        """The number of rows with the lowest cost per row."""
        return int(WIDTHS[(self.seconds(WIDTHS) / WIDTHS).argmin()])

    def hidden_rows(self, rows: int, longer: float) -> int:
        """Rows that can join `rows` ones, so that the pass very likely takes at most `longer` times as long."""
        if self._scaled is None:
            return MOST_ROWS
        surely = self._scaled.surely(math.log2(min(max(rows, 1), MOST_ROWS)), longer)
        more = np.interp(_LOGS[np.arange(rows, MOST_ROWS + 1)], self.KNOTS, surely) < self.SURELY
        return int(more.argmax()) - 1 if more.any() else MOST_ROWS

    def seconds(self, rows: IntArray) -> FloatArray:
        """Seconds of forwards with these numbers of rows."""
        if self._seconds is None:
            knots = (self._sums + self.LITTLE * self._inferred()) / (self._weights + self.LITTLE)
            last = self._last
            knots[last:] = np.maximum.accumulate(knots[last:])
            knots[last::-1] = np.minimum.accumulate(knots[last::-1])
            self._seconds = knots
        curve: FloatArray = np.interp(_LOGS[np.minimum(rows, MOST_ROWS)], self.KNOTS, self._seconds)
        return curve

    def least_seconds(self, rows: int) -> float:
        """Seconds that a forward with so many rows very likely takes at least."""
        if self._scaled is None:
            return float(self.seconds(np.array([rows]))[0])
        place = math.log2(min(max(rows, 1), MOST_ROWS))
        return float(np.interp(place, self.KNOTS, self._scaled.seconds(self.CAUTION)))

    def _inferred(self) -> FloatArray:
        """Values of all knots, inferred from the observed ones."""
        seen = np.flatnonzero(self._weights > self.LITTLE)
        if not len(seen):
            return np.ones_like(self.KNOTS) if self._prior is None else self._prior
        measured = self._sums[seen] / self._weights[seen]
        if self._prior is not None:
            ratios: FloatArray = np.interp(self.KNOTS, self.KNOTS[seen], measured / self._prior[seen])
            return self._prior * ratios
        right = np.searchsorted(seen, np.arange(len(self.KNOTS)))  # the first observed knot, at or after each
        above, below = np.minimum(right, len(seen) - 1), np.maximum(right - 1, 0)
        fewer = measured[above] * 2 ** np.minimum(self.KNOTS - self.KNOTS[seen[above]], 0.0)
        least: FloatArray = np.where(right > 0, np.maximum(measured[below], fewer), fewer)
        return np.where(right == len(seen), measured[-1], least)


class Costs:
    """The costs of one pair of models, kept from request to request."""

    def __init__(self, target: Predict | None = None, draft: Predict | None = None) -> None:
        """target, draft: first estimates of the seconds of a pass, and of a draft round, by number of rows."""
        self.target, self.draft = CostCurve(target), CostCurve(draft)
        self._overhead = MovingAverage(0.1, initial=0.0)

    @property
    def overhead_s(self) -> float:
        """Seconds of a pass with a tree in addition to drafting and scoring."""
        return self._overhead.value

    def observe_overhead(self, seconds: float) -> None:
        self._overhead.observe(max(0.0, seconds))
