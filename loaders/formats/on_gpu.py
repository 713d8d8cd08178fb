"""Packed matrices on a GPU: unpacked by Triton's kernels or by plain torch, whichever takes less time there.

Both give the same numbers. The first matrix of a kind is unpacked both ways, a few times, and the faster way is kept
for the process. Triton comes with torch's CUDA wheels; where it is missing, or cannot compile (it wants a C compiler
for a few lines of its own), it is torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import cache
from statistics import median
from types import ModuleType

import torch

_RUNS = 3


class FasterWay:
    """By kind of matrix and device: whether the kernel is the faster way."""

    def __init__(self) -> None:
        self._is_kernel: dict[Hashable, bool] = {}

    def run(self, kind: Hashable, device: torch.device, kernel: Callable[[], None], plain: Callable[[], None]) -> None:
        """Do the work of both, which is the same, by the faster one; measured when a kind is first seen."""
        key = (kind, device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton takes the current one
            if key not in self._is_kernel:
                kernel_s = _seconds_of_kernel(device, kernel)
                self._is_kernel[key] = kernel_s is not None and kernel_s < _seconds(device, plain)
            (kernel if self._is_kernel[key] else plain)()

    def is_kernel(self, kind: Hashable, device: torch.device) -> bool | None:
        """What was chosen; None where nothing was yet."""
        return self._is_kernel.get((kind, device))


FASTER_WAY = FasterWay()


@cache
def triton_kernels() -> ModuleType | None:
    """`kernels.triton_unpack`; None where Triton is not installed."""
    try:
        from ..kernels import triton_unpack
    except ImportError:
        return None
    return triton_unpack


def _seconds_of_kernel(device: torch.device, kernel: Callable[[], None]) -> float | None:
    """None where it cannot be compiled."""
    try:
        return _seconds(device, kernel)
    except Exception:  # noqa: BLE001 (Triton, its compilers and the system's raise errors of all kinds)
        return None


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    """The median of some runs; the first, which compiles and fills the allocator's pool, is not counted."""
    work()
    times = []
    for _ in range(_RUNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times)
