"""Settings that cannot be meant are refused by their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offspec.errors import UsageError
from offspec.scheduler.params import SamplingParams, SpeculationParams

from ..refusals import refused


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (SamplingParams, {"temperature": "0.5"}, "temperature number '0.5'"),
        (SamplingParams, {"temperature": None}, "temperature number"),
        (SamplingParams, {"max_new_tokens": 2.5}, "max_new_tokens whole number 2.5"),
        (SamplingParams, {"seed": "1"}, "seed whole number None '1'"),
        (SamplingParams, {"stop": 5}, "stop tuple"),
        (SamplingParams, {"stop": ("a", 5)}, "stop tuple"),
        (SamplingParams, {"stop": "a"}, "stop tuple"),
        (SpeculationParams, {"budget": "auto"}, "budget whole number None 'auto'"),
        (SpeculationParams, {"tau": [0.5]}, "tau number"),
    ],
)
def test_what_is_no_number_is_named(kind: Any, settings: dict[str, Any], words: str) -> None:
    with refused(UsageError, *words.split()):
        kind(**settings)


def test_numbers_of_numpy_are_numbers() -> None:
    SamplingParams(np.int64(3), np.float32(0.5), np.uint8(2), seed=np.uint64(7), stop=["a"])  # type: ignore[arg-type]
    SpeculationParams(np.int32(8), tau=np.float64(0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "unknown", "words"),
    [
        (SamplingParams, "max_tokens", ("did you mean max_new_tokens?",)),
        (SamplingParams, "xyzzy", ("max_new_tokens", "temperature", "stop")),
        (SpeculationParams, "budgets", ("did you mean budget?",)),
    ],
)
def test_a_setting_of_another_name_is_refused(kind: Any, unknown: str, words: tuple[str, ...]) -> None:
    with refused(UsageError, kind.__name__, unknown, *words):
        kind(**{unknown: 3})
