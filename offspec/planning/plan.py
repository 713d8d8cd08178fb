"""What has to be in memory for a pair of models, where each part goes, and what a pass will take.

The arithmetic of models meets the arithmetic of memory here: `loaders.placement` knows neither a KV cache nor a draft.
Nothing is read or allocated. `Engine.load` does what `make_plan` says; `forecast` says what that would mean.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil
import torch

from offspec.loaders.cuda import release_memory
from offspec.loaders.formats.blocked import is_supported as is_blocking_supported
from offspec.loaders.hardware import Hardware, Rates
from offspec.loaders.measure import (
    measure_dequantise,
    measure_disk,
    measure_fused_rows,
    measure_host_to_device,
    measure_matmul,
)
from offspec.loaders.placement import Item, LayerCost, Limits, PassRates, Placement, place, predict_pass_s
from offspec.loaders.tiers import StoredLayer
from offspec.loaders.units import format_quantity, format_seconds, format_size
from offspec.scheduler.costs import WIDTHS
from offspec.scheduler.params import MAX_ROWS, SpeculationParams, max_nodes

from ..checkpoints.exit_layers import ExitFile
from ..checkpoints.opening import ModelFiles, Note
from ..drafts.recall import recall_bytes
from ..errors import MemoryLimitError, OffspecError, UsageError
from ..model.block import kv_cache_bytes
from ..model.config import ModelConfig
from ..model.decoder import activation_bytes
from ..model.names import EMBEDDING
from ..model.row_logits import HEAD_ROWS
from ..training.online import AlignmentParams, learning_bytes

DEFAULT_CONTEXT = 4096
MIN_CONTEXT = 512  # below that a smaller default would not help anybody
WORKSPACE_BYTES = 64 * 2**20  # what samplers, the tokenizer and the allocator's rounding take
CUDA_WORKSPACE_BYTES = 300 * 2**20
LEAST_BLOCKED_BYTES = 512 * 2**20  # of a model; below that a pass is short anyway
WALKED_SLICES = 3  # of HEAD_ROWS rows each, beside the one that is being computed
SPARE = 0.05  # of what is free now, left for whatever else runs, where no limit was given


@dataclass(frozen=True)
class MemoryOptions:
    """What the user allows: bytes of VRAM and RAM (None: what is free), and the context and the tree to make room for.

    tree: nodes, beside the context; None, or less than that, is the largest that is sent where the budget is found.
    """

    vram: int | None = None
    ram: int | None = None
    context: int | None = None
    tree: int | None = None


@dataclass(frozen=True)
class Beside:
    """What is asked of memory beside the two models: a draft that learns while running, and an exit layer, before which
    the target's layers have to stay.
    """

    learns: bool = False
    exit_file: ExitFile | None = None


NOTHING = Beside()


@dataclass(frozen=True)
class Plan:
    """Where the target's layers go, and what was planned beside them. `context` is the most a text may have in tokens,
    `tree` the most nodes of a tree beside it.
    """

    placement: Placement
    layers: tuple[LayerCost, ...]
    context: int
    tree: int
    stream_bytes: int
    num_parameters: int
    layer_elements: int
    packed_elements: int
    head_elements: int
    beside: Beside

    @property
    def tiers(self) -> str:
        """How many layers lie where."""
        p = self.placement
        tiers = (("stay", p.resident), ("wait in RAM", p.in_ram), ("come from disk", p.on_disk))
        return ", ".join(f"{len(layers)} {name}" for name, layers in tiers if layers)

    def predict_pass_s(self, rates: Rates, width: int) -> float:
        """Seconds of one pass over `width` tokens (chain and tree) in the steady state."""
        head_s = self.head_elements * _seconds_per_element(rates.matmul_flops, min(width, HEAD_ROWS))
        return self._pass_s(rates, _layer_s(self, rates, width), head_s)

    def link_s(self, rates: Rates) -> float:
        """Seconds of a pass in which nothing is computed: what moving the streamed layers takes."""
        return self._pass_s(rates, 0.0)

    def _pass_s(self, rates: Rates, layer_s: float, head_s: float = 0.0) -> float:
        disk = rates.disk_bytes_per_s or math.inf
        link = rates.host_to_device_bytes_per_s if self.placement.limits.device is not None else None
        compute_s = (*(layer_s for _ in self.layers[1:]), layer_s + head_s)
        return predict_pass_s(self.placement, self.layers, PassRates(compute_s, disk, link))


def make_plan(
    target: ModelFiles,
    draft: ModelFiles | None,
    limits: Limits,
    grant: MemoryOptions,
    program_bytes: int,
    beside: Beside = NOTHING,
) -> Plan:
    """Place the target's layers within `limits`, beside the draft, both KV caches and everything else.

    program_bytes: what the process holds already. Without a context asked for, it is DEFAULT_CONTEXT or as much of it as
    fits. Raises MemoryLimitError.
    """
    longest, tree = target.config.max_context, max(grant.tree or 0, _max_nodes(limits))
    if grant.context is not None:
        if grant.context > longest:
            raise UsageError(f"--context {grant.context} is more than the model's own {longest}; ask for less")
        return _plan_for(grant.context, tree, target, draft, limits, program_bytes, beside)
    context = min(longest, DEFAULT_CONTEXT)
    while True:
        try:
            return _plan_for(context, tree, target, draft, limits, program_bytes, beside)
        except MemoryLimitError:
            if context // 2 < MIN_CONTEXT:
                raise
            context //= 2


def limits_of(hardware: Hardware, grant: MemoryOptions, own_bytes: int) -> Limits:
    """What may be used: what is free, less a little to spare, or what was granted if that is less.

    own_bytes: what this process holds of its own, which is not free any more but part of what it may use.
    """
    free_ram = hardware.ram.available_bytes + own_bytes
    ram = int(free_ram * (1 - SPARE)) if grant.ram is None else min(grant.ram, free_ram)
    if hardware.gpu is None:
        return Limits(None, ram)
    free = int(hardware.gpu.free_bytes * (1 - SPARE))
    return Limits(free if grant.vram is None else min(grant.vram, hardware.gpu.free_bytes), ram)


def plan_here(
    target: ModelFiles, draft: ModelFiles | None, hardware: Hardware, grant: MemoryOptions, beside: Beside = NOTHING
) -> Plan:
    """`make_plan` for this process on `hardware`."""
    memory = psutil.Process().memory_info()
    # Mapped libraries are held, but what is available counts them already: the kernel could read them again.
    own: int = memory.rss - getattr(memory, "shared", 0)
    return make_plan(target, draft, limits_of(hardware, grant, own), grant, memory.rss, beside)


def with_more(plan: Plan, target: ModelFiles, draft: ModelFiles | None, *, vram: int = 0, ram: int = 0) -> Plan:
    """What `plan` would be where so many bytes more may be used."""
    limits = plan.placement.limits
    device = None if limits.device is None else limits.device + vram
    (program,) = (item for item in plan.placement.items if item.name == PROGRAM_ITEM)
    limits = Limits(device, limits.ram + ram)
    return _plan_for(plan.context, plan.tree, target, draft, limits, program.on_host - WORKSPACE_BYTES, plan.beside)


def measure_link(plan: Plan, target: ModelFiles, device: torch.device) -> float | None:
    """Bytes/s at which the streamed layers can come, by a measurement of half a second for each link they come through.

    None where nothing is streamed.
    """
    disk = link = None
    if plan.placement.on_disk:
        file = target.stored.layers[plan.placement.on_disk[0]].record.extents[0].path
        disk = measure_disk(file, seconds=0.5).bytes_per_s
    if plan.placement.streamed:
        link = measure_host_to_device(device, seconds=0.3)
    seconds = plan.link_s(Rates(disk_bytes_per_s=disk, host_to_device_bytes_per_s=link))
    return plan.stream_bytes / seconds if seconds else None


def quick_rates(target: ModelFiles, device: torch.device, link_bytes_per_s: float | None) -> Rates:
    """What `Plan.predict_pass_s` needs, measured in a quarter of a second and 64 MiB: a first guess of a pass's seconds."""
    form = target.packed_form
    return Rates(
        disk_bytes_per_s=link_bytes_per_s,
        host_to_device_bytes_per_s=link_bytes_per_s,
        matmul_flops=measure_matmul(device, target.dtype, (1, 16, 128), shape=(2048, 2048), seconds=0.2),
        dequantise_elements_per_s=measure_dequantise(device, target.dtype, form, seconds=0.05) if form else None,
    )


