"""The drafted tree is the best one there is, the draft's cache follows the text, and sharpness finds its value."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offspec.errors import NumericalError
from offspec.scheduler.drafting import child_scores
from offspec.scheduler.drafting.drafter import DraftRequest
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.pace.calibration import GRID, Calibration
from offspec.scheduler.pace.costs import Costs
from offspec.scheduler.params import SamplingParams, Scoring, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, FloatArray, TokenTree
from offspec.scheduler.trees.verify import TargetPass, Verdict, verify_exactly

from ...refusals import refused
from ..fakes import (
    LearningModel,
    Rule,
    RuleModel,
    TimedModel,
    VirtualClock,
    assert_well_formed,
    estimates_of,
    few,
    generate,
    log_softmax,
    many,
    noise,
    paths,
    plain_text,
    processed,
    random_rule,
    resembling,
    sampling_params,
)

VOCAB_SIZE, PROMPT, SEED = 4, [3, 0, 2], 11
NO_LOGITS = torch.empty(0, 0)
DRAFT = random_rule(VOCAB_SIZE, seed=0)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
SCORINGS: list[Scoring] = ["coupled", "specexec"]


def drafter_of(
    model: RuleModel,
    params: SamplingParams = SAMPLED,
    vocab_size: int = VOCAB_SIZE,
    final: Collection[int] = (),
    calibration: Calibration | None = None,
    **speculation: Any,
) -> ModelDrafter:
    """A drafter whose sampler knows the prompt."""
    sampler = Sampler(params, SEED, vocab_size)
    sampler.extend(PROMPT)
    estimates = estimates_of(calibration)
    return ModelDrafter(model, DraftRequest(sampler, final), SpeculationParams(**speculation), estimates)


def proposed(room: int, **options: Any) -> TokenTree:
    return drafter_of(RuleModel(DRAFT, VOCAB_SIZE), GREEDY, **options).propose(PROMPT, room)


# ------------------------------------------------------------------------------------------------ the best tree


def every_node(
    rule: Rule,
    params: SamplingParams,
    scoring: Scoring,
    max_depth: int,
    final: Collection[int] = (),
    children: int = 16,
    columns: int = VOCAB_SIZE,
    text: Sequence[int] = PROMPT,
    known: Sequence[int] | None = None,
    calibration: Calibration | None = None,
) -> dict[tuple[int, ...], float]:
    """The score of every path that may be guessed, by recursion. known: the text as the draft reads it.

    SpecExec's scoring has the request's penalties, but neither its temperature nor its cuts.
    """
    is_greedy = params.temperature == 0
    params = params if scoring == "coupled" else replace(params, temperature=0.0)
    sharpness = (calibration or Calibration()).sharpness(greedy=is_greedy).value if scoring == "coupled" else 1.0
    scores: dict[tuple[int, ...], float] = {(): 0.0}

    def grow(path: tuple[int, ...]) -> None:
        seen = [token for token in (*text, *path) if token < columns]
        values = processed(rule((*(known or text), *path))[:columns], params, seen)
        if scoring == "coupled" and not is_greedy:
            values = values + noise(SEED, len(text) + len(path), columns)
        gains = log_softmax(values / sharpness)
        for token in np.argsort(-gains)[:children].tolist():
            if gains[token] > -math.inf:
                scores[(*path, token)] = scores[path] + gains[token]
                if len(path) + 1 < max_depth and token not in final:
                    grow((*path, token))

    grow(())
    del scores[()]
    return scores


def assert_best(tree: TokenTree, scores: dict[tuple[int, ...], float], budget: int) -> None:
    """The tree is the `budget` best nodes; where a token is certain, its parent comes first."""
    best = sorted(scores, key=lambda path: (-round(scores[path], 4), len(path)))[:budget]
    assert set(paths(tree)) == set(best)
    np.testing.assert_allclose(tree.scores, [scores[path] for path in paths(tree)], atol=1e-4)


@many
@given(
    params=sampling_params(),
    scoring=st.sampled_from(SCORINGS),
    budget=st.sampled_from([50, 23, 7, 1]),
    width=st.sampled_from([1, 2, 3, 5, 16]),
    children=st.sampled_from([4, 5, 3, 1]),
    max_depth=st.sampled_from([4, 3, 1]),
    final=st.sampled_from([(), (1,), (0, 2)]),
)
def test_tree_is_the_best_there_is(
    params: SamplingParams,
    scoring: Scoring,
    budget: int,
    width: int,
    children: int,
    max_depth: int,
    final: tuple[int, ...],
) -> None:
    model = RuleModel(DRAFT, VOCAB_SIZE)
    drafter = drafter_of(
        model, params, final=final, scoring=scoring, budget=budget, width=width, children=children, max_depth=max_depth
    )
    tree = drafter.propose(PROMPT, max_depth=9)
    assert_best(tree, every_node(DRAFT, params, scoring, max_depth, final, children), budget)
    assert max(model.batches) <= width
    assert_well_formed(tree)


@few
@given(
    params=sampling_params(),
    scoring=st.sampled_from(SCORINGS),
    budget=st.sampled_from([23, 7, 1]),
    width=st.sampled_from([1, 3, 16]),
    children=st.sampled_from([4, 3]),
    final=st.sampled_from([(), (1,)]),
    rounds_ahead=st.sampled_from([0, 1, 2, 30]),
    learns=st.booleans(),
)
def test_what_lives_on_leaves_the_tree_the_best_there_is(
    params: SamplingParams,
    scoring: Scoring,
    budget: int,
    width: int,
    children: int,
    final: tuple[int, ...],
    rounds_ahead: int,
    learns: bool,
) -> None:
    """From pass to pass, while the sharpness moves and a draft learns, every tree is the one drafted from nothing."""
    calibration, deepest = Calibration(), 3
    speculation = SpeculationParams(budget, scoring=scoring, width=width, children=children, max_depth=deepest)

    class BestDrafter(ModelDrafter):
        def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
            tree, depth = super().propose(text, max_depth), min(max_depth, deepest)
            nodes = every_node(draft.rule, params, scoring, depth, final, children, text=text, calibration=calibration)
            assert_best(tree, nodes if depth > 0 else {}, budget)
            return tree

    sampler = Sampler(params, SEED, VOCAB_SIZE)
    draft = LearningModel(lambda count: resembling(DRAFT, seed=count) if learns else DRAFT, VOCAB_SIZE)
    request, corrector = DraftRequest(sampler, final), draft if learns else None
    drafter = BestDrafter(draft, request, speculation, estimates_of(calibration), corrector=corrector)
    target = RuleModel(resembling(DRAFT, seed=5, error=0.7), VOCAB_SIZE)
    generate(target, drafter, sampler, PROMPT, 12, rounds_ahead)


def test_a_tree_beyond_twice_the_budget() -> None:
    """Sixteen nearly equal guesses, each with one sure continuation: the best sixteen nodes are a single chain.

    Before that is known, more than forty nodes have been expanded; their rows and masks outgrow what was set aside.
    """

    def rule(prefix: tuple[int, ...]) -> FloatArray:
        return -0.01 * np.arange(16) if len(prefix) == len(PROMPT) else 12.0 * (np.arange(16) == 0)

    model = RuleModel(rule, 16)
    tree = drafter_of(model, vocab_size=16, scoring="specexec", budget=16, width=16).propose(PROMPT, 99)
    assert sum(model.batches) > 2 * 16
    assert paths(tree) == [(0,) * depth for depth in range(1, 17)]


def test_budget_is_not_set_aside() -> None:
    assert len(proposed(3, budget=10**9)) == 4 + 4**2 + 4**3


@pytest.mark.parametrize(("max_depth", "budget"), [(0, 9), (-1, 9), (9, 0)])
def test_no_room_or_budget_is_an_empty_tree(max_depth: int, budget: int) -> None:
    model = RuleModel(DRAFT, VOCAB_SIZE)
    drafter = drafter_of(model, budget=budget)
    tree = drafter.propose(PROMPT, max_depth)
    assert len(tree) == 0
    drafter.observe(TargetPass(PROMPT, tree, Verdict([], [1]), torch.zeros(1, VOCAB_SIZE)))
    assert model.batches == []


@pytest.mark.each_value
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(repetition_penalty=1.5)])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("draft_size", [2, 7])
def test_draft_with_another_vocabulary(draft_size: int, scoring: Scoring, params: SamplingParams) -> None:
    """Only tokens that both know are guessed, and what the draft does not know of the text is its last token."""
    rule = random_rule(draft_size, seed=3)
    model = RuleModel(rule, draft_size)
    tree = drafter_of(model, params, budget=10, scoring=scoring).propose(PROMPT, 3)
    known, columns = [min(token, draft_size - 1) for token in PROMPT], min(draft_size, VOCAB_SIZE)
    assert model.chains[0] == known
    assert_best(tree, every_node(rule, params, scoring, 3, columns=columns, known=known), 10)


@pytest.mark.parametrize("max_context", [1, len(PROMPT) - 1])
def test_text_beyond_the_drafts_context_is_not_guessed(max_context: int) -> None:
    model = RuleModel(DRAFT, VOCAB_SIZE, max_context)
    assert len(drafter_of(model).propose(PROMPT, 9)) == 0
    assert model.batches == []


def test_tree_stays_within_the_drafts_context() -> None:
    tree = drafter_of(RuleModel(DRAFT, VOCAB_SIZE, len(PROMPT) + 2), budget=1000).propose(PROMPT, 9)
    assert tree.depths.max() == 2


# ------------------------------------------------------------------------------------------------ from pass to pass


def test_draft_cache_follows_the_text() -> None:
    """Also over a pass without guesses. What was drafted and accepted is not computed a second time."""
    target_rule = resembling(DRAFT, seed=5, error=0.7)
    model, target = RuleModel(DRAFT, VOCAB_SIZE), RuleModel(target_rule, VOCAB_SIZE)
    drafter, sampler = drafter_of(model, SAMPLED, budget=12, width=5), Sampler(SAMPLED, SEED, VOCAB_SIZE)
    text, missing = list(PROMPT), len(PROMPT)
    num_accepted = num_reused = 0
    for number in range(20):
        num_calls = len(model.chains)
        tree = drafter.propose(text, max_depth=0 if number == 9 else 6)
        chains = model.chains[num_calls:]
        if number != 9:
            assert [len(chain) for chain in chains if chain] == ([missing] if missing else [])
            assert model.text == text
        logits = target.score(text[target.length :], tree.tokens, tree.depths, tree.parents)
        verdict = verify_exactly(tree, logits, sampler, len(text))
        target.keep(verdict.path)
        drafter.observe(TargetPass(text, tree, verdict, logits))
        text += verdict.tokens
        num_accepted += len(verdict.path)
        missing = len(text) - len(model.text)
        assert model.text == text[: len(model.text)]
        assert missing <= (3 if number == 9 else 2)  # the bonus token, and a leaf that was not expanded
        num_reused += missing == 0
    assert num_accepted > 10
    assert num_reused > 0
    assert text[len(PROMPT) :] == plain_text(target_rule, SAMPLED, SEED, PROMPT, len(text) - len(PROMPT))


def num_passes(rule: Rule, draft: Rule, sampling: SamplingParams, calibration: Calibration, **speculation: Any) -> int:
    """Passes of the target for 100 tokens."""
    sampler, target = Sampler(sampling, SEED, VOCAB_SIZE), RuleModel(rule, VOCAB_SIZE)
    model = RuleModel(draft, VOCAB_SIZE)
    params, estimates = SpeculationParams(**speculation), estimates_of(calibration)
    generate(target, ModelDrafter(model, DraftRequest(sampler), params, estimates), sampler, PROMPT, 100)
    return len(target.batches)


@pytest.mark.slow
def test_shared_noise_saves_passes() -> None:
    target = resembling(DRAFT, seed=5, error=0.5)
    estimates = [Calibration(), Calibration()]
    coupled, specexec = (
        num_passes(target, DRAFT, SAMPLED, calibration, budget=8, scoring=scoring)
        for calibration, scoring in zip(estimates, SCORINGS, strict=True)
    )
    assert coupled < 0.8 * specexec
    # SpecExec's values lack the noise, and would spoil what coupled requests have learnt.
    coupled_value, specexec_value = (calibration.sharpness(greedy=False).value for calibration in estimates)
    assert coupled_value != specexec_value == 0.6


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_sharpness_tells_a_good_draft_from_a_bad_one(params: SamplingParams) -> None:
    fitted = []
    for draft in (DRAFT, random_rule(VOCAB_SIZE, seed=99)):
        calibration = Calibration()
        num_passes(DRAFT, draft, params, calibration, budget=8)
        fitted.append(calibration.sharpness(greedy=params is GREEDY).value)
        assert calibration.sharpness(greedy=params is SAMPLED).value == (0.6 if params is GREEDY else 0.5)
    assert fitted[0] == GRID[0]
    assert fitted[1] in GRID[-2:]


@pytest.mark.slow
@pytest.mark.parametrize("scoring", SCORINGS)
def test_the_profile_becomes_that_of_the_drafts_own_guesses(scoring: Scoring) -> None:
    """Of a draft to whom one token is always four times as likely as the other three together."""

    def rule(prefix: tuple[int, ...]) -> FloatArray:
        return np.log([0.8, 0.1, 0.06, 0.04])

    calibration = Calibration()
    num_passes(DRAFT, rule, GREEDY, calibration, budget=8, scoring=scoring)
    estimates = calibration.of(greedy=True, coupled=scoring == "coupled")
    sharpness = estimates.sharpness.value if scoring == "coupled" else 1.0
    expected = np.exp(log_softmax(rule(()) / sharpness))
    np.testing.assert_allclose(estimates.profile.values[:4], expected, atol=0.05)
    assert estimates.profile.values[4:].max() < 0.01


def test_what_a_pass_takes_beside_drafting_and_scoring_is_learnt() -> None:
    """Here the draft takes its time to commit what was accepted."""
    clock, costs, sampler = VirtualClock(), Costs(), Sampler(GREEDY, SEED, VOCAB_SIZE)

    class SlowToKeep(TimedModel):
        def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
            clock.now += 0.25
            super().keep(path, pending)

    draft, target = (
        SlowToKeep(DRAFT, VOCAB_SIZE, clock, lambda _: 0.5),
        TimedModel(DRAFT, VOCAB_SIZE, clock, lambda _: 9),
    )
    drafter = ModelDrafter(
        draft, DraftRequest(sampler), SpeculationParams(budget=1), estimates_of(costs=costs), clock=clock
    )
    generate(target, drafter, sampler, PROMPT, 200)
    assert costs.overhead_s == pytest.approx(0.25, rel=1e-3)


class OneGuess:
    """A guesser that is nearly sure of the token after the text: `rule`'s choice, `shift` ids further on."""

    def __init__(self, rule: Rule, shift: int) -> None:
        self.rule, self.shift = rule, shift

    def guess(self, text: Sequence[int], sampler: Sampler, max_nodes: int, max_depth: int) -> TokenTree:
        token = (int(self.rule(tuple(text)).argmax()) + self.shift) % VOCAB_SIZE
        return replace(TokenTree.chain([token]), scores=np.array([math.log(0.9)]))

    def observe(self, done: TargetPass) -> None:
        pass


