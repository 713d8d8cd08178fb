"""From a model's name to what an engine runs: files are opened and checked, memory is planned, weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from weakref import WeakSet

import torch

from offspec.loaders.cuda import limit_memory, release_memory
from offspec.loaders.hardware import Rates, read_hardware
from offspec.loaders.placement import Item
from offspec.loaders.tiers import Progress, TieredWeights
from offspec.loaders.units import format_size
from offspec.scheduler.retrieval import SuffixIndex

from .checkpoints.load import LoadSettings, decoder_over, load_weights
from .checkpoints.opening import ModelFiles, Note, choose_device, locate
from .drafts.base import Draft, DraftOptions, OpenedDraft, OpenRequest
from .drafts.kinds import open_draft
from .errors import MemoryLimitError, UsageError
from .model.block import kv_cache_bytes
from .model.decoder import Decoder
from .model.kv_cache import KVCache
from .planning.memory import MemoryOptions, MemoryUse, MemoryUser, Room
from .planning.out_of_memory import explain_out_of_memory, retry_out_of_memory, with_fewer_residents
from .planning.plan import Plan
from .planning.probe import (
    choose_products,
    measure_fused_limits,
    measure_link,
    measure_quick_rates,
    plan_here,
    ram_beside_program,
)
from .planning.report import explain_plan
from .process import set_num_threads
from .text.lookup_files import lookup_memory_bytes, open_index
from .text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadOptions:
    """What `Engine.load` is asked for.

    model: a folder, a hub id, or `builtin`. draft: auto (the built-in pair's own; lookup for other models), none,
    lookup (no model: what stood in the text before, and what the target said), self (the target's first layers and the
    exit layer of exit_file, or the one that was made last for this target), or a model like `model`. revision: of a
    hub id.
    device: auto, cpu, cuda or cuda:N. dtype: auto, bf16, fp16, fp32. threads: of a CPU; None leaves torch's own number.
    vram, ram: bytes that may be used; None is what is free. context: tokens to make room for; None is up to
    `planning.plan.DEFAULT_CONTEXT`. tree: nodes to make room for beside them, where a larger budget will be asked for
    than is found by itself. synchronous: read each streamed layer when it is needed (the plain twin of reading ahead).
    progress(bytes_done, bytes_total) follows the loading of what stays. lookup_files: text files to look up in as well.
    learn: the draft may learn between requests (`Engine.learn`). learn_file: what it learnt before; without `learn` it
    must be there. chats: it will be given messages; a model without a chat template is refused before its weights are
    read. needs_draft_model: joint acceptance will be asked for; a draft without a model is refused as early.
    """

    model: str = "builtin"
    draft: str = "auto"
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    vram: int | None = None
    ram: int | None = None
    context: int | None = None
    tree: int | None = None
    synchronous: bool = False
    progress: Progress | None = None
    lookup_files: Sequence[str | Path] = ()
    learn: bool = False
    learn_file: str | Path | None = None
    exit_file: str | Path | None = None
    chats: bool = False
    needs_draft_model: bool = False

    @property
    def memory(self) -> MemoryOptions:
        return MemoryOptions(self.vram, self.ram, self.context, self.tree)

    @property
    def drafting(self) -> DraftOptions:
        learn_file, exit_file = (None if file is None else Path(file) for file in (self.learn_file, self.exit_file))
        return DraftOptions(self.draft, exit_file, self.learn, learn_file, self.needs_draft_model)


class LoadedTarget:
    """A target in memory, and what was planned and measured for it. Engines that draft for it differently share one.

    turn: held by whoever computes with the models. notes: what was chosen automatically, with its reason.
    """

    def __init__(
        self, decoder: Decoder, memory: PlannedMemory | None = None, *, notes: list[Note] | None = None
    ) -> None:
        """memory: how its weights were loaded, and can be again with fewer resident layers."""
        self.decoder, self.notes = decoder, notes if notes is not None else list[Note]()
        self.turn = RLock()
        self.rates: Rates | None = None
        self.link_bytes_per_s: float | None = None
        self._memory, self._streamed_before = memory, 0
        self._has_weights, self._is_closed = True, False
        self._caches = WeakSet[KVCache]()

    @property
    def plan(self) -> Plan | None:
        """Where everything went; None where it was not loaded by a plan."""
        return None if self._memory is None else self._memory.plan

    @property
    def max_context(self) -> int:
        """The most a text may have in tokens: memory may have been planned for less than the model could take."""
        return self.decoder.config.max_context if self.plan is None else self.plan.context

    def predict_pass_s(self, width: int) -> float:
        """Seconds that a pass over `width` tokens may take, by what was measured at the start."""
        assert self.plan is not None
        assert self.rates is not None
        return self.plan.predict_pass_s(self.rates, width)

    @property
    def bytes_streamed(self) -> int:
        """All that was moved for it so far."""
        return self._streamed_before + self.decoder.weights.bytes_streamed

    def make_kv_room(self, cache: KVCache, num_entries: int) -> None:
        """To be called before a text's cache grows to so many entries.

        What may be used and no text's cache needs holds layers that were planned to come from disk; these give it back.
        """
        plan, weights = self.plan, self.decoder.weights
        if plan is None or not isinstance(weights, TieredWeights) or plan.placement.limits.device is not None:
            return
        files = plan.demand.target
        self._caches.add(cache)
        planned, needed = (
            kv_cache_bytes(files.config, count, files.dtype.itemsize)
            for count in (plan.context + plan.tree, num_entries)
        )
        taken = sum(other.nbytes for other in self._caches) + (needed if num_entries > cache.capacity else 0)
        unused = plan.placement.limits.ram - plan.placement.ram_bytes
        weights.spare(unused + planned - taken)

    def spare_nothing(self) -> None:
        """What holds layers only as long as no text needs it is given back."""
        if isinstance(self.decoder.weights, TieredWeights):
            self.decoder.weights.spare(0)

    def make_room(self, told: str, give_up: Callable[[], None] = lambda: None) -> None:
        """Load the weights anew with fewer resident layers, after device memory ran out; once.

        Whoever holds the decoder has the new weights. told: what torch said. give_up: lets go of what else can be made
        anew, before weights are loaded. Raises MemoryLimitError, explained, where nothing more can be done.
        """
        if self._memory is None:
            raise MemoryLimitError(f"{self.decoder.device} ran out of memory ({told})")
        memory = self._memory
        memory.give_up_residents(told)
        give_up()
        self._streamed_before = self.bytes_streamed
        self.decoder.weights.close()
        release_memory(memory.device)
        self._has_weights = False
        self.decoder.weights = retry_out_of_memory(memory.load_weights, memory.give_up_residents)
        self._has_weights = True

    def check(self) -> None:
        """Raises UsageError after `close`, MemoryLimitError where the weights could not be loaded anew."""
        if self._is_closed:
            raise UsageError("this engine is closed: its weights are gone; load the model again with Engine.load")
        if not self._has_weights:
            raise MemoryLimitError(
                "the target is no longer in memory: it ran out, and the weights could not be loaded again; load it anew"
            )

    def close(self) -> None:
        """Let go of the weights, and join what reads ahead; once more does nothing."""
        self._is_closed = True
        self.decoder.weights.close()


class PlannedMemory:
    """The plan by which a target's weights are loaded; where it was not enough, a leaner one.

    Once while loading, and once more afterwards.
    """

    def __init__(
        self, plan: Plan, device: torch.device, notes: list[Note], load_weights: Callable[[Plan], TieredWeights]
    ) -> None:
        """load_weights: the target's, by a plan; may raise torch.OutOfMemoryError. notes: of what is given up."""
        self.plan, self.device = plan, device
        self._can_give_up = True
        self._notes, self._load_weights = notes, load_weights
        self._first_failure: str | None = None  # the first one, explained

    def load_weights(self) -> TieredWeights:
        """The target's, by the plan. Raises torch.OutOfMemoryError."""
        return self._load_weights(self.plan)

    def load_decoder(self) -> Decoder:
        """The same, with the decoder over them."""
        files, context = self.plan.demand.target, self.plan.context
        return decoder_over(replace(files, config=files.config.for_context(context)), self.load_weights(), self.device)

    def settle(self, *, can_give_up: bool) -> None:
        """Loading is done: what ran out until now does not count any more. can_give_up: there may be a next time."""
        self._first_failure, self._can_give_up = None, can_give_up

    def give_up_residents(self, told: str) -> None:
        """Plan for fewer resident layers. told: what torch said.

        Raises MemoryLimitError the second time, or where there may be no next one.
        """
        if not self._can_give_up:
            raise MemoryLimitError(explain_out_of_memory(self.plan, self.device, told))
        if self._first_failure is not None:
            raise MemoryLimitError(f"{self._first_failure}; and so it did with fewer layers that stay")
        self._first_failure = explain_out_of_memory(self.plan, self.device, told)
        release_memory(self.device)
        try:
            leaner = with_fewer_residents(self.plan)
        except MemoryLimitError as exc:
            raise MemoryLimitError(f"{self._first_failure}; and so it did with fewer layers that stay") from exc
        before, now = len(self.plan.placement.resident), len(leaner.placement.resident)
        self._notes.append(
            Note(f"{self._first_failure}; loaded again, {now} instead of {before} layers stay", advice=True)
        )
        self.plan = leaner


@dataclass(frozen=True)
class Loaded:
    """What an engine is made of."""

    target: LoadedTarget
    tokenizer: Tokenizer
    draft: Draft
    index: SuffixIndex | None


def load(options: LoadOptions) -> Loaded:
    """Open, plan and load. Raises OffspecError's children for whatever cannot be loaded or does not fit together."""
    if options.threads is not None:
        if options.threads < 1:
            raise UsageError(f"threads must be at least 1, not {options.threads}")
        set_num_threads(options.threads)
    notes: list[Note] = []
    device = choose_device(options.device, notes)
    # Headers and tokenizers of both first, so that what cannot work is refused before gigabytes are read.
    files, tokenizer, opened = open_models(options, device.type, notes)
    features, index = list[MemoryUser]([opened]), None
    if options.lookup_files:
        free_bytes = ram_beside_program(read_hardware(device), options.memory)
        index = open_index(options.lookup_files, tokenizer, free_bytes=free_bytes)
        features.append(LookupIndex(options.lookup_files))
    target, draft = _load_models(options, files, opened, features, device, notes)
    return Loaded(target, tokenizer, draft, index)


@dataclass(frozen=True)
class LookupIndex:
    """An index of texts to look up in, as something that takes memory (`planning.memory.MemoryUser`)."""

    files: Sequence[str | Path]

    def memory_use(self, target: ModelFiles, room: Room) -> MemoryUse:
        resident, _ = lookup_memory_bytes(self.files)
        return MemoryUse((Item("lookup index", on_host=resident),))


def open_models(options: LoadOptions, device_type: str, notes: list[Note]) -> tuple[ModelFiles, Tokenizer, OpenedDraft]:
    """Target, its tokenizer and the draft, checked; nothing is loaded. Raises OffspecError's children."""
    path = locate(options.model, options.revision, "target")
    files = ModelFiles.open(path, options.dtype, device_type, notes)
    tokenizer = Tokenizer.load(files.checkpoint.tokenizer_path or files.checkpoint.path)
    if options.chats:
        tokenizer.check_chat_template()
    request = OpenRequest(options.drafting, files, tokenizer, options.dtype, device_type, notes)
    return files, tokenizer, open_draft(options.model, request)


def _load_models(
    options: LoadOptions,
    files: ModelFiles,
    opened: OpenedDraft,
    features: Sequence[MemoryUser],
    device: torch.device,
    notes: list[Note],
) -> tuple[LoadedTarget, Draft]:
    if device.type == "cuda":  # what torch keeps of an engine that was closed would count as taken
        release_memory(device)
    plan = plan_here(files, features, read_hardware(device), options.memory)
    if device.type == "cuda":
        limit_memory(plan.placement.limits.device if options.vram is not None else None, device)
    link = measure_link(plan, device)
    notes += explain_plan(plan, link)
    choose_products([(files, not plan.placement.streamed), *((model, True) for model in opened.models)], device)
    rates = measure_quick_rates(files, device, link)
    notes += measure_fused_limits([files, *opened.models], device)
    settings = LoadSettings(has_far_embedding=True, synchronous=options.synchronous, progress=options.progress)
    memory = PlannedMemory(plan, device, notes, lambda plan: load_weights(files, plan.placement, device, settings))

    def load_both() -> tuple[Decoder, Draft]:
        attach = opened.load(device)  # first: it is small, and what is wrong with it is known soon
        decoder = memory.load_decoder()
        return decoder, attach(decoder)

    decoder, draft = retry_out_of_memory(load_both, memory.give_up_residents)
    memory.settle(can_give_up=draft.allows_reload)
    notes += _unpinned(decoder)
    target = LoadedTarget(decoder, memory, notes=notes)
    target.rates, target.link_bytes_per_s = rates, link
    return target, draft


def _unpinned(decoder: Decoder) -> list[Note]:
    """What the system did not allow to be page-locked."""
    if not isinstance(decoder.weights, TieredWeights) or not (unpinned := decoder.weights.unpinned_bytes):
        return []
    what = f"the system does not allow {format_size(unpinned)} of weights in RAM to be page-locked"
    remedy = "raise its limit (ulimit -l, the container's)"
    return [Note(f"{what}, so they are copied more slowly; {remedy}", advice=True)]
