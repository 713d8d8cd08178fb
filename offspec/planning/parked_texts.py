"""RAM for the KV caches of earlier conversations (`model.memory.text_pool`), as a feature of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from offspec.loaders.streaming.placement import Item

from ..checkpoints.model_files import ModelFiles
from .memory import MemoryUse, Reservation
from .plan import Plan

SHARE, CONTEXTS = 16, 4  # by default 1/SHARE of the free RAM, and at most the KV caches of so many contexts


@dataclass(frozen=True)
class ParkedTexts:
    """num_bytes: the user's limit; None for the default. free_bytes: RAM that the plan may use."""

    num_bytes: int | None
    free_bytes: int

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        return MemoryUse((Item("earlier conversations", on_host=self.most_bytes(target, reservation)),))

    def most_bytes(self, target: ModelFiles, reservation: Reservation) -> int:
        """The most bytes that parked texts may take."""
        if self.num_bytes is not None:
            return self.num_bytes
        of_context = target.kv_bytes(reservation.context)
        return min(self.free_bytes // SHARE, CONTEXTS * of_context)


def parked_bytes(plan: Plan | None) -> int:
    """The most bytes that parked texts may take by a plan; 0 if it has none."""
    features = () if plan is None else plan.inputs.features
    return sum(
        feature.most_bytes(plan.inputs.target, plan.reservation)
        for feature in features
        if plan is not None and isinstance(feature, ParkedTexts)
    )
