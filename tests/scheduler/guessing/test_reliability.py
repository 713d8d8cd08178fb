"""What is believed of guesses is what comes of them: the race's formula by simulation, learning towards the truth."""

from __future__ import annotations

import numpy as np
import pytest

from offspec.scheduler.guessing.reliability import ConsideredGuesses, Reliability, log_win, waits_of
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.sampling import Sampler, gumbel
from offspec.scheduler.trees.token_tree import ROOT, BoolArray, FloatArray, TokenTree
from offspec.scheduler.trees.verify import Verdict

from ..fakes import noise


def children(tokens: list[int], kinds: list[int], waits: list[float] | None) -> ConsideredGuesses:
    count = len(tokens)
    tree = TokenTree(np.array(tokens), np.full(count, ROOT), np.ones(count, dtype=np.int64), np.zeros(count))
    return ConsideredGuesses(tree, np.array(kinds), None if waits is None else np.array(waits))


# ------------------------------------------------------------------------------------------------ the race


@pytest.mark.parametrize("w", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("num_others", [1, 5, 60])
def test_a_guess_wins_as_often_as_its_noise_says(w: float, num_others: int) -> None:
    """The noise that the sampler draws, and its argmax, for a token of probability w against unequal others."""
    weights = np.arange(1, num_others + 1) ** 2.0
    p = np.concatenate(([w], (1 - w) * weights / weights.sum()))
    drawn = gumbel(seed=3, position=0, vocab_size=8000 * len(p)).numpy().reshape(8000, len(p))
    wins = np.argmax(np.log(p) + drawn, axis=1) == 0
    waits = np.exp(-drawn[:, 0])
    predicted = np.exp(log_win(np.array(w), waits))
    assert predicted.mean() == pytest.approx(w, abs=0.02)
    for stretch in np.array_split(np.argsort(waits), 8):  # from the luckiest noise to the unluckiest
        expected = predicted[stretch].mean()
        error = np.sqrt(expected * (1 - expected) / len(stretch))
        assert wins[stretch].mean() == pytest.approx(expected, abs=4 * error + 1e-3)


def test_waits_are_those_of_each_nodes_position() -> None:
    sampler = Sampler(SamplingParams(temperature=0.7), seed=5, vocab_size=9)
    tokens, depths = np.array([3, 8, 3, 0]), np.array([1, 1, 2, 4])
    expected = [
        np.exp(-noise(5, 20 + depth - 1, 9)[token]) for token, depth in zip(tokens, depths.tolist(), strict=True)
    ]
    waits = waits_of(tokens, depths, sampler, position=20)
    assert waits is not None
    np.testing.assert_allclose(waits, expected)
    assert waits_of(tokens, depths, Sampler(SamplingParams(), 5, 9), position=20) is None


# ------------------------------------------------------------------------------------------------ learning


def test_greedy_learns_the_share_that_comes_true() -> None:
    reliability, generator = Reliability(np.array([0.5, 0.5])), np.random.default_rng(0)
    for _ in range(2000):
        true = [bool(x) for x in generator.random(2) < (0.9, 0.2)]
        for kind in (0, 1):
            reliability.observe(children([7], [kind], None), Verdict([], [7 if true[kind] else 8]))
    shares = np.exp(reliability.log_probabilities(np.array([0, 1]), None))
    np.testing.assert_allclose(shares, [0.9, 0.2], atol=0.09)  # a hundred guesses are remembered


def test_greedy_follows_a_change_within_a_hundred_guesses() -> None:
    reliability = Reliability(np.array([0.5]))
    for _ in range(500):
        reliability.observe(children([7], [0], None), Verdict([], [7]))
    assert np.exp(reliability.log_probabilities(np.array([0]), None))[0] > 0.95
    for _ in range(100):
        reliability.observe(children([7], [0], None), Verdict([], [8]))
    assert np.exp(reliability.log_probabilities(np.array([0]), None))[0] < 0.4


def log_loss(log_probabilities: FloatArray, came_true: BoolArray) -> float:
    return float(-np.where(came_true, log_probabilities, np.log(-np.expm1(log_probabilities))).mean())


@pytest.mark.parametrize("spread", [(0.8, 0.8), (0.98, 0.05), (0.6, 0.3)])
def test_sampled_learns_how_w_is_spread(spread: tuple[float, float]) -> None:
    """Guesses of one kind with two values of w: predictions come near to those of one who knows the mixture."""
    generator = np.random.default_rng(1)
    reliability = Reliability(np.array([0.3]))

    def draw(count: int) -> tuple[FloatArray, BoolArray]:
        w, waits = generator.choice(spread, count), generator.exponential(size=count)
        return waits, generator.random(count) < np.exp(log_win(w, waits))

    for wait, true in zip(*draw(1500), strict=True):
        reliability.observe(children([7], [0], [wait]), Verdict([], [7 if true else 8]))
    waits, came_true = draw(20000)
    known = np.log(np.mean([np.exp(log_win(np.array(w), waits)) for w in spread], axis=0))
    learnt = reliability.log_probabilities(np.zeros(len(waits), dtype=np.int64), waits)
    assert log_loss(learnt, came_true) < log_loss(known, came_true) + 0.03
    assert (np.diff(learnt[np.argsort(waits)]) <= 1e-12).all(), "the later a guess arrives, the less likely it wins"
    if spread == (0.98, 0.05):
        assert (
            log_loss(learnt, came_true) < min(log_loss(log_win(w, waits), came_true) for w in Reliability.GRID) - 0.05
        )


def test_only_guesses_that_the_text_came_to_are_judged() -> None:
    """Root → 1 → {2, 3}, root → 4 → 2: the text goes 1, 2, 9."""
    tree = TokenTree(np.array([1, 4, 2, 3, 2]), np.array([ROOT, ROOT, 0, 0, 1]), np.array([1, 1, 2, 2, 2]), np.zeros(5))
    reliability = Reliability(np.full(5, 0.5))
    before = reliability.weights(greedy=True) @ reliability.GRID
    reliability.observe(ConsideredGuesses(tree, np.arange(5), None), Verdict([0, 2], [1, 2, 9]))
    after = reliability.weights(greedy=True) @ reliability.GRID
    assert np.sign(after - before).tolist() == [1, -1, 1, -1, 0]


def test_extremes_stay_finite() -> None:
    reliability = Reliability(np.array([0.01, 0.99]))
    for _ in range(300):
        reliability.observe(children([1, 2], [0, 1], [40.0, 1e-16]), Verdict([], [1]))
    log_probabilities = reliability.log_probabilities(np.array([0, 1, 0, 1]), np.array([40.0, 40.0, 1e-16, 1e-16]))
    assert np.isfinite(log_probabilities).all()
    assert (log_probabilities <= 0).all()
