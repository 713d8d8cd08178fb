"""The drafts that need no other model are measured, and the cost model of a card says what each would bring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.drafts import card_model, own_layers

from ..pair import build_pair


@pytest.mark.slow
def test_every_draft_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = build_pair(tmp_path, 4, max_position_embeddings=1024).target
    few = ("--prompts", "1", "--tokens", "6", "--budgets", "4,8", "--temperatures", "0", "--dtype", "fp32")
    own_layers.main(["--model", str(target), "--resident", "1", *few])
    *_, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    shadows = [f"shadow ({bits} bits, 3 of 4 layers)" for bits in (4, 3, 2)]
    names = [*shadows, "resident (1 of 4 layers)", "exit (2 of 4 layers)", "lookup"]
    assert [row["draft"] for row in rows] == [name for name in names for _ in range(2)]
    assert all(1 <= row["worst_prompt"] <= row["tokens_per_pass"] <= row["best_prompt"] <= 6 for row in rows)


def test_the_model_of_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    card_model.main(["--cases", "32b,7b,70b"])
    said = capsys.readouterr().out
    rows = {(row["case"], row["draft"]): row for row in json.loads(said.splitlines()[-1])}
    for row in rows.values():
        for greedy_or_sampled in range(2):
            ways = ("unpacked", "as built", "hidden")
            unpacked, built, hidden = (row["rates"][way][greedy_or_sampled] for way in ways)
            assert unpacked <= built * 1.001 <= hidden * 1.002
    unpacked, built = (rows["32b", "shadow:3"]["rates"][way][0] for way in ("unpacked", "as built"))
    assert built > 1.5 * unpacked
    assert rows["7b", "0.5b"]["resident"] > rows["7b", "shadow:4"]["resident"]
    assert rows["7b", "0.5b"]["greedy"]["round_s"] < rows["7b", "shadow:4"]["greedy"]["round_s"]
    assert not {("70b", "shadow:4"), ("32b", "shadow:4")} & rows.keys()
    assert "shadow:4: " in said