@pytest.mark.each_value
@pytest.mark.parametrize("budget", [1, 6])
@pytest.mark.parametrize("reuse", [True, False])
def test_guessers_are_doubted_as_far_as_the_model_knows_better(budget: int, reuse: bool) -> None:
    """Whether they are sent or not: so that they are believed again when they are right again."""
    sampler, calibration = Sampler(GREEDY, SEED, VOCAB_SIZE), Calibration()
    trust, text = calibration.of(greedy=True).guesser_trust, list(PROMPT)

    def run(draft: Rule, shift: int, num_passes: int) -> list[bool]:
        """Whether the guess was sent in each pass."""
        model, guesser = RuleModel(draft, VOCAB_SIZE), OneGuess(DRAFT, shift)
        params = SpeculationParams(budget, reuse=reuse, overlap=False)
        drafter = ModelDrafter(model, DraftRequest(sampler), params, estimates_of(calibration), guessers=[guesser])
        were_sent = list[bool]()
        for _ in range(num_passes):
            named = int(guesser.guess(text, sampler, 1, 1).tokens[0])
            tree = drafter.propose(text, 4)
            were_sent.append(tree.child(ROOT, named) is not None)
            verdict = walk_of(tree, text)
            drafter.observe(TargetPass(text, tree, verdict, NO_LOGITS))
            text.extend(verdict.tokens)
        return were_sent

    def walk_of(tree: TokenTree, text: Sequence[int]) -> Verdict:
        path, tokens = list[int](), [int(DRAFT(tuple(text)).argmax())]
        while (child := tree.child(path[-1] if path else ROOT, tokens[-1])) is not None:
            path.append(child)
            tokens.append(int(DRAFT((*text, *tokens)).argmax()))
        return Verdict(path, tokens)

    run(DRAFT, 1, 40)
    assert trust.value < 0.1, "the draft is the target, and each guess was wrong"
    run(lambda path: -DRAFT(path), 0, 20)
    assert trust.value > 0.9, "the draft knows nothing, and each guess was right"
    assert all(run(lambda path: -DRAFT(path), 0, 10))


