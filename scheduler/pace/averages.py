"""Averages in which older observations count less, and intervals for retrying a choice that did not pay off."""

from __future__ import annotations

from ..trees.token_tree import FloatArray


class DecayingSum:
    """A sum with exponential decay: each addition first multiplies the sum by `forgetting`."""

    def __init__(self, forgetting: float, initial: float | FloatArray = 0.0) -> None:
        self.forgetting = forgetting
        self.value = initial

    def add(self, amount: float | FloatArray, forgetting: float | None = None) -> None:
        """forgetting: the factor for this addition; None is the usual one."""
        self.value = (self.forgetting if forgetting is None else forgetting) * self.value + amount


class DecayingRatio:
    """The ratio of two decaying sums, such as tokens per second: a mean weighted by the denominators.

    initial: both sums before the first observation. If it is 0, the ratio is 0 until the first observation.
    """

    def __init__(self, forgetting: float, initial: float = 0.0) -> None:
        self._numerator, self._denominator = DecayingSum(forgetting, initial), DecayingSum(forgetting, initial)

    @property
    def value(self) -> float:
        numerator, denominator = self._numerator.value, self._denominator.value
        return float(numerator / denominator) if denominator else 0.0

    def observe(self, numerator: float, denominator: float, forgetting: float | None = None) -> None:
        self._numerator.add(numerator, forgetting)
        self._denominator.add(denominator, forgetting)


class MovingAverage:
    """An exponential moving average: each observation moves it by `rate` of the way.

    initial None: the value is 0 until the first observation, and then equals it.
    """

    def __init__(self, rate: float, initial: float | None = None) -> None:
        self.rate = rate
        self.value = initial or 0.0
        self._is_empty = initial is None

    def observe(self, value: float) -> None:
        self.value += (1.0 if self._is_empty else self.rate) * (value - self.value)
        self._is_empty = False


class Retry:
    """When to retry a choice that did not pay off: after `first` occasions, then twice as many, up to `longest`."""

    CLOSE, STRIDE = 4, 16  # occasions

    def __init__(self, first: int = 8, longest: int = 128) -> None:
        self._first, self._longest = first, longest
        self._length, self._passed = first, 0

    @property
    def is_due(self) -> bool:
        return self._passed >= self._length

    @property
    def is_pausing(self) -> bool:
        """Whether it did not pay on the last occasion."""
        return self._passed > 0

    @property
    def wants_look(self) -> bool:
        """Whether to find out on this occasion if it pays by now, which takes time itself.

        On the first CLOSE ones after it did, and then on every STRIDE-th.
        """
        return self._passed <= self.CLOSE or self._passed % self.STRIDE == 0

    def wait(self) -> None:
        """Count one occasion. If a retry was due at it, the next wait is twice as long."""
        if self.is_due:
            self._length, self._passed = min(2 * self._length, self._longest), 0
        self._passed += 1

    def reset(self) -> None:
        self._length, self._passed = self._first, 0

    def is_worth_trying(self, *, pays: bool) -> bool:
        """Whether to make the choice now: if it pays off by the current estimates, or if a retry is due."""
        if pays:
            self.reset()
            return True
        self.wait()
        return self.is_due


class CatchingUp:
    """Whether a draft that rests may read what was written meanwhile, to be tried again.

    What that costs is lost if the draft does not pay. So it may take SHARE of the passes since the draft last ran, of
    this text and of earlier ones.
    """

    SHARE = 0.015

    def __init__(self) -> None:
        self._num_passes = 0  # since the draft last ran

    def rest(self) -> None:
        """Count a pass without the draft."""
        self._num_passes += 1

    def run(self) -> None:
        self._num_passes = 0

    def is_affordable(self, cost: float) -> bool:
        """cost: of the reading, in plain passes."""
        return cost <= self.SHARE * self._num_passes
