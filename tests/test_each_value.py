"""`each_value` keeps the runs of a test in which each value of each parameter occurs."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from .each_value import Value, covering, spared


def runs(*axes: str, together: int = 1) -> dict[str, set[Value]]:
    """The product of axes, each of which is a word of values."""
    return {"".join(run): set(combinations(enumerate(run), together)) for run in product(*axes)}


def test_each_value_occurs_and_no_run_is_for_nothing() -> None:
    assert covering(runs("abc", "xy")) == {"ax", "by", "cx"}
    assert covering(runs("abc", "xyz", "12")) == {"ax1", "by2", "cz1"}
    assert covering(runs("abc")) == {"a", "b", "c"}
    assert covering({"": set()}) == {""}


def test_each_pair_of_values_occurs() -> None:
    chosen = covering(runs("abc", "xyz", "12", together=2))
    assert len(chosen) == 9
    for one, other in (("abc", "xyz"), ("abc", "12"), ("xyz", "12")):
        assert all(any({*pair} <= {*run} for run in chosen) for pair in product(one, other))


@pytest.mark.each_value
@pytest.mark.parametrize(("one", "other"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("third", "xyz")
def test_here(one: int, other: int, third: str, request: pytest.FixtureRequest) -> None:
    """Values that are set together are one."""
    if not request.config.getoption("--nightly"):
        items = [item for item in request.session.items if item.name.startswith("test_here")]
        assert len(items) <= 3
        assert not spared(items)