def test_where_there_is_no_model_nobody_knows_better() -> None:
    sampler, calibration = Sampler(GREEDY, SEED, VOCAB_SIZE), Calibration()
    guessers, estimates = [OneGuess(DRAFT, 1)], estimates_of(calibration)
    drafter = ModelDrafter(None, DraftRequest(sampler), SpeculationParams(4), estimates, guessers=guessers)
    for _ in range(9):
        tree = drafter.propose(PROMPT, 4)
        drafter.observe(TargetPass(PROMPT, tree, Verdict([], [int(DRAFT(tuple(PROMPT)).argmax())]), NO_LOGITS))
    assert len(tree) == calibration.of(greedy=True).guesser_trust.value == 1


@pytest.mark.each_value
@pytest.mark.parametrize("bad", [[math.nan] * 4, [0, math.nan, 0, 0], [math.inf, 0, 0, 0], [-math.inf] * 4])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_draft_logits_that_are_not_numbers_are_refused_in_one_line(params: SamplingParams, bad: list[float]) -> None:
    """Else they would stay in the calibration for as long as the engine lives."""
    drafter = drafter_of(RuleModel(lambda _: np.array(bad), VOCAB_SIZE), params)
    with refused(NumericalError, "draft", "logits", "finite"):
        drafter.propose(PROMPT, 3)


