"""Decides which layers are resident, in RAM or on disk, and predicts the seconds of a pass.

These are pure functions of numbers: they read, measure and allocate nothing. A layer is its bytes and its compute time;
everything else that needs memory is an `Item` with a readable name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offspec.errors import MemoryLimitError

from ..units import format_size

MAX_SLOTS, MIN_SLOTS = 3, 2
ENTRY_SLOTS = 2  # of KV entries in RAM: of the layer in use, and of the next one
SHADOW_ITEM, KV_ITEM = "shadow", "KV cache"


@dataclass(frozen=True)
class LayerCost:
    """Bytes of one layer: read_bytes through the link, slot_bytes of its slot, resident_bytes if it is resident.

    shadow_bytes: on the device if it is streamed, for a copy in fewer bits that drafts. entry_bytes: of KV entries, if
    those of streamed layers may lie in RAM; each pass then reads them through the link. A resident layer's are on the
    device.
    """

    read_bytes: int
    slot_bytes: int
    resident_bytes: int
    shadow_bytes: int = 0
    entry_bytes: int = 0


@dataclass(frozen=True)
class Item:
    """Memory besides layers: `on_device` bytes on the compute device, `on_host` bytes in RAM.

    If the CPU computes, both are in RAM and both count.
    """

    name: str
    on_device: int = 0
    on_host: int = 0


@dataclass(frozen=True)
class Limits:
    """Memory limits in bytes: of the device (None: the CPU computes in RAM), and of RAM."""

    device: int | None
    ram: int


@dataclass(frozen=True)
class Slots:
    """Slots for streamed layers, `nbytes` each.

    num: on the compute device. num_host: in RAM, for a GPU's layers on disk.
    """

    num: int
    num_host: int
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """The layers of each tier, by index, the slots for streamed layers, and the total bytes.

    entries_in_ram: those of the streamed layers whose KV entries are in RAM.
    """

    resident: tuple[int, ...]
    in_ram: tuple[int, ...]
    on_disk: tuple[int, ...]
    slots: Slots
    items: tuple[Item, ...]
    limits: Limits
    device_bytes: int
    ram_bytes: int
    entries_in_ram: tuple[int, ...] = ()

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that every pass streams, in order."""
        return tuple(sorted(self.in_ram + self.on_disk))


