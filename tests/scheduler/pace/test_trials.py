"""Drafting beside the pass, and a draft's window: the better way is found, and followed when it changes."""

from __future__ import annotations

import numpy as np
import pytest

from offspec.scheduler.pace.trials import Overlap, OverlapSwitch, WindowTrials


def cycles(switch: OverlapSwitch, seconds: dict[bool, float], count: int) -> list[bool]:
    """Which way each cycle went, at these costs of two tokens."""
    ways = []
    for _ in range(count):
        ways.append(switch.is_on())
        switch.observe(ways[-1], 2.0, seconds[ways[-1]])
    return ways


@pytest.mark.parametrize("better", [True, False])
def test_the_switch_finds_the_better_way_and_tries_the_other_now_and_then(better: bool) -> None:
    ways = cycles(OverlapSwitch(), {better: 1.0, not better: 1.5}, 400)
    assert set(ways[:4]) == {True, False}
    others = [cycle for cycle, way in enumerate(ways) if way != better and cycle >= 4]
    assert 400 / OverlapSwitch.AGAIN - 2 <= len(others) <= 400 / OverlapSwitch.AGAIN + 2
    assert max(np.diff(others)) <= 2 * OverlapSwitch.AGAIN


@pytest.mark.parametrize("better", [True, False])
def test_where_cores_are_shared_the_switch_starts_without_and_finds_out_later(better: bool) -> None:
    ways = cycles(OverlapSwitch(shares_cores=True), {better: 1.0, not better: 1.5}, 400)
    assert not any(ways[: OverlapSwitch.AGAIN])
    assert True in ways
    assert np.mean([way == better for way in ways[2 * OverlapSwitch.AGAIN :]]) > 0.9


@pytest.mark.parametrize("shares_cores", [True, False])
@pytest.mark.parametrize("better", [True, False])
def test_passes_that_a_trial_slows_are_known(better: bool, shares_cores: bool) -> None:
    """They say nothing about the seconds of those that follow; passes with overlap that stays do."""
    switch, slowed, ways = OverlapSwitch(shares_cores=shares_cores), list[bool](), list[bool]()
    overlap = Overlap(allowed=True, switch=switch)
    for _ in range(400):
        ways.append(overlap.is_on)
        overlap.begin(is_on=ways[-1])
        slowed.append(overlap.was_slowing)
        overlap.observe(2.0, 1.0 if ways[-1] == better else 1.5)
    later = slice(2 * OverlapSwitch.AGAIN, None)
    assert slowed[later] == [way and not better for way in ways[later]]
    overlap.begin(is_on=False)  # nothing to draft
    assert not overlap.was_slowing


def test_the_switch_follows_a_change() -> None:
    switch = OverlapSwitch()
    for better in (True, False, True):
        ways = cycles(switch, {better: 1.0, not better: 3.0}, 40 * OverlapSwitch.AGAIN)
        assert np.mean([way == better for way in ways[-4 * OverlapSwitch.AGAIN :]]) > 0.9
        assert np.mean(ways) not in (0.0, 1.0)


# ------------------------------------------------------------------------------------------------ a request


def test_a_switch_has_the_last_word_where_overlap_is_allowed() -> None:
    switch = OverlapSwitch(shares_cores=True)
    assert not Overlap(allowed=True, switch=switch).is_on
    assert not Overlap(allowed=False, switch=OverlapSwitch()).is_on
    for was_on, seconds in ((True, 1.0), (False, 2.0)):
        overlap = Overlap(allowed=True, switch=switch)
        for _ in range(OverlapSwitch.AGAIN):
            overlap.begin(is_on=was_on)
            overlap.observe(2.0, seconds)
    assert [Overlap(allowed=True, switch=switch).is_on for _ in range(2)] == [switch.is_on()] * 2


def choices(trials: WindowTrials, length: int, tokens: dict[bool, int], num_requests: int) -> list[bool]:
    """What so many requests of 8 passes each choose; tokens: per pass, with and without the window."""
    found = list[bool]()
    for _ in range(num_requests):
        has_window = trials.choose(length)
        found.append(has_window)
        for _ in range(8):
            trials.observe(length, has_window, tokens[has_window])
    return found


@pytest.mark.parametrize(("with_window", "pays"), [(4, True), (2, False), (9, True)])
def test_both_are_measured_and_then_the_better_one_is_used(with_window: int, pays: bool) -> None:
    found = choices(WindowTrials(), 3000, {True: with_window, False: 4}, 40)
    assert found[:4] == [False, False, True, True]
    assert found[4:20] == [pays] * 16
    assert found[20:].count(not pays) == 1  # a trial, in case the texts have changed


def test_lengths_are_measured_apart_and_changes_are_noticed() -> None:
    trials = WindowTrials()
    choices(trials, 1500, {True: 5, False: 1}, 8)
    assert trials.choose(1900)
    assert not trials.choose(5000)
    assert choices(trials, 1500, {True: 1, False: 5}, 60)[-1] is False
