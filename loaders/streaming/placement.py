"""Decides where each unit of weights lies between passes (`Tier`), and predicts the seconds of a pass.

These are pure functions of numbers: they read, measure and allocate nothing. A unit is its bytes and its compute time;
each layer is one, without its experts. Which of these a pass needs is only known while it computes: they get slots
(`ExpertsCost`). Everything else that needs memory is an `Item` with a readable name.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from offspec.backends.device_kinds import CPU, GPU, DeviceKind
from offspec.errors import MemoryLimitError

from ..units import format_size

MAX_SLOTS, MIN_SLOTS = 3, 2
ENTRY_SLOTS = 2  # of KV entries in RAM: of the unit in use, and of the next one
SHADOW_ITEM, STATES_ITEM = "shadow", "recurrent states"
KV_ITEM, WINDOWS_ITEM = "KV cache", "KV cache of windows"
EXPERTS_ITEM = "experts"


class Tier(Enum):
    """Kinds of memory, the fastest first: of the device that computes, the host's, and files."""

    DEVICE = "resident"
    RAM = "in RAM"
    DISK = "on disk"


@dataclass(frozen=True)
class UnitCost:
    """Bytes of one unit: read_bytes through the link, slot_bytes of its slot, resident_bytes if it is resident.

    shadow_bytes: on the device if it is streamed, for a copy in fewer bits that drafts. entry_bytes: of KV entries, if
    those of streamed units may lie in RAM; each pass then reads them through the link. A resident unit's are on the
    device. row_share: the probability that a row uses the unit.
    """

    read_bytes: int
    slot_bytes: int
    resident_bytes: int
    shadow_bytes: int = 0
    entry_bytes: int = 0
    row_share: float = 1.0

    def pass_bytes(self, rows: int) -> float:
        """Expected bytes through the link in a pass over so many rows."""
        return self.read_bytes * used_share(self.row_share, rows)


def used_share(row_share: float, rows: int) -> float:
    """The probability that one of `rows` rows uses what each uses with probability `row_share`, independently."""
    return 1 - (1 - row_share) ** rows


@dataclass(frozen=True)
class ExpertsCost:
    """Bytes of the experts of all layers, `num` in all.

    slot_bytes: of the largest one in memory. read_bytes: of the average one, through the link. resident_bytes: of all,
    if all are resident. least: slots that a pass needs at least. row_share: the probability that a row uses one.
    in_layer: experts of a layer that has some. elements: weights of the average one.
    """

    num: int
    slot_bytes: int
    read_bytes: int
    resident_bytes: int
    least: int
    row_share: float
    in_layer: int = 1
    elements: int = 0

    def num_used(self, rows: int) -> float:
        """Expected experts of a layer that a pass over so many rows uses."""
        return self.in_layer * used_share(self.row_share, rows)

    def rows_of_each(self, rows: int) -> int:
        """Rows that use an expert of these."""
        return max(1, round(rows * self.row_share * self.in_layer / self.num_used(rows)))


@dataclass(frozen=True)
class ExpertTimes:
    """Seconds that one expert of a pass takes: on the compute device; in RAM on the CPU beside a GPU; on its ways."""

    compute_s: float
    host_s: float = math.inf
    link_s: float = 0.0
    disk_s: float = 0.0


@dataclass(frozen=True)
class ExpertSlots:
    """The most experts in memory at once: on the compute device, and in RAM for a GPU, which may be all.

    are_resident: whether all are on the device, as they are in resident layers; otherwise slots hold what is stored.
    """

    device: int = 0
    host: int = 0
    are_resident: bool = False


