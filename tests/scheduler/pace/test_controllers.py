"""How many nodes are sent and how long is drafted, against brute force and on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offspec.loaders.streaming.placement import used_share
from offspec.scheduler.drafting.drafter import DraftRequest
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.pace.controllers import FIRST_NODES, DraftingState, FixedBudget, MarginalRate, controller_for
from offspec.scheduler.pace.costs import Costs
from offspec.scheduler.params import MAX_NODES, SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray

from ..fakes import Rule, TimedModel, VirtualClock, estimates_of, generate, many, plain_text, random_rule, resembling

Seconds = Callable[[int], float]
PROFILE = np.power(0.5, np.arange(1, 17))
NONE = np.empty(0)


def state_of(best: FloatArray, open_nodes: FloatArray = NONE, spent_s: float = 0.0) -> DraftingState:
    return DraftingState(best, open_nodes, PROFILE, 1, spent_s)


def flat_until(rows: int, slope: float) -> Seconds:
    """A pass of one second as long as weights are what takes the time, more for every row beyond."""
    return lambda n: 1 + slope * max(0, n - rows)


def well_known(costs: Costs) -> Costs:
    """The same, after many plain passes of one second."""
    for _ in range(20):
        costs.target.observe(1, 1.0)
    return costs


def rated(controller: MarginalRate, tokens_per_s: float) -> MarginalRate:
    """The same, after long experience of this rate."""
    for _ in range(200):
        controller.observe(10, 10 / tokens_per_s)
    return controller


# ------------------------------------------------------------------------------------------------ fixed


def test_a_fixed_budget_drafts_to_the_end() -> None:
    controller = FixedBudget(7, width=3)
    assert (controller.limit, controller.size(state_of(NONE))) == (7, 7)
    assert [controller.width(state_of(NONE, np.full(n, 1e-9))) for n in (0, 2, 3, 9)] == [0, 2, 3, 3]


@pytest.mark.parametrize("budget", [None, 5])
def test_parameters_call_for_a_controller(budget: int | None) -> None:
    controller = controller_for(SpeculationParams(budget=budget), Costs(lambda _: 1.0))
    assert controller.limit == (FIRST_NODES if budget is None else budget)
    assert isinstance(controller, MarginalRate if budget is None else FixedBudget)


# ------------------------------------------------------------------------------------------------ the marginal rate


@many
@given(
    probabilities=st.lists(st.floats(1e-4, 1), min_size=1, max_size=120),
    flat=st.sampled_from([1, 8, 50]),
    slope=st.floats(0, 1),
    spent_s=st.floats(0, 3),
)
@example(probabilities=[1.0], flat=1, slope=1.0, spent_s=1.0)
def test_size_becomes_the_best_one_there_is(
    probabilities: list[float], flat: int, slope: float, spent_s: float
) -> None:
    """Dinkelbach's iteration by itself: the rate comes from the sizes chosen, and they from the rate."""
    costs, best = Costs(flat_until(flat, slope)), np.sort(probabilities)[::-1]
    controller, state = MarginalRate(costs, MAX_NODES), state_of(best, spent_s=spent_s)
    tokens = [1 + sum(best[:k]) for k in range(len(best) + 1)]
    seconds = [spent_s + float(costs.target.seconds(np.array(k + 1))) for k in range(len(best) + 1)]
    rates = [t / s for t, s in zip(tokens, seconds, strict=True)]
    if max(rates) >= 1 / float(costs.target.seconds(np.array([1]))[0]):  # else plain decoding's is the first rate
        assert rates[controller.size(state)] == pytest.approx(max(rates)), "before there is a rate"
    controller.observe(1, 1 / rates[0])  # from the rate of plain decoding
    for _ in range(300):
        size = controller.size(state)
        controller.observe(tokens[size], seconds[size])
    assert rates[controller.size(state)] == pytest.approx(max(rates), rel=1e-3)


