"""Compares speculative with plain decoding on the same prompts in the same run. It does not depend on the terminal.

Every repeat runs each prompt plainly and with every budget, one after the other, so that a slower machine slows all of
them. Figures are medians and ranges over repeats; they include the first pass, which takes the prompt. Joint
acceptance (lossy) has its own rows, and its texts are not expected to equal plain decoding's. With it, the report has
the likelihood of all texts under the target, by which lossy texts are judged.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from offspec.scheduler.joint import log_likelihoods
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray, TokenTree
from offspec.scheduler.trees.verify import Verdict

from ..engine import Engine
from ..model.decoder import CachedDecoder
from ..stats import Stats
from ..text.prompt import Prompt

NUM_BINS = 10
EVEN = 0.03  # a smaller gain or loss is not reported
ALL = "all"
Parts = tuple[float, float, float]  # drafting, target, rest


@dataclass(frozen=True)
class Workload:
    """A prompt and the kind of its text."""

    kind: str
    prompt: Prompt

    def for_model(self, engine: Engine) -> Prompt:
        """The prompt; for a model without a chat template, messages become plain text."""
        messages = [] if isinstance(self.prompt, str) else [part for part in self.prompt if isinstance(part, Mapping)]
        if not messages or engine.tokenizer.has_chat_template:
            return self.prompt
        return "\n\n".join(message["content"] for message in messages)


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
        "The ferry left the island at six in the morning, when the harbour was still in the shadow of the hill. Most "
        "of the passengers slept. An old man stood at the rail with a cage of pigeons, and when the last house was "
        "out of sight he",
    ),
    Workload(
        "repetitive",
        "".join(f'{{"id": {i}, "name": "item {i}", "price": {i}.00, "in_stock": true}}\n' for i in range(1, 9)),
    ),
)


@dataclass(frozen=True)
class Run:
    """One request.

    budget: 0 is plain decoding, None the automatic one; with joint acceptance, the beam. first: the counters after the
    first pass. log_likelihood: log p of the text under the target, in nats per token; None if not requested.
    """

    workload: int
    kind: str
    budget: int | None
    repeat: int
    token_ids: tuple[int, ...]
    first: Stats
    stats: Stats
    accept: str = "exact"
    log_likelihood: float | None = None

    @property
    def budget_name(self) -> str:
        return budget_name(self.budget, self.accept)

    @property
    def seconds(self) -> float:
        return self.stats.ttft_s + self.stats.decode_s


@dataclass
class BudgetAcceptance:
    """Acceptance of the trees of one budget, over all recorded passes.

    lengths[n]: the number of passes with n accepted nodes. The lists have NUM_BINS equal bins of a node's predicted
    probability: the number of nodes, the sum of their predicted probabilities, and the number of accepted ones.
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
        """Nodes per pass predicted to be accepted; compare it with `accepted_per_pass`."""
        return sum(self.predicted) / max(1, self.lengths.total())

    @property
    def accepted_per_pass(self) -> float:
        return sum(self.accepted) / max(1, self.lengths.total())

    def reliability(self) -> list[tuple[float, float, int]]:
        """(predicted, accepted, nodes) of each bin with nodes: mean predicted probability, accepted share, number."""
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
    """The median and the range over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class BenchmarkRow:
    """One kind of prompts (or `all`) with one budget.

    tokens_per_s: all tokens ÷ all seconds, including the first pass. gain: tokens_per_s ÷ plain decoding's, for each
    repeat. later_tokens_per_s: after the first pass. first_*, later_*: milliseconds per pass in drafting, target, and
    rest; later_* is None if all texts ended with the first pass. log_likelihood: log p under the target in nats per
    token, the mean over texts; None without a lossy run.
    """

    kind: str
    budget: int | None
    tokens_per_s: Figure
    gain: Figure
    first_pass_s: Figure
    later_tokens_per_s: Figure | None
    tokens_per_pass: Figure
    first_ms: Parts
    later_ms: Parts | None
    accept: str = "exact"
    log_likelihood: float | None = None

    @property
    def budget_name(self) -> str:
        return budget_name(self.budget, self.accept)

    def as_dict(self) -> dict[str, Any]:
        figures = ("tokens_per_s", "gain", "first_pass_s", "later_tokens_per_s", "tokens_per_pass")
        names = ("draft", "target", "rest")
        return {
            "kind": self.kind,
            "budget": self.budget,
            "is_lossy": self.accept != "exact",
            "log_likelihood_per_token": self.log_likelihood,
            **{name: figure and vars(figure) for name in figures for figure in [getattr(self, name)]},
            "first_pass_ms": dict(zip(names, self.first_ms, strict=True)),
            "later_pass_ms": self.later_ms and dict(zip(names, self.later_ms, strict=True)),
        }


@dataclass(frozen=True)
class Outcome:
    """Whether speculation pays off: the fastest exact budget compared with plain decoding, over all prompts.

    auto: the automatic budget's row; None if it was not measured.
    """

    best: BenchmarkRow
    plain: BenchmarkRow
    auto: BenchmarkRow | None = None

    @property
    def gain(self) -> float:
        return self.best.gain.median

    @property
    def pays(self) -> bool | None:
        """None if the difference is below EVEN."""
        return None if abs(self.gain - 1) < EVEN else self.gain > 1

    @property
    def is_disturbed(self) -> bool:
        """Whether the gain is more than the tokens per pass allow: a plain pass yields one token, and is not slower."""
        return self.gain > (1 + EVEN) * self.best.tokens_per_pass.median

    @property
    def pass_ratio(self) -> float | None:
        """Seconds of a speculative pass ÷ a plain one's, without first passes; None if there were no others."""
        if self.best.later_ms is None or self.plain.later_ms is None:
            return None
        return _ratio(sum(self.best.later_ms), sum(self.plain.later_ms)) or None

    @property
    def added_ms(self) -> Parts | None:
        """Additional milliseconds of a speculative pass over a plain one: drafting, target, rest."""
        if self.best.later_ms is None or self.plain.later_ms is None:
            return None
        draft, target, rest = (a - b for a, b in zip(self.best.later_ms, self.plain.later_ms, strict=True))
        return draft, target, rest

    def as_dict(self) -> dict[str, Any]:
        return {
            "pays": self.pays,
            "budget": self.best.budget_name,
            "gain": self.gain,
            "auto_gain": self.auto and self.auto.gain.median,
            "tokens_per_pass": self.best.tokens_per_pass.median,
            "pass_ratio": self.pass_ratio,
        }


