"""Measures rates of this machine: disk, link to the GPU, memory, matrix products, NF4; each in less than a second.

Every function uses its own memory and temporary files. A figure is a short sample: the load of other programs affects
it, as it would affect a pass.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from offspec.backends.arithmetic import FAST
from offspec.backends.choice import backend_of, linear
from offspec.backends.device_kinds import kind_of
from offspec.backends.on_gpu import FUSED_ROWS
from offspec.backends.weights import PLAIN_FORMS, PackedWeight
from offspec.errors import HardwareError, OffspecError

from ..accelerators.accelerator import accelerator_of
from ..files.containers import largest_weight_file
from ..files.os_errors import first_line
from ..files.readers import READ_BYTES, FileReader, HostBuffer, align_down
from ..files.shards import forget_cached
from ..formats import StoredWeight, WeightFormat, format_named
from ..params import LOSSLESS_FORMAT
from ..streaming.stream import NUM_READERS
from ..units import MIB, format_size
from .hardware import Rates, read_memory
from .product_rates import has_kernel, of_no_file, product_flops

WIDTHS = (1, 8, 64, 256)
THREADS = (1, 2, 4)
TEMPORARY_BYTES = 768 * MIB  # size of the temporary file, which has a part for each number of threads
LEAST_BYTES = 64 * MIB  # smallest file to measure with
ROOM_BYTES = 768 * MIB  # twice the memory of a measurement: a container kills processes beyond its limit
_SPARE_BYTES = 1024 * MIB  # always left free on the disk
_MIN_REPEATS, _MAX_REPEATS = 3, 50

Progress = Callable[[str], None]
Reads = Callable[[], AbstractContextManager[None]]
Multiply = Callable[..., torch.Tensor]


def measure_rates(
    device: torch.device,
    dtype: torch.dtype,
    path: Path,
    *,
    widths: Sequence[int] = WIDTHS,
    form: str | None = None,
    beside_reads: bool = False,
    seconds: float = 0.5,
    progress: Progress = lambda step: None,
) -> Rates:
    """All rates of this machine, each measured for about `seconds`; a failed one is None, with its reason in `sources`.

    path: a file to read, or a folder (see `measure_disk`). widths: rows of the matrix products. form: format of packed
    matrices; None for plain ones of `dtype`. On a CPU, whole products with packed matrices are measured; on a GPU, and
    for LOSSLESS_FORMAT, their unpacking (None: NF4). beside_reads: if `path` is a large file, read it during the
    measurement of products and unpacking, as in a pass with layers on disk: readers use a share of the CPU, and threads
    that share a matrix wait for the slowest. progress is called with the name of each measurement.
    """
    if (free := read_memory().available_bytes) < ROOM_BYTES:
        why = f"not measured: only {format_size(free)} of RAM are free, and this needs {format_size(ROOM_BYTES)}"
        return Rates(sources={field.name: why for field in fields(Rates) if field.name != "sources"})
    beside_reads = beside_reads and path.is_file() and path.stat().st_size >= READ_BYTES

    def reads() -> AbstractContextManager[None]:
        return reads_in_flight(path) if beside_reads else nullcontext()

    multiplied, unpacked = None if form == LOSSLESS_FORMAT else form, form or "nf4"
    attempts, on_device = _Attempts(progress), (device, dtype)
    attempts("disk_bytes_per_s", "disk", partial(_disk, path, seconds))
    attempts("host_to_device_bytes_per_s", "link", partial(_host_to_device, device, seconds))
    attempts("memory_bytes_per_s", "memory", partial(_memory, device, seconds))
    attempts("matmul_flops", "matrix products", partial(_matmul, *on_device, widths, seconds, reads, multiplied))
    if multiplied is not None and has_kernel(multiplied, kind_of(device)):
        attempts.sources["dequantise_elements_per_s"] = "part of the matrix products"
    else:
        unpack = partial(_dequantise, *on_device, unpacked, seconds, reads)
        attempts("dequantise_elements_per_s", unpacked.upper(), unpack)
    return Rates(**attempts.values, packed_bytes_per_s=measure_packed_product(*on_device), sources=attempts.sources)


class _Attempts:
    """Measurements of which each may fail. values: those that did not, by fields of `Rates`; sources: see there."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def __call__(self, field: str, step: str, measure: Callable[[], tuple[Any, str]]) -> None:
        """Measure a field of `Rates`. A failure must not prevent the other measurements."""
        self._progress(step)
        try:
            self.values[field], self.sources[field] = measure()
        except (OffspecError, RuntimeError, MemoryError, OSError) as exc:
            self.sources[field] = f"not measured: {first_line(exc)}"