def settle_fused(models: Sequence[ModelFiles], device: torch.device) -> Note | None:
    """On a GPU, measure up to how many rows each shape of 4-bit matrices is multiplied as it lies there; a second at most."""
    kinds = {
        (weight.fused_kind, model.dtype): weight
        for model in models
        for weight in model.stored.layers[0].weights.values()
        if weight.fused_kind is not None
    }
    if device.type != "cuda" or not kinds:
        return None
    try:
        rows = [measure_fused_rows(kinds[kind], device, kind[1]) for kind in sorted(kinds, key=str)]
    except (
        OffspecError,
        RuntimeError,
        AttributeError,
    ) as exc:  # no bitsandbytes, an older one, or no room: all are dequantised
        return Note(f"4-bit matrices are dequantised for each use ({type(exc).__name__} when measuring without)")
    finally:
        release_memory(device)
    return Note(
        f"4-bit matrices are multiplied packed up to {min(rows)} to {max(rows)} rows, by their shape (measured)"
    )


def is_blocked(model: ModelFiles, device: torch.device) -> bool:
    """Whether layers of the model that stay are kept in oneDNN's order: large ones of 16-bit floats, on a CPU.

    Nothing but the model and the machine decides it, so that the same request is computed alike each time.
    """
    layers = model.stored.layers
    is_large = sum(layer.record.nbytes for layer in layers) >= LEAST_BLOCKED_BYTES
    is_plain = not any(weight.is_packed for layer in layers for weight in layer.weights.values())
    return device.type == "cpu" and is_large and is_plain and is_blocking_supported(model.dtype)


