"""SpecExec's drafter with its own settings: the best nodes by a slow twin, and the text of plain decoding."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.scheduling.specexec import SpecExecDrafter, SpecExecSettings
from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.sampling import Sampler

from ..scheduler.fakes import (
    Rule,
    RuleModel,
    assert_well_formed,
    few,
    generate,
    log_softmax,
    paths,
    plain_text,
    random_rule,
)

VOCAB_SIZE, TEXT = 4, [1, 2]


def scores_of(rule: Rule, settings: SpecExecSettings, depth: int) -> dict[tuple[int, ...], float]:
    """Every path up to this depth: its log-probability, less what each level costs."""
    found: dict[tuple[int, ...], float] = {(): 0.0}
    for length in range(1, depth + 1):
        for path in itertools.product(range(VOCAB_SIZE), repeat=length):
            gains = log_softmax(rule((*TEXT, *path[:-1])) / settings.draft_temperature)
            found[path] = found[path[:-1]] + gains[path[-1]] + math.log(settings.decay)
    return {path: score for path, score in found.items() if path and score >= settings.least_log_probability}


@few
@given(
    seed=st.integers(0, 100),
    budget=st.integers(1, 20),
    decay=st.sampled_from([1.0, 0.95, 0.5]),
    least=st.sampled_from([-math.inf, -3.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_the_tree_has_the_likeliest_nodes(
    seed: int, budget: int, decay: float, least: float, temperature: float
) -> None:
    rule, settings = random_rule(VOCAB_SIZE, seed), SpecExecSettings(budget, 128, 3, 16, decay, least, temperature)
    drafter = SpecExecDrafter(RuleModel(rule, VOCAB_SIZE), Sampler(SamplingParams(), 0, VOCAB_SIZE), settings)
    tree = drafter.propose(TEXT, max_depth=8)
    assert_well_formed(tree)
    expected = scores_of(rule, settings, depth=3)
    best = sorted(expected, key=lambda path: -expected[path])[:budget]
    assert set(paths(tree)) == set(best)
    np.testing.assert_allclose(tree.scores, [expected[path] for path in paths(tree)], atol=1e-5)


def test_settings_limit_the_tree() -> None:
    rule, settings = random_rule(VOCAB_SIZE, 0), SpecExecSettings(64)

    def sizes(settings: SpecExecSettings) -> tuple[int, int, int]:
        model = RuleModel(rule, VOCAB_SIZE)
        tree = SpecExecDrafter(model, Sampler(SamplingParams(), 0, VOCAB_SIZE), settings).propose(TEXT, 8)
        return len(tree), int(tree.depths.max()), max(model.batches)

    assert sizes(settings)[0] == 64
    assert sizes(replace(settings, max_depth=2))[1] == 2
    assert sizes(replace(settings, max_width=2))[2] == 2
    assert sizes(replace(settings, children=1))[0] == 8, "a chain"
    assert sizes(replace(settings, decay=0.05))[1] < sizes(settings)[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_plain_decodings(temperature: float) -> None:
    """RuleModel insists that the draft's cache follows the text."""
    params = SamplingParams(temperature=temperature)
    truth, sampler = random_rule(VOCAB_SIZE, 0), Sampler(params, 5, VOCAB_SIZE)
    drafter = SpecExecDrafter(RuleModel(random_rule(VOCAB_SIZE, 1), VOCAB_SIZE), sampler, SpecExecSettings(12))
    found = generate(RuleModel(truth, VOCAB_SIZE), drafter, sampler, TEXT, 30)
    assert found == plain_text(truth, params, 5, TEXT, 30)
