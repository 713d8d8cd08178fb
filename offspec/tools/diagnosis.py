"""What this machine has, how fast it is, and what would help most, in plain words. Knows nothing of the terminal.

The advice speaks of two models that people know. It is division, not a plan: `offspec plan MODEL` places a model layer
by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from offspec.loaders.formats.products import HALF_DTYPES
from offspec.loaders.hardware import Disk, Hardware, read_disk, read_hardware
from offspec.loaders.kernels.compiler import describe_instructions
from offspec.loaders.measure import WIDTHS, Progress, measure_rates
from offspec.loaders.product_costs import ProductRate as ProductRate  # as the terminal shows it
from offspec.loaders.product_costs import has_choice, know_products, product_rates
from offspec.loaders.units import format_quantity, format_seconds, format_size

from ..checkpoints.opening import Note, choose_device
from ..errors import HardwareError

MAX_ADVICE = 4
TREE_TOKENS = 64  # a pass that the advice speaks of; one of the widths that are measured
SLOW_DISK, SLOW_LINK = 1.5e9, 8e9  # bytes/s: any NVMe disk reads more, PCIe 3.0 x16 copies 12
LITTLE = 0.8  # of what there should be


@dataclass(frozen=True)
class Model:
    """A model to speak of, with its embedding and head in 16 bits."""

    name: str
    nbytes: float
    num_weights: float


LARGE = Model("a 70B model in NF4", 40e9, 70.6e9)
SMALL = Model("an 8B model in NF4", 5.7e9, 8e9)


@dataclass(frozen=True)
class Diagnosis:
    """Facts and rates for one compute device, and the disk that models lie on. disk_reason: why `disk` is None."""

    device: str
    device_reason: str
    hardware: Hardware
    disk: Disk | None
    disk_reason: str
    torch_version: str
    torch_has_gpus: bool
    bitsandbytes_version: str | None
    load_average: float  # processes that want a core, over the last minute, before anything was measured
    instructions: str = ""  # of the CPU's, which products are computed with
    products: tuple[ProductRate, ...] = ()  # where the CPU computes: which way was chosen for how many rows

    @property
    def model(self) -> Model:
        """The one to speak of: the large one where there is hope for it."""
        has_room = self.hardware.gpu is not None or self.hardware.ram.total_bytes >= LARGE.nbytes
        return LARGE if has_room else SMALL

    @property
    def advice(self) -> list[str]:
        """What to know and what to do, the most useful first."""
        return [text for find in ADVICE if (text := find(self)) is not None][:MAX_ADVICE]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes, rates a second."""
        disk = None if self.disk is None else {**asdict(self.disk), "path": str(self.disk.path)}
        return {**asdict(self), "disk": disk, "advice": self.advice}


def diagnose(
    device: str = "auto", path: Path | None = None, *, quick: bool = False, progress: Progress = lambda what: None
) -> Diagnosis:
    """Look at this machine; quick leaves out the measuring.

    device: auto, cpu, cuda or cuda:N. path: the folder where models lie, or a file of one; by default the hub's cache.
    Raises UsageError for a device that is not there, HardwareError for one that does not answer.
    """
    notes: list[Note] = []
    place = choose_device(device, notes)
    where = models_folder() if path is None else path
    hardware, load_average = read_hardware(place), psutil.getloadavg()[0]
    products: tuple[ProductRate, ...] = ()
    if not quick:
        if place.type == "cpu":
            progress("products")
            products = measure_products(dtype_of(hardware))
        hardware = replace(hardware, rates=measure_rates(place, dtype_of(hardware), where, progress=progress))
    try:
        disk, disk_reason = read_disk(where), ""
    except HardwareError as exc:
        disk, disk_reason = None, str(exc)
    reason = notes[0].text.partition(" (")[2].rstrip(")") if notes else "as asked"
    return Diagnosis(
        str(place),
        reason,
        hardware,
        disk,
        disk_reason,
        torch_version=torch.__version__,
        torch_has_gpus=torch.version.cuda is not None or torch.version.hip is not None,
        bitsandbytes_version=_version("bitsandbytes"),
        load_average=load_average,
        instructions=describe_instructions(),
        products=products,
    )


def measure_products(dtype: torch.dtype) -> tuple[ProductRate, ...]:
    """The fastest ways to multiply rows of `dtype` with matrices of 16 bit and of NF4, measured anew and kept."""
    forms = [form for form in (HALF_DTYPES[dtype], "nf4") if has_choice(form)]
    know_products([(form, dtype) for form in forms], anew=True)
    return tuple(rate for form in forms for rate in product_rates(form, dtype, WIDTHS))


