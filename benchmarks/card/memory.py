"""Plans for the memory of a card of some size, and plans without resident layers."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from offspec.checkpoints.model_files import ModelFiles
from offspec.drafts.base import DraftOptions
from offspec.drafts.model_draft import OpenedModel
from offspec.loaders.machine.gpus import CONTEXT_BYTES, USABLE_SHARE
from offspec.loaders.machine.hardware import read_memory
from offspec.loaders.streaming.placement import Limits, places_of
from offspec.loaders.units import GIB
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import Plan, make_plan

from .jobs import CONTEXT, Job

ENDLESS = 2**45  # bytes
HALF = "half"  # of the layers are resident, on any device


def cap_of(word: str) -> int | None:
    """GiB of the card that a part is limited to."""
    return None if word == HALF else int(word)


def plan_within(
    job: Job, cap: int | None, target: ModelFiles, draft: ModelFiles, device: torch.device, ram: int | None = None
) -> Plan:
    """A plan for torch's memory on a card of `cap` GiB, and for `ram` bytes or the free RAM. cap None: half of the
    layers are resident, on any device.
    """
    if cap is not None:
        # What is held is planned for, too.
        ram = ram or read_memory().available_bytes + psutil.Process().memory_info().rss
        usable = int(cap * GIB * USABLE_SHARE) - CONTEXT_BYTES - job.vocabulary_bytes(target, draft)
        return plan_for(target, draft, Limits(usable, ram))
    plan = plan_for(target, draft, Limits(None if device.type == "cpu" else ENDLESS, ENDLESS))
    p, step = plan.placement, max(layer.slot_bytes for layer in plan.layers)
    if p.limits.device is None:
        memory, plan = "ram", plan.with_more(ram=p.ram_bytes - ENDLESS)
    else:
        memory, plan = "vram", plan.with_more(vram=p.device_bytes - ENDLESS)
    while 2 * len(plan.placement.resident) > job.target.num_layers:
        plan = plan.with_more(**{memory: -step})
    return plan


def plan_for(target: ModelFiles, draft: ModelFiles | None, limits: Limits) -> Plan:
    beside = [] if draft is None else [OpenedModel("grown", draft, DraftOptions())]
    return make_plan(target, beside, limits, MemoryOptions(context=CONTEXT), psutil.Process().memory_info().rss)


def without_residents(plan: Plan) -> Plan:
    """The plan with every layer streamed."""
    p = plan.placement
    everything = tuple(range(len(plan.layers)))
    in_ram, on_disk = ((), everything) if p.limits.device is None else (everything, ())
    places, slots = places_of(in_ram=in_ram, on_disk=on_disk), replace(p.slots, num=max(2, p.slots.num))
    return replace(plan, placement=replace(p, places=places, slots=slots))
