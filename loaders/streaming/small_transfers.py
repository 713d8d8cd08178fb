"""Transfers small tensors to a CUDA device while layers are copied.

A card has one copy engine for host-to-device copies. It processes copies in order, whatever the stream or its priority
(measured in NVIDIA/cudf#15620 and meta-pytorch/torchrec#4303). So a mask of some kilobytes would wait tens of
milliseconds for the current layer, and each draft round during a pass needs a mask. Kernels can read page-locked memory
without that engine; this module transfers small tensors that way.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace

import torch
from torch import Tensor

WORD_BYTES = 8


def page_locked(nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes] of host memory, page-locked if `device` is a CUDA device."""
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def seen_by(device: torch.device, host: Tensor) -> Tensor | None:
    """The same memory (`page_locked`, uint8 [N]) as a device tensor; None if torch would copy it.

    With unified addressing, a pointer to page-locked memory is valid in kernels, and torch accepts it as the device's.
    """
    if device.type != "cuda":
        return host
    interface = {"shape": (host.numel(),), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3}
    with suppress(RuntimeError, TypeError, ValueError):
        seen = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface, memory=host), device=device)
        if seen.data_ptr() == host.data_ptr() and seen.device == torch.empty(0, device=device).device:
            return seen
    return None


def read_words(seen: Tensor, out: Tensor) -> None:
    """Copy uint8 [N] from `seen_by` to uint8 [N] on the device with a kernel; N is a multiple of WORD_BYTES.

    `copy_` would use the copy engine.
    """
    torch.bitwise_or(seen.view(torch.int64), 0, out=out.view(torch.int64))


class SlotTransfers:
    """Transfers tensors to one device on the current stream, thread-safe. The source may be overwritten at once."""

    NUM_SLOTS, SLOT_BYTES = 8, 2**20

    @torch.inference_mode(False)  # it must be writable in every mode
    def __init__(self, device: torch.device) -> None:
        self._device, self._lock, self._next = device, threading.Lock(), 0
        self._host = page_locked(self.NUM_SLOTS * self.SLOT_BYTES, device)
        self._seen = seen_by(device, self._host)
        on_gpu = device.type == "cuda"
        events = [torch.cuda.Event() for _ in range(self.NUM_SLOTS if on_gpu else 0)]  # type: ignore[no-untyped-call]
        self._read = events  # per slot: the kernel has read its last content

    def to_device(self, values: Tensor) -> Tensor:
        """Transfer `values` from the host to the device."""
        if not values.nbytes:
            return torch.empty(values.shape, dtype=values.dtype, device=self._device)
        if self._seen is None or values.device.type != "cpu":
            return values.to(self._device)
        whole = values.contiguous().view(-1).view(torch.uint8)
        words = -(-len(whole) // WORD_BYTES)
        out = torch.empty(words * WORD_BYTES, dtype=torch.uint8, device=self._device)
        with self._lock:
            for first in range(0, len(whole), self.SLOT_BYTES):
                self._send(whole[first : first + self.SLOT_BYTES], out[first : first + self.SLOT_BYTES])
        return out[: len(whole)].view(values.dtype).view(values.shape)

    def _send(self, part: Tensor, out: Tensor) -> None:
        slot, self._next = self._next, (self._next + 1) % self.NUM_SLOTS
        if self._read:
            self._read[slot].synchronize()
        first = slot * self.SLOT_BYTES
        self._host[first : first + len(part)] = part
        assert self._seen is not None
        read_words(self._seen[first : first + len(out)], out)
        if self._read:
            self._read[slot].record(torch.cuda.current_stream(self._device))


_transfers: dict[torch.device, SlotTransfers] = {}
_lock = threading.Lock()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Transfer `values` from the host to `device`; on a CPU, `values.to(device)`."""
    if device.type != "cuda":
        return values.to(device)
    with _lock:
        transfers = _transfers.get(device) or _transfers.setdefault(device, SlotTransfers(device))
    return transfers.to_device(values)
