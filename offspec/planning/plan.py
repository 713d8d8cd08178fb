"""What has to be in memory for a target and the features beside it, where each part goes, and what a pass will take.

The arithmetic of models meets the arithmetic of memory here: `loaders.placement` knows neither a KV cache nor a draft.
Pure: nothing is read, measured or allocated (`planning.probe` measures). `loading` does what `make_plan` says.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offspec.loaders.hardware import Hardware, Rates
from offspec.loaders.placement import Item, LayerCost, Limits, PassRates, Placement, place, predict_pass_s
from offspec.loaders.tiers import StoredLayer
from offspec.scheduler.params import max_nodes

from ..checkpoints.opening import ModelFiles
from ..errors import MemoryLimitError, UsageError
from ..model.block import kv_cache_bytes
from ..model.decoder import activation_bytes
from ..model.foreign_config import ForeignConfig, is_of_experts
from ..model.row_logits import HEAD_ROWS
from .memory import MemoryOptions, MemoryUse, MemoryUser, Room, add_up

DEFAULT_CONTEXT = 4096
MIN_CONTEXT = 512  # below that a smaller default would not help anybody
WORKSPACE_BYTES = 64 * 2**20  # what samplers, the tokenizer and the allocator's rounding take
CUDA_WORKSPACE_BYTES = 300 * 2**20
SPARE = 0.05  # of what is free now, left for whatever else runs, where no limit was given
PROGRAM_ITEM, EMBEDDING_ITEM = "program", "embedding"


@dataclass(frozen=True)
class Demand:
    """What a plan follows from.

    features: what takes memory beside the target. program_bytes: what the process holds.
    """

    target: ModelFiles
    features: tuple[MemoryUser, ...]
    limits: Limits
    options: MemoryOptions
    program_bytes: int


@dataclass(frozen=True)
class Work:
    """Elements that a pass multiplies: of one layer's matrices, of those unpacked for each use, of the head.

    expert_elements: of a layer's experts, which are no part of layer_elements; a row goes through expert_share of them.
    """

    layer_elements: int
    packed_elements: int
    head_elements: int
    expert_elements: int = 0
    expert_share: float = 1.0

    @classmethod
    def of(cls, target: ModelFiles) -> Work:
        layers = target.stored.layers
        matrices = [w for layer in layers for w in layer.weights.values() if len(w.shape) == 2]
        packed = [w for w in matrices if w.is_packed]
        each, unpacked = (sum(math.prod(w.shape) for w in found) // len(layers) for found in (matrices, packed))
        head_elements = target.config.vocab_size * target.config.hidden_size
        if not isinstance(target.config, ForeignConfig):
            return cls(each, unpacked, head_elements)
        weights = [weight for layer in layers for weight in layer.weights.items()]
        experts = sum(math.prod(w.shape) for name, w in weights if is_of_experts(name, w.shape)) // len(layers)
        own = sum(math.prod(w.shape) for name, w in weights if len(w.shape) == 2 and not is_of_experts(name, w.shape))
        return cls(own // len(layers), unpacked, head_elements, experts, target.config.expert_share)


@dataclass(frozen=True)
class Plan:
    """Where the target's layers go, and what was planned beside them. `context` is the most a text may have in tokens,
    `tree` the most nodes of a tree beside it.
    """

    demand: Demand
    room: Room
    placement: Placement
    layers: tuple[LayerCost, ...]
    work: Work

    @property
    def context(self) -> int:
        return self.room.context

    @property
    def tree(self) -> int:
        return self.room.tree

    @property
    def tiers(self) -> str:
        """How many layers lie where."""
        p = self.placement
        tiers = (("stay", p.resident), ("wait in RAM", p.in_ram), ("come from disk", p.on_disk))
        return ", ".join(f"{len(layers)} {name}" for name, layers in tiers if layers)

    @property
    def stream_bytes(self) -> int:
        """What a pass moves."""
        return sum(self.layers[i].read_bytes for i in self.placement.streamed)

    def predict_pass_s(self, rates: Rates, width: int) -> float:
        """Seconds of one pass over `width` tokens (chain and tree) in the steady state."""
        head_s = self.work.head_elements * _seconds_per_element(rates.matmul_flops, min(width, HEAD_ROWS))
        return self._pass_s(rates, _layer_s(self.work, rates, width), head_s)

    def link_s(self, rates: Rates) -> float:
        """Seconds of a pass in which nothing is computed: what moving the streamed layers takes."""
        return self._pass_s(rates, 0.0)

    def _pass_s(self, rates: Rates, layer_s: float, head_s: float = 0.0) -> float:
        disk = rates.disk_bytes_per_s or math.inf
        link = rates.host_to_device_bytes_per_s if self.placement.limits.device is not None else None
        compute_s = (*(layer_s for _ in self.layers[1:]), layer_s + head_s)
        return predict_pass_s(self.placement, self.layers, PassRates(compute_s, disk, link))

    def with_more(self, *, vram: int = 0, ram: int = 0) -> Plan:
        """What the plan would be where so many bytes more may be used. Raises MemoryLimitError."""
        limits = self.demand.limits
        device = None if limits.device is None else limits.device + vram
        return _plan_for(self.room, replace(self.demand, limits=Limits(device, limits.ram + ram)))

    def with_target(self, target: ModelFiles) -> Plan:
        """What the plan would be for the same model in another format. Raises MemoryLimitError."""
        return _plan_for(self.room, replace(self.demand, target=target))

    def largest_context(self) -> int:
        """The most tokens that a text could have in the same memory, however many layers would then be streamed."""
        longest = self.demand.target.config.max_context

        def is_too_long(context: int) -> bool:
            try:
                _plan_for(replace(self.room, context=context), self.demand)
            except MemoryLimitError:
                return True
            return False

        candidates = range(self.context + 1, longest + 1)
        return self.context + bisect_left(candidates, True, key=is_too_long)


def make_plan(
    target: ModelFiles,
    features: Sequence[MemoryUser],
    limits: Limits,
    options: MemoryOptions,
    program_bytes: int,
) -> Plan:
    """Place the target's layers within `limits`, beside its KV cache, what the features take, and everything else.

    program_bytes: what the process holds already. Without a context asked for, it is DEFAULT_CONTEXT or as much of it
    as fits. Raises MemoryLimitError.
    """
    demand = Demand(target, tuple(features), limits, options, program_bytes)
    longest, tree = target.config.max_context, max(options.tree or 0, _max_nodes(limits))
    if options.context is not None:
        if options.context > longest:
            raise UsageError(f"--context {options.context} is more than the model's own {longest}; ask for less")
        return _plan_for(Room(options.context, tree), demand)
    context = min(longest, DEFAULT_CONTEXT)
    while True:
        try:
            return _plan_for(Room(context, tree), demand)
        except MemoryLimitError:
            if context // 2 < MIN_CONTEXT:
                raise
            context //= 2


def limits_of(hardware: Hardware, options: MemoryOptions, own_bytes: int) -> Limits:
    """What may be used: what is free, less a little to spare, or what was allowed if that is less.

    own_bytes: what this process holds of its own, which is not free any more but part of what it may use.
    """
    free_ram = hardware.ram.available_bytes + own_bytes
    ram = int(free_ram * (1 - SPARE)) if options.ram is None else min(options.ram, free_ram)
    if hardware.gpu is None:
        return Limits(None, ram)
    free = int(hardware.gpu.free_bytes * (1 - SPARE))
    return Limits(free if options.vram is None else min(options.vram, hardware.gpu.free_bytes), ram)


def all_resident(model: ModelFiles) -> Placement:
    """Where a draft lies: all of it beside the arithmetic."""
    size = resident_bytes(model)
    return place([layer.cost(model.dtype) for layer in model.stored.layers], [], Limits(None, size))


def _max_nodes(limits: Limits) -> int:
    return max_nodes("cpu" if limits.device is None else "cuda")


def _plan_for(room: Room, demand: Demand) -> Plan:
    target = demand.target
    costs = [layer.cost(target.dtype) for layer in target.stored.layers]
    uses = [feature.memory_use(target, room) for feature in demand.features]
    placement = _place(costs, _items(room, demand, uses), demand.limits, sum(use.num_pinned_layers for use in uses))
    return Plan(demand, room, placement, tuple(costs), Work.of(target))


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


def _items(room: Room, demand: Demand, uses: Sequence[MemoryUse]) -> list[Item]:
    """Everything but the target's layers."""
    target, on_gpu = demand.target, demand.limits.device is not None
    config, itemsize = target.config, target.dtype.itemsize
    shared = {n: StoredLayer({n: w}).cost(target.dtype).resident_bytes for n, w in target.stored.shared.items()}
    workspace = max([pass_bytes(target, room), *(use.workspace_bytes for use in uses)])
    cuda_bytes = CUDA_WORKSPACE_BYTES if on_gpu else 0
    items = [
        Item(PROGRAM_ITEM, on_host=demand.program_bytes + WORKSPACE_BYTES, on_device=cuda_bytes),
        Item("KV cache", on_device=kv_cache_bytes(config, room.context + room.tree, itemsize)),
        Item("activations", on_device=workspace),
    ]
    if not config.tied_head:
        items.append(Item(EMBEDDING_ITEM, on_host=shared.pop(config.embedding_name)))
    items.append(Item("head", on_device=sum(shared.values())))
    items += unpacking_items(target)
    return add_up([*items, *(item for use in uses for item in use.items)])


