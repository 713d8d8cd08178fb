"""Some random schemas, regexes and grammars; `python -m tests.fuzz.constraints` and `scripts/fuzz` try more."""

from __future__ import annotations

import os

from .constraints import fuzz

NUM_CASES = int(os.environ.get("FUZZ_CASES", "80"))


def test_random_constraints_are_refused_or_followed() -> None:
    found = fuzz(NUM_CASES, seed=0)
    assert found["refused"] > NUM_CASES / 4
    assert found["followed"] > NUM_CASES / 10
