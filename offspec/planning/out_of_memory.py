"""Handles out of memory on the device: retries once with fewer resident layers, and explains the error in one line.

A plan counts the memory of offspec. Another process, or a fragmented allocator, may use more than the rest. This module
neither loads weights nor generates text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from offspec.loaders.cuda import device_bytes
from offspec.loaders.units import format_size

from ..errors import MemoryLimitError
from .plan import Plan

SHARE = 10  # the second try has 1/SHARE fewer bytes of resident layers, at least one layer less

T = TypeVar("T")


def retry_out_of_memory(attempt: Callable[[], T], make_room: Callable[[str], object]) -> T:
    """Return `attempt()`. If it runs out of device memory, call `make_room(torch's message)` and try again.

    make_room ends the loop: it raises MemoryLimitError if it cannot free more memory.
    """
    while True:
        try:
            return attempt()
        except torch.OutOfMemoryError as exc:
            message = first_line(exc)
        make_room(message)  # outside the handler, whose traceback keeps the attempt's tensors alive


def with_fewer_residents(plan: Plan) -> Plan:
    """The same plan with fewer resident layers. Raises MemoryLimitError if none is resident or it cannot fit."""
    placement, limits = plan.placement, plan.placement.limits
    sizes = [plan.layers[i].resident_bytes for i in placement.resident]
    if not sizes:
        raise MemoryLimitError("no layer is resident, so none can be streamed instead")
    freed = max(max(sizes), sum(sizes) // SHARE)
    if limits.device is None:
        return plan.with_more(ram=placement.ram_bytes - freed - limits.ram)
    return plan.with_more(vram=placement.device_bytes - freed - limits.device)


def explain_out_of_memory(plan: Plan, device: torch.device, message: str) -> str:
    """One line with the planned bytes, the allocated bytes, and the remedy. message: torch's own."""
    limits, placement = plan.placement.limits, plan.placement
    limit, planned, setting = limits.ram, placement.ram_bytes, "ram"
    if limits.device is not None:
        limit, planned, setting = limits.device, placement.device_bytes, "vram"
    peak = f", torch's peak was {format_size(device_bytes(device)[1])}" if device.type == "cuda" else ""
    return (
        f"{device} ran out of memory ({message}): planned {format_size(planned)}, limit {format_size(limit)}{peak}; "
        f"close other programs that use this memory, or set a lower limit (`{setting}`) or a smaller `context`"
    )


def first_line(exc: BaseException) -> str:
    """The first sentence of an error's message, without torch's advice."""
    line = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
    return line.split(". ")[0].rstrip(".")
