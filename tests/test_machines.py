"""Processors that tests set: what kernels are made for, and what is skipped."""

from __future__ import annotations

import pytest

from . import machines
from .machines import AMX, AVX2, AVX512, AVX512_BF16, NO_VECTORS, PROCESSORS, THIS, by_processor, lanes, needs


@by_processor("width, processor", (0, NO_VECTORS), (8, AVX2), (16, AVX512), (16, AVX512_BF16), (16, AMX))
def test_a_mark_sets_the_processor(width: int) -> None:
    assert lanes() == width


@pytest.mark.parametrize(
    ("this", "runs"),
    [
        (NO_VECTORS, set()),
        (AVX2, {THIS, AVX2}),
        (AVX512_BF16, {THIS, AVX2, AVX512, AVX512_BF16}),
        (AMX, {THIS, AVX2, AVX512, AVX512_BF16, AMX}),
    ],
)
def test_what_runs_on_a_machine(this: str, runs: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "PROCESSORS", PROCESSORS | {THIS: PROCESSORS[this]})
    assert {name for name in PROCESSORS if not needs(name).args[0]} == runs