def explain(plan: Plan, grant: MemoryOptions, link_bytes_per_s: float | None = None) -> list[Note]:
    """What was decided, in words; what was granted and is not there comes first."""
    where = tell_tiers(plan)
    if link_bytes_per_s is not None:
        seconds = format_seconds(plan.stream_bytes / link_bytes_per_s)
        where += f", which takes {seconds} at {format_quantity(link_bytes_per_s, 'B/s')} (measured)"
    context = Note(f"context {plan.context} tokens (room for the KV cache was made for as many)")
    return [*_missing(plan.placement.limits, grant), context, Note(where)]


def _missing(limits: Limits, grant: MemoryOptions) -> list[Note]:
    """What was granted, but cannot be used."""
    notes: list[Note] = []
    for flag, granted, limit in (("--vram", grant.vram, limits.device), ("--ram", grant.ram, limits.ram)):
        if granted is not None and limit is None:
            notes.append(Note(f"{flag} says nothing here: the CPU computes", advice=True))
        elif granted is not None and limit is not None and limit < granted:
            free = f"the {format_size(limit)} that are free"
            notes.append(Note(f"{flag} {format_size(granted)} is more than {free}; no more is used", advice=True))
    return notes


def tell_tiers(plan: Plan) -> str:
    """How many layers lie where, and what of them is moved."""
    p, num_layers = plan.placement, len(plan.layers)
    if not p.streamed:
        return f"all {num_layers} layers stay in memory; nothing is moved in a pass"
    return f"of {num_layers} layers {plan.tiers}; each pass moves {format_size(plan.stream_bytes)}"


