"""The link to a CUDA device: pinned host memory, device slots, and the thread that copies ahead on a stream of its own.

The same `Ring` drives it as drives the disk. Nothing here waits for what the device computes: a slot's `ready` event
makes the computing stream wait for the copy, its `free` event makes the copy wait for the computing.
Beside it what else is CUDA's own: the allocator's limit, memory given back, and ranges for a profiler.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import takewhile

import torch

from .readers import HostBuffer
from .records import ALIGNMENT, Record
from .stream import Fill, Stream, Unit

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only for the one that was current


def pin(buffer: HostBuffer, device: torch.device) -> bool:
    """Page-lock memory in place, for copies to `device` at the link's full speed; False where the system refuses.

    Registered where it lies: torch's own pinned allocator would round the size up to a power of two. A refusal is no
    fault: copies are slower then. But CUDA keeps it as this thread's last error, which the next kernel to be launched
    would be blamed for (torch reads it after each launch), so one is launched here to take it.
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
    """`pin` memory in one piece; where the system refuses (WSL, containers), as many of its parts as it allows.

    Returns what is to be unpinned.
    """
    return [whole] if pin(whole, device) else list(takewhile(lambda part: pin(part, device), parts))


def unpin(buffer: HostBuffer, device: torch.device) -> None:
    """Undo `pin`, before the memory goes. No copy from it may be under way."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(buffer.address)  # type: ignore[no-untyped-call]


def limit_memory(nbytes: int | None, device: torch.device) -> None:
    """Let torch take at most `nbytes` of the device beyond what it holds now; None: all of it. Peaks count from here.

    What goes beyond raises torch.OutOfMemoryError, as if the device were that small. The CUDA context (some hundred MB)
    and the code of kernels are not torch's and stay outside.
    """
    total = torch.cuda.mem_get_info(device)[1]
    allowed = total if nbytes is None else torch.cuda.memory_reserved(device) + nbytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    torch.cuda.reset_peak_memory_stats(device)


def release_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more, from Python's cycles to torch's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def device_bytes(device: torch.device) -> tuple[int, int]:
    """Device memory that torch holds now, and the most it has held, its cache included; zeros for a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)


def span(name: str) -> AbstractContextManager[None]:
    """A range on a profiler's time line (NVTX); nothing where no device is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext()
    marked: AbstractContextManager[None] = torch.cuda.nvtx.range(name)
    return marked


class DeviceSlot:
    """A slot in device memory; its events order the copying and the computing streams."""

    @torch.inference_mode(False)  # another thread writes to it, which a tensor made in inference mode would refuse
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        self._nbytes, self._device = nbytes, device
        self.shift = 0  # where what is in it begins, from 0 to ALIGNMENT; who fills it says so
        # blocking: who waits for `ready` on the host sleeps, and leaves its core to others.
        self.ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.free = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.free.record(torch.cuda.current_stream(device))  # whatever used this memory before comes first

    @property
    def tensor(self) -> torch.Tensor:
        return self._memory[self.shift : self.shift + self._nbytes]

    def enter(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.ready)

    def leave(self) -> None:
        """Returns when the layer has arrived: the device goes on with it, and only then is more put into its queue.

        A pass is some thousand kernels, a queue holds about a thousand, and who finds it full may hold up what other
        threads launch: the draft's rounds.
        """
        self.free.record(torch.cuda.current_stream(self._device))
        self.ready.synchronize()


class DeviceFiller:
    """Copies layers into device slots: from pinned RAM where they lie there, else from the host ring's slots.

    in_ram: unit → its bytes. on_disk: the stream that reads the other units (None where there are none).
    records: of all of them.
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
        # A fill is done when its copy is queued. Pinned memory may not go, nor a slot's be given to others, before it
        # is through.
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
            slot.ready.synchronize()  # this thread waits, not the one that computes: the host slot is read into next

    def _copy(self, slot: DeviceSlot, source: torch.Tensor) -> None:
        nbytes = source.numel()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), span("copy"):
            self._stream.wait_event(slot.free)
            slot.tensor[:nbytes].copy_(source, non_blocking=True)
            slot.ready.record(self._stream)
