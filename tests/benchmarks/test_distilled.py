"""A draft that was distilled, beside the one it comes from: the commands of docs/results/drafts.md in this order."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.drafts import distilled
from offspec.cli.main import run

from ..pair import build_pair


@pytest.mark.slow
def test_lessons_then_training_then_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, headers = build_pair(tmp_path, max_position_embeddings=256), tmp_path / "headers"
    headers.mkdir()
    for number in range(8):
        (headers / f"{number}.h").write_text(f"int number_{number}(int width);\n" * 20)
    lessons, result = tmp_path / "lessons.txt", tmp_path / "result"
    monkeypatch.setattr(sys, "argv", ["distilled", "lessons", str(lessons), "--folder", str(headers)])
    distilled.main()
    flags = ("--text", str(lessons), "--prompt-tokens", "8", "--text-tokens", "16", "--num-texts", "16", "--steps", "1")
    assert run(["distill", str(pair.target), "--draft", str(pair.draft), *flags, "--out", str(result), "-q"]) == 0
    capsys.readouterr()
    wanted = ("--model", str(pair.target), "--drafts", f"{pair.draft},{result}", "--folder", str(headers))
    small = ("--held-out", "1", "--prompt-tokens", "16", "--max-new-tokens", "8")
    monkeypatch.setattr(sys, "argv", ["distilled", "measure", *wanted, *small])
    distilled.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["draft"] for row in rows] == [str(pair.draft), str(result)]
    assert all(row["alone"] >= 1 for row in rows)
