"""A small model that guesses for a draft: the text stays the target's, each model follows it, and trust is its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from offspec.scheduler.drafting.candidate_tree import CandidateTree
from offspec.scheduler.drafting.drafter import DraftRequest
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.drafting.model_guesser import MOST_ROUNDS, ModelGuesser, SmallerDrafts, best_number
from offspec.scheduler.pace.calibration import UNIT, Calibration
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, FloatArray, IntArray, TokenTree
from offspec.scheduler.trees.verify import TargetPass, TargetStates, Verdict

from ..fakes import (
    LearningModel,
    RuleModel,
    TimedModel,
    VirtualClock,
    build_tree,
    generate,
    guesses_of,
    learnt_of,
    log_softmax,
    paths,
    plain_text,
    random_rule,
    resembling,
)

VOCAB_SIZE, PROMPT, SEED = 5, [3, 0, 2], 7
TRUTH = random_rule(VOCAB_SIZE, 0)
PARAMS = [SamplingParams(), SamplingParams(temperature=1.0)]
NO_LOGITS = torch.empty(0, 0)
each_params = pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])


class Several:
    """A drafter with two models that guess for its own."""

    def __init__(self, params: SamplingParams, draft: RuleModel, smaller: Sequence[RuleModel], **speculation: Any):
        self.sampler, self.calibrations = Sampler(params, SEED, VOCAB_SIZE), [Calibration() for _ in smaller]
        request, asked = DraftRequest(self.sampler), SpeculationParams(**speculation)
        self.guessers = [
            ModelGuesser(model, request, asked, learnt_of(own))
            for model, own in zip(smaller, self.calibrations, strict=True)
        ]
        self.drafter = ModelDrafter(draft, request, asked, learnt_of(), guessers=self.guessers)


@pytest.mark.slow
@each_params
@pytest.mark.parametrize("reuse", [True, False])
def test_the_text_is_the_targets_and_all_models_follow_it(params: SamplingParams, reuse: bool) -> None:
    """RuleModel insists on consistent paths; afterwards each has read the text without its last tokens."""
    target, draft = RuleModel(TRUTH, VOCAB_SIZE), RuleModel(resembling(TRUTH, 1), VOCAB_SIZE)
    smaller = [RuleModel(resembling(TRUTH, seed, 2.0), VOCAB_SIZE) for seed in (2, 3)]
    several = Several(params, draft, smaller, budget=12, reuse=reuse)
    found = generate(target, several.drafter, several.sampler, PROMPT, 40, rounds_ahead=2)
    text = PROMPT + plain_text(TRUTH, params, SEED, PROMPT, 40)
    assert found == text[len(PROMPT) :]
    for model in (draft, *smaller):
        assert model.text == text[: len(model.text)]
        assert len(model.text) > len(PROMPT) + 20


def test_the_draft_scores_deep_guesses_in_one_forward() -> None:
    """Alone, it needs a round for each level of a deep path."""
    rule = random_rule(VOCAB_SIZE, 0, spread=30.0)
    rounds = list[list[int]]()
    for smaller in ([], [RuleModel(rule, VOCAB_SIZE)]):
        draft = RuleModel(rule, VOCAB_SIZE)
        several = Several(SamplingParams(), draft, smaller, budget=8, width=16)
        several.sampler.extend(PROMPT)
        tree = several.drafter.propose(PROMPT, 8)
        assert max(tree.depths) == 8
        rounds.append(draft.batches)
    alone, beside = rounds
    assert len(alone) > 7
    assert len(beside) < 5, "of which the first scores guesses together with the text"
    assert beside[0] > 0


def continued(guesser: ModelGuesser, tree: CandidateTree, nodes: Sequence[int], num_rounds: int = 2) -> TokenTree:
    guesser.begin(PROMPT, 4)
    return guesser.continued(tree, np.array(nodes, dtype=np.int64), num_rounds)


def observe(guesser: ModelGuesser, tree: TokenTree, tokens: list[int], path: list[int]) -> None:
    guesser.observe(TargetPass(PROMPT, tree, Verdict(path, tokens), NO_LOGITS))


def guesser_of(model: RuleModel, corrector: LearningModel | None = None, **speculation: Any) -> ModelGuesser:
    sampler = Sampler(SamplingParams(), SEED, VOCAB_SIZE)
    sampler.extend(PROMPT)
    return ModelGuesser(model, DraftRequest(sampler), SpeculationParams(**speculation), learnt_of(), corrector)


def test_it_continues_the_drafts_candidates_with_their_scores() -> None:
    """What the draft finds unlikely is not continued, however likely the smaller model finds it."""
    best = int(TRUTH(tuple(PROMPT)).argmax())
    other = (best + 1) % VOCAB_SIZE
    tree, values = CandidateTree(), np.full(VOCAB_SIZE, -9.0)
    values[other] = 9.0
    tree.add(np.array([ROOT]), guesses_of(values, VOCAB_SIZE), UNIT)
    guesses = continued(guesser_of(RuleModel(TRUTH, VOCAB_SIZE)), tree, tree.best(1, 4))
    assert {path[0] for path in paths(guesses)} == {other}
    own = np.flatnonzero(guesses.depths == 1)
    assert guesses.scores[own].tolist() == [-math.inf], "nothing is said of the draft's own"
    below = max(guesses.scores[guesses.depths == 2])
    assert below == pytest.approx(
        tree.nodes["score"][tree.child(ROOT, other)]
        + log_softmax(TRUTH((*PROMPT, other)) / Calibration().sharpness(greedy=True).value).max(),
        abs=1e-5,
    )


def test_guesses_count_as_far_as_they_were_right_where_the_draft_doubted_them() -> None:
    """Each smaller draft has a trust of its own: one is the target, the other is wrong, the draft knows nothing."""

    def ignorant(prefix: tuple[int, ...]) -> FloatArray:
        return np.zeros(VOCAB_SIZE)

    smaller = [RuleModel(TRUTH, VOCAB_SIZE), RuleModel(random_rule(VOCAB_SIZE, 9), VOCAB_SIZE)]
    several = Several(SamplingParams(), RuleModel(ignorant, VOCAB_SIZE), smaller, budget=8)
    generate(RuleModel(TRUTH, VOCAB_SIZE), several.drafter, several.sampler, PROMPT, 60)
    right, wrong = (own.of(greedy=True).guesser_trust.value for own in several.calibrations)
    assert wrong < 0.4 < 0.7 < right


def test_its_nodes_stay_over_passes_for_which_it_was_not_asked() -> None:
    model = RuleModel(TRUTH, VOCAB_SIZE)
    guesser = guesser_of(model)
    continued(guesser, CandidateTree(), [])
    text = plain_text(TRUTH, SamplingParams(), SEED, PROMPT, 3)
    observe(guesser, TokenTree.empty(), text[:1], [])
    observe(guesser, TokenTree.empty(), text[1:2], [])
    guesser.begin([*PROMPT, *text[:2]], 4)
    again = guesser.continued(CandidateTree(), np.empty(0, dtype=np.int64), 1)
    assert paths(again)[0] == (text[2],)
    assert model.text == [*PROMPT, *text[:2]][: len(model.text)]


def test_beyond_its_context_it_guesses_nothing() -> None:
    model = RuleModel(TRUTH, VOCAB_SIZE, max_context=len(PROMPT))
    guesser = guesser_of(model)
    assert len(continued(guesser, CandidateTree(), [])) == 0
    observe(guesser, TokenTree.empty(), [1], [])
    assert model.chains == []


def test_its_corrector_is_told_of_the_nodes_that_the_pass_scored() -> None:
    """Rows of its own, and the rows of the same paths in the target's pass."""
    told = list[tuple[list[int], list[int]]]()

    class Listening(LearningModel):
        def observe(self, rows: IntArray, nodes: IntArray, states: TargetStates) -> None:
            told.append((rows.tolist(), nodes.tolist()))

    model = Listening(lambda _: TRUTH, VOCAB_SIZE)
    guesser = guesser_of(model, model)
    shared = paths(continued(guesser, CandidateTree(), [], num_rounds=1))[0]
    sent = build_tree([[4, 4], list(shared)])
    place = paths(sent).index(shared)
    states: Any = NO_LOGITS
    guesser.observe(TargetPass(PROMPT, sent, Verdict([], [4]), NO_LOGITS, states))
    ((rows, nodes),) = told
    assert (rows[0], nodes[0]) == (-1, 0), "the root"
    assert place + 1 in nodes
    assert len(rows) == len(nodes) == 1 + len(rows[1:])


