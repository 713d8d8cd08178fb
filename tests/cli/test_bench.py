"""`offspec bench`: a table that fits, one JSON line, a CSV, plots;
and what cannot be measured is refused beforehand.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from offspec import Engine
from offspec.cli.bench import table, verdict
from offspec.tools.benchmark import BenchmarkReport, BudgetAcceptance

from ..offspec.tools.test_benchmark import REPORT, run
from ..pair import Pair
from ..refusals import tells
from .conftest import Offspec, Result

Bench = Callable[..., Result]


@pytest.fixture
def bench(pair: Pair, tmp_path: Path, offspec: Offspec) -> Bench:
    """Two short prompts of two kinds, few tokens, one repeat."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def", "kind": "code"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    args = ("bench", pair.target, "--draft", pair.draft, "--device", "cpu", "--max-new-tokens", 6)
    small = ("--prompts", prompts, "--budgets", "4,8", "--repeats", "0+1")
    return lambda *flags: offspec(*args, *small, *flags)


@pytest.mark.slow
def test_json_alone_on_stdout_and_the_table_beside_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    result = bench("--json")
    assert result.code == 0
    told, lines = json.loads(result.out), result.err.splitlines()
    assert told.keys() >= {"model", "draft", "settings", "rows", "acceptance", "num_different_texts"}
    assert [(row["kind"], row["budget"]) for row in told["rows"]] == [
        (kind, budget) for kind in ("code", "prompts", "all") for budget in (0, 4, 8)
    ]
    assert told["acceptance"].keys() == {"4", "8"}
    assert lines[0].split()[:2] == ["prompts", "budget"]
    assert [line.split()[:2] for line in lines[1:10]] == [
        [row["kind"], str(row["budget"] or "plain")] for row in told["rows"]
    ]
    assert "equal plain decoding" in " ".join(result.err.split())
    plain = bench("-q")
    assert (plain.out.split()[:2], plain.out.count("{"), plain.err) == (["prompts", "budget"], 0, "")


def test_a_csv_holds_every_run(bench: Bench, tmp_path: Path) -> None:
    assert bench("--save", tmp_path / "runs.csv").code == 0
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["kind"], row["budget"]) for row in rows] == [
        (kind, budget) for kind in ("code", "prompts") for budget in ("0", "4", "8")
    ]
    assert all(float(row["seconds"]) >= float(row["prefill_s"]) > 0 for row in rows)


