"""Experts of a mixture beside a device with memory of its own: some in its slots, the others in RAM or on disk.

An expert in a slot is computed on the device. Of the others, those of few rows are computed on the CPU, whose memory
they are in, and those of many rows go through the link, both at the same time. Experts that the CPU computes are copied
to slots for later passes while the link has nothing else to do, if they are used more and later than those there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from offspec.backends.expert_table import PlacedExpert

from ..accelerators.accelerator import Accelerator, DeviceEvent
from ..accelerators.cuda import span
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
    """A device slot with an expert. arrival: the number of its copies. weights: as they are lent, once it was used."""

    slot: DeviceSlot
    arrival: int
    weights: PlacedExpert | None = None


class Copies:
    """Copies to slots, in order on a stream of their own: those that begin together share the event of their arrival.

    number: of the last ones.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._stream = accelerator, accelerator.new_stream()
        self.number = 0
        self._last: DeviceEvent | None = None
        self._awaited: tuple[object, int] = (None, 0)  # a stream, and the number of the last that it waits for

    def begin(self, copies: Sequence[tuple[DeviceSlot, Tensor]]) -> int:
        """Copy each tensor to the beginning of its slot, after the slot's use. Returns their number."""
        arrival = self._accelerator.new_event(blocking=True)
        with self._accelerator.on(self._stream), span("copy"):
            for slot, source in copies:
                self._stream.wait_event(slot.free)
                slot.tensor[: len(source)].copy_(source, non_blocking=True)
                slot.ready = arrival
            arrival.record(self._stream)
        self.number, self._last = self.number + 1, arrival
        return self.number

    def enter(self, experts: Collection[DeviceExpert]) -> None:
        """Make later work of the compute stream wait for the newest of these: the others arrived before it."""
        newest, stream = max(experts, key=lambda expert: expert.arrival), self._accelerator.current_stream
        if self._awaited[0] != stream or self._awaited[1] < newest.arrival:
            stream.wait_event(newest.slot.ready)
            self._awaited = stream, newest.arrival

    def leave(self, experts: Iterable[DeviceExpert]) -> None:
        """Record the end of use of these."""
        end = self._accelerator.new_event()
        end.record(self._accelerator.current_stream)
        for expert in experts:
            expert.slot.free = end

    @property
    def are_over(self) -> bool:
        return self._last is None or self._last.query()

    def finish(self) -> None:
        """Wait on the host until they are over: pinned memory and slots may be freed only then."""
        if self._last is not None:
            self._last.synchronize()


class DeviceExperts:
    """Experts in slots of a device, which keep those used most and latest, over experts in RAM. Not thread-safe.

    The host waits for copies only where experts are also read from disk: into the memory that is being copied.
    """

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
        self._experts, self._host, self._choice = experts, host, choice
        first, self._first = 0, dict[int, Unit]()
        for layer, units in experts.items():
            self._first[layer] = first
            first += len(units)
        nbytes = max(unit.record.nbytes for units in experts.values() for unit in units)
        self._free = DeviceSlot.several(num_slots, nbytes, accelerator)
        self._held = dict[Unit, DeviceExpert]()
        self._ranks, self._passes = UseRanks(), PassCount()
        self._copies = Copies(accelerator)
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
        self._copies.finish()
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
            is_idle, before = self._copies.are_over, self._copies.number
            copied = self._copy_some(layer, waiting, group)
            computed = HostExperts({number: group[number].bound for number in group if number in on_host})
            if is_idle:
                self._promote(layer, {number: on_host[number] for number in computed}, group, copied)
            if computed:
                yield computed
            while copied:
                yield self._entered(layer, copied)
                self._leave(layer, copied)
                copied = self._copy_some(layer, waiting, group)
            if self._copies.number > before and not self._host.keeps_all:
                self._copies.finish()  # because the group's memory may be read over next

    # ---------------------------------------------------------------------------------------- slots

    def _entered(self, layer: int, numbers: Sequence[int]) -> LentExperts:
        """Experts in slots, after their copies in the order of the device."""
        held = {number: self._held[self._first[layer] + number] for number in numbers}
        self._copies.enter(held.values())
        for number, expert in held.items():
            if expert.weights is None:
                bound = self._unit(layer, number).bind(expert.slot.tensor, self._host.dtype, is_kept=False)
                expert.weights = PlacedExpert(bound, self._host.dtype)
        return {number: expert.weights for number, expert in held.items() if expert.weights is not None}

    def _leave(self, layer: int, numbers: Sequence[int]) -> None:
        self._copies.leave(self._held[self._first[layer] + number] for number in numbers)

    def _copy_some(self, layer: int, waiting: list[int], group: Mapping[int, HeldExpert]) -> list[int]:
        """Begin to copy the experts `waiting` to slots, as far as there are some; they leave the list."""
        slots = dict[int, DeviceSlot]()
        while waiting and (slot := self._slot({self._first[layer] + number for number in slots})) is not None:
            slots[waiting.pop()] = slot
        self._copy(layer, slots, group)
        return list(slots)

    def _promote(
        self, layer: int, on_host: Mapping[int, int], group: Mapping[int, HeldExpert], needed: Sequence[int]
    ) -> None:
        """Copy experts for later while the CPU computes them, those used most and latest first."""
        if self._choice is None:
            return
        first, slots = self._first[layer], dict[int, DeviceSlot]()
        idle_s = sum(map(self._choice.host_s, on_host.values())) - len(needed) * self._choice.link_s
        self._idle_copies = min(self._idle_copies + max(0.0, idle_s) / self._choice.link_s, len(self._experts[layer]))
        for number in sorted(on_host, key=lambda number: -self._ranks.rank(first + number)):
            but = {first + other for other in (*needed, *slots)}
            if self._idle_copies < 1 or (slot := self._slot(but, self._ranks.rank(first + number))) is None:
                break
            self._idle_copies -= 1
            slots[number] = slot
        self._copy(layer, slots, group)

    def _slot(self, needed: Collection[Unit], below: float | None = None) -> DeviceSlot | None:
        """A free slot, or that of the expert of the lowest rank, if its rank is less than `below`; or None."""
        if self._free:
            return self._free.pop()
        lowest = self._ranks.lowest(needed)
        if lowest is None or (below is not None and self._ranks.rank(lowest) >= below):
            return None
        self._ranks.drop(lowest)
        return self._held.pop(lowest).slot

    def _copy(self, layer: int, slots: Mapping[int, DeviceSlot], group: Mapping[int, HeldExpert]) -> None:
        """Begin to copy experts to slots; the slots then hold them."""
        if not slots:
            return
        copies = list[tuple[DeviceSlot, Tensor]]()
        for number, slot in slots.items():
            record = self._unit(layer, number).record
            slot.shift = record.shift
            copies.append((slot, group[number].slot.tensor[: record.nbytes]))
            self._link_bytes += record.read_bytes
        arrival = self._copies.begin(copies)
        for number, slot in slots.items():
            self._held[self._first[layer] + number] = DeviceExpert(slot, arrival)
            self._ranks.hold(self._first[layer] + number)

    def _unit(self, layer: int, number: int) -> StoredUnit:
        return self._experts[layer][number]
