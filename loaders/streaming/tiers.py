"""A `WeightSource` over the tiers of a `Placement`: resident, in RAM, or on disk.

A `Reader` reads every byte into private memory, without the page cache, so the memory in use is the planned memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import torch

from offspec.backends.device_kinds import kind_of
from offspec.backends.expert_table import ExpertTable
from offspec.backends.weights import Weight, as_table, dense, take_rows

from ..accelerators.accelerator import accelerator_of
from ..files.readers import FileReader, FileStates, HostBuffer, Reader, align_down, align_up
from ..files.records import Record
from ..formats import StoredTable
from ..params import Progress
from .device_experts import DeviceExperts, ExpertChoice
from .experts import CachedExperts, ExpertSource, ResidentExperts
from .link import DeviceFiller, DeviceSlot, pin_whole
from .placement import Placement, scattered
from .small_transfers import to_device
from .stored_model import StoredModel, StoredUnit, record_of
from .stream import DiskFiller, HostSlot, PlainStream, Ring, Stream, Unit, read_record
from .weights import LentExperts, missing

LEAST_STREAMED = 4  # layers that always stay on disk: more than a ring reads ahead


@dataclass(frozen=True)
class TableOnDisk:
    """A table in a file, read by rows, for an embedding that is not in memory."""

    stored: StoredTable
    reader: Reader
    fetched: HostBuffer = field(init=False)
    _lock: Lock = field(default_factory=Lock, init=False)  # a draft may ask for rows during the target's pass

    def __post_init__(self) -> None:
        object.__setattr__(self, "fetched", HostBuffer(align_up(self._row_bytes) + align_up(1)))

    @property
    def _row_bytes(self) -> int:
        return self.stored.streamed[0].nbytes // self.stored.shape[0]

    def take(self, indices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [T, columns] in `dtype`; each distinct row is read once."""
        distinct, where = torch.unique(indices, return_inverse=True)
        with self._lock:
            rows = torch.stack([self._read(row) for row in distinct.tolist()])
        return dense(self.stored.bind_rows(rows), dtype)[where]

    def _read(self, row: int) -> torch.Tensor:
        info = self.stored.streamed[0]
        begin = info.offset + row * self._row_bytes
        first = align_down(begin)
        least = begin + self._row_bytes - first
        self.reader.read(info.path, first, self.fetched.view[: align_up(least)], least)
        return self.fetched.tensor[begin - first : least].clone()


@dataclass(frozen=True)
class TierOptions:
    """How weights are read and kept; the results are the same.

    synchronous: the plain twin, which reads a layer on request. reader: None is a `FileReader`.
    expert_choice: costs by which the CPU beside a GPU computes some experts; None: it computes none.
    """

    synchronous: bool = False
    reader: Reader | None = None
    expert_choice: ExpertChoice | None = None


