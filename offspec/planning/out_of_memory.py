"""Device memory ran out though it was planned: explained in one line, and the one way to try again.

A plan counts what offspec takes; another process, or a fragmented allocator, may take the rest. The plan after the
first failure keeps fewer layers resident. Knows nothing of where weights come from or of how text is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from offspec.loaders.cuda import device_bytes
from offspec.loaders.units import format_size

from ..errors import MemoryLimitError
from .plan import Plan

SHARE = 10  # a tenth of what the resident layers take is given up for the second try, a layer at least

T = TypeVar("T")


def retry_out_of_memory(attempt: Callable[[], T], make_room: Callable[[str], object]) -> T:
    """`attempt()`; where device memory runs out, `make_room(what torch said)` and `attempt()` again.

    make_room ends it: it raises (MemoryLimitError) where no more room can be made.
    """
    while True:
        try:
            return attempt()
        except torch.OutOfMemoryError as exc:
            told = first_line(exc)
        make_room(told)  # not in the handler: the traceback keeps all that was made


def with_fewer_residents(plan: Plan) -> Plan:
    """The same in less memory, so that fewer layers stay. Raises MemoryLimitError where that cannot be."""
    placement, limits = plan.placement, plan.placement.limits
    sizes = [plan.layers[i].resident_bytes for i in placement.resident]
    if not sizes:
        raise MemoryLimitError("no layer stays that could be given up")
    given_up = max(max(sizes), sum(sizes) // SHARE)
    if limits.device is None:
        return plan.with_more(ram=placement.ram_bytes - given_up - limits.ram)
    return plan.with_more(vram=placement.device_bytes - given_up - limits.device)


def explain_out_of_memory(plan: Plan, device: torch.device, told: str) -> str:
    """What was planned, what was taken, and the remedy, in one line. told: what torch said."""
    limits, placement = plan.placement.limits, plan.placement
    limit, planned, option = limits.ram, placement.ram_bytes, "--ram"
    if limits.device is not None:
        limit, planned, option = limits.device, placement.device_bytes, "--vram"
    held = f", torch held {format_size(device_bytes(device)[1])} at most" if device.type == "cuda" else ""
    return (
        f"{device} ran out of memory: {format_size(planned)} were planned of the {format_size(limit)} that may be used"
        f"{held} ({told}); close what else uses it, allow less with {option}, or ask for a smaller --context"
    )


def first_line(exc: BaseException) -> str:
    """What an error says, without its advice."""
    line = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
    return line.split(". ")[0].rstrip(".")
