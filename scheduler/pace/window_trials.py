"""Decides by trial whether a draft keeps all of a text, or a window of it (`--draft-window auto`)."""

from __future__ import annotations

from collections import defaultdict

from .averages import DecayingRatio, Retry


class WindowTrials:
    """Tokens per pass with all of a text and with a window, by its length in powers of two.

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
