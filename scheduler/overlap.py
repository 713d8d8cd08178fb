"""Whether to draft while the target's pass runs: learnt by trying. Knows nothing of trees or models."""

from __future__ import annotations

from .averages import DecayingRatio, Retry


class OverlapSwitch:
    """Whether drafting beside the target's pass pays: both ways are tried, then the better one, the other now and then.

    Where the pass leaves nothing idle it does not. It hides the drafting at best, and at worst takes half of the pass's
    cores: so a machine that computes both on the same cores starts without, and tries late.
    """

    TRIALS = 2
    AGAIN = 32  # cycles after which the other way is tried once
    FORGETTING = 0.9

    def __init__(self, *, shares_cores: bool = False) -> None:
        """shares_cores: draft and target are computed by the same cores."""
        self._starts_on, self._patience = not shares_cores, self.AGAIN if shares_cores else self.TRIALS
        self._rates = {on: DecayingRatio(self.FORGETTING) for on in (True, False)}
        self._cycles, self._retry = 0, Retry(self.AGAIN, self.AGAIN)

    def is_on(self) -> bool:
        """For the next cycle: a pass, and the drafting of the tree after it."""
        if self._cycles < self._patience + self.TRIALS:
            return self._starts_on == (self._cycles < self._patience)
        better = self._rates[True].value > self._rates[False].value
        return better != self._retry.is_due

    def observe(self, was_on: bool, num_tokens: float, seconds: float) -> None:
        """num_tokens: expected of the tree that came out of the cycle."""
        self._rates[was_on].observe(num_tokens, seconds)
        self._cycles += 1
        self._retry.wait()


class Overlap:
    """Drafting beside the passes of one request: whether to, and what came of it."""

    def __init__(self, *, allowed: bool, switch: OverlapSwitch | None = None) -> None:
        """switch: learns whether it pays; without it, it does wherever it is allowed."""
        self._allowed, self._switch = allowed, switch
        self._was_on = False

    @property
    def is_on(self) -> bool:
        """For the next pass, if there is something to go on with."""
        return self._allowed and (self._switch is None or self._switch.is_on())

    @property
    def is_learning(self) -> bool:
        return self._switch is not None

    def begin(self, *, is_on: bool) -> None:
        """What the pass that begins now will be like."""
        self._was_on = is_on

    def observe(self, num_tokens: float, seconds: float) -> None:
        """Of the cycle that ends: as `OverlapSwitch.observe`, with the pass that began last."""
        if self._switch is not None:
            self._switch.observe(self._was_on, num_tokens, seconds)
