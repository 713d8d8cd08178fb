"""`offspec verify`: a small matrix is exact, and a text that differs is told in the exit code, on stderr
and in the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.cli.verify import table
from offspec.scheduler.trees import verify as scheduler_verify
from offspec.scheduler.trees.verify import Verdict
from offspec.tools.verification import Difference, Setting, VerificationReport

from ..pair import Pair
from ..refusals import tells
from .conftest import Offspec, with_draft


@pytest.fixture
def verify_args(pair: Pair, tmp_path: Path) -> Sequence[object]:
    """Two prompts, few tokens, temperatures 0 and 1."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def area(\n\nfor item in schön:\n", encoding="utf-8")
    small = ("--max-new-tokens", 6, "--temperatures", "0, 1", "--budgets", "1,8", "--device", "cpu")
    return ("verify", pair.target, "--draft", pair.draft, "--prompts", prompts, *small)


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation that lets the draft have its way once in a while; plain decoding stays as it is."""

    def walk(tree: Any, *args: Any, **more: Any) -> Verdict:
        verdict = scheduler_verify.verify_exactly(tree, *args, **more)
        if len(tree) == 0 or verdict.path:
            return verdict
        return Verdict([], [int(tree.tokens[-1])])

    monkeypatch.setattr("offspec.scheduler.drafting.drafter.verify_exactly", walk)


@pytest.mark.slow
def test_a_small_matrix_is_exact(verify_args: Sequence[object], offspec: Offspec) -> None:
    result = offspec(*verify_args, "--budgets", 8, "--max-prompts", 1, "--json")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert report.keys() == {
        *("model", "draft", "exact", "promise", "inexact_reason", "num_prompts", "num_tokens", "near_ties"),
        *("settings", "differences"),
    }
    assert (report["exact"], report["num_prompts"], report["differences"]) == (True, 1, [])
    combinations = {(s["temperature"], s["top_p"], s["draft"], s["scoring"], s["budget"]) for s in report["settings"]}
    assert len(report["settings"]) == len(combinations) == 2 * 2 * 2
    assert {(temperature, top_p) for temperature, top_p, *_ in combinations} == {(0, 1), (1, 0.9)}
    assert max(s["tokens_per_pass"] for s in report["settings"] if s["draft"] == "own") > 1.5


def test_near_ties_are_counted_in_the_last_line() -> None:
    one = Setting(0.0, 1.0, 8, "coupled", "own")
    ties = [Difference(one, 0, 3, 5, 6, gap, gap < 1) for gap in (0.0625, 2.0)]
    report = VerificationReport(2, 600, [one], [3.0], [500], ties)
    assert table(report).endswith("1 texts DIFFER beside 1 near-ties, 2 per 1,000 tokens, at most 0.062 apart")
    report = VerificationReport(2, 600, [one], [3.0], [500], ties[:1])
    assert table(report).endswith(
        "identical to plain decoding up to 1 near-ties, 2 per 1,000 tokens, at most 0.062 apart"
    )


def test_what_is_lossy_is_not_verified(
    verify_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    offspec(*verify_args, "--accept", "joint").refusal(2, "--accept", "joint", "lossy")
    monkeypatch.setenv("OFFSPEC_ACCEPT", "joint")  # for `run`, say
    few = ("--scorings", "coupled", "--drafts", "own", "--budgets", 8, "--temperatures", 0, "--max-prompts", 1)
    assert offspec(*verify_args, *few, "--accept", "exact").code == 0


@pytest.mark.slow
def test_a_text_that_differs_is_a_failure(
    verify_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    result = offspec(*verify_args, "--max-prompts", 1, "--scorings", "coupled", "--drafts", "own", "--json")
    assert result.code == 1
    (line,) = result.err.splitlines()
    assert line.startswith("Error: ")
    assert tells(line, "differ", "prompt 0", "budget")
    report = json.loads(result.out, parse_constant=pytest.fail)  # Infinity and NaN are not JSON
    assert not report["exact"]
    assert report["differences"]


@pytest.mark.slow
def test_prompts_limit_and_random_draft(pair: Pair, verify_args: Sequence[object], offspec: Offspec) -> None:
    args = (*with_draft(verify_args, "none"), "--max-prompts", 1, "--budgets", 4, "--scorings", "coupled", "--json")
    args += ("--temperatures", 0)
    result = offspec(*args)
    report = json.loads(result.out)
    assert (result.code, report["num_prompts"], report["draft"]) == (0, 1, None)
    assert {s["draft"] for s in report["settings"]} == {"random"}  # there is no other to verify
    (line,) = result.err.splitlines()
    assert tells(line, "--draft", "random")
    assert offspec(*args, "-q").err == offspec(*args, "--drafts", "random").err == ""


def test_what_is_verified_unless_told_otherwise(
    pair: Pair, verify_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "offspec.tools.verification.verify", lambda *args, **_: asked.append(args) or VerificationReport(1)
    )
    told = offspec("verify", pair.target, "--prompts", verify_args[5], "--device", "cpu", "-v")
    assert told.code == 0
    ((engine, _, settings),) = asked
    assert {(s.draft, s.budget) for s in settings} == {
        (draft, budget) for draft in ("own", "random") for budget in (1, 16, 256, None)
    }
    assert (engine.draft_name, engine.target.dtype) == ("lookup", torch.float32)
    assert "offspec: dtype fp32 (verify's default)" in told.err
    assert "auto: fp32" in " ".join(offspec("verify", "--help-all").out.split())


@pytest.mark.parametrize(
    "flags",
    [
        ("--budgets", "1,x"),
        ("--budgets", "0"),  # plain decoding beside plain decoding shows nothing
        ("--drafts", "own,other"),
        ("--drafts", "own", "--draft", "none"),
        ("--temperatures", "0,hot"),
        ("--prompts", "no-such-file"),
    ],
    ids=" ".join,
)
def test_a_flag_that_cannot_be_meant(flags: Sequence[str], verify_args: Sequence[object], offspec: Offspec) -> None:
    offspec(*verify_args, *flags).refusal(2)


def test_prompts_of_a_jsonl_file(verify_args: Sequence[object], tmp_path: Path, offspec: Offspec) -> None:
    few = (*verify_args, "--scorings", "coupled", "--drafts", "own", "--temperatures", 0, "--budgets", 8, "--json")
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "def area("}\n{"messages": [{"role": "user", "content": "for item in sch\\u00f6n:"}]}\n'
    )
    assert json.loads(offspec(*few, "--prompts", file).out) == json.loads(offspec(*few).out)
    file.write_text("{")
    offspec(*few, "--prompts", file).refusal(2, file, "line 1", "JSON")
