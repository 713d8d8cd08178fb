"""The rules for trees of candidates are exact: by their whole distribution at a node, and by chi-square over texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scheduling import rules
from benchmarks.scheduling.rules import decode
from benchmarks.scheduling.tree_rules import (
    Branches,
    Chains,
    Choice,
    Drawing,
    StochasticBeam,
    TreeDrawing,
    TreeRule,
    k_sequential,
    multi_step,
    recursive,
    trees,
)
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray

from ..scheduler.fakes import RuleModel, few, plain_text, random_rule, resembling, sampling_params, softmax
from ..scheduler.trees.test_distribution import p_value

REPLACED: dict[str, TreeRule] = {"multi-step": multi_step, "K-SEQ": k_sequential}
RULES: dict[str, TreeRule] = {**REPLACED, "recursive": recursive}
WAYS: dict[str, tuple[Callable[[], Drawing], TreeRule]] = {
    "SpecInfer": (lambda: Chains(3), multi_step),
    "SpecTr": (lambda: Chains(3), k_sequential),
    "RSD-C": (lambda: Branches((2, 3, 1)), recursive),
    "RSD-S": (lambda: StochasticBeam(3), recursive),
}
each_way = pytest.mark.parametrize("way", WAYS)
# One with candidates that may be equal, one without; each rule's distribution at a node is computed in every run.
DAILY = ("SpecInfer", "RSD-S")


def draws(q: FloatArray, count: int, *, replaced: bool) -> Iterator[tuple[list[int], float]]:
    """Every sequence of candidates that may be drawn, and how often it is."""
    for tokens in itertools.product(range(len(q)), repeat=count):
        chance, left = 1.0, 1.0
        for place, token in enumerate(tokens):
            is_gone = not replaced and token in tokens[:place]
            chance *= 0.0 if is_gone or left <= 0 else q[token] / left
            left -= 0.0 if replaced else q[token]
        if chance > 0:
            yield list(tokens), chance


def emitted(rule: TreeRule, p: FloatArray, q: FloatArray, count: int, *, replaced: bool) -> tuple[FloatArray, float]:
    """The distribution of the next token, and how often it is a candidate."""
    found, accepted = np.zeros(len(p)), 0.0
    for tokens, chance in draws(q, count, replaced=replaced):
        choice = rule(p, q, tokens)
        assert (choice.accepted >= 0).all()
        assert (choice.own >= 0).all()
        assert choice.accepted.sum() + choice.own.sum() == pytest.approx(1)
        np.add.at(found, tokens, chance * choice.accepted)
        found += chance * choice.own
        accepted += chance * choice.accepted.sum()
    return found, accepted


def distribution(seed: int, vocab_size: int, spread: float) -> FloatArray:
    """Some tokens are impossible."""
    chances = softmax(np.random.default_rng(seed).normal(scale=spread, size=vocab_size))
    kept = np.where(chances < 0.05, 0, chances)
    return kept / kept.sum()


@pytest.mark.parametrize("name", RULES)
@few
@given(
    seed=st.integers(0, 1000),
    vocab_size=st.integers(1, 4),
    spreads=st.tuples(*[st.sampled_from([0.0, 0.7, 2.0])] * 2),
    count=st.integers(0, 3),
)
def test_the_next_token_is_the_targets_own(
    name: str, seed: int, vocab_size: int, spreads: tuple[float, float], count: int
) -> None:
    """Summed over all candidates that may be drawn."""
    p, q = (distribution(seed + place, vocab_size, spread) for place, spread in enumerate(spreads))
    replaced = name in REPLACED
    count = count if replaced else min(count, int((q > 0).sum()))
    found, _ = emitted(RULES[name], p, q, count, replaced=replaced)
    np.testing.assert_allclose(found, p, atol=1e-9)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@few
@given(seed=st.integers(0, 1000), vocab_size=st.integers(1, 4))
def test_one_candidate_is_the_ratio_test(rule: TreeRule, seed: int, vocab_size: int) -> None:
    p, q = distribution(seed, vocab_size, 1.0), distribution(seed + 1, vocab_size, 1.0)
    for token in np.flatnonzero(q):
        choice, outcome = rule(p, q, [int(token)]), rules.token_level(np.vstack((p, p)), q[None], [int(token)])
        np.testing.assert_allclose(choice.accepted, outcome.stop[1:], atol=1e-12)
        np.testing.assert_allclose(choice.own, outcome.stop[0] * outcome.following[0], atol=1e-12)


def test_more_candidates_are_accepted_more_often_and_without_replacement_most() -> None:
    p, q = np.array([0.1, 0.2, 0.7]), np.array([0.6, 0.3, 0.1])
    shares = {
        name: [emitted(rule, p, q, count, replaced=name in REPLACED)[1] for count in (1, 2, 3)]
        for name, rule in RULES.items()
    }
    for name in RULES:
        assert shares[name] == sorted(shares[name])
        assert shares[name][0] == pytest.approx(0.4)  # 1 - TV(p, q)
    assert shares["recursive"][2] == pytest.approx(1)  # all tokens are candidates
    assert shares["recursive"][1] > max(shares["multi-step"][1], shares["K-SEQ"][1])


def test_a_rule_is_exact_for_its_own_candidates_only() -> None:
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.5, 0.3, 0.15, 0.05])
    for rule in REPLACED.values():
        found, _ = emitted(rule, p, q, 2, replaced=False)
        assert np.abs(found - p).max() > 0.01


# ------------------------------------------------------------------------------------------------ texts

VOCAB_SIZE, LENGTH = 4, 3


def decoded(way: str, count: int, rule: TreeRule | None = None) -> FloatArray:
    """How often each text of LENGTH tokens came, [V] * LENGTH."""
    truth = random_rule(VOCAB_SIZE, 0, 1.2)
    drawing, own_rule = WAYS[way]
    generator, counts = np.random.default_rng(0), np.zeros((VOCAB_SIZE,) * LENGTH)
    for _ in range(count):
        sampler = Sampler(SamplingParams(temperature=1.0), 0, VOCAB_SIZE)
        target, draft = RuleModel(truth, VOCAB_SIZE), RuleModel(resembling(truth, 1, 1.5), VOCAB_SIZE)
        drafted = TreeDrawing(draft, drawing(), sampler, depth=3)
        found = decode(target, draft, sampler, [0], LENGTH, trees(drafted, rule or own_rule, generator))
        counts[tuple(found.token_ids)] += 1
    return counts


def law() -> FloatArray:
    truth, found = random_rule(VOCAB_SIZE, 0, 1.2), np.zeros((VOCAB_SIZE,) * LENGTH)
    for text in itertools.product(range(VOCAB_SIZE), repeat=LENGTH):
        found[text] = np.prod([softmax(truth((0, *text[:place])))[token] for place, token in enumerate(text)])
    return found


def careless(p: FloatArray, q: FloatArray, candidates: list[int], rule: TreeRule) -> Choice:
    """What is often got wrong: after all rejections, a token of the target's own."""
    found = rule(p, q, candidates)
    return Choice(found.accepted, found.own.sum() * p)


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in DAILY else pytest.mark.nightly) for way in WAYS])
@pytest.mark.parametrize("num_texts", [300, pytest.param(1500, marks=pytest.mark.nightly)])
def test_frequencies_are_those_of_the_target(way: str, num_texts: int) -> None:
    assert p_value(decoded(way, num_texts), law()) > 0.001