def _disk(path: Path, seconds: float) -> tuple[float, str]:
    rate = measure_disk(path, seconds=seconds)
    return rate.bytes_per_s, str(rate)


def _host_to_device(device: torch.device, seconds: float) -> tuple[float | None, str]:
    rate = measure_host_to_device(device, seconds=seconds)
    return rate, "pinned memory to the GPU" if rate is not None else "none: the CPU computes in RAM"


def _memory(device: torch.device, seconds: float) -> tuple[float, str]:
    return measure_memory(device, seconds=seconds), "copy within memory, reads plus writes"


def _matmul(
    device: torch.device, dtype: torch.dtype, widths: Sequence[int], seconds: float, reads: Reads, form: str | None
) -> tuple[dict[int, float], str]:
    kind, form = kind_of(device), form or PLAIN_FORMS.get(dtype)
    threads = "" if kind.has_own_memory else f", threads: {torch.get_num_threads()}"
    if form is not None and has_kernel(form, kind):
        with reads():
            return product_flops(form, dtype, widths), f"{form}{threads}"
    with reads():
        return measure_matmul(device, dtype, widths, seconds=seconds), f"{_name(dtype)}{threads}"


def _dequantise(device: torch.device, dtype: torch.dtype, form: str, seconds: float, reads: Reads) -> tuple[float, str]:
    _measured(form)[0].prepare()  # import before the concurrent reads start
    with reads():
        return measure_dequantise(device, dtype, form, seconds=seconds), f"whole matrices of {form} to {_name(dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------ disk


@dataclass(frozen=True)
class DiskRate:
    """The rate of the best number of readers. reason: why reads used the page cache; "" for direct reads."""

    bytes_per_s: float
    num_threads: int
    file: str
    reason: str = ""

    def __str__(self) -> str:
        readers = f"{self.num_threads} reader{'s' if self.num_threads > 1 else ''}"
        how = f"through the page cache, {self.reason}" if self.reason else "direct"
        return f"{readers} of {READ_BYTES // MIB} MiB, {how}; {self.file}"


