"""The sampling that a model's authors recommend: generation_config.json, or a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offspec.scheduler.params import RECOMMENDED, SamplingParams

from ..errors import UsageError
from ..notes import Note

PENALTY = "repetition_penalty"
# llama.cpp's defaults, for models whose authors recommend nothing: greedily, small models repeat themselves.
USUAL = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05)
SAMPLED = SamplingParams(temperature=1.0)  # transformers' defaults, for what they leave out


def recommended_sampling(config: Mapping[str, Any], notes: list[Note]) -> SamplingParams:
    """What a generation_config.json recommends; greedy if `do_sample` is false, USUAL if it says nothing.

    An invalid value is left out, and `notes` say so.
    """
    given = {name: config[name] for name in RECOMMENDED if config.get(name) is not None}
    if config.get("do_sample") is False:
        params, given = SamplingParams(), {name: value for name, value in given.items() if name == PENALTY}
    else:
        params = SAMPLED if config.get("do_sample") or given.keys() - {PENALTY} else USUAL
    for name, value in given.items():
        try:
            changed: dict[str, Any] = {name: 0 if (name, value) == ("top_k", -1) else value}  # vLLM's -1 is off
            params = replace(params, **changed)
        except UsageError as exc:
            notes.append(Note(f"the model recommends an invalid value, which is ignored: {exc}", advice=True))
    return params
