"""The link to a device with memory of its own: its slots, and the thread that copies ahead on a stream of its own.

The same `Ring` drives the link and the disk. The host does not wait for the device here: a slot's `ready` event makes
the compute stream wait for the copy, and its `free` event makes the copy wait for the compute stream.
The module also contains page-locked tables with a copy stream of their own (a KV cache in RAM).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import prod

import torch

from offspec.backends.weights import ALIGNMENT

from ..accelerators.accelerator import Accelerator, DeviceEvent, accelerator_of
from ..accelerators.cuda import span
from ..files.readers import HostBuffer, align_up
from ..files.records import Record
from .stream import Fill, Stream, Unit


def pin_whole(whole: HostBuffer, parts: Sequence[HostBuffer], accelerator: Accelerator) -> list[HostBuffer]:
    """Pin memory in one piece; if the system refuses (WSL, containers), pin as many of its parts as it allows.

    Returns the buffers to unpin later.
    """
    return [whole] if accelerator.pin(whole) else list(takewhile(accelerator.pin, parts))


class PinnedTables:
    """Tables [rows, ...] in page-locked RAM, for copies to a device and back. A refusal to lock only slows copies."""

    def __init__(self, num_tables: int, empty: torch.Tensor, device: torch.device) -> None:
        """empty: a table without rows."""
        self.tables = [torch.empty(empty.shape, dtype=empty.dtype) for _ in range(num_tables)]
        self._accelerator, self._pinned = accelerator_of(device), dict[int, HostBuffer]()

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    def reserve(self, num_rows: int, in_use: int) -> None:
        """Grow each table to `num_rows` rows, and keep the first `in_use` ones; the others are zeros.

        No copy may be under way. Tables grow one by one, so that RAM never has two of all.
        """
        for index, old in enumerate(self.tables):
            buffer = HostBuffer(num_rows * prod(old.shape[1:]) * old.element_size())
            self.tables[index] = buffer.tensor.view(old.dtype).view(num_rows, *old.shape[1:])
            self.tables[index][:in_use] = old[:in_use]
            self._unpin(index)
            if self._accelerator.pin(buffer):
                self._pinned[index] = buffer

    def free(self) -> None:
        """Unlock the memory. No copy may be under way, or begin."""
        for index in list(self._pinned):
            self._unpin(index)

    def _unpin(self, index: int) -> None:
        if (buffer := self._pinned.pop(index, None)) is not None:
            self._accelerator.unpin(buffer)


class CopyStream:
    """Copies from page-locked RAM to a device beside its arithmetic; on a CPU, at once. num_bytes: copied so far."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_bytes = device, 0
        self._accelerator = accelerator_of(device)
        self._stream = self._accelerator.new_stream()

    def run(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DeviceEvent:
        """Queue copies (to, from) behind all work that the compute stream has now; returns what `wait` needs."""
        self.num_bytes += sum(source.nbytes for _, source in copies)
        self._stream.wait_stream(self._accelerator.current_stream)
        arrival = self._accelerator.new_event()
        with self._accelerator.on(self._stream), span("copy"):
            for there, source in copies:
                there.copy_(source, non_blocking=True)
            arrival.record(self._stream)
        return arrival

    def wait(self, arrival: DeviceEvent) -> None:
        """Make later work of the compute stream wait for a copy."""
        self._accelerator.current_stream.wait_event(arrival)

    def finish_writes(self) -> None:
        """Wait until all work of the compute stream has ended, what it copies to RAM included."""
        self._accelerator.current_stream.synchronize()

    def finish(self) -> None:
        """Wait until the device has finished everything, whichever stream and thread it comes from."""
        self._accelerator.finish()


class DeviceSlot:
    """A slot in device memory; its events order the copy stream and the compute stream."""

    @classmethod
    @torch.inference_mode(False)  # another thread writes to it, which inference tensors do not allow
    def several(cls, num: int, nbytes: int, accelerator: Accelerator) -> list[DeviceSlot]:
        """Slots in one piece of memory: torch's allocator would round up each of many small ones."""
        each = align_up(nbytes + ALIGNMENT)
        memory = torch.empty(num * each, dtype=torch.uint8, device=accelerator.device)
        return [cls(memory[i * each : i * each + nbytes + ALIGNMENT], accelerator) for i in range(num)]

    def __init__(self, memory: torch.Tensor, accelerator: Accelerator) -> None:
        """memory: ALIGNMENT bytes more than the content."""
        self._memory = memory
        self._nbytes, self._accelerator = len(memory) - ALIGNMENT, accelerator
        self.shift = 0  # offset of the content, from 0 to ALIGNMENT; set when the slot is filled
        self.ready = accelerator.new_event(blocking=True)
        self.free = accelerator.new_event()
        self.free.record(accelerator.current_stream)  # after any earlier use of this memory

    @property
    def tensor(self) -> torch.Tensor:
        return self._memory[self.shift : self.shift + self._nbytes]

    def enter(self) -> None:
        self._accelerator.current_stream.wait_event(self.ready)

    def leave(self) -> None:
        """Record the end of use, and wait until the layer has arrived before the host queues more kernels.

        A pass has some thousand kernels, and the queue holds about a thousand. A thread that waits at a full queue may
        block launches of other threads, such as the draft's rounds.
        """
        self.free.record(self._accelerator.current_stream)
        self.ready.synchronize()


class DeviceFiller:
    """Copies layers into device slots, from pinned RAM or from the slots of the host ring.

    in_ram: unit → its bytes. on_disk: the stream that reads the other units, or None. records: of all units.
    """

    def __init__(
        self,
        in_ram: Mapping[Unit, torch.Tensor],
        on_disk: Stream | None,
        records: Mapping[Unit, Record],
        accelerator: Accelerator,
    ) -> None:
        self._in_ram, self._on_disk, self._records, self._accelerator = in_ram, on_disk, records, accelerator
        self._stream = accelerator.new_stream()
        self._work = queue.SimpleQueue[tuple[Fill, DeviceSlot, Unit] | None]()
        self._thread = threading.Thread(target=self._run, name="offspec-copy", daemon=True)
        self._thread.start()

    def fill(self, slot: DeviceSlot, unit: Unit) -> Fill:
        fill = Fill(1)
        self._work.put((fill, slot, unit))
        return fill

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
        # A fill is done when its copy is queued. Pinned memory and slots may be freed only after the copy.
        self._stream.synchronize()
        if self._on_disk is not None:
            self._on_disk.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            fill, slot, unit = work
            error: BaseException | None = None
            if not fill.cancelled:
                try:
                    self._bring(slot, unit)
                except BaseException as exc:  # noqa: BLE001 (raised again in the thread that waits for the layer)
                    error = exc
            fill.part_done(error)

    def _bring(self, slot: DeviceSlot, unit: Unit) -> None:
        slot.shift = self._records[unit].shift
        if unit in self._in_ram:
            self._copy(slot, self._in_ram[unit])
            return
        assert self._on_disk is not None
        with self._on_disk.lend(unit) as buffer:
            self._copy(slot, buffer[: self._records[unit].nbytes])
            slot.ready.synchronize()  # in this thread, because the next read overwrites the host slot

    def _copy(self, slot: DeviceSlot, source: torch.Tensor) -> None:
        nbytes = source.numel()
        with self._accelerator.on(self._stream), span("copy"):
            self._stream.wait_event(slot.free)
            slot.tensor[:nbytes].copy_(source, non_blocking=True)
            slot.ready.record(self._stream)
