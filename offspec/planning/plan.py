"""Plans a target and its features: what must be in memory, where each part goes, and how long a pass takes.

This module turns a model's shapes into bytes; `loaders.streaming.placement` gets these numbers alone: of KV entries and
of a shadow, the bytes for each layer. Pure functions: nothing is read, measured or allocated. `planning.probe`
measures, and `loading` carries out a plan.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from offspec.backends.device_kinds import DeviceKind
from offspec.backends.gpu import slice_elements
from offspec.backends.on_gpu import GGUF_WITH_KERNELS, most_packed_rows
from offspec.loaders.machine.hardware import Hardware, Rates
from offspec.loaders.streaming.device_experts import ExpertChoice
from offspec.loaders.streaming.placement import (
    KV_ITEM,
    SHADOW_ITEM,
    STATES_ITEM,
    WINDOWS_ITEM,
    ExpertsCost,
    ExpertTimes,
    Item,
    Limits,
    PassRates,
    PinnedLayers,
    Placement,
    Tier,
    UnitCost,
    place,
    predict_experts_s,
    predict_pass_s,
    used_share,
)
from offspec.loaders.streaming.stored_model import StoredUnit

from ..checkpoints.model_files import ModelFiles
from ..errors import ContextLengthError, MemoryLimitError, UsageError
from ..model.block import memory_layouts
from ..model.decoder import activation_bytes
from ..model.memory.kv_cache import KVLayout
from ..model.memory.kv_formats import EIGHT_BIT, KV_FORMATS, KVFormat
from ..model.memory.window_layers import most_rows
from ..model.row_logits import HEAD_ROWS
from .attention_time import seconds_of_attention, seconds_per_element
from .memory import AUTO, MemoryOptions, MemoryUse, MemoryUser, Reservation, add_up

DEFAULT_CONTEXT = 4096  # a longer one is the default where it costs nothing
CONTEXT_STEP = 1024
LEAST_LAYERS_OF_EXPERTS = 2  # times the experts of a row, which are in memory at once
MIN_CONTEXT = 512  # the smallest default context; a smaller one would be of little use
WORKSPACE_BYTES = 64 * 2**20  # samplers, the tokenizer and the allocator's rounding
COMPARED_WIDTH = 16  # rows of the pass by which plans are compared
SPARE = 0.05  # share of the free memory left for other programs, if the user sets no limit
# KV entries of streamed layers go to RAM if a pass over half a context then moves so much less, which is a share.
LEAST_MOVED_LESS = 0.05
PROGRAM_ITEM, EMBEDDING_ITEM = "program", "embedding"
# Kernels that are launched for one layer; and seconds to launch those of an expert whose format no kernel multiplies
# for all experts at once: on an H200 a layer that used 8 took 3.15 ms (docs/LOG.md).
LAYER_LAUNCHES, EAGER_EXPERT_S = 75, 0.35e-3


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan.

    features: these need memory beside the target. program_bytes: RAM that the process already holds. packs: whether
    matrices that have two forms stay packed in resident layers if not all layers can be resident; more of them are
    then. None: as long as nothing else was found to be faster.
    """

    target: ModelFiles
    features: tuple[MemoryUser, ...]
    limits: Limits
    options: MemoryOptions
    program_bytes: int
    packs: bool | None = None

    @property
    def is_packing(self) -> bool:
        return self.target.stored.has_two_forms if self.packs is None else self.packs


@dataclass(frozen=True)
class PassWork:
    """Elements that a pass multiplies: of one layer's matrices, of its matrices dequantised for each use, of the head.

    expert_elements: of a layer's experts, not counted in layer_elements. A row uses expert_share of them.
    kept_elements: of a resident layer's matrices that are dequantised for each use.
    """

    layer_elements: int
    packed_elements: int
    head_elements: int
    expert_elements: int = 0
    expert_share: float = 1.0
    kept_elements: int = 0

    @classmethod
    def of(cls, target: ModelFiles) -> PassWork:
        config, sums = target.config, target.elements + Counter(experts=target.stored.num_expert_weights)
        matrices, packed, experts, kept = (
            sums[name] // len(target.stored.layers) for name in ("matrices", "packed", "experts", "kept")
        )
        head = config.vocab_size * config.hidden_size
        return cls(matrices, packed, head, experts, config.expert_share, kept)