@pytest.mark.slow
@given(
    st.integers(1, 9),
    st.sampled_from([0.1, 3.0, 30.0]),
    st.sampled_from([-1e4, 0.0, 1e4]),
    st.integers(0, 99),
    st.sampled_from([7, 100, 300, 2048]),
)
@few
def test_normalisers_are_what_they_are_called(
    num_rows: int, spread: float, shift: float, seed: int, width: int
) -> None:
    """Whole rows at a time or in parts, as on a GPU."""
    logits = spread * torch.randn(num_rows, 300, generator=torch.Generator().manual_seed(seed))
    logits[:, seed % 300] = -torch.inf
    expected = torch.stack([(logits.double() / s).logsumexp(-1) for s in GRID], dim=-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(child_scores.SLICE_ELEMENTS, "cpu", 1000)
        patch.setitem(child_scores.PRODUCT_WIDTH, "cpu", width)
        found = torch.from_numpy(child_scores.log_normalisers(logits + shift) - shift / GRID)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 if shift == 0 else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [100, 2048, 5000])
def test_normalisers_on_cuda_are_those_of_the_cpu(vocab_size: int) -> None:
    logits = 4 * torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(
        child_scores.log_normalisers(logits.cuda()), child_scores.log_normalisers(logits), rtol=0, atol=1e-4
    )
