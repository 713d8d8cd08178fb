"""Loads a model by name: opens and checks its files, plans memory, and loads target and draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import RLock
from weakref import WeakSet

import torch

from offspec.backends.arithmetic import EXACT, FAST, INT8
from offspec.backends.products import in_arithmetic
from offspec.backends.x86.byte_product import FORMS
from offspec.loaders.accelerators.accelerator import Accelerator, accelerator_of
from offspec.loaders.machine.card_choices import keep_kernels
from offspec.loaders.machine.hardware import Rates, pinning_remedy, read_hardware
from offspec.loaders.machine.heap import return_large_blocks
from offspec.loaders.streaming.link import CopyStream
from offspec.loaders.streaming.placement import KV_ITEM, STATES_ITEM, WINDOWS_ITEM, Item
from offspec.loaders.streaming.tiers import TieredWeights
from offspec.loaders.units import format_size
from offspec.scheduler.guessing.retrieval import SuffixIndex
from offspec.scheduler.params import DEFAULT_NODES, SamplingParams

from .checkpoints.load import WeightSettings, decoder_over, load_weights
from .checkpoints.opening import ModelFiles, Note, choose_device, dtype_on, locate
from .checkpoints.recommended_sampling import recommended_sampling
from .drafts.base import Draft, DraftOptions, OpenedDraft, OpenRequest
from .drafts.kinds import open_draft
from .drafts.weighing import Chooser, Scales
from .errors import MemoryLimitError, UsageError
from .load_options import AUTO, LoadOptions
from .model.decoder import Decoder
from .model.exactness import is_exact_by_default, reason_against_exactness, reason_of
from .model.memory.kv_in_ram import EntriesInRam
from .model.memory.sequence_cache import SequenceCache, total_bytes
from .planning.draft_forecast import Guessing, round_s
from .planning.memory import MemoryOptions, MemoryUse, MemoryUser, Reservation
from .planning.out_of_memory import explain_out_of_memory, retry_out_of_memory, with_fewer_residents
from .planning.parked_texts import ParkedTexts
from .planning.plan import Plan, with_faster_residents
from .planning.probe import (
    ProductRates,
    choose_products,
    has_byte_products,
    measure_fused_limits,
    measure_link,
    measure_quick_rates,
    plan_here,
    prepare_exact_products,
    ram_beside_program,
    with_arithmetic,
    with_expert_rates,
)
from .planning.report import explain_experts, explain_packing, explain_plan
from .planning.spilling import spill_watch
from .process import fix_choices, prepare_gpu, set_num_threads
from .text.context_limit import ContextLimit
from .text.lookup_files import lookup_memory_bytes, open_index
from .text.prompt import encode_prompt
from .text.tokenizer import Tokenizer


def memory_options(options: LoadOptions, prompt_tokens: int = 0) -> MemoryOptions:
    """prompt_tokens: of `options.prompt`."""
    limits = (options.vram, options.ram, options.context, options.tree, options.texts, options.kv_cache)
    return MemoryOptions(*limits, prompt_tokens, options.answer_tokens if prompt_tokens else 0)


def draft_options(options: LoadOptions) -> DraftOptions:
    return DraftOptions(
        options.draft,
        options.exit_file,
        options.learn,
        options.learn_file,
        options.needs_draft_model,
        options.exit_layer,
        options.draft_window,
        options.context,
    )


class LoadedTarget:
    """A target in memory, with its plan and measured rates. Engines with different drafts can share one.

    turn: the lock that a request holds while it uses the models. notes: automatic choices and their reasons.
    """

    def __init__(
        self, decoder: Decoder, memory: PlannedMemory | None = None, *, notes: list[Note] | None = None
    ) -> None:
        """memory: the plan of its weights, and the means to load them again with fewer resident layers."""
        self.decoder, self.notes = decoder, notes if notes is not None else list[Note]()
        self.turn = RLock()
        self.is_deterministic = False  # see `LoadOptions.deterministic`
        self.recommended_sampling = SamplingParams()  # by the model's authors
        self.rates: Rates | None = None
        self.link_bytes_per_s: float | None = None
        self.most_context: int | None = None  # tokens of a text, if the plan's are more than somebody wants
        self.plan_without_draft: Plan | None = None  # of a streamed target that has a draft
        self._memory, self._streamed_before = memory, 0
        self._has_weights, self._is_closed = True, False
        self._caches = WeakSet[SequenceCache]()
        self._spill_watch = spill_watch(decoder.device)

    @property
    def plan(self) -> Plan | None:
        """The plan it was loaded by; None without one."""
        return None if self._memory is None else self._memory.plan

    @property
    def max_context(self) -> int:
        """The maximum number of tokens of a text; the plan's may be lower than the model's."""
        planned = self.decoder.config.max_context if self.plan is None else self.plan.context
        return planned if self.most_context is None else min(planned, self.most_context)

    def predict_pass_s(self, width: int) -> float:
        """Predicted seconds of a pass over `width` rows, from the rates measured while loading."""
        assert self.plan is not None
        assert self.rates is not None
        return self.plan.predict_pass_s(self.rates, width)

    def plain_speedup_without_draft(self) -> float | None:
        """How many times as fast a plain pass would be if the draft's memory held layers; None without such a draft.

        By prediction. None also where nothing is streamed.
        """
        if self.plan_without_draft is None or self.rates is None:
            return None
        return self.predict_pass_s(1) / self.plan_without_draft.predict_pass_s(self.rates, 1)

    def predicts_rounds(self, guessing: Guessing) -> Callable[[int], float]:
        """Rows → predicted seconds of a draft round, by the same rates."""
        assert self.plan is not None
        assert self.rates is not None
        rates_of = ProductRates(self.plan.inputs.target, self.rates, self.decoder.device.type)
        return partial(round_s, self.plan, guessing, rates_of)

    def note_once(self, note: Note) -> None:
        """Add a note about a request, unless it stands there already."""
        if note not in self.notes:
            self.notes.append(note)

    def observe_pass(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Compare a pass of `num_rows` rows, after a text of `num_tokens` tokens, with its prediction.

        Only where the driver may move device memory to RAM without a word; `notes` then says so.
        """
        if self._spill_watch is None or self.plan is None or self.rates is None:
            return
        predicted_s = self.plan.predict_pass_s(self.rates, num_rows, num_tokens)
        if (note := self._spill_watch.observe(self.plan, predicted_s, seconds)) is not None:
            self.notes.append(note)

    @property
    def bytes_streamed(self) -> int:
        """Bytes of weights, and of KV entries in RAM, streamed so far."""
        entries = self.decoder.entries_in_ram
        copied = 0 if entries is None else entries.copies.num_bytes
        return self._streamed_before + self.decoder.weights.bytes_streamed + copied

    def make_kv_room(self, cache: SequenceCache, num_entries: int) -> None:
        """Call this before a text's cache grows to `num_entries` entries.

        Memory within the limit that no text's cache needs holds some of the layers on disk. This frees these layers
        as far as the caches need it.
        """
        plan, weights = self.plan, self.decoder.weights
        if plan is None or not isinstance(weights, TieredWeights) or plan.placement.limits.device is not None:
            return
        files = plan.inputs.target
        self._caches.add(cache)
        of_texts = (KV_ITEM, WINDOWS_ITEM, STATES_ITEM)
        planned = sum(item.on_device for item in plan.placement.items if item.name in of_texts)
        needed = files.kv_bytes(num_entries - cache.num_in_beginning)
        taken = total_bytes(self._caches) + (needed if num_entries > cache.capacity else 0)
        unused = plan.placement.limits.ram - plan.placement.ram_bytes
        weights.spare(unused + planned - taken)

    def spare_nothing(self) -> None:
        """Free all layers that are held only until a text's cache needs their memory."""
        if isinstance(self.decoder.weights, TieredWeights):
            self.decoder.weights.spare(0)

    def make_room(self, message: str, free_more: Callable[[], None] = lambda: None) -> None:
        """After device memory ran out, load the weights again with fewer resident layers; possible once.

        `decoder` stays the same object, with new weights. message: torch's error. free_more: called before the weights
        are loaded, to free other memory. Raises MemoryLimitError, with the plan's figures, if this is not possible.
        """
        if self._memory is None:
            raise MemoryLimitError(f"{self.decoder.device} ran out of memory ({message})")
        memory = self._memory
        memory.reduce_residents(message)
        free_more()
        self._streamed_before = self.bytes_streamed
        self.decoder.weights.close()
        accelerator_of(memory.device).release_memory()
        self._has_weights = False
        self.decoder.weights = retry_out_of_memory(memory.load_weights, memory.reduce_residents)
        self.decoder.entries_in_ram = memory.entries_in_ram()
        self._has_weights = True

    def check(self) -> None:
        """Raises UsageError after `close`, MemoryLimitError if the weights could not be loaded again."""
        if self._is_closed:
            raise UsageError("this engine is closed and has no weights; load the model again (Engine.load)")
        if not self._has_weights:
            raise MemoryLimitError(
                "the target is no longer in memory: memory ran out, and its weights could not be loaded again; "
                "load the model again"
            )

    def close(self) -> None:
        """Free the weights and end the read-ahead threads. Repeated calls do nothing."""
        self._is_closed = True
        self.decoder.weights.close()


