"""A shadow: all of the target's layers, the streamed ones as copies in 4, 3 or 2 bits on the device.

SubSpec (2509.18344). `model.layer_draft` computes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from offspec.backends.device_kinds import DeviceKind, kind_of
from offspec.loaders.streaming.placement import SHADOW_ITEM, Item, Placement
from offspec.loaders.streaming.stored_model import StoredModel
from offspec.loaders.streaming.tiers import TieredWeights, load_layer
from offspec.loaders.streaming.weights import LayerView, ViewedLayer
from offspec.scheduler.drafting.drafter import Drafter
from offspec.scheduler.params import tree_room

from ..checkpoints.exit_layers import refuse_experts, refuse_foreign
from ..checkpoints.model_files import ModelFiles
from ..checkpoints.shadows import Shadow, check_bits, find_shadow, make_shadow
from ..errors import UsageError
from ..model.block import has_entries_alone, keeps_states
from ..model.cuda_graphs import RoundBuffers, is_static
from ..model.decoder import CachedDecoder, Decoder
from ..model.layer_draft import LayerDraft, LayerDraftText, WindowOfTarget
from ..model.memory.draft_window import most_entries
from ..model.memory.request_caches import RequestCaches
from ..notes import Note
from ..planning.draft_forecast import Guessing
from ..planning.memory import MemoryUse, Reservation
from ..planning.plan import unpacking_items
from ..user_folders import expand_home
from .acceptance import LOOKUP, SHADOWS
from .base import Attach, Draft, DraftTask, OpenRequest
from .draft_stats import DraftStats
from .model_draft import ModelDraft, check_window, guessing_items, state_items
from .without_model import LookupDraft

SHADOW = "shadow"
DEFAULT_BITS = 4
# Tokens of a prompt that the draft scores itself, so that the first pass has a tree. Reading a longer prompt costs as
# much arithmetic as the target's pass over it; after that pass the draft has the target's entries anyway.
MOST_READ, LESS_READ = 512, 64
# From so long a context on, a shadow on a card copies entries of so many tokens (docs/results/long-texts.md).
LONG_CONTEXT, LONG_WINDOW = 8192, 512
# Nodes pending in the KV cache, whose entries are as large as the target's. A tree of 256 nodes had up to 616.
MOST_ROWS, ROWS_IN_RAM = 1024, 768


@dataclass(frozen=True)
class OwnEntries:
    """The entries beside the target's for which there is room. most_read: the longest prompt that the draft scores
    itself. most_nodes: pending ones.
    """

    most_read: int
    most_nodes: int

    @classmethod
    def of(cls, device: DeviceKind, window: int | None) -> OwnEntries:
        """Fewer where they take RAM from layers; with a window, there is to be little memory beside it."""
        if not device.has_own_memory:
            return cls(LESS_READ, ROWS_IN_RAM)
        return cls(MOST_READ if window is None else LESS_READ, MOST_ROWS)

    @property
    def number(self) -> int:
        return self.most_read + self.most_nodes


class LayersOfTarget(ModelDraft):
    """A loaded draft of the target's own layers."""

    allows_reload = False  # it uses the resident layers

    decoder: LayerDraft
    _buffers: RoundBuffers | None = None  # of captured rounds, on a GPU only

    def prepare(self, max_context: int) -> None:
        if self.window is not None:
            return
        if kind_of(self.decoder.device).records and is_static(self.decoder) and self._buffers is None:
            self._buffers = RoundBuffers(self.decoder)

    def new_caches(self, target: Decoder, num_tokens: int, num_nodes: int) -> RequestCaches:
        if self.window is not None:
            text = CachedDecoder(target, num_tokens + num_nodes)
            return RequestCaches(text, WindowOfTarget(self.decoder, text, self.window, self._own.number))
        capacity = num_tokens + num_nodes + self.num_shared if num_tokens else 0
        text = CachedDecoder(target, capacity, keeps_all=True)
        return RequestCaches(text, LayerDraftText(self.decoder, text, self._buffers), self.num_shared)

    def close(self) -> None:
        self._buffers = None
        super().close()

    @property
    def num_shared(self) -> int:  # type: ignore[override]
        return 0 if self.window is not None else self._own.number

    @property
    def _own(self) -> OwnEntries:
        return OwnEntries.of(kind_of(self.decoder.device), self.window)

    def drafter(self, task: DraftTask, stats: DraftStats) -> Drafter:
        if isinstance(task.text, LayerDraftText | WindowOfTarget):
            task.text.begin(tree_room(task.speculation, kind_of(self.decoder.device).useful_rows))
        task = replace(task, most_read=self._own.most_read, most_rows=self._own.most_nodes)
        return super().drafter(task, stats)


