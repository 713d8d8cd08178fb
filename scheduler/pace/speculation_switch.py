"""Decides whether to speculate at all: compares whole iterations with plain passes measured in the same request.

A drafter prices its rounds, guesses and rows one by one. What it cannot price that way (sorting, trees, the walk,
learning) is seen here, where an iteration counts with all its seconds. Knows neither tokens nor models.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from .averages import DecayingRatio, DecayingSum, MovingAverage


class Phase(Enum):
    """SPECULATING: as the drafter decides. MEASURING: a few plain passes. PLAIN: plain passes until the next trial."""

    SPECULATING = auto()
    MEASURING = auto()
    PLAIN = auto()


class SpeculationSwitch:
    """Switches speculation off while plain passes give the same tokens in less time, and tries it again later.

    The loss of an iteration is its seconds in plain passes, minus its expected tokens. Expected tokens vary less than
    accepted ones, and are corrected by the ratio of both. Where the recent losses add up to ALLOWANCE, and at growing
    intervals, some plain passes are measured. Then speculation is switched off if the sum is above ALLOWANCE, which
    falls to 0 over the first ENOUGH iterations. After a trial that lost x plain passes, the next one starts at least
    x / SHARE plain passes later. So trials lose at most SHARE of a long text.

    Plain passes are measured only where they might win, since each of them costs a tree of a large target.
    """

    ALLOWANCE = 3.0  # plain passes lost
    TRIAL_ALLOWANCE = 1.0  # the same in a trial
    FORGETTING = 0.98  # of losses
    ENOUGH = 32  # iterations
    SHARE = 0.015
    NUM_MEASURED = 3  # plain passes, after one that is not typical
    LEAST_GAIN = 0.03  # less than this is not distinguished from none
    TRIAL = 4  # iterations, after one that catches up: it reads the new text, and asks the draft and all guessers
    FIRST_LOOK, SECOND_LOOK, LONGEST_LOOK = 4, 32, 512  # iterations before plain passes are measured; then doubled
    FIRST_WAIT, LONGEST_WAIT = 16, 256  # plain passes before a trial, doubled after each that failed
    MIGHT_WIN, MIGHT_WIN_AGAIN = 2.0, 1.4  # gains below which plain passes are measured: for the first time, and again

    def __init__(self) -> None:
        self._plain_s, self._accepted = MovingAverage(0.1), DecayingRatio(0.98, 4.0)  # accepted over expected nodes
        self._phase, self._is_trial, self._num_passes = Phase.SPECULATING, False, 0  # passes in this phase
        self._spent_s, self._earned = DecayingSum(self.FORGETTING), DecayingSum(self.FORGETTING)  # seconds, tokens
        self._caught_up = 0.0  # plain passes that it took to catch up in this trial
        self._num_judged = 0  # iterations in these sums
        self._recent = DecayingRatio(0.9)  # tokens/s
        self._look, self._wait, self._least_wait = self.FIRST_LOOK, self.FIRST_WAIT, 0.0

    @property
    def plain_tokens_per_s(self) -> float:
        """The rate of plain passes, 0 if none were measured."""
        return 1 / self._plain_s.value if self._plain_s.value else 0.0

    @property
    def is_resting(self) -> bool:
        """Whether speculation is switched off."""
        return self._phase is Phase.PLAIN

    @property
    def is_on_trial(self) -> bool:
        """Whether speculation, switched off before, is tried again."""
        return self._is_trial

    @property
    def is_catching_up(self) -> bool:
        """Whether the next iteration begins a trial, in which the draft and all guessers are asked."""
        return self._is_trial and self._num_passes == 0

    def speculates(self, *, is_first: bool) -> bool:
        """Whether to speculate in the next pass. is_first: it also takes the prompt, and will not be observed."""
        return self._phase is Phase.SPECULATING and not (is_first and self._is_trial)

    def begin_text(self) -> None:
        """Another text may be of another kind: its first trial waits no longer than earlier losses require."""
        self._wait = self.FIRST_WAIT

    # ------------------------------------------------------------------------------------------------ observations

    def observe_plain(self, seconds: float) -> None:
        """Record an iteration without speculation."""
        self._num_passes += 1
        if self._num_passes > 1:
            self._plain_s.observe(seconds)
        if self._phase is Phase.MEASURING and self._num_passes > self.NUM_MEASURED:
            loss, is_enough = self._loss(self._plain_s.value), min(1.0, self._num_judged / self.ENOUGH)
            if loss > (1 - is_enough) * self.ALLOWANCE:
                self._rest(loss)
            else:
                self._look = max(self.SECOND_LOOK, min(2 * self._look, self.LONGEST_LOOK))
                self._speculate(is_trial=False)
        elif self._phase is Phase.PLAIN and self._num_passes >= max(self._wait, self._least_wait):
            self._speculate(is_trial=True)

    def observe(self, seconds: float, expected: float, accepted: int, predict_plain_s: Callable[[], float]) -> None:
        """Record an iteration with speculation.

        expected, accepted: numbers of nodes. predict_plain_s: of a plain pass, where none was measured.
        """
        if expected > 0:
            self._accepted.observe(accepted, expected)
        if self._phase is not Phase.SPECULATING:  # another text has switched it off meanwhile
            return
        tokens = 1 + expected * self._accepted.value
        plain_s = self._plain_s.value or predict_plain_s()
        self._num_passes += 1
        if self._is_trial and self._num_passes == 1:  # what it takes to catch up is paid once
            self._caught_up = max(0.0, seconds / plain_s - tokens)
            return
        self._spent_s.add(seconds)
        self._earned.add(tokens)
        self._recent.observe(tokens, seconds)
        self._num_judged += 1
        loss = self._loss(plain_s)
        if self._is_trial:
            is_over = self._num_passes > self.TRIAL
            if loss > (0.0 if is_over else self.TRIAL_ALLOWANCE):
                self._wait = min(2 * self._wait, self.LONGEST_WAIT)
                self._rest(self._caught_up + loss)
            elif is_over:
                self._is_trial, self._wait, self._look = False, self.FIRST_WAIT, self.SECOND_LOOK
        else:
            might_win = self._recent.value * plain_s < (self.MIGHT_WIN_AGAIN if self._plain_s.value else self.MIGHT_WIN)
            if loss > self.ALLOWANCE or (self._num_passes >= self._look and might_win):
                self._phase, self._num_passes = Phase.MEASURING, 0

    def _loss(self, plain_s: float) -> float:
        """Plain passes that the recent iterations took longer than plain decoding."""
        return float(self._spent_s.value / plain_s - (1 - self.LEAST_GAIN) * self._earned.value)

    def _speculate(self, *, is_trial: bool) -> None:
        self._phase, self._is_trial, self._num_passes = Phase.SPECULATING, is_trial, 0
        if is_trial:
            self._spent_s.value = self._earned.value = 0.0
            self._num_judged = 0

    def _rest(self, lost: float) -> None:
        """lost: plain passes."""
        self._phase, self._num_passes, self._least_wait = Phase.PLAIN, 0, lost / self.SHARE
