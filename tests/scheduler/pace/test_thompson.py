"""Thompson sampling stops where its coin says so, as published or with costs in view."""

from __future__ import annotations

import numpy as np
import pytest

from offspec.scheduler.pace.budget import FixedBudget, MarginalRate
from offspec.scheduler.pace.costs import Costs
from offspec.scheduler.pace.thompson import ThompsonSampling

from .test_budget import NONE, PROFILE, flat_until, rated, state_of


def thompson(*, calibrated: bool = False, seed: int = 0) -> ThompsonSampling:
    """The calibrated one knows no costs yet."""
    return ThompsonSampling(FixedBudget(50, 16), Costs() if calibrated else None, seed=seed)


def rounds_of(controller: ThompsonSampling, depth: int, likely: float = 0.5, most: int = 40) -> int:
    """Rounds until it stops, the first at the root; then the verdict: `depth` tokens accepted."""
    rounds, best = 0, NONE
    while rounds < most and controller.width(state_of(best, np.array([likely]))):
        rounds, best = rounds + 1, np.array([likely])
    controller.observe(1 + depth, 1.0)
    return rounds


def test_the_root_is_always_asked() -> None:
    assert all(rounds_of(thompson(seed=seed), 0) >= 1 for seed in range(50))
    assert thompson().width(state_of(NONE)) == 0, "but not where nothing can be"


def test_a_good_draft_is_drafted_long_and_a_bad_one_short() -> None:
    mean = {}
    for depth in (0, 3, 10):
        controller = thompson()
        rounds = [rounds_of(controller, depth) for _ in range(300)]
        mean[depth] = np.mean(rounds[100:])
    assert mean[0] < 1.1
    assert 2 < mean[3] < mean[10]


def test_the_posterior_counts_accepted_and_rejected_rounds() -> None:
    """r of n rounds add r to alpha and n - r to beta."""
    controller, alpha, beta = thompson(), 1.0, 1.0
    for accepted in (0, 1, 2, 5, 0, 3):
        assert controller.counts == (alpha, beta)
        rounds = rounds_of(controller, accepted)
        won = min(accepted, rounds)
        alpha, beta = alpha + won, beta + rounds - won


def test_the_calibrated_posterior_counts_levels_that_held_and_walks_that_ended() -> None:
    controller, alpha, beta = thompson(calibrated=True), 1.0, 1.0
    for accepted in (0, 1, 2, 5, 0, 3):
        assert controller.counts == pytest.approx((alpha, beta))
        rounds = rounds_of(controller, accepted)
        forgetting = ThompsonSampling.FORGETTING
        alpha = max(1.0, forgetting * alpha) + min(accepted, rounds)
        beta = max(1.0, forgetting * beta) + (accepted < rounds)


@pytest.mark.parametrize("round_s", [0.4, 0.1, 0.01])
@pytest.mark.parametrize("holds", [0.2, 0.6, 0.9])
def test_where_costs_are_known_it_comes_near_the_best_fixed_depth(holds: float, round_s: float) -> None:
    """A level holds with one chance if the one above it did, and a pass takes a second; a round takes less."""
    most = 30
    best = max((1 + sum(holds**i for i in range(1, n + 1))) / (1 + n * round_s) for n in range(1, most))
    costs, random = Costs(), np.random.default_rng(0)
    costs.draft.observe(1, round_s)
    controller = ThompsonSampling(FixedBudget(50, 16), costs)
    tokens = seconds = 0.0
    for iteration in range(1500):
        rounds, known = 0, NONE
        while rounds < most and controller.width(state_of(known, np.array([holds**rounds]))):
            rounds, known = rounds + 1, np.array([holds**rounds])
        accepted = min(int(random.geometric(1 - holds)) - 1, rounds)
        controller.observe(1 + accepted, 1 + rounds * round_s)
        if iteration >= 500:
            tokens, seconds = tokens + 1 + accepted, seconds + 1 + rounds * round_s
    assert tokens / seconds > 0.93 * best


def test_the_published_coin_never_asks_what_a_round_costs() -> None:
    def rounds(second: float) -> list[int]:
        controller, found = thompson(seed=3), list[int]()
        for _ in range(50):
            count, best = 0, NONE
            while controller.width(state_of(best, np.array([0.5]))):
                count, best = count + 1, np.array([0.5])
            controller.observe(3, second)
            found.append(count)
        return found

    assert rounds(0.001) == rounds(1000.0)


def test_only_the_calibrated_one_listens_to_the_draft() -> None:
    def mean(calibrated: bool, likely: float) -> float:
        found = []
        for seed in range(300):
            controller = thompson(calibrated=calibrated, seed=seed)
            found.append(rounds_of(controller, 0, likely))
        return float(np.mean(found))

    assert mean(False, 0.05) == mean(False, 0.95)
    assert 1.5 * mean(True, 0.05) < mean(False, 0.5) < mean(True, 0.95)


def test_the_tree_is_another_controllers() -> None:
    controller = ThompsonSampling(rated(MarginalRate(Costs(flat_until(1, 10.0)), 9), 1.0))
    assert controller.limit == 9
    assert controller.size(state_of(PROFILE)) == 0
