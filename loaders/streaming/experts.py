"""Experts of mixtures: all in memory, or in slots that keep those most in use, read from disk when rows choose them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from offspec.backends.expert_table import ExpertTable
from offspec.backends.weights import Weight

from ..files.readers import BLOCK_BYTES, HUGE_PAGE_BYTES, FileStates, HostBuffer, Reader, align_up
from ..files.records import Record
from .small_transfers import to_device
from .stored_model import Experts
from .stream import NUM_READERS, DiskFiller, Fill, HostSlot, Unit
from .use_ranks import UseRanks
from .weights import LentExperts

IN_FLIGHT = 16  # experts that are read at once, if no others are used more; more would only drop others earlier
LEAST_HITS = 0.5  # share of the experts read ahead that must be used, so that others are read ahead
HITS_MEMORY = 0.98  # what the measured share keeps at each layer


class ExpertSource(Protocol):
    """Lends experts of layers."""

    @property
    def bytes_streamed(self) -> int:
        """Bytes read for passes so far."""

    @property
    def reads_ahead(self) -> bool:
        """Whether `expect` is of use."""

    def lend(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        """See `WeightSource.experts`."""

    def expect(self, layer: int, rows: Mapping[int, int]) -> None:
        """See `WeightSource.expect`."""

    def close(self) -> None: ...


class ResidentExperts:
    """All experts, in memory."""

    bytes_streamed = 0
    reads_ahead = False

    def __init__(
        self, experts: Mapping[int, list[dict[str, Weight]]], dtype: torch.dtype, device: torch.device
    ) -> None:
        """experts: of each layer that has some, in the order of their numbers. dtype: of rows."""
        self._experts, self._dtype, self._device = experts, dtype, device
        self._tables = dict[int, ExpertTable | None]()

    def lend(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        experts = self._experts[layer]
        yield {number: experts[number] for number in rows}

    def table(self, layer: int) -> ExpertTable | None:
        """See `WeightSource.expert_table`."""
        if layer not in self._tables:
            experts = self._experts[layer]
            table = ExpertTable.of(dict(enumerate(experts)), len(experts), self._dtype)
            self._tables[layer] = None if table is None else table.on(partial(to_device, device=self._device))
        return self._tables[layer]

    def expect(self, layer: int, rows: Mapping[int, int]) -> None: ...

    def close(self) -> None:
        self._experts, self._tables = {}, {}


@dataclass
class HeldExpert:
    """A slot with an expert, filled or being filled. weights: as they are lent, once it is filled."""

    slot: HostSlot
    fill: Fill
    weights: Mapping[str, Weight] | None = None

    @property
    def bound(self) -> Mapping[str, Weight]:
        assert self.weights is not None, "of an expert that is lent"
        return self.weights


class PassCount:
    """The number of the current pass, by the order in which layers are requested."""

    def __init__(self) -> None:
        self.number, self._layer, self._times = 0, -1, 0
        self._repeats = False  # whether the layer before was requested several times, for chunks of rows

    def enter(self, layer: int) -> None:
        if layer == self._layer:
            self._times += 1
            return
        self._repeats = layer > self._layer and self._times > 1
        self.number += layer < self._layer
        self._layer, self._times = layer, 1

    @property
    def repeats_layer(self) -> bool:
        """Whether the current layer will probably be requested again in this pass."""
        return self._repeats or self._times > 1


class Foresight:
    """Experts of a later layer that are likely to be chosen, and how often such predictions were right."""

    def __init__(self) -> None:
        self.units: list[Unit] = []  # of `_layer`, that were not in memory when they were announced
        self._layer = -1
        self._announced: tuple[int, list[Unit]] | None = None
        self._hits = 1.0  # share of such experts that were chosen

    @property
    def pays(self) -> bool:
        return self._hits >= LEAST_HITS

    def announce(self, layer: int, units: list[Unit]) -> None:
        """They hold from the next `enter` on."""
        self._announced = (layer, units)

    def enter(self, layer: int, chosen: Collection[Unit]) -> list[Unit]:
        """The rows chose these experts of `layer`. Returns the predicted experts that no layer will choose now."""
        wrong, next_layer = list[Unit](), self._layer if self._announced is None else self._announced[0]
        if layer == self._layer:
            wrong = [unit for unit in self.units if unit not in chosen]
            share = 1 - len(wrong) / len(self.units) if self.units else self._hits
            self._hits = HITS_MEMORY * self._hits + (1 - HITS_MEMORY) * share
        elif next_layer != self._layer:  # a pass was aborted
            wrong = self.units
        if layer == self._layer or next_layer != self._layer:
            self.units = []
        if self._announced is not None:
            self.units += [unit for unit in self._announced[1] if unit not in self.units]
        self._layer, self._announced = next_layer, None
        return wrong


class CachedExperts:
    """Experts on disk, with slots in RAM for those that are used most and latest (`UseRanks`). Not thread-safe.

    All that a request lacks is read at once, as slots allow. Experts announced by `expect` are read while nothing else
    is, as long as most of them turn out to be used.
    """

    def __init__(
        self, experts: Mapping[int, Experts], num_slots: int, slot_bytes: int, dtype: torch.dtype, reader: Reader
    ) -> None:
        """Raises ValueError without slots: layers would be computed without their experts."""
        if num_slots < 1:
            raise ValueError("experts on disk need a slot in memory at least")
        self._experts, self._slot_bytes, self.dtype = experts, slot_bytes, dtype
        self._first, records = dict[int, Unit](), dict[Unit, Record]()  # first: the unit of a layer's expert 0
        for layer, units in experts.items():
            self._first[layer] = len(records)
            records |= {self._first[layer] + number: unit.record for number, unit in enumerate(units)}
        self._num_experts = len(records)
        self._files = FileStates({extent.path for record in records.values() for extent in record.extents})
        self._filler = DiskFiller(records, reader)
        # In one piece: a slot of its own would begin and end within huge pages.
        self.memory, parts = HostBuffer.side_by_side([slot_bytes] * num_slots)
        self._free = [HostSlot(part) for part in parts]
        self._num_slots, self._spare = num_slots, list[HostSlot]()
        self._held = dict[Unit, HeldExpert]()
        self._ranks, self._passes, self._foresight = UseRanks(), PassCount(), Foresight()
        self._needed = set[Unit]()  # by the request that is being served, in slots, and not computed yet
        self._of_layer = range(0)  # that will probably be requested again for further rows

    @property
    def bytes_streamed(self) -> int:
        return self._filler.bytes_read

    @property
    def reads_ahead(self) -> bool:
        """Until all are in memory: a prediction takes a router's arithmetic, and on a GPU a wait of the host."""
        return len(self._held) < self._num_experts

    @property
    def keeps_all(self) -> bool:
        """Whether no slot gets another expert."""
        return self._num_slots >= self._num_experts

    def expect(self, layer: int, rows: Mapping[int, int]) -> None:
        """The next `lend` begins to read them, after what it needs itself."""
        units = [self._first[layer] + number for number in sorted(rows, key=lambda number: -rows[number])]
        self._foresight.announce(layer, [unit for unit in units if unit not in self._held])

    def lend(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        held = self.lend_held(layer, rows)
        return ({number: each.bound for number, each in group.items()} for group in held)

    def lend_held(self, layer: int, rows: Mapping[int, int]) -> Iterator[Mapping[int, HeldExpert]]:
        """`lend` with the memory of the experts. Reads begin at once."""
        self._enter(layer, {self._first[layer] + number: count for number, count in rows.items()})
        units = [self._first[layer] + number for number in rows]
        coming, waiting = [u for u in units if u in self._held], [u for u in units if u not in self._held]
        self._needed = set(coming)
        self._request(coming, waiting)
        return self._groups(layer, coming, waiting)

    def spare(self, nbytes: int) -> None:
        """Use `nbytes` of additional memory, until the next call."""
        each = align_up(self._slot_bytes, HUGE_PAGE_BYTES if self._slot_bytes >= HUGE_PAGE_BYTES else BLOCK_BYTES)
        num_slots = min(max(0, nbytes) // each, self._num_experts - self._num_slots)
        added = [HostSlot(HostBuffer(self._slot_bytes)) for _ in range(num_slots - len(self._spare))]
        self._spare, gone = [*self._spare, *added][:num_slots], self._spare[num_slots:]
        self._free += added
        for unit in [unit for unit, held in self._held.items() if held.slot in gone]:
            self._drop(unit)
        self._free = [slot for slot in self._free if slot not in gone]

    def close(self) -> None:
        for held in self._held.values():
            self._filler.withdraw(held.fill)
            held.fill.cancel()
        for held in self._held.values():
            held.fill.settle()
        self._filler.close()
        self._held, self._free, self._spare = {}, [], []

    # ---------------------------------------------------------------------------------------- a request

    def _enter(self, layer: int, rows: Mapping[Unit, int]) -> None:
        """Count the uses of a request, and compare it with what was predicted."""
        first, num_rows = self._first[layer], sum(rows.values())
        self._passes.enter(layer)
        self._of_layer = range(first, first + len(self._experts[layer]) if self._passes.repeats_layer else first)
        for unit in self._foresight.enter(layer, rows):
            if unit in self._held:
                self._filler.withdraw(self._held[unit].fill)
                if self._held[unit].fill.cancelled:
                    self._drop(unit)
        for unit, count in rows.items():
            self._ranks.use(unit, self._passes.number, count / num_rows)
            if unit in self._held:
                self._filler.hurry(self._held[unit].fill)
                if self._held[unit].fill.cancelled:  # its read failed, or was given up
                    self._drop(unit)

    def _groups(self, layer: int, coming: list[Unit], waiting: list[Unit]) -> Iterator[Mapping[int, HeldExpert]]:
        """coming: experts with slots; waiting: those without. Those that are here come first."""
        first = self._first[layer]
        while coming:
            here = [unit for unit in coming if self._held[unit].fill.is_done] or coming[:1]
            group = dict[int, HeldExpert]()
            for unit in here:
                held = group[unit - first] = self._held[unit]
                if held.weights is None:
                    held.fill.wait()
                    expert = self._experts[layer][unit - first]
                    held.weights = expert.bind(held.slot.tensor, self.dtype, is_kept=False)
            yield group
            self._needed.difference_update(here)
            coming = [unit for unit in coming if unit not in here]
            self._request(coming, waiting)
        if layer == max(self._experts):  # the pass has ended: were the files changed meanwhile?
            self._files.check()

    def _request(self, coming: list[Unit], waiting: list[Unit]) -> None:
        """Begin to read the experts `waiting`, as far as slots can be had; they are then `coming`."""
        num_reads = sum(self._held[unit].weights is None for unit in coming)
        while waiting and num_reads < IN_FLIGHT:
            most_rank = math.inf if num_reads < NUM_READERS else self._ranks.rank(waiting[0])
            if (slot := self._slot(self._needed, most_rank)) is None:
                break
            unit = waiting.pop(0)
            self._fill(slot, unit)
            self._needed.add(unit)
            coming.append(unit)
            num_reads += 1
        if not waiting:
            self._read_ahead()

    def _read_ahead(self) -> None:
        if not self._foresight.pays:
            return
        likely = self._foresight.units
        num_reads = sum(unit in self._held and not self._held[unit].fill.is_done for unit in likely)
        for unit in likely:
            if num_reads >= IN_FLIGHT:
                return
            if unit not in self._held:
                if (slot := self._slot({*self._needed, *self._of_layer, *likely})) is None:
                    return
                self._fill(slot, unit, is_ahead=True)
                num_reads += 1

    # ---------------------------------------------------------------------------------------- slots

    def _slot(self, needed: Collection[Unit], most_rank: float = math.inf) -> HostSlot | None:
        """A free slot, or that of the expert of the lowest rank; None if those with at most this rank are needed."""
        if not self._free:
            later = {*needed, *self._of_layer, *self._foresight.units}
            unit = self._ranks.lowest(later)
            if unit is None:
                unit = self._ranks.lowest(needed)
            if unit is not None and self._ranks.rank(unit) <= most_rank:
                self._drop(unit)
        return self._free.pop() if self._free else None

    def _fill(self, slot: HostSlot, unit: Unit, *, is_ahead: bool = False) -> None:
        self._held[unit] = HeldExpert(slot, self._filler.fill(slot, unit, is_ahead=is_ahead))
        self._ranks.hold(unit)

    def _drop(self, unit: Unit) -> None:
        held = self._held.pop(unit)
        if not held.fill.is_done:
            self._filler.withdraw(held.fill)
            held.fill.cancel()
            held.fill.settle()
        self._ranks.drop(unit)
        self._free.append(held.slot)
