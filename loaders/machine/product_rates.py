"""How fast this machine's CPU multiplies with matrices of each form: measured when it is asked, within 0.1 s."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from offspec.backends.arithmetic import FAST
from offspec.backends.backend import Backend
from offspec.backends.choice import CPU, backend_of
from offspec.backends.cpu import plain_product
from offspec.backends.device_kinds import CPU as HOST
from offspec.backends.device_kinds import DeviceKind
from offspec.backends.weights import PLAIN_FORMS, PackedMatrix, Weight
from offspec.backends.x86.processor import instructions, num_lanes
from offspec.backends.x86.row_product import RowProduct

from ..files.checkpoint import DTYPE_BYTES, TensorInfo
from ..formats import StoredWeight, format_named
from .measured_files import versions

ROWS = (1, 16, 128)
SHAPE = (4096, 2048)
CACHE_BYTES = 64 * 2**20  # total size of the alternating matrices, which fit no cache
_POINT_S, _LEAST_RUNS = 0.012, 2
_PLAIN_DTYPES = {form: dtype for dtype, form in PLAIN_FORMS.items()}


def kernels_of(forms: Iterable[str], dtype: torch.dtype) -> list[RowProduct]:
    """This CPU's kernels for weights of a dtype and of these forms."""
    return [product for product in (plain_product(dtype), *map(_kernel, forms)) if product is not None]


def product_flops(
    form: str, dtype: torch.dtype, widths: Sequence[int] = ROWS, arithmetic: str = FAST, device: DeviceKind = HOST
) -> dict[int, float]:
    """Rows → FLOP/s of products of rows of `dtype` with large matrices of a form; {} without kernels for it there."""
    if not has_kernel(form, device):
        return {}
    num_bytes = SHAPE[0] * SHAPE[1] * _bytes_per_weight(form)
    made = [sample(form, SHAPE) for _ in range(max(2, int(CACHE_BYTES / num_bytes)))]
    matrices = itertools.cycle([matrix for matrix in made if matrix is not None])
    backend = backend_of(CPU, arithmetic)
    seconds = {width: _seconds(backend, matrices, dtype, width) for width in ROWS}
    return {width: 2 * width / _between(seconds, width) for width in widths}


@dataclass(frozen=True)
class ProductRate:
    """The rates of products with a large matrix of a form, for a number of rows."""

    form: str
    rows: int
    flops: float
    bytes_per_s: float


def product_rates(form: str, dtype: torch.dtype, widths: Sequence[int]) -> list[ProductRate]:
    """The rates for a form, measured now."""
    weight_bytes = _bytes_per_weight(form)
    points = product_flops(form, dtype, widths).items()
    return [ProductRate(form, rows, flops, weight_bytes * flops / (2 * rows)) for rows, flops in points]


def _seconds(backend: Backend, matrices: Iterator[Weight], dtype: torch.dtype, num_rows: int) -> float:
    """Seconds per weight: the minimum of some runs, which excludes the load of other programs."""
    rows = torch.randn(num_rows, SHAPE[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    backend.linear(rows, next(matrices))  # compiles
    began, least, runs = time.perf_counter(), math.inf, 0
    while runs < _LEAST_RUNS or time.perf_counter() - began < _POINT_S:
        before = time.perf_counter()
        backend.linear(rows, next(matrices))
        least, runs = min(least, time.perf_counter() - before), runs + 1
    return max(least, 1e-9) / (SHAPE[0] * SHAPE[1])


def _between(points: Mapping[int, float], place: int) -> float:
    """Linear interpolation at `place`; after the last point proportional to rows, before the first constant."""
    places = sorted(points)
    if place >= places[-1]:
        return points[places[-1]] * place / places[-1]
    if place <= places[0]:
        return points[places[0]]
    right = bisect_left(places, place)
    low, high = places[right - 1], places[right]
    return points[low] + (points[high] - points[low]) * (place - low) / (high - low)


def _bytes_per_weight(form: str) -> float:
    """Bytes per weight of a large stored matrix, including scales."""
    stored = format_named(form).sized(form, "weight", SHAPE, of_no_file)
    return 0.0 if stored is None else sum(info.nbytes for info in stored.streamed) / (SHAPE[0] * SHAPE[1])


def form_of(stored_dtype: str) -> str:
    """The form for a `StoredWeight.dtype`."""
    return {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(stored_dtype, stored_dtype)


def forms_of(stored: Iterable[StoredWeight]) -> set[str]:
    """The forms of matrices among these weights."""
    return {form_of(weight.dtype) for weight in stored if len(weight.shape) == 2}


def has_kernel(form: str, device: DeviceKind = HOST) -> bool:
    """Whether this machine has kernels for weights of a form as they are stored, on such a device."""
    return device.multiplies_stored and _kernel(form) is not None


def _kernel(form: str) -> RowProduct | None:
    """The kernel for weights of a form, or None."""
    if form in _PLAIN_DTYPES:
        return plain_product(_PLAIN_DTYPES[form])
    weight = sample(form, (64, 256)) if num_lanes() else None
    kernel = weight.kernel if isinstance(weight, PackedMatrix) else None
    return None if kernel is None else kernel[0]


def sample(form: str, shape: tuple[int, int]) -> Weight | None:
    """A matrix of a form with normal numbers; None for a form that cannot be sized."""
    if form in _PLAIN_DTYPES:
        row = torch.randn(shape[1], generator=torch.Generator().manual_seed(0)).to(_PLAIN_DTYPES[form])
        return row.expand(shape).contiguous()
    stored = format_named(form).sized(form, "weight", shape, of_no_file)
    return None if stored is None else stored.sample(CPU)


def of_no_file(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """A tensor without a file, for `WeightFormat.sized`."""
    return TensorInfo(name, dtype, shape, Path(), 0, DTYPE_BYTES[dtype] * math.prod(shape))


def processor_identity() -> list[object]:
    """What the seconds of products on this machine's processor depend on."""
    libraries = [torch.__version__, os.environ.get("ONEDNN_MAX_CPU_ISA", ""), *versions("llvmlite", "bitsandbytes")]
    processor = platform.processor()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
            processor = str(sorted({line for line in lines if line.startswith(wanted)}))
    return [processor, sorted(instructions()), torch.get_num_threads(), *libraries]