@dataclass(frozen=True)
class Plan:
    """Where the target's layers go, each of which is a unit, and the memory planned beside them.

    `context` is the maximum number of tokens of a text, `tree` the maximum number of nodes of a tree beside it.
    kv_entries: of the target's KV cache for all texts and trees, and for drafts that share it.
    """

    inputs: PlanInputs
    reservation: Reservation
    placement: Placement
    layers: tuple[UnitCost, ...]
    work: PassWork
    kv_entries: int

    @property
    def context(self) -> int:
        return self.reservation.context

    @property
    def tree(self) -> int:
        return self.reservation.tree

    @property
    def usual_tokens(self) -> int:
        """Tokens before a pass in predictions: half of a long context that was asked for; else few, 0."""
        return self.context // 2 if self.inputs.options.context and self.context > DEFAULT_CONTEXT else 0

    @property
    def tiers(self) -> str:
        """The number of layers in each tier, such as "32 resident, 48 in RAM"."""
        counts = Counter(self.placement.places)
        return ", ".join(f"{counts[tier]} {tier.value}" for tier in Tier if tier in counts)

    @property
    def stream_bytes(self) -> int:
        """Bytes of weights that a pass streams."""
        return sum(self.layers[i].read_bytes for i in self.placement.streamed)

    @property
    def entry_stream_bytes(self) -> int:
        """Bytes of KV entries that a pass streams beside them, behind a text as long as the context."""
        entries, _, _ = _text_bytes(self.inputs.target, self.context, 1)
        return sum(entries[i] for i in self.placement.entries_in_ram)

    @cached_property
    def window_rows(self) -> int:
        """KV entries that a text keeps at most in a layer that drops those outside of its window; 0 without these."""
        target = self.inputs.target
        layouts = (each for layer in memory_layouts(target.config, forgets=target.forgets) for each in layer)
        windows = (layout.window for layout in layouts if isinstance(layout, KVLayout) and layout.window is not None)
        return max(map(most_rows, windows), default=0)

    def predict_pass_s(self, rates: Rates, width: int, num_tokens: int | None = None) -> float:
        """Seconds of one pass over `width` rows (chain and tree) in the steady state.

        num_tokens: of the text before; None is `usual_tokens`.
        """
        head_s = self.work.head_elements * seconds_per_element(rates.matmul_flops, min(width, HEAD_ROWS))
        if num_tokens is None:
            num_tokens = self.usual_tokens
        return self._pass_s(rates, self._layers_s(rates, width, num_tokens), width, head_s, num_tokens)

    def link_s(self, rates: Rates) -> float:
        """Seconds to move the streamed layers, without computation."""
        return self._pass_s(rates, [0.0] * len(self.layers), 1)

    def _layers_s(self, rates: Rates, width: int, num_keys: int) -> list[float]:
        """Seconds of arithmetic in each layer, attention and experts on their way included."""
        resident, work, experts_s = set(self.placement.resident), self.work, self._experts_s(rates, width)
        if experts_s is not None:
            work = replace(work, expert_elements=0)
        kind = self.placement.limits.kind
        attention_s = seconds_of_attention(self.inputs.target, rates, width, num_keys, kind)
        # Rows of a streamed target are exact: its matrices are unpacked first.
        if kind.multiplies_stored or self.placement.streamed:
            kept_s, streamed_s = (
                layer_s(work, rates, width, unpacked) for unpacked in (work.kept_elements, work.packed_elements)
            )
        else:
            kept_s = streamed_s = resident_layer_s(self.inputs.target, work, rates, width)
        each_s, least_s = experts_s or 0.0, LAYER_LAUNCHES * kind.launch_s
        form, experts, slots = self.inputs.target.packed_form, self.experts, self.placement.experts
        if experts is not None and form is not None and form not in GGUF_WITH_KERNELS and kind.launch_s:
            # Experts are launched one by one.
            on_device = 1.0 if slots.are_resident else slots.device / experts.num
            least_s += on_device * experts.num_used(width) * EAGER_EXPERT_S
        return [
            max((kept_s if i in resident else streamed_s) + attention_s[i], least_s) + each_s
            for i in range(len(self.layers))
        ]

    def _experts_s(self, rates: Rates, width: int) -> float | None:
        """Seconds of a layer's experts, on average over all layers; None if all are resident, or each is not a unit."""
        experts = self.experts
        if experts is None or self.placement.experts.are_resident:
            return None
        rows = experts.rows_of_each(width)
        element_s = seconds_per_element(rates.matmul_flops, rows)
        host_s = seconds_per_element(rates.host_matmul_flops, rows) if rates.host_matmul_flops else math.inf
        times = ExpertTimes(
            experts.elements * element_s,
            experts.elements * host_s,
            experts.read_bytes / (rates.host_to_device_bytes_per_s or math.inf),
            experts.read_bytes / (rates.disk_bytes_per_s or math.inf),
        )
        share = experts.num / experts.in_layer / len(self.layers)  # of layers that have experts
        return share * predict_experts_s(experts, self.placement.experts, times, width)

    def expert_choice(self, rates: Rates) -> ExpertChoice | None:
        """The costs by which the CPU beside a GPU computes some experts; None if they are not known, or it does not."""
        experts, flops, link = self.experts, rates.host_matmul_flops, rates.host_to_device_bytes_per_s
        if experts is None or self.placement.experts.are_resident or not flops or not link:
            return None
        elements = experts.elements
        return ExpertChoice(lambda rows: elements * seconds_per_element(flops, rows), experts.read_bytes / link)

    @cached_property
    def experts(self) -> ExpertsCost | None:
        """The bytes of the target's experts, if each is a unit."""
        return experts_cost(self.inputs.target)

    def _pass_s(
        self, rates: Rates, layers_s: Sequence[float], width: int, head_s: float = 0.0, num_keys: int = 0
    ) -> float:
        disk = rates.disk_bytes_per_s or math.inf
        link = rates.host_to_device_bytes_per_s if self.placement.limits.device is not None else None
        compute_s = (*layers_s[:-1], layers_s[-1] + head_s)
        pass_rates = PassRates(compute_s, disk, link)
        return predict_pass_s(self.placement, self.layers, pass_rates, width, num_keys / self.kv_entries)

    def with_more(self, *, vram: int = 0, ram: int = 0) -> Plan:
        """The plan if the limits were higher by these bytes. Raises MemoryLimitError."""
        limits = self.inputs.limits
        device = None if limits.device is None else limits.device + vram
        return _plan_for(self.reservation, replace(self.inputs, limits=Limits(device, limits.ram + ram)))

    def with_target(self, target: ModelFiles) -> Plan:
        """The plan for the same model in another format. Raises MemoryLimitError."""
        target = target.with_kv(self.inputs.target.kv)
        return _plan_for(self.reservation, replace(self.inputs, target=target, packs=None))

    def with_kv(self, kv: KVFormat) -> Plan:
        """The plan with another format of the target's KV entries. Raises MemoryLimitError."""
        return _plan_for(self.reservation, replace(self.inputs, target=self.inputs.target.with_kv(kv)))

    def without(self, feature: MemoryUser) -> Plan:
        """The plan if this feature took no memory: more layers may be resident."""
        others = tuple(each for each in self.inputs.features if each is not feature)
        return _plan_for(self.reservation, replace(self.inputs, features=others))

    def with_texts(self, num_texts: int) -> Plan:
        """The plan with KV entries for so many texts that share passes. Raises MemoryLimitError."""
        return _plan_for(replace(self.reservation, texts=num_texts), self.inputs)

    @cached_property
    def largest_context(self) -> int:
        """The maximum context, in tokens, that fits the same memory; more layers may be streamed for it."""
        longest = self.inputs.target.config.max_context

        def is_too_long(context: int) -> bool:
            try:
                _plan_for(replace(self.reservation, context=context), self.inputs)
            except MemoryLimitError:
                return True
            return False

        candidates = range(self.context + 1, longest + 1)
        return self.context + bisect_left(candidates, True, key=is_too_long)

    def first_context_with_entries_in_ram(self) -> int | None:
        """The shortest context for which KV entries of streamed layers are in RAM; None if none is."""

        def spills(context: int) -> bool:
            try:
                return bool(_plan_for(replace(self.reservation, context=context), self.inputs).placement.entries_in_ram)
            except MemoryLimitError:
                return True

        longest = self.largest_context
        first = 1 + bisect_left(range(longest), True, key=lambda shorter: spills(shorter + 1))
        return first if first <= longest else None


