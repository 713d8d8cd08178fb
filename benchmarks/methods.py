"""Tokens per pass and tokens/s of the methods that a run can choose, with one target: greedy and at temperature 1.

    python -m benchmarks.methods [--model builtin] [--draft auto] [--prompts 8] [--tokens 64] [--budget 64]
        [--costs card,cpu] [--turns 1]

Exact methods are replayed along texts of plain decoding, which are recorded once. A virtual clock counts seconds by a
cost model (`scheduling.schedulers`): `card`, a streamed pass of 0.9 s up to 500 rows; `cpu`, one of 3.6 s up to 64
rows. Lossy ways write their own texts, with a beam of 8 times 8; their seconds are counted by the same models. Trees
have `--budget` nodes, but in rows that find their own. Every pass counts, including the first.

`--turns N` also measures processor time on this machine: each method and plain decoding by turns, N times; the column
is the median of the rates' ratio. Prints a Markdown table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.drafts.base import Draft, DraftTask
from offspec.drafts.model_draft import ModelDraft
from offspec.drafts.recall import RecallingText
from offspec.drafts.without_model import LookupDraft
from offspec.lab.blend import WAYS
from offspec.model.memory.text_caches import DraftText
from offspec.scheduler.drafting.drafter import DraftRequest
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.pace.costs import Costs as LearntCosts
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import Verdict

from .scheduling.against_plain import Passes, Turns, by_turns
from .scheduling.replay import Costs, Recording, Replayed, VirtualClock, record, replay
from .scheduling.schedulers import COSTS, MISPREDICTED

TEMPERATURES = (0.0, 1.0)
ABSENT = "\N{EN DASH}"


@dataclass(frozen=True)
class Method:
    """A method: its name, whether the draft model drafts, and its settings."""

    name: str
    has_model: bool
    speculation: SpeculationParams

    def fresh(self, engine: Engine) -> Engine:
        """An engine with this method's draft, which has learnt nothing yet."""
        return engine.with_draft(engine.draft if self.has_model else LookupDraft())


@dataclass(frozen=True)
class Cell:
    """A method at one temperature. tokens_per_s: by cost model. over_plain: rates in processor time, if measured."""

    temperature: float
    tokens_per_pass: float
    tokens_per_s: dict[str, float]
    over_plain: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.tokens_per_pass:.2f}", *(f"{rate:.3g}" for rate in self.tokens_per_s.values())]
        return " \N{MIDDLE DOT} ".join([*parts, *([] if self.over_plain is None else [f"{self.over_plain:.2f}x"])])


@dataclass(frozen=True)
class Row:
    """A method at each temperature; None where it is refused."""

    name: str
    cells: list[Cell | None]

    def __str__(self) -> str:
        return f"| {self.name} | " + " | ".join(ABSENT if cell is None else str(cell) for cell in self.cells) + " |"


def methods(budget: int) -> Iterator[Method]:
    """Exact ones first. Each draws on what the ones above it have, where that makes sense."""
    alone = {"lookup": False, "recall": False}
    yield Method("plain decoding", False, SpeculationParams(0))
    yield Method("lookup and token recycling, no draft model", False, SpeculationParams(budget))
    for tree in ("sequoia", "opt-tree"):
        params = SpeculationParams(budget, scoring="specexec", tree=tree, **alone)
        yield Method(f"draft model, `--tree {tree}`", True, params)
    yield Method("draft model, SpecExec's scoring", True, SpeculationParams(budget, scoring="specexec", **alone))
    yield Method("draft model, shared noise and sharpness", True, SpeculationParams(budget, **alone))
    yield Method("the same, with recall", True, SpeculationParams(budget, lookup=False))
    yield Method("the same, with recall and lookup", True, SpeculationParams(budget))
    yield Method("the same, with token recycling too", True, SpeculationParams(budget, recycling=True))
    yield Method("recall and lookup, `--budget auto` (the default)", True, SpeculationParams())
    yield Method("the same, with token recycling too, `--budget auto`", True, SpeculationParams(recycling=True))
    for accept in ("joint", *WAYS):
        yield Method(f"`--accept {accept}`, lossy", True, SpeculationParams(accept=accept, beam=8, gamma=8))


# ------------------------------------------------------------------------------------------------ counted seconds


class ClockedDraft:
    """Counts the forwards of drafts, each of which takes `seconds(rows)` on a clock."""

    def __init__(self, clock: VirtualClock, seconds: Callable[[int], float]) -> None:
        self._clock, self._seconds, self.num_calls = clock, seconds, 0

    def observe(self, text: DraftText) -> None:
        """Count those of this text."""
        inner: Any = text.states

        def states(chain: Sequence[int], tokens: np.ndarray, *rest: Any, **options: Any) -> Tensor:
            self.num_calls += 1
            self._clock.advance(self._seconds(len(chain) + len(tokens)))
            found: Tensor = inner(chain, tokens, *rest, **options)
            return found

        text.states = states  # type: ignore[method-assign]

    @contextmanager
    def corrections(self) -> Iterator[None]:
        """Count recall's corrections of nodes that remain as rounds."""
        inner = RecallingText.corrected

        def corrected(text: RecallingText, rows: np.ndarray) -> Tensor:
            self._clock.advance(self._seconds(len(rows)))
            return inner(text, rows)

        with patch.object(RecallingText, "corrected", corrected):
            yield


def telling_time(clock: VirtualClock) -> AbstractContextManager[Any]:
    """Drafters measure by this clock."""
    return patch.dict(ModelDrafter.__init__.__kwdefaults__, clock=clock.now)


def replayed(engine: Engine, method: Method, recordings: Sequence[Recording], costs: Costs) -> Replayed:
    """All texts of `replayed_texts` together."""
    return Replayed.total(replayed_texts(engine, method, recordings, costs))


