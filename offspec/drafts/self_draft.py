"""The target as its own draft (`--draft self`): its first layers and a trained exit layer (`model.early_exit`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.files.user_folders import expand_home
from offspec.loaders.streaming.placement import Item, Placement
from offspec.scheduler.params import MAX_ROWS

from ..checkpoints.exit_layers import ExitFile, has_weights, refuse_experts, refuse_shared_entries, refuse_states
from ..checkpoints.opening import ModelFiles, Note
from ..errors import UsageError
from ..model.cuda_graphs import RoundBuffers, is_static
from ..model.decoder import Decoder
from ..model.early_exit import EarlyExit, shared_text
from ..model.memory.text_caches import TextCaches
from ..planning.draft_forecast import Guessing
from ..planning.memory import MemoryUse, Room
from .acceptance import EXIT_AGREEMENT, EXIT_LAYER
from .base import Attach, OpenRequest
from .model_draft import ModelDraft, guessing_items

NAME = "self"
MOST_DIGITS = 9


def layer_number(draft: str) -> int | None:
    """N of `self:N`; None for `self` and `self:FILE`."""
    _, _, text = draft.partition(":")
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


class SelfDraft(ModelDraft):
    """An exit layer over the target's first layers.

    Drafting and the target's pass share KV caches, so they do not overlap.
    """

    overlaps = False
    allows_reload = False  # it uses the target's norm and head
    keeps_target_whole = False

    decoder: EarlyExit

    def __init__(self, exit_layer: EarlyExit) -> None:
        super().__init__(exit_layer, NAME)
        self._buffers: RoundBuffers | None = None  # of captured rounds, on a GPU only

    def prepare(self, max_context: int) -> None:
        """Nothing: texts record their rounds."""

    def new_caches(self, target: Decoder, num_tokens: int, num_nodes: int) -> TextCaches:
        """On a GPU, graphs capture rounds through the target's layers; the exit layer's few kernels are launched."""
        layers = range(self.decoder.num_first)
        if self._buffers is None and accelerator_of(target.device).records and is_static(target, layers):
            self._buffers = RoundBuffers(target, layers=layers)
        return TextCaches(*shared_text(target, self.decoder, num_tokens + num_nodes, self._buffers))

    def close(self) -> None:
        self._buffers = None
        super().close()


@dataclass(frozen=True)
class OpenedSelf:
    """An exit layer's file, whose header fits the target."""

    file: ExitFile
    target: ModelFiles
    models: Sequence[ModelFiles] = ()

    @classmethod
    def open(cls, request: OpenRequest) -> OpenedSelf:
        """Open the given exit file, or the newest exit layer for this target. Raises UsageError, CheckpointError."""
        target, options = request.target, request.options
        refuse_states(target.config, "an exit layer")
        refuse_shared_entries(target.config, "an exit layer")
        refuse_experts(target.config, "an exit layer")
        if not has_weights(target):
            raise UsageError(
                f"`draft=self` needs the weights of {target.checkpoint.path}, to which its exit layer belongs; give "
                "`draft=self:N` to plan for an early exit without a trained layer"
            )
        options.refuse_learning()
        exit_file = cls._file(request)
        layers = f"the target's first {exit_file.exit_layer} of {target.config.num_layers} layers"
        request.notes.append(Note(f"draft: {layers}, and the exit layer {exit_file.path}"))
        return cls(exit_file, target)

    @staticmethod
    def _file(request: OpenRequest) -> ExitFile:
        """The file that was given (`exit_file`, `self:FILE`), the exit of `self:N`, or the newest one."""
        options, (_, _, exit_name) = request.options, request.options.draft.partition(":")
        if not exit_name:
            target = request.target
            return ExitFile.find(target) if options.exit_file is None else ExitFile.open(options.exit_file, target)
        if options.exit_file is not None:
            raise UsageError(f"`draft={options.draft}` and `exit_file` both name an exit layer; give one of the two")
        if (number := layer_number(options.draft)) is not None:
            return ExitFile.find(request.target, number)
        return ExitFile.open(expand_home(exit_name), request.target)

    def memory_use(self, target: ModelFiles, room: Room) -> MemoryUse:
        """The exit layer, its KV cache, the drafted nodes' KV entries in the layers before it, and hidden states.

        The layers before the exit must be resident.
        """
        config, itemsize, num_first = target.config, target.dtype.itemsize, self.file.exit_layer
        replaced = range(num_first, num_first + 1)  # the exit layer's cache has the shape of this layer's
        entries = target.kv_bytes(room.num_tokens + MAX_ROWS, replaced)
        entries += target.kv_bytes(MAX_ROWS, range(num_first))
        states = (room.num_tokens + MAX_ROWS + room.tree) * config.hidden_size * itemsize
        items = [
            Item("exit layer", on_device=self.file.num_elements * itemsize),
            Item("exit KV cache", on_device=entries),
            Item("hidden states", on_device=2 * states),  # the kept states, and a pass's copy
            *guessing_items(config, target),
        ]
        return MemoryUse(tuple(items), num_pinned_layers=num_first)

    def guessing(self, placement: Placement) -> Guessing:
        """A round goes through the first layers and the exit layer, which has the shape of the next one.

        Wrong guesses are as frequent as the training's held-out text says, beside that of the measured exit.
        """
        agreement = EXIT_AGREEMENT if self.file.agreement is None else self.file.agreement
        share = max(1 - agreement, 0.01) / (1 - EXIT_AGREEMENT)
        is_captured = placement.limits.device is not None and self.target.packed_form is None
        layers = ((self.target, self.file.exit_layer + 1),)
        return Guessing(layers, EXIT_LAYER, share=share, is_captured=is_captured, overlaps=False)

    def load(self, device: torch.device) -> Attach:
        return lambda target: SelfDraft(EarlyExit(target, self.file.exit_layer, self.file.load(target.dtype, device)))