def make_plan(
    target: ModelFiles,
    features: Sequence[MemoryUser],
    limits: Limits,
    options: MemoryOptions,
    program_bytes: int,
) -> Plan:
    """Place the target's layers within `limits`, beside its KV cache, the features, and everything else.

    program_bytes: RAM that the process already holds. The default context is DEFAULT_CONTEXT, halved until it fits, or
    a longer one that costs nothing (`_grown`), or one that holds the request that will come. The automatic format of KV
    entries is 16 bit. It is 8 bit if a longer context than DEFAULT_CONTEXT was asked for, and would else cost resident
    layers, or not fit. Raises MemoryLimitError, UsageError for a context above the model's maximum, and
    ContextLengthError for a prompt that no context within the limits holds.
    """
    wanted = min(options.prompt + options.answer_tokens, target.config.longest_alike(options.prompt + 1))
    if options.context is None and wanted:
        make = partial(make_plan, target, features, limits, program_bytes=program_bytes)
        return _plan_for_request(wanted, options, make)
    inputs = PlanInputs(target, tuple(features), limits, options, program_bytes)
    if options.kv_cache != AUTO:
        return _plan_in_room(replace(inputs, target=target.with_kv(KV_FORMATS[options.kv_cache])))
    try:
        plan = _plan_in_room(inputs)
    except MemoryLimitError:
        if options.context is not None and options.context > DEFAULT_CONTEXT:
            with suppress(MemoryLimitError):
                return _plan_in_room(replace(inputs, target=target.with_kv(EIGHT_BIT)))
        raise
    # An 8-bit cache, if the context asked for costs resident layers and this returns some of them.
    context = plan.inputs.options.context
    if context is None or context <= DEFAULT_CONTEXT or not plan.placement.streamed:
        return plan
    usual, packed = _plan_for(replace(plan.reservation, context=DEFAULT_CONTEXT), plan.inputs), plan.with_kv(EIGHT_BIT)
    num_residents, in_usual, in_packed = (len(each.placement.resident) for each in (plan, usual, packed))
    return packed if num_residents < min(in_usual, in_packed) else plan


