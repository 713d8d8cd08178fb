"""Data sheets of GPUs and disks, for plans of other machines.

bf16 FLOP/s: dense (data sheets' headlines assume 2:4 sparsity, which is twice that), products summed in fp32; fp16's on
Turing. GeForce cards do 512 of these per clock and multiprocessor, half as many as the same chip on a professional
card: NVIDIA's whitepapers "Turing" (RTX 2080 Ti: 53.8 TFLOPS), "Ampere GA102" (RTX 3090: 71), "Ada" (RTX 4090: 165.2,
RTX 4080: 97.5) and "RTX Blackwell" (RTX 5090: 209.5, RTX 5080: 112.6), in their tables "Peak BF16 (FP16) Tensor TFLOPS
with FP32 Accumulate". Data sheets: A100, H100, H200, L40S, A6000. Links: rates of pinned copies. PCIe 4.0 x16: 24-26
GB/s on eight RTX 4090 (https://github.com/NVIDIA/nvbandwidth/issues/15); 3.0 x16: 12.2 GB/s (P100,
https://github.com/mpicbg-scicomp/gearshifft/pull/82); 5.0 x16 is taken as twice 4.0.

Memory: the total that CUDA reports, which is less than the data sheet's. torch prints it when memory runs out ("GPU 0
has a total capacity of 23.52 GiB"); the figures are from such messages of 2025 and 2026 under Linux. Cards of one
generation with equal memory share one; Ada's and Blackwell's of 12 GB, and Blackwell's of 8, are assumed to lose what
others of 8 to 16 GB lose. Older drivers report up to 0.13 GiB more, and Windows nearly everything. An L40S has ECC on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offspec.errors import UsageError

from ..units import GIB, parse_size
from .hardware import Gpu, Rates

PCIE3_X16, PCIE4_X8, PCIE4_X16, PCIE5_X8, PCIE5_X16 = 12.2e9, 12.5e9, 25e9, 25e9, 50e9  # bytes/s

NVME_BYTES_PER_S = 7e9  # sequential reads of a good PCIe 4.0 x4 SSD by its data sheet
NVME_SOURCE = "data sheet of an NVMe SSD with PCIe 4.0; `disk` sets another rate"

# Shares of a data sheet's figure that real code reaches; conservative estimates.
MATMUL_SHARE, MEMORY_SHARE, DEQUANTISE_SHARE, PACKED_SHARE = 0.7, 0.8, 0.5, 0.5
# Weights that a kernel multiplies packed (`backends.triton.gguf`) per clock and multiprocessor, at most: on an H200 one
# of Q4_K took at least as long as unpacking and a product (docs/developing/cuda.md), about 0.6e12 weights/s.
PACKED_PER_CLOCK = 2.5
GEFORCE_FLOPS_PER_CLOCK = 512  # of a multiprocessor, in bf16 with fp32 sums
# A card that is described: GeForce cards have 0.071 (RTX 3060) to 0.164 (RTX 4090) TFLOPS for each GB/s of memory.
LEAST_FLOPS_PER_BYTE = 71
# Of a card of any size: the share of its data sheet's GiB that CUDA reports (RTX 4090: 23.52 of 24), and the bytes that
# the CUDA context takes with the code of kernels.
USABLE_SHARE, CONTEXT_BYTES = 0.98, GIB // 2
_WIDTHS = (1, 8, 64, 256, 1024)
_NF4_BYTES, _BF16_BYTES = 0.5 + 1 / 64, 2  # per weight, with one byte of absmax per 64 weights


@dataclass(frozen=True)
class KnownGpu:
    """A data sheet: GiB that CUDA reports, dense bf16 FLOP/s with fp32 sums, bytes/s of its memory and of its link.

    flops_per_clock: bf16 FLOP of a multiprocessor.
    """

    name: str
    reported_gib: float
    capability: tuple[int, int]
    bf16_flops: float
    memory_bytes_per_s: float
    host_to_device_bytes_per_s: float
    flops_per_clock: int = GEFORCE_FLOPS_PER_CLOCK

    def gpu(self) -> Gpu:
        """The card as an unused GPU."""
        return Gpu(self.name, 0, self.total_bytes, self.total_bytes - CONTEXT_BYTES, self.capability)

    @property
    def total_bytes(self) -> int:
        return int(self.reported_gib * GIB)

    def rates(self, packed_bytes: float = _NF4_BYTES) -> Rates:
        """The expected rates of the card, without a disk rate. packed_bytes: per weight of a packed matrix."""
        source = f"data sheet of the {self.name}, reduced to realistic shares"
        memory = MEMORY_SHARE * self.memory_bytes_per_s
        packed = PACKED_PER_CLOCK * self.bf16_flops / self.flops_per_clock * packed_bytes
        rates: dict[str, Any] = {
            "host_to_device_bytes_per_s": self.host_to_device_bytes_per_s,
            "memory_bytes_per_s": memory,
            # Each weight has 2 bytes, is read once and needs 2 FLOP per row: `width` FLOP per byte, up to the limit of
            # arithmetic.
            "matmul_flops": {width: min(width * memory, MATMUL_SHARE * self.bf16_flops) for width in _WIDTHS},
            "dequantise_elements_per_s": DEQUANTISE_SHARE * self.memory_bytes_per_s / (packed_bytes + _BF16_BYTES),
            "packed_bytes_per_s": min(PACKED_SHARE * self.memory_bytes_per_s, packed),
        }
        return Rates(**rates, sources=dict.fromkeys(rates, source))


KNOWN_GPUS = {
    # Turing
    "rtx2080ti": KnownGpu("RTX 2080 Ti", 10.56, (7, 5), 53.8e12, 616e9, PCIE3_X16),
    # Ampere
    "rtx3060": KnownGpu("RTX 3060 12 GB", 11.62, (8, 6), 25.5e12, 360e9, PCIE4_X16),
    "rtx3080": KnownGpu("RTX 3080 10 GB", 9.64, (8, 6), 59.5e12, 760e9, PCIE4_X16),
    "rtx3090": KnownGpu("RTX 3090", 23.56, (8, 6), 71e12, 936e9, PCIE4_X16),
    "rtx3090ti": KnownGpu("RTX 3090 Ti", 23.56, (8, 6), 80e12, 1008e9, PCIE4_X16),
    "a6000": KnownGpu("RTX A6000", 47.4, (8, 6), 154.8e12, 768e9, PCIE4_X16, 1024),
    "a100-80": KnownGpu("A100 80 GB", 79.14, (8, 0), 312e12, 2039e9, PCIE4_X16, 2048),
    # Ada
    "rtx4060": KnownGpu("RTX 4060 8 GB", 7.6, (8, 9), 30.2e12, 272e9, PCIE4_X8),
    "rtx4060ti-16": KnownGpu("RTX 4060 Ti 16 GB", 15.56, (8, 9), 44.1e12, 288e9, PCIE4_X8),
    "rtx4070": KnownGpu("RTX 4070", 11.6, (8, 9), 58.3e12, 504e9, PCIE4_X16),
    "rtx4070super": KnownGpu("RTX 4070 SUPER", 11.6, (8, 9), 71e12, 504e9, PCIE4_X16),
    "rtx4070ti": KnownGpu("RTX 4070 Ti", 11.6, (8, 9), 80.2e12, 504e9, PCIE4_X16),
    "rtx4070ti-super": KnownGpu("RTX 4070 Ti SUPER", 15.56, (8, 9), 88.2e12, 672e9, PCIE4_X16),
    "rtx4080": KnownGpu("RTX 4080", 15.56, (8, 9), 97.5e12, 717e9, PCIE4_X16),
    "rtx4080super": KnownGpu("RTX 4080 SUPER", 15.56, (8, 9), 104.4e12, 736e9, PCIE4_X16),
    "rtx4090": KnownGpu("RTX 4090", 23.52, (8, 9), 165.2e12, 1008e9, PCIE4_X16),
    "l40s": KnownGpu("L40S", 44.39, (8, 9), 362e12, 864e9, PCIE4_X16, 1024),
    # Hopper
    "h100": KnownGpu("H100 SXM", 79.18, (9, 0), 989e12, 3350e9, PCIE5_X16, 4096),
    "h200": KnownGpu("H200 SXM", 139.8, (9, 0), 989e12, 4800e9, PCIE5_X16, 4096),
    # Blackwell
    "rtx5060ti-8": KnownGpu("RTX 5060 Ti 8 GB", 7.6, (12, 0), 47.4e12, 448e9, PCIE5_X8),
    "rtx5060ti-16": KnownGpu("RTX 5060 Ti 16 GB", 15.45, (12, 0), 47.4e12, 448e9, PCIE5_X8),
    "rtx5070": KnownGpu("RTX 5070", 11.5, (12, 0), 61.7e12, 672e9, PCIE5_X16),
    "rtx5070ti": KnownGpu("RTX 5070 Ti", 15.45, (12, 0), 87.9e12, 896e9, PCIE5_X16),
    "rtx5080": KnownGpu("RTX 5080", 15.45, (12, 0), 112.6e12, 960e9, PCIE5_X16),
    "rtx5090": KnownGpu("RTX 5090", 31.34, (12, 0), 209.5e12, 1792e9, PCIE5_X16),
}
DESCRIPTION = "12GiB,504GB/s"  # of a card: its memory, its memory's rate, and, if it is not PCIE4_X16, its link's


def find_gpu(name: str) -> KnownGpu:
    """A card by its key in any spelling ("GeForce RTX 4090", "4090"), or by a description (DESCRIPTION).

    Raises UsageError for an unknown or an ambiguous one.
    """
    if "," in name:
        return _described(name)
    wanted = _plain(name)
    by_name = {_plain(each): gpu for key, gpu in KNOWN_GPUS.items() for each in (key, gpu.name)}
    if wanted in by_name:
        return by_name[wanted]
    sizes = [
        key for key in KNOWN_GPUS if key.rpartition("-")[2].isdecimal() and _plain(key.rpartition("-")[0]) == wanted
    ]
    if len(sizes) == 1:
        return KNOWN_GPUS[sizes[0]]
    choices = f"it is one of {' and '.join(sizes)}" if sizes else f"choose one of {', '.join(KNOWN_GPUS)}"
    how = f"describe it by its memory and the rate of its memory, {DESCRIPTION}"
    raise UsageError(f"{name!r} is not a known card; {choices}; or {how}")


def _described(text: str) -> KnownGpu:
    """A card like "12GiB,504GB/s" or, with the rate of its link, "16GiB,448GB/s,25GB/s". Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    nbytes, *rates = (parse_size(part.removesuffix("/s")) for part in parts)
    if not 1 <= len(rates) <= 2 or not all(rates) or nbytes <= CONTEXT_BYTES:
        needed = "its memory, its memory's bytes per second and, if you know it, its link's"
        raise UsageError(f"{text!r} does not describe a card; give {needed}: {DESCRIPTION},25GB/s")
    memory, link = rates[0], rates[1] if len(rates) == 2 else PCIE4_X16
    gib = USABLE_SHARE * nbytes / GIB
    return KnownGpu(f"card of {parts[0]}", gib, (8, 0), LEAST_FLOPS_PER_BYTE * memory, memory, link)


def _plain(name: str) -> str:
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    return plain.removeprefix("nvidia").removeprefix("geforce").removeprefix("rtx").removesuffix("gb")
