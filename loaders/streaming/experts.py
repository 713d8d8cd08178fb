"""Experts of mixtures: all in memory, or in slots that keep those used latest, read from disk when rows choose them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ..files.readers import HostBuffer, Reader
from ..files.records import Record
from ..formats import Weight
from .stored_model import Experts, StoredUnit
from .stream import DiskFiller, Fill, HostSlot, Unit
from .weights import LentExperts


class ExpertSource(Protocol):
    """Lends experts of layers."""

    bytes_streamed: int  # read for passes so far

    def lend(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        """See `WeightSource.experts`."""
        ...

    def close(self) -> None: ...


class ResidentExperts:
    """All experts, in memory."""

    bytes_streamed = 0

    def __init__(self, experts: Mapping[int, list[dict[str, Weight]]]) -> None:
        """experts: of each layer that has some, in the order of their numbers."""
        self._experts = experts

    def lend(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        experts = self._experts[layer]
        yield {number: experts[number] for number in rows}

    def close(self) -> None:
        self._experts = {}


@dataclass
class Loan:
    """A slot with an expert, filled or being filled."""

    slot: HostSlot
    fill: Fill


class CachedExperts:
    """Experts on disk, with slots in RAM for those that were used latest. Not thread-safe."""

    def __init__(
        self, experts: Mapping[int, Experts], num_slots: int, slot_bytes: int, dtype: torch.dtype, reader: Reader
    ) -> None:
        self._experts, self._dtype = experts, dtype
        self._first, records = dict[int, Unit](), dict[Unit, Record]()  # first: the unit of a layer's expert 0
        for layer, units in experts.items():
            self._first[layer] = len(records)
            records |= {self._first[layer] + number: unit.record for number, unit in enumerate(units)}
        self._filler = DiskFiller(records, reader)
        self._free = [HostSlot(HostBuffer(slot_bytes)) for _ in range(num_slots)]
        self._loans = OrderedDict[Unit, Loan]()  # the one used latest comes last
        self.bytes_streamed = 0

    def lend(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        first = self._first[layer]
        here = {number for number in rows if first + number in self._loans}
        for number in here:
            self._loans.move_to_end(first + number)
        waiting = [number for number in rows if number not in here]
        in_use = {first + number for number in here}
        coming = self._fill(layer, waiting, in_use)
        if here:
            yield {number: self._bound(layer, number) for number in here}
        in_use.clear()
        while coming or waiting:
            coming += self._fill(layer, waiting, {first + number for number in coming})
            number = coming.pop(0)
            yield {number: self._bound(layer, number)}

    def _fill(self, layer: int, waiting: list[int], in_use: set[Unit]) -> list[int]:
        """Start to read the experts `waiting`, as far as slots can be had; those that are read now leave the list."""
        started = list[int]()
        while waiting and (slot := self._slot(in_use)) is not None:
            number = waiting.pop(0)
            unit = self._first[layer] + number
            self._loans[unit] = Loan(slot, self._filler.fill(slot, unit))
            self.bytes_streamed += self._unit(layer, number).record.read_bytes
            in_use.add(unit)
            started.append(number)
        return started

    def _slot(self, in_use: set[Unit]) -> HostSlot | None:
        """A free slot, or that of the expert whose last use is the longest ago; None if all are in use."""
        if self._free:
            return self._free.pop()
        unit = next((unit for unit in self._loans if unit not in in_use), None)
        return None if unit is None else self._loans.pop(unit).slot

    def _bound(self, layer: int, number: int) -> dict[str, Weight]:
        loan = self._loans[self._first[layer] + number]
        loan.fill.wait()
        return self._unit(layer, number).bind(loan.slot.tensor, self._dtype, is_kept=False)

    def _unit(self, layer: int, number: int) -> StoredUnit:
        return self._experts[layer][number]

    def close(self) -> None:
        for loan in self._loans.values():
            loan.fill.cancel()
            loan.fill.settle()
        self._loans.clear()
        self._filler.close()
        self._free = []
