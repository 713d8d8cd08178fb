from __future__ import annotations

import random

import pytest

from offspec.loaders.streaming.use_ranks import UseRanks


def test_the_lowest_is_what_a_sum_over_all_uses_says() -> None:
    """The plain twin adds up each use by its age."""
    luck, ranks, uses = random.Random(0), UseRanks(half_life=3.0), dict[int, list[tuple[int, float]]]()
    held = set[int]()
    for num_pass in range(200):
        for unit in luck.sample(range(12), 3):
            share = luck.choice([0.1, 0.5, 1.0])
            ranks.use(unit, num_pass, share)
            uses.setdefault(unit, []).append((num_pass, share))
            if unit not in held and len(held) < 6:
                ranks.hold(unit)
                held.add(unit)
        but = set(luck.sample(sorted(held), 2))
        sums = {unit: sum(share * 2 ** ((age - num_pass) / 3) for age, share in uses[unit]) for unit in held - but}
        lowest = ranks.lowest(but)
        assert lowest is not None
        assert sums[lowest] == pytest.approx(min(sums.values()))
        if num_pass % 2:
            ranks.drop(lowest)
            held.remove(lowest)


def test_none_is_lowest_if_all_are_needed() -> None:
    ranks = UseRanks()
    assert ranks.lowest(()) is None
    ranks.hold(1)
    assert ranks.lowest({1}) is None
    assert ranks.lowest(()) == 1


def test_a_pass_over_everything_does_not_drop_what_single_rows_use() -> None:
    ranks = UseRanks()
    for num_pass in range(6):
        ranks.use(0, num_pass, 0.5)
    for unit in range(1, 40):  # a prompt's
        ranks.use(unit, 6, 0.02)
    for unit in range(40):
        ranks.hold(unit)
    order = []
    while (unit := ranks.lowest(())) is not None:
        ranks.drop(unit)
        order.append(unit)
    assert order[-1] == 0
