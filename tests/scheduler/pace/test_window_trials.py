"""A draft's window is tried, kept where it brings as many tokens, and tried again otherwise."""

from __future__ import annotations

import pytest

from offspec.scheduler.pace.window_trials import WindowTrials


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