def models_folder() -> Path:
    """The hub's cache, or the folder in which it would be made."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE).absolute()
    return next(folder for folder in (cache, *cache.parents) if folder.is_dir())


def dtype_of(hardware: Hardware) -> torch.dtype:
    """What large models compute in: bf16, but for cards before Ampere, which do it in software."""
    too_old = hardware.gpu is not None and hardware.gpu.capability < (8, 0)
    return torch.float16 if too_old else torch.bfloat16


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------ advice


def _busy_processor(d: Diagnosis) -> str | None:
    h = d.hardware
    is_measured = h.rates.disk_bytes_per_s is not None or h.rates.matmul_flops
    if not is_measured or d.load_average <= h.num_cores:
        return None
    return (
        f"This machine is busy: {d.load_average:.1f} processes share {h.num_cores} cores. The figures above are what "
        "is left for offspec; measure again when it is idle to see what it can do."
    )


def _tight_container(d: Diagnosis) -> str | None:
    ram = d.hardware.ram
    if ram.total_bytes >= LITTLE * ram.machine_bytes:
        return None
    return (
        f"This container may use {format_size(ram.total_bytes)} of the machine's {format_size(ram.machine_bytes)} of "
        f"RAM ({ram.limit}): raise its limit first, every GiB more is a GiB less to read in each pass."
    )


def _no_bitsandbytes(d: Diagnosis) -> str | None:
    if d.bitsandbytes_version is not None:
        return None
    return (
        "bitsandbytes is not installed, so 4-bit models cannot be loaded, and these move a quarter of the bytes: "
        "pip install bitsandbytes."
    )


def _no_gpu(d: Diagnosis) -> str | None:
    if d.hardware.gpu is not None or d.device_reason == "as asked":
        return None
    if not d.torch_has_gpus:
        return (
            f"This torch ({d.torch_version}) is built for CPUs only: if there is a graphics card in this machine, "
            "install torch for it (https://pytorch.org/get-started/locally)."
        )
    return "torch finds no graphics card: if there is one, see whether its driver is loaded (nvidia-smi)."


def _reading(d: Diagnosis) -> str | None:
    rates, model, ram = d.hardware.rates, d.model, d.hardware.ram
    if rates.disk_bytes_per_s is None:
        return None
    size, free = format_quantity(model.nbytes, "B"), format_quantity(ram.available_bytes, "B")
    text = (
        f"This disk delivers {format_quantity(rates.disk_bytes_per_s, 'B/s')}: {model.name} ({size}) takes "
        f"{format_seconds(model.nbytes / rates.disk_bytes_per_s)} a pass from disk"
    )
    enough = f"{free} are free now"
    if rates.host_to_device_bytes_per_s is None:
        return f"{text}, and needs no reading where {size} of RAM are free; {enough}."
    link_s = format_seconds(model.nbytes / rates.host_to_device_bytes_per_s)
    return f"{text}, and {link_s} from RAM where {size} of it are free; {enough}."


def _arithmetic(d: Diagnosis) -> str | None:
    """Worth telling where arithmetic, not reading, is what one waits for: on a CPU."""
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
        f"The arithmetic of that pass, over {TREE_TOKENS} tokens, takes about {format_seconds(seconds)} on this "
        f"{where}, more than the reading: a smaller model, or {better}, gains more than a faster disk."
    )


def _page_cache(d: Diagnosis) -> str | None:
    if "page cache" not in d.hardware.rates.sources.get("disk_bytes_per_s", ""):
        return None
    system = "This file system" if d.disk is None else f"This file system ({d.disk.file_system})"
    return (
        f"{system} refuses direct reads, so weights pass through the page cache, which costs time and memory: keep "
        "models on a local disk with ext4, xfs or btrfs."
    )


def _slow_disk(d: Diagnosis) -> str | None:
    rate = d.hardware.rates.disk_bytes_per_s
    if rate is None or rate >= SLOW_DISK or _arithmetic(d) is not None:
        return None
    return (
        f"{format_quantity(rate, 'B/s')} is slow: an NVMe SSD reads 3 to 7 GB/s, and models that lie on one are "
        "streamed so many times faster (--path measures another folder)."
    )


def _slow_link(d: Diagnosis) -> str | None:
    rate = d.hardware.rates.host_to_device_bytes_per_s
    if rate is None or rate >= SLOW_LINK:
        return None
    return (
        f"The link to the card delivers {format_quantity(rate, 'B/s')}, where PCIe 4.0 x16 gives 25 GB/s: see whether "
        "the card sits in the slot with all lanes, and without a riser."
    )


def _busy_gpu(d: Diagnosis) -> str | None:
    gpu = d.hardware.gpu
    if gpu is None or gpu.free_bytes >= LITTLE * gpu.total_bytes:
        return None
    return (
        f"Other programs hold {format_size(gpu.total_bytes - gpu.free_bytes)} of the card's "
        f"{format_size(gpu.total_bytes)}: what they give back holds more layers that need not be streamed."
    )


def _busy_ram(d: Diagnosis) -> str | None:
    ram = d.hardware.ram
    if ram.available_bytes >= ram.total_bytes / 2:
        return None
    return (
        f"Only {format_size(ram.available_bytes)} of {format_size(ram.total_bytes)} of RAM are free: what other "
        "programs give back need not be read from disk."
    )


def _full_disk(d: Diagnosis) -> str | None:
    if d.disk is None or d.disk.free_bytes >= d.model.nbytes:
        return None
    free, size = (format_quantity(nbytes, "B") for nbytes in (d.disk.free_bytes, d.model.nbytes))
    return f"{d.disk.path} has {free} left: too little for {d.model.name} ({size})."


ADVICE: tuple[Callable[[Diagnosis], str | None], ...] = (
    _busy_processor,
    _tight_container,
    _no_bitsandbytes,
    _no_gpu,
    _reading,
    _arithmetic,
    _page_cache,
    _slow_disk,
    _slow_link,
    _busy_gpu,
    _busy_ram,
    _full_disk,
)