def all_resident(model: ModelFiles) -> Placement:
    """Where a draft lies: all of it beside the arithmetic."""
    size = resident_bytes(model)
    return place([layer.cost(model.dtype) for layer in model.stored.layers], [], Limits(None, size))


def _max_nodes(limits: Limits) -> int:
    return max_nodes("cpu" if limits.device is None else "cuda")


def _plan_for(
    context: int,
    tree: int,
    target: ModelFiles,
    draft: ModelFiles | None,
    limits: Limits,
    program_bytes: int,
    beside: Beside,
) -> Plan:
    costs = [layer.cost(target.dtype) for layer in target.stored.layers]
    items, num_pinned = _items(context, tree, target, draft, limits, program_bytes), 0
    if beside.learns and draft is not None:
        params = AlignmentParams()
        num_bytes = learning_bytes(draft.config, draft.dtype.itemsize, params)
        items.append(Item("learning", on_device=num_bytes, on_host=params.buffer_bytes))
    if beside.exit_file is not None:
        items += _exit_items(context, tree, target, beside.exit_file)
        num_pinned = beside.exit_file.exit_layer
    placement = _place(costs, items, limits, num_pinned)
    weights = [w for layer in target.stored.layers for w in layer.weights.values() if len(w.shape) == 2]
    packed = [w for w in weights if w.is_packed]
    return Plan(
        placement,
        tuple(costs),
        context,
        tree,
        sum(costs[i].read_bytes for i in placement.streamed),
        target.num_parameters,
        sum(math.prod(w.shape) for w in weights) // len(costs),
        sum(math.prod(w.shape) for w in packed) // len(costs),
        target.config.vocab_size * target.config.hidden_size,
        beside,
    )


PROGRAM_ITEM, EMBEDDING_ITEM = "program", "embedding"


def _place(costs: list[LayerCost], items: list[Item], limits: Limits, num_pinned: int) -> Placement:
    """`place`; where layers come from disk the embedding stays there too, to be read by row, and takes no memory."""
    without = [item for item in items if item.name != EMBEDDING_ITEM]
    try:
        placement = place(costs, items, limits, num_pinned)
    except MemoryLimitError:
        leaner = place(costs, without, limits, num_pinned)
        if not leaner.on_disk:
            raise
        return leaner
    # Were all layers to stay without it, the embedding would stay with them, and for that there is no room.
    if placement.on_disk and (leaner := place(costs, without, limits, num_pinned)).on_disk:
        return leaner
    return placement


def _items(
    context: int, tree: int, target: ModelFiles, draft: ModelFiles | None, limits: Limits, program_bytes: int
) -> list[Item]:
    """Everything but the target's layers."""
    on_gpu = limits.device is not None
    shared = {n: StoredLayer({n: w}).cost(target.dtype).resident_bytes for n, w in target.stored.shared.items()}
    items = [
        Item(PROGRAM_ITEM, on_host=program_bytes + WORKSPACE_BYTES, on_device=CUDA_WORKSPACE_BYTES if on_gpu else 0),
        Item("KV cache", on_device=kv_bytes(target.config, context + tree, target.dtype.itemsize)),
        Item("activations", on_device=_activations(target, draft, context + tree)),
    ]
    if not target.config.tied_head:
        items.append(Item(EMBEDDING_ITEM, on_host=shared.pop(EMBEDDING)))
    items.append(Item("head", on_device=sum(shared.values())))
    models = [model for model in (target, draft) if model is not None]
    if scratch := sum(map(_scratch_bytes, models)):  # each has its own: they run side by side
        items.append(Item("unpacking", on_device=scratch))
    if draft is not None:
        items += [
            Item("draft", on_device=resident_bytes(draft)),
            Item("draft KV cache", on_device=kv_bytes(draft.config, context + MAX_ROWS, draft.dtype.itemsize)),
            Item("recall", on_device=recall_bytes(draft.config, target.config, target.dtype.itemsize)),
            Item("guessing", on_device=_guessing_bytes(draft.config.vocab_size, target.config.vocab_size)),
        ]
    return items


