"""`Accelerator`: what offspec needs of a device beside torch's operations; `accelerator_of` finds a device's.

Order between the host, copies and arithmetic; memory and its figures; recording; clocks. Code that needs one of these
calls it. Limits and defaults are traits of its kind (`backends.device_kinds`). Kernels of formats and attention still
compare `device.type`. So a device of another maker needs a class beside `Cuda`, a kind, and a look at these.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from offspec.backends.device_kinds import GPU, kind_of

from ..files.readers import HostBuffer
from .capture import Recorder
from .cpu import Cpu
from .cuda import Cuda


class DeviceEvent(Protocol):
    """A point in a stream's work. `synchronize` waits for it on the host; `elapsed_time` gives milliseconds.

    query: whether the work is done, without waiting.
    """

    def record(self, stream: Any, /) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any, /) -> float: ...


class DeviceStream(Protocol):
    """Work in order. Later work begins after what it waits for; `synchronize` waits for all its work on the host."""

    def wait_stream(self, stream: Any, /) -> None: ...
    def wait_event(self, event: Any, /) -> None: ...
    def synchronize(self) -> None: ...


class Accelerator(Protocol):
    """One device. On a CPU everything is trivial: it computes in RAM, in the host's order."""

    device: torch.device

    @property
    def current_stream(self) -> DeviceStream: ...

    @property
    def urgent_stream(self) -> DeviceStream:
        """One for all work beside the passes. Its kernels are small, and come before those of a pass."""

    def new_stream(self) -> DeviceStream: ...

    def new_event(self, *, blocking: bool = False, timing: bool = False) -> DeviceEvent:
        """blocking: a host thread that waits for it sleeps and frees its core. timing: for `elapsed_time`."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Work inside goes to `stream`."""

    def finish(self) -> None:
        """Wait until the device has finished everything, whichever stream and thread it comes from."""

    def make_current(self) -> None:
        """Work that names no device goes to this one."""

    def recorder(self) -> Recorder: ...

    def pin(self, buffer: HostBuffer) -> bool:
        """Page-lock memory in place, for copies at the link's full speed; False if the system refuses."""

    def unpin(self, buffer: HostBuffer) -> None:
        """Undo `pin`, before the memory is freed. No copy from it may be running."""

    def page_locked(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] of the host's memory that kernels can read (`view_of`)."""

    def view_of(self, host: Tensor) -> Tensor | None:
        """The same memory (`page_locked`, uint8 [N]) as the device's tensor; None if torch would copy it."""

    def limit_memory(self, nbytes: int | None) -> None:
        """Limit torch to `nbytes` more than it holds now; None removes the limit. Resets peak statistics.

        An allocation beyond the limit raises torch.OutOfMemoryError.
        """

    def release_memory(self) -> None:
        """Free unreferenced memory: Python's reference cycles, and torch's cache."""

    def held_bytes(self) -> tuple[int, int]:
        """Bytes of its own memory that torch holds now, and the peak, including torch's cache."""

    def allocated_bytes(self) -> int:
        """Total bytes of its own memory allocated so far."""

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Of its own memory, for all programs."""

    @property
    def name(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def capability(self) -> tuple[int, int]:
        """Its generation, for what kernels need."""

    @property
    def multiplies_bf16(self) -> bool:
        """Whether products in bf16 are faster than in fp32."""

    @property
    def cache_bytes(self) -> int:
        """Of the cache before its own memory; 0 where torch does not report it."""


@cache
def accelerator_of(device: torch.device) -> Accelerator:
    """The one of a device, by its kind."""
    return Cuda(device) if kind_of(device) is GPU else Cpu(device)
