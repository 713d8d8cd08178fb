"""Settings that cannot be meant are refused by their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offspec.errors import UsageError
from offspec.scheduler.params import SamplingParams, SpeculationParams


@pytest.mark.parametrize(
    ("kind", "settings", "complaint"),
    [
        (SamplingParams, {"temperature": "0.5"}, "temperature must be a number, not '0.5'"),
        (SamplingParams, {"temperature": None}, "temperature has no value; give a number"),
        (SamplingParams, {"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, not 2.5"),
        (SamplingParams, {"seed": "1"}, "seed must be a whole number or None, not '1'"),
        (SamplingParams, {"stop": 5}, "stop must be a tuple of texts"),
        (SamplingParams, {"stop": ("a", 5)}, "stop must be a tuple of texts"),
        (SamplingParams, {"stop": "a"}, "stop must be a tuple of texts"),
        (SpeculationParams, {"budget": "auto"}, "budget must be a whole number or None, not 'auto'"),
        (SpeculationParams, {"tau": [0.5]}, "tau must be a number"),
    ],
)
def test_what_is_no_number_is_named(kind: Any, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=f"^{complaint}"):
        kind(**settings)


def test_numbers_of_numpy_are_numbers() -> None:
    SamplingParams(np.int64(3), np.float32(0.5), np.uint8(2), seed=np.uint64(7), stop=["a"])  # type: ignore[arg-type]
    SpeculationParams(np.int32(8), tau=np.float64(0.5))  # type: ignore[arg-type]
