"""Compares `auto` with the best fixed budget where the predicted costs of a pass are wrong.

    python -m benchmarks.scheduling.worlds [--worlds 300] [--passes 6,20,60] [--seed 0] [--worst 5]

A world is a target and a draft whose costs differ from those predicted: the seconds of a pass of few rows (floor) and
of a further row (slope) are 1/4 to 4 times the prediction. The models are tables: the next token depends on the last
one alone, and the draft's logits are the target's with noise. A virtual clock counts the time. Each line of the table
is the mean and the worst share of the best fixed budget's tokens/s, in the passes 1 to n, and in those after the sixth.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from offspec import SamplingParams, SpeculationParams
from offspec.scheduler.drafting.drafter import DraftRequest
from offspec.scheduler.drafting.estimates import RunningEstimates
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import IntArray, TokenTree
from offspec.scheduler.trees.verify import TargetPass, verify_exactly
from offspec.scheduler.trees.vocabulary import Vocabulary

from .replay import NO_LOGITS, Costs, VirtualClock, walk

VOCAB_SIZE, SPREAD, PROMPT = 256, 3.0, 32
BUDGETS = (0, 4, 8, 16, 32, 64, 128, 256)
MOST_TOKENS = 33  # of a pass
LEARNING_PASSES = 6  # in which `auto` may still be wrong
JITTER = 0.05  # standard deviation of the logarithm of a pass's seconds
# What worlds are drawn from. A pass of one row takes a second.
WRONG = (0.25, 0.5, 1.0, 2.0, 4.0)  # predicted over true
KNEES = (4, 16, 64, 256)  # rows up to which a pass takes as long as one row
ROUNDS = (0.004, 0.015, 0.06)  # seconds of a draft round
NOISES = (0.7, 1.5, 2.5)  # of the draft's logits
SHARES = (0.0, 0.5)  # of a pass's seconds that no link hides: rows add to it from the first one


@dataclass(frozen=True)
class World:
    """floor, slope: predicted over true seconds of few rows, and of a further row. noise: of the draft's logits."""

    knee: int
    share: float
    round_s: float
    noise: float
    floor: float
    slope: float

    @property
    def costs(self) -> Costs:
        return self._costs(1.0, 1.0)

    @property
    def predicted(self) -> Costs:
        return self._costs(self.floor, self.slope)

    def _costs(self, floor: float, slope: float) -> Costs:
        launch_s = self.share * floor
        row_s = (1 - self.share) * slope / self.knee
        return Costs(floor, launch_s, row_s, self.round_s, self.round_s / 100)


def draw_worlds(number: int, seed: int) -> list[World]:
    """Worlds of all combinations, drawn at random without repetition."""
    choices = (KNEES, SHARES, ROUNDS, NOISES, WRONG, WRONG)
    sizes = [len(values) for values in choices]
    drawn = np.random.default_rng(seed).permutation(int(np.prod(sizes)))[:number]
    places = zip(*np.unravel_index(drawn, sizes), strict=True)
    return [World(*(values[place] for values, place in zip(choices, world, strict=True))) for world in places]


# ------------------------------------------------------------------------------------------------ models


class TableModel:
    """A TreeModel whose logits [V] are a row of a table [V, V]: that of the token before."""

    max_context = 1 << 20
    vocabulary = Vocabulary(VOCAB_SIZE)

    def __init__(self, table: Tensor) -> None:
        self._table, self.length = table, 0

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        self.length += len(chain)
        return self._table[torch.from_numpy(np.concatenate((np.array(chain[-1:], dtype=np.int64), tokens)))]

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        self.length += len(path)


@cache
def tables(noise: float) -> tuple[Tensor, Tensor]:
    """The target's table, and a draft's."""
    generator = torch.Generator().manual_seed(0)
    target = SPREAD * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
    return target, target + noise * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)


def sampler_at(text: Sequence[int]) -> Sampler:
    sampler = Sampler(SamplingParams(temperature=1.0), 0, VOCAB_SIZE)
    sampler.extend(text)
    return sampler


class TargetText:
    """A prompt, and the tokens with which the target continues it, as far as they were asked for."""

    def __init__(self) -> None:
        self._table, self._text = tables(0.0)[0], list(range(PROMPT))
        self._sampler = sampler_at(self._text)

    def up_to(self, length: int) -> list[int]:
        while len(self._text) < length:
            rows = self._table[self._text[-1:]]
            tokens = verify_exactly(TokenTree.empty(), rows, self._sampler, len(self._text)).tokens
            self._text += tokens
            self._sampler.extend(tokens)
        return self._text[:length]


@cache
def target_text() -> TargetText:
    return TargetText()


# ------------------------------------------------------------------------------------------------ texts


@dataclass(frozen=True)
class Pass:
    """Of a text: its tokens, its rows of the target, and the rows of each draft round."""

    num_tokens: int
    num_rows: int
    rounds: Sequence[int]

    def seconds(self, costs: Costs) -> float:
        return costs.pass_s(self.num_rows) + sum(map(costs.round_s, self.rounds))


