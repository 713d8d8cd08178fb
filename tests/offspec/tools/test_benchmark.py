"""What a benchmark computes from runs, and that it runs what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offspec import Engine, SamplingParams, SpeculationParams, Stats
from offspec.tools.benchmark import BenchmarkReport, Run, Workload, measure

from ...pair import Pair

# Two repeats of one prompt. Plain: a first pass of 1 s, then 3 passes of 1 s. Guessed: 1.5 s, then one pass of 1 s or
# 0.5 s.
PLAIN = Stats(
    num_tokens=4, num_passes=4, num_first_pass_tokens=1, ttft_s=1.0, prefill_s=1.0, decode_s=3.0, target_s=4.0
)
GUESSED = Stats(
    num_tokens=4,
    num_passes=2,
    num_first_pass_tokens=2,
    ttft_s=1.5,
    prefill_s=1.5,
    decode_s=1.0,
    draft_s=0.75,
    target_s=1.5,
)
FIRST = replace(GUESSED, num_tokens=2, num_passes=1, decode_s=0.0, draft_s=0.5, target_s=0.9)
PLAIN_FIRST = replace(PLAIN, num_tokens=1, num_passes=1, decode_s=0.0, target_s=1.0)


def run(budget: int, repeat: int, **changes: object) -> Run:
    first, stats = (FIRST, GUESSED) if budget else (PLAIN_FIRST, PLAIN)
    return Run(0, "code", budget, repeat, (1, 2, 3, 4), first, replace(stats, **changes))  # type: ignore[arg-type]


REPORT = BenchmarkReport([run(0, 0), run(8, 0), run(0, 1), run(8, 1, decode_s=0.5)])


def test_figures_count_the_first_pass() -> None:
    plain, guessed = REPORT.rows()
    assert (plain.budget, guessed.budget) == (0, 8)
    assert plain.tokens_per_s.median == 4 / 4
    assert (guessed.tokens_per_s.low, guessed.tokens_per_s.high) == (4 / 2.5, 4 / 2)
    assert guessed.tokens_per_s.median == (4 / 2.5 + 4 / 2) / 2
    assert (guessed.gain.low, guessed.gain.high) == (1.6, 2.0)
    assert (guessed.first_pass_s.median, guessed.later_tokens_per_s.low, guessed.later_tokens_per_s.high) == (1.5, 2, 4)
    assert (plain.tokens_per_pass.median, guessed.tokens_per_pass.median) == (1, 2)


def test_the_fastest_exact_way_is_the_best() -> None:
    slow, lossy = run(16, 0, decode_s=9.0), replace(run(4, 0, decode_s=0.1), accept="joint")
    best = BenchmarkReport([run(0, 0), slow, run(8, 0), lossy]).best()
    assert best is not None
    assert best.budget == 8
    assert BenchmarkReport([run(0, 0)]).best() is None


def test_texts_that_differ_are_counted() -> None:
    assert REPORT.num_different() == 0
    assert BenchmarkReport([*REPORT.runs, replace(run(16, 0), token_ids=(1, 2))]).num_different() == 1


@pytest.mark.slow
def test_a_measurement(pair: Pair) -> None:
    engine = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu")
    work = [Workload("a", "def area("), Workload("b", [{"role": "user", "content": "hi"}])]
    told: list[tuple[int, int]] = []
    report = measure(
        engine,
        work,
        SamplingParams(8, temperature=0.6),
        [SpeculationParams(budget=4)],
        num_repeats=2,
        progress=lambda done, total: told.append((done, total)),
    )
    assert (told[0], told[-1], len(told)) == ((0, 12), (12, 12), 13)
    assert len(report.runs) == 8
    assert report.num_different() == 0
    assert report.kinds == ["a", "b"]
    assert report.budget_names == ["plain", "4"]
    for budget, found in report.acceptance.items():
        runs = [run for run in report.runs if run.budget_name == budget]
        assert found.lengths.total() == sum(run.stats.num_passes for run in runs)
        assert sum(found.num_nodes) == sum(run.stats.num_drafted_tokens for run in runs)
        assert sum(n * count for n, count in found.lengths.items()) == sum(found.accepted)
        assert max(found.lengths) > 0
    assert {run.stats.seed for run in report.runs} == {0}
    assert len({run.token_ids for run in report.runs if run.kind == "a"}) == 1
    assert report.rows()[-1].as_dict()["tokens_per_pass"]["median"] > 1


@pytest.mark.slow
def test_a_lossy_way_is_kept_apart(pair: Pair) -> None:
    engine = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu")
    work = [Workload("a", "def area("), Workload("b", "for item in")]
    ways = [SpeculationParams(budget=8), SpeculationParams(accept="joint", tau=0.01, beam=4, gamma=4)]
    report = measure(engine, work, SamplingParams(12, ignore_eos=True), ways, num_warmups=0, num_repeats=1)
    assert report.budget_names == ["plain", "8", "joint, lossy"]
    assert report.acceptance.keys() == {"8"}
    assert report.num_different() == 0
    assert report.num_different("joint") > 0
    rows = [row.as_dict() for row in report.rows() if row.kind == "all"]
    assert [row["is_lossy"] for row in rows] == [False, False, True]
    plain, exact, joint = (row["log_likelihood_per_token"] for row in rows)
    assert plain == exact != joint
    assert [run.stats.is_lossy for run in report.runs] == [run.accept == "joint" for run in report.runs]
