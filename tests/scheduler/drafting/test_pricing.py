"""What passes and rounds take is measured and learnt, and a draft that promises nothing is asked again now and then."""

from __future__ import annotations

import numpy as np
import pytest

from offspec.scheduler.drafting.drafter import Drafting, Rest
from offspec.scheduler.drafting.pricing import PassPricing
from offspec.scheduler.drafting.score_calls import run_alone
from offspec.scheduler.pace.calibration import Calibration
from offspec.scheduler.pace.controllers import DraftingState, FixedBudget, MarginalRate
from offspec.scheduler.pace.costs import Costs
from offspec.scheduler.params import MAX_NODES

from ..fakes import VirtualClock


class Noted(FixedBudget):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(4)
        self.states: list[DraftingState] = []
        self.passes: list[tuple[int, float]] = []

    def width(self, state: DraftingState) -> int:
        self.states.append(state)
        return super().width(state)

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.passes.append((num_tokens, seconds))


def one_pass(pricing: PassPricing, clock: VirtualClock, num_nodes: int = 3, *, is_usual: bool = True) -> float:
    """Half a second of drafting, two of the target, a quarter of all else; seconds since the last tree was sent."""
    pricing.begin(num_chain=1)

    def draft() -> Drafting[int]:
        clock.now += 0.5
        return 7
        yield  # a generator

    run_alone(pricing.round(draft()))
    since = pricing.send()
    clock.now += 2.0
    pricing.judged(num_nodes, is_usual=is_usual)
    clock.now += 0.25
    pricing.end(5)
    return since


def test_a_pass_is_measured_part_by_part_and_the_first_says_nothing_of_the_rate() -> None:
    clock, costs, controller = VirtualClock(), Costs(), Noted()
    pricing = PassPricing(controller, costs, Calibration().of(greedy=True), clock)
    assert (pricing.is_first, pricing.limit, pricing.tokens_per_s) == (True, 4, 0.0)
    one_pass(pricing, clock)
    assert (pricing.is_first, controller.passes, pricing.tokens_per_s, costs.overhead_s) == (False, [], 0.0, 0.0)
    for _ in range(200):
        assert one_pass(pricing, clock) == 2.75
    assert controller.passes == [(5, 2.75)] * 200
    assert pricing.tokens_per_s == pytest.approx(5 / 2.75)
    assert costs.overhead_s == pytest.approx(0.25)
    assert float(costs.target.seconds(np.array([1 + 3]))[0]) == pytest.approx(2.0, rel=1e-3)
    assert float(costs.draft.seconds(np.array([7]))[0]) == pytest.approx(0.5, rel=0.1)


def test_a_pass_that_shared_its_cores_for_a_trial_says_nothing_of_later_ones() -> None:
    clock, costs = VirtualClock(), Costs(lambda rows: 1.0)
    pricing = PassPricing(Noted(), costs, Calibration().of(greedy=True), clock)
    one_pass(pricing, clock, is_usual=False)
    assert (float(costs.target.seconds(np.array([1 + 3]))[0]), costs.target.most_rows) == (1.0, 0)
    one_pass(pricing, clock)
    assert costs.target.most_rows == 1 + 3


def test_the_controller_is_told_what_there_is_and_what_was_spent() -> None:
    clock, controller, calibration = VirtualClock(), Noted(), Calibration().of(greedy=True)
    pricing = PassPricing(controller, Costs(), calibration, clock)
    pricing.begin(num_chain=9)
    clock.now += 1.5
    best, open_nodes = np.array([0.9, 0.5]), np.array([0.5])
    assert pricing.width(best, open_nodes) == 1
    state = controller.states[-1]
    assert (state.best is best, state.open is open_nodes, state.num_chain, state.spent_s) == (True, True, 9, 1.5)
    np.testing.assert_array_equal(state.profile, calibration.profile.values)
    assert pricing.size(best) == 4


def test_rows_cost_what_the_last_passes_would_have_brought_meanwhile() -> None:
    clock, costs = VirtualClock(), Costs(lambda rows: 1.0 + 0.1 * rows)
    pricing = PassPricing(Noted(), costs, Calibration().of(greedy=True), clock)
    assert pricing.worth(0.7, num_nodes=2, num_sent=6) == 0.7, "nothing is known of the rate"
    for _ in range(2):
        one_pass(pricing, clock)
    pricing.begin(num_chain=1)
    without, whole = costs.target.seconds(np.array([1 + 4, 1 + 6]))
    assert pricing.worth(0.7, num_nodes=2, num_sent=6) == pytest.approx(0.7 - 5 / 2.75 * (whole - without))