def replayed_texts(engine: Engine, method: Method, recordings: Sequence[Recording], costs: Costs) -> list[Replayed]:
    """An exact method along recorded texts; its estimates are kept from text to text."""
    fresh, parts = method.fresh(engine), list[Replayed]()
    fresh.learnt.overlap_switch = None  # the clock simulates overlap
    fresh.learnt.costs = LearntCosts(lambda rows: MISPREDICTED * costs.pass_s(rows))
    for recording in recordings:
        clock = VirtualClock()
        rounds, caches = ClockedDraft(clock, costs.round_s), fresh.new_caches()
        if caches.draft is not None:
            rounds.observe(caches.draft)
        sampler = recording.sampler(fresh.target.config.vocab_size)
        request = DraftRequest(sampler, num_unscored=len(recording.prompt_ids))
        task = DraftTask(caches.draft, fresh.target, request, method.speculation)
        with telling_time(clock), rounds.corrections():
            drafter = fresh.draft.drafter(task, fresh.learnt)
            target = caches.target if needs_target(fresh.draft, method.speculation) else None
            layers = fresh.draft.target_layers
            parts.append(replay(recording, drafter, sampler, clock, costs, rounds, target, layers))
    return parts


def needs_target(draft: Draft, speculation: SpeculationParams) -> bool:
    """Whether drafting draws on the target's states or predictions, beside the text; a replay may spare them if not."""
    return type(draft) is not ModelDraft or speculation.recall or speculation.recycling


def written(engine: Engine, method: Method, recordings: Sequence[Recording], costs: Costs) -> Replayed:
    """A lossy method, which writes its own texts after the same prompts."""
    fresh, parts = method.fresh(engine), list[Replayed]()
    for recording in recordings:
        clock = VirtualClock()
        rounds, caches = ClockedDraft(clock, costs.round_s), fresh.new_caches()
        assert caches.draft is not None
        rounds.observe(caches.draft)
        new = [len(recording.prompt_ids)]

        def passed(tree: TokenTree, verdict: Verdict, clock: VirtualClock = clock, new: list[int] = new) -> None:
            clock.advance(costs.pass_s(new.pop() + len(tree)))
            new.append(1)

        *_, last = fresh.generate(
            recording.prompt_ids, recording.params, method.speculation, caches=caches, observer=passed
        )
        num_tokens, num_passes = last.stats.num_tokens, last.stats.num_passes
        parts.append(Replayed(num_tokens, num_passes, rounds.num_calls, total_s=clock.now()))
    return Replayed.total(parts)


# ------------------------------------------------------------------------------------------------ measured seconds


def over_plain(engine: Engine, method: Method, recordings: Sequence[Recording], repeats: int) -> float:
    """The method's rate over that of plain decoding, in processor time, by turns: the median of `repeats`."""
    ratios = list[float]()
    plain_method = Method("", False, SpeculationParams(0))
    for _ in range(repeats):
        found = list[tuple[Engine, Method, Passes]]()
        for each in (plain_method, method):
            found.append((each.fresh(engine), each, Passes()))
        for recording in recordings:
            with patch.dict(ModelDrafter.__init__.__kwdefaults__, clock=time.process_time):
                turns = [
                    Turns(
                        fresh.generate(recording.prompt_ids, recording.params, each.speculation),
                        time.process_time,
                        passes,
                    )
                    for fresh, each, passes in found
                ]
                by_turns(*turns)
        plain, own = (passes for _, _, passes in found)
        ratios.append(own.rate / plain.rate)
    return statistics.median(ratios)


# ------------------------------------------------------------------------------------------------ the table


def measure(
    engine: Engine, method: Method, recordings: Sequence[Recording], costs: Sequence[str], turns: int
) -> Cell | None:
    """One cell; None for joint acceptance with a temperature."""
    temperature, is_lossy = recordings[0].params.temperature, method.speculation.is_lossy
    if method.speculation.accept == "joint" and temperature > 0:
        return None
    run = written if is_lossy else replayed
    found = {name: run(engine, method, recordings, COSTS[name]) for name in costs}
    ratio = over_plain(engine, method, recordings, turns) if turns else None
    per_pass = next(iter(found.values())).tokens_per_pass
    return Cell(temperature, per_pass, {name: each.tokens_per_s for name, each in found.items()}, ratio)


def head(costs: Sequence[str], turns: int) -> str:
    """The table's first lines."""
    what = " \N{MIDDLE DOT} ".join(["tokens per pass", *(f"tokens/s, {name}" for name in costs)])
    what += " \N{MIDDLE DOT} over plain, measured" if turns else ""
    return f"Cells: {what}\n\n| | greedy | temperature 1 |\n|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--costs", default="card,cpu")
    parser.add_argument("--turns", type=int, default=0, help="how often to measure processor time on this machine")
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument("--folder", type=Path, default=Path("build/recordings"), help="folder for recorded texts")
    args = parser.parse_args()
    engine, rows = Engine.load(args.model, draft=args.draft, device="cpu", dtype="fp32"), list[Row]()
    prompts, costs = builtin.prompts()[: args.prompts], args.costs.split(",")
    params = [SamplingParams(args.tokens, temperature, seed=0, ignore_eos=True) for temperature in TEMPERATURES]
    texts = [record(engine, prompts, each, args.folder) for each in params]
    print(f"{engine.name}, draft {engine.draft_name}: {len(prompts)} prompts x {args.tokens} tokens")
    print(head(costs, args.turns), flush=True)
    for method in methods(args.budget):
        if args.only in method.name and (not method.has_model or engine.draft.decoder is not None):
            rows.append(Row(method.name, [measure(engine, method, each, costs, args.turns) for each in texts]))
            print(rows[-1], flush=True)
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