def _plan_for_request(wanted: int, options: MemoryOptions, make: Callable[..., Plan]) -> Plan:
    """The default plan, or if its context is shorter than `wanted`, as if that had been asked for.

    make: `make_plan` for other `options`.
    """
    usual = make(options=replace(options, prompt=0, answer_tokens=0))
    if usual.context >= wanted:
        return usual
    with suppress(MemoryLimitError):
        return make(options=replace(options, context=wanted))
    if usual.context > options.prompt:
        return usual
    raise ContextLengthError(
        f"the prompt has {options.prompt} tokens, and the memory that may be used holds a context of "
        f"{usual.largest_context}; shorten the prompt, or allow more memory (`vram`, `ram`)"
    )


def _plan_in_room(inputs: PlanInputs) -> Plan:
    """The plan for the context asked for, or for the default context."""
    target, limits, options = inputs.target, inputs.limits, inputs.options
    longest, most = target.config.max_context, limits.kind.useful_rows
    tree = max(options.tree or 0, min(most, target.config.most_nodes))
    if options.context is not None:
        if options.context > longest:
            raise UsageError(f"`context={options.context}` exceeds the model's maximum of {longest}; set a smaller one")
        return _plan_for(Reservation(options.context, tree, options.texts, limits.kind), inputs)
    context = min(longest, DEFAULT_CONTEXT)
    while True:
        try:
            plan = _plan_for(Reservation(context, tree, options.texts, limits.kind), inputs)
            return _grown(plan) if context == DEFAULT_CONTEXT else plan
        except MemoryLimitError:
            if context // 2 < MIN_CONTEXT:
                raise
            context //= 2


def _grown(plan: Plan) -> Plan:
    """The plan with the longest context that costs no speed, up to the model's own.

    With twice its KV entries, each layer and expert would still lie where it does: a cache that grows is copied, and
    other programs may need memory, too.
    """

    def costs(context: int) -> bool:
        try:
            return _places(_plan_for(replace(plan.reservation, context=2 * context), plan.inputs)) != _places(plan)
        except MemoryLimitError:
            return True

    longest = plan.inputs.target.config.longest_alike(plan.context)
    longer = [*range(plan.context + CONTEXT_STEP, longest, CONTEXT_STEP), longest]
    if longest <= plan.context or costs(longer[0]):
        return plan
    num_free = bisect_left(longer, True, key=costs) if costs(longest) else len(longer)
    return _plan_for(replace(plan.reservation, context=longer[num_free - 1]), plan.inputs)


