"""Rows of the table of long texts: their columns, and the end of a text after random entries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.long_texts import measure_memory

from ..pair import build_pair


@pytest.mark.parametrize(("kv_cache", "last"), [("16", None), ("8", 40), ("4", 200)])
def test_a_row(kv_cache: str, last: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 100 tokens; more than all of them cannot be the last ones."""
    model = build_pair(tmp_path, num_layers=3, max_position_embeddings=1024).target
    measure_memory(str(model), 100, kv_cache, last)
    cells = [cell.strip() for cell in capsys.readouterr().out.strip().strip("|").split("|")]
    assert cells[:2] == ["100", kv_cache]
    assert re.fullmatch(r"[+-]\d+\.\d%", cells[5])
    assert all(float(cell) > 0 for cell in cells[3:5] + cells[6:7])
