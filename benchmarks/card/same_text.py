"""Text in 16 bits with drafts against plain decoding of a resident target, token by token, for many prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.streaming import star
from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.loaders.streaming.placement import Limits
from offspec.model.decoder import CachedDecoder

from .bench import Bench
from .jobs import JOBS
from .memory import ENDLESS, cap_of, plan_for, plan_within
from .results import Figures
from .running import loaded
from .texts import num_equal


def same_text(bench: Bench, name: str, memory: str) -> Iterator[Figures]:
    """Where texts with drafts, target streamed, first differ from plain ones, target resident; -1: nowhere.

    margins: at these tokens, the difference of the two highest logits of plain decoding; near 0 is a near-tie.
    """
    job, (target, draft) = JOBS[name], bench.grown(name)
    prompts = builtin.prompts()[: job.num_same_prompts]
    streamed = plan_within(job, cap_of(memory), target.files, draft.files, bench.device, bench.ram)
    no_limit = Limits(None if bench.device.type == "cpu" else ENDLESS, ENDLESS)
    everything = plan_for(target.files, draft.files, no_limit)
    rates, found = bench.rates(), Figures(num_prompts=len(prompts), num_tokens=job.num_same_tokens)
    with loaded(target, draft, streamed, rates, bench.device, 1) as running:
        found["num_resident"] = len(running.plan.placement.resident)
        arithmetic = running.engine.target.arithmetic
        found["is_exact"] = running.engine.target.is_exact
        ours = [text_of(running.engine, prompt, SpeculationParams(), job.num_same_tokens) for prompt in prompts]
    yield found
    with loaded(target, draft, everything, rates, bench.device, 1) as running:
        running.engine.target.arithmetic = arithmetic
        plain = [text_of(running.engine, prompt, SpeculationParams(0), job.num_same_tokens) for prompt in prompts]
        places = num_equal(ours, plain)
        found |= {"first_differences": places, "num_equal_texts": places.count(-1)}
        found["margins"] = {
            number: margin(running.engine, [*running.engine.tokenizer.encode(prompts[number]), *plain[number][:place]])
            for number, place in enumerate(places)
            if place >= 0
        }
    yield found


def text_of(engine: Engine, prompt: str, speculation: SpeculationParams, num_tokens: int) -> list[int]:
    params = SamplingParams(num_tokens, temperature=0.0, seed=1, ignore_eos=True)
    return [token for step in engine.generate(prompt, params, speculation) for token in step.token_ids]


def margin(engine: Engine, tokens: Sequence[int]) -> float:
    """The difference of the two highest logits after these tokens."""
    rows = CachedDecoder(engine.target, len(tokens) + 1).score(list(tokens), *star(0))
    best = np.sort(rows[-1].float().cpu().numpy())[-2:]
    return float(best[1] - best[0])
