"""A draft model or trained head that learns between requests (`learn`): the core's kinds of draft with a `Learner`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from offspec.loaders.streaming.placement import Item

from ..checkpoints.atomic_files import check_writable
from ..checkpoints.model_files import ModelFiles
from ..drafts.base import DraftOptions, Learner, OpenedDraft, OpenRequest
from ..drafts.head_draft import OpenedHead
from ..drafts.model_draft import OpenedModel
from ..errors import UsageError
from ..model.decoder import Decoder
from ..model.heads.head import Head
from ..planning.memory import MemoryUse, Reservation
from . import head_learning
from .lora import SavedAdapter
from .online import Aligner, AlignmentParams, learning_bytes


@dataclass(frozen=True)
class LearningModel(OpenedModel):
    """A draft model that learns."""

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        params, files = AlignmentParams(), self.files
        size = learning_bytes(files.config, files.dtype.itemsize, params)
        return _with_learning(super().memory_use(target, reservation), size, params.buffer_bytes)

    def new_learner(self, decoder: Decoder) -> Learner:
        return _begun(Aligner(decoder), self.options)


@dataclass(frozen=True)
class LearningHead(OpenedHead):
    """A trained head that learns."""

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        sizes = head_learning.learning_bytes(self.files.spec, target.config, target.dtype.itemsize)
        return _with_learning(super().memory_use(target, reservation), *sizes)

    def new_learner(self, head: Head, tensors: Mapping[str, Any]) -> Learner:
        return _begun(head_learning.HeadAligner(head, self.files.spec, tensors), self.options)


def learning_draft(opened: OpenedDraft, request: OpenRequest) -> OpenedDraft:
    """The same draft, which learns. Raises UsageError for one that cannot, or StorageError."""
    options = request.options
    if isinstance(opened, OpenedHead):
        if not opened.files.spec.can_learn:
            raise UsageError(f"a {opened.files.spec.kind} head does not learn (`learn`); omit it")
        kind: type[OpenedModel | OpenedHead] = LearningHead
    elif isinstance(opened, OpenedModel):
        name, config = opened.name, opened.files.config
        if not config.is_native:
            raise UsageError(
                f"the draft {name} runs on transformers' modules, and only offspec's own decoder can learn; "
                "omit `learn` and `learn_file`"
            )
        if config.shares_entries or config.layer_inputs is not None:
            raise UsageError(
                f"the draft {name} cannot learn: training has no layers that share KV entries or have inputs of their "
                f"own (model_type {config.model_type}); omit `learn` and `learn_file`"
            )
        if opened.other is not None:
            raise UsageError(
                f"the draft {name} has another vocabulary than the target, and only a draft with the target's can "
                "learn from it; omit `learn` and `learn_file`"
            )
        kind = LearningModel
    else:
        raise UsageError("only a draft model can learn, and none is loaded; choose one (`draft=PATH`)")
    if options.learn_file is not None:  # checked before anything is loaded
        if options.learn:
            check_writable(options.learn_file)
        if options.learn_file.exists():
            SavedAdapter.read(options.learn_file)
        elif not options.learn:
            raise UsageError(f"the learn file {options.learn_file} does not exist; add `learn` to create it")
    return kind(**{field.name: getattr(opened, field.name) for field in fields(opened)})


def _with_learning(use: MemoryUse, on_device: int, on_host: int) -> MemoryUse:
    return replace(use, items=(*use.items, Item("learning", on_device=on_device, on_host=on_host)))


def _begun(aligner: Aligner, options: DraftOptions) -> Aligner:
    """The aligner with what it learnt before. Raises UsageError for another draft's file."""
    aligner.is_listening = options.learn
    if options.learn_file is not None and options.learn_file.exists():
        aligner.adapter.load(options.learn_file)
    return aligner
