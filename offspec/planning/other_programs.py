"""Estimates what llama.cpp brings with the same weights in the same memory, so that a plan says where it is faster.

It reads each weight that a token needs once: on the card from the card's memory, and else by the CPU from RAM. Layers
and experts are taken to lie as in the plan. docs/results/gpu.md compares the estimates with reports; nothing was run
here.
"""

from __future__ import annotations

from offspec.loaders.formats import StoredWeight
from offspec.loaders.machine.gpus import MEMORY_SHARE
from offspec.loaders.machine.hardware import Rates

from .plan import Plan

READ_SHARE = 0.7  # of the data sheet's rate of a card's memory
# To begin the kernels of a layer; and to hand a layer's rows to the CPU, which has some of its experts, and back.
LAYER_S, HANDED_LAYER_S = 30e-6, 150e-6


def llama_cpp_tokens_per_s(plan: Plan, rates: Rates) -> float | None:
    """About llama.cpp's tokens/s of one text without a draft; None without a card, or if files do not fit in memory.

    plan: without a draft. Files that do not fit are mapped: then its speed depends on what the system keeps of them.
    """
    target, placement, experts = plan.inputs.target, plan.placement, plan.experts
    memory, ram, layer_s = rates.memory_bytes_per_s, rates.ram_bytes_per_s, LAYER_S
    if placement.limits.device is None or memory is None or placement.on_disk or not target.config.is_native:
        return None
    far = sum(plan.layers[i].read_bytes for i in placement.streamed)
    head: StoredWeight = target.stored.shared[target.config.head_name]
    near = sum(layer.read_bytes for layer in plan.layers) - far + sum(info.nbytes for info in head.streamed)
    if experts is not None:
        slots = placement.experts
        on_card = 1.0 if slots.are_resident else slots.device / experts.num
        if not slots.are_resident and slots.host < experts.num:
            return None
        layer_s += 0.0 if slots.are_resident else HANDED_LAYER_S
        used = experts.num_used(1) * experts.read_bytes * experts.num / experts.in_layer
        near += round(used * on_card)
        far += round(used * (1 - on_card))
    if far and not ram:
        return None
    card_s = near * MEMORY_SHARE / READ_SHARE / memory
    return 1 / (card_s + (far / ram if far and ram else 0.0) + layer_s * len(plan.layers))
