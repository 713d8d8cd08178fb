"""Measures the gain of training an exit layer, and the stopping of its drafting by Thompson sampling.

    offspec distill builtin --exit-layer 2 --out build/exit2.safetensors
    python -m benchmarks.drafts.early_exit build/exit2.safetensors [--prompts 12] [--tokens 64] [--temperatures 0,1]

The target's texts on the held-out prompts are recorded once (plain decoding), and the draft of first layers and exit
layer is replayed along them. First table: tokens per pass with the trained exit layer, and with the untrained copy of a
layer from which training started. Second table: tokens/s, by two cost models, of drafting to a fixed depth and of
Thompson sampling (EESD, 2406.03853, section 3.3; as published, and priced: our own, which knows costs). All
methods expand 16 nodes per round and send the same number of nodes.

    resident   all layers cost the same: a round costs the first layers and the exit layer, a pass all layers
    streamed   a streamed layer costs 40 times as much as a resident one: 70B in NF4 on a card

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from benchmarks.scheduling.replay import ClockedModel, Costs, Recording, Replayed, VirtualClock, record, replay
from benchmarks.scheduling.stopping import PricedSampling
from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.loaders.formats import dense
from offspec.model.decoder import Decoder
from offspec.model.early_exit import EarlyExit, SharedDraft, Trunk
from offspec.scheduler.drafting.drafter import DraftRequest
from offspec.scheduler.drafting.learnt import RunningEstimates
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.pace.controllers import Controller, DraftingState, FixedBudget
from offspec.scheduler.pace.costs import Costs as LearntCosts
from offspec.scheduler.pace.thompson import THOMPSON_WIDTH, ThompsonSampling
from offspec.text.prompt import Prompt

DEPTHS = (1, 2, 3, 4, 6, 8, 12)
THOMPSON = (("thompson", False), ("priced sampling", True))  # name, whether it knows costs
COSTS = ("resident", "streamed")
STREAMED_LAYER = 40  # cost of a streamed layer, in units of a resident one
GetController = Callable[[LearntCosts], Controller]


class FixedDepth(FixedBudget):
    """A fixed number of rounds, including the root's; each makes the tree one level deeper."""

    def __init__(self, budget: int, num_rounds: int) -> None:
        super().__init__(budget)
        self._num_rounds, self._done = num_rounds, 0

    def width(self, state: DraftingState) -> int:
        if len(state.best) == 0 and len(state.open) == 1:  # the root
            return 1
        self._done += 1
        return min(THOMPSON_WIDTH, len(state.open)) if self._done < self._num_rounds else 0

    def size(self, state: DraftingState) -> int:
        self._done = 0
        return super().size(state)


@dataclass(frozen=True)
class Row:
    """One way over all prompts. exit: trained or untrained."""

    exit: str
    num_first: int
    stopping: str
    temperature: float
    budget: int
    tokens_per_pass: float
    rounds_per_pass: float
    tokens_per_s: dict[str, float]


class Bench:
    """A target, its recorded texts, and exit layers."""

    def __init__(self, target: Decoder, recordings: Sequence[Recording]) -> None:
        self.target, self.recordings = target, recordings

    def row(
        self,
        name: str,
        exit_layer: EarlyExit,
        stopping: str,
        budget: int,
        controller: GetController,
        cost: str = COSTS[0],
    ) -> Row:
        """One stopping rule; its estimates are kept from prompt to prompt, as in an engine.

        cost: the cost model of the clock; it changes the drafting only of rules that use costs.
        """
        learnt, parts = RunningEstimates.nothing(self.target.config.vocab_size), list[Replayed]()
        rule, num_first = controller(learnt.costs), exit_layer.num_first
        for recording in self.recordings:
            clock = VirtualClock()
            draft = SharedDraft(Trunk(self.target, exit_layer.num_first), exit_layer)
            model = ClockedModel(draft, clock, lambda rows: num_first + 1.0)
            sampler = recording.sampler(self.target.config.vocab_size)
            params = SpeculationParams(budget, overlap=False, reuse=False, lookup=False, recall=False)
            drafter = ModelDrafter(model, DraftRequest(sampler), params, learnt, controller=rule, clock=clock.now)
            parts.append(
                replay(recording, drafter, sampler, clock, Costs(self.pass_s(num_first, cost), 0.0, 0.0), model)
            )
        whole = Replayed.total(parts)
        return Row(
            name,
            num_first,
            stopping,
            self.recordings[0].params.temperature,
            budget,
            whole.tokens_per_pass,
            whole.num_rounds / whole.num_passes,
            {cost: self.tokens_per_s(whole, num_first, cost) for cost in COSTS},
        )

    def pass_s(self, num_first: int, cost: str) -> float:
        """Seconds of a pass, in units of a resident layer. Leaves also pass through the first layers."""
        return num_first + (self.target.config.num_layers - num_first) * (STREAMED_LAYER if cost == "streamed" else 1)

    def tokens_per_s(self, whole: Replayed, num_first: int, cost: str) -> float:
        seconds = whole.num_rounds * (num_first + 1) + whole.num_passes * self.pass_s(num_first, cost)
        return whole.num_tokens / seconds