class PlannedMemory:
    """The plan that a target's weights are loaded by. If memory runs out, it is replaced by one with fewer residents.

    This can happen once while loading, and once afterwards.
    """

    def __init__(
        self, plan: Plan, device: torch.device, notes: list[Note], load_weights: Callable[[Plan], TieredWeights]
    ) -> None:
        """load_weights: loads the target's by a plan; may raise torch.OutOfMemoryError. notes: get one per new plan."""
        self.plan, self.device = plan, device
        self._can_reduce = True
        self._notes, self._load_weights = notes, load_weights
        self._first_failure: str | None = None  # the message of the first out-of-memory error

    def load_weights(self) -> TieredWeights:
        """Load the target's weights by the plan. Raises torch.OutOfMemoryError."""
        return self._load_weights(self.plan)

    def load_decoder(self) -> Decoder:
        """Load the target's weights, and make its decoder. Raises torch.OutOfMemoryError."""
        files, context = self.plan.inputs.target, self.plan.context
        files = replace(files, config=files.config.for_context(context))
        decoder = decoder_over(files, self.load_weights(), self.device)
        decoder.entries_in_ram, decoder.forgets = self.entries_in_ram(), files.forgets
        return decoder

    def entries_in_ram(self) -> EntriesInRam | None:
        """The layers whose KV entries the plan puts in RAM, for caches made from now on."""
        far = self.plan.placement.entries_in_ram
        return EntriesInRam(frozenset(far), self.plan.inputs.target.kv, CopyStream(self.device)) if far else None

    def settle(self, *, can_reduce: bool) -> None:
        """Call this after loading; earlier failures no longer count. can_reduce: `reduce_residents` may be used again.

        It may not if the draft shares the target's weights.
        """
        self._first_failure, self._can_reduce = None, can_reduce

    def reduce_residents(self, message: str) -> None:
        """Plan for fewer resident layers. message: torch's error.

        Raises MemoryLimitError the second time, if no layer is resident, or if `settle` forbade it.
        """
        if not self._can_reduce:
            raise MemoryLimitError(explain_out_of_memory(self.plan, self.device, message))
        if self._first_failure is not None:
            raise MemoryLimitError(f"{self._first_failure}; still out of memory with fewer resident layers")
        self._first_failure = explain_out_of_memory(self.plan, self.device, message)
        accelerator_of(self.device).release_memory()
        try:
            leaner = with_fewer_residents(self.plan)
        except MemoryLimitError as exc:
            raise MemoryLimitError(f"{self._first_failure}; cannot plan with fewer resident layers") from exc
        before, now = len(self.plan.placement.resident), len(leaner.placement.resident)
        self._notes.append(
            Note(f"{self._first_failure}; loaded again with {now} instead of {before} resident layers", advice=True)
        )
        self.plan = leaner