@dataclass(frozen=True)
class OpenedShadow:
    """A shadow whose headers fit the target."""

    shadow: Shadow
    target: ModelFiles
    models: Sequence[ModelFiles]
    notes: list[Note]
    device: DeviceKind
    window: int | None = None

    @classmethod
    def open(cls, request: OpenRequest) -> OpenedShadow:
        """The target's shadow from the cache. Unless it is only planned for, a missing one is made first.

        Raises UsageError, CheckpointError, StorageError.
        """
        target = request.target
        refuse_foreign(target.config, f"`draft={request.options.draft}`")
        request.options.refuse_exit_file()
        refuse_experts(target.config, "a shadow")
        window = _window(request)
        _, _, bits_or_path = request.options.draft.partition(":")
        if bits_or_path and not bits_or_path.isdecimal():
            shadow = Shadow.open(expand_home(bits_or_path), target)
        else:
            shadow = _of_bits(int(bits_or_path[:4] or DEFAULT_BITS), request)
        stored = replace(target.stored, layers=list(shadow.layers))
        packed = replace(target, stored=stored)
        return cls(shadow, target, (packed,), request.notes, kind_of(request.device), window)

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        """Scratch of its own, entries in the target's KV cache, and copies of the layers that will be streamed.

        With a window, the entries are in a cache of its own, and the target's may be in RAM.
        """
        number = OwnEntries.of(self.device, self.window).number
        items = [
            *unpacking_items(self.models[0]),
            *guessing_items(target.config, target, num_waiting=number),
            *state_items(target, reservation.texts, range(target.config.num_layers)),
        ]
        shadow_bytes = self.shadow.layer_bytes(target)
        if self.window is not None:
            num_entries = reservation.texts * (most_entries(self.window) + number)
            items.append(Item("draft KV cache", on_device=target.kv_bytes(num_entries)))
            return MemoryUse(tuple(items), shadow_bytes=shadow_bytes)
        return MemoryUse(
            tuple(items), shadow_bytes=shadow_bytes, target_entries=reservation.texts * number, reads_all_entries=True
        )

    def guessing(self, placement: Placement) -> Guessing:
        """A round runs the copies of the streamed layers, and the resident layers.

        A target that is not streamed has a copy of every layer, or no shadow if there is no room for it.
        """
        copies, layers = self.models[0], len(self.shadow.layers)
        if not placement.streamed and all(item.name != SHADOW_ITEM for item in placement.items):
            return Guessing(acceptance=LOOKUP)
        chosen = len(placement.streamed) or layers
        parts = ((copies, chosen), (self.target, layers - chosen))
        is_usual = not keeps_states(self.target.config)
        is_captured = self.device.records and is_usual and self.window is None
        most_keys = None if self.window is None else most_entries(self.window)
        return Guessing(parts, SHADOWS[self.shadow.bits], chosen / layers, is_captured, is_usual, most_keys)

    def load(self, device: torch.device) -> Attach:
        return self._attach

    def _attach(self, target: Decoder) -> Draft:
        """Raises torch.OutOfMemoryError, CheckpointError."""
        weights = target.weights
        assert isinstance(weights, TieredWeights), "a target that was loaded by a plan"
        placement = weights.placement
        chosen = placement.streamed
        if not chosen and any(item.name == SHADOW_ITEM for item in placement.items):
            chosen = placement.resident
        if not chosen:
            text = "all layers are resident and leave no room for a shadow; the draft is n-gram lookup"
            self.notes.append(Note(text, advice=True))
            return LookupDraft()
        draft = load_shadow(self.shadow, target, chosen)
        draft.window = self.window
        return draft


def _window(request: OpenRequest) -> int | None:
    """Tokens whose entries the shadow copies; None: it reads all of the target's.

    Without a number from the user, copies are made where longer texts would keep much of a card: the target's entries
    may be in RAM then. Raises UsageError.
    """
    config = request.target.config
    window = check_window(request.options.draft_window, config)
    if window is not None and any(config.windows):
        raise UsageError(
            f"`draft_window={window}` copies the target's last KV entries, and layers of this "
            f"{config.model_type} keep their own windows of them; omit it"
        )
    is_long = (request.options.context or 0) >= LONG_CONTEXT
    if window is None and is_long and kind_of(request.device).has_own_memory and has_entries_alone(config):
        return None if any(config.windows) else LONG_WINDOW
    return window


def _of_bits(bits: int, request: OpenRequest) -> Shadow:
    """The shadow in the user's cache, made first if it has to be. Raises UsageError, CheckpointError, StorageError."""
    check_bits(bits)
    target, faults = request.target, list[str]()
    if (shadow := find_shadow(target, bits, faults.append)) is not None:
        return shadow
    if request.tokenizer is None:
        return Shadow.planned(bits, target)
    made = make_shadow(target, bits, progress=request.progress)
    if made.num_resumed < made.num_files:
        because = f", because {faults[0]}" if faults else ""
        request.notes.append(Note(f"made a shadow of {bits} bits for the draft: {made.path}{because}"))
    return Shadow.open(made.path, target)


def load_shadow(shadow: Shadow, target: Decoder, chosen: Collection[int]) -> LayersOfTarget:
    """The draft that has shadows of the layers `chosen`; the others are resident. Raises CheckpointError."""
    layers: list[ViewedLayer] = [
        load_layer(layer, target.dtype, target.device) if i in chosen else i for i, layer in enumerate(shadow.layers)
    ]
    num_elements = StoredModel(list(shadow.layers), {}).scratch_elements((), target.dtype)
    scratch = torch.empty(num_elements, dtype=target.dtype, device=target.device) if num_elements else None
    weights = LayerView(target.weights, layers, scratch)
    name = f"{SHADOW} ({shadow.bits} bits, {len(chosen)} of {len(layers)} layers)"
    return LayersOfTarget(LayerDraft(target, range(len(layers)), weights), name)
