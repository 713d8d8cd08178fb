"""Experts of a mixture beside a device with memory of its own: some in its slots, the others in RAM or on disk.

An expert in a slot is computed on the device. Of the others, those of few rows are computed on the CPU, whose memory
they are in, and those of many rows go through the link, both at the same time. Experts that the CPU computes are copied
to slots for later passes while the link has nothing else to do, if they are used more and later than those there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..accelerators.accelerator import Accelerator
from ..accelerators.cuda import span
from ..formats import Weight
from .experts import CachedExperts, HeldExpert, PassCount
from .link import DeviceSlot
from .stored_model import Experts, StoredUnit
from .stream import Unit
from .use_ranks import UseRanks
from .weights import HostExperts, LentExperts


@dataclass(frozen=True)
class ExpertChoice:
    """Measured seconds of an expert: on the CPU with so many rows, and through the link."""

    host_s: Callable[[int], float]
    link_s: float

    def num_on_host(self, rows: Sequence[int]) -> int:
        """How many of some experts the CPU should compute, those of the fewest rows. rows: ascending, of each."""
        on_host = [0.0, *accumulate(map(self.host_s, rows))]
        return min(range(len(on_host)), key=lambda num: max(on_host[num], (len(rows) - num) * self.link_s))


@dataclass
class DeviceExpert:
    """A device slot with an expert. weights: as they are lent, once it has been used."""

    slot: DeviceSlot
    weights: Mapping[str, Weight] | None = None


class DeviceExperts:
    """Experts in slots of a device, which keep those used most and latest, over experts in RAM. Not thread-safe."""

    def __init__(
        self,
        experts: Mapping[int, Experts],
        host: CachedExperts,
        num_slots: int,
        accelerator: Accelerator,
        choice: ExpertChoice | None,
    ) -> None:
        """experts: with the formats' tables on the device. host: all of them, in slots in RAM; closed with this.

        choice: None moves all experts to the device.
        """
        self._experts, self._host, self._accelerator, self._choice = experts, host, accelerator, choice
        first, self._first = 0, dict[int, Unit]()
        for layer, units in experts.items():
            self._first[layer] = first
            first += len(units)
        nbytes = max(unit.record.nbytes for units in experts.values() for unit in units)
        self._free = DeviceSlot.several(num_slots, nbytes, accelerator)
        self._held = dict[Unit, DeviceExpert]()
        self._ranks, self._passes = UseRanks(), PassCount()
        self._stream = accelerator.new_stream()
        self._idle_copies = 0.0  # copies for which the link has had time
        self._link_bytes = 0

    @property
    def bytes_streamed(self) -> int:
        return self._host.bytes_streamed + self._link_bytes

    @property
    def reads_ahead(self) -> bool:
        return self._host.reads_ahead

    def expect(self, layer: int, rows: Mapping[int, int]) -> None:
        first = self._first[layer]
        self._host.expect(layer, {number: count for number, count in rows.items() if first + number not in self._held})

    def lend(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        self._passes.enter(layer)
        first, num_rows = self._first[layer], sum(rows.values())
        for number, count in rows.items():
            self._ranks.use(first + number, self._passes.number, count / num_rows)
        here = [number for number in rows if first + number in self._held]
        far = sorted((number for number in rows if number not in here), key=lambda number: rows[number])
        counts = [rows[number] for number in far]
        num_on_host = 0 if self._choice is None else self._choice.num_on_host(counts)
        from_host = self._host.lend_held(layer, {number: rows[number] for number in far})
        on_host = dict(zip(far[:num_on_host], counts, strict=False))
        return self._groups(layer, here, on_host, from_host)

    def close(self) -> None:
        self._stream.synchronize()  # pinned memory and slots may be freed only after the copies
        self._host.close()
        self._held, self._free = {}, []

    def _groups(
        self,
        layer: int,
        here: Sequence[int],
        on_host: Mapping[int, int],
        from_host: Iterator[Mapping[int, HeldExpert]],
    ) -> Iterator[LentExperts]:
        """here: experts in slots. on_host: those that the CPU computes, with their rows."""
        if here:
            yield self._entered(layer, here)
            self._leave(layer, here)
        for group in from_host:
            waiting = [number for number in group if number not in on_host]
            copied = self._copy_some(layer, waiting, group)
            computed = HostExperts({number: group[number].bound for number in group if number in on_host})
            promoted = self._promote(layer, {number: on_host[number] for number in computed}, group, copied)
            if computed:
                yield computed
            while copied:
                yield self._entered(layer, copied)
                self._leave(layer, copied)
                copied = self._copy_some(layer, waiting, group)
            for slot in promoted:  # the group's memory may be read over afterwards
                slot.ready.synchronize()

    # ---------------------------------------------------------------------------------------- slots

    def _entered(self, layer: int, numbers: Sequence[int]) -> LentExperts:
        """Experts in slots, after their copies in the order of the device."""
        lent = dict[int, Mapping[str, Weight]]()
        for number in numbers:
            held = self._held[self._first[layer] + number]
            held.slot.enter()
            if held.weights is None:
                held.weights = self._unit(layer, number).bind(held.slot.tensor, self._host.dtype, is_kept=False)
            lent[number] = held.weights
        return lent

    def _leave(self, layer: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._held[self._first[layer] + number].slot.leave()

    def _copy_some(self, layer: int, waiting: list[int], group: Mapping[int, HeldExpert]) -> list[int]:
        """Begin to copy the experts `waiting` to slots, as far as there are some; they leave the list."""
        copied = list[int]()
        while waiting and (slot := self._slot({self._first[layer] + number for number in copied})) is not None:
            copied.append(waiting.pop())
            self._copy(layer, copied[-1], group, slot)
        return copied

    def _promote(
        self, layer: int, on_host: Mapping[int, int], group: Mapping[int, HeldExpert], needed: Sequence[int]
    ) -> list[DeviceSlot]:
        """Copy experts for later while the CPU computes them, those used most and latest first. Returns their slots."""
        if self._choice is None:
            return []
        first, slots = self._first[layer], list[DeviceSlot]()
        but = {first + number for number in needed}
        idle_s = sum(map(self._choice.host_s, on_host.values())) - len(needed) * self._choice.link_s
        self._idle_copies = min(self._idle_copies + max(0.0, idle_s) / self._choice.link_s, len(self._experts[layer]))
        for number in sorted(on_host, key=lambda number: -self._ranks.rank(first + number)):
            if self._idle_copies < 1 or (slot := self._slot(but, self._ranks.rank(first + number))) is None:
                break
            self._idle_copies -= 1
            self._copy(layer, number, group, slot)
            but.add(first + number)
            slots.append(slot)
        return slots

    def _slot(self, needed: set[Unit], below: float | None = None) -> DeviceSlot | None:
        """A free slot, or that of the expert of the lowest rank, if its rank is less than `below`; or None."""
        if self._free:
            return self._free.pop()
        lowest = self._ranks.lowest(needed)
        if lowest is None or (below is not None and self._ranks.rank(lowest) >= below):
            return None
        self._ranks.drop(lowest)
        return self._held.pop(lowest).slot

    def _copy(self, layer: int, number: int, group: Mapping[int, HeldExpert], slot: DeviceSlot) -> None:
        record = self._unit(layer, number).record
        source = group[number].slot.tensor[: record.nbytes]
        slot.shift = record.shift
        with self._accelerator.on(self._stream), span("copy"):
            self._stream.wait_event(slot.free)
            slot.tensor[: record.nbytes].copy_(source, non_blocking=True)
            slot.ready.record(self._stream)
        self._link_bytes += record.read_bytes
        self._held[self._first[layer] + number] = DeviceExpert(slot)
        self._ranks.hold(self._first[layer] + number)

    def _unit(self, layer: int, number: int) -> StoredUnit:
        return self._experts[layer][number]