class RoundsModel(TableModel):
    """Its rounds take `seconds(rows)` on a clock."""

    def __init__(self, table: Tensor, clock: VirtualClock, seconds: Callable[[int], float]) -> None:
        super().__init__(table)
        self._clock, self._seconds = clock, seconds
        self._rounds: list[int] = []

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        num_rows = len(chain) + len(tokens)
        self._rounds.append(num_rows)
        self._clock.advance(self._seconds(num_rows))
        return super().score(chain, tokens, depths, parents)

    def take_rounds(self) -> list[int]:
        """Rows of the rounds since the last call."""
        taken, self._rounds = self._rounds, []
        return taken


def run_text(
    noise: float,
    num_passes: int,
    budget: int | None,
    costs: Costs,
    predicted: Costs,
    seed: int = 0,
) -> list[Pass]:
    """The first passes of a text. budget: None is `auto`, which sees each pass's seconds with some noise."""
    clock, jitter = VirtualClock(), np.random.default_rng(seed)
    estimates = RunningEstimates.nothing(VOCAB_SIZE, predicted.pass_s)
    text, passes, num_new = target_text().up_to(PROMPT), list[Pass](), PROMPT
    sampler, model = sampler_at(text), RoundsModel(tables(noise)[1], clock, costs.round_s)
    speculation = SpeculationParams(budget, lookup=False, recall=False, overlap=False)
    drafter = ModelDrafter(model, DraftRequest(sampler), speculation, estimates, clock=clock.now)
    for _ in range(num_passes):
        tree = drafter.propose(text, max_depth=MOST_TOKENS - 1)
        num_rows = num_new + len(tree)
        clock.advance(costs.pass_s(num_rows) * float(np.exp(JITTER * jitter.standard_normal())))
        verdict = walk(tree, target_text().up_to(len(text) + MOST_TOKENS)[len(text) :])
        drafter.observe(TargetPass(text, tree, verdict, NO_LOGITS))
        text += verdict.tokens
        sampler.extend(verdict.tokens)
        passes.append(Pass(len(verdict.tokens), num_rows, model.take_rounds()))
        num_new = 1
    return passes


@cache
def fixed_text(noise: float, num_passes: int, budget: int) -> list[Pass]:
    """With a fixed budget, a text's passes do not depend on their seconds."""
    return run_text(noise, num_passes, budget, Costs(), Costs())


def rate(passes: Sequence[Pass], costs: Costs) -> float:
    """Tokens/s."""
    return sum(each.num_tokens for each in passes) / sum(each.seconds(costs) for each in passes)


@dataclass(frozen=True)
class Outcome:
    """Of `auto` in a world: its tokens/s as a share of the best fixed budget's, and of plain decoding's.

    first_token: seconds to the first token, over those of plain decoding.
    """

    world: World
    share: float
    best: int
    nodes: list[int]
    first_token: float


def outcomes(world: World, lengths: Sequence[int], skip: int = 0, budgets: Sequence[int] = BUDGETS) -> list[Outcome]:
    """For texts of each number of passes, without the first `skip` ones."""
    most = max(lengths)
    auto = run_text(world.noise, most, None, world.costs, world.predicted)
    found = list[Outcome]()
    for length in lengths:
        rates = {budget: rate(fixed_text(world.noise, most, budget)[skip:length], world.costs) for budget in budgets}
        best = max(rates, key=rates.__getitem__)
        share = rate(auto[skip:length], world.costs) / rates[best]
        first = auto[0].seconds(world.costs) / world.costs.pass_s(PROMPT)
        found.append(Outcome(world, share, best, [each.num_rows for each in auto], first))
    return found


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=300)
    parser.add_argument("--passes", default="6,20,60")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worst", type=int, default=5)
    options = parser.parse_args(args)
    lengths = [int(length) for length in options.passes.split(",")]
    worlds = draw_worlds(options.worlds, options.seed)
    rows = dict[str, list[Outcome]]()
    results = [outcomes(world, lengths) for world in worlds]
    for place, length in enumerate(lengths):
        rows[f"passes 1 to {length}"] = [each[place] for each in results]
    if max(lengths) > LEARNING_PASSES:
        rows[f"passes {LEARNING_PASSES + 1} to {max(lengths)}"] = [
            outcomes(world, lengths[-1:], LEARNING_PASSES)[0] for world in worlds
        ]
    print(f"{'auto / best fixed':<20}  {'mean':>5}  {'5 %':>5}  {'worst':>5}")
    summary = dict[str, dict[str, float]]()
    for name, some in rows.items():
        shares = np.array([each.share for each in some])
        summary[name] = {"mean": shares.mean(), "low": float(np.quantile(shares, 0.05)), "worst": shares.min()}
        print(f"{name:<20}  " + "  ".join(f"{value:5.2f}" for value in summary[name].values()))
    first = np.array([each[0].first_token for each in results])
    print(f"first token / plain: mean {first.mean():.2f}, 95 % {np.quantile(first, 0.95):.2f}, worst {first.max():.2f}")
    for each in sorted(rows[name], key=lambda each: each.share)[: options.worst]:
        print(each)
    if right := [each.share for each in rows[name] if each.world.floor == each.world.slope == 1]:
        print(f"where predictions are right: mean {np.mean(right):.2f} in {len(right)} worlds")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
