"""Averages weigh what came late more than what came early, and what did not pay is tried again later and later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.scheduler.pace.averages import DecayingSum, MovingAverage, Retry

from ..fakes import few

NUMBERS = st.lists(st.floats(-100, 100), max_size=20)


@few
@given(numbers=NUMBERS, forgetting=st.sampled_from([0.5, 0.9, 1.0]), initial=st.floats(-9, 9))
def test_a_sum_counts_each_addition_less_with_each_that_follows(
    numbers: list[float], forgetting: float, initial: float
) -> None:
    found = DecayingSum(forgetting, initial)
    for number in numbers:
        found.add(number)
    weights = forgetting ** np.arange(len(numbers) + 1)[::-1]
    assert found.value == pytest.approx(float(weights @ np.array([initial, *numbers])), abs=1e-9)


@few
@given(numbers=NUMBERS, rate=st.sampled_from([0.1, 0.5, 1.0]))
def test_a_moving_average_starts_at_the_first_number_or_at_its_initial_value(numbers: list[float], rate: float) -> None:
    empty, begun = MovingAverage(rate), MovingAverage(rate, initial=2.0)
    expected = [0.0, 2.0]
    for place, number in enumerate(numbers):
        empty.observe(number)
        begun.observe(number)
        expected[0] = number if place == 0 else (1 - rate) * expected[0] + rate * number
        expected[1] = (1 - rate) * expected[1] + rate * number
    assert [empty.value, begun.value] == pytest.approx(expected, abs=1e-9)


def test_what_does_not_pay_is_tried_after_ever_longer_waits() -> None:
    retry = Retry(first=3, longest=12)
    tries = [occasion for occasion in range(1, 60) if retry.is_worth_trying(pays=False)]
    assert tries == [3, 9, 21, 33, 45, 57]
    assert retry.is_worth_trying(pays=True)
    assert [retry.is_worth_trying(pays=False) for _ in range(4)] == [False, False, True, False], "from the start again"


def test_the_longer_something_has_not_paid_the_more_seldom_it_is_looked_at() -> None:
    retry, looks = Retry(first=64), list[int]()
    assert not retry.is_pausing
    for occasion in range(64):
        looks += [occasion] if retry.wants_look else []
        retry.is_worth_trying(pays=False)
        assert retry.is_pausing
    assert looks == [0, 1, 2, 3, 4, 16, 32, 48]
    retry.is_worth_trying(pays=True)
    assert (retry.wants_look, retry.is_pausing) == (True, False)