class Useless:
    """A draft whose rounds take longer than all that they could bring, request after request."""

    def __init__(self, pass_s: float = 1.0) -> None:
        self.clock, self.costs, self.pass_s = VirtualClock(), Costs(lambda _: 1.0, lambda _: 50.0), pass_s
        self.calibration = Calibration().of(greedy=True)
        for _ in range(20):
            self.costs.target.observe(1, 1.0)

    def pricing(self) -> PassPricing:
        """Of a request."""
        controller, retry = MarginalRate(self.costs, MAX_NODES), self.calibration.retry
        return PassPricing(controller, self.costs, self.calibration, self.clock, retry)

    def is_asked(self, pricing: PassPricing, *, num_expected: float = 0.0, num_unread: int = 1) -> bool:
        """Whether it is asked in the request's next pass, of which it then sends nodes."""
        pricing.begin(num_chain=1)
        is_asked = pricing.is_worth_a_round(num_unread)
        pricing.send(num_expected if is_asked else 0.0)
        self.clock.now += self.pass_s
        pricing.judged(0)
        pricing.end(1)
        return is_asked

    def asked(self, num_passes: int) -> list[int]:
        """In which passes of a request it is asked, the first being 0."""
        pricing = self.pricing()
        return [number for number in range(num_passes) if self.is_asked(pricing)]


def test_a_draft_that_promises_nothing_is_asked_now_and_then() -> None:
    assert Useless().asked(60) == [7, 23, 55]


@pytest.mark.parametrize(("row_s", "first"), [(0.0, 7), (1e-3, 7), (5e-3, 55), (0.1, None)])
def test_what_a_draft_reads_for_a_trial_is_a_small_share_of_the_passes(row_s: float, first: int | None) -> None:
    """It rests from the first pass on, so it has all of the text to read, behind a prompt of 100 tokens."""
    draft = Useless()
    draft.costs = Costs(lambda _: 1.0, lambda rows: 50.0 + row_s * rows)
    pricing = draft.pricing()
    asked = [number for number in range(400) if draft.is_asked(pricing, num_unread=100 + number)]
    assert asked[:1] == ([] if first is None else [first])


@pytest.mark.parametrize(("num_unread", "is_asked"), [(4096, True), (32768, False)])
def test_a_long_text_costs_more_than_the_curve_knows(num_unread: int, is_asked: bool) -> None:
    """A cost of 4.1 plain passes may be paid after 273, one of 32.8 not before 2,184."""
    draft = Useless()
    draft.costs = Costs(lambda _: 1.0, lambda rows: 50.0 + 1e-3 * rows)
    pricing = draft.pricing()
    assert any(draft.is_asked(pricing, num_unread=num_unread) for _ in range(1000)) == is_asked


def test_what_a_draft_reads_is_paid_from_earlier_texts_too() -> None:
    draft = Useless()
    draft.costs = Costs(lambda _: 1.0, lambda rows: 50.0 + 0.02 * rows)
    texts = [draft.pricing() for _ in range(10)]
    asked = [any(draft.is_asked(text, num_unread=10 + number) for number in range(12)) for text in texts]
    assert not asked[0]
    assert any(asked)


def test_a_draft_that_is_not_asked_rests_in_spite_of_trials() -> None:
    draft = Useless()
    pricing = draft.pricing()
    assert pricing.rest is None
    assert [draft.is_asked(pricing, num_expected=0.5) for _ in range(10)] == [False] * 7 + [True] + [False] * 2
    assert pricing.rest == Rest(50.0, 1.0)
    draft.costs.draft.observe(4, 1e-6)
    for _ in range(400):  # it has become quick: its first round pays
        draft.costs.draft.observe(4, 1e-6)
    while not draft.is_asked(pricing, num_expected=0.5):
        assert pricing.rest is not None
    draft.is_asked(pricing, num_expected=0.5)
    assert pricing.rest is None


def test_the_next_request_goes_on_where_the_draft_did_not_pay() -> None:
    draft = Useless()
    assert [draft.asked(20) for _ in range(3)] == [[7], [3], [15]]


def test_plain_passes_are_measured_when_the_draft_is_looked_at() -> None:
    """So that those between are as quick as plain decoding's, and a change is seen nevertheless."""
    draft = Useless(pass_s=3.0)
    draft.asked(400)
    assert float(draft.costs.target.seconds(np.array([1]))[0]) == pytest.approx(3.0, rel=0.05)