class MachineRates:
    """This machine's rates for a target, measured once for each set of tiers that a plan uses.

    arithmetic: the user's choice (`LoadOptions`).
    """

    def __init__(self, device: torch.device, arithmetic: str = AUTO) -> None:
        self.device, self._arithmetic = device, arithmetic
        self._known: dict[tuple[bool, ...], tuple[float | None, Rates]] = {}
        self._fast: dict[tuple[bool, ...], Rates] = {}

    def measure(self, plan: Plan) -> tuple[float | None, Rates]:
        """Bytes/s of the links that move the streamed layers (None: nothing is streamed), and the rates for `plan`."""
        target, tiers = plan.inputs.target, plan.placement.tiers
        if tiers not in self._known:
            choose_products([(target, plan.placement.is_resident)], self.device)
            link = measure_link(plan, self.device)
            fast = self._fast[tiers] = with_expert_rates(
                measure_quick_rates(target, self.device, link), plan, self.device
            )
            self._known[tiers] = link, with_arithmetic(fast, target, self.device, self.arithmetic(plan))
        return self._known[tiers]

    def arithmetic(self, plan: Plan) -> str:
        """The arithmetic of the plan's target. Raises UsageError if the user's choice cannot be followed."""
        is_streamed = not plan.placement.is_resident
        return choose_arithmetic(self._arithmetic, plan.inputs.target, self.device, is_streamed=is_streamed)

    def of_products(self, plan: Plan) -> ProductRates:
        """The rates of products with the matrices of the plan's target, and of drafts, which need not be exact."""
        _, rates = self.measure(plan)
        return ProductRates(plan.inputs.target, rates, self.device.type, self._fast[plan.placement.tiers])


