"""What `benchmarks/scheduling/joint.py` says of texts beside their likelihood, and that it says what it measured."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import pytest

from benchmarks.scheduling import joint
from benchmarks.scheduling.joint import Row, Text, repeated_share
from benchmarks.scheduling.references import reference_of, rouge_l


def test_what_was_there_before_is_counted() -> None:
    assert repeated_share([1, 2, 3, 4, 5]) == 0
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share([1] * 8) == 4 / 5  # of five 4-grams one is new
    assert repeated_share([1, 2, 1, 2, 1, 2, 1]) == 2 / 4


def test_gains_are_by_prompt_and_may_leave_out_what_repeats_more() -> None:
    greedy = Row("greedy", None, [Text(-1.0, 0.2, 0.0, 8, 8), Text(-2.0, 0.2, 0.0, 8, 8)])
    other = Row("joint", 0.1, [Text(-0.5, 0.3, 0.0, 8, 2), Text(-2.25, 0.2, 0.0, 8, 2)])
    assert other.gains(greedy) == [0.5, -0.25]
    assert other.gains(greedy, fresh=True) == [-0.25]
    assert (other.log_likelihood, other.tokens_per_pass) == (-1.375, 4.0)


@pytest.mark.parametrize(
    ("tokens", "reference", "common"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [3, 2, 1], 1), ([1, 5, 2, 6, 3], [1, 2, 9, 3], 3), ([1, 1], [1], 1)],
)
def test_rouge_counts_the_longest_common_subsequence(tokens: list[int], reference: list[int], common: int) -> None:
    expected = 2 * common / (len(tokens) + len(reference))
    assert rouge_l(tokens, reference) == rouge_l(reference, tokens) == pytest.approx(expected)
    assert rouge_l(tokens, []) == 0


def test_references_follow_their_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("def first():\n    pass\n\ndef second():\n    pass\n", encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert reference_of("pass\n\ndef sec") == "ond():\n    pass\n"
    assert reference_of("class") is None


@pytest.mark.slow
def test_a_measurement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = ("--max-prompts", "2", "--max-new-tokens", "8", "--taus", "0.1,1", "--beam", "4", "--gamma", "4")
    monkeypatch.setattr(sys, "argv", ["joint.py", *small, "--plot", str(tmp_path / "joint.svg")])
    joint.main()
    *_, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    assert [row["tau"] for row in rows] == [None, None, 0.1, 1.0, 0.5]
    plain, exact, *_ = rows
    assert (plain["log_likelihood"], plain["tokens_per_pass"]) == (pytest.approx(exact["log_likelihood"], abs=1e-5), 1)
    assert "τ 0.1" in (tmp_path / "joint.svg").read_text(encoding="utf-8")
