"""Some damaged checkpoints; `scripts/fuzz` tries thousands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..pair import build_pair
from .checkpoints import run_cases

NUM_CASES = int(os.environ.get("FUZZ_CASES", "16"))


@pytest.mark.slow
def test_damaged_checkpoints_are_refused_or_give_the_right_text(tmp_path: Path) -> None:
    found = run_cases(range(NUM_CASES), build_pair(tmp_path).target, tmp_path / "damaged")
    assert found.wrong == []
    assert found.outcomes["refused"] > NUM_CASES / 4
    assert found.outcomes["same"] > NUM_CASES / 10
