"""The link to a CUDA device: pinned host memory, device slots, and the thread that copies ahead on its own stream.

The same `Ring` drives the link and the disk. The host does not wait for the device here: a slot's `ready` event makes
the compute stream wait for the copy, and its `free` event makes the copy wait for the compute stream.
The module also contains page-locked tables with a copy stream of their own (a KV cache in RAM), the allocator's limit,
the release of memory, and ranges for a profiler.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import takewhile
from math import prod

import torch

from ..files.readers import HostBuffer
from ..files.records import ALIGNMENT, Record
from .stream import Fill, Stream, Unit

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only for the current one


def pin(buffer: HostBuffer, device: torch.device) -> bool:
    """Page-lock memory in place, for copies to `device` at the link's full speed; False if the system refuses.

    Registering in place saves memory: torch's pinned allocator would round the size up to a power of two. After a
    refusal, copies are only slower. But CUDA stores it as this thread's last error, which torch would report after the
    next kernel launch. So this function launches a kernel to clear the error.
    """
    if buffer.nbytes == 0:
        return True
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(buffer.address, buffer.nbytes, _PORTABLE)
        if int(status) == 0:
            return True
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    return False


def pin_whole(whole: HostBuffer, parts: Sequence[HostBuffer], device: torch.device) -> list[HostBuffer]:
    """`pin` memory in one piece; if the system refuses (WSL, containers), pin as many of its parts as it allows.

    Returns the buffers to unpin later.
    """
    return [whole] if pin(whole, device) else list(takewhile(lambda part: pin(part, device), parts))


def unpin(buffer: HostBuffer, device: torch.device) -> None:
    """Undo `pin`, before the memory is freed. No copy from it may be running."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(buffer.address)  # type: ignore[no-untyped-call]


class PinnedTables:
    """Tables [rows, ...] in page-locked RAM, for copies to a device and back. A refusal to lock only slows copies."""

    def __init__(self, num_tables: int, empty: torch.Tensor, device: torch.device) -> None:
        """empty: a table without rows. device: a CPU needs no locked memory."""
        self.tables = [torch.empty(empty.shape, dtype=empty.dtype) for _ in range(num_tables)]
        self._device, self._pinned = device, dict[int, HostBuffer]()

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
            if self._device.type == "cuda" and pin(buffer, self._device):
                self._pinned[index] = buffer

    def free(self) -> None:
        """Unlock the memory. No copy may be under way, or begin."""
        for index in list(self._pinned):
            self._unpin(index)

    def _unpin(self, index: int) -> None:
        if (buffer := self._pinned.pop(index, None)) is not None:
            unpin(buffer, self._device)


class CopyStream:
    """Copies from page-locked RAM to a device beside its arithmetic; on a CPU, at once. num_bytes: copied so far."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_bytes = device, 0
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event | None:
        """Queue copies (to, from) behind all work that the compute stream has now.

        Returns what `wait` needs, if anything.
        """
        self.num_bytes += sum(source.nbytes for _, source in copies)
        if self._stream is None:
            for there, source in copies:
                there.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), span("copy"):
            for there, source in copies:
                there.copy_(source, non_blocking=True)
            arrival.record(self._stream)
        return arrival

    def wait(self, arrival: torch.cuda.Event) -> None:
        """Make later work of the compute stream wait for a copy."""
        torch.cuda.current_stream(self.device).wait_event(arrival)

    def finish_writes(self) -> None:
        """Wait until all work of the compute stream has ended, what it copies to RAM included."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def finish(self) -> None:
        """Wait until the device has finished everything, whichever stream and thread it comes from."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)


def limit_memory(nbytes: int | None, device: torch.device) -> None:
    """Limit torch to `nbytes` more device memory than it holds now; None removes the limit. Resets peak statistics.

    An allocation beyond the limit raises torch.OutOfMemoryError. The CUDA context (some hundred MB) and the code of
    kernels are not torch's and do not count.
    """
    total = torch.cuda.mem_get_info(device)[1]
    allowed = total if nbytes is None else torch.cuda.memory_reserved(device) + nbytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    torch.cuda.reset_peak_memory_stats(device)


def release_memory(device: torch.device) -> None:
    """Free unreferenced memory: Python's reference cycles, and on a GPU torch's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def device_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes of device memory that torch holds now, and the peak, including its cache; zeros for a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)


def span(name: str) -> AbstractContextManager[None]:
    """A range in a profiler's timeline (NVTX); without CUDA, a null context."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext()
    marked: AbstractContextManager[None] = torch.cuda.nvtx.range(name)
    return marked


class DeviceSlot:
    """A slot in device memory; its events order the copy stream and the compute stream."""

    @torch.inference_mode(False)  # another thread writes to it, which inference tensors do not allow
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        self._nbytes, self._device = nbytes, device
        self.shift = 0  # offset of the content, from 0 to ALIGNMENT; set when the slot is filled
        # blocking: a host thread that waits for `ready` sleeps and frees its core.
        self.ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.free.record(torch.cuda.current_stream(device))  # after any earlier use of this memory

    @property
    def tensor(self) -> torch.Tensor:
        return self._memory[self.shift : self.shift + self._nbytes]

    def enter(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.ready)

    def leave(self) -> None:
        """Record the end of use, and wait until the layer has arrived before the host queues more kernels.

        A pass has some thousand kernels, and the queue holds about a thousand. A thread that waits at a full queue may
        block launches of other threads, such as the draft's rounds.
        """
        self.free.record(torch.cuda.current_stream(self._device))
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
        device: torch.device,
    ) -> None:
        self._in_ram, self._on_disk, self._records, self._device = in_ram, on_disk, records, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), span("copy"):
            self._stream.wait_event(slot.free)
            slot.tensor[:nbytes].copy_(source, non_blocking=True)
            slot.ready.record(self._stream)
