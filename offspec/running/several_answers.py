"""The parameters of several answers to one prompt."""

from __future__ import annotations

from dataclasses import replace

from offspec.scheduler.params import SEED_LIMIT, SamplingParams


def params_of_each(params: SamplingParams, seed: int, num_answers: int) -> list[SamplingParams]:
    """The parameters of each answer: seeds count up. The first one reports what concerns the prompt."""
    first = replace(params, seed=seed)
    others = range(1, num_answers)
    return [first, *(replace(params, seed=(seed + i) % SEED_LIMIT, prompt_logprobs=False) for i in others)]
