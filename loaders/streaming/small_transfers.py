"""Transfers small tensors to a CUDA device while layers are copied.

A card has one copy engine for host-to-device copies. It processes copies in order, whatever the stream or its priority
(measured in NVIDIA/cudf#15620 and meta-pytorch/torchrec#4303). So a mask of some kilobytes would wait tens of
milliseconds for the current layer, and each draft round during a pass needs a mask. Kernels can read page-locked memory
without that engine; this module transfers small tensors that way.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from offspec.backends.device_kinds import kind_of

from ..accelerators.accelerator import Accelerator, accelerator_of

WORD_BYTES = 8


def read_words(seen: Tensor, out: Tensor) -> None:
    """Copy uint8 [N] from a `view_of` to uint8 [N] on the device with a kernel; N is a multiple of WORD_BYTES.

    `copy_` would use the copy engine.
    """
    torch.bitwise_or(seen.view(torch.int64), 0, out=out.view(torch.int64))


class SlotTransfers:
    """Transfers tensors to one device on the current stream, thread-safe. The source may be overwritten at once."""

    NUM_SLOTS, SLOT_BYTES = 16, 2**20

    @torch.inference_mode(False)  # it must be writable in every mode
    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._device = accelerator, accelerator.device
        self._lock, self._next = threading.Lock(), 0
        self._host = accelerator.page_locked(self.NUM_SLOTS * self.SLOT_BYTES)
        self._view = accelerator.view_of(self._host)
        # Per slot: the kernel has read its last content.
        self._read = [accelerator.new_event() for _ in range(self.NUM_SLOTS)]

    def to_device(self, values: Tensor) -> Tensor:
        """Transfer `values` from the host to the device."""
        if not values.nbytes:
            return torch.empty(values.shape, dtype=values.dtype, device=self._device)
        if self._view is None or values.device != self._host.device:
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
        self._read[slot].synchronize()
        first = slot * self.SLOT_BYTES
        self._host[first : first + len(part)] = part
        assert self._view is not None
        read_words(self._view[first : first + len(out)], out)
        self._read[slot].record(self._accelerator.current_stream)


_transfers: dict[torch.device, SlotTransfers] = {}
_lock = threading.Lock()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Transfer `values` from the host to `device`; on a CPU, `values.to(device)`."""
    if not kind_of(device).has_own_memory:
        return values.to(device)
    with _lock:
        transfers = _transfers.get(device) or _transfers.setdefault(device, SlotTransfers(accelerator_of(device)))
    return transfers.to_device(values)
