"""Device memory ran out all the same: what was planned, what was taken, and one more try with fewer layers that stay.

Placement foresees what is needed, and `--vram` is held by torch's allocator. What nobody foresees is a program that takes
memory meanwhile, or free memory in pieces too small. Knows nothing of where weights come from or of how text is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from offspec.loaders.cuda import device_bytes, release_memory
from offspec.loaders.units import format_size

from ..checkpoints.opening import ModelFiles, Note
from ..errors import MemoryLimitError
from .plan import Plan, with_more

SHARE = 10  # a tenth of what the layers that stay take is given up for the second try, a layer at least

T = TypeVar("T")


@dataclass(frozen=True)
class Loading(Generic[T]):
    """How something is loaded for a plan, and what the next plan is where that took too much."""

    load: Callable[[Plan], T]
    leaner: Callable[[Plan], Plan]
    device: torch.device

    def within_memory(self, plan: Plan, notes: list[Note]) -> tuple[Plan, T]:
        """Load for `plan`; where memory runs out, once more for the leaner plan. Raises MemoryLimitError, explained."""
        try:
            return plan, self.load(plan)
        except torch.OutOfMemoryError as exc:
            told = first_line(exc)
        # Only here, outside the handler, is nothing left of what was loaded: a traceback keeps all of it.
        return self.again(plan, told, notes)

    def again(self, plan: Plan, told: str, notes: list[Note]) -> tuple[Plan, T]:
        """Load for the plan after `plan`, which was not enough. told: what torch said. Raises MemoryLimitError."""
        shortage = explain(plan, self.device, told)
        release_memory(self.device)
        try:
            leaner = self.leaner(plan)
            loaded = self.load(leaner)
        except (torch.OutOfMemoryError, MemoryLimitError) as exc:
            raise MemoryLimitError(f"{shortage}; and so it did with fewer layers that stay") from exc
        before, now = len(plan.placement.resident), len(leaner.placement.resident)
        notes.append(Note(f"{shortage}; loaded again, {now} instead of {before} layers stay", advice=True))
        return leaner, loaded


def with_fewer_residents(plan: Plan, target: ModelFiles, draft: ModelFiles | None) -> Plan:
    """The same in less memory than `plan` takes, so that fewer layers stay. Raises MemoryLimitError where that cannot be."""
    placement, limits = plan.placement, plan.placement.limits
    sizes = [plan.layers[i].resident_bytes for i in placement.resident]
    if not sizes:
        raise MemoryLimitError("no layer stays that could be given up")
    given_up = max(max(sizes), sum(sizes) // SHARE)
    if limits.device is None:
        return with_more(plan, target, draft, ram=placement.ram_bytes - given_up - limits.ram)
    return with_more(plan, target, draft, vram=placement.device_bytes - given_up - limits.device)


def explain(plan: Plan, device: torch.device, told: str) -> str:
    """What was planned, what was taken, and the remedy, in one line."""
    limits, placement = plan.placement.limits, plan.placement
    limit, planned, option = limits.ram, placement.ram_bytes, "--ram"
    if limits.device is not None:
        limit, planned, option = limits.device, placement.device_bytes, "--vram"
    held = f", torch held {format_size(device_bytes(device)[1])} at most" if device.type == "cuda" else ""
    return (
        f"{device} ran out of memory: {format_size(planned)} were planned of the {format_size(limit)} that may be used{held} "
        f"({told}); close what else uses it, grant less with {option}, or ask for a smaller --context"
    )


def first_line(exc: BaseException) -> str:
    """What an error says, without its advice."""
    line = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
    return line.split(". ")[0].rstrip(".")
