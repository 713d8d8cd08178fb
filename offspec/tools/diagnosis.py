"""Describes this machine: its hardware, measured rates, and advice. It does not depend on the terminal.

The advice uses a 70B or an 8B model as an example and divides bytes by rates. It is not a plan: `offspec plan MODEL`
places a model layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import psutil
import torch

from offspec.backends.arithmetic import EXACT
from offspec.backends.choice import backend_of
from offspec.backends.weights import HALF_DTYPES
from offspec.backends.x86.processor import describe_instructions
from offspec.loaders.machine.gpu_support import GpuFault, card_fault, gpu_fault
from offspec.loaders.machine.hardware import Disk, Hardware, read_disk, read_hardware
from offspec.loaders.machine.measure import WIDTHS, Progress, measure_rates
from offspec.loaders.machine.product_rates import ProductRate as ProductRate  # re-exported for the CLI
from offspec.loaders.machine.product_rates import product_rates
from offspec.loaders.units import format_quantity, format_seconds, format_size

from ..checkpoints.opening import choose_device
from ..errors import HardwareError

MAX_ADVICE = 4
TREE_TOKENS = 64  # rows of the pass in the advice; one of the measured widths
SLOW_DISK, SLOW_LINK = 1.5e9, 8e9  # bytes/s: any NVMe disk reads more, PCIe 3.0 x16 copies 12
LITTLE = 0.8  # a smaller share of the expected memory is reported


@dataclass(frozen=True)
class Model:
    """An example model, with its embedding and head in 16 bits."""

    name: str
    nbytes: float
    num_weights: float


LARGE = Model("a 70B model in NF4", 40e9, 70.6e9)
SMALL = Model("an 8B model in NF4", 5.7e9, 8e9)


@dataclass(frozen=True)
class Diagnosis:
    """Facts and rates of one compute device, and of the disk with the models. disk_reason: why `disk` is None."""

    device: str
    device_reason: str
    hardware: Hardware
    disk: Disk | None
    disk_reason: str
    torch_version: str
    torch_has_gpus: bool
    bitsandbytes_version: str | None
    load_average: float  # runnable processes over the last minute, before the measurements
    instructions: str = ""  # the CPU's instructions that products use
    products: tuple[ProductRate, ...] = ()  # on a CPU, for each number of rows
    gpu_fault: GpuFault | None = None  # why `auto` took the CPU
    exact_fault: str | None = None  # why kernels of exact rows do not run

    @property
    def model(self) -> Model:
        """The example model: the large one if there is a GPU, or enough RAM for it."""
        has_room = self.hardware.gpu is not None or self.hardware.ram.total_bytes >= LARGE.nbytes
        return LARGE if has_room else SMALL

    @property
    def advice(self) -> list[str]:
        """Facts to know and things to do, the most useful first."""
        advice = chain(_advice_on_setup(self), _advice_on_reading(self), _advice_on_room(self))
        return list(islice(advice, MAX_ADVICE))

    @property
    def to_do(self) -> list[str]:
        """What keeps this machine from running models as it could; empty if it is ready."""
        fault = _no_gpu(self) if self.gpu_fault is not None and self.gpu_fault.has_driver else None
        inexact = self.exact_fault and f"Texts equal plain decoding's up to near-ties only: {self.exact_fault}."
        return [text for text in (fault, _no_bitsandbytes(self), inexact) if text is not None]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes, rates per second."""
        disk = None if self.disk is None else {**asdict(self.disk), "path": str(self.disk.path)}
        return {**asdict(self), "disk": disk, "advice": self.advice, "to_do": self.to_do}