@pytest.mark.parametrize(
    ("chance", "own_s", "number"), [(0.9, 0.01, MOST_ROUNDS), (0.5, 0.3, 1), (0.5, 2.0, 0), (0.0, 0.001, 0)]
)
def test_how_long_a_smaller_draft_guesses_ahead(chance: float, own_s: float, number: int) -> None:
    """(1 + c + c^2 + ...) levels in 1 + number * own_s seconds."""
    assert best_number(chance, 1.0, own_s) == number


def test_a_smaller_draft_that_costs_more_than_it_brings_is_seldom_asked() -> None:
    clock = VirtualClock()
    slow = TimedModel(random_rule(VOCAB_SIZE, 5), VOCAB_SIZE, clock, lambda rows: 3.0)
    sampler = Sampler(SamplingParams(), SEED, VOCAB_SIZE)
    sampler.extend(PROMPT)
    guesser = ModelGuesser(slow, DraftRequest(sampler), SpeculationParams(), learnt_of())
    smaller, tree, none = SmallerDrafts([guesser], clock), CandidateTree(), np.empty(0, dtype=np.int64)
    smaller.begin(PROMPT, 50)
    asked = [len(smaller.guess(tree, none, 1.0)[0]) > 0 for _ in range(100)]
    assert asked[0]
    assert 1 < sum(asked) < 10, "tried again at growing intervals"
