"""Speculative against plain decoding on the same prompts in the same run. Knows nothing of the terminal or of plots.

Every repeat runs each prompt plainly and with every budget, one after the other, so that a machine that slows down slows all
of them. Figures are medians over repeats with the range; the first pass, which takes the prompt, always counts.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.tree import TokenTree
from offspec.scheduler.verify import Verdict

from .engine import Engine, Message, Prompt
from .stats import Stats

NUM_BINS = 10
ALL = "all"


@dataclass(frozen=True)
class Workload:
    """A prompt and what kind of text it asks for."""

    kind: str
    prompt: str | Sequence[Message]

    def for_model(self, engine: Engine) -> Prompt:
        """Messages become bare text for a model without a chat template."""
        if isinstance(self.prompt, str) or engine.tokenizer.has_chat_template:
            return self.prompt
        return "\n\n".join(message["content"] for message in self.prompt)


WORKLOADS = (
    Workload(
        "code",
        "import csv\nfrom pathlib import Path\n\n\ndef read_rows(path: Path) -> list[dict[str, str]]:\n"
        '    """Return the rows of a CSV file with a header, as dictionaries."""\n    with path.open() as file:\n',
    ),
    Workload(
        "chat",
        [{"role": "user", "content": "What is the difference between a list and a tuple in Python? Answer briefly."}],
    ),
    Workload(
        "prose",
        "The ferry left the island at six in the morning, when the harbour was still in the shadow of the hill. Most of the "
        "passengers slept. An old man stood at the rail with a cage of pigeons, and when the last house was out of sight he",
    ),
    Workload(
        "repetitive",
        "".join(f'{{"id": {i}, "name": "item {i}", "price": {i}.00, "in_stock": true}}\n' for i in range(1, 9)),
    ),
)


@dataclass(frozen=True)
class Run:
    """One request. budget 0 is plain decoding, None the budget that is found while running; first: the figures after its first pass."""

    workload: int
    kind: str
    budget: int | None
    repeat: int
    token_ids: tuple[int, ...]
    first: Stats
    stats: Stats

    @property
    def budget_name(self) -> str:
        return budget_name(self.budget)

    @property
    def seconds(self) -> float:
        return self.stats.ttft_s + self.stats.decode_s


@dataclass
class Acceptance:
    """What became of the trees of one budget, over all recorded passes.

    lengths[n]: passes in which n guesses were accepted. By predicted probability of a node, in NUM_BINS equal bins: how many
    nodes there were, the sum of what was predicted for them, and how many were accepted.
    """

    lengths: Counter[int] = field(default_factory=Counter)
    num_nodes: list[int] = field(default_factory=lambda: [0] * NUM_BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    accepted: list[int] = field(default_factory=lambda: [0] * NUM_BINS)

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        """An `engine.Observer`."""
        self.lengths[len(verdict.path)] += 1
        probabilities = np.exp(tree.scores)
        on_path = np.zeros(len(tree), dtype=np.bool_)
        on_path[verdict.path] = True
        bins = np.minimum((probabilities * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        for i in range(NUM_BINS):
            inside = bins == i
            self.num_nodes[i] += int(inside.sum())
            self.predicted[i] += float(probabilities[inside].sum())
            self.accepted[i] += int(on_path[inside].sum())

    @property
    def predicted_per_pass(self) -> float:
        """Guesses that were expected to be accepted in a pass; to be compared with how many were."""
        return sum(self.predicted) / max(1, self.lengths.total())

    @property
    def accepted_per_pass(self) -> float:
        return sum(self.accepted) / max(1, self.lengths.total())

    def reliability(self) -> list[tuple[float, float, int]]:
        """(predicted, accepted, nodes) of each bin that has nodes: mean probability and the share that came true."""
        return [(p / n, a / n, n) for p, a, n in zip(self.predicted, self.accepted, self.num_nodes, strict=True) if n]

    def as_dict(self) -> dict[str, Any]:
        return {
            "accepted_lengths": {str(n): self.lengths[n] for n in sorted(self.lengths)},
            "predicted_per_pass": self.predicted_per_pass,
            "accepted_per_pass": self.accepted_per_pass,
            "reliability": [{"predicted": p, "accepted": a, "num_nodes": n} for p, a, n in self.reliability()],
        }


@dataclass(frozen=True)
class Figure:
    """The median over repeats, and the range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Row:
    """One kind of prompts (or `all`) with one budget.

    tokens_per_s: all tokens over all seconds, the first pass included. gain: that over plain decoding's, repeat by repeat.
    later_tokens_per_s: after the first pass. first_*, later_*: milliseconds of a pass in drafting, in the target, and in the rest.
    """

    kind: str
    budget: int | None
    tokens_per_s: Figure
    gain: Figure
    first_pass_s: Figure
    later_tokens_per_s: Figure
    tokens_per_pass: Figure
    first_ms: tuple[float, float, float]
    later_ms: tuple[float, float, float]

    @property
    def budget_name(self) -> str:
        return budget_name(self.budget)

    def as_dict(self) -> dict[str, Any]:
        figures = ("tokens_per_s", "gain", "first_pass_s", "later_tokens_per_s", "tokens_per_pass")
        names = ("draft", "target", "rest")
        return {
            "kind": self.kind,
            "budget": self.budget,
            **{name: getattr(self, name).as_dict() for name in figures},
            "first_pass_ms": dict(zip(names, self.first_ms, strict=True)),
            "later_pass_ms": dict(zip(names, self.later_ms, strict=True)),
        }


