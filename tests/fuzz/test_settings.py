"""Some random combinations of settings; `scripts/fuzz` tries thousands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..fixed_choices import end_with_test
from .settings import run_cases

NUM_CASES = int(os.environ.get("FUZZ_CASES", "1"))


@pytest.mark.slow
def test_texts_of_random_settings_are_plain_decodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with_test(monkeypatch)
    outcomes, wrong = run_cases(range(NUM_CASES), tmp_path)
    assert wrong == []
    assert outcomes.total() - outcomes["refused"] > NUM_CASES / 2
