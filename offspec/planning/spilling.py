"""Notices that the driver keeps device memory in RAM: a resident target's passes take far longer than predicted.

On Windows, and so in WSL, the driver moves memory to RAM when a card is full, instead of reporting that memory ran out
("CUDA - Sysmem Fallback Policy", https://nvidia.custhelp.com/app/answers/detail/a_id/5490). Reads of it go
through the link, which is thirty times slower than the card's memory. Nothing else tells: no error, no counter.
"""

from __future__ import annotations

from collections import deque

import torch

from offspec.backends.device_kinds import kind_of
from offspec.loaders.machine.hardware import may_spill

from ..notes import Note
from .plan import Plan

SLOWER = 3.0  # times as long as predicted
NUM_PASSES = 5  # each of them; one quick pass shows that nothing is spilled
LAUNCHES_S = 1e-3  # per layer, at most, for launching its kernels, which predictions leave out


class SpillWatch:
    """The last passes of a target, compared with their predictions. It gives its note once."""

    def __init__(self) -> None:
        self._slowness = deque[float](maxlen=NUM_PASSES)  # seconds, as a multiple of the predicted ones
        self._has_told = False

    def observe(self, plan: Plan, predicted_s: float, seconds: float) -> Note | None:
        """Count a pass; returns a note if memory seems to be spilled. Plans that stream anything do not count."""
        if self._has_told or not plan.placement.is_resident:
            return None
        self._slowness.append((seconds - LAUNCHES_S * len(plan.layers)) / predicted_s)
        slowness = min(self._slowness)
        if len(self._slowness) < NUM_PASSES or slowness < SLOWER:
            return None
        self._has_told = True
        return Note(
            f"passes take {slowness:.0f} times as long as predicted, as if the driver kept some of the card's memory "
            'in RAM; in the NVIDIA control panel, set "CUDA - Sysmem Fallback Policy" to "Prefer No Sysmem Fallback", '
            "or set a lower `vram`",
            advice=True,
        )


def spill_watch(device: torch.device) -> SpillWatch | None:
    """A watch where the driver may move the device's memory to RAM; None elsewhere."""
    return SpillWatch() if kind_of(device).has_own_memory and may_spill() else None
