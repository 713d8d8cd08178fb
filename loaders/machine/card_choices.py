"""Up to how many rows packed matrices are multiplied as they are: measured once for each card, and kept in a file.

Such products round differently, so a second process must choose as the first did (`measured_files`, `FUSED_ROWS`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from offspec.backends.on_gpu import FUSED_ROWS

from ..formats import StoredWeight
from .measure import measure_fused_rows
from .measured_files import measured_file, read_measured, versions, write_measured

_REVISION = 2  # of the file's content and of the kernels; files of other revisions are ignored
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
    key = f"{stored.dtype} {stored.fused_kind} x {str(dtype).removeprefix('torch.')}"
    rows = FIXED_ROWS if FUSED_ROWS.is_fixed else read_measured(choices_file(device)).get(key)
    if type(rows) is not int or rows < 0:
        rows = measure_fused_rows(stored, device, dtype)
        write_measured(file := choices_file(device), {**read_measured(file), key: rows})
    elif rows and not _has_fused(stored, device, dtype):
        rows = 0
    FUSED_ROWS.set(stored.dtype, stored.shape, dtype, device, rows)
    return rows


def _has_fused(stored: StoredWeight, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a fused product; runs it once, because it may not compile any more. Raises its errors."""
    weight = stored.sample(device)
    multiply = None if isinstance(weight, torch.Tensor) else weight.fused_linear
    if multiply is None:
        return False
    multiply(torch.zeros(1, stored.shape[1], dtype=dtype, device=device))
    return True
