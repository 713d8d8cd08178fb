"""Numbers of texts that share passes: what is counted, and by which clock; texts are those of one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.errors import UsageError
from offspec.tools.benchmark import Workload
from offspec.tools.texts_benchmark import (
    TextsReport,
    TextsRun,
    answer_together,
    default_workloads,
    measure_texts,
    num_different,
)

from ...pair import Pair

WORK = [Workload("a", "def area("), Workload("b", "for item in"), Workload("c", "x ="), Workload("d", "import")]


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", dtype="fp32", texts=4) as engine:
        yield engine


def test_every_number_answers_all_prompts_with_the_same_texts(engine: Engine) -> None:
    told: list[tuple[int, int]] = []
    report = measure_texts(
        engine,
        WORK,
        SamplingParams(8, temperature=0.7, ignore_eos=True),
        SpeculationParams(),
        (1, 4),
        num_repeats=2,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, 6) for done in range(7)]
    one, four = report.rows()
    assert (one.num_texts, four.num_texts, report.num_prompts, report.num_compared) == (1, 4, 4, 8)
    assert (one.gain.median, report.num_different) == (1.0, 0)
    assert four.tokens_per_pass.median > one.tokens_per_pass.median
    for index, work in enumerate(WORK):
        steps = engine.generate(work.prompt, SamplingParams(8, temperature=0.7, seed=index, ignore_eos=True))
        expected = tuple(token for step in steps for token in step.token_ids)
        assert {repeat[0].token_ids[index] for repeat in report.repeats} == {expected}


def test_every_pass_of_the_target_counts_once(engine: Engine) -> None:
    prompts, params = (
        [str(work.prompt) for work in WORK],
        [SamplingParams(5, seed=i, ignore_eos=True) for i in range(4)],
    )
    plain = SpeculationParams(budget=0)
    runs = {n: answer_together(engine, prompts, params, n, plain, clock=count().__next__) for n in (1, 2, 4)}
    assert {n: run.num_passes for n, run in runs.items()} == {1: 20, 2: 10, 4: 5}
    assert {(run.num_tokens, run.seconds) for run in runs.values()} == {(20, 1)}
    assert all(rate > 0 for run in runs.values() for rate in run.each_tokens_per_s)


def test_rows_compare_with_the_first_number_of_the_same_repeat() -> None:
    def run(num_texts: int, seconds: float, *texts: tuple[int, ...]) -> TextsRun:
        return TextsRun(num_texts, texts, 2, seconds, (3.0, 1.0))

    alone = [run(1, seconds, (1, 2), (3, 4)) for seconds in (8.0, 4.0, 2.0)]
    both = [run(2, 2.0, (1, 2), (3, 4)), run(2, 2.0, (1, 2), (3, 5)), run(2, 2.0, (1, 2), (3, 4))]
    report = TextsReport([list(pair) for pair in zip(alone, both, strict=True)])
    row = report.rows()[1].as_dict()
    assert row["gain"] == {"median": 2.0, "low": 1.0, "high": 4.0}
    assert (row["tokens_per_s"]["median"], row["each_tokens_per_s"]["median"]) == (2.0, 2.0)
    assert (row["tokens_per_pass"]["median"], row["num_different"]) == (2.0, 1)
    assert (num_different(alone[0], both[1]), report.num_different, report.num_compared) == (1, 1, 6)
    assert report.as_dict()["num_different_texts"] == 1


def test_there_must_be_as_many_prompts_as_texts(engine: Engine) -> None:
    with pytest.raises(UsageError, match="8 texts at a time need as many prompts; there are 4"):
        measure_texts(engine, WORK, SamplingParams(2), SpeculationParams(), (1, 8))
    assert [len(default_workloads(numbers)) for numbers in ((1,), (1, 16))] == [8, 16]