@dataclass(frozen=True)
class LoadedParts:
    """The parts of an engine."""

    target: LoadedTarget
    tokenizer: Tokenizer
    draft: Draft
    index: SuffixIndex | None


def load(options: LoadOptions) -> LoadedParts:
    """Open, plan and load. Raises a subclass of OffspecError if something cannot be loaded or does not match."""
    if options.threads is not None:
        if options.threads < 1:
            raise UsageError(f"`threads` must be at least 1, not {options.threads}")
        set_num_threads(options.threads)
    return_large_blocks()
    notes: list[Note] = []
    device = choose_device(options.device, notes)
    if accelerator_of(device).has_own_memory:
        keep_kernels()
    if options.deterministic:
        fix_choices()
        notes.append(
            Note(f"deterministic: {DEFAULT_NODES} nodes per tree unless `budget` is given, one text at a time")
        )
    # Check headers and tokenizers of both models first, so that errors appear before gigabytes are read.
    machine = MachineRates(device, options.arithmetic)
    options = replace(options, dtype=dtype_on(options.dtype, read_hardware(device).gpu))
    files, tokenizer, opened = open_models(options, device.type, notes, machine)
    memory = memory_options(options, _prompt_tokens(options, files, tokenizer))
    features, index = list[MemoryUser]([opened]), None
    if options.lookup_files:
        free_bytes = ram_beside_program(read_hardware(device), memory)
        index = open_index(options.lookup_files, tokenizer, free_bytes=free_bytes)
        features.append(LookupIndex(options.lookup_files))
    if options.cache_ram != 0:
        features.append(ParkedTexts(options.cache_ram, ram_beside_program(read_hardware(device), memory)))
    target, draft = _load_models(options, files, opened, features, memory, machine, notes)
    return LoadedParts(target, tokenizer, draft, index)


def _prompt_tokens(options: LoadOptions, files: ModelFiles, tokenizer: Tokenizer) -> int:
    """Tokens of the prompt that will come; 0 if it is not known. Raises the errors of `Engine.generate` for it."""
    if options.prompt is None:
        return 0
    longest = files.config.max_context
    limit = ContextLimit(min(options.context or longest, longest), longest)
    num_tokens = len(encode_prompt(tokenizer, options.prompt(tokenizer), limit))
    limit.room_after(num_tokens)
    return num_tokens


@dataclass(frozen=True)
class LookupIndex:
    """An index of texts for n-gram lookup, as a feature of a plan (`planning.memory.MemoryUser`)."""

    files: Sequence[Path]

    def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
        resident, _ = lookup_memory_bytes(self.files)
        return MemoryUse((Item("lookup index", on_host=resident),))


def open_models(
    options: LoadOptions, device_type: str, notes: list[Note], machine: MachineRates | None = None
) -> tuple[ModelFiles, Tokenizer, OpenedDraft]:
    """Open and check the target, its tokenizer and the draft; loads no weights. Raises a subclass of OffspecError.

    machine: its rates decide where several drafts are possible.
    """
    path = locate(options.model, options.revision, "target")
    files = ModelFiles.open(path, options.dtype, device_type, notes)
    tokenizer = Tokenizer.load(files.checkpoint.tokenizer_path or files.checkpoint.path)
    if options.chats:
        tokenizer.check_chat_template()
    if options.think is not None:
        tokenizer.set_thinking(options.think)
    tokenizer.special_in_text = options.special_in_text
    request = OpenRequest(draft_options(options), files, tokenizer, options.dtype, device_type, notes, options.progress)
    if machine is not None and not options.deterministic:
        hardware, target = read_hardware(machine.device), request.target
        scales = Scales(
            options.model, request, lambda draft: plan_here(target, [draft], hardware, memory_options(options))
        )
        request = replace(request, choose=Chooser(scales, machine.of_products))
    return files, tokenizer, open_draft(options.model, request)


