"""Tokens/s and tokens per pass of held-out prompts, plain and speculative, greedy and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from offspec import Engine, SamplingParams, SpeculationParams, builtin

from .energy import energy_meter
from .jobs import Job


def texts_of(engine: Engine, job: Job, *, is_brief: bool) -> dict[str, Any]:
    """Greedy and sampled, plain and speculative; also without overlap, to measure the gain of overlap.

    is_brief: only greedy, with half as many prompts.
    """
    ours, plain = SpeculationParams(), SpeculationParams(budget=0)
    ask = partial(said, engine, job)
    ask(0.0, ours, job.num_tokens, 1)  # calibrates and captures graphs
    few = max(1, job.num_prompts // 2)
    found = {
        "greedy": ask(0.0, ours, job.num_tokens, few if is_brief else job.num_prompts),
        "greedy, plain": ask(0.0, plain, job.num_plain_tokens, 1),
    }
    if not is_brief:
        found |= {
            "sampled": ask(1.0, ours, job.num_tokens, job.num_prompts),
            "sampled, plain": ask(1.0, plain, job.num_plain_tokens, 1),
            "greedy, no overlap": ask(0.0, replace(ours, overlap=False), job.num_tokens, job.num_prompts),
        }
    for kind in ("greedy",) if is_brief else ("greedy", "sampled"):
        same = num_equal(found[f"{kind}, plain"]["token_ids"], found[kind]["token_ids"])
        found[f"{kind}, plain"]["first_difference"] = same[0]
    for figures in found.values():
        del figures["token_ids"]
    return found


def said(
    engine: Engine, job: Job, temperature: float, speculation: SpeculationParams, num_tokens: int, num_prompts: int
) -> dict[str, Any]:
    """Figures of some held-out prompts; the rate excludes the first pass of each."""
    params = SamplingParams(num_tokens, temperature=temperature, seed=1, ignore_eos=True)
    total: dict[str, float] = dict.fromkeys(("num_tokens", "num_passes", "decode_s", "draft_s", "target_s"), 0)
    after_first, ids, peak = 0, list[list[int]](), 0
    meter = energy_meter(engine.target.device)
    joules = meter() if meter else 0.0
    for prompt in builtin.prompts()[:num_prompts]:
        steps = list(engine.generate(prompt, params, speculation))
        stats = steps[-1].stats
        ids.append([token for step in steps for token in step.token_ids])
        after_first += stats.num_tokens - stats.num_first_pass_tokens
        peak = max(peak, stats.peak_device_bytes)
        for name in total:
            total[name] += getattr(stats, name)
    return {
        "tokens_per_s": after_first / total["decode_s"] if total["decode_s"] else 0.0,
        "tokens_per_pass": total["num_tokens"] / total["num_passes"],
        "target_s_per_pass": total["target_s"] / total["num_passes"],
        "draft_s_per_pass": total["draft_s"] / total["num_passes"],
        "draft_share": total["draft_s"] / (total["draft_s"] + total["target_s"]),
        "peak_device_bytes": peak,
        "joules_per_token": (meter() - joules) / total["num_tokens"] if meter else None,
        "token_ids": ids,
    }


def num_equal(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> list[int]:
    """For each text, the number of equal tokens from its beginning."""
    pairs = (zip(a, b, strict=False) for a, b in zip(found, expected, strict=False))
    return [next((i for i, (x, y) in enumerate(both) if x != y), -1) for both in map(list, pairs)]