@dataclass(frozen=True)
class Item:
    """Memory besides units: `on_device` bytes on the compute device, `on_host` bytes in RAM.

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

    @property
    def kind(self) -> DeviceKind:
        """Of the device."""
        return CPU if self.device is None else GPU


@dataclass(frozen=True)
class Slots:
    """Slots for streamed units, `nbytes` each.

    num: on the device. num_host: in RAM, for a GPU's units on disk.
    """

    num: int
    num_host: int
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """The place of each unit in the order of a pass, the slots for streamed units, and the total bytes.

    entries_in_ram: those of the streamed units whose KV entries are in RAM.
    """

    places: tuple[Tier, ...]
    slots: Slots
    items: tuple[Item, ...]
    limits: Limits
    device_bytes: int
    ram_bytes: int
    entries_in_ram: tuple[int, ...] = ()
    experts: ExpertSlots = ExpertSlots()

    @cached_property
    def resident(self) -> tuple[int, ...]:
        """The numbers of the units on the device."""
        return self._in(Tier.DEVICE)

    @cached_property
    def in_ram(self) -> tuple[int, ...]:
        return self._in(Tier.RAM)

    @cached_property
    def on_disk(self) -> tuple[int, ...]:
        return self._in(Tier.DISK)

    @cached_property
    def streamed(self) -> tuple[int, ...]:
        """The units that passes stream, in order."""
        return self._in(Tier.RAM, Tier.DISK)

    @property
    def tiers(self) -> tuple[bool, ...]:
        """Whether units are in RAM for a GPU, whether some are on disk, and whether experts come from elsewhere."""
        return bool(self.in_ram), bool(self.on_disk), not self.is_resident

    @cached_property
    def is_resident(self) -> bool:
        """Whether passes stream nothing."""
        return not self.streamed and (self.experts.are_resident or self.experts == ExpertSlots())

    def _in(self, *tiers: Tier) -> tuple[int, ...]:
        return tuple(unit for unit, place in enumerate(self.places) if place in tiers)


def places_of(
    *, resident: Iterable[int] = (), in_ram: Iterable[int] = (), on_disk: Iterable[int] = ()
) -> tuple[Tier, ...]:
    """The places of units; the arguments together are the numbers of all units."""
    tiers = {unit: tier for tier, units in zip(Tier, (resident, in_ram, on_disk), strict=True) for unit in units}
    return tuple(tiers[unit] for unit in range(len(tiers)))


def spread(num_units: int, num_chosen: int) -> tuple[int, ...]:
    """`num_chosen` of the units, evenly spaced: compute time of resident units hides transfers of those between."""
    return tuple((2 * i + 1) * num_units // (2 * num_chosen) for i in range(num_chosen))


def scattered(num_units: int) -> tuple[int, ...]:
    """All units in an order whose every prefix is spread about evenly (van der Corput's sequence)."""
    bits = max(1, (num_units - 1).bit_length())
    return tuple(i for i in (int(f"{n:0{bits}b}"[::-1], 2) for n in range(1 << bits)) if i < num_units)


@dataclass(frozen=True)
class PinnedLayers:
    """What decides which units are resident. num_pinned: the first units that must be, because they draft.

    most_free: resident units beside the pinned ones, at most, if any is streamed.
    """

    num_pinned: int = 0
    most_free: int | None = None

    def chosen(self, num_units: int, count: int) -> tuple[int, ...]:
        """The resident units, if `count` are resident beside the pinned ones."""
        free = num_units - self.num_pinned
        return (*range(self.num_pinned), *(self.num_pinned + i for i in spread(free, count)))


def place(
    units: Sequence[UnitCost],
    items: Sequence[Item],
    limits: Limits,
    pinned: PinnedLayers | None = None,
    experts: ExpertsCost | None = None,
) -> Placement:
    """Place as many units as fit on the device, as many of the rest as fit in RAM, and the others on disk.

    Every pass needs the units, so experts get what is left of the device, and of RAM. Raises MemoryLimitError, with the
    numbers and the remedy, if not even streaming all but the pinned layers fits.
    """
    if experts is not None:
        return _place_with_experts(units, items, limits, pinned, experts)
    pinned = pinned or PinnedLayers()
    if limits.device is None:
        return _place_on_cpu(units, items, limits, pinned)
    needs, slot_bytes = [(item.name, item.on_device) for item in items], _slot_bytes(units)
    entry_slots = ENTRY_SLOTS * max((unit.entry_bytes for unit in units), default=0)
    space = Space("VRAM", limits.device, entry_slots)
    resident, rest, num_slots, used = _fill(space, units, needs, slot_bytes, pinned)
    far = _far_entries(units, rest, limits.device - used)
    items = (*items, *_shadows(units, rest))
    if whole := sum(unit.entry_bytes for unit in units):  # KV entries, of which those of streamed units may lie in RAM
        in_ram = sum(units[i].entry_bytes for i in far)
        items = (*items, Item(KV_ITEM, whole - in_ram + (entry_slots if rest else 0), in_ram))
    used += sum(units[i].entry_bytes for i in rest if i not in far)
    needs = [(item.name, item.on_host) for item in items]
    waiting = [UnitCost(units[i].read_bytes, slot_bytes, units[i].slot_bytes) for i in rest]
    kept, on_disk, num_host_slots, used_ram = _fill(
        Space("RAM", limits.ram), waiting, needs, slot_bytes, PinnedLayers()
    )
    places = places_of(resident=resident, in_ram=(rest[i] for i in kept), on_disk=(rest[i] for i in on_disk))
    slots = Slots(num_slots, num_host_slots, slot_bytes)
    return Placement(places, slots, items, limits, used, used_ram, far)


def _place_with_experts(
    units: Sequence[UnitCost], items: Sequence[Item], limits: Limits, pinned: PinnedLayers | None, experts: ExpertsCost
) -> Placement:
    with suppress(MemoryLimitError):
        placement = place(units, [*items, Item(EXPERTS_ITEM, experts.resident_bytes)], limits, pinned)
        if not placement.streamed:
            return replace(placement, experts=ExpertSlots(experts.num, are_resident=True))
    slot, spare, least = experts.slot_bytes, experts.num - experts.least, experts.least
    host_least = 0 if limits.device is None else least
    needed = Item(EXPERTS_ITEM, least * slot, host_least * slot)
    placement = place(units, [*items, needed], limits, pinned)
    free, free_host = limits.ram - placement.ram_bytes, 0
    if limits.device is not None:
        free, free_host = limits.device - placement.device_bytes, free
    # With layers on disk, all memory is theirs: every pass needs each of them.
    more = 0 if placement.streamed else min(free // slot, spare)
    more_host = 0 if placement.on_disk else min(free_host // slot, spare)
    slots = ExpertSlots(least + more, host_least + more_host)
    on_device, in_ram = (0, more) if limits.device is None else (more, more_host)
    item = Item(EXPERTS_ITEM, slots.device * slot, slots.host * slot)
    return replace(
        placement,
        items=(*(each for each in placement.items if each != needed), item),
        device_bytes=placement.device_bytes + on_device * slot,
        ram_bytes=placement.ram_bytes + in_ram * slot,
        experts=slots,
    )


def _place_on_cpu(units: Sequence[UnitCost], items: Sequence[Item], limits: Limits, pinned: PinnedLayers) -> Placement:
    needs, slot_bytes = [(item.name, item.on_device + item.on_host) for item in items], _slot_bytes(units)
    resident, rest, num_slots, used = _fill(Space("RAM", limits.ram), units, needs, slot_bytes, pinned)
    items, places = (*items, *_shadows(units, rest)), places_of(resident=resident, on_disk=rest)
    return Placement(places, Slots(num_slots, 0, slot_bytes), items, limits, 0, used)


def _far_entries(units: Sequence[UnitCost], streamed: Sequence[int], spare: int) -> tuple[int, ...]:
    """The streamed units whose KV entries do not fit in `spare` bytes of the device."""
    streamed = [i for i in streamed if units[i].entry_bytes]
    if not streamed:
        return ()
    largest = max(units[i].entry_bytes for i in streamed)
    num_near = min(spare // largest, len(streamed))
    near = {streamed[i] for i in spread(len(streamed), num_near)}
    return tuple(i for i in streamed if i not in near)


def _shadows(units: Sequence[UnitCost], streamed: Sequence[int]) -> list[Item]:
    """What the shadows of the streamed units take."""
    nbytes = sum(units[i].shadow_bytes for i in streamed)
    return [Item(SHADOW_ITEM, on_device=nbytes)] if nbytes else []


@dataclass(frozen=True)
class Space:
    """Memory to fill: its name and limit. beside_slots: bytes that it needs as soon as a unit is streamed."""

    name: str
    limit: int
    beside_slots: int = 0


def _fill(
    space: Space,
    units: Sequence[UnitCost],
    needs: Sequence[tuple[str, int]],
    slot_bytes: int,
    pinned: PinnedLayers,
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Fill one space with units: kept units, remaining units, slots for the latter, bytes used."""
    shadows = sum(unit.shadow_bytes for unit in units)
    taken = sum(size for _, size in needs) + shadows
    # A resident unit needs no shadow, and has its KV entries beside it.
    sizes = [unit.resident_bytes - unit.shadow_bytes + unit.entry_bytes for unit in units]
    kept, num_slots = _keep(sizes, space, space.limit - taken, slot_bytes, pinned)
    if kept is None:
        required = [unit.resident_bytes + unit.entry_bytes for unit in units[: pinned.num_pinned]]
        needs = [*needs, (SHADOW_ITEM, shadows), (KV_ITEM, space.beside_slots)]
        raise MemoryLimitError(_refusal(space, needs, slot_bytes, required))
    rest = tuple(i for i in range(len(sizes)) if i not in kept)
    taken += space.beside_slots if rest else 0
    return kept, rest, num_slots, taken + num_slots * slot_bytes + sum(sizes[i] for i in kept)


def _keep(
    sizes: Sequence[int], space: Space, room: int, slot_bytes: int, pinned: PinnedLayers
) -> tuple[tuple[int, ...] | None, int]:
    """The most units that fit in `room` together with slots for the others, and the slots; None if too few fit."""
    if sum(sizes) <= room:
        return tuple(range(len(sizes))), 0
    most = len(sizes) - pinned.num_pinned - 1
    if pinned.most_free is not None:
        most = min(most, pinned.most_free)
    for num_slots in (MAX_SLOTS, MIN_SLOTS):
        left = room - num_slots * slot_bytes - space.beside_slots
        for count in range(most, -1, -1):
            chosen = pinned.chosen(len(sizes), count)
            if sum(sizes[i] for i in chosen) <= left:
                return chosen, num_slots
    return None, 0


def _slot_bytes(units: Sequence[UnitCost]) -> int:
    return max((unit.slot_bytes for unit in units), default=0)


def _refusal(space: Space, needs: Sequence[tuple[str, int]], slot_bytes: int, pinned: Sequence[int] = ()) -> str:
    slots, first = f"{MIN_SLOTS} slots for streamed layers", f"{len(pinned)} draft layers before the exit"
    wanted = [*needs, (slots, MIN_SLOTS * slot_bytes), (first, sum(pinned))]
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in sorted(wanted, key=lambda need: -need[1]) if size)
    smaller = "an exit layer after fewer layers" if pinned else "a smaller draft"
    return (
        f"{format_size(max(space.limit, 0))} of {space.name} are not enough: "
        f"the model needs at least {format_size(sum(size for _, size in wanted))} "
        f"({parts}); allow more (`{space.name.lower()}`), set a smaller `context`, or use {smaller}"
    )


# ------------------------------------------------------------------------------------------------ prediction


@dataclass(frozen=True)
class PassRates:
    """Measured rates. compute_s[i]: compute seconds of unit i; link rates in bytes/s."""

    compute_s: tuple[float, ...]
    disk_bytes_per_s: float
    host_to_device_bytes_per_s: float | None = None


def predict_pass_s(
    placement: Placement, units: Sequence[UnitCost], rates: PassRates, rows: int, entry_share: float = 1.0
) -> float:
    """Seconds of one pass over `rows` rows in the steady state: the third pass of a slot-by-slot simulation of rings.

    entry_share: the share of KV entries in RAM that is in use, and comes through the link beside its unit.
    """
    slots, far = placement.slots, set(placement.entries_in_ram)
    now = disk_free = link_free = began = 0.0
    freed, host_freed = deque([0.0] * slots.num), deque([0.0] * slots.num_host)
    # A ring reads ahead: a unit's transfer begins as soon as link and slot are free, independent of computation.
    for _ in range(3):
        began = now
        for i, (place, compute_s) in enumerate(zip(placement.places, rates.compute_s, strict=True)):
            if place is Tier.DEVICE:
                now += compute_s
                continue
            arrived, nbytes = freed.popleft(), units[i].pass_bytes(rows)
            if place is Tier.DISK:
                begins = host_freed.popleft() if host_freed else arrived
                disk_free = max(disk_free, begins) + nbytes / rates.disk_bytes_per_s
                arrived = max(arrived, disk_free)
            if i in far:
                nbytes += round(entry_share * units[i].entry_bytes)
            if rates.host_to_device_bytes_per_s is not None:
                arrived = link_free = max(link_free, arrived) + nbytes / rates.host_to_device_bytes_per_s
            if place is Tier.DISK and slots.num_host:
                host_freed.append(arrived)
            now = max(now, arrived) + compute_s
            freed.append(now)
    return now - began


def predict_experts_s(experts: ExpertsCost, slots: ExpertSlots, times: ExpertTimes, rows: int) -> float:
    """Seconds of the experts of one layer in a pass over `rows` rows.

    Slots are assumed to hold what rows choose no more often than the rest. Reads, the link, the CPU and the device work
    at the same time.
    """
    num_used = experts.num_used(rows)
    if slots.are_resident:
        return num_used * times.compute_s
    num_far = num_used * (1 - slots.device / experts.num)
    if not slots.host:  # the device computes in RAM
        return max(num_used * times.compute_s, num_far * times.disk_s)
    num_read = num_used * (1 - slots.host / experts.num)
    far_s = 1 / (1 / times.host_s + 1 / times.link_s) if times.link_s else 0.0
    return max((num_used - num_far) * times.compute_s, num_far * far_s, num_read * times.disk_s)
