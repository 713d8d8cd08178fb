"""Thompson sampling stops where its coin says so, and Calibration-TS begins with the draft's confidence."""

from __future__ import annotations

from typing import get_args

import numpy as np

from offspec.research.methods import STOPPING
from offspec.research.thompson import CalibrationSampling, ThompsonSampling
from offspec.scheduler.pace.controllers import FixedBudget, MarginalRate
from offspec.scheduler.pace.costs import Costs
from offspec.scheduler.params import Stopping

from ...scheduler.pace.test_controllers import NONE, PROFILE, flat_until, rated, state_of


def thompson(seed: int = 0) -> ThompsonSampling:
    return ThompsonSampling(FixedBudget(50, 16), seed=seed)


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


def test_the_published_coin_never_asks_what_a_round_costs() -> None:
    def rounds(second: float) -> list[int]:
        controller, counts = thompson(seed=3), list[int]()
        for _ in range(50):
            count, best = 0, NONE
            while controller.width(state_of(best, np.array([0.5]))):
                count, best = count + 1, np.array([0.5])
            controller.observe(3, second)
            counts.append(count)
        return counts

    assert rounds(0.001) == rounds(1000.0)


def test_the_tree_is_another_controllers() -> None:
    controller = ThompsonSampling(rated(MarginalRate(Costs(flat_until(1, 10.0)), 9), 1.0))
    assert controller.limit == 9
    assert controller.size(state_of(PROFILE)) == 0


def surely_drafted(controller: CalibrationSampling, depth: int, confidence: float, most: int = 40) -> int:
    """Rounds until it stops; each continuation of the best path has this confidence. Then the verdict."""
    rounds, best = 0, NONE
    while rounds < most and controller.width(state_of(best, np.array([confidence**rounds]))):
        rounds, best = rounds + 1, np.array([confidence**rounds])
    controller.observe(1 + depth, 1.0)
    return rounds


def test_calibration_sampling_starts_with_the_drafts_confidence() -> None:
    """Before any verdict, the expected bias of the coin is near the confidence."""

    def mean(confidence: float) -> float:
        controllers = (CalibrationSampling(FixedBudget(50), seed=seed) for seed in range(300))
        return float(np.mean([surely_drafted(each, 0, confidence) for each in controllers]))

    assert mean(0.1) < 1.5 < 3 < mean(0.8) < mean(0.95)


def test_calibration_sampling_learns_how_many_levels_hold() -> None:
    """The same confidence is worth less to a draft that was wrong; and it counts after many verdicts, too."""

    def mean(depth: int, confidence: float) -> float:
        controller = CalibrationSampling(FixedBudget(50), seed=1)
        return float(np.mean([surely_drafted(controller, depth, confidence) for _ in range(300)][100:]))

    assert mean(0, 0.9) < 0.5 * mean(20, 0.9)
    assert mean(3, 0.2) < 0.95 * mean(3, 0.9)


def test_every_way_to_stop_has_a_controller() -> None:
    assert {*STOPPING, "default"} == {*get_args(Stopping)}
