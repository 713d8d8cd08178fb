"""Describes a plan, for notes and for `offspec plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offspec.loaders.streaming.placement import Limits
from offspec.loaders.units import format_quantity, format_seconds, format_size

from ..errors import MemoryLimitError
from ..model.memory.kv_formats import PLAIN
from ..model.rope_config import LONG_FACTORS, ORIGINAL_CONTEXT, SHORT_FACTORS
from ..notes import Note
from .attention_time import attention_shapes
from .memory import AUTO, MemoryOptions
from .plan import DEFAULT_CONTEXT, Plan


def explain_plan(plan: Plan, link_bytes_per_s: float | None = None) -> list[Note]:
    """Notes on a plan; limits above the free memory come first. link_bytes_per_s: as measured."""
    where = tell_tiers(plan)
    if link_bytes_per_s is not None:
        seconds = format_seconds(plan.stream_bytes / link_bytes_per_s)
        where += f", which takes {seconds} at {format_quantity(link_bytes_per_s, 'B/s')} (measured)"
    return [
        *_missing(plan.inputs.limits, plan.inputs.options),
        Note(f"context {plan.context} tokens (the KV cache has room for as many)"),
        *_kv_format(plan),
        *_notes_on_texts(plan),
        Note(where),
    ]


def explain_packing(plan: Plan) -> list[Note]:
    """How matrices that are packed without loss are kept in memory."""
    target = plan.inputs.target
    if not target.stored.has_two_forms:
        return []
    matrices = f"{target.packed_form} matrices"
    if not target.stored.layers[0].packs:
        return [Note(f"{matrices} of resident layers are unpacked once, while they are loaded")]
    return [Note(f"{matrices} stay packed in memory, so that more layers are resident: {plan.tiers}")]


def explain_experts(plan: Plan) -> list[Note]:
    """Whether another program is as good for a mixture whose experts are beside the GPU."""
    if plan.experts is None or plan.placement.experts.are_resident or plan.placement.limits.device is None:
        return []
    same = "for one text, llama.cpp with its experts on the CPU does the same work"
    return [Note(f"{tell_experts(plan)}; {same}; rows of prompts and of several texts share experts", advice=True)]


def _kv_format(plan: Plan) -> list[Note]:
    """The format of KV entries, if it is not attention's own dtype, and why it was chosen."""
    target = plan.inputs.target
    if target.kv.is_plain:
        return []
    sizes = [format_size(each.kv_bytes(plan.context)) for each in (target, target.with_kv(PLAIN))]
    description = f"KV cache in {target.kv.name} bit: {sizes[0]} for {plan.context} tokens instead of {sizes[1]}"
    same = f"the text is that of plain decoding with `kv_cache={target.kv.name}`"
    if plan.inputs.options.kv_cache != AUTO:
        return [Note(f"{description}; {same}")]
    try:
        plain = len(plan.with_kv(PLAIN).placement.resident)
        why = f"so {len(plan.placement.resident)} layers are resident instead of {plain}"
    except MemoryLimitError:
        why = "which would not fit"
    return [Note(f"{description}, {why}; {same}; set `kv_cache=16` for unchanged arithmetic", advice=True)]


def _notes_on_texts(plan: Plan) -> Iterator[Note]:
    """What long texts cost in memory, of a pass, in attention; LongRoPE's factors (`ModelConfig.for_context`)."""
    target, rows, rope = plan.inputs.target, plan.window_rows, plan.inputs.target.config.rope
    if 0 < rows < plan.context:
        sizes = [format_size(each.kv_bytes(plan.context)) for each in (target, replace(target, forgets=False))]
        description = f"layers with a window keep {rows} KV entries of a text: {sizes[0]} instead of {sizes[1]}"
        yield Note(f"{description}; a text that goes back further is read again")
    if far := plan.placement.entries_in_ram:
        size = format_size(plan.entry_stream_bytes)
        yield Note(
            f"the KV entries of {len(far)} streamed layers are in RAM: each pass reads them beside the weights, {size} "
            f"behind a text of {plan.context} tokens; a smaller `context` keeps them on the device"
        )
    shapes = attention_shapes(target, 1, plan.placement.limits.kind)
    reason = next((shape.reason_for_formula for shape in shapes if shape is not None), None)
    if plan.context > DEFAULT_CONTEXT and reason is not None:
        yield Note(
            f"attention to long texts holds its scores in memory, which takes longer: {reason}, and torch has no "
            "kernel for that"
        )
    if rope.kind == "longrope" and rope.scaling[SHORT_FACTORS] != rope.scaling[LONG_FACTORS]:
        original = rope.scaling[ORIGINAL_CONTEXT]
        if plan.context <= original:
            yield Note(f"LongRoPE: factors for texts of up to {original} tokens, by the context")
        else:
            chosen = f"LongRoPE: factors for texts of more than {original} tokens, by the context"
            yield Note(f"{chosen}; a context of {original} or less selects the others (`context`)", advice=True)


def tell_tiers(plan: Plan) -> str:
    """The number of layers in each tier, and the bytes that a pass streams."""
    p, num_layers = plan.placement, len(plan.layers)
    if p.is_resident:
        return f"all {num_layers} layers are resident; nothing is streamed"
    if not p.streamed:
        return f"all {num_layers} layers are resident, without their experts: {tell_experts(plan)}"
    experts = "" if plan.experts is None else f"; {tell_experts(plan)}"
    entries = f", and up to {format_size(plan.entry_stream_bytes)} of KV entries" if p.entries_in_ram else ""
    return f"{num_layers} layers: {plan.tiers}; each pass streams {format_size(plan.stream_bytes)}{entries}{experts}"


def tell_experts(plan: Plan) -> str:
    """How many experts are in memory, of how many, and where the others come from."""
    assert plan.experts is not None
    slots, num = plan.placement.experts, plan.experts.num
    if plan.placement.limits.device is None:
        return f"{slots.device} of {num} experts are in memory; rows read the others that they choose from disk"
    device = f"{slots.device} of {num} experts are on the device"
    if slots.host >= num:
        return f"{device}, and all in RAM, where the CPU computes those of few rows"
    return f"{device}, and {slots.host} in RAM, where the CPU computes those of few rows; others are read from disk"


def _missing(limits: Limits, options: MemoryOptions) -> list[Note]:
    """Notes on limits that have no effect, or exceed the free memory."""
    notes: list[Note] = []
    for name, allowed, limit in (("vram", options.vram, limits.device), ("ram", options.ram, limits.ram)):
        if allowed is not None and limit is None:
            notes.append(Note(f"`{name}` is ignored on the CPU", advice=True))
        elif allowed is not None and limit is not None and limit < allowed:
            exceeds = f"`{name}={format_size(allowed)}` exceeds the free memory"
            notes.append(Note(f"{exceeds}; the limit is {format_size(limit)}", advice=True))
    return notes