def _places(plan: Plan) -> tuple[object, ...]:
    """What decides how fast a plan's passes are, but for the length of texts."""
    placement = plan.placement
    names = [item.name for item in placement.items]
    return plan.layers, placement.places, placement.slots, placement.experts, placement.entries_in_ram, names


def with_faster_residents(plan: Plan, rates: Rates) -> Plan:
    """The plan with resident matrices that have two forms packed or unpacked, whichever has the faster pass.

    Packed, more layers are resident, and each pass unpacks them.
    """
    if plan.placement.is_resident or not plan.inputs.target.stored.has_two_forms:
        return plan
    try:
        other = _plan_for(plan.reservation, replace(plan.inputs, packs=not plan.inputs.is_packing))
    except MemoryLimitError:  # layers that must be resident do not fit in the other form
        return plan
    return min((plan, other), key=lambda either: either.predict_pass_s(rates, COMPARED_WIDTH))


def limits_of(hardware: Hardware, options: MemoryOptions, own_bytes: int) -> Limits:
    """The bytes that may be used: the user's limit, at most what is free; by default a little less than what is free.

    own_bytes: RAM of this process alone. It is no longer free, but counts as usable.
    """
    free_ram = hardware.ram.available_bytes + own_bytes
    ram = int(free_ram * (1 - SPARE)) if options.ram is None else min(options.ram, free_ram)
    if hardware.gpu is None:
        return Limits(None, ram)
    free = int(hardware.gpu.free_bytes * (1 - SPARE))
    return Limits(free if options.vram is None else min(options.vram, hardware.gpu.free_bytes), ram)


def all_resident(model: ModelFiles) -> Placement:
    """The placement of a draft: all layers are resident."""
    size, costs = resident_bytes(model), [layer.cost(model.dtype) for layer in model.stored.layers]
    return place(costs, [], Limits(None, size), experts=experts_cost(model))


def _plan_for(reservation: Reservation, inputs: PlanInputs) -> Plan:
    """Matrices are kept packed only where layers are streamed: plain ones are multiplied faster."""
    if not inputs.is_packing:
        return _plan_of(reservation, replace(inputs, target=inputs.target.keeping(packed=False)))
    with suppress(MemoryLimitError):
        plain = _plan_of(reservation, replace(inputs, target=inputs.target.keeping(packed=False)))
        if plain.placement.is_resident:
            return plain
    return _plan_of(reservation, replace(inputs, target=inputs.target.keeping(packed=True)))


def _plan_of(reservation: Reservation, inputs: PlanInputs) -> Plan:
    """With the KV entries of streamed layers in RAM, where they do not fit on the device, or cost too many residents.

    A byte of entries on the device saves a pass over a full context as much as a byte of weights does, and saves less
    with shorter texts. So beyond the default context RAM is better, if the gain is worth it.
    """
    uses = [feature.memory_use(inputs.target, reservation) for feature in inputs.features]
    # Layers with a window drop KV entries outside of it, unless a draft reads them, too.
    forgets = not any(use.is_of_target_layers for use in uses)
    if forgets != inputs.target.forgets:
        inputs = replace(inputs, target=inputs.target.forgetting(forgets=forgets))
        uses = [feature.memory_use(inputs.target, reservation) for feature in inputs.features]
    may_spill = inputs.limits.device is not None and reservation.context > DEFAULT_CONTEXT
    if not may_spill or any(use.reads_all_entries for use in uses):
        return _placed(reservation, inputs, uses)
    try:
        near = _placed(reservation, inputs, uses)
    except MemoryLimitError:
        return _placed(reservation, inputs, uses, spills=True)
    if not near.placement.streamed:
        return near
    with suppress(MemoryLimitError):
        far = _placed(reservation, inputs, uses, spills=True)
        (disk, moved), (near_disk, near_moved) = _moved(far), _moved(near)
        if disk <= near_disk and moved < (1 - LEAST_MOVED_LESS) * near_moved:
            return far
    return near


def _moved(plan: Plan) -> tuple[int, int]:
    """Bytes that a pass over half a context reads from disk, and brings to the device."""
    from_disk = sum(plan.layers[i].read_bytes for i in plan.placement.on_disk)
    return from_disk, plan.stream_bytes + plan.entry_stream_bytes // 2


