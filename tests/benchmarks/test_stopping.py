"""Rules from the literature stop where their papers say, and Sequoia's size is chosen for the machine."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scheduling.replay import Costs
from benchmarks.scheduling.stopping import (
    WIDTH,
    GoesOn,
    PricedSampling,
    Stopping,
    dynamic_depth,
    kangaroo,
    sequoia_size,
    spec_dec_pp,
    to_depth,
)
from offspec.lab.sequoia import MeasuredAcceptance, TreeSize
from offspec.scheduler.pace.controllers import DraftingState, FixedBudget
from offspec.scheduler.pace.costs import Costs as LearntCosts
from offspec.scheduler.trees.token_tree import FloatArray

from ..scheduler.pace.test_controllers import NONE, state_of
from ..scheduler.pace.test_thompson import rounds_of

ROOT_STATE = DraftingState(np.empty(0), np.ones(1), np.ones(1), 1, 0.0)


def num_rounds(goes_on: GoesOn, levels: list[list[float]]) -> int:
    """Rounds until the rule stops. levels: path probabilities of the open nodes before each round after the root's."""
    controller = Stopping(8, goes_on)
    assert controller.width(ROOT_STATE) == 1
    rounds = 1
    for level in levels:
        state = DraftingState(np.array(level), np.array(level), np.ones(1), 1, 0.0)
        if controller.width(state) == 0:
            break
        rounds += 1
    assert controller.size(state) == 8
    return rounds


CHAIN = [[0.9], [0.81], [0.4], [0.38], [0.05]]  # confidences 0.9, 0.9, 0.49, 0.95, 0.13


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (to_depth(1), 1),
        (to_depth(3), 3),
        (spec_dec_pp(0.7), 5),  # 1 - 0.38 is below it, 1 - 0.05 is not
        (spec_dec_pp(0.5), 3),
        (kangaroo(0.6), 3),  # 0.4 / 0.81 is below it
        (kangaroo(0.1), 6),
    ],
)
def test_where_rules_stop(rule: GoesOn, expected: int) -> None:
    assert num_rounds(rule, CHAIN) == expected


def test_the_beams_probability_counts_as_a_whole() -> None:
    beam = [[0.5, 0.3], [0.2, 0.2, 0.1], [0.1, 0.05]]
    assert num_rounds(dynamic_depth(0.4), beam) == 3
    assert num_rounds(dynamic_depth(0.6), beam) == 2
    outside = [[0.02] * WIDTH + [0.02] * WIDTH]
    assert num_rounds(dynamic_depth(0.5), outside) == 1, "only a round's nodes count"


def test_a_rule_starts_anew_with_each_tree() -> None:
    controller = Stopping(8, to_depth(2))
    state = DraftingState(np.array([0.5]), np.array([0.5]), np.ones(1), 1, 0.0)
    for _ in range(2):
        assert [controller.width(each) for each in (ROOT_STATE, state, state)] == [1, 1, 0]
        controller.size(state)


def measured(ranks: FloatArray) -> MeasuredAcceptance:
    found = MeasuredAcceptance()
    for rank, count in enumerate(ranks.astype(int)):
        for _ in range(count):
            found.ranks(greedy=True, coupled=True).observe(rank)
    return found


def test_sequoias_size_follows_the_machine() -> None:
    """Rows that cost nothing want a large tree, rows that cost as much as a pass none, dear rounds a shallow one."""
    acceptance = measured(np.array([700, 150, 50, 20, 10]))
    sizes = {
        name: sequoia_size(acceptance, greedy=True, costs=costs, most_nodes=128)
        for name, costs in {
            "free rows": Costs(stream_s=1.0, pass_row_s=0.0, round_launch_s=0.0),
            "dear rounds": Costs(stream_s=1.0, pass_row_s=0.0, round_launch_s=0.4),
            "dear rows": Costs(stream_s=1.0, pass_row_s=1.0, round_launch_s=0.0),
        }.items()
    }
    assert sizes["free rows"].nodes == 128
    assert 0 < sizes["dear rounds"].depth < sizes["free rows"].depth
    assert sizes["dear rows"] == TreeSize(0, 0)


# ----------------------------------------------------------------------------------------------- priced sampling


def priced(seed: int = 0) -> PricedSampling:
    """It knows no costs yet."""
    return PricedSampling(FixedBudget(50, 16), LearntCosts(), seed=seed)


def test_priced_sampling_counts_levels_that_held_and_walks_that_ended() -> None:
    controller, alpha, beta = priced(), 1.0, 1.0
    for accepted in (0, 1, 2, 5, 0, 3):
        assert controller.counts == pytest.approx((alpha, beta))
        rounds = rounds_of(controller, accepted)
        forgetting = PricedSampling.FORGETTING
        alpha = max(1.0, forgetting * alpha) + min(accepted, rounds)
        beta = max(1.0, forgetting * beta) + (accepted < rounds)


@pytest.mark.each_value
@pytest.mark.parametrize("round_s", [0.4, 0.1, 0.01])
@pytest.mark.parametrize("holds", [0.2, 0.6, 0.9])
def test_priced_sampling_comes_near_the_best_fixed_depth(holds: float, round_s: float) -> None:
    """A level holds with one chance if the one above it did, and a pass takes a second; a round takes less."""
    most = 30
    best = max((1 + sum(holds**i for i in range(1, n + 1))) / (1 + n * round_s) for n in range(1, most))
    costs, random = LearntCosts(), np.random.default_rng(0)
    costs.draft.observe(1, round_s)
    controller = PricedSampling(FixedBudget(50, 16), costs)
    tokens = seconds = 0.0
    for iteration in range(1500):
        rounds, open_nodes = 0, NONE
        while rounds < most and controller.width(state_of(open_nodes, np.array([holds**rounds]))):
            rounds, open_nodes = rounds + 1, np.array([holds**rounds])
        accepted = min(int(random.geometric(1 - holds)) - 1, rounds)
        controller.observe(1 + accepted, 1 + rounds * round_s)
        if iteration >= 500:
            tokens, seconds = tokens + 1 + accepted, seconds + 1 + rounds * round_s
    assert tokens / seconds > 0.93 * best


def test_priced_sampling_knows_how_sure_the_draft_is() -> None:
    def mean(likely: float) -> float:
        return float(np.mean([rounds_of(priced(seed), 0, likely) for seed in range(300)]))

    assert 2 * mean(0.05) < mean(0.95)
