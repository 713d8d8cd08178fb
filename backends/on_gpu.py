"""Which kernels a GPU has beside torch's: Triton's, where they run, and fused products, up to a measured width.

Triton is part of torch's CUDA wheels. If it is missing or cannot compile (it needs a C compiler for a small stub),
plain torch does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType

import torch

# GGUF's types that `backends.triton.gguf` knows, for plans on machines without Triton.
GGUF_WITH_KERNELS = frozenset({"Q4_0", "Q4_1", "Q8_0", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})
# Rows up to which plans expect products with packed matrices: of bitsandbytes on an H200, by the shape that took the
# fewest (docs/developing/cuda.md); those of our kernels are about as fast with 1 to 64.
_PACKED_ROWS = {"nf4": 4, "fp4": 4, **dict.fromkeys(GGUF_WITH_KERNELS, 64)}


def most_packed_rows(form: str | None) -> int:
    """Rows up to which a GPU is expected to multiply with matrices of a format as they are; 0 if it unpacks them."""
    return 0 if form is None else _PACKED_ROWS.get(form, 0)


class WorkingKernels:
    """Triton's kernels that run: each is tried at its first use, and what cannot be compiled is left to plain torch."""

    def __init__(self) -> None:
        self._works: dict[Hashable, bool] = {}

    def run(self, kind: Hashable, device: torch.device, kernel: Callable[[], None], plain: Callable[[], None]) -> None:
        """Run `kernel`, of a kind, or, where it does not run, its plain twin."""
        with on_device(device):
            if (kind, device) not in self._works:
                self._works[kind, device] = _runs(kernel)
                if self._works[kind, device]:
                    return
            (kernel if self._works[kind, device] else plain)()

    def has(self, kind: Hashable, device: torch.device) -> bool | None:
        """Whether the kernel runs; None before its first use."""
        return self._works.get((kind, device))


WORKING_KERNELS = WorkingKernels()


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


def _runs(kernel: Callable[[], None]) -> bool:
    try:
        kernel()
    except Exception:  # noqa: BLE001 (Triton, its compilers and the system's raise many kinds of errors)
        return False
    return True
