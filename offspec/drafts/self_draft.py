"""The target as its own draft (`--draft self`): its first layers, and a trained exit layer if there is one.

`model.early_exit` computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offspec.backends.device_kinds import kind_of
from offspec.loaders.streaming.placement import Item, Placement
from offspec.loaders.streaming.tiers import TieredWeights
from offspec.scheduler.params import MAX_ROWS

from ..checkpoints.exit_layers import (
    ExitFile,
    check_exit_layer,
    found_exits,
    has_weights,
    refuse_experts,
    refuse_foreign,
    refuse_shared_entries,
    refuse_states,
)
from ..checkpoints.model_files import ModelFiles
from ..errors import UsageError
from ..model.block import keeps_states
from ..model.cuda_graphs import RoundBuffers, is_static
from ..model.decoder import Decoder
from ..model.early_exit import EarlyExit, shared_text
from ..model.memory.request_caches import RequestCaches
from ..notes import Note
from ..planning.draft_forecast import Guessing
from ..planning.memory import MemoryUse, Reservation
from ..user_folders import expand_home
from .acceptance import EXIT, EXIT_AGREEMENT, EXIT_LAYER, LOOKUP
from .base import Attach, Draft, OpenRequest
from .model_draft import ModelDraft, guessing_items, state_items
from .without_model import LookupDraft

NAME = "self"
MOST_DIGITS = 9


def layer_number(draft: str) -> int | None:
    """N of `self:N`; None for `self` and `self:FILE`."""
    _, _, text = draft.partition(":")
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


class SelfDraft(ModelDraft):
    """An early exit after the target's first layers.

    Drafting and the target's pass share KV caches, so they do not overlap.
    """

    overlaps = False
    allows_reload = False  # it uses the target's norm and head
    keeps_target_whole = False

    decoder: EarlyExit

    def __init__(self, exit_layer: EarlyExit, name: str = NAME) -> None:
        super().__init__(exit_layer, name)
        self._buffers: RoundBuffers | None = None  # of captured rounds, on a GPU only

    def prepare(self, max_context: int) -> None:
        """Nothing: texts record their rounds."""

    def new_caches(self, target: Decoder, num_tokens: int, num_nodes: int) -> RequestCaches:
        """On a GPU, graphs capture rounds through the target's layers; the exit layer's few kernels are launched."""
        layers = range(self.decoder.num_first)
        if self._buffers is None and kind_of(target.device).records and is_static(target, layers):
            self._buffers = RoundBuffers(target, layers=layers)
        return RequestCaches(*shared_text(target, self.decoder, num_tokens + num_nodes, self._buffers))

    def close(self) -> None:
        self._buffers = None
        super().close()


@dataclass(frozen=True)
class OpenedSelf:
    """The target's first `num_first` layers, and an exit layer's file whose header fits the target, or none."""

    target: ModelFiles
    num_first: int
    file: ExitFile | None
    notes: list[Note]
    models: Sequence[ModelFiles] = ()

    @classmethod
    def open(cls, request: OpenRequest) -> OpenedSelf:
        """With a trained exit layer, or without one: `self:N` uses that after N layers if there is one.

        Raises UsageError, CheckpointError.
        """
        options, number = request.options, layer_number(request.options.draft)
        if options.exit_layer is not None and options.exit_file is not None:
            raise UsageError(
                "`exit_layer` drafts without a trained exit layer, `exit_file` is one; give one of the two"
            )
        target, num_layers = request.target, request.target.config.num_layers
        if options.exit_layer is None and (number is None or number in trained_exits(target)):
            refuse_states(target.config, "an exit layer")
            refuse_shared_entries(target.config)
            refuse_experts(target.config, "an exit layer")
            if not has_weights(target):
                raise UsageError(
                    f"`draft=self` needs the weights of {target.checkpoint.path}, to which its exit layer belongs; "
                    "give `draft=self:N` to plan for an early exit without a trained layer"
                )
            exit_file = _file(request)
            layers = f"the target's first {exit_file.exit_layer} of {num_layers} layers"
            request.notes.append(Note(f"draft: {layers}, and the exit layer {exit_file.path}"))
            return cls(target, exit_file.exit_layer, exit_file, request.notes)
        number = options.exit_layer if number is None else number
        assert number is not None
        refuse_foreign(target.config, f"`draft={options.draft}`")
        options.refuse_exit_file()
        setting = "draft=self:" if options.draft == f"{NAME}:{number}" else "exit_layer="
        check_exit_layer(number, target.config, setting)
        request.notes.append(Note(f"draft: the first {number} of {num_layers} layers, without an exit layer"))
        return cls(target, number, None, request.notes)

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        """The exit layer, its KV cache, what the layers before it keep of drafted nodes, and hidden states.

        The layers before the exit must be resident.
        """
        config, itemsize, num_first = target.config, target.dtype.itemsize, self.num_first
        states = (reservation.num_tokens + MAX_ROWS + reservation.tree) * config.hidden_size * itemsize
        items = [
            Item("exit KV cache", on_device=target.kv_bytes(MAX_ROWS, range(num_first))),
            Item("hidden states", on_device=2 * states),  # the kept states, and a pass's copy
            *guessing_items(config, target),
            *state_items(target, reservation.texts, range(num_first)),
        ]
        if self.file is not None:
            replaced = range(num_first, num_first + 1)  # the exit layer's cache has the shape of this layer's
            entries = target.kv_bytes(reservation.num_tokens + MAX_ROWS, replaced)
            items.append(Item("exit layer", on_device=self.file.num_elements * itemsize + entries))
        return MemoryUse(tuple(items), num_required_resident=num_first)

    def guessing(self, placement: Placement) -> Guessing:
        """A round goes through the first layers and the exit layer, which has the shape of the next one.

        Wrong guesses are as frequent as the training's held-out text says, beside that of the measured exit.
        """
        if self._lacks_experts(placement):
            return Guessing(acceptance=LOOKUP)
        is_captured = placement.limits.kind.records and self.target.packed_form is None
        is_captured &= not keeps_states(self.target.config)
        if self.file is None:
            return Guessing(((self.target, self.num_first),), EXIT, is_captured=is_captured, overlaps=False)
        agreement = EXIT_AGREEMENT if self.file.agreement is None else self.file.agreement
        share = max(1 - agreement, 0.01) / (1 - EXIT_AGREEMENT)
        layers = ((self.target, self.num_first + 1),)
        return Guessing(layers, EXIT_LAYER, share=share, is_captured=is_captured, overlaps=False)

    def _lacks_experts(self, placement: Placement) -> bool:
        """Whether some experts of the target are not on the device."""
        return bool(self.target.stored.experts) and not placement.experts.are_resident

    def load(self, device: torch.device) -> Attach:
        return self._attach

    def _attach(self, target: Decoder) -> Draft:
        """Raises CheckpointError, torch.OutOfMemoryError."""
        if isinstance(target.weights, TieredWeights) and self._lacks_experts(target.weights.placement):
            text = "not all experts are in memory, so layers with experts cannot draft; the draft is n-gram lookup"
            self.notes.append(Note(text, advice=True))
            return LookupDraft()
        if self.file is not None:
            return SelfDraft(EarlyExit(target, self.num_first, self.file.load(target.dtype, target.device)))
        name = f"exit ({self.num_first} of {target.config.num_layers} layers)"
        return SelfDraft(EarlyExit(target, self.num_first, None), name)


def trained_exits(target: ModelFiles) -> list[int]:
    """The numbers of layers before trained exit layers of this target; none without its weights."""
    return found_exits(target) if target.config.is_native and has_weights(target) else []


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