def measure_disk(
    path: Path, *, threads: Sequence[int] = THREADS, seconds: float = 1.0, temporary_bytes: int = TEMPORARY_BYTES
) -> DiskRate:
    """The rate of sequential reads without the page cache; each number of threads reads its own part of the file.

    path: a file, or a folder. In a folder, the largest file with weights is read; if there is none, a temporary file of
    up to `temporary_bytes` is written first. Raises HardwareError if there is no file and no space for one, and
    CheckpointError if a read fails.
    """
    with _file_to_read(path, temporary_bytes) as (file, name), closing(FileReader()) as reader:
        size = align_down(file.stat().st_size)
        if size == 0:
            raise HardwareError(f"{file}: too small to measure a disk; name a larger file, or a folder")
        part_bytes = align_down(size // len(threads)) or size
        buffers = [HostBuffer(min(READ_BYTES, part_bytes)) for _ in range(max(threads))]
        # Read once into each buffer, so that its pages are mapped; then drop the page cache if reads used it.
        for buffer in buffers:
            reader.read(file, 0, buffer.view, buffer.nbytes)
        if file in reader.fallbacks:
            with file.open("rb") as opened:
                forget_cached(opened.fileno())
        rates = {}
        for i, num_threads in enumerate(threads):
            first = i * part_bytes if size >= (i + 1) * part_bytes else 0
            part = range(first, first + part_bytes)
            rates[num_threads] = _read_part(reader, file, part, buffers[:num_threads], seconds / len(threads))
        best = max(rates, key=lambda num_threads: rates[num_threads])
        return DiskRate(rates[best], best, name, reader.fallbacks.get(file, ""))


@contextmanager
def _file_to_read(path: Path, temporary_bytes: int) -> Iterator[tuple[Path, str]]:
    """The file, and its name for reports."""
    if path.is_file():
        yield path, path.name
        return
    largest = largest_weight_file(path)
    if largest is not None and largest.stat().st_size >= LEAST_BYTES:
        yield largest, largest.name
        return
    with _temporary_file(path, temporary_bytes) as file:
        yield file, f"a temporary file in {path}"


@contextmanager
def _temporary_file(folder: Path, nbytes: int) -> Iterator[Path]:
    with _writing(folder):
        free_bytes = shutil.disk_usage(folder).free - _SPARE_BYTES
        if free_bytes < min(nbytes, LEAST_BYTES):
            raise HardwareError(f"{folder}: not enough free disk space to measure; free some, or name a file to read")
        number, name = tempfile.mkstemp(dir=folder, prefix=".offspec-", suffix=".tmp")
    try:
        with _writing(folder), os.fdopen(number, "wb", buffering=0) as file:
            _write(file.fileno(), min(nbytes, align_down(free_bytes)))
        yield Path(name)
    finally:
        os.unlink(name)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise HardwareError(f"{folder}: cannot be written ({exc.strerror or exc}); name a file to read") from exc


def _write(file: int, nbytes: int) -> None:
    """Write incompressible bytes to the disk itself, until `nbytes` are written or a second is over."""
    block, deadline, written = os.urandom(READ_BYTES), time.perf_counter() + 1.0, 0
    while written < nbytes and (written < LEAST_BYTES or time.perf_counter() < deadline):
        written += os.write(file, block[: nbytes - written])
        if written % LEAST_BYTES == 0:  # otherwise a slow disk would need seconds for the last fsync
            os.fsync(file)
    os.fsync(file)
    forget_cached(file)


def _read_part(reader: FileReader, file: Path, part: range, buffers: Sequence[HostBuffer], seconds: float) -> float:
    """Bytes/s of readers that share a part of the file, one per buffer, until it is read or the time is over."""
    left = iter(part[:: buffers[0].nbytes])
    deadline = time.perf_counter() + seconds

    def work(buffer: HostBuffer) -> int:
        done = 0
        for offset in left:  # one iterator for all threads: next() is atomic under the GIL
            nbytes = min(buffer.nbytes, part.stop - offset)
            reader.read(file, offset, buffer.view[:nbytes], nbytes)
            done += nbytes
            if time.perf_counter() > deadline:
                break
        return done

    with ThreadPoolExecutor(len(buffers)) as pool:
        began = time.perf_counter()
        nbytes = sum(pool.map(work, buffers))
        return nbytes / (time.perf_counter() - began)


@contextmanager
def reads_in_flight(file: Path) -> Iterator[None]:
    """Read a file repeatedly, as a ring does, during the body. Raises CheckpointError."""
    offsets = itertools.cycle(range(0, file.stat().st_size, READ_BYTES))
    is_over = threading.Event()

    def work(reader: FileReader) -> None:
        buffer = HostBuffer(READ_BYTES)
        while not is_over.is_set():
            reader.read(file, next(offsets), buffer.view, 1)

    with closing(FileReader()) as reader, ThreadPoolExecutor(NUM_READERS) as pool:
        readers = [pool.submit(work, reader) for _ in range(NUM_READERS)]
        try:
            yield
        finally:
            is_over.set()
        for one in readers:
            one.result()


# ------------------------------------------------------------------------------------------------ arithmetic


def measure_matmul(
    device: torch.device,
    dtype: torch.dtype,
    widths: Sequence[int] = WIDTHS,
    *,
    shape: tuple[int, int] = (8192, 4096),
    num_weights: int = 4,
    seconds: float = 1.0,
    arithmetic: str = FAST,
) -> dict[int, float]:
    """width → FLOP/s of [width, K] @ [N, K].T, with shape (N, K) and alternating weights that fit no cache.

    num_weights: at least; a GPU gets as many as `beyond_cache` says. If one round
    would take too long, N is reduced. Raises torch's RuntimeError, for example out of memory.
    """
    num_weights = beyond_cache(device, math.prod(shape) * dtype.itemsize, num_weights)  # 64 MiB each in 16-bit
    weights = [_filled(shape, dtype, device) for _ in range(num_weights)]
    product = backend_of(device, arithmetic).linear
    return {width: _matmul_flops(product, weights, width, seconds / len(widths)) for width in widths}


def _matmul_flops(product: Multiply, weights: Sequence[torch.Tensor], width: int, seconds: float) -> float:
    num_outputs, num_inputs = weights[0].shape
    rows = _filled((width, num_inputs), weights[0].dtype, weights[0].device)

    def multiply(num: int) -> None:
        for weight in weights:
            product(rows, weight[:num])

    least = min(512, num_outputs)
    # The first run is also the warm-up.
    trial_s = min(device_seconds(rows.device, partial(multiply, least)) for _ in range(2))
    affordable = int(least * seconds / (_MIN_REPEATS * trial_s))
    num = num_outputs if affordable >= num_outputs else max(least, affordable // least * least)
    return 2 * width * num_inputs * num * len(weights) / typical_seconds(rows.device, partial(multiply, num), seconds)


def _filled(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal numbers: denormals slow a CPU down, and with constants a GPU clocks higher than with weights."""
    row = torch.randn(shape[1], generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return row.expand(shape).contiguous()


CACHE_MULTIPLE = 4  # bytes measured with, in sizes of the cache: hardly any of them is left when it is read again


def beyond_cache(device: torch.device, nbytes: int, least: int) -> int:
    """How many buffers of `nbytes` are CACHE_MULTIPLE times the GPU's L2 cache (an RTX 4090's has 72 MiB).

    At least `least`, which is the answer for a CPU and for a torch that does not report the cache's size.
    """
    return max(least, -(-CACHE_MULTIPLE * accelerator_of(device).cache_bytes // nbytes))


def measure_memory(device: torch.device, *, seconds: float = 1.0) -> float:
    """Bytes/s, reads plus writes, of a copy within the device's memory, beyond its cache."""
    nbytes = 128 * MIB * beyond_cache(device, 128 * MIB, 1)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / typical_seconds(device, lambda: target.copy_(source), seconds)


def measure_host_to_device(device: torch.device, *, seconds: float = 1.0) -> float | None:
    """Bytes/s of copies from pinned memory; None for a CPU, which has no such link."""
    nbytes = 64 * MIB
    if not kind_of(device).has_own_memory:
        return None
    source = accelerator_of(device).page_locked(nbytes).fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return nbytes / typical_seconds(device, lambda: target.copy_(source, non_blocking=True), seconds)


def measure_dequantise(
    device: torch.device,
    dtype: torch.dtype,
    form: str = "nf4",
    *,
    shape: tuple[int, int] = (8192, 4096),
    seconds: float = 1.0,
) -> float:
    """Weights/s of dequantising whole matrices of a packed format to `dtype`; NF4's for formats without `sized`.

    As in a pass, the matrices fit no cache, and each result is multiplied before the next matrix. On a CPU, NF4 without
    bitsandbytes raises OffspecError.
    """
    weight_format, form = _measured(form)
    if not kind_of(device).has_own_memory:  # a GPU does not need it
        weight_format.prepare()
    stored = weight_format.sized(form, "weight", shape, of_no_file)
    assert stored is not None
    matrices = _packed_samples(stored, device, 4)
    out, row = torch.zeros(shape, dtype=dtype, device=device), _filled((1, shape[1]), dtype, device)
    seconds_each = typical_seconds(
        device, lambda: next(matrices).dequantize(dtype, out), seconds, before=lambda: F.linear(row, out)
    )
    return shape[0] * shape[1] / seconds_each


_PACKED_FORM, _PACKED_SHAPE = "Q4_K", (16384, 8192)  # 72 MiB each


def measure_packed_product(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.1) -> float | None:
    """Bytes/s of packed matrices in products with 16 rows on a GPU that do not unpack them.

    None on a CPU, and where the kernel is missing, cannot be compiled, or memory for the matrices is lacking.
    """
    stored = format_named(_PACKED_FORM).sized(_PACKED_FORM, "weight", _PACKED_SHAPE, of_no_file)
    assert stored is not None
    if kind_of(device).multiplies_stored or stored.fused_kind is None:
        return None
    try:
        matrices = _packed_samples(stored, device, 2)
        rows = _filled((16, _PACKED_SHAPE[1]), dtype, device)
        each_s = typical_seconds(device, lambda: _fused(rows, next(matrices), None, None), seconds)
    except Exception:  # noqa: BLE001 (Triton, its compilers and the system's raise many kinds of errors)
        return None
    return stored.streamed[0].nbytes / each_s


def _measured(form: str) -> tuple[WeightFormat, str]:
    """The format to measure for `form`, and its form."""
    weight_format = format_named(form)
    return (
        (weight_format, form)
        if weight_format.sized(form, "weight", (64, 256), of_no_file)
        else (format_named("nf4"), "nf4")
    )


def _packed_samples(stored: StoredWeight, device: torch.device, least: int) -> Iterator[PackedWeight]:
    """Samples in endless turns: `least` of them, or as many as fit no cache of a GPU."""
    num_bytes = sum(info.nbytes for info in stored.streamed)
    return itertools.cycle([_packed_sample(stored, device) for _ in range(beyond_cache(device, num_bytes, least))])


def _packed_sample(stored: StoredWeight, device: torch.device) -> PackedWeight:
    weight = stored.sample(device)
    assert not isinstance(weight, torch.Tensor)
    return weight


# Kernels change between 1 and 8 rows: on an A100, bitsandbytes dequantises some shapes for 6 and 7 rows, not for 8.
# Beyond, their time rises at the first row of a new tile of 16, 32 or 64 rows.
FUSED_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256)
FUSED_GAIN = 0.9  # share of the plain product's seconds; a smaller gain does not justify a different rounding


def measure_fused_rows(stored: StoredWeight, device: torch.device, dtype: torch.dtype, *, seconds: float = 0.1) -> int:
    """Measure and set the number of rows up to which the fused product is faster for matrices like `stored`.

    It tries FUSED_WIDTHS until the fused product is no longer faster, or dequantises: from some width on, bitsandbytes
    dequantises into memory that no plan contains. Between the last two of them it bisects. 0 if the fused product is
    never faster, or if this device and layout have none. `FUSED_ROWS` keeps the result until the process ends.
    """
    form, shape = stored.dtype, stored.shape
    FUSED_ROWS.set(form, shape, dtype, device, 0)  # `linear` below must be the plain product
    if _packed_sample(stored, device).fused_linear is None:
        return 0
    matrices, allocated_bytes = _packed_samples(stored, device, 2), accelerator_of(device).allocated_bytes
    scratch = torch.empty(shape[0] * shape[1], dtype=dtype, device=device)

    def is_faster(width: int) -> bool:
        rows = _filled((width, shape[1]), dtype, device)

        def typical_s(multiply: Multiply) -> float:
            each_s = seconds / len(FUSED_WIDTHS) / 2
            return typical_seconds(device, lambda: multiply(rows, next(matrices), None, scratch), each_s)

        taken = allocated_bytes()
        _fused(rows, next(matrices), None, scratch)
        dequantises = allocated_bytes() - taken >= scratch.nbytes
        return not dequantises and typical_s(_fused) <= FUSED_GAIN * typical_s(linear)

    most = _most_rows(is_faster)
    FUSED_ROWS.set(form, shape, dtype, device, most)
    return most


def _most_rows(is_faster: Callable[[int], bool]) -> int:
    """The last number of rows before the first that is not faster; 0 if one row is not."""
    places = range(len(FUSED_WIDTHS))
    place = next((place for place in places if not is_faster(FUSED_WIDTHS[place])), len(FUSED_WIDTHS))
    most = FUSED_WIDTHS[place - 1] if place else 0
    slower = FUSED_WIDTHS[place] if place < len(FUSED_WIDTHS) else most
    while slower - most > 1:
        width = (most + slower) // 2
        most, slower = (width, slower) if is_faster(width) else (most, width)
    return most


def _fused(
    x: torch.Tensor, matrix: PackedWeight, bias: torch.Tensor | None, scratch: torch.Tensor | None
) -> torch.Tensor:
    multiply = matrix.fused_linear
    assert multiply is not None
    return multiply(x, bias, scratch)


# ------------------------------------------------------------------------------------------------ clocks


def typical_seconds(
    device: torch.device, work: Callable[[], object], seconds: float, before: Callable[[], object] = lambda: None
) -> float:
    """The median of as many runs as fit into `seconds`; at least a few runs, unless they take far longer.

    before: called before each run; its time does not count.
    """
    device_seconds(device, work)  # warm-up: maps pages, selects kernels and raises clocks
    began, times = time.perf_counter(), list[float]()
    while len(times) < _MAX_REPEATS:
        before()
        times.append(device_seconds(device, work))
        spent = time.perf_counter() - began
        if spent > (seconds if len(times) >= _MIN_REPEATS else 2 * seconds):
            break
    return median(times)


def device_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of the work on the device itself, without launches. Never zero."""
    accelerator = accelerator_of(device)
    stream, start, end = accelerator.current_stream, *(accelerator.new_event(timing=True) for _ in range(2))
    start.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return max(start.elapsed_time(end) / 1e3, 1e-9)  # milliseconds