def test_plots(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert bench("--save", tmp_path / "passes.svg").code == 0
    content = (tmp_path / "passes.svg").read_bytes()
    assert content.startswith(b"<?xml")
    for title in (b"Time per pass", b"Tokens per pass against budget", b"Accepted nodes", b"Reliability"):
        assert title in content


def test_files_that_cannot_be_written_are_refused_first(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", None)
    bench("--save", tmp_path / "no" / "runs.csv").refusal(1, tmp_path / "no" / "runs.csv", "written")


def test_joint_acceptance_has_a_row_of_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = bench("--json", "--accept", "joint", "--tau", "0.01", "--beam", 4, "--gamma", 4)
    assert result.code == 0
    told = json.loads(result.out)
    assert [(row["budget"], row["is_lossy"]) for row in told["rows"] if row["kind"] == "all"] == [
        *((0, False), (4, False), (8, False)),
        (None, True),
    ]
    assert told["settings"].items() >= {"accept": "joint", "tau": 0.01, "beam": 4, "gamma": 4}.items()
    assert told["num_different_texts"] == 0
    assert result.err.count("joint, lossy  ") == 3
    assert "nats/token" in result.err.splitlines()[0]
    assert "of 2 texts differ" in result.err


def test_without_a_draft_plain_decoding_is_measured(pair: Pair, tmp_path: Path, offspec: Offspec) -> None:
    (tmp_path / "prompts.txt").write_text("hi\n\nho\n")
    args = (
        *("bench", pair.target, "--draft", "none", "--device", "cpu", "--max-new-tokens", 3, "--prompts"),
        *(tmp_path / "prompts.txt", "--repeats", "0+1", "--json"),
    )
    result = offspec(*args)
    told = json.loads(result.out)
    assert [(row["kind"], row["budget"]) for row in told["rows"]] == [("prompts", 0)]
    assert told["num_runs"] == 2
    assert "no draft" in " ".join(result.err.split())
    looked_up = json.loads(offspec(*args, "--lookup-files", tmp_path / "prompts.txt", "--budgets", "4").out)
    assert [row["budget"] for row in looked_up["rows"]] == [0, 4]


def test_whether_speculation_pays_is_said_and_why_not() -> None:
    told = []
    for decode_s in (1.0, 2.5, 9.0):  # behind 1.5 s of the first pass; plain decoding takes 4 s
        outcome = BenchmarkReport([run(0, 0), run(8, 0, decode_s=decode_s)]).outcome()
        assert outcome is not None
        told.append(verdict(outcome))
    paid, even, lost = told
    assert tells(paid, "pays", "budget 8")
    assert "--budget 0" not in paid
    assert tells(even, "no difference")
    assert tells(lost, "not pay", "9.00 times", "2.00 tokens", "--budget 0")  # a later pass of 9 s; plain ones take 1 s


def test_a_default_that_is_slower_than_another_budget_is_told() -> None:
    def told(decode_s: float) -> str:
        auto = replace(run(8, 0, decode_s=decode_s), budget=None)
        outcome = BenchmarkReport([run(0, 0), run(8, 0, decode_s=0.5), auto]).outcome()
        assert outcome is not None
        return verdict(outcome)

    assert tells(told(3.5), "budget 8", "2.00x", "auto", "0.80x")
    assert "auto" not in told(0.6)


def test_a_gain_beyond_the_tokens_of_a_pass_is_not_believed() -> None:
    """Plain decoding of 4 s by one token a pass, and two tokens a pass in a fourth of the time of one."""
    outcome = BenchmarkReport([run(0, 0), run(8, 0, decode_s=0.1)]).outcome()
    assert outcome is not None
    assert outcome.gain > outcome.best.tokens_per_pass.median
    assert tells(verdict(outcome), "disturbed", "2.00 tokens", "--repeats")


@pytest.mark.parametrize("columns", [30, 110])
def test_the_table_fits(columns: int) -> None:
    seen = BudgetAcceptance(num_nodes=[10**6] * 10, predicted=[5e5] * 10, accepted=[10**5] * 10)
    report = BenchmarkReport(REPORT.runs, {"8": seen})
    lines = table(report, columns, verbose=True)
    assert lines[: len(table(report, columns))] == table(report, columns)
    assert "predicted   accepted     nodes" not in table(report, columns)
    assert lines[-1].split() == ["0.500", "0.100", "1000000"]
    assert max(map(len, lines)) <= columns
    assert ("tokens/s: 1.80 +-0.20" in lines) == (columns < 80)
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--budgets", "0"), ("--budgets", "plain decoding")),
        (("--repeats", "0"), ("--repeats", 0)),
        (("--save", "passes.gif"), ("--save", "passes.gif", ".csv", ".png", ".svg")),
        (("--temperature", "-1"), ("temperature", -1)),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_what_cannot_be_meant(flags: Sequence[str], words: Sequence[object], bench: Bench) -> None:
    bench(*flags).refusal(2, *words)


@pytest.fixture
def bench_texts(pair: Pair, tmp_path: Path, offspec: Offspec) -> Bench:
    """Four short prompts, one or two at a time, few tokens, one repeat."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def area(\nfor item in\nx =\nimport\n")
    args = ("bench", pair.target, "--draft", pair.draft, "--device", "cpu", "--max-new-tokens", 6)
    return lambda *flags: offspec(*args, "--prompts", prompts, "--repeats", "0+1", *flags)


def test_numbers_of_texts_that_share_passes(bench_texts: Bench) -> None:
    result = bench_texts("--texts", "1, 2,2", "--json")
    told, lines = json.loads(result.out), result.err.splitlines()
    assert (told["num_prompts"], told["num_different_texts"]) == (4, 0)
    assert [row["num_texts"] for row in told["rows"]] == [1, 2]
    assert told["settings"].items() >= {"warmup": 0, "repeats": 1, "max_new_tokens": 6}.items()
    assert lines[0].split() == ["texts", "tokens/s", "together", "each", "tokens/pass", "gain"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert lines[1].endswith("1.00x")
    assert "all 4 texts equal those of the first row" in " ".join(result.err.split())


def test_what_numbers_of_texts_do_not_go_with_is_refused_before_loading(
    bench_texts: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", None)
    bench_texts("--texts", "1,2", "--budgets", "16").refusal(2, "omit --budgets")
    bench_texts("--texts", "1,2", "--save", "runs.csv").refusal(2, "omit --save")
    bench_texts("--texts", "1,2", "--accept", "joint").refusal(2, "omit --accept joint")
    bench_texts("--texts", "1,65").refusal(2, "--texts", "65", "64")
    bench_texts("--texts", "1,8").refusal(2, "8 texts", "there are 4")