def diagnose(
    device: str = "auto", path: Path | None = None, *, quick: bool = False, progress: Progress = lambda step: None
) -> Diagnosis:
    """Describe this machine. quick: do not measure.

    device: auto, cpu, cuda or cuda:N. path: a folder with models, or a model's file; the default is the hub's cache.
    Raises UsageError for a missing device, HardwareError for one that does not respond.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    place = choose_device(device, [])
    cache = Path(HF_HUB_CACHE).absolute()
    where = path or next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    hardware, load_average = read_hardware(place), psutil.getloadavg()[0]
    products: tuple[ProductRate, ...] = ()
    if not quick:
        if hardware.gpu is None:
            progress("products")
            products = measure_products(dtype_of(hardware))
        hardware = replace(hardware, rates=measure_rates(place, dtype_of(hardware), where, progress=progress))
    try:
        disk, disk_reason = read_disk(where), ""
    except HardwareError as exc:
        disk, disk_reason = None, str(exc)
    try:
        bitsandbytes_version = version("bitsandbytes")
    except PackageNotFoundError:
        bitsandbytes_version = None
    fault = (gpu_fault() or card_fault(0)) if device == "auto" and hardware.gpu is None else None
    reason = "as asked" if device != "auto" else "found" if fault is None else fault.reason
    return Diagnosis(
        str(place),
        reason,
        hardware,
        disk,
        disk_reason,
        torch_version=torch.__version__,
        torch_has_gpus=torch.version.cuda is not None or torch.version.hip is not None,
        bitsandbytes_version=bitsandbytes_version,
        load_average=load_average,
        instructions=describe_instructions(),
        products=products,
        gpu_fault=fault,
        exact_fault=backend_of(place, EXACT).fault(),
    )


def measure_products(dtype: torch.dtype) -> tuple[ProductRate, ...]:
    """Rates of products of rows of `dtype` with 16-bit and NF4 matrices."""
    return tuple(rate for form in (HALF_DTYPES[dtype], "nf4") for rate in product_rates(form, dtype, WIDTHS))


def dtype_of(hardware: Hardware) -> torch.dtype:
    """The dtype for large models: bf16, or fp16 on cards before Ampere, which compute bf16 in software."""
    return torch.bfloat16 if hardware.gpu is None or hardware.gpu.has_bf16 else torch.float16


# ------------------------------------------------------------------------------------------------ advice


def _advice_on_setup(d: Diagnosis) -> Iterator[str]:
    h, ram = d.hardware, d.hardware.ram
    is_measured = h.rates.disk_bytes_per_s is not None or h.rates.matmul_flops
    if is_measured and d.load_average > h.num_cores:
        yield (
            f"This machine is busy: {d.load_average:.1f} processes share {h.num_cores} cores, so the rates above are "
            "too low. Measure again when it is idle."
        )
    if ram.total_bytes < LITTLE * ram.machine_bytes:
        yield (
            f"This container may use {format_size(ram.total_bytes)} of the machine's {format_size(ram.machine_bytes)} "
            f"of RAM ({ram.limit}). Raise this limit first: each GiB more is a GiB less to read per pass."
        )
    yield from filter(None, (_no_bitsandbytes(d), _no_gpu(d)))
    if h.gpu is not None and not h.gpu.has_bf16:
        yield (
            "This card does not compute bf16, so models in bf16 run in fp16, which has a smaller range. If logits are "
            "not finite, use `dtype=fp32`."
        )


def _no_bitsandbytes(d: Diagnosis) -> str | None:
    if d.bitsandbytes_version is not None:
        return None
    return (
        "bitsandbytes is not installed, so NF4 and FP4 models cannot be loaded. They stream a quarter of the bytes of "
        "16-bit models: pip install bitsandbytes."
    )


def _no_gpu(d: Diagnosis) -> str | None:
    if d.gpu_fault is None:
        return None
    reason, remedy = (text[:1].upper() + text[1:] for text in (d.gpu_fault.reason, d.gpu_fault.remedy))
    return f"{reason}. {remedy}."


def _arithmetic(d: Diagnosis) -> str | None:
    """Reported if arithmetic takes longer than reading, usually on a CPU."""
    rates, model = d.hardware.rates, d.model
    flops, unpacked = rates.matmul_flops.get(TREE_TOKENS), rates.dequantise_elements_per_s
    if flops is None or rates.disk_bytes_per_s is None:
        return None
    seconds = 2 * model.num_weights * TREE_TOKENS / flops + (model.num_weights / unpacked if unpacked else 0)
    if packed := [rate.flops for rate in d.products if (rate.form, rate.rows) == ("nf4", TREE_TOKENS)]:
        seconds = 2 * model.num_weights * TREE_TOKENS / packed[0]
    if seconds < model.nbytes / rates.disk_bytes_per_s:
        return None
    where, better = ("CPU", "a graphics card") if d.hardware.gpu is None else ("card", "a faster card")
    return (
        f"The arithmetic of such a pass, over {TREE_TOKENS} tokens, takes about {format_seconds(seconds)} on this "
        f"{where}, longer than reading. A smaller model or {better} helps more than a faster disk."
    )


def _advice_on_reading(d: Diagnosis) -> Iterator[str]:
    rates, model, arithmetic = d.hardware.rates, d.model, _arithmetic(d)
    rate, link_rate = rates.disk_bytes_per_s, rates.host_to_device_bytes_per_s
    if rate is not None:
        size, free = format_quantity(model.nbytes, "B"), format_quantity(d.hardware.ram.available_bytes, "B")
        text = (
            f"This disk reads {format_quantity(rate, 'B/s')}. From disk, {model.name} ({size}) takes "
            f"{format_seconds(model.nbytes / rate)} per pass"
        )
        if link_rate is None:
            yield f"{text}. With {size} of free RAM it reads nothing; {free} are free now."
        else:
            link_s = format_seconds(model.nbytes / link_rate)
            yield f"{text}. From RAM it takes {link_s}, with {size} of free RAM; {free} are free now."
    if arithmetic is not None:
        yield arithmetic
    if "page cache" in rates.sources.get("disk_bytes_per_s", ""):
        system = "This file system" if d.disk is None else f"This file system ({d.disk.file_system})"
        yield (
            f"{system} refuses direct reads, so weights go through the page cache, which costs time and memory. Store "
            "models on a local disk with ext4, xfs or btrfs."
        )
    if rate is not None and rate < SLOW_DISK and arithmetic is None:
        yield (
            f"{format_quantity(rate, 'B/s')} is slow: an NVMe SSD reads 3 to 7 GB/s, and streams models faster by the "
            "same factor (`path` measures another folder)."
        )
    if link_rate is not None and link_rate < SLOW_LINK:
        yield (
            f"The link to the card copies {format_quantity(link_rate, 'B/s')}; PCIe 4.0 x16 copies 25 GB/s. Check that "
            "the card is in a slot with all lanes, and without a riser."
        )


def _advice_on_room(d: Diagnosis) -> Iterator[str]:
    gpu, ram, disk = d.hardware.gpu, d.hardware.ram, d.disk
    if gpu is not None and gpu.free_bytes < LITTLE * gpu.total_bytes:
        yield (
            f"Other programs use {format_size(gpu.total_bytes - gpu.free_bytes)} of the card's "
            f"{format_size(gpu.total_bytes)}. Close them, so that more layers are resident."
        )
    if ram.available_bytes < ram.total_bytes / 2:
        yield (
            f"Only {format_size(ram.available_bytes)} of {format_size(ram.total_bytes)} of RAM are free. Close other "
            "programs, so that less is read from disk."
        )
    if disk is not None and disk.free_bytes < d.model.nbytes:
        free, size = (format_quantity(nbytes, "B") for nbytes in (disk.free_bytes, d.model.nbytes))
        yield f"{disk.path} has {free} of free space, too little for {d.model.name} ({size})."