def test_size_follows_a_change_of_costs() -> None:
    best, costs = np.full(64, 0.1), Costs(lambda _: 1.0)
    controller, sizes = MarginalRate(costs, MAX_NODES), []
    for cost in (flat_until(1, 0.0), flat_until(1, 1.0), flat_until(1, 0.0)):
        for _ in range(300):
            size = controller.size(state_of(best))
            costs.target.observe(1 + size, cost(1 + size))
            costs.target.observe(2, cost(2))  # now and then a small one, as at the end of a text
            controller.observe(1 + 0.1 * size, cost(1 + size))
        sizes.append(size)
    assert sizes == [64, 0, 64]


@many
@given(
    open_nodes=st.lists(st.floats(1e-6, 1), min_size=1, max_size=100),
    round_s=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    rate=st.floats(0.1, 20),
    flat=st.sampled_from([10, 200]),
)
def test_a_round_is_drafted_where_its_gain_exceeds_its_cost(
    open_nodes: list[float], round_s: float, rate: float, flat: int
) -> None:
    """A node's gain is the sum of its children's probabilities, where the next rows of the pass are free.

    Where no more rows can be paid for, it is what each exceeds the least likely node by that is sent.
    """
    probabilities, costs = np.sort(open_nodes)[::-1], Costs(flat_until(flat, 1e6), lambda n: round_s * n)
    state = state_of(probabilities[:5], probabilities)
    width = rated(MarginalRate(costs, MAX_NODES), rate).width(state)
    price, num_open = 0.0 if flat == 200 else state.best[-1], min(len(probabilities), 64)
    gains = np.maximum(np.outer(probabilities, PROFILE) - price, 0.0).sum(-1)
    worth = {
        w: gains[:w].sum() - rate * float(costs.draft.seconds(np.array(w))) for w in (4, 8, 16, 32) if w < num_open
    }
    worth |= {num_open: gains[:64].sum() - rate * float(costs.draft.seconds(np.array(num_open))), 0: 0.0}
    assert worth[width] == pytest.approx(max(worth.values()))


def test_trees_grow_step_by_step() -> None:
    """The predicted seconds of many more rows than were ever seen may be far too low."""
    costs = Costs(lambda _: 1.0)
    controller = MarginalRate(costs, 300)
    limits = [controller.limit]
    while controller.limit < 300:
        costs.target.observe(1 + controller.limit, 1.0)
        limits.append(controller.limit)
    assert limits == [32, 66, 134, 270, 300]


