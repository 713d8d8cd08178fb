"""Predicts the speed with a draft: seconds per round, tokens per pass, tokens/s.

The tokens per pass of a kind of draft come from a small table of measurements (`drafts.acceptance`). Seconds follow
from a plan and a machine's rates. Pure functions; neither files nor kinds of draft are known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from offspec.loaders.machine.hardware import Rates
from offspec.scheduler.params import SpeculationParams

from ..checkpoints.model_files import ModelFiles
from ..model.row_logits import HEAD_ROWS
from .attention_time import seconds_of_attention, seconds_per_element
from .plan import LAYER_LAUNCHES, PassWork, Plan, resident_layer_s

MAX_ROUNDS = SpeculationParams.max_depth  # a round makes the tree one level deeper
BEND = 3  # of the curve in `Acceptance.tokens`: fitted to replayed texts (docs/results/drafts.md)
# Rounds during a pass spare the next tree the more rounds, the longer the accepted paths are for their depth; fitted to
# replayed texts, where a small model was spared 0.3 of them, and a shadow of 4 bits 0.7 (docs/results/drafts.md).
SPARED_POWER = 8
NUM_HEADS = 2  # times that a round multiplies by the head: for its logits, and for recall

RatesOf = Callable[[ModelFiles], Rates]  # rates of products with a model's matrices


@dataclass(frozen=True)
class Spread:
    """How far tokens per pass of single prompts lie from the figure for all of them, as shares of it.

    source: where this was measured; "" if nothing is known about it.
    """

    least: float = 1.0
    most: float = 1.0
    source: str = ""


@dataclass(frozen=True)
class Acceptance:
    """How many tokens a pass brings with a kind of draft.

    greedy, sampled (temperature 1): nodes of the tree → tokens per pass with MAX_ROUNDS rounds. source: where these
    figures were measured. spread: of prompts around them.
    """

    greedy: Mapping[int, float]
    sampled: Mapping[int, float]
    source: str
    spread: Spread = Spread()

    def tokens(
        self, num_nodes: int, num_rounds: int, *, greedy: bool, share: float = 1.0, factor: float = 1.0
    ) -> float:
        """Expected tokens per pass of a tree of `num_nodes` nodes after `num_rounds` rounds.

        A path is at most num_rounds + 1 tokens long, and on average as long as the draft guesses right: a smooth
        minimum of both. share: of the measured draft's wrong guesses (`Guessing`). factor: of the measured tokens,
        within the spread.
        """
        # Linear in log(1 + nodes), from one token without nodes. Within 6 % of what was measured at 16 and 128 nodes
        # (docs/results/scheduling.md). Beyond the largest size: as there.
        by_size = {0: 1.0, **(self.greedy if greedy else self.sampled)}
        sizes = sorted(by_size)
        interpolated = np.interp(np.log1p(num_nodes), np.log1p(sizes), [by_size[size] for size in sizes])
        measured = max(1.0, min(factor * float(interpolated), MAX_ROUNDS))
        # `measured` is the smooth minimum of `longest` and of the rounds that were measured with.
        longest = float((measured**-BEND - (MAX_ROUNDS + 1) ** -BEND) ** (-1 / BEND))
        longest = 1 + (longest - 1) / share if share else math.inf
        return max(1.0, float(((num_rounds + 1) ** -BEND + longest**-BEND) ** (-1 / BEND)))


@dataclass(frozen=True)
class Guessing:
    """How a draft guesses.

    layers: the layers that a round goes through, as (model, number of layers). acceptance: None if nothing guesses.
    share: wrong guesses, as a share of those of the draft that was measured: of a copy of some layers their share of
    the target's; of a small model by its size (`drafts.acceptance`). is_captured: on a GPU, rounds run as captured
    graphs. overlaps: rounds also run during the target's pass. most_keys: that a round attends to; None: all of a
    text's.
    """

    layers: tuple[tuple[ModelFiles, int], ...] = ()
    acceptance: Acceptance | None = None
    share: float = 1.0
    is_captured: bool = False
    overlaps: bool = True
    most_keys: int | None = None


@dataclass(frozen=True)
class Drafting:
    """A prediction: the tree and the rounds that bring the most tokens/s, and their seconds.

    num_nodes: of each text's tree. num_rounds: all rounds of a pass, those during the previous pass included.
    tokens_per_pass, tokens_per_s: of all texts together. least, most: of these two with this tree and these rounds,
    over the spread of prompts. Tokens/s are at least those of plain decoding, to which a text falls back.
    """

    num_nodes: int
    num_rounds: int
    round_s: float
    pass_s: float
    tokens_per_pass: float
    tokens_per_s: float
    least_tokens_per_pass: float
    most_tokens_per_pass: float
    least_tokens_per_s: float
    most_tokens_per_s: float


@dataclass(frozen=True)
class _Tree:
    """A tree and its rounds, for `num_texts` texts that share passes."""

    guessing: Guessing
    num_nodes: int
    num_rounds: int
    round_s: float
    pass_s: float
    greedy: bool
    num_texts: int

    def tokens(self, factor: float = 1.0) -> float:
        """Tokens per pass of one text. factor: within the spread of prompts."""
        guessing = self.guessing
        assert guessing.acceptance is not None
        return guessing.acceptance.tokens(
            self.num_nodes, self.num_rounds, greedy=self.greedy, share=guessing.share, factor=factor
        )

    def tokens_per_s(self, factor: float = 1.0) -> float:
        """Of all texts together."""
        tokens = self.tokens(factor)
        spared = (tokens / (self.num_rounds + 1)) ** SPARED_POWER if self.guessing.overlaps else 0.0
        seconds = self.pass_s + max(0.0, self.num_rounds * self.round_s - spared * self.pass_s)
        return self.num_texts * tokens / seconds

    def drafting(self, plain_tokens_per_s: float) -> Drafting:
        assert self.guessing.acceptance is not None
        spread = self.guessing.acceptance.spread
        least, usual, most = (self.num_texts * self.tokens(factor) for factor in (spread.least, 1.0, spread.most))
        slowest, rate, fastest = (self.tokens_per_s(factor) for factor in (spread.least, 1.0, spread.most))
        tree = (self.num_nodes, self.num_rounds, self.round_s, self.pass_s)
        return Drafting(*tree, usual, rate, least, most, max(slowest, plain_tokens_per_s), fastest)


def predict_drafting(
    plan: Plan, guessing: Guessing, rates_of: RatesOf, *, greedy: bool, num_texts: int = 1
) -> Drafting:
    """The fastest drafting of `guessing` for a plan: as many nodes and rounds as bring the most tokens/s.

    num_texts: texts that share the passes. Their trees are equally large.
    """
    rates, acceptance = rates_of(plan.inputs.target), guessing.acceptance
    plain_s = plan.predict_pass_s(rates, num_texts)
    plain_rate, tokens = num_texts / plain_s, float(num_texts)
    plain = Drafting(0, 0, 0.0, plain_s, tokens, plain_rate, tokens, tokens, plain_rate, plain_rate)
    if acceptance is None:
        return plain
    trees = list[_Tree]()
    # Measured sizes shared by the texts, and for each text if the tree allows that.
    shared = [size // num_texts for size in acceptance.greedy]
    sizes = [size for size in acceptance.greedy if num_texts * size <= plan.tree]
    for num_nodes in filter(None, dict.fromkeys([*shared, *sizes])):
        pass_s = plan.predict_pass_s(rates, num_texts * (1 + num_nodes))
        rows = min(64, max(16, num_nodes // 8))  # of a round: `scheduler.pace.controllers.FixedBudget`'s
        one_s = round_s(plan, guessing, rates_of, rows, num_texts)
        numbers = range(1, MAX_ROUNDS + 1) if one_s else (MAX_ROUNDS,)
        trees += [_Tree(guessing, num_nodes, number, one_s, pass_s, greedy, num_texts) for number in numbers]
    best = max(trees, key=_Tree.tokens_per_s, default=None)
    return plain if best is None or best.tokens_per_s() <= plain_rate else best.drafting(plain_rate)


def round_s(plan: Plan, guessing: Guessing, rates_of: RatesOf, width: int, num_texts: int = 1) -> float:
    """Seconds of one round of the draft over `width` rows of each text; 0 for a draft without a model.

    Rounds of several texts are one forward, but captured graphs serve one text; the others' rounds are not captured.
    """
    if not guessing.layers:
        return 0.0
    if guessing.is_captured and num_texts > 1:
        eager = replace(guessing, is_captured=False)
        others_s = (num_texts - 1) * round_s(plan, eager, rates_of, width)
        return round_s(plan, guessing, rates_of, width) + others_s
    width *= num_texts
    kind = plan.placement.limits.kind
    launch_s = LAYER_LAUNCHES * (kind.replay_s if guessing.is_captured else kind.launch_s)
    works = [(model, count, PassWork.of(model)) for model, count in guessing.layers]
    in_layers = sum(
        count * (launch_s + resident_layer_s(model, work, rates_of(model), width)) for model, count, work in works
    )
    num_keys = min(plan.usual_tokens, guessing.most_keys or plan.usual_tokens)
    for model, count in guessing.layers:
        attention_s = seconds_of_attention(model, rates_of(model), width, num_keys, kind)
        in_layers += count * sum(attention_s) / len(attention_s)
    first = guessing.layers[0][0]
    head = PassWork.of(first).head_elements
    return in_layers + NUM_HEADS * head * seconds_per_element(rates_of(first).matmul_flops, min(width, HEAD_ROWS))
