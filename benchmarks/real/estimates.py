"""Estimates over prompts: ratios of sums with bootstrap intervals, and what bounds them. Numbers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

RESAMPLES = 2000
NGRAM = 4


@dataclass(frozen=True)
class Estimate:
    """A value, and the 95 % interval of it over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self}"

    def __format__(self, spec: str) -> str:
        spec = spec or ".2f"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def ratio_of_sums(tops: Sequence[float], bottoms: Sequence[float]) -> Estimate:
    """sum(tops) / sum(bottoms), one entry per prompt."""
    return _of_sums(lambda top, bottom: top / bottom, tops, bottoms)


def mean(values: Sequence[float]) -> Estimate:
    """Of one value per prompt."""
    return ratio_of_sums(values, [1.0] * len(values))


def ratio_of_rates(
    tokens: Sequence[float],
    seconds: Sequence[float],
    reference_tokens: Sequence[float],
    reference_seconds: Sequence[float],
) -> Estimate:
    """Tokens per second over a reference's, paired by prompt; the texts may differ in length."""
    return _of_sums(lambda a, s, b, t: (a / s) / (b / t), tokens, seconds, reference_tokens, reference_seconds)


def _of_sums(value_of: Callable[..., FloatArray], *columns: Sequence[float]) -> Estimate:
    """A function of columns' sums, one entry per prompt; the interval by resampling prompts (percentile bootstrap)."""
    arrays = [np.array(column, dtype=float) for column in columns]
    count = len(arrays[0])
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    low, high = np.quantile(value_of(*(array[drawn].sum(1) for array in arrays)), (0.025, 0.975))
    return Estimate(float(value_of(*(array.sum() for array in arrays))), float(low), float(high))


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