def _guessing_bytes(draft_vocabulary: int, target_vocabulary: int) -> int:
    """What is as wide as a vocabulary, at temperature 1: a round's logits in fp32 with its noise, what comes of both and a copy;
    the noise of the positions of a tree, in fp32 and fp64; logits of the parts of a tree that a walk leads through.
    """
    rounds = 4 * 4 * int(WIDTHS[-1]) * draft_vocabulary
    noise = (4 + 8) * SpeculationParams.max_depth * max(draft_vocabulary, target_vocabulary)
    return rounds + noise + 4 * WALKED_SLICES * HEAD_ROWS * target_vocabulary


def _exit_items(context: int, tree: int, target: ModelFiles, exit_file: ExitFile) -> list[Item]:
    """An exit layer, its KV cache, the drafted nodes' entries of the layers before it, and their hidden states."""
    size, per_layer = (
        target.dtype.itemsize,
        kv_bytes(target.config, 1, target.dtype.itemsize) // target.config.num_layers,
    )
    entries = per_layer * (context + (1 + exit_file.exit_layer) * MAX_ROWS)
    states = (context + MAX_ROWS + tree) * target.config.hidden_size * size
    return [
        Item("exit layer", on_device=exit_file.num_elements * size),
        Item("exit KV cache", on_device=entries),
        Item("hidden states", on_device=2 * states),  # what is kept, and a pass's copy of it
        Item("recall", on_device=recall_bytes(target.config, target.config, size)),
        Item("guessing", on_device=_guessing_bytes(target.config.vocab_size, target.config.vocab_size)),
    ]


def _scratch_bytes(model: ModelFiles) -> int:
    """The largest matrix that is not multiplied as it is stored, wherever its layer will lie."""
    return model.stored.scratch_elements(range(model.config.num_layers), model.dtype) * model.dtype.itemsize


def resident_bytes(model: ModelFiles) -> int:
    """What a model takes that is loaded as a whole."""
    layers = (*model.stored.layers, *(StoredLayer({n: w}) for n, w in model.stored.shared.items()))
    return sum(layer.cost(model.dtype).resident_bytes for layer in layers)


def kv_bytes(config: ModelConfig, num_entries: int, itemsize: int) -> int:
    return kv_cache_bytes(config, num_entries, itemsize)


def _activations(target: ModelFiles, draft: ModelFiles | None, num_rows: int) -> int:
    """The larger model's pass over a whole context and a tree, `num_rows` together."""
    models = [target] if draft is None else [target, draft]
    passes = [activation_bytes(m.config, num_rows, num_rows, m.dtype.itemsize) for m in models]
    return max(passes)


# ------------------------------------------------------------------------------------------------ prediction


def _layer_s(plan: Plan, rates: Rates, width: int) -> float:
    """Seconds of arithmetic in one layer."""
    matmul_s = plan.layer_elements * _seconds_per_element(rates.matmul_flops, width)
    if not plan.packed_elements or not rates.dequantise_elements_per_s:
        return matmul_s
    return matmul_s + plan.packed_elements / rates.dequantise_elements_per_s


def _seconds_per_element(flops: Mapping[int, float], width: int) -> float:
    """For one weight and `width` rows: between measured widths along a line, beyond the last at its rate."""
    if not flops:
        return 0.0
    widths = sorted(flops)
    seconds = [2 * w / flops[w] for w in widths]
    if width >= widths[-1]:
        return seconds[-1] * width / widths[-1]
    right = max(1, bisect_left(widths, width))
    low, high = widths[right - 1], widths[right]
    return seconds[right - 1] + (seconds[right] - seconds[right - 1]) * (width - low) / (high - low)