@pytest.mark.each_value
@pytest.mark.parametrize("slope", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("floor", [0.5, 1.0, 2.0])
def test_a_first_tree_hardly_delays_the_first_token(floor: float, slope: float) -> None:
    """floor, slope: the prediction's, over the true ones."""
    true, num_chain, round_s = flat_until(20, 0.05), 30, 0.01
    costs = Costs(lambda rows: max(floor, 1 + slope * 0.05 * (rows - 20)), lambda _: round_s)
    controller = MarginalRate(costs, MAX_NODES)
    state = DraftingState(np.full(500, 0.9), np.full(500, 0.9), PROFILE, num_chain, 0.0, is_first=True)
    assert true(num_chain + controller.size(state)) <= 1.3 * true(num_chain)
    late = replace(state, best=NONE, spent_s=float(costs.target.seconds(np.array(num_chain))))
    assert controller.width(late) == 0, "drafting, too, is waited for"


def test_a_later_texts_first_tree_is_as_large_as_hides() -> None:
    """Once passes of many rows are known, a first tree is not a small one, and drafting goes on while it fits."""
    costs = Costs(lambda rows: max(1.0, rows / 200), lambda _: 0.01)
    for rows in (1, 30, 64, 128, 128, 128):
        costs.target.observe(rows, 1.0)
    many = np.full(2 * FIRST_NODES, 0.2)
    state = DraftingState(many, many, PROFILE, 1, 0.1, is_first=True)
    controller = MarginalRate(costs, MAX_NODES)
    assert controller.size(state) == len(many)
    assert controller.width(state) > 0
    assert controller.width(replace(state, spent_s=0.3)) == 0


def test_a_first_tree_has_to_earn_what_plain_passes_do_where_these_are_known() -> None:
    """The prompt makes a first pass long, and any tree beside it looks cheap."""
    best, price = np.array([0.9, 0.5, 0.1]), 0.3
    for costs, size in ((Costs(), 3), (Costs(lambda rows: 1.0 if rows == 1 else price * rows), 2), (Costs(), 2)):
        for _ in range(20 * (size == 2 and not costs.target.is_predicted)):
            costs.target.observe(1, 1.0)  # so a row more takes what would bring 0.3 tokens
            costs.target.observe(90, 90 * price)
            costs.target.observe(128, 128 * price)
        state = DraftingState(best, NONE, PROFILE, num_chain=100, spent_s=0.0)
        assert MarginalRate(costs, MAX_NODES).size(state) == size


@pytest.mark.parametrize(("row_s", "round_s", "width"), [(0.2, 0.4, 0), (0.2, 0.1, 1), (0.0, 0.4, 1), (0.5, 0.0, 0)])
def test_a_first_round_has_to_pay_by_what_is_predicted(row_s: float, round_s: float, width: int) -> None:
    """Beside plain passes of a second, not beside the prompt's pass, which is long."""
    costs = Costs(lambda rows: 1.0 + row_s * (rows - 1), lambda rows: round_s)
    state = DraftingState(NONE, np.ones(1), PROFILE, num_chain=200, spent_s=0.0)
    assert MarginalRate(costs, MAX_NODES).width(state) == width


def test_a_full_tree_is_drafted_on_only_for_better_nodes() -> None:
    """Another node means that the worst one has to go."""
    free = Costs(lambda _: 1.0, lambda _: 0.0)
    for worst, is_worth_it in ((0.3, False), (0.2, True)):
        controller = rated(MarginalRate(free, limit=4), 2.0)
        width = controller.width(state_of(np.array([0.9, 0.8, 0.7, worst]), np.array([0.5])))  # best child: 0.25
        assert (width > 0) == is_worth_it


def test_a_plain_pass_is_tried_where_it_might_be_best_and_nobody_has_seen_one() -> None:
    """A prior may be wrong; where it promises far less than the going rate, nothing is lost by believing it."""
    root = state_of(NONE, np.array([1.0]))
    for rate, is_tried in ((1.0, True), (1.9, True), (3.0, False)):
        costs = Costs(flat_until(1, 0.05), lambda _: 0.01)
        assert (rated(MarginalRate(costs, MAX_NODES), rate).width(root) == 0) == is_tried
        assert rated(MarginalRate(well_known(costs), MAX_NODES), rate).width(root) > 0


# ------------------------------------------------------------------------------------------------ whole texts

VOCAB_SIZE, PROMPT = 40, [1, 2]
TARGET, RANDOM = random_rule(VOCAB_SIZE, seed=0), random_rule(VOCAB_SIZE, seed=99)
GOOD = resembling(TARGET, seed=5, error=0.5)


class Text:
    """A greedy text with a draft, and what it took on the virtual clock."""

    def __init__(
        self,
        draft: Rule,
        target_s: Seconds,
        round_s: float,
        num_tokens: int,
        budget: int | None = None,
        predicted_s: Seconds | None = None,
    ) -> None:
        """predicted_s: of a pass, where that is wrong."""
        clock = VirtualClock()
        self.target = TimedModel(TARGET, VOCAB_SIZE, clock, target_s)
        self.draft = TimedModel(draft, VOCAB_SIZE, clock, lambda _: round_s)
        sampler, costs = Sampler(SamplingParams(), 1, VOCAB_SIZE), Costs(predicted_s or target_s)
        speculation = SpeculationParams(budget=budget)
        drafter = ModelDrafter(self.draft, DraftRequest(sampler), speculation, estimates_of(costs=costs), clock=clock)
        self.tokens = generate(self.target, drafter, sampler, PROMPT, num_tokens)
        self.rate = num_tokens / clock.now

    def passes(self, first: int, last: int) -> int:
        """Of the target, that began between these lengths of the text."""
        return sum(first <= length < last for length in self.target.lengths)

    def rounds(self, first: int, last: int) -> int:
        """Of the draft."""
        return sum(first <= length < last for length in self.draft.lengths)


@pytest.mark.each_value
@pytest.mark.parametrize("round_s", [0.02, 0.3])
@pytest.mark.parametrize("slope", [0.1, 0.5])
def test_a_random_draft_ends_in_plain_passes(slope: float, round_s: float) -> None:
    text = Text(RANDOM, flat_until(1, slope), round_s, 300)
    assert text.tokens == plain_text(TARGET, SamplingParams(), 1, PROMPT, 300)
    assert text.rounds(100, 300) <= 6  # the pauses are 8, 16, .. 128 long
    assert sum(rows > 0 for rows in text.target.batches[-64:]) <= 1, "of a trial"
    assert text.rate > 0.95


def of_mixture(num_experts: int, num_used: int) -> Seconds:
    """A pass that moves the distinct experts of its rows, and a fifth of a plain pass beside them."""
    return lambda rows: 0.2 + 0.8 * num_experts / num_used * used_share(num_used / num_experts, rows)


@pytest.mark.each_value
@pytest.mark.parametrize("predicted_s", [of_mixture(128, 8), of_mixture(64, 8)])
@pytest.mark.parametrize("draft", [RANDOM, GOOD])
def test_where_each_row_moves_more_experts_drafts_lose_next_to_nothing(draft: Rule, predicted_s: Seconds) -> None:
    """Also where a plan thinks that rows share more of them."""
    text = Text(draft, of_mixture(128, 8), 0.02, 300, predicted_s=predicted_s)
    assert text.tokens == plain_text(TARGET, SamplingParams(), 1, PROMPT, 300)
    assert text.rate > 0.97


def test_where_few_experts_serve_many_rows_a_good_draft_pays() -> None:
    assert Text(GOOD, of_mixture(8, 2), 0.02, 40).rate > 1.2


def test_a_draft_that_is_switched_off_does_not_change_the_trees_of_a_budget() -> None:
    sampler, estimates = Sampler(SamplingParams(), 1, VOCAB_SIZE), estimates_of(costs=Costs(lambda _: 1.0))
    for _ in range(3):
        estimates.calibration.of(greedy=True).retry.wait()
    trees = []
    for budget in (None, 4):
        model = TimedModel(GOOD, VOCAB_SIZE, clock := VirtualClock(), lambda _: 0.01)
        drafter = ModelDrafter(model, DraftRequest(sampler), SpeculationParams(budget), estimates, clock=clock)
        trees.append(drafter.propose(PROMPT, 8))
    assert [len(tree) for tree in trees] == [0, 4]


@pytest.mark.slow
def test_a_good_draft_after_a_bad_stretch_is_used_again() -> None:
    """As long as nothing is sent nothing is accepted either, and yet it has to come back."""

    def draft(prefix: tuple[int, ...]) -> FloatArray:
        return (RANDOM if 20 <= len(prefix) < 60 else GOOD)(prefix)

    always, mixed = (Text(rule, flat_until(1, 0.1), 0.03, 250) for rule in (GOOD, draft))
    assert mixed.passes(20, 60) > 1.5 * always.passes(20, 60)
    assert mixed.passes(200, 250) < 1.2 * always.passes(200, 250) < 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target_s", "round_s"),
    [pytest.param(flat_until(16, 0.03), 0.05, marks=pytest.mark.nightly), (flat_until(1, 0.1), 0.02)],
)
def test_the_budget_that_is_found_is_about_as_good_as_the_best_fixed_one(target_s: Seconds, round_s: float) -> None:
    fixed = [Text(GOOD, target_s, round_s, 150, budget).rate for budget in (1, 4, 16)]
    assert Text(GOOD, target_s, round_s, 150).rate > 0.9 * max(fixed)
