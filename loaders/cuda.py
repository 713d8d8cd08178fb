"""The link to a CUDA device: pinned host memory, device slots, and the thread that copies ahead on a stream of its own.

The same `Ring` drives it as drives the disk. Nothing here synchronises the device with the thread that computes: a slot's
`ready` event makes the computing stream wait for the copy, its `free` event makes the copy wait for the computing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

import torch

from .readers import HostBuffer
from .stream import Fill, Stream


def pin(buffer: HostBuffer) -> bool:
    """Page-lock memory in place, for copies at the link's full speed; False where the system does not allow it.

    Registered where it lies: torch's own pinned allocator would round the size up to a power of two.
    """
    if buffer.nbytes == 0:
        return True
    return int(torch.cuda.cudart().cudaHostRegister(buffer.address, buffer.nbytes, 0)) == 0  # type: ignore[no-untyped-call]


def unpin(buffer: HostBuffer) -> None:
    """Undo `pin`, before the memory goes."""
    torch.cuda.cudart().cudaHostUnregister(buffer.address)  # type: ignore[no-untyped-call]


class DeviceSlot:
    """A slot in device memory; its events order the copying and the computing streams."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._device = device
        self.ready, self.free = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        self.leave()  # whatever used this memory before, on the computing stream, comes first

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor

    def enter(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.ready)

    def leave(self) -> None:
        self.free.record(torch.cuda.current_stream(self._device))


class DeviceFiller:
    """Copies layers into device slots: from pinned RAM where they lie there, else from the host ring's slots.

    in_ram: layer → its bytes. on_disk: the stream that reads the other layers (None where there are none), and disk_bytes
    how many bytes each of those has.
    """

    def __init__(
        self,
        in_ram: Mapping[int, torch.Tensor],
        on_disk: Stream | None,
        disk_bytes: Mapping[int, int],
        device: torch.device,
    ) -> None:
        self._in_ram, self._on_disk, self._disk_bytes, self._device = in_ram, on_disk, disk_bytes, device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._work = queue.SimpleQueue[tuple[Fill, DeviceSlot, int] | None]()
        self._thread = threading.Thread(target=self._run, name="offspec-copy", daemon=True)
        self._thread.start()

    def fill(self, slot: DeviceSlot, layer: int) -> Fill:
        fill = Fill(1)
        self._work.put((fill, slot, layer))
        return fill

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()
        if self._on_disk is not None:
            self._on_disk.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            fill, slot, layer = work
            error: BaseException | None = None
            if not fill.cancelled:
                try:
                    self._bring(slot, layer)
                except BaseException as exc:  # noqa: BLE001 (raised again in the thread that waits for the layer)
                    error = exc
            fill.part_done(error)

    def _bring(self, slot: DeviceSlot, layer: int) -> None:
        if layer in self._in_ram:
            self._copy(slot, self._in_ram[layer])
            return
        assert self._on_disk is not None
        with self._on_disk.lend(layer) as buffer:
            self._copy(slot, buffer[: self._disk_bytes[layer]])
            slot.ready.synchronize()  # this thread waits, not the one that computes: the host slot is read into next

    def _copy(self, slot: DeviceSlot, source: torch.Tensor) -> None:
        nbytes = source.numel()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.free)
            slot.tensor[:nbytes].copy_(source, non_blocking=True)
            slot.ready.record(self._stream)
