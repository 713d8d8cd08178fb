"""Estimates over prompts: ratios of sums with bootstrap intervals, and what bounds them. Numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
NGRAM = 4


@dataclass(frozen=True)
class Estimate:
    """A value, and the 95 % interval of it over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio_of_sums(tops: Sequence[float], bottoms: Sequence[float]) -> Estimate:
    """sum(tops) / sum(bottoms), one entry per prompt; the interval by resampling prompts (percentile bootstrap)."""
    top, bottom = np.array(tops, dtype=float), np.array(bottoms, dtype=float)
    drawn = np.random.default_rng(0).integers(len(top), size=(RESAMPLES, len(top)))
    resampled = top[drawn].sum(1) / bottom[drawn].sum(1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Estimate(float(top.sum() / bottom.sum()), float(low), float(high))


def speedup(tokens: Sequence[int], passes: Sequence[int], reference_passes: Sequence[int]) -> Estimate:
    """Tokens per pass over those of a reference with the same texts, paired by prompt."""
    assert len(tokens) == len(passes) == len(reference_passes)
    return ratio_of_sums(reference_passes, passes)


def copied_share(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float:
    """The share of a text's 4-grams that its prompt contains: 1 for an answer that repeats the prompt."""
    prompt = _ngrams(prompt_ids)
    answer = [tuple(token_ids[i : i + NGRAM]) for i in range(len(token_ids) - NGRAM + 1)]
    return sum(each in prompt for each in answer) / len(answer) if answer else 0.0


def _ngrams(ids: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)}
