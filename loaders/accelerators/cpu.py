"""The CPU as an `Accelerator`: it computes in RAM and in order, so nothing is waited for, locked or recorded."""

from __future__ import annotations

import gc
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from offspec.backends.x86.processor import instructions

from ..files.readers import HostBuffer
from .capture import Recorder, as_it_is


class InOrder:
    """The only stream of a CPU, and each event in it: whatever came before is done."""

    at_s = 0.0  # when it was recorded

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record(self, stream: Any) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, end: Any) -> float:
        return float(end.at_s - self.at_s) * 1e3


class Cpu:
    """See `accelerator.Accelerator`."""

    name = "CPU"
    index = 0
    capability = (0, 0)
    cache_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current_stream = self.urgent_stream = InOrder()

    @property
    def multiplies_bf16(self) -> bool:
        return "avx512_bf16" in instructions()

    def new_stream(self) -> InOrder:
        return self.current_stream

    def new_event(self, *, blocking: bool = False, timing: bool = False) -> InOrder:
        return InOrder()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> None: ...
    def make_current(self) -> None: ...

    def recorder(self) -> Recorder:
        return as_it_is

    def pin(self, buffer: HostBuffer) -> bool:
        return True

    def unpin(self, buffer: HostBuffer) -> None: ...

    def page_locked(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def view_of(self, host: Tensor) -> Tensor | None:
        return host

    def limit_memory(self, nbytes: int | None) -> None: ...

    def release_memory(self) -> None:
        gc.collect()

    def held_bytes(self) -> tuple[int, int]:
        return 0, 0

    def allocated_bytes(self) -> int:
        return 0

    def free_and_total_bytes(self) -> tuple[int, int]:
        return 0, 0