def _placed(reservation: Reservation, inputs: PlanInputs, uses: Sequence[MemoryUse], *, spills: bool = False) -> Plan:
    """spills: the KV entries of streamed layers are in RAM, as far as the device has no room for them."""
    target = inputs.target
    num_entries = reservation.num_tokens + reservation.tree + sum(use.target_entries for use in uses)
    pinned = PinnedLayers(sum(use.num_required_resident for use in uses))
    costs, items = [layer.cost(target.dtype) for layer in target.stored.layers], _items(reservation, inputs, uses)
    if shadow_bytes := next((use.shadow_bytes for use in uses if use.shadow_bytes), ()):
        costs = [replace(cost, shadow_bytes=nbytes) for cost, nbytes in zip(costs, shadow_bytes, strict=True)]
    entries, windows, states = _text_bytes(target, num_entries, reservation.texts)
    experts = experts_cost(target)
    if states:
        items.append(Item(STATES_ITEM, on_device=states))
    if windows:
        items.append(Item(WINDOWS_ITEM, on_device=windows))
    if spills:
        costs = [replace(cost, entry_bytes=nbytes) for cost, nbytes in zip(costs, entries, strict=True)]
    else:
        items.append(Item(KV_ITEM, on_device=sum(entries)))
    try:
        placement = _place(costs, items, inputs.limits, pinned, experts)
    except MemoryLimitError:
        if not spills:
            raise
        # RAM may be too small for the entries; without resident layers, more of them are on the device.
        placement = _place(costs, items, inputs.limits, replace(pinned, most_free=0), experts)
    if not placement.streamed and (shadows := sum(cost.shadow_bytes for cost in costs)):
        # A model that fits has a shadow of every layer, if that fits beside it.
        with suppress(MemoryLimitError):
            with_shadow = _place(costs, [*items, Item(SHADOW_ITEM, on_device=shadows)], inputs.limits, pinned, experts)
            placement = placement if with_shadow.streamed else with_shadow
    return Plan(inputs, reservation, placement, tuple(costs), PassWork.of(target), num_entries)


def _text_bytes(target: ModelFiles, num_entries: int, num_texts: int) -> tuple[list[int], int, int]:
    """Bytes of each layer's KV entries, and of what stays on the device: entries within windows, and states."""
    entries, windows, states = list[int](), 0, 0
    for layer in memory_layouts(target.config, forgets=target.forgets):
        entries.append(0)
        for layout in layer:
            nbytes = target.kv.memory_bytes(layout, num_entries, target.dtype.itemsize, num_texts)
            if not isinstance(layout, KVLayout):
                states += nbytes
            elif layout.window is None:
                entries[-1] += nbytes
            else:
                windows += nbytes
    return entries, windows, states


def experts_cost(model: ModelFiles) -> ExpertsCost | None:
    """The bytes of a model's experts; None if it has none, or they belong to their layers."""
    costs, shape = model.stored.expert_costs(model.dtype), model.config.experts
    if not costs or shape is None:
        return None
    return ExpertsCost(
        len(costs),
        max(cost.slot_bytes for cost in costs),
        sum(cost.read_bytes for cost in costs) // len(costs),
        sum(cost.resident_bytes for cost in costs),
        min(LEAST_LAYERS_OF_EXPERTS * shape.num_used, len(costs)),
        shape.num_used / shape.num,
        shape.num,
        model.stored.num_expert_weights // len(costs),
    )


def _place(
    costs: list[UnitCost], items: list[Item], limits: Limits, pinned: PinnedLayers, experts: ExpertsCost | None = None
) -> Placement:
    """`place`; if layers are on disk, the embedding stays on disk too, is read by row, and needs no memory."""
    without = [item for item in items if item.name != EMBEDDING_ITEM]
    try:
        placement = place(costs, items, limits, pinned, experts)
    except MemoryLimitError:
        leaner = place(costs, without, limits, pinned, experts)
        if not leaner.on_disk:
            raise
        return leaner
    # If all layers were resident without the embedding, it would have to be in memory too, and it does not fit.
    if placement.on_disk and (leaner := place(costs, without, limits, pinned, experts)).on_disk:
        return leaner
    return placement


