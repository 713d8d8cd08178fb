"""Rules from the literature stop where their papers say, and Sequoia's size is chosen for the machine."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scheduling.replay import Costs
from benchmarks.scheduling.stopping import (
    WIDTH,
    GoesOn,
    Stopping,
    dynamic_depth,
    kangaroo,
    sequoia_size,
    spec_dec_pp,
    to_depth,
)
from offspec.lab.sequoia import MeasuredAcceptance
from offspec.scheduler.pace.budget import DraftingState
from offspec.scheduler.trees.token_tree import FloatArray

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