class TieredWeights:
    """Weights placed by a `Placement`: loads the resident layers and streams the others through a ring, on CPU or GPU.

    row_tables: full names of tables that are used only by rows, such as an embedding to which no head is tied. They
    stay in RAM, or on disk if layers do. progress(bytes_done, bytes_total) reports the reads before the first pass, and
    ends at the total.
    """

    def __init__(
        self,
        model: StoredModel,
        placement: Placement,
        *,
        dtype: torch.dtype,
        device: torch.device,
        row_tables: Collection[str] = (),
        options: TierOptions | None = None,
        progress: Progress | None = None,
    ) -> None:
        options = options or TierOptions()
        self._model, self._placement, self._dtype, self._device = model.to(device), placement, dtype, device
        self._accelerator = accelerator_of(device)
        num_elements = model.scratch_elements(placement.streamed, dtype)
        self.scratch = torch.empty(num_elements, dtype=dtype, device=device) if num_elements else None
        self._reader = options.reader or FileReader()
        self._unit_bytes = 0
        self.unpinned_bytes = 0  # bytes in RAM for a GPU that the system refused to pin
        self._pinned: list[HostBuffer] = []
        self._staged: HostBuffer | None = None  # a buffer for reading layers that are then converted
        self._shared: dict[str, Weight] = {}
        self._wanted, self._kept = frozenset[int](), dict[int, dict[str, Weight]]()  # see `spare`
        self._resident: dict[int, dict[str, Weight]] = {}
        self._experts: ExpertSource | None = None
        self._host_experts, self._expert_choice = model.experts, options.expert_choice
        self._stream: Stream | None = None
        tables = {n: self._model.shared.get(n) for n in row_tables if self._placement.on_disk}
        self._rows = {n: TableOnDisk(each, self._reader) for n, each in tables.items() if isinstance(each, StoredTable)}
        self._files = FileStates(self._streamed_paths())
        shared = {n: StoredUnit({n: stored}) for n, stored in self._model.shared.items() if n not in self._rows}
        read_once = placement.resident if options.synchronous else placement.resident + placement.in_ram
        layers = (*shared.values(), *(self._model.layers[i] for i in read_once))
        self._done, self._total = 0, sum(layer.record.read_bytes for layer in layers)
        if self._has_all_experts:
            self._total += sum(record_of(experts).read_bytes for experts in self._model.experts.values())
        self._progress = progress
        try:
            self._load_all(shared, row_tables, options)
        except BaseException:
            self.close()
            raise

    def _load_all(self, shared: Mapping[str, StoredUnit], row_tables: Collection[str], options: TierOptions) -> None:
        """What stays in memory; then the stream of the others begins. shared: without tables on disk."""
        placement, device = self._placement, self._device
        for name, unit in shared.items():
            self._shared |= self._load(unit, torch.device("cpu") if name in row_tables else device)
        for i in placement.resident:
            self._resident[i] = self._load(self._model.layers[i], device)
        self._staged = None
        self._experts = self._open_experts()
        if placement.streamed:
            self._stream = self._open_stream(options.synchronous)
        if self._has_all_experts and not placement.on_disk:  # no pass reads the disk
            self._reader.close()

    @property
    def num_layers(self) -> int:
        return len(self._model.layers)

    @property
    def bytes_streamed(self) -> int:
        return self._unit_bytes + (0 if self._experts is None else self._experts.bytes_streamed)

    @property
    def is_resident(self) -> bool:
        return self._stream is None and self._has_all_experts

    @property
    def _has_all_experts(self) -> bool:
        """Whether every expert is on the device."""
        return not self._model.experts or self._placement.experts.are_resident

    @property
    def placement(self) -> Placement:
        """The place of each unit."""
        return self._placement

    @contextmanager
    def lend(self, unit: Unit) -> Iterator[Mapping[str, Weight]]:
        if (here := self._resident.get(unit) or self._kept.get(unit)) is not None:
            yield here
            return
        assert self._stream is not None
        with self._stream.lend(unit) as buffer:
            weights = self._model.layers[unit].bind(buffer, self._dtype, is_kept=False)
            yield weights
            if unit in self._wanted:
                assert isinstance(self._stream, Ring)
                assert isinstance(self._stream.lent, HostSlot)
                self._stream.lent.give_away()
                self._kept[unit] = weights
                self._stream.set_order(self._still_streamed())
        self._unit_bytes += self._model.layers[unit].record.read_bytes
        if (unit,) == self._placement.on_disk[-1:]:  # the pass has ended: were the files changed meanwhile?
            self._files.check()

    def spare(self, nbytes: int) -> None:
        """On a CPU, keep layers or experts from disk in `nbytes` of additional memory, until the next call.

        A layer is kept once a pass has read it. The last layer is always read, because the check for changed files
        follows it. The results do not change.
        """
        on_disk = self._placement.on_disk
        if not on_disk and isinstance(self._experts, CachedExperts):
            self._experts.spare(nbytes)
        if kind_of(self._device).has_own_memory or not isinstance(self._stream, Ring):
            return
        num_wanted = max(0, min(nbytes // self._placement.slots.nbytes, len(on_disk) - LEAST_STREAMED))
        self._wanted = frozenset(on_disk[i] for i in scattered(len(on_disk) - 1)[:num_wanted])
        if gone := self._kept.keys() - self._wanted:
            self._kept = {index: weights for index, weights in self._kept.items() if index not in gone}
            self._stream.set_order(self._still_streamed())

    def _still_streamed(self) -> list[int]:
        return [index for index in self._placement.on_disk if index not in self._kept]

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return self.lend(index)

    def experts(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        assert self._experts is not None
        return self._experts.lend(layer, rows)

    def expert_table(self, layer: int) -> ExpertTable | None:
        return self._experts.table(layer) if isinstance(self._experts, ResidentExperts) else None

    def ahead(self, layer: int) -> Mapping[str, Weight] | None:
        return self._resident.get(layer) if self._experts is not None and self._experts.reads_ahead else None

    def expect(self, layer: int, rows: Mapping[int, int]) -> None:
        if self._experts is not None:
            self._experts.expect(layer, rows)

    def shared(self, name: str) -> Weight:
        if name not in self._shared:
            raise missing(name)
        return self._shared[name]

    def rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        if name in self._rows:
            return to_device(self._rows[name].take(indices, self._dtype), self._device)
        table = as_table(self.shared(name))
        rows = take_rows(table, to_device(indices, table.device), self._dtype)
        return to_device(rows, self._device)

    def close(self) -> None:
        for each in (self._stream, self._experts):
            if each is not None:
                each.close()
        for buffer in self._pinned:
            self._accelerator.unpin(buffer)
        self._pinned = []
        self._reader.close()
        self._resident, self._shared, self._stream, self._experts, self.scratch = {}, {}, None, None, None
        self._wanted, self._kept = frozenset(), {}

    # ---------------------------------------------------------------------------------------- loading

    def _streamed_paths(self) -> set[Path]:
        """The files of streamed weights."""
        layers = [self._model.layers[i] for i in self._placement.on_disk]
        weights = [weight for layer in layers for weight in layer.weights.values()]
        weights += [table.stored for table in self._rows.values()]
        return {info.path for weight in weights for info in weight.streamed}

    def _open_experts(self) -> ExpertSource | None:
        experts = self._model.experts
        if not experts:
            return None
        if self._has_all_experts:
            resident = dict[int, list[dict[str, Weight]]]()
            for layer, units in experts.items():  # into common memory: their tensors often lie one behind another
                record = record_of(units)
                buffer = record.on(self._device, self._read(record).tensor)
                resident[layer] = [unit.bind(buffer, self._dtype, is_kept=True, record=record) for unit in units]
            return ResidentExperts(resident, self._dtype, self._device)
        slots = self._placement.experts
        slot_bytes = max(unit.record.nbytes for units in experts.values() for unit in units)
        if not kind_of(self._device).has_own_memory:
            return CachedExperts(experts, slots.device, slot_bytes, self._dtype, self._reader)
        cached = CachedExperts(self._host_experts, slots.host, slot_bytes, self._dtype, self._reader)
        if self._accelerator.pin(cached.memory):
            self._pinned.append(cached.memory)
        else:
            self.unpinned_bytes += cached.memory.nbytes
        return DeviceExperts(experts, cached, slots.device, self._accelerator, self._expert_choice)

    def _load(self, layer: StoredUnit, device: torch.device) -> dict[str, Weight]:
        """Load a layer into its own memory on the device, in the compute dtype."""
        if layer.is_converted(self._dtype):
            if self._staged is None or self._staged.nbytes < layer.record.nbytes:
                self._staged = HostBuffer(layer.record.nbytes)
            bound = layer.bind(self._read(layer.record, self._staged).tensor, self._dtype, is_kept=True)
            plain = {name: weight for name, weight in bound.items() if isinstance(weight, torch.Tensor)}
            assert len(plain) == len(bound), "all of a converted layer is plain"
            return {name: weight.to(device) for name, weight in plain.items()}
        return layer.bind(layer.record.on(device, self._read(layer.record).tensor), self._dtype, is_kept=True)

    def _read(self, record: Record, into: HostBuffer | None = None) -> HostBuffer:
        buffer = read_record(self._reader, record, into=into)
        self._done += record.read_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return buffer

    def _open_stream(self, synchronous: bool) -> Stream:
        records: dict[Unit, Record] = {i: self._model.layers[i].record for i in self._placement.on_disk}
        if synchronous:
            everything: dict[Unit, Record] = {i: self._model.layers[i].record for i in self._placement.streamed}
            return PlainStream(everything, self._reader, self._device)
        if kind_of(self._device).has_own_memory:
            p, layers = self._placement, self._model.layers
            slots = DeviceSlot.several(p.slots.num, p.slots.nbytes, self._accelerator)
            # Layers in RAM and the slots for layers on disk share one pinned buffer.
            num_host = p.slots.num_host if records else 0
            sizes = [*(layers[i].record.nbytes for i in p.in_ram), *[p.slots.nbytes] * num_host]
            whole, parts = HostBuffer.side_by_side(sizes)
            in_ram: dict[Unit, torch.Tensor] = {
                i: self._read(layers[i].record, part).tensor for i, part in zip(p.in_ram, parts, strict=False)
            }
            with ExitStack() as opened:
                disk = None
                if records:
                    disk = self._open_disk(records, parts[len(in_ram) :])
                    opened.callback(disk.close)
                pinned = pin_whole(whole, parts, self._accelerator)
                self._pinned += pinned
                self.unpinned_bytes += whole.nbytes - sum(buffer.nbytes for buffer in pinned)
                filler = DeviceFiller(in_ram, disk, {i: layers[i].record for i in p.streamed}, self._accelerator)
                opened.pop_all()  # from here on, the filler closes `disk`
            return Ring(p.streamed, slots, filler)
        buffers = [HostBuffer(self._placement.slots.nbytes) for _ in range(self._placement.slots.num)]
        return self._open_disk(records, buffers)

    def _open_disk(self, records: Mapping[Unit, Record], buffers: Sequence[HostBuffer]) -> Ring[HostSlot]:
        slots = [HostSlot(buffer) for buffer in buffers]
        return Ring(self._placement.on_disk, slots, DiskFiller(records, self._reader))


def load_layer(layer: StoredUnit, dtype: torch.dtype, device: torch.device) -> dict[str, Weight]:
    """A layer's weights in memory of their own on the device, to compute with in `dtype`. Raises CheckpointError."""
    reader = FileReader()
    try:
        return layer.bind(layer.record.on(device, read_record(reader, layer.record).tensor), dtype, is_kept=True)
    finally:
        reader.close()
