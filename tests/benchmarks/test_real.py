"""benchmarks.real: prompts, estimates over prompts, results that survive an interruption, and a run on a small pair."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.real import __main__ as real
from benchmarks.real.estimates import ratio_of_rates, ratio_of_sums
from benchmarks.real.prompts import read_set
from benchmarks.real.results import Cell, CellKey, Results
from benchmarks.real.rows import OffspecRow, SpecExecRow

from ..offspec.model.heads.head_twins import EAGLE_CONFIG, eagle_tensors, write_folder
from ..pair import build_pair

KEY = CellKey("target", "draft", "offspec", 64, "mt_bench", 2, 8, 0.0)


def questions(file: Path, *, categories: int = 2, each: int = 3) -> Path:
    lines = [
        {"question_id": f"{kind}{i}", "category": kind, "turns": [f"def {kind}_{i}(", "again"]}
        for kind in "abcdefgh"[:categories]
        for i in range(each)
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


def test_the_first_prompts_cover_the_categories(tmp_path: Path) -> None:
    names = [prompt.name for prompt in read_set(str(questions(tmp_path / "set.jsonl", categories=3)), tmp_path)]
    assert names == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "c2"]


def test_sets_are_chats_of_one_message(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as out:
        out.write(json.dumps({"task_id": "HumanEval/0", "prompt": "def area(r):\n"}) + "\n")
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"id": "g0", "prompt": "1 + 1?"}) + "\n", encoding="utf-8")
    for name, part in (("humaneval", "def area(r):\n"), ("gsm8k", "1 + 1?")):
        (prompt,) = read_set(name, tmp_path)
        (message,) = prompt.messages
        assert message["role"] == "user"
        assert part in message["content"]


def test_rates_are_compared_by_prompt() -> None:
    """Twice as fast on both prompts, the second of which ran on a machine of half the speed."""
    gain = ratio_of_rates([10, 10], [1, 2], [20, 20], [4, 8])
    assert (gain.low, gain.value, gain.high) == (2, 2, 2)
    other = ratio_of_rates([10, 10], [1, 1], [10, 10], [2, 4])
    assert (other.low, other.value, other.high) == (2, 3, 4)


def test_a_ratio_lies_in_its_interval() -> None:
    same = ratio_of_sums([10, 20, 30], [5, 10, 15])
    assert (same.value, same.low, same.high) == (2, 2, 2)
    spread = ratio_of_sums([10, 40, 30, 8], [10, 10, 10, 8])
    assert 1 <= spread.low < spread.value < spread.high <= 4
    assert spread.value == 88 / 38


def test_results_are_read_again_without_a_line_that_was_cut(tmp_path: Path) -> None:
    file, cell = tmp_path / "results.jsonl", Cell(KEY, [8, 8], [2, 4], [0.0, 0.9], [1.5, 2.5])
    Results(file, Cell.read).add(cell)
    with file.open("a", encoding="utf-8") as out:
        out.write('{"key": {"model": "tar')
    again = Results(file, Cell.read)
    assert again.get(KEY) == cell
    assert again.entries.keys() == {KEY}
    again.add(cell)
    assert Results(file, Cell.read).get(KEY) == cell  # on a line of its own


@pytest.mark.slow
def test_a_run_measures_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["--model", "builtin", "--draft", "auto", "--sets", str(questions(tmp_path / "set.jsonl"))]
    args += ["--prompts", "2", "--tokens", "6", "--temperatures", "0", "--budgets", "8", "--context", "256"]
    args += ["--folder", str(tmp_path / "run"), "--only", r"authors|^offspec$|^lookup|at 0.7", "--raw"]
    real.main(args)
    first = capsys.readouterr()
    assert "| SpecExec (authors' settings) |" in first.out
    assert first.err.count("tokens per pass") == 4
    lines = (tmp_path / "run" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 5  # four methods, and how far draft and target agree
    monkeypatch.setattr(OffspecRow, "replay", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(SpecExecRow, "replay", lambda *_: pytest.fail("measured again"))
    real.main(args)
    assert capsys.readouterr().out == first.out


@pytest.mark.slow
def test_copies_of_the_targets_layers_are_drafts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "builtin", "--draft", "none", "--sets", str(questions(tmp_path / "set.jsonl"))]
    args += ["--prompts", "1", "--tokens", "6", "--temperatures", "1", "--budgets", "8", "--context", "256", "--raw"]
    real.main([*args, "--folder", str(tmp_path / "run"), "--own", "shadow:4/0,resident/6"])
    lines = (tmp_path / "run" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    drafts = [json.loads(line)["key"]["draft"] for line in lines]
    assert len(set(drafts)) == 2
    assert len(drafts) == 6  # each alone, with recall and lookup, and as a chain, since its trees are small
    assert "| offspec, no recall, no lookup |" in capsys.readouterr().out


def test_heads_are_drafts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head reads states of the target, which a replay has to compute."""
    pair = build_pair(tmp_path, num_layers=3)
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    write_folder(tmp_path / "head", EAGLE_CONFIG | taps, eagle_tensors(3))
    args = ["--model", str(pair.target), "--draft", str(tmp_path / "head"), "--folder", str(tmp_path / "run")]
    args += ["--sets", str(questions(tmp_path / "set.jsonl")), "--prompts", "1", "--tokens", "6", "--raw"]
    real.main([*args, "--temperatures", "0", "--budgets", "4", "--context", "64", "--only", "^offspec$|chain"])
    shown = capsys.readouterr().out
    assert "| offspec | " in shown
    assert "| offspec, a chain, no recall, no lookup | " in shown
