"""Choices between equivalent kernels on a GPU, measured once for each card and kept in a file (`measured_files`).

Kernels round differently, so a second process must choose as the first did: up to how many rows packed matrices are
multiplied as they are (`FUSED_ROWS`), and whether Triton or torch unpacks them (`FASTER_KERNEL`).
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from offspec.backends.on_gpu import FASTER_KERNEL, FUSED_ROWS

from ..formats import StoredWeight
from .measure import measure_fused_rows
from .measured_files import measured_file, read_measured, versions, write_measured

_REVISION = 1  # of the file's content and of the kernels; files of other revisions are ignored
_ROWS, _WAYS = "fused rows", "kernel is faster"  # the parts of a file
FIXED_ROWS = 1  # for one row, a fused product moves the fewest bytes on any card
_DRIVER = Path("/proc/driver/nvidia/version")


def choices_file(device: torch.device) -> Path:
    """The file with the choices for this card, its driver, and the packages that have kernels."""
    properties = torch.cuda.get_device_properties(device)
    card = [properties.name, properties.total_memory, list(torch.cuda.get_device_capability(device)), _driver()]
    packages = [torch.__version__, torch.version.cuda, *versions("bitsandbytes", "triton")]
    return measured_file("card", [_REVISION, card, packages])


@cache
def _driver() -> str:
    """The driver's version as the system tells it; elsewhere, the version of CUDA that it supports."""
    try:
        return _DRIVER.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return str(torch._C._cuda_getDriverVersion()) if hasattr(torch._C, "_cuda_getDriverVersion") else ""


def fused_rows(stored: StoredWeight, device: torch.device, dtype: torch.dtype) -> int:
    """Set and return the number of rows up to which matrices like `stored` are multiplied packed.

    It is read from the card's file, or measured (`measure_fused_rows`) and written there. If `FUSED_ROWS.is_fixed`, it
    is FIXED_ROWS. Raises what the kernel raises, such as a compiler's errors.
    """
    rows = _fixed_rows(stored, device, dtype) if FUSED_ROWS.is_fixed else _kept_rows(stored, device, dtype)
    FUSED_ROWS.set(stored.dtype, stored.shape, dtype, device, rows)
    return rows


def _fixed_rows(stored: StoredWeight, device: torch.device, dtype: torch.dtype) -> int:
    return FIXED_ROWS if _has_fused(stored, device, dtype) else 0


def _kept_rows(stored: StoredWeight, device: torch.device, dtype: torch.dtype) -> int:
    key = f"{stored.dtype} {stored.fused_kind} x {_name(dtype)}"
    rows = _part(device, _ROWS).get(key)
    if type(rows) is not int or rows < 0:
        rows = measure_fused_rows(stored, device, dtype)
        _keep(device, _ROWS, key, rows)
    elif rows and not _has_fused(stored, device, dtype):
        rows = 0
    return rows


def _has_fused(stored: StoredWeight, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a fused product; runs it once, because it may not compile any more. Raises its errors."""
    weight = stored.sample(device)
    multiply = None if isinstance(weight, torch.Tensor) else weight.fused_linear
    if multiply is None:
        return False
    multiply(torch.zeros(1, stored.shape[1], dtype=dtype, device=device))
    return True


class KeptKernels:
    """The choices of `FASTER_KERNEL` in the cards' files (`on_gpu.KeptChoices`)."""

    def get(self, kind: Hashable, device: torch.device) -> bool | None:
        is_kernel = _part(device, _WAYS).get(_way_key(kind))
        return is_kernel if isinstance(is_kernel, bool) else None

    def set(self, kind: Hashable, device: torch.device, *, is_kernel: bool) -> None:
        _keep(device, _WAYS, _way_key(kind), is_kernel)


def keep_kernels() -> None:
    """From now on, `FASTER_KERNEL` takes its choices from the cards' files, and writes new ones there."""
    FASTER_KERNEL.kept = KeptKernels()


def _way_key(kind: Hashable) -> str:
    form, dtype = kind if isinstance(kind, tuple) else (kind, "")
    return f"{form} x {_name(dtype)}"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _part(device: torch.device, part: str) -> dict[str, Any]:
    """A part of the card's file; {} if it is missing or invalid."""
    content = read_measured(choices_file(device)).get(part)
    return content if isinstance(content, dict) else {}


def _keep(device: torch.device, part: str, key: str, value: int) -> None:
    file = choices_file(device)
    write_measured(file, {**read_measured(file), part: {**_part(device, part), key: value}})
