"""Decides by trial: whether to draft during the target's pass, and with all of a text or a window of it."""

from __future__ import annotations

from collections import defaultdict

from .averages import DecayingRatio, Retry


class OverlapSwitch:
    """Whether overlap pays off: tries both settings, then uses the better one and retries the other periodically.

    Overlap does not pay off if the pass leaves nothing idle. At best it hides the drafting; at worst it takes half of
    the pass's cores. So if the same cores compute both models, overlap starts off and its first trial is late.
    """

    TRIALS = 2
    AGAIN = 32  # cycles between trials of the worse setting
    FORGETTING = 0.9

    def __init__(self, *, shares_cores: bool = False) -> None:
        """shares_cores: the same cores compute draft and target."""
        self._starts_on, self._patience = not shares_cores, self.AGAIN if shares_cores else self.TRIALS
        self._rates = {on: DecayingRatio(self.FORGETTING) for on in (True, False)}
        self._cycles, self._retry = 0, Retry(self.AGAIN, self.AGAIN)

    def is_on(self) -> bool:
        """For the next cycle: a pass, and the drafting of the tree after it."""
        if self._cycles < self._patience + self.TRIALS:
            return self._starts_on == (self._cycles < self._patience)
        return self._is_usually_on != self._retry.is_due

    @property
    def _is_usually_on(self) -> bool:
        """The better setting, as far as it is known."""
        if self._cycles < self._patience + self.TRIALS:
            return self._starts_on
        return self._rates[True].value > self._rates[False].value

    @property
    def is_slowing(self) -> bool:
        """Whether overlap is on in the next cycle for a trial only: it takes cores from a pass that later ones have."""
        return self.is_on() and not self._is_usually_on

    def observe(self, was_on: bool, num_tokens: float, seconds: float) -> None:
        """Record one cycle. num_tokens: expected from the tree drafted in the cycle."""
        self._rates[was_on].observe(num_tokens, seconds)
        self._cycles += 1
        self._retry.wait()


class Overlap:
    """The overlap decision in one request, and the record of its results."""

    def __init__(self, *, allowed: bool, switch: OverlapSwitch | None = None) -> None:
        """switch: learns whether overlap pays off; None: overlap is on whenever it is allowed."""
        self.is_allowed, self._switch = allowed, switch
        self._was_on = False
        self.was_slowing = False  # the last pass, which says little about the next ones (`OverlapSwitch.is_slowing`)

    @property
    def is_on(self) -> bool:
        """Whether to overlap the next pass."""
        return self.is_allowed and (self._switch is None or self._switch.is_on())

    @property
    def is_learning(self) -> bool:
        return self._switch is not None

    def begin(self, *, is_on: bool) -> None:
        """Record whether the pass that begins now is overlapped."""
        self._was_on = is_on
        self.was_slowing = is_on and self._switch is not None and self._switch.is_slowing

    def observe(self, num_tokens: float, seconds: float) -> None:
        """Record the cycle that ends, as in `OverlapSwitch.observe`, with the setting of the last `begin`."""
        if self._switch is not None:
            self._switch.observe(self._was_on, num_tokens, seconds)


class WindowTrials:
    """Tokens per pass with all of a text and with a window (`--draft-window auto`), by its length in powers of two.

    Requests with texts of a length first keep all, until enough passes are measured, then the window. Afterwards they
    have the window if it brings almost as many tokens, because its rounds are faster, and try the other periodically.
    """

    PASSES = 16  # measured with either before they are compared
    ENOUGH = 0.95  # of the tokens per pass with all of the text
    AGAIN = 16  # requests between trials of the worse one
    FORGETTING = 0.98

    def __init__(self) -> None:
        self._rates = defaultdict[tuple[int, bool], DecayingRatio](lambda: DecayingRatio(self.FORGETTING))
        self._num_passes = defaultdict[tuple[int, bool], int](int)
        self._retries = defaultdict[int, Retry](lambda: Retry(self.AGAIN, 8 * self.AGAIN))

    def choose(self, length: int) -> bool:
        """Whether a request whose text has `length` tokens uses the window."""
        size = length.bit_length()
        for has_window in (False, True):
            if self._num_passes[size, has_window] < self.PASSES:
                return has_window
        pays = self._rates[size, True].value >= self.ENOUGH * self._rates[size, False].value
        retry = self._retries[size]
        is_due = retry.is_due
        retry.wait()
        return pays != is_due

    def observe(self, length: int, has_window: bool, num_tokens: int) -> None:
        """Record a pass: what it brought behind a text of `length` tokens."""
        size = length.bit_length()
        self._rates[size, has_window].observe(num_tokens, 1)
        self._num_passes[size, has_window] += 1
