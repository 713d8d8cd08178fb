"""Unpacks matrices on a GPU with Triton or with plain torch, whichever is faster on that GPU.

Both give the same numbers. The first matrix of a kind is unpacked both ways, a few times, and the process then uses the
faster way, as do later ones on this card (`card_choices`). Triton is part of torch's CUDA wheels. If it is missing or
cannot compile (it needs a C compiler for a small stub), torch is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from statistics import median
from types import ModuleType
from typing import Protocol

import torch

# GGUF's types that `backends.triton.gguf` knows, for plans on machines without Triton.
GGUF_WITH_KERNELS = frozenset({"Q4_0", "Q4_1", "Q8_0", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})
# Rows up to which plans expect products with packed matrices: of bitsandbytes on an H200, by the shape that took the
# fewest (docs/developing/cuda.md); those of our kernels are about as fast with 1 to 64.
_PACKED_ROWS = {"nf4": 4, "fp4": 4, **dict.fromkeys(GGUF_WITH_KERNELS, 64)}
_RUNS = 3


def most_packed_rows(form: str | None) -> int:
    """Rows up to which a GPU is expected to multiply with matrices of a format as they are; 0 if it unpacks them."""
    return 0 if form is None else _PACKED_ROWS.get(form, 0)


class KeptChoices(Protocol):
    """Choices that outlast the process."""

    def get(self, kind: Hashable, device: torch.device) -> bool | None:
        """Whether the kernel was faster for this kind; None if it was not measured."""

    def set(self, kind: Hashable, device: torch.device, *, is_kernel: bool) -> None: ...


class FasterKernel:
    """For each kind of matrix and device, whether the kernel is faster.

    kept: choices of earlier processes, or None. is_fixed: nothing is measured any more; every kernel that compiles is
    used.
    """

    def __init__(self) -> None:
        self.is_fixed = False
        self._is_kernel: dict[Hashable, bool] = {}
        self.kept: KeptChoices | None = None

    def run(self, kind: Hashable, device: torch.device, kernel: Callable[[], None], plain: Callable[[], None]) -> None:
        """Run the faster of two equivalent functions; both are measured for the first matrix of a kind."""
        key = (kind, device)
        with on_device(device):
            if key not in self._is_kernel:
                self._is_kernel[key] = self._choose(kind, device, kernel, plain)
            (kernel if self._is_kernel[key] else plain)()

    def _choose(
        self, kind: Hashable, device: torch.device, kernel: Callable[[], None], plain: Callable[[], None]
    ) -> bool:
        """Whether to use the kernel. One that was chosen before may not compile any more, so it is run first."""
        if self.is_fixed:
            return _seconds_of_kernel(device, kernel) is not None
        kept = None if self.kept is None else self.kept.get(kind, device)
        if kept is False or (kernel_s := _seconds_of_kernel(device, kernel)) is None:
            return False
        if kept is None:
            kept = kernel_s < _seconds(device, plain)
            if self.kept is not None:
                self.kept.set(kind, device, is_kernel=kept)
        return kept

    def forbid(self, kind: Hashable, device: torch.device) -> None:
        """Do not use the kernel in this process."""
        self._is_kernel[kind, device] = False

    def is_kernel(self, kind: Hashable, device: torch.device) -> bool | None:
        """Whether the kernel was chosen; None before the first choice."""
        return self._is_kernel.get((kind, device))


FASTER_KERNEL = FasterKernel()


class FusedRows:
    """Rows up to which a fused product was measured to be faster, by (form, shape, dtype, device); 0 unless set.

    is_fixed: nothing is measured any more (`card_choices.fused_rows`).
    """

    def __init__(self) -> None:
        self.is_fixed = False
        self._rows: dict[tuple[str, tuple[int, ...], torch.dtype, torch.device], int] = {}

    def get(self, form: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
        """The maximum number of rows for a product with a packed matrix [N, K] without dequantising."""
        return self._rows.get((form, shape, dtype, device), 0)

    def set(self, form: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, rows: int) -> None:
        self._rows[form, shape, dtype, device] = rows

    def clear(self) -> None:
        self._rows.clear()


# Measured once for a card when a model is loaded (`card_choices`): two models with equal shapes compute alike.
FUSED_ROWS = FusedRows()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes it the current device, which Triton uses."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def triton_kernels() -> ModuleType | None:
    """The module `backends.triton.unpack`; None if Triton is not installed."""
    try:
        from .triton import unpack
    except ImportError:
        return None
    return unpack


@cache
def gguf_kernels() -> ModuleType | None:
    """The module `backends.triton.gguf`; None if Triton is not installed."""
    try:
        from .triton import gguf
    except ImportError:
        return None
    return gguf


@cache
def expert_kernels() -> ModuleType | None:
    """The module `backends.triton.experts`; None if Triton is not installed."""
    try:
        from .triton import experts
    except ImportError:
        return None
    return experts


@cache
def row_kernels() -> ModuleType | None:
    """The module `backends.triton.rows`; None if Triton is not installed."""
    try:
        from .triton import rows
    except ImportError:
        return None
    return rows


def _seconds_of_kernel(device: torch.device, kernel: Callable[[], None]) -> float | None:
    """Seconds of the kernel; None if it cannot be compiled."""
    try:
        return _seconds(device, kernel)
    except Exception:  # noqa: BLE001 (Triton, its compilers and the system's raise many kinds of errors)
        return None


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    """The median of some runs, without the first, which compiles and fills the allocator's pool."""
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
