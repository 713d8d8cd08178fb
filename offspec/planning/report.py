"""A plan in words, for notes and for `offspec plan`."""

from __future__ import annotations

from offspec.loaders.placement import Limits
from offspec.loaders.units import format_quantity, format_seconds, format_size

from ..checkpoints.opening import Note
from ..model.rope_config import LONG_FACTORS, ORIGINAL_CONTEXT, SHORT_FACTORS
from .memory import MemoryOptions
from .plan import Plan


def explain_plan(plan: Plan, link_bytes_per_s: float | None = None) -> list[Note]:
    """What was decided; what was allowed and is not there comes first. link_bytes_per_s: as measured."""
    where = tell_tiers(plan)
    if link_bytes_per_s is not None:
        seconds = format_seconds(plan.stream_bytes / link_bytes_per_s)
        where += f", which takes {seconds} at {format_quantity(link_bytes_per_s, 'B/s')} (measured)"
    context = Note(f"context {plan.context} tokens (room for the KV cache was made for as many)")
    return [*_missing(plan.demand.limits, plan.demand.options), context, *_rope_factors(plan), Note(where)]


def _rope_factors(plan: Plan) -> list[Note]:
    """Which of LongRoPE's were chosen by the context, see `ModelConfig.for_context`."""
    rope = plan.demand.target.config.rope
    if rope.kind != "longrope" or rope.scaling[SHORT_FACTORS] == rope.scaling[LONG_FACTORS]:
        return []
    original = rope.scaling[ORIGINAL_CONTEXT]
    if plan.context <= original:
        return [Note(f"LongRoPE's factors for texts of up to {original} tokens, as the context is no longer")]
    told = f"LongRoPE's factors for texts of more than {original} tokens, as the context is longer"
    return [Note(f"{told}; --context {original} or less for the others", advice=True)]


def tell_tiers(plan: Plan) -> str:
    """How many layers lie where, and what of them is moved."""
    p, num_layers = plan.placement, len(plan.layers)
    if not p.streamed:
        return f"all {num_layers} layers stay in memory; nothing is moved in a pass"
    return f"of {num_layers} layers {plan.tiers}; each pass moves {format_size(plan.stream_bytes)}"


def _missing(limits: Limits, options: MemoryOptions) -> list[Note]:
    """What was allowed, but cannot be used."""
    notes: list[Note] = []
    for flag, allowed, limit in (("--vram", options.vram, limits.device), ("--ram", options.ram, limits.ram)):
        if allowed is not None and limit is None:
            notes.append(Note(f"{flag} is ignored on the CPU", advice=True))
        elif allowed is not None and limit is not None and limit < allowed:
            free = f"the {format_size(limit)} that are free"
            notes.append(Note(f"{flag} {format_size(allowed)} is more than {free}; no more is used", advice=True))
    return notes
