"""Compares schedulers on the held-out prompts: tokens per pass, and tokens/s by a cost model.

    python -m benchmarks.scheduling.schedulers [--prompts 12] [--tokens 96] [--temperatures 0,0.6,1]
        [--budgets 16,64,256,1024]

The target's texts are recorded once (plain decoding), and every drafter is replayed along them, so all predict the same
tokens. A virtual clock counts the time by one of two cost models:

    card   a streamed pass takes 0.9 s up to 500 rows and then rises, a draft round 12 ms: 70B in NF4 on an RTX 4090
    cpu    a pass takes 3.6 s up to 64 rows and then rises, a draft round 30 ms plus 1 ms per row: 7B in bf16 from this
        disk

Chains are decoded with the target itself, because their rules sample from it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.drafts.recall import Recall, RecallingText
from offspec.model.decoder import CachedDecoder, random_decoder
from offspec.research.opt_tree import OptTreeDrafter
from offspec.research.sequoia import MeasuredAcceptance, SequoiaDrafter
from offspec.scheduler.drafting.drafter import Drafter, DraftRequest
from offspec.scheduler.drafting.estimates import RunningEstimates
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.guessing.lookup import Guesser, PromptLookup
from offspec.scheduler.pace.controllers import Controller
from offspec.scheduler.pace.costs import Costs as LearntCosts
from offspec.scheduler.trees.sampling import Sampler

from . import rules, tree_rules
from .replay import ClockedCorrector, ClockedModel, Costs, Recording, Replayed, VirtualClock, record, replay
from .specexec import SpecExecDrafter, SpecExecSettings

COSTS = {
    "card": Costs(),
    "cpu": Costs(stream_s=3.6, pass_launch_s=1.0, pass_row_s=0.04, round_launch_s=0.03, round_row_s=0.001),
}
CHAIN_LENGTHS = (4, 8, 16)
MakeDraws = Callable[[CachedDecoder, Sampler, np.random.Generator], rules.Draws]


@dataclass(frozen=True)
class Shape:
    """How candidates are drawn, and how deep."""

    drawing: tree_rules.Drawing
    depth: int


# Nodes → shapes of trees with about as many; of several that were tried, the best at temperature 1.
INDEPENDENT = {16: Shape(tree_rules.Chains(4), 4), 64: Shape(tree_rules.Chains(8), 8)}
WITHOUT_REPLACEMENT = {
    16: Shape(tree_rules.Branches((3, 1, 1, 1, 1)), 5),
    64: Shape(tree_rules.Branches((2, 2, 2, 1, 1, 1, 1, 1)), 8),
}
BEAMS = {16: Shape(tree_rules.StochasticBeam(4), 4), 64: Shape(tree_rules.StochasticBeam(8), 8)}
TREE_RULES: dict[str, tuple[tree_rules.TreeRule, dict[int, Shape]]] = {
    "tree, SpecInfer": (tree_rules.multi_step, INDEPENDENT),
    "tree, K-SEQ": (tree_rules.k_sequential, INDEPENDENT),
    "tree, RSD-C": (tree_rules.recursive, WITHOUT_REPLACEMENT),
    "tree, RSD-S": (tree_rules.recursive, BEAMS),
}
MISPREDICTED = 1.15  # an engine's prediction of the first pass over its real seconds


@dataclass(frozen=True)
class Row:
    """One method over all prompts.

    tokens_per_s: by the cost model `costs`; draft_share: drafting's share of all time.
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

    def specexec(self, method: str, settings: SpecExecSettings, costs: str) -> Row:
        """SpecExec with its own settings."""
        return self.replayed(method, settings.budget, costs, self.specexec_texts(settings, costs))

    def specexec_texts(self, settings: SpecExecSettings, costs: str) -> list[Replayed]:
        """What `specexec` sums up, text by text."""
        parts: list[Replayed] = []
        for recording in self.recordings:
            clock = VirtualClock()
            model = ClockedModel(CachedDecoder(self.draft), clock, COSTS[costs].round_s)
            sampler = recording.sampler(self.engine.target.config.vocab_size)
            drafter = SpecExecDrafter(model, sampler, settings)
            parts.append(replay(recording, drafter, sampler, clock, COSTS[costs], model))
        return parts

    def row(
        self,
        method: str,
        speculation: SpeculationParams,
        costs: str,
        *,
        random_draft: bool = False,
        controller: Callable[[LearntCosts], Controller] | None = None,
    ) -> Row:
        """One method; its estimates are kept from prompt to prompt, as in an engine.

        controller: makes another one than that of `speculation`.
        """
        draft = self.draft
        if random_draft:
            draft = random_decoder(draft.config, seed=0, dtype=draft.dtype, device=draft.device)
        estimates = RunningEstimates.nothing(
            self.engine.target.config.vocab_size, lambda rows: MISPREDICTED * COSTS[costs].pass_s(rows)
        )
        estimates.overlap_switch = None  # the clock simulates overlap
        recall, own_controller = Recall(draft, self.engine.target), controller and controller(estimates.costs)
        parts: list[Replayed] = []
        for recording in self.recordings:
            clock = VirtualClock()
            recalling = RecallingText(CachedDecoder(draft), self.engine.target, recall) if speculation.recall else None
            model = ClockedModel(recalling or CachedDecoder(draft), clock, COSTS[costs].round_s)
            sampler = recording.sampler(self.engine.target.config.vocab_size)
            drafter: Drafter
            if speculation.tree == "sequoia":
                drafter = SequoiaDrafter(model, sampler, speculation, estimates.of_kind(MeasuredAcceptance))
            elif speculation.tree == "opt-tree":
                drafter = OptTreeDrafter(model, sampler, speculation)
            else:
                guessers: list[Guesser] = [PromptLookup(estimates.lookups)] if speculation.lookup else []
                guessers += [estimates.recycling] if speculation.recycling else []
                drafter = ModelDrafter(
                    model,
                    DraftRequest(sampler),
                    speculation,
                    estimates,
                    guessers=guessers,
                    corrector=recalling and ClockedCorrector(recalling, clock, COSTS[costs].round_s),
                    controller=own_controller,
                    clock=clock.now,
                )
            target = CachedDecoder(self.engine.target) if recalling or speculation.recycling else None
            parts.append(replay(recording, drafter, sampler, clock, COSTS[costs], model, target))
        return self.replayed(method, speculation.budget, costs, parts)

    def replayed(self, method: str, budget: int | None, costs: str, parts: Sequence[Replayed]) -> Row:
        """The row of replayed texts."""
        whole = Replayed.total(parts)
        return Row(
            method,
            self.temperature,
            budget,
            costs,
            whole.tokens_per_pass,
            whole.tokens_per_s,
            whole.num_drafted_tokens / whole.num_passes,
            whole.num_rounds / whole.num_passes,
            whole.draft_s / whole.total_s,
        )

    def chain(self, method: str, rule: rules.Rule, length: int) -> Row:
        """Chains of `length` tokens with a rule from the literature, on the same prompts."""
        texts = [
            self._decoded(
                recording,
                lambda draft, sampler, generator: rules.chains(draft, sampler, length, rule, generator),
                index,
            )
            for index, recording in enumerate(self.recordings)
        ]
        return self._drawn(method, texts, length, length)

    def sampled_tree(self, method: str, rule: tree_rules.TreeRule, shape: Shape, budget: int) -> Row:
        """Trees of at most `budget` drawn candidates with a rule from the literature, on the same prompts."""
        return self._drawn(method, self.sampled_texts(rule, shape), budget, shape.depth)

    def sampled_texts(self, rule: tree_rules.TreeRule, shape: Shape) -> list[rules.Decoded]:
        """What `sampled_tree` sums up, text by text."""

        def draws(draft: CachedDecoder, sampler: Sampler, generator: np.random.Generator) -> rules.Draws:
            drawing = tree_rules.TreeDrawing(draft, shape.drawing, sampler, shape.depth)
            return tree_rules.trees(drawing, rule, generator)

        return [self._decoded(recording, draws, index) for index, recording in enumerate(self.recordings)]

    def _decoded(self, recording: Recording, make: MakeDraws, seed: int) -> rules.Decoded:
        """A text of the recording's length, decoded by a rule with its own randomness."""
        sampler = recording.sampler(self.engine.target.config.vocab_size)
        target, draft = CachedDecoder(self.engine.target), CachedDecoder(self.draft)
        draws = make(draft, sampler, np.random.default_rng(seed))
        return rules.decode(target, draft, sampler, recording.prompt_ids, len(recording.token_ids), draws)

    def _drawn(self, method: str, texts: Sequence[rules.Decoded], budget: int, num_rounds: int) -> Row:
        """Texts that a rule has drawn itself, by the cost model of the card."""
        num_tokens, num_passes = (sum(getattr(text, name) for text in texts) for name in ("num_tokens", "num_passes"))
        costs, num_nodes = COSTS["card"], sum(text.num_drafted for text in texts) / num_passes
        draft_s = num_rounds * costs.round_s(1)
        seconds, per_pass = costs.pass_s(1 + round(num_nodes)) + draft_s, num_tokens / num_passes
        share = draft_s / seconds
        return Row(method, self.temperature, budget, "card", per_pass, per_pass / seconds, num_nodes, num_rounds, share)


