"""Sampled through trees, continuations come as often as the target's processed distribution says, by chi-square.

The target repeats every LENGTH tokens: it starts afresh and then looks at its last token, so that a long text is many
independent continuations. What is expected is computed in numpy, token by token, from the same tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees import sampling
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray, TokenTree
from offspec.scheduler.trees.verify import verify_exactly

from ..fakes import Rule, build_tree, paths, processed, softmax

VOCAB_SIZE, LENGTH = 8, 3
TOKENS_PER_TEXT = 300  # a hundred continuations of three tokens with one seed
PROMPT = (0,) * LENGTH

each_way = pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_p=0.9),
        pytest.param(SamplingParams(temperature=1.0, top_k=3), marks=pytest.mark.nightly),
        pytest.param(SamplingParams(temperature=1.3, min_p=0.15), marks=pytest.mark.nightly),
    ],
    ids=["temperature", "top-p", "top-k", "min-p"],
)


def periodic(tables: FloatArray) -> Rule:
    """tables [LENGTH, V, V]: logits by the place in the continuation and, from the second place on, the last token."""

    def rule(prefix: tuple[int, ...]) -> FloatArray:
        place = len(prefix) % LENGTH
        return tables[place, prefix[-1] if place else 0]

    return rule


def _random_tables(seed: int, spread: float) -> FloatArray:
    return np.random.default_rng(seed).normal(scale=spread, size=(LENGTH, VOCAB_SIZE, VOCAB_SIZE))


TARGET = periodic(_random_tables(seed=0, spread=1.5))
DRAFT = periodic(_random_tables(seed=0, spread=1.5) + _random_tables(seed=1, spread=0.7))


@pytest.fixture(scope="module", autouse=True)
def _noise_is_computed_once() -> Iterator[None]:
    """All tests draw on the same seeds, so that one may take the noise from the other: half of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "gumbel", cache(sampling.gumbel))
        yield


@cache
def guesses(place: int, last: int) -> tuple[TokenTree, Tensor]:
    """Two levels of the draft's two likeliest tokens each, and the target's logits for them."""
    before = (*PROMPT, *[last] * place)
    found: list[tuple[int, ...]] = [()]
    for _ in range(2):
        found += [(*path, int(token)) for path in found for token in DRAFT(before + path).argsort()[-2:]]
    tree = build_tree(found)
    return tree, torch.tensor(np.array([TARGET(before + path) for path in [(), *paths(tree)]]), dtype=torch.float32)


def sampled_text(params: SamplingParams, seed: int) -> list[int]:
    sampler, text = Sampler(params, seed, VOCAB_SIZE), list(PROMPT)
    while len(text) < LENGTH + TOKENS_PER_TEXT:
        tree, logits = guesses(len(text) % LENGTH, text[-1])
        tokens = verify_exactly(tree, logits, sampler, len(text)).tokens
        text += tokens
        sampler.extend(tokens)
    return text[LENGTH:][:TOKENS_PER_TEXT]


def sampled(params: SamplingParams, num_texts: int) -> FloatArray:
    """How often each continuation came, [V] * LENGTH."""
    counts = np.zeros((VOCAB_SIZE,) * LENGTH)
    for seed in range(num_texts):
        np.add.at(counts, tuple(np.reshape(sampled_text(params, seed), (-1, LENGTH)).T), 1)
    return counts


def expected(rule: Rule, process: Callable[[FloatArray], FloatArray]) -> FloatArray:
    """The probability of each continuation, [V] * LENGTH."""
    found = np.ones((VOCAB_SIZE,) * LENGTH)
    after = cache(lambda tokens: softmax(process(rule((*PROMPT, *tokens)))))
    for tokens in itertools.product(range(VOCAB_SIZE), repeat=LENGTH):
        found[tokens] = math.prod(after(tokens[:place])[token] for place, token in enumerate(tokens))
    return found


def p_value(counts: FloatArray, probabilities: FloatArray) -> float:
    """Pearson's chi-square test. Cells where fewer than five are expected are taken as one; 0 for the impossible."""
    if counts[probabilities == 0].any():
        return 0.0
    wanted = counts.sum() * probabilities
    cells = np.array([[*values[wanted >= 5], values[wanted < 5].sum()] for values in (counts, wanted)])
    found, wanted = cells[:, cells[1] > 0]
    statistic, freedom = float(((found - wanted) ** 2 / wanted).sum()), len(found) - 1
    halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(halves[0], halves[1]).item()


def without_the_head(logits: FloatArray, top_p: float) -> FloatArray:
    """The wrong nucleus: it excludes the likeliest tokens that together hold top_p."""
    order = np.argsort(-logits)
    kept = logits.copy()
    kept[order[np.cumsum(softmax(logits)[order]) < top_p]] = -math.inf
    return kept


@pytest.mark.slow
@each_way
@pytest.mark.parametrize(("num_texts", "heat"), [(15, 1.7), pytest.param(200, 1.1, marks=pytest.mark.nightly)])
def test_frequencies_are_those_of_the_target(params: SamplingParams, num_texts: int, heat: float) -> None:
    counts = sampled(params, num_texts)
    assert counts.sum() == 100 * num_texts
    assert p_value(counts, expected(TARGET, lambda logits: processed(logits, params))) > 0.001
    # The same test tells what is nearly right from what is right.
    assert p_value(counts, expected(DRAFT, lambda logits: processed(logits, params))) < 1e-9
    assert p_value(counts, expected(TARGET, lambda logits: processed(logits / heat, params))) < 1e-9
    assert p_value(counts, expected(TARGET, lambda logits: without_the_head(logits / params.temperature, 0.9))) < 1e-9
