"""Schedulers side by side on the held-out prompts: tokens per pass, and tokens/s by a cost model.

    python -m benchmarks.scheduling.schedulers [--prompts 12] [--tokens 96] [--temperatures 0,0.6,1]
        [--budgets 16,64,256,1024]
    python -m benchmarks.scheduling.schedulers --texts edit --temperatures 0 --only 'ours, lookup'

The target's texts are recorded once (plain decoding) and every drafter is judged along them, so the same tokens are
guessed by all. Time is counted on a virtual clock, by one of two cost models:

    card   a streamed pass takes 0.9 s up to 500 rows and then rises, a draft round 12 ms: 70B in NF4 on an RTX 4090
    cpu    a pass takes 3.6 s up to 64 rows and then rises, a draft round 30 ms and 1 ms a row: 7B in bf16 from this
        disk

Chains are decoded with the target itself, since their rules draw from it. The other texts, that repeat their prompts,
are written by rule (`repetition`); the random draft and chains are left out there. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.drafts.recall import Recall, RecallingText
from offspec.model.decoder import CachedDecoder, random_decoder
from offspec.scheduler.baselines.opt_tree import OptTreeDrafter
from offspec.scheduler.baselines.sequoia import SequoiaDrafter
from offspec.scheduler.drafter import Drafter, DraftRequest
from offspec.scheduler.learnt import RunningEstimates
from offspec.scheduler.lookup import Guesser, PromptLookup
from offspec.scheduler.model_drafter import ModelDrafter

from . import repetition, rules
from .replay import ClockedCorrector, ClockedModel, Costs, Recording, Replayed, VirtualClock, record, replay

COSTS = {
    "card": Costs(),
    "cpu": Costs(stream_s=3.6, pass_launch_s=1.0, pass_row_s=0.04, round_launch_s=0.03, round_row_s=0.001),
}
CHAIN_LENGTHS = (4, 8, 16)
MISPREDICTED = 1.15  # what an engine predicts of a pass before the first is like this beside what it takes


@dataclass(frozen=True)
class Row:
    """One method over all prompts.

    tokens_per_s: by the cost model `costs`; draft_share: of all time, spent drafting.
    """

    method: str
    temperature: float
    budget: int | None
    costs: str
    tokens_per_pass: float
    tokens_per_s: float
    nodes_per_pass: float
    rounds_per_pass: float
    draft_share: float

    def __str__(self) -> str:
        budget = "auto" if self.budget is None else str(self.budget)
        return (
            f"{self.temperature:>11g}  {self.method:<22}  {budget:>6}  {self.costs:<5}  {self.tokens_per_pass:>10.2f}"
            f"  {self.tokens_per_s:>8.3f}  {self.nodes_per_pass:>7.0f}  {self.rounds_per_pass:>7.1f}  "
            f"{self.draft_share:>7.1%}"
        )


class Bench:
    """An engine's pair and the recorded texts of one temperature."""

    def __init__(self, engine: Engine, recordings: Sequence[Recording]) -> None:
        assert engine.draft.decoder is not None
        self.engine, self.draft, self.recordings = engine, engine.draft.decoder, recordings
        self.temperature = recordings[0].params.temperature

    def row(self, method: str, speculation: SpeculationParams, costs: str, *, random_draft: bool = False) -> Row:
        """One method; what it learns is kept from prompt to prompt, as an engine keeps it."""
        draft = self.draft
        if random_draft:
            draft = random_decoder(draft.config, seed=0, dtype=draft.dtype, device=draft.device)
        learnt = RunningEstimates.nothing(
            self.engine.target.config.vocab_size, lambda rows: MISPREDICTED * COSTS[costs].pass_s(rows)
        )
        learnt.overlap_switch = None  # the clock says what overlap brings
        recall = Recall(draft, self.engine.target)
        parts: list[Replayed] = []
        for recording in self.recordings:
            clock = VirtualClock()
            recalling = RecallingText(CachedDecoder(draft), self.engine.target, recall) if speculation.recall else None
            model = ClockedModel(recalling or CachedDecoder(draft), clock, COSTS[costs].round_s)
            sampler = recording.sampler(self.engine.target.config.vocab_size)
            drafter: Drafter
            if speculation.tree == "sequoia":
                drafter = SequoiaDrafter(model, sampler, speculation, learnt.acceptance)
            elif speculation.tree == "opt-tree":
                drafter = OptTreeDrafter(model, sampler, speculation)
            else:
                guessers: list[Guesser] = [PromptLookup(learnt.lookups)] if speculation.lookup else []
                guessers += [learnt.recycling] if speculation.recycling else []
                drafter = ModelDrafter(
                    model,
                    DraftRequest(sampler),
                    speculation,
                    learnt,
                    guessers=guessers,
                    corrector=recalling and ClockedCorrector(recalling, clock, COSTS[costs].round_s),
                    clock=clock.now,
                )
            target = CachedDecoder(self.engine.target) if recalling or speculation.recycling else None
            parts.append(replay(recording, drafter, sampler, clock, COSTS[costs], model, target))
        whole = Replayed.total(parts)
        return Row(
            method,
            self.temperature,
            speculation.budget,
            costs,
            whole.tokens_per_pass,
            whole.tokens_per_s,
            whole.num_drafted_tokens / whole.num_passes,
            whole.num_rounds / whole.num_passes,
            whole.draft_s / whole.total_s,
        )

    def chain(self, method: str, rule: rules.Rule, length: int) -> Row:
        """Chains of `length` tokens under a rule of the literature, on the same prompts."""
        num_tokens = num_passes = 0
        for index, recording in enumerate(self.recordings):
            text = rules.decode(
                CachedDecoder(self.engine.target),
                CachedDecoder(self.draft),
                recording.sampler(self.engine.target.config.vocab_size),
                recording.prompt_ids,
                len(recording.token_ids),
                length,
                rule,
                np.random.default_rng(index),
            )
            num_tokens, num_passes = num_tokens + len(text.token_ids), num_passes + text.num_passes
        costs = COSTS["card"]
        seconds = costs.pass_s(1 + length) + length * costs.round_s(1)
        per_pass = num_tokens / num_passes
        share = length * costs.round_s(1) / seconds
        return Row(method, self.temperature, length, "card", per_pass, per_pass / seconds, length, length, share)


