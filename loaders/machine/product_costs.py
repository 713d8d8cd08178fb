"""Costs of each method to multiply on this machine's CPU: measured once, in less than a second, and kept in a file.

There is one file per CPU, version of torch and number of threads (`measured_files`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from offspec.backends.arithmetic import EXACT, FAST, INT8
from offspec.backends.products import (
    COSTS,
    HALF_DTYPES,
    KERNEL,
    TILES,
    TORCH,
    MethodCosts,
    ProductKind,
    Seconds,
    exact_kernel,
    in_arithmetic,
    plain_product,
)
from offspec.backends.weights import PackedMatrix, Weight, linear
from offspec.backends.x86.processor import instructions, num_lanes
from offspec.backends.x86.row_product import RowProduct

from ..files.checkpoint import DTYPE_BYTES, TensorInfo
from ..formats import StoredWeight, format_named
from .measured_files import measured_file, read_measured, versions, write_measured

ROWS = (1, 4, 16, 64, 256)
ROUND_ROWS = ROWS[:3]  # of draft rounds
SHAPES = {True: (4096, 2048), False: (512, 2048)}  # of a large matrix and a small one
CACHE_BYTES = 64 * 2**20  # total size of the alternating matrices, which fit no cache
HOPELESS, HOPELESS_ROWS = 4, 16  # at 16 rows, a method 4 times as slow as the best is not tried for more rows
_REVISION = 3  # of the file's content; files of other revisions are ignored
_POINT_S, _LEAST_RUNS = 0.012, 2
_MOST_TRIES = 3  # repetitions of a disturbed measurement
# A measurement is disturbed if fewer rows take this many times as long as more rows, or if a product now takes less
# than this share of the file's seconds.
DISTURBED, FASTER_NOW = 1.5, 0.7
_NOW_ROWS, _NOW_S = 16, 0.05
_CPU = torch.device("cpu")


def know_products(forms: Iterable[tuple[str, torch.dtype]], *, anew: bool = False) -> None:
    """Make `weights.linear` use the fastest methods for weights of these forms and rows of these dtypes on the CPU.

    The costs are read from the file, or measured. anew: always measure. If `COSTS.is_fixed`, the methods are fixed.
    """
    if COSTS.is_fixed:
        for form in {form for form, _ in forms}:
            COSTS.fix(form)
        return
    wanted = [
        ProductKind(form, dtype, is_large)
        for form, dtype in sorted(set(forms), key=_after_plain_ones)
        if has_choice(form)
        for is_large in (True, False)
    ]
    _know(wanted, anew=anew)
    kernels = {kind.form for kind in wanted if (costs := COSTS.get(kind)) and KERNEL in map(costs.method, ROWS)}
    for product in filter(None, map(_kernel, kernels)):
        threading.Thread(target=product.prepare, name="compile", daemon=True).start()  # while weights are read


def _know(wanted: Sequence[ProductKind], *, anew: bool) -> None:
    """Read or measure the costs of kinds that are not known yet; anew: of all."""
    stored = {} if anew else _read()
    for kind in wanted:
        if not anew and COSTS.get(kind) is None and str(kind) in stored:
            COSTS.set(kind, stored[str(kind)])
    missing = [kind for kind in wanted if anew or COSTS.get(kind) is None]
    measured = dict[ProductKind, MethodCosts]()
    for kind in missing:  # one after the other: what comes later is multiplied in the methods known by then
        measured[kind] = measure_methods(kind)
        COSTS.set(kind, measured[kind])
    if kept := {str(kind): methods for kind, methods in measured.items() if is_plausible(methods)}:
        _write({**_read(), **kept})


def compile_exact(forms: Iterable[str], dtype: torch.dtype) -> None:
    """Compile the kernels for `exact_rows` with rows of a dtype, in the background: for weights of that dtype and of
    these forms.
    """
    for product in filter(None, (plain_product(dtype), *map(_kernel, forms))):
        threading.Thread(target=exact_kernel(product, dtype).prepare, name="compile", daemon=True).start()


def _after_plain_ones(kind: tuple[str, torch.dtype]) -> tuple[bool, str]:
    """Sort key: plain forms first, because an unpacked matrix is multiplied by the method of the plain form."""
    return kind[0] not in HALF_DTYPES.values(), str(kind)


def product_flops(
    form: str, dtype: torch.dtype, widths: Sequence[int] = ROWS, arithmetic: str = FAST
) -> dict[int, float]:
    """Rows → FLOP/s of products with large matrices of a form, with unpacking.

    FAST: by the fastest method; {} if it is unknown. In others: by the kernel, measured now if it is unknown.

    The stored figures are divided by the machine's current slowdown. If it is faster now, the stored measurement was
    disturbed and is repeated.
    """
    kind = ProductKind(form, dtype, True, arithmetic)
    if arithmetic != FAST and has_choice(form):
        _know([kind], anew=False)
    costs = COSTS.get(kind)
    if costs is None:
        return {}
    if (now := _typical_s(kind)) < FASTER_NOW * costs.least(_NOW_ROWS):
        _know([kind, replace(kind, is_large=False)] if arithmetic == FAST else [kind], anew=True)
        costs = COSTS.get(kind) or costs
    slower = max(1.0, now / costs.least(_NOW_ROWS))
    return {width: 2 * width / costs.least(width) / slower for width in widths}


def exact_speedup(form: str, dtype: torch.dtype, over: torch.dtype) -> float:
    """How many times as fast kernels multiply rows of `dtype` as those of `over` with matrices of a packed form.

    For the rows of draft rounds; measured once. 1 where there are no kernels, or if `COSTS.is_fixed`.
    """
    if COSTS.is_fixed or not has_choice(form):
        return 1.0
    kinds = [ProductKind(form, each, True, EXACT) for each in (over, dtype)]
    _know(kinds, anew=False)
    seconds = [sum(costs.least(rows) for rows in ROUND_ROWS) for costs in map(COSTS.get, kinds) if costs is not None]
    return seconds[0] / seconds[1]


@dataclass(frozen=True)
class ProductRate:
    """The rate of products of `rows` rows with large matrices of a form, and the method used.

    bytes_per_s: of the stored weights.
    """

    form: str
    rows: int
    method: str
    flops: float
    bytes_per_s: float


def product_rates(form: str, dtype: torch.dtype, widths: Sequence[int]) -> list[ProductRate]:
    """The measured rates for a form; [] if it was not measured."""
    costs = COSTS.get(ProductKind(form, dtype, is_large=True))
    if costs is None:
        return []
    weight_bytes = _bytes_per_weight(form)
    points = [(width, costs.method(width), costs.least(width)) for width in widths]
    return [
        ProductRate(form, rows, method, 2 * rows / each_s, weight_bytes / each_s) for rows, method, each_s in points
    ]


def _bytes_per_weight(form: str) -> float:
    """Bytes per weight of a large stored matrix, including scales."""
    if form in HALF_DTYPES.values():
        return 2.0
    rows, columns = SHAPES[True]
    stored = format_named(form).sized(form, "weight", (rows, columns), of_no_file)
    return 0.0 if stored is None else sum(info.nbytes for info in stored.streamed) / (rows * columns)


def form_of(stored_dtype: str) -> str:
    """The form for a `StoredWeight.dtype`."""
    return {"BF16": "bf16", "F16": "fp16"}.get(stored_dtype, stored_dtype)


def forms_of(stored: Iterable[StoredWeight], dtype: torch.dtype, *, is_kept: bool) -> set[tuple[str, torch.dtype]]:
    """(form, dtype of the rows) of products with these matrices; is_kept: plain matrices are kept in `dtype`."""
    kinds = set[tuple[str, torch.dtype]]()
    for weight in stored:
        if len(weight.shape) == 2:
            if weight.is_packed or not is_kept or weight.is_kept_as_read(dtype):
                kinds.add((form_of(weight.dtype), dtype))
                if weight.plain_dtype is not None:  # whose methods packed ones share
                    kinds.add((form_of(weight.plain_dtype), dtype))
            if dtype in HALF_DTYPES:  # the form after unpacking, or of kept matrices
                kinds.add((HALF_DTYPES[dtype], dtype))
    return kinds


def has_choice(form: str) -> bool:
    """Whether this machine has several methods to multiply with weights of a form."""
    return form in HALF_DTYPES.values() or _kernel(form) is not None


def _kernel(form: str) -> RowProduct | None:
    """The kernel for weights of a form, or None."""
    dtype = next((dtype for dtype, name in HALF_DTYPES.items() if name == form), None)
    if dtype is not None:
        return plain_product(dtype)
    weight = sample(form, (64, 256)) if num_lanes() else None
    kernel = weight.kernel if isinstance(weight, PackedMatrix) else None
    return None if kernel is None else kernel[0]


def sample(form: str, shape: tuple[int, int]) -> Weight | None:
    """A matrix of a form with normal numbers; None for a form that cannot be sized."""
    dtype = next((dtype for dtype, name in HALF_DTYPES.items() if name == form), None)
    if dtype is not None:
        row = torch.randn(shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
        return row.expand(shape).contiguous()
    stored = format_named(form).sized(form, "weight", shape, of_no_file)
    return None if stored is None else stored.sample(_CPU)


def of_no_file(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """A tensor without a file, for `WeightFormat.sized`."""
    return TensorInfo(name, dtype, shape, Path(), 0, DTYPE_BYTES[dtype] * math.prod(shape))


# ------------------------------------------------------------------------------------------------ measuring


def measure_methods(kind: ProductKind) -> MethodCosts:
    """The costs of each method for products of one kind; the minimum of several tries if others disturb them."""
    costs = _measure_methods(kind)
    for _ in range(_MOST_TRIES - 1):
        if is_plausible(costs):
            break
        costs = _least_of(costs, _measure_methods(kind))
    return costs


def is_plausible(costs: MethodCosts) -> bool:
    """Whether fewer rows never take far longer than more rows, which happens only on a busy machine."""
    return all(costs.least(few) <= DISTURBED * costs.least(more) for few, more in itertools.pairwise(ROWS))


def _least_of(one: MethodCosts, other: MethodCosts) -> MethodCosts:
    """For each method and number of rows, the minimum of both times, or the only time."""
    least: dict[str, dict[int, float]] = {}
    for costs in (one, other):
        for method, points in costs.seconds.items():
            of_method = least.setdefault(method, {})
            for rows, seconds in points.items():
                of_method[rows] = min(seconds, of_method.get(rows, math.inf))
    return MethodCosts(least)


def _measure_methods(kind: ProductKind) -> MethodCosts:
    shape = SHAPES[kind.is_large]
    matrices = _matrices(kind.form, shape)
    scratch = torch.empty(shape[0] * shape[1], dtype=kind.dtype)
    methods = methods_of(kind.form) if kind.arithmetic == FAST else [KERNEL]
    seconds_of: dict[str, dict[int, float]] = {method: {} for method in methods}
    trying = list(seconds_of)
    for num_rows in ROWS:
        rows = _rows(num_rows, shape[1], kind.dtype)
        for method in trying:
            with in_arithmetic(kind.arithmetic):
                seconds = _seconds(method, kind.form, rows, matrices, scratch)
            seconds_of[method][num_rows] = seconds / (shape[0] * shape[1])
        best = min(seconds_of[method][num_rows] for method in trying)
        if num_rows >= HOPELESS_ROWS:
            trying = [method for method in trying if seconds_of[method][num_rows] < HOPELESS * best]
    return MethodCosts(seconds_of)


def _typical_s(kind: ProductKind) -> float:
    """Seconds per weight of products with _NOW_ROWS rows under the machine's current load."""
    shape = SHAPES[True]
    matrices = itertools.cycle(_matrices(kind.form, shape))
    rows, scratch = _rows(_NOW_ROWS, shape[1], kind.dtype), torch.empty(shape[0] * shape[1], dtype=kind.dtype)
    with in_arithmetic(kind.arithmetic):
        linear(rows, next(matrices), None, scratch)
        began, times = time.perf_counter(), list[float]()
        while len(times) < _LEAST_RUNS or time.perf_counter() - began < _NOW_S:
            before = time.perf_counter()
            linear(rows, next(matrices), None, scratch)
            times.append(time.perf_counter() - before)
    return median(times) / (shape[0] * shape[1])


