"""Tokens per pass of a draft alone, on texts that it did not learn from, and how often its guesses hold by depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import Verdict

from ..engine import Engine

ALONE = SpeculationParams(64, lookup=False, recall=False, recycling=False)
DEEPEST = 10
LEAST_WALKS = 10  # a share of fewer walks says nothing


@dataclass
class Walks:
    """Accepted paths of some passes. lengths: number of paths by length."""

    lengths: Counter[int] = field(default_factory=Counter)

    def observe(self, tree: TokenTree, verdict: Verdict) -> None:
        """An observer of `Engine.generate`. Passes without a tree are left out."""
        if len(tree):
            self.lengths[len(verdict.path)] += 1

    def shares(self) -> list[float]:
        """Of the paths that came to depth d, how many went on to d + 1; for d from 0."""
        reached = [sum(n for length, n in self.lengths.items() if length >= d) for d in range(DEEPEST + 1)]
        return [after / before for before, after in pairwise(reached) if before >= LEAST_WALKS]


@dataclass(frozen=True)
class DraftGain:
    """by_depth: how often the next token was found, by the depth in the tree; see `Walks.shares`."""

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
    num_tokens, num_passes, walks = 0, 0, Walks()
    for number, prompt in enumerate(prompts):
        if progress is not None:
            progress("held-out texts", number, len(prompts))
        params = SamplingParams(max_new_tokens, temperature=temperature, seed=number, ignore_eos=True)
        *_, last = engine.generate(prompt, params, ALONE, observer=walks.observe)
        num_tokens, num_passes = num_tokens + last.stats.num_tokens, num_passes + last.stats.num_passes
    return DraftGain(num_tokens / num_passes, walks.shares())
