"""The target as its own draft (`--draft self`): its first layers and a trained exit layer (`model.early_exit`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offspec.loaders.placement import Item
from offspec.scheduler.params import MAX_ROWS

from ..checkpoints.exit_layers import ExitFile, refuse_foreign
from ..checkpoints.opening import ModelFiles, Note
from ..errors import UsageError
from ..model.block import kv_cache_bytes
from ..model.decoder import Decoder
from ..model.early_exit import EarlyExit, shared_text
from ..model.text_caches import TextCaches
from ..planning.memory import MemoryUse, Room
from .base import Attach, OpenRequest
from .model_draft import ModelDraft, guessing_items

NAME = "self"


class SelfDraft(ModelDraft):
    """An exit layer over the target's first layers.

    Drafting and the pass share their caches, so they do not overlap.
    """

    overlaps = False
    allows_reload = False  # norm and head are the target's own

    decoder: EarlyExit

    def __init__(self, exit_layer: EarlyExit) -> None:
        super().__init__(exit_layer, NAME)

    def prepare(self, max_context: int) -> None:
        """No graph captures its rounds: they walk through the target's layers."""

    def new_caches(self, target: Decoder, num_tokens: int, num_nodes: int) -> TextCaches:
        return TextCaches(*shared_text(target, self.decoder, num_tokens + num_nodes))


@dataclass(frozen=True)
class OpenedSelf:
    """An exit layer whose header fits the target."""

    file: ExitFile
    models: Sequence[ModelFiles] = ()

    @classmethod
    def open(cls, request: OpenRequest) -> OpenedSelf:
        """The exit layer that was asked for, or the one made last for this target.

        Raises UsageError, CheckpointError.
        """
        target, options = request.target, request.options
        refuse_foreign(target.config)
        if request.tokenizer is None:
            raise UsageError(
                "--draft self is not planned for: plan with --draft none, and add an exit layer to what stays"
            )
        options.refuse_learning()
        found = ExitFile.find(target) if options.exit_file is None else ExitFile.open(options.exit_file, target)
        layers = f"the first {found.exit_layer} of {target.config.num_layers} layers"
        request.notes.append(Note(f"draft: {layers} and {found.path}"))
        return cls(found)

    def memory_use(self, target: ModelFiles, room: Room) -> MemoryUse:
        """An exit layer, its KV cache, the drafted nodes' entries of the layers before it, and their hidden states.

        The layers before the exit have to stay.
        """
        config, itemsize, num_first = target.config, target.dtype.itemsize, self.file.exit_layer
        behind = range(num_first, num_first + 1)  # the exit layer's cache is like that of the layer it stands for
        entries = kv_cache_bytes(config, room.context + MAX_ROWS, itemsize, behind)
        entries += kv_cache_bytes(config, MAX_ROWS, itemsize, range(num_first))
        states = (room.context + MAX_ROWS + room.tree) * config.hidden_size * itemsize
        items = [
            Item("exit layer", on_device=self.file.num_elements * itemsize),
            Item("exit KV cache", on_device=entries),
            Item("hidden states", on_device=2 * states),  # what is kept, and a pass's copy of it
            *guessing_items(config, target),
        ]
        return MemoryUse(tuple(items), num_pinned_layers=num_first)

    def load(self, device: torch.device) -> Attach:
        return lambda target: SelfDraft(EarlyExit(target, self.file.exit_layer, self.file.load(target.dtype, device)))