def _load_models(
    options: LoadOptions,
    files: ModelFiles,
    opened: OpenedDraft,
    features: Sequence[MemoryUser],
    options_of_memory: MemoryOptions,
    machine: MachineRates,
    notes: list[Note],
) -> tuple[LoadedTarget, Draft]:
    device, accelerator = machine.device, accelerator_of(machine.device)
    if accelerator.has_own_memory:
        prepare_gpu()
        _limit_memory(accelerator, None)  # what torch cached for a closed engine would count as used
    plan = plan_here(files, features, read_hardware(device), options_of_memory)
    choose_products([(files, plan.placement.is_resident), *((model, True) for model in opened.models)], device)
    link, rates = machine.measure(plan)
    if not options.deterministic:
        plan = with_faster_residents(plan, rates)
    notes += [*explain_plan(plan, link), *explain_experts(plan), *explain_packing(plan)]
    notes += measure_fused_limits([files, *opened.models], device)
    if accelerator.has_own_memory:  # only now: a measurement may take more for a moment than a small model may keep
        _limit_memory(accelerator, plan.placement.limits.device if options.vram is not None else None)
    arithmetic = machine.arithmetic(plan)
    settings = _weight_settings(options, plan, rates, arithmetic)
    memory = PlannedMemory(plan, device, notes, lambda plan: load_planned(plan, device, settings))

    def load_both() -> tuple[Decoder, Draft]:
        attach = opened.load(device)  # the draft first: it is small, so its errors appear early
        decoder = memory.load_decoder()
        decoder.is_exact, decoder.has_byte_rows = settings.is_exact, arithmetic == INT8
        if (reason := reason_of(decoder)) is not None:
            notes.append(Note(f"the text equals plain decoding's up to near-ties: {reason}"))
        draft, guessing = attach(decoder), opened.guessing(memory.plan.placement)
        draft.as_planned = guessing if guessing.layers else None
        return decoder, draft

    decoder, draft = retry_out_of_memory(load_both, memory.reduce_residents)
    memory.settle(can_reduce=draft.allows_reload)
    notes += _unpinned(decoder)
    target = LoadedTarget(decoder, memory, notes=notes)
    target.rates, target.link_bytes_per_s = rates, link
    target.is_deterministic = options.deterministic
    target.recommended_sampling = recommended_sampling(files.checkpoint.generation_config, notes)
    if draft.name is not None and not plan.placement.is_resident:
        target.plan_without_draft = with_faster_residents(plan.without(opened), rates)
    return target, draft


def _limit_memory(accelerator: Accelerator, most: int | None) -> None:
    """Free what torch caches, and let it take at most so many bytes from now on; None: all."""
    accelerator.release_memory()
    accelerator.limit_memory(most)


def _weight_settings(options: LoadOptions, plan: Plan, rates: Rates, arithmetic: str) -> WeightSettings:
    """How the target's weights are loaded; kernels of exact rows are prepared if it uses them."""
    is_exact = arithmetic != FAST
    if is_exact:
        with in_arithmetic(arithmetic):
            prepare_exact_products(plan.inputs.target, is_resident=plan.placement.is_resident)
    return WeightSettings(
        has_far_embedding=True,
        synchronous=options.synchronous,
        is_exact=is_exact,
        expert_choice=None if is_exact else plan.expert_choice(rates),
        progress=options.progress,
    )


def choose_arithmetic(arithmetic: str, files: ModelFiles, device: torch.device, *, is_streamed: bool) -> str:
    """FAST, EXACT or INT8 of a target. Raises UsageError if the user's choice cannot be followed."""
    if arithmetic == AUTO:
        is_exact = is_exact_by_default(files.config, files.dtype, device, is_streamed=is_streamed, kv=files.kv)
        return EXACT if is_exact else FAST
    if arithmetic == FAST:
        return FAST
    if (reason := reason_against_exactness(files.config, files.dtype, device, files.kv)) is not None:
        raise UsageError(f"`arithmetic` {arithmetic} is not possible for this model here: {reason}; omit it")
    if arithmetic == INT8 and not (device.type == "cpu" and has_byte_products(files)):
        raise UsageError(f"`arithmetic` int8 is for GGUF files of {', '.join(FORMS)} on a CPU; omit it")
    return arithmetic


def load_planned(plan: Plan, device: torch.device, settings: WeightSettings) -> TieredWeights:
    """The plan's weights where it puts them. Raises what `load_weights` raises."""
    return load_weights(plan.inputs.target, plan.placement, device, settings)


def _unpinned(decoder: Decoder) -> list[Note]:
    """A note if the system refused to page-lock weights in RAM."""
    if not isinstance(decoder.weights, TieredWeights) or not (unpinned := decoder.weights.unpinned_bytes):
        return []
    refused = f"the system refused to page-lock {format_size(unpinned)} of weights in RAM"
    return [Note(f"{refused}, so copies of them are slower; {pinning_remedy()}", advice=True)]
