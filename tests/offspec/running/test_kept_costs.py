"""What passes took is kept for the next process, for the same machine, arithmetic and placement."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from offspec import Engine, SamplingParams
from offspec.loaded_target import LoadedTarget
from offspec.planning.plan import Plan
from offspec.user_folders import user_folder

ROWS = np.array([1, 64])
CONTENTS = (b"", b"\0\1", b"[1]", b'{"pass": 3}', b'{"pass": [[0, 1.0], [1, -1.0], ["a"], 7, [4, NaN], [true, 1.0]]}')


def _kept() -> list[Path]:
    return sorted(user_folder("cache").glob("costs-*.json"))


def _loaded(arithmetic: Literal["exact", "fast"] = "exact") -> Engine:
    return Engine.load("builtin", draft="lookup", device="cpu", arithmetic=arithmetic)


def _generate(engine: Engine) -> None:
    list(engine.generate("def f(x):", SamplingParams(max_new_tokens=16)))


def test_the_next_process_begins_with_what_was_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadedTarget, "predict_pass_s", lambda target, rows: 1 + 0.01 * rows)
    with _loaded() as engine:
        for rows in (1, 64):
            engine.draft_stats.costs.target.observe(rows, 4 * (1 + 0.01 * rows))
    assert len(_kept()) == 1
    with _loaded() as engine:
        target = engine.draft_stats.costs.target
        assert (target.seconds(ROWS) > 2 * engine.models._new_stats().costs.target.seconds(ROWS)).all()
        assert target.most_rows == 0  # trees begin small, nevertheless


def test_another_arithmetic_begins_anew() -> None:
    ways: tuple[Literal["exact", "fast"], ...] = ("exact", "fast")
    for arithmetic in ways:
        with _loaded(arithmetic) as engine:
            _generate(engine)
    assert len(_kept()) == 2


def test_what_two_placements_took_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as after memory ran out, and layers were loaded again elsewhere."""
    with _loaded() as engine:
        engine.draft_stats.costs.target.observe(8, 1.0)
        monkeypatch.setattr(Plan, "tiers", "7 resident, 1 on disk")
    assert _kept() == []


@pytest.mark.parametrize("content", CONTENTS)
def test_a_damaged_file_changes_nothing(content: bytes) -> None:
    with _loaded() as engine:
        _generate(engine)
    (kept,) = _kept()
    kept.write_bytes(content)
    with _loaded() as engine:
        target = engine.draft_stats.costs.target
        np.testing.assert_array_equal(target.seconds(ROWS), engine.models._new_stats().costs.target.seconds(ROWS))
