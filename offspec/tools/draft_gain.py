"""Tokens per pass of a draft alone, on texts that it did not learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offspec.scheduler.params import SamplingParams, SpeculationParams

from ..engine import Engine

ALONE = SpeculationParams(64, lookup=False, recall=False, recycling=False)


def tokens_per_pass(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float,
    progress: Callable[[str, int, int], None] | None = None,
) -> float:
    """Mean over the prompts' continuations, with 64 nodes, and without recall or guessers. Raises OffspecError."""
    num_tokens = num_passes = 0
    for number, prompt in enumerate(prompts):
        if progress is not None:
            progress("held-out texts", number, len(prompts))
        params = SamplingParams(max_new_tokens, temperature=temperature, seed=number, ignore_eos=True)
        *_, last = engine.generate(prompt, params, ALONE)
        num_tokens, num_passes = num_tokens + last.stats.num_tokens, num_passes + last.stats.num_passes
    return num_tokens / num_passes
