"""The rules of the literature are exact, by their whole distribution and by chi-square, and blocks accept no less."""

from __future__ import annotations

import itertools
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scheduling.rules import Outcome, Rule, block, chains, decode, draw, token_level
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray

from ..scheduler.fakes import RuleModel, few, plain_text, processed, random_rule, resembling, sampling_params, softmax
from ..scheduler.trees.test_distribution import p_value

RULES: list[Rule] = [token_level, block]
each_rule = pytest.mark.parametrize("rule", RULES)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)


class Contexts:
    """Two random models over V tokens, dependent on everything before; some tokens are impossible, some certain."""

    def __init__(self, seed: int, vocab_size: int, spread: float, error: float, num_drafted: int) -> None:
        self.vocab_size, self.num_drafted = vocab_size, num_drafted
        rule = random_rule(vocab_size, seed, spread)
        draft = resembling(rule, seed + 1, error)
        self.p = cache(lambda text: self._cut(softmax(rule(text))))
        self.q = cache(lambda text: self._cut(softmax(draft(text))))

    @staticmethod
    def _cut(chances: FloatArray) -> FloatArray:
        kept = np.where(chances < 0.05, 0, chances)
        return kept / kept.sum()

    def texts(self, length: int) -> list[tuple[int, ...]]:
        return list(itertools.product(range(self.vocab_size), repeat=length))

    def chance(self, model: str, text: tuple[int, ...]) -> float:
        law = getattr(self, model)
        return float(np.prod([law(text[:place])[token] for place, token in enumerate(text)]))

    def outcome(self, rule: Rule, drafted: tuple[int, ...]) -> Outcome:
        beginnings = [drafted[:length] for length in range(self.num_drafted + 1)]
        return rule(np.array([self.p(b) for b in beginnings]), np.array([self.q(b) for b in beginnings[:-1]]), drafted)

    def drafts(self) -> list[tuple[tuple[int, ...], float]]:
        """Every chain that may be drafted, and how often it is."""
        chances = [(text, self.chance("q", text)) for text in self.texts(self.num_drafted)]
        return [(text, chance) for text, chance in chances if chance > 0]

    def expected_accepted(self, rule: Rule) -> float:
        return sum(chance * self.outcome(rule, text).expected_accepted for text, chance in self.drafts())


def contexts() -> st.SearchStrategy[Contexts]:
    return st.builds(
        Contexts,
        seed=st.integers(0, 10_000),
        vocab_size=st.integers(1, 3),
        spread=st.sampled_from([0.5, 1.5, 3.0]),
        error=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        num_drafted=st.integers(1, 3),
    )


@each_rule
@few
@given(models=contexts())
def test_what_is_emitted_is_the_targets_own(rule: Rule, models: Contexts) -> None:
    """Summed over every draft and every stop: one more token than drafted, the target itself saying what is missing."""
    length = models.num_drafted + 1
    found = dict.fromkeys(models.texts(length), 0.0)
    for drafted, chance in models.drafts():
        outcome = models.outcome(rule, drafted)
        assert outcome.stop.sum() == pytest.approx(1)
        assert (outcome.stop >= 0).all()
        for stop, text in itertools.product(range(length), found):
            if text[:stop] == drafted[:stop]:
                rest = [models.p(text[:place])[text[place]] for place in range(stop + 1, length)]
                found[text] += chance * outcome.stop[stop] * outcome.following[stop, text[stop]] * np.prod(rest)
    assert found == pytest.approx({text: models.chance("p", text) for text in found}, abs=1e-9)


@few
@given(models=contexts())
def test_a_block_is_never_accepted_less(models: Contexts) -> None:
    assert models.expected_accepted(block) >= models.expected_accepted(token_level) - 1e-9


def test_blocks_gain() -> None:
    """The paper's example: p = (1/3, 2/3), q = (2/3, 1/3), two drafted tokens (2403.10444)."""
    p, q = np.array([[1 / 3, 2 / 3]] * 3), np.array([[2 / 3, 1 / 3]] * 2)

    def expected(rule: Rule) -> float:
        chains = itertools.product(range(2), repeat=2)
        return sum(q[0, a] * q[1, b] * rule(p, q, [a, b]).expected_accepted for a, b in chains)

    assert expected(token_level) == pytest.approx(10 / 9)
    assert expected(block) == pytest.approx(11 / 9)


@each_rule
def test_a_perfect_draft_is_accepted_whole(rule: Rule) -> None:
    q = np.array([[0.2, 0.3, 0.5]] * 2)
    outcome = rule(np.vstack((q, [[1.0, 0.0, 0.0]])), q, [0, 2])
    np.testing.assert_allclose(outcome.stop, [0, 0, 1])
    assert draw(outcome, [0, 2], np.random.default_rng(0)) == [0, 2, 0]


@each_rule
def test_nothing_drafted_is_the_targets_token(rule: Rule) -> None:
    outcome = rule(np.array([[0.25, 0.75]]), np.empty((0, 2)), [])
    np.testing.assert_array_equal(outcome.stop, [1])
    np.testing.assert_array_equal(outcome.following, [[0.25, 0.75]])


