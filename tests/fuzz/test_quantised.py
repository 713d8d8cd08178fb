"""Some damaged quantised checkpoints; `scripts/fuzz` tries thousands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .quantised import build_all, run_cases

NUM_CASES = int(os.environ.get("FUZZ_CASES", "10"))


@pytest.mark.slow
def test_damaged_quantised_checkpoints_are_refused_or_write_a_text(tmp_path: Path) -> None:
    found = run_cases(range(NUM_CASES), build_all(tmp_path), tmp_path / "damaged")
    assert found.wrong == []
    assert found.outcomes["refused"] > NUM_CASES / 4
    assert found.outcomes["same"] + found.outcomes["loaded"] > NUM_CASES / 10
