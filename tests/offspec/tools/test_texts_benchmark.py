"""Numbers of texts that share passes: what is counted, and by which clock; texts are those of one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.errors import UsageError
from offspec.tools.benchmark import Workload
from offspec.tools.texts_benchmark import default_workloads, measure_texts

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
        num_repeats=1,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, 4) for done in range(5)]
    one, four = report.rows()
    assert (one.num_texts, four.num_texts, report.num_prompts, report.num_compared) == (1, 4, 4, 4)
    assert (one.gain.median, report.num_different) == (1.0, 0)
    assert four.tokens_per_pass.median > one.tokens_per_pass.median
    for index, work in enumerate(WORK):
        steps = engine.generate(work.prompt, SamplingParams(8, temperature=0.7, seed=index, ignore_eos=True))
        expected = tuple(token for step in steps for token in step.token_ids)
        assert {repeat[0].token_ids[index] for repeat in report.repeats} == {expected}


def test_there_must_be_as_many_prompts_as_texts(engine: Engine) -> None:
    with pytest.raises(UsageError, match="8 texts at a time need as many prompts; there are 4"):
        measure_texts(engine, WORK, SamplingParams(2), SpeculationParams(), (1, 8))
    assert [len(default_workloads(numbers)) for numbers in ((1,), (1, 16))] == [8, 16]