@dataclass
class Report:
    """What `measure` found."""

    runs: list[Run] = field(default_factory=list)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(run.kind for run in self.runs))

    @property
    def budgets(self) -> list[int | None]:
        return list(dict.fromkeys(run.budget for run in self.runs))

    def rows(self) -> list[Row]:
        """By kind and budget; `all` at the end where there are several kinds."""
        kinds = [*self.kinds, ALL] if len(self.kinds) > 1 else self.kinds
        return [self._row(kind, budget) for kind in kinds for budget in self.budgets]

    def num_different(self) -> int:
        """Speculative texts that are not plain decoding's; in fp32 there are none, in 16 bit near-ties may fall the other way."""
        plain = {(run.workload, run.repeat): run.token_ids for run in self.runs if run.budget == 0}
        return sum(run.token_ids != plain[run.workload, run.repeat] for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_runs": len(self.runs),
            "num_different_texts": self.num_different(),
            "rows": [row.as_dict() for row in self.rows()],
            "acceptance": {name: found.as_dict() for name, found in self.acceptance.items()},
        }

    def _repeats(self, kind: str, budget: int | None) -> list[list[Run]]:
        """The runs of each repeat."""
        runs = [run for run in self.runs if run.kind == kind or kind == ALL]
        repeats = sorted({run.repeat for run in runs})
        return [[run for run in runs if run.budget == budget and run.repeat == repeat] for repeat in repeats]

    def _row(self, kind: str, budget: int | None) -> Row:
        repeats, plain = self._repeats(kind, budget), self._repeats(kind, 0)
        rates = [_tokens_per_s(runs) for runs in repeats]
        gains = [rate / _tokens_per_s(runs) for rate, runs in zip(rates, plain, strict=True)]
        runs = [run for repeat in repeats for run in repeat]
        firsts, laters = [_parts(run.first) for run in runs], [_later_parts(run) for run in runs]
        return Row(
            kind,
            budget,
            Figure.of(rates),
            Figure.of(gains),
            Figure.of([statistics.mean(run.stats.ttft_s for run in repeat) for repeat in repeats]),
            Figure.of([_later_tokens_per_s(repeat) for repeat in repeats]),
            Figure.of(
                [
                    _ratio(sum(r.stats.num_tokens for r in repeat), sum(r.stats.num_passes for r in repeat))
                    for repeat in repeats
                ]
            ),
            _mean_ms(firsts, len(runs)),
            _mean_ms(laters, sum(run.stats.num_passes - 1 for run in runs)),
        )


def _tokens_per_s(runs: Sequence[Run]) -> float:
    return _ratio(sum(run.stats.num_tokens for run in runs), sum(run.seconds for run in runs))


def _later_tokens_per_s(runs: Sequence[Run]) -> float:
    num_tokens = sum(run.stats.num_tokens - run.stats.num_first_pass_tokens for run in runs)
    return _ratio(num_tokens, sum(run.stats.decode_s for run in runs))


def _parts(stats: Stats) -> tuple[float, float, float]:
    """Seconds in drafting, in the target, and in the rest, up to now."""
    return stats.draft_s, stats.target_s, stats.prefill_s + stats.decode_s - stats.draft_s - stats.target_s


def _later_parts(run: Run) -> tuple[float, float, float]:
    (d, t, r), (first_d, first_t, first_r) = _parts(run.stats), _parts(run.first)
    return d - first_d, t - first_t, r - first_r


def _mean_ms(parts: Sequence[tuple[float, float, float]], count: int) -> tuple[float, float, float]:
    draft, target, rest = (1e3 * _ratio(sum(part[i] for part in parts), count) for i in range(3))
    return draft, target, rest


def budget_name(budget: int | None) -> str:
    """plain, auto, or the number of nodes."""
    return "auto" if budget is None else str(budget or "plain")


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def measure(
    engine: Engine,
    workloads: Sequence[Workload],
    params: SamplingParams,
    speculations: Sequence[SpeculationParams],
    *,
    num_warmups: int = 1,
    num_repeats: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Run every workload plainly and with each of `speculations` (of different budgets above 0), `num_repeats` times.

    Warm-up rounds come first and are not recorded; the draft's calibration is kept from run to run, as in a chat. Without a
    seed it is 0, so that every repeat has the same text. progress(runs done, runs in all). Raises what `Engine.generate` does.
    """
    if params.seed is None:
        params = replace(params, seed=0)
    report = Report(acceptance={budget_name(speculation.budget): Acceptance() for speculation in speculations})
    ways = [SpeculationParams(budget=0), *speculations]
    total = (num_warmups + num_repeats) * len(workloads) * len(ways)
    rounds = list(_rounds(num_warmups, num_repeats, workloads, ways))
    for done, (repeat, index, way) in enumerate(rounds):
        progress(done, total)
        observer = report.acceptance[budget_name(way.budget)].observe if way.budget != 0 and repeat >= 0 else None
        workload = workloads[index]
        steps = list(engine.generate(workload.for_model(engine), params, way, observer=observer))
        if repeat >= 0:
            tokens = tuple(token for step in steps for token in step.token_ids)
            run = Run(index, workload.kind, way.budget, repeat, tokens, steps[0].stats, steps[-1].stats)
            report.runs.append(run)
    progress(total, total)
    return report


def _rounds(
    num_warmups: int, num_repeats: int, workloads: Sequence[Workload], ways: Sequence[SpeculationParams]
) -> Iterator[tuple[int, int, SpeculationParams]]:
    """(repeat, index of the workload, way); repeats below 0 are warm-ups."""
    for repeat in range(-num_warmups, num_repeats):
        for index in range(len(workloads)):
            for way in ways:
                yield repeat, index, way