def _matrices(form: str, shape: tuple[int, int]) -> list[Weight]:
    """Enough matrices to fit no cache."""
    num_bytes = shape[0] * shape[1] * _bytes_per_weight(form)
    made = [sample(form, shape) for _ in range(max(2, int(CACHE_BYTES / num_bytes)))]
    return [matrix for matrix in made if matrix is not None]


def _rows(num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(1)).to(dtype)


def methods_of(form: str) -> list[str]:
    """The methods to multiply with weights of a form on this machine."""
    if form not in HALF_DTYPES.values():
        return [TORCH, KERNEL]
    return [TORCH, TILES, KERNEL] if num_lanes() else [TORCH, TILES]


def _seconds(method: str, form: str, rows: torch.Tensor, matrices: Sequence[Weight], scratch: torch.Tensor) -> float:
    """The minimum of some runs, which excludes the load of other programs."""
    turns = itertools.cycle(matrices)
    COSTS.forced, COSTS.forced_form = method, form
    try:
        linear(rows, next(turns), None, scratch)
        began, least, runs = time.perf_counter(), math.inf, 0
        while runs < _LEAST_RUNS or time.perf_counter() - began < _POINT_S:
            before = time.perf_counter()
            linear(rows, next(turns), None, scratch)
            least, runs = min(least, time.perf_counter() - before), runs + 1
    finally:
        COSTS.forced, COSTS.forced_form = None, ""
    return max(least, 1e-9)


