"""This machine's RAM, cores, GPU and disk, each with the source of its number.

These facts are read in milliseconds; `measure.py` measures rates. torch is imported only to query a GPU.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from offspec.backends.device_kinds import kind_of
from offspec.errors import HardwareError

from .cgroups import ROOT, cpu_quota, memory_limits
from .gpu_support import fault_of

if TYPE_CHECKING:
    import torch

ADDRESS_LIMIT = "ulimit -v"  # RLIMIT_AS: files that are mapped count, too


@dataclass(frozen=True)
class Memory:
    """RAM that this process may use. Swap does not count, because swapping is slower than streaming.

    total_bytes: the machine's RAM, or its container's limit if that is less. available_bytes: RAM that can be allocated
    now; page cache counts as free. limit: the source of available_bytes, "MemAvailable", a control group's file or
    "ulimit -v".
    """

    total_bytes: int
    available_bytes: int
    machine_bytes: int
    limit: str


@dataclass(frozen=True)
class Gpu:
    """A CUDA device. free_bytes: unused memory; torch's cache in this process counts as used."""

    name: str
    index: int
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]

    @property
    def has_bf16(self) -> bool:
        """Whether it computes bf16 itself. Cards before Ampere convert to fp32, at a fraction of fp16's rate."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class Rates:
    """Measured rates of this machine; None (or no entry) means not measured. sources: method or reason for each field.

    matmul_flops: rows of activations → FLOP/s, with weights that fit no cache (two FLOP per weight and row).
    memory_bytes_per_s: of the compute device's memory, reads plus writes. dequantise_elements_per_s: NF4 weights/s.
    packed_bytes_per_s: of packed matrices that a GPU multiplies with few rows without unpacking them.
    host_matmul_flops: of the CPU beside a GPU, for experts in RAM. ram_bytes_per_s: that this CPU reads from RAM.
    """

    disk_bytes_per_s: float | None = None
    host_to_device_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    matmul_flops: Mapping[int, float] = field(default_factory=dict)
    dequantise_elements_per_s: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    packed_bytes_per_s: float | None = None
    host_matmul_flops: Mapping[int, float] = field(default_factory=dict)
    ram_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Hardware:
    """One machine from the view of one compute device. cores_limit: the source of num_cores."""

    ram: Memory
    cpu_name: str
    num_cores: int
    cores_limit: str
    gpu: Gpu | None = None
    rates: Rates = Rates()


@dataclass(frozen=True)
class Disk:
    """The file system of a folder."""

    path: Path
    file_system: str  # "ext4"
    device: str  # "/dev/nvme0n1p2"
    free_bytes: int


def read_hardware(device: torch.device) -> Hardware:
    """The hardware for computing on `device`, without measurements. Raises HardwareError if the GPU fails."""
    num_cores, cores_limit = read_cores()
    gpu = read_gpu(device) if kind_of(device).has_own_memory else None
    return Hardware(read_memory(), read_cpu_name(), num_cores, cores_limit, gpu)


def read_memory(root: Path = ROOT) -> Memory:
    """RAM within the lowest limit of this process, its control groups' or its own.

    Raises HardwareError if the system does not tell it, as in a container without /proc.
    """
    try:
        machine, limits = psutil.virtual_memory(), memory_limits(root)
    except OSError as exc:
        raise HardwareError(f"this machine's RAM cannot be read ({exc}); mount /proc here") from exc
    total = min([machine.total, *(limit.limit_bytes for limit in limits)])
    rooms = [(machine.available, "MemAvailable"), *((limit.available_bytes, limit.source) for limit in limits)]
    if (most_bytes := address_space_limit()) is not None:
        rooms.append((max(most_bytes - psutil.Process().memory_info().vms, 0), ADDRESS_LIMIT))
    available, source = min(rooms, key=lambda room: room[0])
    return Memory(total, available, machine.total, source)


def address_space_limit() -> int | None:
    """The bytes of addresses that this process may map; None without a limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def is_wsl(root: Path = ROOT) -> bool:
    """Whether this is Linux in the Windows Subsystem for Linux."""
    try:
        return "microsoft" in (root / "proc/sys/kernel/osrelease").read_text(encoding="ascii", errors="replace").lower()
    except OSError:
        return False


def may_spill(root: Path = ROOT) -> bool:
    """Whether the GPU's driver may move device memory to RAM without an error: Windows' does, which WSL uses too."""
    return sys.platform == "win32" or is_wsl(root)


def pinning_remedy(root: Path = ROOT) -> str:
    """What to do where the system refused to page-lock memory. RLIMIT_MEMLOCK (`ulimit -l`) does not limit CUDA.

    Source: "CUDA on WSL User Guide", known limitations; cudaHostRegister locks pages in the driver, not by mlock.
    """
    if sys.platform == "win32":
        return "Windows locks at most half of the RAM: set a lower `ram`, or add RAM"
    if is_wsl(root):
        return 'WSL locks at most half of its memory: raise "memory" in .wslconfig, or set a lower `ram`'
    memory = read_memory(root)
    if memory.limit != "MemAvailable":
        return f"raise the container's memory limit ({memory.limit}), or set a lower `ram`"
    return "free RAM, or set a lower `ram`"


def read_gpu(device: torch.device) -> Gpu:
    """Query a GPU. Raises HardwareError if the driver does not answer or has no memory for a context."""
    from ..accelerators.accelerator import accelerator_of

    card = accelerator_of(device)
    try:
        free_bytes, total_bytes = card.free_and_total_bytes()
        return Gpu(card.name, card.index, total_bytes, free_bytes, card.capability)
    except (RuntimeError, AssertionError) as exc:  # torch built without CUDA asserts
        raise HardwareError(f"{device} cannot be used: {fault_of(exc)}, or use `device=cpu`") from exc


def read_disk(path: Path) -> Disk:
    """The file system of a file or folder. Raises HardwareError if the system does not answer."""
    real = path.resolve()
    try:
        mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
        free_bytes = psutil.disk_usage(os.fspath(real)).free
    except OSError as exc:
        raise HardwareError(f"{path}: its disk does not answer ({exc.strerror or exc}); choose another folder") from exc
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)  # of equal mount points, the first
    return Disk(path, mount.fstype if mount else "unknown", mount.device if mount else "unknown", free_bytes)


# ------------------------------------------------------------------------------------------------ processor


def read_cores(root: Path = ROOT) -> tuple[int, str]:
    """Cores for arithmetic, and their source: affinity, control groups' quota, or hardware. SMT siblings count once."""
    cpus, num_there = _usable_cpus(), os.cpu_count() or 1
    num_cores = len({_siblings(root, cpu) for cpu in cpus})
    source = "hardware"
    if len(cpus) < num_there:
        source = f"affinity to {len(cpus)} of {num_there} processors"
    elif num_cores < num_there:
        source = f"hardware: {num_there} processors share them"
    quota = cpu_quota(root)
    if quota is not None and quota.num_cpus < num_cores:
        # With more threads than the quota allows, all of them would wait for a throttled one.
        return max(1, int(quota.num_cpus)), quota.source
    return num_cores, source


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(psutil.cpu_count(logical=False) or os.cpu_count() or 1))


def _siblings(root: Path, cpu: int) -> str:
    """An identifier common to the hardware threads of one core; without the kernel's file, each thread is a core."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return str(cpu)


def read_cpu_name(root: Path = ROOT) -> str:
    """The processor's own name, on one line."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return " ".join(next(names, "").split()) or platform.processor() or platform.machine() or sys.platform