def began_with(file: Path, target: Decoder, num_first: int) -> int:
    """The target's layer whose copy was the start of the training."""
    with safe_open(file, framework="pt") as opened:
        is_last = opened.metadata()["init"] == "last"
    return target.config.num_layers - 1 if is_last else num_first


def copy_of(target: Decoder, index: int) -> dict[str, Tensor]:
    with target.weights.layer(index) as layer:
        return {name: dense(weight, target.dtype).clone() for name, weight in layer.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="exit layers of the target")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--budgets", default="16,64")
    parser.add_argument(
        "--depths", default=",".join(map(str, DEPTHS)), help="depths to measure; empty omits the second table"
    )
    parser.add_argument("--folder", type=Path, default=Path("build/recordings"), help="folder for recorded texts")
    args = parser.parse_args()
    rows: list[Row] = []
    for file in args.files:
        engine = Engine.load(args.model, draft="self", exit_file=file, dtype="fp32", device="cpu")
        trained, prompts = engine.draft.decoder, builtin.prompts()[: args.prompts]
        assert isinstance(trained, EarlyExit)
        index = began_with(file, engine.target, trained.num_first)
        untrained = EarlyExit(engine.target, trained.num_first, copy_of(engine.target, index))
        for temperature in map(float, args.temperatures.split(",")):
            params = SamplingParams(args.tokens, temperature=temperature, seed=0, ignore_eos=True)
            bench = Bench(engine.target, record(engine, list[Prompt](prompts), params, args.folder))
            for budget in map(int, args.budgets.split(",")):
                rows += both(bench, trained, untrained, budget)
                if args.depths != "none":
                    rows += stops(bench, trained, budget, [int(depth) for depth in args.depths.split(",")])
        engine.close()
    print(json.dumps({"model": args.model, "rows": [asdict(row) for row in rows]}))


def both(bench: Bench, trained: EarlyExit, untrained: EarlyExit, budget: int) -> list[Row]:
    """Without a stopping rule, as with `--budget N`."""
    found = [
        bench.row(name, layer, "default", budget, lambda _: FixedBudget(budget))
        for name, layer in (("trained", trained), ("untrained", untrained))
    ]
    first, second = (row.tokens_per_pass for row in found)
    print(
        f"exit after {trained.num_first}, temperature {found[0].temperature:g}, budget {budget}: "
        f"{first:.2f} tokens per pass trained, {second:.2f} untrained, {first / second:.2f} times",
        flush=True,
    )
    return found


def stops(bench: Bench, trained: EarlyExit, budget: int, depths: Sequence[int]) -> list[Row]:
    """Fixed depths and Thompson sampling, each against the best depth."""
    fixed = [
        bench.row("trained", trained, f"depth {depth}", budget, lambda _, depth=depth: FixedDepth(budget, depth))
        for depth in depths
    ]
    found = list(fixed)
    for cost in COSTS:
        drawn = [
            bench.row("trained", trained, name, budget, partial(_thompson, budget, is_priced), cost)
            for name, is_priced in THOMPSON
        ]
        best = max(fixed, key=lambda row: row.tokens_per_s[cost])
        for row in (*fixed, *drawn):
            share = row.tokens_per_s[cost] / best.tokens_per_s[cost]
            print(
                f"    {cost:<9} {row.stopping:<20} {row.tokens_per_pass:5.2f} tokens and {row.rounds_per_pass:5.2f} "
                "rounds "
                f"a pass, {share:6.1%} of the best depth",
                flush=True,
            )
        found += [replace(row, tokens_per_s={cost: row.tokens_per_s[cost]}) for row in drawn]
    return found


def _thompson(budget: int, is_priced: bool, learnt: LearntCosts) -> Controller:
    return PricedSampling(FixedBudget(budget), learnt) if is_priced else ThompsonSampling(FixedBudget(budget))


if __name__ == "__main__":
    main()