def unpacking_items(model: ModelFiles) -> list[Item]:
    """Scratch for the largest matrix that is not multiplied as it is stored; each model has its own."""
    scratch = model.stored.scratch_elements(range(model.config.num_layers), model.dtype) * model.dtype.itemsize
    return [Item("unpacking", on_device=scratch)] if scratch else []


def resident_bytes(model: ModelFiles) -> int:
    """What a model takes that is loaded as a whole."""
    layers = (*model.stored.layers, *(StoredLayer({n: w}) for n, w in model.stored.shared.items()))
    return sum(layer.cost(model.dtype).resident_bytes for layer in layers)


def pass_bytes(model: ModelFiles, room: Room) -> int:
    """What a pass over a whole context and a tree together allocates."""
    num_rows = room.context + room.tree
    return activation_bytes(model.config, num_rows, num_rows, model.dtype.itemsize)


# ------------------------------------------------------------------------------------------------ prediction


def _layer_s(work: Work, rates: Rates, width: int) -> float:
    """Seconds of arithmetic in one layer."""
    matmul_s = work.layer_elements * _seconds_per_element(rates.matmul_flops, width)
    used = 1 - (1 - work.expert_share) ** width  # of the experts, if each row chooses for itself
    rows = max(1, round(width * work.expert_share / used))
    matmul_s += work.expert_elements * used * _seconds_per_element(rates.matmul_flops, rows)
    if not work.packed_elements or not rates.dequantise_elements_per_s:
        return matmul_s
    return matmul_s + work.packed_elements / rates.dequantise_elements_per_s


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
