"""Averages weigh what came late more than what came early, and what did not pay is tried again later and later."""

from __future__ import annotations

from offspec.scheduler.pace.averages import Retry


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
