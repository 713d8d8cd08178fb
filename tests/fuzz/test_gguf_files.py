"""Some damaged GGUF files; `scripts/fuzz` tries thousands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the gguf package writes the files: pip install 'offspec[test]'")

from .gguf_files import run_cases

NUM_CASES = int(os.environ.get("FUZZ_CASES", "10"))


@pytest.mark.slow
def test_damaged_gguf_files_are_refused_or_write_a_text(tmp_path: Path) -> None:
    found = run_cases(range(NUM_CASES), tmp_path)
    assert found.wrong == []
    assert found.outcomes["refused"] > NUM_CASES / 4
    assert found.outcomes["same"] + found.outcomes["loaded"] > NUM_CASES / 10
