"""Several drafts of one target (`--draft B --draft C`): B scores what smaller models guess for it.

Staged speculation (2308.04623), cascade drafting (2312.11462) and Minions (2402.15678) on one seam: smaller drafts
guess ahead of the first one (`scheduler.drafting.model_guesser`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from offspec.loaders.streaming.placement import Placement
from offspec.scheduler.drafting.drafter import Drafter
from offspec.scheduler.drafting.model_guesser import ModelGuesser

from ..checkpoints.opening import ModelFiles
from ..drafts.base import Attach, Draft, DraftTask, Listener, OpenedDraft
from ..drafts.learnt import EstimatesAndRecall
from ..drafts.model_draft import ModelDraft, OpenedModel
from ..drafts.recall import RecallingText
from ..drafts.without_model import WithoutModel
from ..errors import UsageError
from ..model.decoder import Decoder
from ..model.memory.text_caches import DraftText, TextCaches
from ..planning.drafting import Guessing
from ..planning.memory import MemoryUse, Room

SEPARATOR = " + "  # of the drafts' names


class SeveralDrafts(Draft):
    """A draft of any kind with a model, and small models that guess for it."""

    def __init__(self, first: Draft, others: Sequence[ModelDraft]) -> None:
        super().__init__(SEPARATOR.join(str(draft.name) for draft in (first, *others)))
        self.first, self.others = first, others
        self.files, self.decoder, self.aligner = first.files, first.decoder, first.aligner
        self.overlaps, self.allows_reload = first.overlaps, first.allows_reload
        self.keeps_target_whole, self.target_layers = first.keeps_target_whole, first.target_layers
        self.num_shared = first.num_shared

    @property
    def learn_file(self) -> Path | None:
        return self.first.learn_file

    def prepare(self, max_context: int) -> None:
        for draft in (self.first, *self.others):
            draft.prepare(max_context)

    def new_caches(self, target: Decoder, num_tokens: int, num_nodes: int) -> TextCaches:
        caches = self.first.new_caches(target, num_tokens, num_nodes)
        caches.beside = [draft.new_text(num_tokens) for draft in self.others]
        return caches

    def new_learnt(self, target: Decoder, predict_pass_s: Callable[[int], float] | None) -> EstimatesAndRecall:
        learnt = self.first.new_learnt(target, predict_pass_s)
        learnt.beside = [draft.new_learnt(target, predict_pass_s) for draft in self.others]
        return learnt

    def drafter(self, task: DraftTask, learnt: EstimatesAndRecall) -> Drafter:
        """Raises UsageError where the first draft would guess alone: a baseline's tree, or lossy acceptance."""
        speculation = task.speculation
        if speculation.tree != "best-first" or speculation.is_lossy:
            wanted = f"accept={speculation.accept}" if speculation.is_lossy else f"tree={speculation.tree}"
            raise UsageError(f"`{wanted}` uses one draft, and {self.name} are several; omit it, or give one draft")
        smaller = [
            self._guesser(text, task, own_learnt) for text, own_learnt in zip(task.beside, learnt.beside, strict=True)
        ]
        return self.first.drafter(replace(task, smaller=smaller), learnt)

    def _guesser(self, text: DraftText, task: DraftTask, learnt: EstimatesAndRecall) -> ModelGuesser:
        recalling = None
        if learnt.recall is not None and task.speculation.recall:
            recalling = RecallingText(text, task.target, learnt.recall)
        return ModelGuesser(recalling or text, task.request, task.speculation, learnt, recalling)

    def new_listener(self) -> Listener:
        return self.first.new_listener()

    def close(self) -> None:
        for draft in (self.first, *self.others):
            draft.close()


@dataclass(frozen=True)
class OpenedSeveral:
    """Drafts whose files are checked."""

    first: OpenedDraft
    others: Sequence[OpenedModel]

    @property
    def models(self) -> Sequence[ModelFiles]:
        return (*self.first.models, *chain.from_iterable(draft.models for draft in self.others))

    def memory_use(self, target: ModelFiles, room: Room) -> MemoryUse:
        """That of all drafts. Their passes run one after the other, so the largest workspace counts."""
        first, *others = (draft.memory_use(target, room) for draft in (self.first, *self.others))
        return replace(
            first,
            items=tuple(chain(first.items, *(use.items for use in others))),
            workspace_bytes=max(use.workspace_bytes for use in (first, *others)),
        )

    def guessing(self, placement: Placement) -> Guessing:
        """The first draft's: what the others bring beside it is not predicted."""
        return self.first.guessing(placement)

    def load(self, device: torch.device) -> Attach:
        first, *others = [draft.load(device) for draft in (self.first, *self.others)]

        def attach(target: Decoder) -> Draft:
            main, small = first(target), [other(target) for other in others]
            models = [draft for draft in small if isinstance(draft, ModelDraft)]
            if isinstance(main, WithoutModel):  # a shadow for which there was no room
                main, *models = models
            return SeveralDrafts(main, models) if models else main

        return attach


def open_several(drafts: Sequence[OpenedDraft], names: Sequence[str]) -> OpenedSeveral:
    """Combine opened drafts, of which the first one drafts. Raises UsageError for kinds that cannot be combined."""
    first, *others = drafts
    if isinstance(first, WithoutModel):
        raise UsageError(
            f"`draft={names[0]}` has no model that could score what the others guess; name a draft with a model "
            "first (n-gram lookup is on beside any draft)"
        )
    models = list[OpenedModel]()
    for draft, name in zip(others, names[1:], strict=True):
        if not isinstance(draft, OpenedModel):
            raise UsageError(
                f"`draft={name}` cannot guess for another draft, only a small model can; name it first, or alone"
            )
        models.append(draft)
    return OpenedSeveral(first, models)
