"""Drafts without a model: nothing at all (`none`), and what stood in the text before (`lookup`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offspec.scheduler.lookup import Guesser, PromptLookup

from ..checkpoints.opening import ModelFiles
from ..planning.memory import MemoryUse, Room
from .base import Attach, Draft, DraftTask, OpenRequest
from .learnt import EstimatesAndRecall


class WithoutModel(Draft):
    """A draft that has nothing to open: it is its own `OpenedDraft`."""

    models: Sequence[ModelFiles] = ()

    def memory_use(self, target: ModelFiles, room: Room) -> MemoryUse:
        return MemoryUse()

    def load(self, device: torch.device) -> Attach:
        return lambda target: self


class NoDraft(WithoutModel):
    """Guesses nothing, unless there are texts to look up in."""

    @classmethod
    def open(cls, request: OpenRequest) -> NoDraft:
        request.options.refuse_model_needs()
        request.options.refuse_learning()
        request.options.refuse_exit_file()
        return cls()


class LookupDraft(WithoutModel):
    """Guesses what followed the same tokens earlier in the text, and what the target said after the same token."""

    NAME = "lookup"

    def __init__(self) -> None:
        super().__init__(self.NAME)

    @classmethod
    def open(cls, request: OpenRequest) -> LookupDraft:
        request.options.refuse_model_needs()
        request.options.refuse_learning()
        request.options.refuse_exit_file()
        return cls()

    def guessers(self, task: DraftTask, learnt: EstimatesAndRecall) -> list[Guesser]:
        looked_up: list[Guesser] = [PromptLookup(learnt.lookups)] if task.speculation.lookup else []
        return [*looked_up, *super().guessers(task, learnt), learnt.recycling]
