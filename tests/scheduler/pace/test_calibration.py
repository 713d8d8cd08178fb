"""Sharpness, trust and profile find what is true and forget what was; what is guessed says how likely it is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from offspec.scheduler.pace.calibration import GRID, Calibration, Profile, Sharpness, Trust

from ..fakes import guesses_of

# ------------------------------------------------------------------------------------------------ sharpness


@pytest.mark.parametrize("true_index", range(len(GRID)))
def test_sharpness_converges_to_the_truth(true_index: int) -> None:
    """Within a step of the grid, for it remembers about a hundred nodes."""
    generator, sharpness = np.random.default_rng(true_index), Sharpness(prior=0.6)
    for _ in range(600):
        values = generator.normal(scale=2, size=12)
        token = int((values / GRID[true_index] + generator.gumbel(size=12)).argmax())
        sharpness.observe(guesses_of(values, 12).likelihood(0, token))
    assert abs(sharpness.index - true_index) <= 1


def test_sharpness_forgets() -> None:
    sharpness, guesses = Sharpness(prior=0.6), guesses_of(np.array([3.0, 2.0, 0.0]), 3)
    for token, end in ((0, GRID[0]), (2, GRID[-1]), (0, GRID[0])):
        for _ in range(500):
            sharpness.observe(guesses.likelihood(0, token))
        assert sharpness.value == end


# ------------------------------------------------------------------------------------------------ trust


def test_trust_is_accepted_over_predicted() -> None:
    for share in (0.25, 0.7, 1.0):
        trust = Trust()
        assert trust.value == 1
        for _ in range(100):
            trust.observe(8.0, round(8 * share))
        assert trust.value == pytest.approx(round(8 * share) / 8, abs=0.01)


def test_trust_never_exceeds_1() -> None:
    trust = Trust()
    for _ in range(50):
        trust.observe(1.0, 3)
        assert trust.value == 1


def test_trust_in_a_useless_draft_is_gone_soon_and_comes_back() -> None:
    trust = Trust()
    for _ in range(10):
        trust.observe(2.0, 0)
    assert trust.value < 0.1
    for _ in range(40):
        trust.observe(2.0, 2)
    assert trust.value > 0.9


# ------------------------------------------------------------------------------------------------ profile


def test_profile_is_the_mean_of_late() -> None:
    """Of rows, however many come at once; fewer children than it knows of count as nothing."""
    generator = np.random.default_rng(0)
    mean = np.array([0.6, 0.2, 0.1])
    for rows_at_once in (1, 50):
        profile = Profile()
        for _ in range(1000 // rows_at_once):
            profile.observe(mean * generator.uniform(0.5, 1.5, size=(rows_at_once, 1)))
        np.testing.assert_allclose(profile.values[:3], mean, rtol=0.15)
        assert profile.values[3:].max() < 1e-6


# ------------------------------------------------------------------------------------------------ learnt


def test_each_mode_is_learnt_by_itself() -> None:
    calibration = Calibration()
    modes = list(product((True, False), repeat=2))
    estimates = [calibration.of(greedy=greedy, coupled=coupled) for greedy, coupled in modes]
    assert len({id(mode) for mode in estimates}) == 4
    assert [mode.sharpness.value for mode in estimates] == [0.5, 0.5, 0.6, 0.6]
    for (greedy, coupled), mode in zip(modes, estimates, strict=True):
        assert calibration.of(greedy=greedy, coupled=coupled) is mode
        assert (calibration.sharpness(greedy=greedy) is mode.sharpness) == coupled