def _items(reservation: Reservation, inputs: PlanInputs, uses: Sequence[MemoryUse]) -> list[Item]:
    """Everything but the target's layers and its KV cache."""
    target, config, kind = inputs.target, inputs.target.config, inputs.limits.kind
    shared = {n: StoredUnit({n: w}).cost(target.dtype).resident_bytes for n, w in target.stored.shared.items()}
    workspace = max([pass_bytes(target, reservation), *(use.workspace_bytes for use in uses)])
    items = [
        Item(PROGRAM_ITEM, on_host=inputs.program_bytes + WORKSPACE_BYTES, on_device=kind.workspace_bytes),
        Item("activations", on_device=workspace),
    ]
    tables = (*config.row_tables, *(() if config.tied_head else (config.embedding_name,)))
    if tables:
        items.append(Item(EMBEDDING_ITEM, on_host=sum(shared.pop(name) for name in tables)))
    items.append(Item("head", on_device=sum(shared.values())))
    items += [*unpacking_items(target), *head_items(target, kind)]
    return add_up([*items, *(item for use in uses for item in use.items)])


def unpacking_items(model: ModelFiles) -> list[Item]:
    """Scratch for the largest matrix that is dequantised for each use; each model has its own."""
    scratch = model.stored.scratch_elements(range(model.config.num_layers), model.dtype) * model.dtype.itemsize
    return [Item("unpacking", on_device=scratch)] if scratch else []


def head_items(model: ModelFiles, device: DeviceKind) -> list[Item]:
    """What unpacking a packed head takes, if it is not multiplied as it is stored."""
    head = model.stored.shared.get(model.config.head_name)
    if device.multiplies_stored or head is None or not head.is_packed:
        return []
    return [Item("unpacking the head", on_device=slice_elements(head.shape) * model.dtype.itemsize)]


def resident_bytes(model: ModelFiles) -> int:
    """Bytes of all weights of a model that is fully resident."""
    units = (*model.stored.units, *(StoredUnit({n: w}) for n, w in model.stored.shared.items()))
    return sum(unit.cost(model.dtype).resident_bytes for unit in units)


def draft_items(model: ModelFiles) -> list[Item]:
    """The weights of a draft that is fully resident; tables of rows stay off the device."""
    stored = model.stored.shared
    tables = [StoredUnit({name: stored[name]}).cost(model.dtype).resident_bytes for name in model.config.row_tables]
    return [Item("draft", on_device=resident_bytes(model) - sum(tables), on_host=sum(tables))]


def pass_bytes(model: ModelFiles, reservation: Reservation) -> int:
    """Bytes that a pass allocates at most: of a prompt's part at the end of the context, with a tree."""
    num_keys = reservation.context + reservation.tree
    return activation_bytes(
        model.config, reservation.pass_rows, num_keys, model.dtype.itemsize, model.kv, reservation.device
    )


# ------------------------------------------------------------------------------------------------ prediction


def layer_s(work: PassWork, rates: Rates, width: int, unpacked_elements: int) -> float:
    """Seconds of arithmetic in one layer, with so many elements to dequantise."""
    matmul_s = work.layer_elements * seconds_per_element(rates.matmul_flops, width)
    used = used_share(work.expert_share, width)  # of the experts
    rows = max(1, round(width * work.expert_share / used))
    matmul_s += work.expert_elements * used * seconds_per_element(rates.matmul_flops, rows)
    if not unpacked_elements or not rates.dequantise_elements_per_s:
        return matmul_s
    return matmul_s + unpacked_elements / rates.dequantise_elements_per_s


def resident_layer_s(model: ModelFiles, work: PassWork, rates: Rates, width: int) -> float:
    """Seconds of arithmetic in a resident layer whose rows need not be exact.

    A GPU with a kernel for the format reads packed matrices once for few rows, if that is faster than unpacking them.
    """
    used = 0 if model.packed_form is None else work.expert_elements * used_share(work.expert_share, width)
    unpacked_s = layer_s(work, rates, width, work.kept_elements + round(used))
    if not rates.packed_bytes_per_s or width > most_packed_rows(model.packed_form):
        return unpacked_s
    num_bytes = model.layer_bytes
    if work.expert_elements and (experts := experts_cost(model)) is not None:
        num_bytes += round(experts.num_used(width) * experts.read_bytes)
    fastest = max(rates.matmul_flops.values(), default=math.inf)
    elements = work.layer_elements + work.expert_elements * work.expert_share
    return min(unpacked_s, max(num_bytes / rates.packed_bytes_per_s, 2 * width * elements / fastest))
