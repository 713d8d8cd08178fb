"""Tokens per pass of a draft alone, on texts that it did not learn from, and how often its guesses hold by depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import Verdict

from ..engine import Engine

ALONE = SpeculationParams(64, lookup=False, recall=False, recycling=False)
DEEPEST = 10
LEAST_WALKS = 10  # a share of fewer walks says nothing


@dataclass(frozen=True)
class DraftGain:
    """by_depth: of the accepted paths that came to depth d, how many went on to d + 1; for d from 0."""

    tokens_per_pass: float
    by_depth: list[float]


def measure_gain(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float,
    progress: Callable[[str, int, int], None] | None = None,
) -> DraftGain:
    """Over the prompts' continuations, with 64 nodes, and without recall or guessers. Raises OffspecError."""
    num_tokens, num_passes, lengths = 0, 0, Counter[int]()  # of accepted paths

    def observe(tree: TokenTree, verdict: Verdict) -> None:
        if len(tree):
            lengths[len(verdict.path)] += 1

    for number, prompt in enumerate(prompts):
        if progress is not None:
            progress("held-out texts", number, len(prompts))
        params = SamplingParams(max_new_tokens, temperature=temperature, seed=number, ignore_eos=True)
        *_, last = engine.generate(prompt, params, ALONE, observer=observe)
        num_tokens, num_passes = num_tokens + last.stats.num_tokens, num_passes + last.stats.num_passes
    reached = [sum(n for length, n in lengths.items() if length >= depth) for depth in range(DEEPEST + 1)]
    shares = [after / before for before, after in pairwise(reached) if before >= LEAST_WALKS]
    return DraftGain(num_tokens / num_passes, shares)