def spread(num_layers: int, num_chosen: int) -> tuple[int, ...]:
    """`num_chosen` of the layers, evenly spaced: compute time of resident layers hides transfers of those between."""
    return tuple((2 * i + 1) * num_layers // (2 * num_chosen) for i in range(num_chosen))


def scattered(num_layers: int) -> tuple[int, ...]:
    """All layers in an order whose every prefix is spread about evenly (van der Corput's sequence)."""
    bits = max(1, (num_layers - 1).bit_length())
    return tuple(i for i in (int(f"{n:0{bits}b}"[::-1], 2) for n in range(1 << bits)) if i < num_layers)


@dataclass(frozen=True)
class Wishes:
    """What decides which layers are resident. num_pinned: the first layers that must be, because they draft.

    streamed_first: all layers in the order in which they are streamed; without it, resident layers are spread evenly.
    most_free: resident layers beside the pinned ones, at most, if any is streamed.
    """

    num_pinned: int = 0
    streamed_first: tuple[int, ...] = ()
    most_free: int | None = None

    def chosen(self, num_layers: int, count: int) -> tuple[int, ...]:
        """The resident layers, if `count` are resident beside the pinned ones."""
        free = range(self.num_pinned, num_layers)
        if not self.streamed_first:
            return (*range(self.num_pinned), *(self.num_pinned + i for i in spread(len(free), count)))
        streamed = [layer for layer in self.streamed_first if layer in free][: len(free) - count]
        return tuple(layer for layer in range(num_layers) if layer not in streamed)


def place(
    layers: Sequence[LayerCost], items: Sequence[Item], limits: Limits, wishes: Wishes | None = None
) -> Placement:
    """Place as many layers as fit on the device, as many of the rest as fit in RAM, and the others on disk.

    Raises MemoryLimitError, with the numbers and the remedy, if not even streaming all but the pinned layers fits.
    """
    wishes = wishes or Wishes()
    if limits.device is None:
        return _place_on_cpu(layers, items, limits, wishes)
    return _place_on_gpu(layers, items, limits, limits.device, wishes)


def _place_on_cpu(layers: Sequence[LayerCost], items: Sequence[Item], limits: Limits, wishes: Wishes) -> Placement:
    needs, slot_bytes = [(item.name, item.on_device + item.on_host) for item in items], _slot_bytes(layers)
    resident, rest, num_slots, used = _fill(Tier("RAM", limits.ram), layers, needs, slot_bytes, wishes)
    items = (*items, *_shadows(layers, rest))
    return Placement(resident, (), rest, Slots(num_slots, 0, slot_bytes), items, limits, 0, used)


def _place_on_gpu(
    layers: Sequence[LayerCost], items: Sequence[Item], limits: Limits, device: int, wishes: Wishes
) -> Placement:
    needs, slot_bytes = [(item.name, item.on_device) for item in items], _slot_bytes(layers)
    entry_slots = ENTRY_SLOTS * max((layer.entry_bytes for layer in layers), default=0)
    tier = Tier("VRAM", device, entry_slots)
    resident, rest, num_slots, used = _fill(tier, layers, needs, slot_bytes, wishes)
    far = _far_entries(layers, rest, device - used)
    items = (*items, *_shadows(layers, rest), *_entries(layers, far, entry_slots if rest else 0))
    used += sum(layers[i].entry_bytes for i in rest if i not in far)
    needs = [(item.name, item.on_host) for item in items]
    waiting = [LayerCost(layers[i].read_bytes, slot_bytes, layers[i].slot_bytes) for i in rest]
    kept, on_disk, num_host_slots, used_ram = _fill(Tier("RAM", limits.ram), waiting, needs, slot_bytes, Wishes())
    in_ram, on_disk = tuple(rest[i] for i in kept), tuple(rest[i] for i in on_disk)
    slots = Slots(num_slots, num_host_slots, slot_bytes)
    return Placement(resident, in_ram, on_disk, slots, items, limits, used, used_ram, far)


def _far_entries(layers: Sequence[LayerCost], streamed: Sequence[int], spare: int) -> tuple[int, ...]:
    """The streamed layers whose KV entries do not fit in `spare` bytes of the device."""
    largest = max((layers[i].entry_bytes for i in streamed), default=0)
    if not largest:
        return ()
    num_near = min(spare // largest, len(streamed))
    near = {streamed[i] for i in spread(len(streamed), num_near)}
    return tuple(i for i in streamed if i not in near)


def _entries(layers: Sequence[LayerCost], far: Sequence[int], slot_bytes: int) -> list[Item]:
    """KV entries of all layers, if those of streamed layers may lie in RAM."""
    in_ram, whole = sum(layers[i].entry_bytes for i in far), sum(layer.entry_bytes for layer in layers)
    return [Item(KV_ITEM, whole - in_ram + slot_bytes, in_ram)] if whole else []


def _shadows(layers: Sequence[LayerCost], streamed: Sequence[int]) -> list[Item]:
    """What the shadows of the streamed layers take."""
    nbytes = sum(layers[i].shadow_bytes for i in streamed)
    return [Item(SHADOW_ITEM, on_device=nbytes)] if nbytes else []


@dataclass(frozen=True)
class Tier:
    """Memory to fill: its name and limit. beside_slots: bytes that it needs as soon as a layer is streamed."""

    name: str
    limit: int
    beside_slots: int = 0


def _fill(
    tier: Tier,
    layers: Sequence[LayerCost],
    needs: Sequence[tuple[str, int]],
    slot_bytes: int,
    wishes: Wishes,
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Fill one tier with layers: kept layers, remaining layers, slots for the latter, bytes used."""
    shadows = sum(layer.shadow_bytes for layer in layers)
    taken = sum(size for _, size in needs) + shadows
    # A resident layer needs no shadow, and has its KV entries beside it.
    sizes = [layer.resident_bytes - layer.shadow_bytes + layer.entry_bytes for layer in layers]
    kept, num_slots = _keep(sizes, tier, tier.limit - taken, slot_bytes, wishes)
    if kept is None:
        pinned = [layer.resident_bytes + layer.entry_bytes for layer in layers[: wishes.num_pinned]]
        needs = [*needs, (SHADOW_ITEM, shadows), (KV_ITEM, tier.beside_slots)]
        raise MemoryLimitError(_refusal(tier, needs, slot_bytes, pinned))
    rest = tuple(i for i in range(len(sizes)) if i not in kept)
    taken += tier.beside_slots if rest else 0
    return kept, rest, num_slots, taken + num_slots * slot_bytes + sum(sizes[i] for i in kept)


def _keep(
    sizes: Sequence[int], tier: Tier, room: int, slot_bytes: int, wishes: Wishes
) -> tuple[tuple[int, ...] | None, int]:
    """The most layers that fit in `room` together with slots for the others, and the slots; None if too few fit."""
    if sum(sizes) <= room:
        return tuple(range(len(sizes))), 0
    most = len(sizes) - wishes.num_pinned - 1
    if wishes.most_free is not None:
        most = min(most, wishes.most_free)
    for num_slots in (MAX_SLOTS, MIN_SLOTS):
        left = room - num_slots * slot_bytes - tier.beside_slots
        for count in range(most, -1, -1):
            chosen = wishes.chosen(len(sizes), count)
            if sum(sizes[i] for i in chosen) <= left:
                return chosen, num_slots
    return None, 0


def _slot_bytes(layers: Sequence[LayerCost]) -> int:
    return max((layer.slot_bytes for layer in layers), default=0)


def _refusal(tier: Tier, needs: Sequence[tuple[str, int]], slot_bytes: int, pinned: Sequence[int] = ()) -> str:
    slots, first = f"{MIN_SLOTS} slots for streamed layers", f"{len(pinned)} draft layers before the exit"
    wanted = [*needs, (slots, MIN_SLOTS * slot_bytes), (first, sum(pinned))]
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in sorted(wanted, key=lambda need: -need[1]) if size)
    smaller = "an exit layer after fewer layers" if pinned else "a smaller draft"
    return (
        f"{format_size(max(tier.limit, 0))} of {tier.name} are not enough: "
        f"the model needs at least {format_size(sum(size for _, size in wanted))} "
        f"({parts}); allow more (`{tier.name.lower()}`), set a smaller `context`, or use {smaller}"
    )


# ------------------------------------------------------------------------------------------------ prediction


@dataclass(frozen=True)
class PassRates:
    """Measured rates. compute_s[i]: compute seconds of layer i; link rates in bytes/s."""

    compute_s: tuple[float, ...]
    disk_bytes_per_s: float
    host_to_device_bytes_per_s: float | None = None


def predict_pass_s(
    placement: Placement, layers: Sequence[LayerCost], rates: PassRates, entry_share: float = 1.0
) -> float:
    """Seconds of one pass in the steady state: the third pass of a slot-by-slot simulation of the ring.

    entry_share: the share of KV entries in RAM that is in use, and comes through the link beside its layer.
    """
    on_disk, streamed, far = set(placement.on_disk), set(placement.streamed), set(placement.entries_in_ram)
    now = disk_free = link_free = began = 0.0
    freed, host_freed = deque([0.0] * placement.slots.num), deque([0.0] * placement.slots.num_host)
    # The ring reads ahead: a layer's transfer begins as soon as link and slot are free, independent of computation.
    for _ in range(3):
        began = now
        for i, compute_s in enumerate(rates.compute_s):
            if i in streamed:
                arrived, nbytes = freed.popleft(), layers[i].read_bytes
                if i in on_disk:
                    begins = host_freed.popleft() if host_freed else arrived
                    disk_free = max(disk_free, begins) + nbytes / rates.disk_bytes_per_s
                    arrived = max(arrived, disk_free)
                if i in far:
                    nbytes += round(entry_share * layers[i].entry_bytes)
                if rates.host_to_device_bytes_per_s is not None:
                    link_free = arrived = max(link_free, arrived) + nbytes / rates.host_to_device_bytes_per_s
                if i in on_disk and placement.slots.num_host:
                    host_freed.append(arrived)
                now = max(now, arrived) + compute_s
                freed.append(now)
            else:
                now += compute_s
    return now - began