def methods(budget: int | None) -> Iterable[tuple[str, SpeculationParams]]:
    """What is compared at one budget."""
    plain = {"reuse": False, "overlap": False, "recall": False, "lookup": False}
    if budget is not None:
        yield "SpecExec scoring", SpeculationParams(budget, scoring="specexec", **plain)
        yield "Sequoia", SpeculationParams(budget, scoring="specexec", tree="sequoia", **plain)
        yield "OPT-Tree", SpeculationParams(budget, scoring="specexec", tree="opt-tree", **plain)
        yield "ours, tree only", SpeculationParams(budget, **plain)
        yield "ours, no recall", SpeculationParams(budget, lookup=False, recall=False)
    yield "ours", SpeculationParams(budget, lookup=False)
    yield "ours, lookup", SpeculationParams(budget)
    yield "ours, recycling", SpeculationParams(budget, lookup=False, recycling=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--texts", default="held-out", choices=["held-out", *repetition.KINDS])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", default="0,0.6,1")
    parser.add_argument("--budgets", default="16,64,256,1024")
    parser.add_argument("--costs", default="card,cpu")
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument("--folder", type=Path, default=Path("build/recordings"), help="where recorded texts are kept")
    args = parser.parse_args()
    engine = Engine.load(args.model, draft=args.draft, dtype="fp32")
    prompts = builtin.prompts()[: args.prompts]
    budgets: list[int | None] = [*map(int, args.budgets.split(",")), None]
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)

    if args.texts != "held-out" and args.temperatures != "0":
        parser.error(f"--texts {args.texts} has no noise in it: --temperatures 0")
    print(f"{args.texts} texts, at most {args.prompts} x {args.tokens} tokens")
    print("temperature  method                  budget  costs  tok / pass     tok/s    nodes   rounds  drafting")
    for temperature in map(float, args.temperatures.split(",")):
        params = SamplingParams(args.tokens, temperature=temperature, seed=0, ignore_eos=True)
        if args.texts == "held-out":
            bench = Bench(engine, record(engine, prompts, params, args.folder))
        else:
            bench = Bench(engine, repetition.recordings(engine, args.texts, args.prompts, args.tokens))
        for name in args.costs.split(","):
            for budget in budgets:
                for method, speculation in methods(budget):
                    if args.only in method:
                        show(bench.row(method, speculation, name))
            if args.texts == "held-out" and args.only in "random draft":
                show(bench.row("plain decoding", SpeculationParams(0), name))
                show(bench.row("random draft", SpeculationParams(), name, random_draft=True))
                alone = SpeculationParams(lookup=False, recall=False)  # nothing else guesses
                show(bench.row("random draft, alone", alone, name, random_draft=True))
        for length in CHAIN_LENGTHS if args.texts == "held-out" else ():
            for method, rule in (("chain, ratio test", rules.token_level), ("chain, block", rules.block)):
                if args.only in method:
                    show(bench.chain(method, rule, length))
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
