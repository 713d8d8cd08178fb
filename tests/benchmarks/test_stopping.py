"""Rules from the literature stop where their papers say, and Sequoia's size is chosen for the machine."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scheduling.replay import Costs
from benchmarks.scheduling.stopping import (
    WIDTH,
    CalibrationSampling,
    GoesOn,
    Stopping,
    best_size,
    dynamic_depth,
    kangaroo,
    sequoia_size,
    spec_dec_pp,
    to_depth,
)
from offspec.lab.sequoia import MeasuredAcceptance, best_topology
from offspec.scheduler.pace.budget import DraftingState, FixedBudget
from offspec.scheduler.trees.token_tree import FloatArray

from ..offspec.lab.test_layered_trees import Path, all_trees, rank_paths
from ..scheduler.fakes import few
from ..scheduler.pace.test_budget import NONE, state_of

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
    assert sizes["free rows"].budget == 128
    assert 0 < sizes["dear rounds"].depth < sizes["free rows"].depth
    assert (sizes["dear rows"].budget, sizes["dear rows"].depth) == (0, 0)


@few
@given(
    acceptance=st.lists(st.floats(0.01, 1), min_size=1, max_size=3),
    flat=st.integers(0, 5),
    slope=st.floats(0.01, 1),
    round_s=st.sampled_from([0.0, 0.05, 0.5, 5.0]),
)
def test_size_and_depth_are_the_fastest(acceptance: list[float], flat: int, slope: float, round_s: float) -> None:
    pass_s = 1 + slope * np.maximum(0, np.arange(6) - flat)
    num_nodes, depth = best_size(np.array(acceptance), 4, pass_s, round_s)

    def rate(tree: Collection[Path]) -> float:
        tokens = 1 + sum(math.prod(acceptance[rank] for rank in path) for path in tree)
        return tokens / float(pass_s[len(tree)] + round_s * max(map(len, tree), default=0))

    chosen = best_topology(np.array(acceptance), num_nodes, depth) if depth else None
    found = rate(rank_paths(chosen)) if chosen is not None else rate([])
    assert found == pytest.approx(max(rate(tree) for tree in all_trees(len(acceptance), 5, 4)))


# ---------------------------------------------------------------------------------------------- Calibration-TS


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
        return float(
            np.mean(
                [surely_drafted(CalibrationSampling(FixedBudget(50), seed=seed), 0, confidence) for seed in range(300)]
            )
        )

    assert mean(0.1) < 1.5 < 3 < mean(0.8) < mean(0.95)


def test_calibration_sampling_learns_how_many_levels_hold() -> None:
    """The same confidence is worth less to a draft that was wrong; and it counts after many verdicts, too."""

    def mean(depth: int, confidence: float) -> float:
        controller = CalibrationSampling(FixedBudget(50), seed=1)
        return float(np.mean([surely_drafted(controller, depth, confidence) for _ in range(300)][100:]))

    assert mean(0, 0.9) < 0.5 * mean(20, 0.9)
    assert mean(3, 0.2) < 0.95 * mean(3, 0.9)