@dataclass
class BenchmarkReport:
    """The result of `measure`."""

    runs: list[Run] = field(default_factory=list)
    acceptance: dict[str, BudgetAcceptance] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(run.kind for run in self.runs))

    @property
    def budget_names(self) -> list[str]:
        return list(dict.fromkeys(run.budget_name for run in self.runs))

    def rows(self) -> list[BenchmarkRow]:
        """Rows by kind and budget, lossy ones last; the kind `all` is added at the end if there are several kinds."""
        kinds = [*self.kinds, ALL] if len(self.kinds) > 1 else self.kinds
        return [self._row(kind, name) for kind in kinds for name in self.budget_names]

    def best(self) -> BenchmarkRow | None:
        """The exact speculative row with the most tokens/s over all prompts; None if there is none."""
        rows = [row for row in self.rows()[-len(self.budget_names) :] if row.budget != 0 and row.accept == "exact"]
        return max(rows, key=lambda row: row.tokens_per_s.median, default=None)

    def outcome(self) -> Outcome | None:
        """Whether speculation pays off; None if no exact budget was measured."""
        best = self.best()
        if best is None:
            return None
        auto = self._row(best.kind, budget_name(None)) if budget_name(None) in self.budget_names else None
        return Outcome(best, self._row(best.kind, budget_name(0)), auto)

    def num_different(self, accept: str = "exact") -> int:
        """The number of texts that differ from plain decoding's.

        Where the engine `is_exact` it is 0 for exact acceptance; elsewhere near-ties may be decided differently.
        """
        plain = {(run.workload, run.repeat): run.token_ids for run in self.runs if run.budget == 0}
        return sum(run.token_ids != plain[run.workload, run.repeat] for run in self.runs if run.accept == accept)

    def as_dict(self) -> dict[str, Any]:
        outcome = self.outcome()
        return {
            "num_runs": len(self.runs),
            "num_different_texts": self.num_different(),
            "num_different_lossy_texts": self.num_different("joint"),
            "outcome": outcome and outcome.as_dict(),
            "rows": [row.as_dict() for row in self.rows()],
            "acceptance": {name: acceptance.as_dict() for name, acceptance in self.acceptance.items()},
        }

    def _repeats(self, kind: str, name: str) -> list[list[Run]]:
        """The runs of each repeat."""
        runs = [run for run in self.runs if run.kind == kind or kind == ALL]
        repeats = sorted({run.repeat for run in runs})
        return [[run for run in runs if run.budget_name == name and run.repeat == repeat] for repeat in repeats]

    def _row(self, kind: str, name: str) -> BenchmarkRow:
        repeats, plain = self._repeats(kind, name), self._repeats(kind, budget_name(0))
        rates = [_tokens_per_s(runs) for runs in repeats]
        gains = [rate / _tokens_per_s(runs) for rate, runs in zip(rates, plain, strict=True)]
        runs = [run for repeat in repeats for run in repeat]
        firsts = [_parts(run.first) for run in runs]
        totals = [_parts(run.stats) for run in runs]
        laters = [(d - d0, t - t0, r - r0) for (d, t, r), (d0, t0, r0) in zip(totals, firsts, strict=True)]
        later_rates = list[float]()
        for repeat in repeats:
            num_tokens = sum(run.stats.num_tokens - run.stats.num_first_pass_tokens for run in repeat)
            if rate := _ratio(num_tokens, sum(run.stats.decode_s for run in repeat)):
                later_rates.append(rate)
        num_later = sum(run.stats.num_passes - 1 for run in runs)
        likelihoods = [run.log_likelihood for run in runs if run.log_likelihood is not None]
        return BenchmarkRow(
            kind,
            runs[0].budget,
            Figure.of(rates),
            Figure.of(gains),
            Figure.of([statistics.mean(run.stats.ttft_s for run in repeat) for repeat in repeats]),
            Figure.of(later_rates) if later_rates else None,
            Figure.of(
                [
                    _ratio(sum(r.stats.num_tokens for r in repeat), sum(r.stats.num_passes for r in repeat))
                    for repeat in repeats
                ]
            ),
            _mean_ms(firsts, len(runs)),
            _mean_ms(laters, num_later) if num_later else None,
            runs[0].accept,
            statistics.mean(likelihoods) if likelihoods else None,
        )


