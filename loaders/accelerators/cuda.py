"""A CUDA device as an `Accelerator`, and ranges for a profiler."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..files.readers import HostBuffer
from .capture import CudaRecorder, Recorder

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only for the current one


class Cuda:
    """See `accelerator.Accelerator`. The CUDA context (some hundred MB) and code of kernels are not in its figures."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    @cached_property
    def urgent_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def new_event(self, *, blocking: bool = False, timing: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)  # it also makes the stream's device the current one

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)

    def make_current(self) -> None:
        torch.cuda.set_device(self.device)

    def recorder(self) -> Recorder:
        return CudaRecorder(self.device)

    def pin(self, buffer: HostBuffer) -> bool:
        """Registering in place saves memory: torch's pinned allocator would round the size up to a power of two.

        After a refusal, copies are only slower.
        """
        if buffer.nbytes == 0:
            return True
        with torch.cuda.device(self.device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = runtime.cudaHostRegister(buffer.address, buffer.nbytes, _PORTABLE)
            return self._has_succeeded(status)

    def unpin(self, buffer: HostBuffer) -> None:
        if buffer.nbytes == 0:
            return
        with torch.cuda.device(self.device):
            self._has_succeeded(torch.cuda.cudart().cudaHostUnregister(buffer.address))  # type: ignore[no-untyped-call]

    def _has_succeeded(self, status: Any) -> bool:
        """CUDA stores a failure as this thread's last error, which torch would report after the next launch of a
        kernel. So one is launched here.
        """
        if int(status) == 0:
            return True
        with suppress(RuntimeError):
            torch.ones(1, device=self.device)
        return False

    def page_locked(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def view_of(self, host: Tensor) -> Tensor | None:
        """With unified addressing, a pointer to page-locked memory is valid in kernels, and torch accepts it."""
        interface = {"shape": (host.numel(),), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3}
        with suppress(RuntimeError, TypeError, ValueError):
            memory = SimpleNamespace(__cuda_array_interface__=interface, memory=host)
            view = torch.as_tensor(memory, device=self.device)
            if view.data_ptr() == host.data_ptr() and view.device == torch.empty(0, device=self.device).device:
                return view
        return None

    def limit_memory(self, nbytes: int | None) -> None:
        total = torch.cuda.mem_get_info(self.device)[1]
        allowed = total if nbytes is None else torch.cuda.memory_reserved(self.device) + nbytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def release_memory(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def held_bytes(self) -> tuple[int, int]:
        return torch.cuda.memory_reserved(self.device), torch.cuda.max_memory_reserved(self.device)

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("allocated_bytes.all.allocated", 0))

    def free_and_total_bytes(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    @property
    def _properties(self) -> Any:
        return torch.cuda.get_device_properties(self.index)

    @property
    def name(self) -> str:
        return str(self._properties.name)

    @property
    def index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    @property
    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.device)

    @property
    def multiplies_bf16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    @property
    def cache_bytes(self) -> int:
        return int(getattr(self._properties, "L2_cache_size", 0))


def span(name: str) -> AbstractContextManager[None]:
    """A range in a profiler's timeline (NVTX); without CUDA, a null context."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext()
    marked: AbstractContextManager[None] = torch.cuda.nvtx.range(name)
    return marked
