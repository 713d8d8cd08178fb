"""Handles out of memory on the device: retries once with fewer resident layers, and explains the error in one line.

A plan counts the memory of offspec. Another process, or a fragmented allocator, may use more than the rest. This module
neither loads weights nor generates text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch

from offspec.backends.device_kinds import kind_of
from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.units import format_size

from ..errors import MemoryLimitError
from .plan import Plan

SHARE = 10  # the second try has 1/SHARE fewer bytes of resident layers, at least one layer less

_MESSAGES = re.compile(
    r"CUDA out of memory"  # torch's allocator
    r"|CUDA error: out of memory|cudaErrorMemoryAllocation"  # the runtime: a graph, or the code of a kernel
    r"|\[CUDA\]: out of memory|CUDA_ERROR_OUT_OF_MEMORY"  # the driver, as Triton calls it
    r"|CU[A-Z]+_STATUS_ALLOC_FAILED"  # cuBLAS and its like, which allocate workspaces of their own
    r"|NVML_SUCCESS == .*CUDACachingAllocator"  # torch's allocator where NVML is missing: its report fails
)
_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation

T = TypeVar("T")


def retry_out_of_memory(attempt: Callable[[], T], make_room: Callable[[str], object]) -> T:
    """Return `attempt()`. If it runs out of device memory, call `make_room(torch's message)` and try again.

    make_room ends the loop: it raises MemoryLimitError if it cannot free more memory.
    """
    while True:
        try:
            return attempt()
        except RuntimeError as exc:
            message = out_of_memory_message(exc)
            if message is None:
                raise
        make_room(message)  # outside the handler, whose traceback keeps the attempt's tensors alive


def out_of_memory_message(exc: RuntimeError) -> str | None:
    """The message by which a library reports that device memory ran out, in one line; None for any other error.

    CUDA can be used after such an error. After those that it calls sticky, such as an illegal address, each further
    call fails, so they must not be taken for it (CUDA Runtime API, cudaError_t: they leave "the process in an
    inconsistent state"). A capture that memory ended raises an error of its own, with the cause as its context.
    """
    error: BaseException | None = exc
    while isinstance(error, RuntimeError):  # it, and those that it was raised from, as long as they are torch's own
        is_coded = getattr(error, "error_code", None) == _MEMORY_ALLOCATION  # torch.AcceleratorError, from torch 2.9
        if is_coded or isinstance(error, torch.OutOfMemoryError) or _MESSAGES.search(str(error)):
            return first_line(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


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
    accelerator = accelerator_of(device)
    peak_bytes = accelerator.held_bytes()[1]
    peak = f", torch's peak was {format_size(peak_bytes)}" if kind_of(device).has_own_memory else ""
    return (
        f"{device} ran out of memory ({message}): planned {format_size(planned)}, limit {format_size(limit)}{peak}; "
        f"close other programs that use this memory, or set a lower limit (`{setting}`) or a smaller `context`"
    )


def first_line(exc: BaseException) -> str:
    """The first sentence of an error's message, without torch's advice."""
    line = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
    return line.split(". ")[0].rstrip(".")
