"""A cost curve: what was observed, what lies between, what the prior says where nothing was, and forgetting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.scheduler.pace.costs import MOST_ROWS, CostCurve

from ..fakes import many

ROWS = np.array([1, 2, 3, 5, 8, 16, 40, 64, 100, 256, 700, 1024, 4096])


def seconds(curve: CostCurve, rows: int) -> float:
    return float(curve.seconds(np.array(rows)))


def pass_s(rows: int) -> float:
    """As a streamed target's: flat, then rising."""
    return 0.5 + 0.004 * max(0, rows - 64)


def observed(curve: CostCurve, rows: int, value: float, count: int = 100) -> CostCurve:
    for _ in range(count):
        curve.observe(rows, value)
    return curve


def test_learns_a_curve_and_what_lies_between() -> None:
    curve = CostCurve()
    for _ in range(60):
        for exponent in range(10):
            curve.observe(2**exponent, pass_s(2**exponent))
    for rows in (1, 2, 16, 64, 128, 256, 512):
        assert seconds(curve, rows) == pytest.approx(pass_s(rows), rel=0.2)
    for low, middle, high in ((1, 6, 8), (128, 200, 256), (256, 300, 512)):
        assert seconds(curve, low) <= seconds(curve, middle) < 1.01 * seconds(curve, high)


@many
@given(
    observations=st.lists(st.tuples(st.integers(1, 2 * MOST_ROWS), st.floats(1e-6, 1e3)), max_size=30),
    has_prior=st.booleans(),
)
def test_never_falls_and_never_ends(observations: list[tuple[int, float]], has_prior: bool) -> None:
    curve = CostCurve(pass_s if has_prior else None)
    for rows, value in observations:
        curve.observe(rows, value)
        found = curve.seconds(np.arange(2 * MOST_ROWS))
        assert (np.diff(found) >= 0).all()
        assert (found > 0).all()
        assert np.isfinite(found).all()


def test_the_prior_holds_where_nothing_was_seen() -> None:
    curve = CostCurve(pass_s)
    np.testing.assert_allclose(
        curve.seconds(ROWS[[0, 1, 3, 4, 5, 7, 9, 11]]), [pass_s(n) for n in ROWS[[0, 1, 3, 4, 5, 7, 9, 11]]], rtol=0.02
    )
    assert curve.is_known


def test_few_rows_tell_the_floor_and_many_the_slope() -> None:
    curve = observed(CostCurve(pass_s), 16, 2 * pass_s(16))
    for rows in (1, 16, 32):
        assert seconds(curve, rows) == pytest.approx(2 * pass_s(rows), rel=0.05)
    assert seconds(curve, 4096) < 2 * pass_s(4096), "nobody has seen it, so it may be cheap"
    observed(curve, 1024, 3 * pass_s(1024))
    assert seconds(curve, 1024) == pytest.approx(3 * pass_s(1024), rel=0.1)
    assert seconds(curve, 4096) == pytest.approx(3 * pass_s(4096), rel=0.2)
    assert seconds(curve, 16) == pytest.approx(2 * pass_s(16), rel=0.1)


@pytest.mark.parametrize("slope", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("floor", [0.25, 1.0, 4.0])
def test_a_wrong_prediction_is_corrected_by_three_numbers_of_rows(floor: float, slope: float) -> None:
    """floor, slope: the true ones, over the prediction's."""
    curve, rows = CostCurve(pass_s), np.array([2, 24, 128, 512, 2048])
    true = np.maximum(0.5 * floor, 0.5 * floor + 0.004 * slope * (rows - 64 * floor / slope))
    for _ in range(2):
        for place in (0, 2, 4):
            curve.observe(int(rows[place]), float(true[place]))
    np.testing.assert_allclose(curve.seconds(rows), true, rtol=0.35)


def test_a_pass_that_took_too_long_makes_fewer_rows_worth_trying() -> None:
    """Either weights come more slowly than predicted, or each row costs more. If it is the rows, fewer cost less."""
    curve = CostCurve(pass_s)
    curve.observe(256, 4 * pass_s(256))
    assert seconds(curve, 256) == pytest.approx(4 * pass_s(256), rel=0.1)
    assert seconds(curve, 16) < 2 * pass_s(16)


def test_rows_that_are_surely_hidden() -> None:
    """Of a prompt of 16 rows, most worlds have 8 more for nothing, few have 1000; where it was seen, all know."""
    curve = CostCurve(pass_s)
    before = curve.hidden_rows(16, 1.15)
    for _ in range(5):
        for rows in (16, 60, 200):
            curve.observe(rows, pass_s(rows))
    after = curve.hidden_rows(16, 1.15)
    assert 0 < before < after
    assert pass_s(16 + after) <= 1.3 * pass_s(16)
    assert CostCurve().hidden_rows(16, 1.15) == MOST_ROWS, "without a prediction there is nothing to go by"


def test_forgets_old_costs() -> None:
    """Though what lies to both sides was learnt with the old ones, and is remembered longer."""
    curve = observed(CostCurve(pass_s), 32, 5.0)
    assert seconds(observed(curve, 32, 1.0, count=40), 32) == pytest.approx(1.0, rel=0.02)


def test_one_outlier_moves_little() -> None:
    curve = observed(CostCurve(), 32, 1.0)
    curve.observe(32, 2.0)
    assert 1.0 < seconds(curve, 32) < 1.2


def test_the_first_observation_is_believed_and_hope_fills_the_rest() -> None:
    """More rows may cost nothing more, and fewer as much less: what might be better is tried."""
    curve = CostCurve()
    assert not curve.is_known
    curve.observe(16, 7.0)
    assert curve.is_known
    np.testing.assert_allclose(curve.seconds(np.array([16, 17, 40, 4096])), 7.0)
    hoped = curve.seconds(np.array([1, 2, 4]))
    np.testing.assert_allclose(hoped, hoped[0] * np.array([1, 2, 4]))
    assert hoped[0] < 1.0


def test_weight_says_where_was_observed() -> None:
    curve = CostCurve(pass_s)
    assert curve.weight(1) == curve.weight(16) == 0
    curve.observe(16, 1.0)
    once = curve.weight(16)
    observed(curve, 16, 1.0)
    assert 0 < once < curve.weight(16) <= 1
    assert curve.weight(16) > 0.9
    assert curve.weight(13) > 0.5 > 0.1 > curve.weight(1)
    assert curve.weight(10**6) == curve.weight(MOST_ROWS)
