"""Some damaged checkpoints, plain, quantised and GGUF; `scripts/fuzz` tries thousands."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ..pair import build_pair
from . import checkpoints, quantised
from .checkpoints import Findings


def plain(numbers: range, folder: Path) -> Findings:
    return checkpoints.run_cases(numbers, build_pair(folder).target, folder / "damaged")


def of_all_forms(numbers: range, folder: Path) -> Findings:
    return quantised.run_cases(numbers, quantised.build_all(folder), folder / "damaged")


def gguf(numbers: range, folder: Path) -> Findings:
    pytest.importorskip("gguf", reason="the gguf package writes the files: pip install 'offspec[test]'")
    from . import gguf_files

    return gguf_files.run_cases(numbers, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("run_cases", "count"), [(plain, 16), (of_all_forms, 10), (gguf, 10)])
def test_damaged_weights_are_refused_or_write_a_text(
    run_cases: Callable[[range, Path], Findings], count: int, tmp_path: Path
) -> None:
    count = int(os.environ.get("FUZZ_CASES", count))
    found = run_cases(range(count), tmp_path)
    assert found.wrong == []
    assert found.outcomes["refused"] > count / 4
    assert found.outcomes["same"] + found.outcomes["loaded"] > count / 10
