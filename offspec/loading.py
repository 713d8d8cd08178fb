"""Loads a model by name: opens and checks its files, plans memory, and loads target and draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from offspec.backends.arithmetic import BYTE_FORMS, EXACT, FAST, INT8
from offspec.backends.choice import backend_of
from offspec.backends.device_kinds import kind_of
from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.machine.hardware import Rates, pinning_remedy, read_hardware
from offspec.loaders.machine.heap import return_large_blocks
from offspec.loaders.streaming.placement import Item
from offspec.loaders.streaming.tiers import TieredWeights
from offspec.loaders.units import format_size
from offspec.scheduler.guessing.retrieval import SuffixIndex
from offspec.scheduler.params import DEFAULT_NODES

from .checkpoints.load import WeightSettings, load_weights
from .checkpoints.model_files import ModelFiles
from .checkpoints.opening import choose_device, dtype_on, locate, open_model
from .checkpoints.recommended_sampling import recommended_sampling
from .drafts.base import Draft, DraftOptions, OpenedDraft, OpenRequest
from .drafts.kinds import open_draft
from .drafts.weighing import Chooser, Scales
from .errors import UsageError
from .load_options import AUTO, LoadOptions
from .loaded_target import LoadedTarget, PlannedMemory
from .model.decoder import Decoder
from .model.exactness import is_exact_by_default, reason_against_exactness, reason_of
from .notes import Note
from .planning.memory import MemoryOptions, MemoryUse, MemoryUser, Reservation
from .planning.out_of_memory import retry_out_of_memory
from .planning.parked_texts import ParkedTexts
from .planning.plan import Plan, with_faster_residents
from .planning.probe import (
    ProductRates,
    has_byte_products,
    measure_fused_limits,
    measure_link,
    measure_quick_rates,
    plan_here,
    prepare_kernels,
    ram_beside_program,
    with_arithmetic,
    with_expert_rates,
)
from .planning.report import explain_experts, explain_packing, explain_plan
from .process import fix_choices, prepare, set_num_threads
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
        return ProductRates(plan.inputs.target, rates, plan.placement.limits.kind, self._fast[plan.placement.tiers])


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
    if options.deterministic:
        fix_choices()
        notes.append(
            Note(f"deterministic: {DEFAULT_NODES} nodes per tree unless `budget` is given, one text at a time")
        )
    # Check headers and tokenizers of both models first, so that errors appear before gigabytes are read.
    machine = MachineRates(device, options.arithmetic)
    options = replace(options, dtype=dtype_on(options.dtype, read_hardware(device).gpu))
    files, tokenizer, opened = open_models(options, notes, machine)
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
    options: LoadOptions, notes: list[Note], machine: MachineRates
) -> tuple[ModelFiles, Tokenizer, OpenedDraft]:
    """Open and check the target, its tokenizer and the draft; loads no weights. Raises a subclass of OffspecError.

    machine: its rates decide where several drafts are possible, unless the engine is deterministic.
    """
    path = locate(options.model, options.revision, "target")
    files = open_model(path, options.dtype, notes)
    tokenizer = Tokenizer.load(files.checkpoint.tokenizer_path or files.checkpoint.path)
    if options.chats:
        tokenizer.check_chat_template()
    if options.think is not None:
        tokenizer.set_thinking(options.think)
    tokenizer.special_in_text = options.special_in_text
    request = OpenRequest(
        draft_options(options), files, tokenizer, options.dtype, notes, options.progress, device=machine.device
    )
    if not options.deterministic:
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
    device = machine.device
    prepare(device)
    _limit_memory(device, None)  # what torch cached for a closed engine would count as used
    plan = plan_here(files, features, read_hardware(device), options_of_memory)
    link, rates = machine.measure(plan)
    if not options.deterministic:
        plan = with_faster_residents(plan, rates)
    notes += [*explain_plan(plan, link), *explain_experts(plan), *explain_packing(plan)]
    notes += measure_fused_limits([files, *opened.models], device)
    # Only now: a measurement may take more for a moment than a small model may keep.
    _limit_memory(device, plan.placement.limits.device if options.vram is not None else None)
    arithmetic = machine.arithmetic(plan)
    settings = _weight_settings(options, plan, rates, arithmetic)
    prepare_kernels([files, *opened.models], backend_of(device, arithmetic))
    memory = PlannedMemory(plan, device, notes, lambda plan: load_planned(plan, device, settings))

    def load_both() -> tuple[Decoder, Draft]:
        attach = opened.load(device)  # the draft first: it is small, so its errors appear early
        decoder = memory.load_decoder()
        decoder.arithmetic = arithmetic
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


def _limit_memory(device: torch.device, most: int | None) -> None:
    """Free what torch caches on a GPU, and let it take at most so many bytes from now on; None: all."""
    if kind_of(device).has_own_memory:
        accelerator_of(device).release_memory()
        accelerator_of(device).limit_memory(most)


def _weight_settings(options: LoadOptions, plan: Plan, rates: Rates, arithmetic: str) -> WeightSettings:
    """How the target's weights are loaded."""
    return WeightSettings(
        has_far_embedding=True,
        synchronous=options.synchronous,
        expert_choice=plan.expert_choice(rates) if arithmetic == FAST else None,
        progress=options.progress,
    )


def choose_arithmetic(arithmetic: str, files: ModelFiles, device: torch.device, *, is_streamed: bool) -> str:
    """FAST, EXACT or INT8 of a target. Raises UsageError if the user's choice cannot be followed."""
    if arithmetic == AUTO:
        is_exact = is_exact_by_default(files.config, files.dtype, device, is_streamed=is_streamed, kv=files.kv)
        return EXACT if is_exact else FAST
    if arithmetic == FAST:
        return FAST
    reason = reason_against_exactness(files.config, files.dtype, device, files.kv) or backend_of(device, EXACT).fault()
    if reason is not None:
        raise UsageError(f"`arithmetic` {arithmetic} is not possible for this model here: {reason}; omit it")
    if arithmetic == INT8 and not (kind_of(device).multiplies_stored and has_byte_products(files)):
        raise UsageError(f"`arithmetic` int8 is for GGUF files of {', '.join(BYTE_FORMS)} on a CPU; omit it")
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