# ------------------------------------------------------------------------------------------------ the file


def costs_file() -> Path:
    """The file with the costs of this machine."""
    return measured_file("products", [_REVISION, *processor_identity()])


def processor_identity() -> list[object]:
    """What the seconds of products on this machine's processor depend on."""
    libraries = [torch.__version__, os.environ.get("ONEDNN_MAX_CPU_ISA", ""), *versions("llvmlite", "bitsandbytes")]
    return [_processor(), sorted(instructions()), torch.get_num_threads(), *libraries]


def _processor() -> str:
    """The system's name for the CPU model."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
            wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
            return str(sorted({line for line in lines if line.startswith(wanted)}))
    return platform.processor()


def _read() -> dict[str, MethodCosts]:
    """The content of the file; {} if it is missing or invalid."""
    try:
        return {kind: _method_costs(kind, methods) for kind, methods in read_measured(costs_file()).items()}
    except (ValueError, OverflowError, AttributeError, TypeError):
        return {}


def _method_costs(kind: str, content: Mapping[str, Any]) -> MethodCosts:
    """Parse the costs of a kind's methods.

    Raises ValueError, OverflowError, AttributeError or TypeError for invalid content.
    """
    needed = KERNEL if kind.endswith((EXACT, INT8)) else TORCH
    if needed not in content or not content.keys() <= {TORCH, TILES, KERNEL}:
        raise ValueError("other methods")
    return MethodCosts({method: _points(points) for method, points in content.items()})


def _points(content: Mapping[str, Any]) -> Seconds:
    """Parse seconds by rows. Raises the same errors."""
    points = {int(rows): float(seconds) for rows, seconds in content.items()}
    if not points or not all(rows in ROWS and 0 < seconds < 1 for rows, seconds in points.items()):
        raise ValueError("no seconds")
    return points


def _write(costs: Mapping[str, MethodCosts]) -> None:
    write_measured(costs_file(), {kind: way_costs.seconds for kind, way_costs in costs.items()})