# ------------------------------------------------------------------------------------------------ by chi-square

VOCAB_SIZE, LENGTH, NUM_DRAFTED = 4, 3, 3
MARKOV = [
    np.apply_along_axis(softmax, 1, logits)
    for logits in (
        np.random.default_rng(0).normal(scale=1.2, size=(VOCAB_SIZE, VOCAB_SIZE)),
        np.random.default_rng(1).normal(scale=1.2, size=(VOCAB_SIZE, VOCAB_SIZE)),
    )
]
TARGET, DRAFT = MARKOV


@cache
def outcome_of(rule: Rule, last: int, drafted: tuple[int, ...]) -> Outcome:
    before = [last, *drafted]
    return rule(TARGET[before], DRAFT[before[:-1]], drafted)


def continuations(rule: Rule, seed: int, num_texts: int) -> FloatArray:
    """How often each continuation of token 0 came, [V] * LENGTH."""
    generator, counts = np.random.default_rng(seed), np.zeros((VOCAB_SIZE,) * LENGTH)
    edges = DRAFT.cumsum(1)
    for _ in range(num_texts):
        text = [0]
        while len(text) <= LENGTH:
            drafted: list[int] = []
            for _ in range(NUM_DRAFTED):
                row = edges[drafted[-1] if drafted else text[-1]]
                drafted.append(int(np.searchsorted(row, generator.random() * row[-1], side="right")))
            text += draw(outcome_of(rule, text[-1], tuple(drafted)), drafted, generator)
        counts[tuple(text[1 : LENGTH + 1])] += 1
    return counts


def law(table: FloatArray) -> FloatArray:
    """The probability of each continuation of token 0, [V] * LENGTH."""
    return np.einsum("a,ab,bc->abc", table[0], table, table)


def wrong_residual(p: FloatArray, q: FloatArray, drafted: list[int], rule: Rule) -> Outcome:
    """What is often got wrong: after a rejection, a token of the target's own."""
    return Outcome(rule(p, q, drafted).stop, p)


@pytest.mark.slow
@each_rule
@pytest.mark.parametrize("num_texts", [3_000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_frequencies_are_those_of_the_target(rule: Rule, num_texts: int) -> None:
    assert p_value(continuations(rule, 0, num_texts), law(TARGET)) > 0.001
    # The same test tells what is nearly right from what is right.
    assert p_value(continuations(rule, 0, 1_000), law(DRAFT)) < 1e-9
    assert p_value(continuations(partial(wrong_residual, rule=rule), 0, 3_000), law(TARGET)) < 1e-9


# ------------------------------------------------------------------------------------------------ text

PROMPT = [1, 0, 2]


@each_rule
@few
@given(
    params=sampling_params().filter(lambda params: params.temperature == 0),
    num_drafted=st.integers(0, 5),
    draft_size=st.sampled_from([1, 3, 7]),
    final=st.sets(st.integers(0, 4), max_size=1),
)
def test_greedy_text_is_plain_decodings(
    rule: Rule, params: SamplingParams, num_drafted: int, draft_size: int, final: set[int]
) -> None:
    """With any draft; RuleModel insists that both caches follow the text."""
    truth, sampler = random_rule(5, 0), Sampler(params, 0, 5)
    target, draft = RuleModel(truth, 5), RuleModel(random_rule(draft_size, 1), draft_size)
    draws = chains(draft, sampler, num_drafted, rule, np.random.default_rng(0))
    found = decode(target, draft, sampler, PROMPT, 20, draws, final)
    plain = plain_text(truth, params, 0, PROMPT, 20)
    ends = [place + 1 for place, token in enumerate(plain) if token in final]
    assert found.token_ids == plain[: min(ends, default=20)]
    assert found.num_passes == len(target.batches)
    assert max(target.batches) <= num_drafted


@pytest.mark.slow
@each_rule
@pytest.mark.parametrize("num_texts", [150, pytest.param(1500, marks=pytest.mark.nightly)])
def test_sampled_text_is_distributed_as_the_target(rule: Rule, num_texts: int) -> None:
    """Parameters shape both distributions; a good draft saves passes."""
    params = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3)
    truth, generator, counts = random_rule(3, 0, 1.0), np.random.default_rng(0), np.zeros((3, 3))
    num_passes = 0
    for _ in range(num_texts):
        target, draft = RuleModel(truth, 3), RuleModel(resembling(truth, 1, 0.5), 3)
        sampler = Sampler(params, 0, 3)
        found = decode(target, draft, sampler, [0], 2, chains(draft, sampler, 2, rule, generator))
        counts[tuple(found.token_ids)] += 1
        num_passes += found.num_passes
    expected = np.zeros((3, 3))
    for a, b in itertools.product(range(3), repeat=2):
        first = softmax(processed(truth((0,)), params, [0]))[a]
        expected[a, b] = first * softmax(processed(truth((0, a)), params, [0, a]))[b]
    assert p_value(counts, expected) > 0.001
    assert p_value(counts, expected.T) < 1e-9
    assert num_passes < 1.6 * num_texts
