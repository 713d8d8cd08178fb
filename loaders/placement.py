"""Decides what stays on the device, what waits in RAM, what stays on disk, and says what a pass will then take.

Pure functions of numbers: nothing is read, measured or allocated here. Knows nothing of models: a layer is its bytes
and its work; everything else that needs memory is an `Item` with a name that people understand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offspec.errors import MemoryLimitError

from .units import format_size

MAX_SLOTS, MIN_SLOTS = 3, 2


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs. read_bytes come through the link; slot_bytes hold them; resident_bytes if it stays."""

    read_bytes: int
    slot_bytes: int
    resident_bytes: int


@dataclass(frozen=True)
class Item:
    """Memory that is not a layer's: `on_device` bytes beside the arithmetic, `on_host` bytes in RAM.

    Where the CPU computes the two are the same memory and both count.
    """

    name: str
    on_device: int = 0
    on_host: int = 0


@dataclass(frozen=True)
class Limits:
    """Memory that may be used, in bytes: the device's own (None: the CPU computes, all is RAM), and RAM."""

    device: int | None
    ram: int


@dataclass(frozen=True)
class Slots:
    """Memory through which streamed layers come, `nbytes` for each slot.

    num: beside the arithmetic. num_host: in RAM, where a GPU's layers come from disk.
    """

    num: int
    num_host: int
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """Where each layer lies, by index, the slots through which the streamed ones come, and what all of it takes."""

    resident: tuple[int, ...]
    in_ram: tuple[int, ...]
    on_disk: tuple[int, ...]
    slots: Slots
    items: tuple[Item, ...]
    limits: Limits
    device_bytes: int
    ram_bytes: int

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that come through a link in every pass, in order."""
        return tuple(sorted(self.in_ram + self.on_disk))


def spread(num_layers: int, num_chosen: int) -> tuple[int, ...]:
    """`num_chosen` of the layers, as evenly as can be: what is chosen hides the transfers of what lies between."""
    return tuple((2 * i + 1) * num_layers // (2 * num_chosen) for i in range(num_chosen))


def scattered(num_layers: int) -> tuple[int, ...]:
    """All layers in an order whose every beginning lies about evenly among them (van der Corput's)."""
    bits = max(1, (num_layers - 1).bit_length())
    return tuple(i for i in (int(f"{n:0{bits}b}"[::-1], 2) for n in range(1 << bits)) if i < num_layers)


def place(layers: Sequence[LayerCost], items: Sequence[Item], limits: Limits, num_pinned: int = 0) -> Placement:
    """As many residents as fit, the rest in RAM where it all fits beside, else on disk.

    num_pinned: so many of the first layers have to be resident, because they draft. Raises MemoryLimitError, with the
    numbers and the remedy, where not even streaming every other layer fits.
    """
    if limits.device is None:
        return _place_on_cpu(layers, items, limits, num_pinned)
    return _place_on_gpu(layers, items, limits, limits.device, num_pinned)


def _place_on_cpu(layers: Sequence[LayerCost], items: Sequence[Item], limits: Limits, num_pinned: int) -> Placement:
    needs, slot_bytes = [(item.name, item.on_device + item.on_host) for item in items], _slot_bytes(layers)
    sizes = [c.resident_bytes for c in layers]
    resident, rest, num_slots, used = _fill("RAM", limits.ram, sizes, needs, slot_bytes, num_pinned)
    return Placement(resident, (), rest, Slots(num_slots, 0, slot_bytes), tuple(items), limits, 0, used)


def _place_on_gpu(
    layers: Sequence[LayerCost], items: Sequence[Item], limits: Limits, device: int, num_pinned: int
) -> Placement:
    needs, slot_bytes = [(item.name, item.on_device) for item in items], _slot_bytes(layers)
    sizes = [c.resident_bytes for c in layers]
    resident, rest, num_slots, used = _fill("VRAM", device, sizes, needs, slot_bytes, num_pinned)
    needs = [(item.name, item.on_host) for item in items]
    sizes = [layers[i].slot_bytes for i in rest]
    kept, on_disk, num_host_slots, used_ram = _fill("RAM", limits.ram, sizes, needs, slot_bytes)
    in_ram, on_disk = tuple(rest[i] for i in kept), tuple(rest[i] for i in on_disk)
    slots = Slots(num_slots, num_host_slots, slot_bytes)
    return Placement(resident, in_ram, on_disk, slots, tuple(items), limits, used, used_ram)


def _fill(
    tier: str,
    limit: int,
    sizes: Sequence[int],
    needs: Sequence[tuple[str, int]],
    slot_bytes: int,
    num_pinned: int = 0,
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Fill one tier with layers of these sizes: which stay, which do not, how many slots these need, all bytes used."""
    taken = sum(size for _, size in needs)
    kept, num_slots = _keep(sizes, limit - taken, slot_bytes, num_pinned)
    if kept is None:
        raise MemoryLimitError(_refusal(tier, limit, needs, slot_bytes, sizes[:num_pinned]))
    rest = tuple(i for i in range(len(sizes)) if i not in kept)
    return kept, rest, num_slots, taken + num_slots * slot_bytes + sum(sizes[i] for i in kept)


def _keep(sizes: Sequence[int], room: int, slot_bytes: int, num_pinned: int) -> tuple[tuple[int, ...] | None, int]:
    """The most layers that fit in `room` beside slots for the others, and how many slots; None where too few fit."""
    if sum(sizes) <= room:
        return tuple(range(len(sizes))), 0
    num_free = len(sizes) - num_pinned
    for num_slots in (MAX_SLOTS, MIN_SLOTS):
        left = room - num_slots * slot_bytes
        for count in range(num_free - 1, -1, -1):
            chosen = (*range(num_pinned), *(num_pinned + i for i in spread(num_free, count)))
            if sum(sizes[i] for i in chosen) <= left:
                return chosen, num_slots
    return None, 0


def _slot_bytes(layers: Sequence[LayerCost]) -> int:
    return max((layer.slot_bytes for layer in layers), default=0)


def _refusal(
    tier: str, limit: int, needs: Sequence[tuple[str, int]], slot_bytes: int, pinned: Sequence[int] = ()
) -> str:
    slots, first = f"{MIN_SLOTS} layers in flight", f"{len(pinned)} before the exit, which draft,"
    wanted = [*needs, (slots, MIN_SLOTS * slot_bytes), (first, sum(pinned))]
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in sorted(wanted, key=lambda need: -need[1]) if size)
    smaller = "an exit layer after fewer layers" if pinned else "a smaller draft"
    return (
        f"{format_size(max(limit, 0))} of {tier} are too little: "
        f"at least {format_size(sum(size for _, size in wanted))} are needed "
        f"({parts}); allow more with --{tier.lower()}, ask for a smaller --context, or take {smaller}"
    )


# ------------------------------------------------------------------------------------------------ prediction


@dataclass(frozen=True)
class PassRates:
    """Measured rates. compute_s[i]: seconds of arithmetic in layer i; link rates in bytes/s."""

    compute_s: tuple[float, ...]
    disk_bytes_per_s: float
    host_to_device_bytes_per_s: float | None = None


def predict_pass_s(placement: Placement, layers: Sequence[LayerCost], rates: PassRates) -> float:
    """Seconds of one pass in the steady state: the third, where the ring is played through slot by slot."""
    on_disk, streamed = set(placement.on_disk), set(placement.streamed)
    now = disk_free = link_free = began = 0.0
    freed, host_freed = deque([0.0] * placement.slots.num), deque([0.0] * placement.slots.num_host)
    # The ring reads ahead, so a layer's transfer begins as soon as link and slot are free, whatever is computing.
    for _ in range(3):
        began = now
        for i, compute_s in enumerate(rates.compute_s):
            if i in streamed:
                arrived, nbytes = freed.popleft(), layers[i].read_bytes
                if i in on_disk:
                    begins = host_freed.popleft() if host_freed else arrived
                    disk_free = max(disk_free, begins) + nbytes / rates.disk_bytes_per_s
                    arrived = max(arrived, disk_free)
                if rates.host_to_device_bytes_per_s is not None:
                    link_free = arrived = max(link_free, arrived) + nbytes / rates.host_to_device_bytes_per_s
                if i in on_disk and placement.slots.num_host:
                    host_freed.append(arrived)
                now = max(now, arrived) + compute_s
                freed.append(now)
            else:
                now += compute_s
    return now - began
