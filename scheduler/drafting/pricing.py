"""Measures the seconds and tokens of one request's passes, and asks the controller how much to draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..pace.averages import DecayingRatio, Retry
from ..pace.calibration import DraftCalibration
from ..pace.controllers import PLAIN_ROWS, RATE_FORGETTING, Controller, DraftingState
from ..pace.costs import MOST_ROWS, Costs
from ..pace.shared_pass import SharedPass
from ..pace.speculation_switch import SpeculationSwitch
from ..trees.token_tree import FloatArray
from .drafter import Drafting, Rest

Clock = Callable[[], float]  # seconds

NONE = np.empty(0)
MISPRICED = 1.5  # over the predicted seconds: no evidence against speculation, as the next tree will be another


class PassPricing:
    """The clock of a request. Order of calls per pass: begin, round (any number), send, judged, end."""

    def __init__(
        self,
        controller: Controller,
        costs: Costs,
        calibration: DraftCalibration,
        clock: Clock,
        retry: Retry | None = None,
        switch: SpeculationSwitch | None = None,
        shared: SharedPass | None = None,
    ) -> None:
        """retry, switch: of earlier requests, if the draft, or all speculation, may be switched off as it was there.

        shared: see `DraftRequest`.
        """
        self._shared = shared or SharedPass(costs, controller.limit)
        self._controller, self._costs, self._calibration, self._clock = controller, costs, calibration, clock
        self._recent_rate, self._retry = DecayingRatio(RATE_FORGETTING), retry or Retry()
        self._began = self._sent = self._judged = self._rounds_s = 0.0
        self._num_chain, self._num_expected = 0, 0.0
        self._switch = switch
        if switch is not None:
            switch.begin_text()
        self._rests = False  # nothing is drafted in this pass, and its seconds are known
        self._declines = self._is_retry = False  # in this pass: no draft round, or one that is not expected to pay
        self._is_resting = self._is_mispriced = False
        self.is_first = True  # the first pass contains the prefill and does not count for the rate

    @property
    def speculates(self) -> bool:
        """Whether to speculate in the next pass."""
        switch = self._own_switch
        return switch is None or switch.speculates(is_first=self.is_first)

    @property
    def is_catching_up(self) -> bool:
        """Whether a trial of speculation begins, in which the draft and all guessers are asked."""
        switch = self._own_switch
        return switch is not None and switch.is_catching_up

    @property
    def _own_switch(self) -> SpeculationSwitch | None:
        """The switch; None in a pass of several texts, whose seconds are not this text's."""
        return None if self._shared.is_shared else self._switch

    @property
    def rest(self) -> Rest | None:
        """Why nothing is drafted in these passes, but for trials; None where something is."""
        if not self._is_resting:
            return None
        draft, plain_rate = self._costs.draft, 0.0 if self._switch is None else self._switch.plain_tokens_per_s
        round_s = float(draft.seconds(np.array([draft.best_width()]))[0]) if draft.is_known else None
        return Rest(round_s, 1 / plain_rate if plain_rate else self._predicted_plain_s())

    def begin_plain(self) -> None:
        """Start a pass without speculation. `end_plain` ends it; no other call is needed."""
        self._began = self._sent = self._clock()
        self._calibration.catching_up.rest()

    def end_plain(self) -> None:
        """Record the end of an iteration that `begin_plain` has started."""
        self._is_resting |= self._switch is not None and self._switch.is_resting
        if not self.is_first and self._switch is not None:
            seconds = self._clock() - self._began
            self._observe_rate(1, seconds)
            self._switch.observe_plain(seconds)
            if not self._switch.is_resting:
                self._costs.target.observe(PLAIN_ROWS, seconds)
        self.is_first = False

    def begin(self, num_chain: int) -> None:
        """Start a pass. num_chain: the text's rows in addition to the nodes."""
        self._began, self._rounds_s = self._clock(), 0.0
        self._num_chain = num_chain + self._shared.rows_beside
        self._rests = self._declines = self._is_retry = self._is_mispriced = False
        self._calibration.catching_up.rest()

    @property
    def is_shared(self) -> bool:
        """Whether the pass has several texts."""
        return self._shared.is_shared

    @property
    def limit(self) -> int:
        """The maximum number of nodes to send."""
        return min(self._controller.limit, self._shared.limit)

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of the last passes, of all their texts, or of plain passes if faster; 0 before the first."""
        plain_rate = 0.0 if self._switch is None else self._switch.plain_tokens_per_s
        return self._shared.tokens_per_s or max(self._recent_rate.value, plain_rate)

    def width(self, best: FloatArray, open_nodes: FloatArray) -> int:
        """Nodes of the next round, from the probabilities of the best candidates and of the open ones among them."""
        return self._controller.width(self._state(best, open_nodes))

    def size(self, best: FloatArray) -> int:
        """The number of the best candidates to send."""
        return self._controller.size(self._state(best, NONE))

    def _state(self, best: FloatArray, open_nodes: FloatArray) -> DraftingState:
        profile, shared, spent_s = self._calibration.profile.values, self._shared, self._clock() - self._began
        state = DraftingState(best, open_nodes, profile, self._num_chain, spent_s, is_first=self.is_first)
        return replace(state, tokens_per_s=shared.tokens_per_s, num_drafting=shared.num_drafting)

    def is_worth_a_round(self, num_unread: int) -> bool:
        """Whether a first draft round pays off; if not, it is retried at growing intervals.

        A first pass has no rate to judge by: it continues as the last request ended. num_unread: tokens that the draft
        reads before this round.
        """
        retry = self._retry
        looks = not retry.is_pausing if self.is_first else retry.wants_look
        self._rests = not looks and not self.is_first
        pays = looks and self._promises_tokens()
        tries = retry.is_worth_trying(pays=pays) or self.is_catching_up
        can_try = pays or self._calibration.catching_up.is_affordable(self._cost_of(num_unread))
        self._declines = not (tries and can_try)
        self._is_retry = not pays
        return not self._declines

    def _cost_of(self, num_unread: int) -> float:
        """Plain passes that it costs the draft to read more than one token; at first, what it would cost the target."""
        curve = self._costs.draft if self._costs.draft.is_known else self._costs.target
        one_s, all_s = curve.seconds(np.array([1, num_unread]))
        longer = max(1.0, num_unread / MOST_ROWS)  # than where the curve ends
        return longer * float(all_s - one_s) / self._predicted_plain_s()

    def _promises_tokens(self) -> bool:
        """Whether a first round is expected to bring more tokens than its seconds bring otherwise."""
        root = np.array([self._calibration.trust.value])
        state = replace(self._state(NONE, root), spent_s=0.0, overhead_s=self._costs.overhead_s, is_first=False)
        return self._controller.width(state) > 0

    def round(self, draft: Drafting[int]) -> Drafting[None]:
        """Run one draft round, which returns its number of rows, and record its seconds."""
        began = self._clock()
        rows = yield from draft
        seconds = self._clock() - began
        self._rounds_s += seconds
        self._calibration.catching_up.run()
        if rows <= MOST_ROWS and not self._shared.is_shared:  # `SharedPass.observe_round` records those of all texts
            self._costs.draft.observe(rows, seconds)

    def worth(self, num_tokens: float, num_nodes: int, num_sent: int) -> float:
        """num_tokens, expected from num_nodes of the num_sent nodes, minus their rows' cost at the recent rate."""
        rows = self._num_chain + num_sent
        without, all_of_them = self._costs.target.seconds(np.array([rows - num_nodes, rows]))
        return float(num_tokens - self.tokens_per_s * (all_of_them - without))

    def send(self, num_expected: float = 0.0) -> float:
        """Record that the tree is sent. Returns the seconds since the previous tree.

        num_expected: the number of its nodes that should be accepted.
        """
        last, self._sent, self._num_expected = self._sent, self._clock(), num_expected
        return self._sent - last

    def judged(self, num_nodes: int, *, is_usual: bool = True) -> None:
        """Record the end of the target's pass, and its seconds by number of rows.

        is_usual: whether the next passes have as many cores.
        """
        self._judged = self._clock()
        if self._shared.is_shared or not is_usual:
            return  # `SharedPass.end` records them once for all texts
        if (rows := self._num_chain + num_nodes) <= MOST_ROWS and (num_nodes or not self._rests):
            seconds, predicted = self._judged - self._sent, float(self._costs.target.seconds(np.array([rows]))[0])
            self._is_mispriced = seconds > MISPRICED * predicted
            self._costs.target.observe(rows, seconds)

    def end(self, num_tokens: int) -> None:
        """Record the end of the iteration, and its tokens."""
        if not self.is_first:
            seconds = self._clock() - self._began
            self._observe_rate(num_tokens, seconds)
            if (switch := self._own_switch) is not None and not self._is_mispriced:
                switch.observe(seconds, self._num_expected, num_tokens - 1, self._predicted_plain_s)
            if self._rounds_s and not self._shared.is_shared:
                self._costs.observe_overhead(seconds - self._rounds_s - (self._judged - self._sent))
        self.is_first = False
        switch = self._own_switch
        if not (self._rounds_s or self._num_expected):
            self._is_resting |= self._declines
        elif not (self._is_retry or (switch is not None and switch.is_on_trial)):
            self._is_resting = False

    def _observe_rate(self, num_tokens: int, seconds: float) -> None:
        self._controller.observe(num_tokens, seconds)
        self._recent_rate.observe(num_tokens, seconds)

    def _predicted_plain_s(self) -> float:
        return float(self._costs.target.seconds(np.array([PLAIN_ROWS]))[0])
