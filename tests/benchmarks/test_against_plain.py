"""benchmarks.scheduling.against_plain: settings by turns, on the same texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.scheduling.against_plain import main

from ..pair import build_pair


def test_a_run_has_a_row_for_each_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = build_pair(tmp_path)
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps({"question_id": 1, "turns": ["def area("]}), encoding="utf-8")
    args = ["--model", str(pair.target), "--draft", str(pair.draft), "--budgets", "4", "--temperatures", "0"]
    args += ["--prompts", "1", "--tokens", "6", "--repeats", "1", "--set", str(file)]
    monkeypatch.setattr(sys, "argv", ["against_plain", *args])
    main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["setting"] for row in rows] == ["plain", "4 nodes", "auto"]
    assert rows[0]["tokens_per_pass"] == 1
    assert rows[2]["ratio"] == [1]
