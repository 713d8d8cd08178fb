"""Compares rules from the literature for when to stop drafting, on recorded texts and a simulated clock.

    python -m benchmarks.scheduling.stopping [--prompts 12] [--tokens 96] [--temperatures 0,1] [--budget 64]
        [--costs card,cpu]

All drafters rank nodes as offspec does, without recall, reuse, overlap and lookup, and send `--budget` nodes; only the
rule differs. Before each round it sees the calibrated probabilities of the nodes that could be expanded.

    depth N        N rounds: each makes the tree one level deeper
    SpecDec++ h    stops where a rejection is likelier than h (2405.19715, section 3.2; its head is our calibration)
    Kangaroo c     stops where the draft's best continuation has less than confidence c (2404.18911, section 3.2)
    DDD s          stops where the beam's probabilities sum to less than s (2409.00142, section 3)
    thompson       EESD's coin (2406.03853, section 3.3); `-calibrated` is its Calibration-TS, which begins with the
                   draft's confidence
    priced         our own: Thompson sampling that also knows what a round costs
    Sequoia, size  its shape, with the size and depth that its own prediction prefers (2402.12374, section 3.3);
                   acceptance by rank is measured on other prompts
    marginal rate  offspec's rule, which also decides how many nodes are sent

`share` is the rate over that of the best fixed depth. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.lab.sequoia import MeasuredAcceptance, SequoiaDrafter, TreeSize, best_size
from offspec.model.decoder import CachedDecoder
from offspec.scheduler.drafting.drafter import Drafter
from offspec.scheduler.pace.averages import DecayingRatio
from offspec.scheduler.pace.controllers import Controller, DraftingState, FixedBudget, MarginalRate
from offspec.scheduler.pace.costs import Costs as LearntCosts
from offspec.scheduler.pace.thompson import THOMPSON_WIDTH, CalibrationSampling, ThompsonSampling
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray

from .replay import ClockedModel, Costs, Recording, Replayed, VirtualClock, record, replay
from .schedulers import COSTS, Bench, Row

DEPTHS = (1, 2, 4, 8, 16, 32)
WIDTH = 16  # nodes that a round expands
PLAIN = SpeculationParams(reuse=False, overlap=False, recall=False, lookup=False)
SEQUOIA_CHILDREN, SEQUOIA_DEPTH = 16, 32

# Whether to draft on. open: probabilities of the paths that the next round may expand, descending; above: the best of
# them a round before; num_rounds: those that have run.
GoesOn = Callable[[np.ndarray, float, int], bool]


class Stopping(FixedBudget):
    """Rounds of WIDTH nodes as long as a rule goes on; sends `budget` nodes."""

    def __init__(self, budget: int, goes_on: GoesOn) -> None:
        super().__init__(budget, WIDTH)
        self._goes_on = goes_on
        self._above, self._num_rounds = 1.0, 1  # the root has been expanded

    def width(self, state: DraftingState) -> int:
        if not len(state.best) or not len(state.open):
            return len(state.open)  # the root, which is always expanded; or nothing is open
        if not self._goes_on(state.open, self._above, self._num_rounds):
            return 0
        self._above, self._num_rounds = float(state.open[0]), self._num_rounds + 1
        return super().width(state)

    def size(self, state: DraftingState) -> int:
        self._above, self._num_rounds = 1.0, 1
        return super().size(state)


def to_depth(num_rounds: int) -> GoesOn:
    return lambda open_nodes, above, done: done < num_rounds


def spec_dec_pp(threshold: float) -> GoesOn:
    """1 - P(the best path is accepted) is the probability of a rejection on it."""
    return lambda open_nodes, above, done: 1 - float(open_nodes[0]) <= threshold


def kangaroo(confidence: float) -> GoesOn:
    """The last node's own probability: its path's over that of the path a round before."""
    return lambda open_nodes, above, done: float(open_nodes[0]) >= confidence * above


def dynamic_depth(least_sum: float) -> GoesOn:
    return lambda open_nodes, above, done: float(open_nodes[:WIDTH].sum()) >= least_sum


class PricedSampling(ThompsonSampling):
    """Thompson sampling that knows what a round costs and how sure the draft is: a rule of our own.

    theta is the probability that a level is accepted if the level above it is. beta counts the walks that ended within
    the tree; older walks count less. Another round adds theta ** (n + 1) tokens, and runs while these exceed the recent
    rate * its seconds. `CONFIDENCE` additional counts are divided by the level probability that the open nodes imply.
    Until costs are known, the coin decides with these counts.
    """

    CONFIDENCE = 4.0
    FORGETTING = 0.98

    def __init__(self, inner: Controller, costs: LearntCosts, *, seed: int = 0) -> None:
        super().__init__(inner, seed=seed)
        self._costs, self._recent_rate = costs, DecayingRatio(self.FORGETTING)

    def _continues(self, open_nodes: FloatArray) -> bool:
        width = min(THOMPSON_WIDTH, len(open_nodes))
        likely = min(1.0, float(open_nodes[:width].sum())) ** (1 / max(1, self._num_rounds))
        theta = self._random.beta(
            self._accepted + self.CONFIDENCE * likely, self._against + self.CONFIDENCE * (1 - likely)
        )
        if not self._costs.draft.is_known or not self._recent_rate.value:
            return bool(self._random.random() < theta)
        price = self._recent_rate.value * float(self._costs.draft.seconds(np.array([width]))[0])
        return bool(theta ** (self._num_rounds + 1) > price)

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._recent_rate.observe(num_tokens, seconds)
        super().observe(num_tokens, seconds)

    def _count(self, num_accepted: int) -> None:
        self._accepted = max(1.0, self.FORGETTING * self._accepted) + num_accepted
        self._against = max(1.0, self.FORGETTING * self._against) + (num_accepted < self._num_rounds)


def rules(budget: int) -> Iterator[tuple[str, Callable[[LearntCosts], Controller]]]:
    """Names of rules, and what makes a controller of each."""
    settings: list[tuple[str, Callable[[float], GoesOn], tuple[float, ...]]] = [
        ("SpecDec++", spec_dec_pp, (0.3, 0.5, 0.7, 0.9, 0.97)),
        ("Kangaroo", kangaroo, (0.2, 0.4, 0.6, 0.8)),
        ("DDD", dynamic_depth, (0.05, 0.1, 0.2, 0.4)),
    ]
    for depth in DEPTHS:
        yield f"depth {depth}", lambda costs, depth=depth: Stopping(budget, to_depth(depth))
    for name, rule, values in settings:
        for value in values:
            yield f"{name} {value:g}", lambda costs, rule=rule, value=value: Stopping(budget, rule(value))
    yield "thompson", lambda costs: ThompsonSampling(FixedBudget(budget))
    yield "thompson-calibrated", lambda costs: CalibrationSampling(FixedBudget(budget))
    yield "priced sampling", lambda costs: PricedSampling(FixedBudget(budget), costs)
    yield "marginal rate", lambda costs: MarginalRate(costs, limit=1024)


# ------------------------------------------------------------------------------------------------ Sequoia's size


def sequoia_size(acceptance: MeasuredAcceptance, *, greedy: bool, costs: Costs, most_nodes: int) -> TreeSize:
    """The size and depth with the most predicted tokens/s. acceptance: measured with the machine's own draft."""
    probabilities = acceptance.ranks(greedy=greedy, coupled=True).probabilities(SEQUOIA_CHILDREN)
    pass_s = np.array([costs.pass_s(1 + nodes) for nodes in range(most_nodes + 1)])
    return best_size(probabilities, SEQUOIA_DEPTH, pass_s, costs.round_s(1))