def methods(budget: int | None) -> Iterable[tuple[str, SpeculationParams]]:
    """The methods to compare at one budget."""
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


def specexec_settings(budget: int) -> Iterable[tuple[str, SpecExecSettings]]:
    """SpecExec as its authors' code runs it, and one setting changed at a time."""
    own = SpecExecSettings(budget)
    yield "SpecExec", own
    yield "SpecExec, decay 1", replace(own, decay=1.0)
    yield "SpecExec, decay 0.8", replace(own, decay=0.8)
    yield "SpecExec, least -10", replace(own, least_log_probability=-10.0)
    yield "SpecExec, draft at 0.7", replace(own, draft_temperature=0.7)
    yield "SpecExec, draft at 1.4", replace(own, draft_temperature=1.4)
    yield "SpecExec, 8 levels", replace(own, max_depth=8)
    yield "SpecExec, 16 a round", replace(own, max_width=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", default="0,0.6,1")
    parser.add_argument("--budgets", default="16,64,256,1024")
    parser.add_argument("--costs", default="card,cpu")
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument("--folder", type=Path, default=Path("build/recordings"), help="folder for recorded texts")
    args = parser.parse_args()
    engine = Engine.load(args.model, draft=args.draft, dtype="fp32")
    prompts = builtin.prompts()[: args.prompts]
    budgets: list[int | None] = [*map(int, args.budgets.split(",")), None]
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)

    print(f"at most {args.prompts} x {args.tokens} tokens")
    print("temperature  method                  budget  costs  tok / pass     tok/s    nodes   rounds  drafting")
    for temperature in map(float, args.temperatures.split(",")):
        params = SamplingParams(args.tokens, temperature=temperature, seed=0, ignore_eos=True)
        bench = Bench(engine, record(engine, prompts, params, args.folder))
        for name in args.costs.split(","):
            for budget in budgets:
                for method, speculation in methods(budget):
                    if args.only in method:
                        show(bench.row(method, speculation, name))
                for method, settings in specexec_settings(budget) if budget else ():
                    if args.only in method:
                        show(bench.specexec(method, settings, name))
            if args.only in "random draft":
                show(bench.row("plain decoding", SpeculationParams(0), name))
                show(bench.row("random draft", SpeculationParams(), name, random_draft=True))
                alone = SpeculationParams(lookup=False, recall=False)  # only the model drafts
                show(bench.row("random draft, alone", alone, name, random_draft=True))
        for budget in set(budgets) & set(BEAMS):
            for method, (tree_rule, shapes) in TREE_RULES.items():
                if args.only in method:
                    show(bench.sampled_tree(method, tree_rule, shapes[budget], budget))
        for length in CHAIN_LENGTHS:
            for method, rule in (("chain, ratio test", rules.token_level), ("chain, block", rules.block)):
                if args.only in method:
                    show(bench.chain(method, rule, length))
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
