"""What is learnt is kept in one place, each part ready before the first request."""

from __future__ import annotations

import numpy as np
import pytest

from offspec.scheduler.drafting.estimates import RunningEstimates


@pytest.mark.parametrize("shares_cores", [True, False])
def test_before_the_first_request_costs_are_predicted_and_cores_decide_about_overlap(shares_cores: bool) -> None:
    estimates = RunningEstimates.nothing(50, lambda rows: 2.0 + rows, shares_cores=shares_cores)
    np.testing.assert_allclose(estimates.costs.target.seconds(np.array([1, 4])), [3.0, 6.0])
    assert estimates.overlap_switch is not None
    assert estimates.overlap_switch.is_on() != shares_cores
    assert estimates.lookups is not estimates.retrievals
    assert len(estimates.recycling.table.successors(np.array([49]))[0]) == 1, "it has the target's vocabulary"


def test_nothing_is_shared_between_two() -> None:
    one, other = RunningEstimates.nothing(5), RunningEstimates.nothing(5)
    assert not any(getattr(one, name) is getattr(other, name) for name in one.__dataclass_fields__)