def replayed_sequoia(
    bench: Bench, recordings: Sequence[Recording], size: TreeSize, costs: Costs, acceptance: MeasuredAcceptance
) -> list[Replayed]:
    params = replace(PLAIN, budget=size.nodes, max_depth=max(1, size.depth), tree="sequoia")

    def drafter(model: ClockedModel, sampler: Sampler) -> Drafter:
        return SequoiaDrafter(model, sampler, params, acceptance, coupled=True)

    return [replay_one(bench, recording, drafter, costs) for recording in recordings]


def replay_one(
    bench: Bench, recording: Recording, make: Callable[[ClockedModel, Sampler], Drafter], costs: Costs
) -> Replayed:
    clock = VirtualClock()
    model = ClockedModel(CachedDecoder(bench.draft), clock, costs.round_s)
    sampler = recording.sampler(bench.engine.target.config.vocab_size)
    return replay(recording, make(model, sampler), sampler, clock, costs, model)


def sequoia_row(bench: Bench, others: Sequence[Recording], name: str, most_nodes: int) -> Row:
    """Sequoia at the size that it finds best; its acceptance is measured on `others`."""
    acceptance, costs = MeasuredAcceptance(), COSTS[name]
    replayed_sequoia(bench, others, TreeSize(64, 8), costs, acceptance)
    size = sequoia_size(acceptance, greedy=bench.temperature == 0, costs=costs, most_nodes=most_nodes)
    parts = replayed_sequoia(bench, bench.recordings, size, costs, acceptance)
    return bench.replayed(f"Sequoia, size {size.nodes}x{size.depth}", size.nodes, name, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--costs", default="card,cpu")
    parser.add_argument("--only", default="", help="rules whose name contains this, beside fixed depths")
    parser.add_argument("--folder", type=Path, default=Path("build/recordings"), help="folder for recorded texts")
    args = parser.parse_args()
    engine, rows = Engine.load("builtin", dtype="fp32"), list[Row]()
    for temperature in map(float, args.temperatures.split(",")):
        params = SamplingParams(args.tokens, temperature=temperature, seed=0, ignore_eos=True)
        prompts = builtin.prompts()
        bench = Bench(engine, record(engine, prompts[: args.prompts], params, args.folder))
        others = record(engine, prompts[-max(1, args.prompts // 3) :], params, args.folder)
        for name in args.costs.split(","):
            found = [
                bench.row(rule, replace(PLAIN, budget=args.budget), name, controller=make)
                for rule, make in rules(args.budget)
                if args.only in rule or rule.startswith("depth")
            ]
            if args.only in "Sequoia":
                found.append(sequoia_row(bench, others, name, most_nodes=1024))
            best = max(row.tokens_per_s for row in found if row.method.startswith("depth"))
            for row in found:
                print(f"{row}  {row.tokens_per_s / best:7.1%}", flush=True)
            rows += found
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