def _tokens_per_s(runs: Sequence[Run]) -> float:
    return _ratio(sum(run.stats.num_tokens for run in runs), sum(run.seconds for run in runs))


def _parts(stats: Stats) -> Parts:
    """Seconds so far in drafting, target, and rest."""
    return stats.draft_s, stats.target_s, stats.prefill_s + stats.decode_s - stats.draft_s - stats.target_s


def _mean_ms(parts: Sequence[Parts], count: int) -> Parts:
    draft, target, rest = (1e3 * _ratio(sum(part[i] for part in parts), count) for i in range(3))
    return draft, target, rest


def budget_name(budget: int | None, accept: str = "exact") -> str:
    """The name of a budget: plain, auto, or the number of nodes; "joint, lossy" for joint acceptance, and so on."""
    if accept != "exact":
        return f"{accept}, lossy"
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
) -> BenchmarkReport:
    """Run every workload plainly and with each of `speculations`, `num_repeats` times.

    speculations: different budgets above 0; one may be lossy.

    Warm-up rounds come first and are not recorded. The draft's calibration is kept from run to run, as in a chat.
    The default seed is 0, so that every repeat has the same text. progress(runs done, number of runs). Raises the
    errors of `Engine.generate`.
    """
    if params.seed is None:
        params = replace(params, seed=0)
    exact = [speculation for speculation in speculations if not speculation.is_lossy]
    report = BenchmarkReport(acceptance={budget_name(speculation.budget): BudgetAcceptance() for speculation in exact})

    @cache  # most texts are equal, and a pass may take seconds
    def likelihood(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
        return float(token_log_likelihoods(engine, prompt, tokens).mean())

    ways = [SpeculationParams(budget=0), *speculations]
    # Repeats below 0 are warm-ups.
    rounds = list(product(range(-num_warmups, num_repeats), range(len(workloads)), ways))
    total = len(rounds)
    for done, (repeat, index, way) in enumerate(rounds):
        progress(done, total)
        acceptance = report.acceptance.get(budget_name(way.budget, way.accept))
        workload = workloads[index]
        ids = engine.encode(workload.for_model(engine))
        steps = list(
            engine.generate(ids, params, way, observer=acceptance.observe if acceptance and repeat >= 0 else None)
        )
        if repeat >= 0:
            tokens = tuple(token for step in steps for token in step.token_ids)
            first, last = steps[0].stats, steps[-1].stats
            mean = likelihood(tuple(ids), tokens) if len(exact) < len(speculations) else None
            run = Run(index, workload.kind, way.budget, repeat, tokens, first, last, way.accept, mean)
            report.runs.append(run)
    progress(total, total)
    return report


# ------------------------------------------------------------------------------------------------ likelihoods


def token_log_likelihoods(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> FloatArray:
    """[N]: log p of each of N tokens after the prompt and the tokens before it, in nats.

    Uses the target alone, in one pass, without repetition penalty and temperature.
    """
    tree, target = TokenTree.chain(tokens), CachedDecoder(engine.target)
    logits = target.score_rows(prompt, tree.tokens, tree.depths, tree.parents)
    sampler = Sampler(SamplingParams(), 0, engine.target.config.vocab_size, target.device)
    return np.diff(log_likelihoods(tree, logits, sampler, len(prompt)), prepend=0.0)
