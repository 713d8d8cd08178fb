"""Drafts without a model: none, and n-gram lookup with token recycling (`lookup`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offspec.loaders.streaming.placement import Placement
from offspec.scheduler.guessing.lookup import Guesser, PromptLookup

from ..checkpoints.model_files import ModelFiles
from ..planning.draft_forecast import Guessing
from ..planning.memory import MemoryUse, Reservation
from .acceptance import LOOKUP
from .base import Attach, Draft, DraftTask, OpenRequest
from .draft_stats import DraftStats


class WithoutModel(Draft):
    """A draft without files: it is its own `OpenedDraft`."""

    models: Sequence[ModelFiles] = ()

    @classmethod
    def open(cls, request: OpenRequest) -> WithoutModel:
        request.options.refuse_model_needs()
        request.options.refuse_exit_file()
        return cls()

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        return MemoryUse()

    def guessing(self, placement: Placement) -> Guessing:
        return Guessing()

    def load(self, device: torch.device) -> Attach:
        return lambda target: self


class NoDraft(WithoutModel):
    """Proposes nothing, unless other texts for lookup are given."""


class LookupDraft(WithoutModel):
    """Prompt lookup and token recycling: what followed the same tokens before, and the target's earlier predictions."""

    NAME = "lookup"

    def __init__(self) -> None:
        super().__init__(self.NAME)

    def guessing(self, placement: Placement) -> Guessing:
        return Guessing(acceptance=LOOKUP)

    def guessers(self, task: DraftTask, stats: DraftStats) -> list[Guesser]:
        looked_up: list[Guesser] = [PromptLookup(stats.lookups)] if task.speculation.lookup else []
        return [*looked_up, *super().guessers(task, stats), stats.recycling]