@pytest.mark.nightly("tests the test: a wrong rule has to be noticed")
@each_way
def test_a_careless_rule_is_noticed(way: str) -> None:
    assert p_value(decoded(way, 1000, partial(careless, rule=WAYS[way][1])), law()) < 1e-6


@each_way
@few
@given(
    params=sampling_params().filter(lambda params: params.temperature == 0),
    depth=st.integers(0, 3),
    draft_size=st.sampled_from([1, 3, 7]),
    final=st.sets(st.integers(0, 4), max_size=1),
)
def test_greedy_text_is_plain_decodings(
    way: str, params: SamplingParams, depth: int, draft_size: int, final: set[int]
) -> None:
    """With any draft; RuleModel insists that both caches follow the text."""
    truth, sampler = random_rule(5, 0), Sampler(params, 0, 5)
    target, draft = RuleModel(truth, 5), RuleModel(random_rule(draft_size, 1), draft_size)
    drawing, rule = WAYS[way]
    drafted = TreeDrawing(draft, drawing(), sampler, depth)
    draws = trees(drafted, rule, np.random.default_rng(0))
    found = decode(target, draft, sampler, [1, 0, 2], 20, draws, final)
    plain = plain_text(truth, params, 0, [1, 0, 2], 20)
    ends = [place + 1 for place, token in enumerate(plain) if token in final]
    assert found.token_ids == plain[: min(ends, default=20)]
    assert found.num_passes == len(target.batches)
    assert found.num_drafted == sum(target.batches)


def test_siblings_of_a_beam_are_draws_without_replacement() -> None:
    """The order of the first two candidates: q of the first, times q of the second among the others."""
    q, generator, counts = np.array([0.5, 0.3, 0.2]), np.random.default_rng(0), np.zeros((3, 3))
    for _ in range(5000):
        beam = StochasticBeam(2)
        beam.begin()
        counts[tuple(beam.draw(q[None], generator)[0])] += 1
    expected = np.array([[0 if a == b else q[a] * q[b] / (1 - q[a]) for b in range(3)] for a in range(3)])
    assert p_value(counts, expected) > 0.001
