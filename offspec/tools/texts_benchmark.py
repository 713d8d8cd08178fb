"""Compares numbers of texts that share the target's passes, in one run. It does not depend on the terminal.

Every repeat answers all prompts with each number of texts under way, one number after the other, so that a slower
machine slows all of them. The memory is planned for the largest number. Figures are medians and ranges over repeats.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from offspec.scheduler.params import SEED_LIMIT, SamplingParams, SpeculationParams

from .. import builtin
from ..engine import Engine
from ..errors import OffspecError, UsageError
from ..running.batch import Batch
from ..text.prompt import Prompt
from .benchmark import WORKLOADS, Figure, Workload

FEWEST_PROMPTS = 8


@dataclass(frozen=True)
class TextsRun:
    """All prompts, answered once.

    num_texts: the maximum number of texts under way. num_passes: of the target. each_tokens_per_s: of each text while
    it was under way.
    """

    num_texts: int
    token_ids: tuple[tuple[int, ...], ...]
    num_passes: int
    seconds: float
    each_tokens_per_s: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        """Of all texts together."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class TextsRow:
    """One number of texts under way.

    tokens_per_s: of all texts together, prompts included. each_tokens_per_s: the median over texts, while under way.
    tokens_per_pass: of all texts. gain: tokens_per_s ÷ that of the first number, for each repeat. num_different: texts
    that differ from those of the first number.
    """

    num_texts: int
    tokens_per_s: Figure
    each_tokens_per_s: Figure
    tokens_per_pass: Figure
    gain: Figure
    num_different: int


@dataclass
class TextsReport:
    """The result of `measure_texts`: the runs of each repeat, in the order of the numbers."""

    repeats: list[list[TextsRun]] = field(default_factory=list)

    def rows(self) -> list[TextsRow]:
        bases = [repeat[0] for repeat in self.repeats]
        return [
            TextsRow(
                runs[0].num_texts,
                Figure.of([run.tokens_per_s for run in runs]),
                Figure.of([statistics.median(run.each_tokens_per_s) for run in runs]),
                Figure.of([run.num_tokens / run.num_passes for run in runs]),
                Figure.of([run.tokens_per_s / base.tokens_per_s for run, base in zip(runs, bases, strict=True)]),
                sum(num_different(run, base) for run, base in zip(runs, bases, strict=True)),
            )
            for runs in zip(*self.repeats, strict=True)
        ]

    @property
    def num_prompts(self) -> int:
        return len(self.repeats[0][0].token_ids)

    @property
    def num_different(self) -> int:
        """Texts that differ from those of the first number: 0 where the engine `is_exact`, else there are near-ties."""
        return sum(row.num_different for row in self.rows())

    @property
    def num_compared(self) -> int:
        """Texts that `num_different` is of."""
        return self.num_prompts * sum(len(runs) - 1 for runs in self.repeats)

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "num_different_texts": self.num_different,
            "rows": [asdict(row) for row in self.rows()],
        }


def num_different(run: TextsRun, other: TextsRun) -> int:
    """The number of texts in which two runs differ."""
    return sum(one != two for one, two in zip(run.token_ids, other.token_ids, strict=True))


def default_workloads(numbers: Sequence[int]) -> list[Workload]:
    """`WORKLOADS`, then held-out prompts of the built-in pair: FEWEST_PROMPTS, or as many as the texts at a time."""
    workloads = [*WORKLOADS, *(Workload("code", prompt) for prompt in builtin.prompts())]
    return workloads[: max(FEWEST_PROMPTS, *numbers)]


def check_numbers(numbers: Sequence[int], workloads: Sequence[Workload]) -> None:
    """Raises UsageError if there are fewer workloads than texts at a time."""
    if max(numbers) > len(workloads):
        raise UsageError(f"{max(numbers)} texts at a time need as many prompts; there are {len(workloads)}")


def measure_texts(
    engine: Engine,
    workloads: Sequence[Workload],
    params: SamplingParams,
    speculation: SpeculationParams,
    numbers: Sequence[int],
    *,
    num_warmups: int = 1,
    num_repeats: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> TextsReport:
    """Answer all workloads with each number of texts under way, `num_repeats` times.

    The engine should be planned for the largest number (`LoadOptions.texts`). Warm-up rounds come first and are not
    recorded; estimates are kept from run to run. Text i has seed params.seed + i, by default i. progress(runs done,
    number of runs). Raises UsageError if there are fewer workloads than texts, and the errors of `Engine.generate`.
    """
    check_numbers(numbers, workloads)
    prompts = [workload.for_model(engine) for workload in workloads]
    seeded = [replace(params, seed=((params.seed or 0) + i) % SEED_LIMIT) for i in range(len(prompts))]
    report, total = TextsReport(), (num_warmups + num_repeats) * len(numbers)
    for repeat in range(-num_warmups, num_repeats):
        runs = list[TextsRun]()
        for number in numbers:
            progress((repeat + num_warmups) * len(numbers) + len(runs), total)
            runs.append(answer_together(engine, prompts, seeded, number, speculation))
        if repeat >= 0:
            report.repeats.append(runs)
    progress(total, total)
    return report


def answer_together(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    num_texts: int,
    speculation: SpeculationParams | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> TextsRun:
    """Answer all prompts with up to `num_texts` texts under way. Raises the errors of `Engine.generate`."""
    num_passes, began = 0, clock()
    with closing(Batch(engine.models, num_texts)) as batch:
        pairs = zip(prompts, params, strict=True)
        texts = {batch.add(engine.check_request(*pair, speculation)): list[int]() for pair in pairs}
        rates = dict.fromkeys(texts, 0.0)
        while not batch.is_idle:
            outcomes = batch.step()
            num_passes += 1
            for sequence, outcome in outcomes:
                if isinstance(outcome, OffspecError):
                    raise outcome
                texts[sequence] += outcome.token_ids
                stats = outcome.stats  # without the time in which the text waited
                rates[sequence] = stats.num_tokens / (stats.prefill_s + stats.decode_s)
    token_ids = tuple(map(tuple, texts.values()))
    return TextsRun(num_texts, token_ids, num_passes, clock() - began, tuple(rates.values()))
