"""What this machine has: RAM, cores, a GPU and a disk, each with the place its number comes from.

Facts only, read in milliseconds; how fast it all is stands in `measure.py`. torch is imported only to ask for a GPU.
Knows nothing of models or tokens, and does not decide what goes where.
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

from offspec.errors import HardwareError

from .cgroups import ROOT, cpu_quota, memory_limits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Memory:
    """RAM that this process may use. Swap does not count: what is swapped is slower than what is streamed.

    total_bytes: the machine's, or what its container allows if that is less. available_bytes: what can be taken now,
    where page cache counts as free. limit: what sets available_bytes, "MemAvailable" or the file of a control group.
    """

    total_bytes: int
    available_bytes: int
    machine_bytes: int
    limit: str


@dataclass(frozen=True)
class Gpu:
    """A CUDA device. free_bytes: what no other program holds; torch's own cache in this process counts as taken."""

    name: str
    index: int
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Rates:
    """How fast this machine is; None (or no entry) is not measured. `sources`: for each field how, or why not.

    matmul_flops: rows of activations → FLOP/s, against weights that no cache holds (two FLOP a weight and row).
    memory_bytes_per_s: the compute device's own memory, reading and writing. dequantise_elements_per_s: NF4 weights/s.
    """

    disk_bytes_per_s: float | None = None
    host_to_device_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    matmul_flops: Mapping[int, float] = field(default_factory=dict)
    dequantise_elements_per_s: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Hardware:
    """One machine as one compute device sees it. cores_limit: what num_cores comes from."""

    ram: Memory
    cpu_name: str
    num_cores: int
    cores_limit: str
    gpu: Gpu | None = None
    rates: Rates = Rates()


@dataclass(frozen=True)
class Disk:
    """The file system that a folder lies on."""

    path: Path
    file_system: str  # "ext4"
    device: str  # "/dev/nvme0n1p2"
    free_bytes: int


def read_hardware(device: torch.device) -> Hardware:
    """What is there, for computing on `device`; nothing is measured. Raises HardwareError where a GPU fails."""
    num_cores, cores_limit = read_cores()
    gpu = read_gpu(device) if device.type == "cuda" else None
    return Hardware(read_memory(), read_cpu_name(), num_cores, cores_limit, gpu)


def read_memory(root: Path = ROOT) -> Memory:
    """RAM within the tightest limit of the control groups this process is in."""
    machine, limits = psutil.virtual_memory(), memory_limits(root)
    total = min([machine.total, *(limit.limit_bytes for limit in limits)])
    rooms = [(machine.available, "MemAvailable"), *((limit.available_bytes, limit.source) for limit in limits)]
    available, source = min(rooms, key=lambda room: room[0])
    return Memory(total, available, machine.total, source)


def read_gpu(device: torch.device) -> Gpu:
    """Raises HardwareError where the driver does not answer, or has no memory left for a context."""
    import torch

    try:
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    except (RuntimeError, AssertionError) as exc:  # torch built without CUDA asserts
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise HardwareError(
            f"{device} cannot be used ({reason}); see what nvidia-smi says, or use --device cpu"
        ) from exc
    return Gpu(properties.name, index, total_bytes, free_bytes, (properties.major, properties.minor))


def read_disk(path: Path) -> Disk:
    """The file system of a file or folder. Raises HardwareError where it does not answer."""
    real = path.resolve()
    try:
        mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
        free_bytes = psutil.disk_usage(os.fspath(real)).free
    except OSError as exc:
        raise HardwareError(f"{path}: its disk does not answer ({exc.strerror or exc}); choose another folder") from exc
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)  # the last of equals would hide the first
    return Disk(path, mount.fstype if mount else "unknown", mount.device if mount else "unknown", free_bytes)


# ------------------------------------------------------------------------------------------------ processor


def read_cores(root: Path = ROOT) -> tuple[int, str]:
    """Cores that arithmetic can use, and what says so: affinity, SMT siblings counted once, control groups' quota."""
    cpus, num_there = _usable_cpus(), os.cpu_count() or 1
    num_cores = len({_siblings(root, cpu) for cpu in cpus})
    source = "hardware"
    if len(cpus) < num_there:
        source = f"affinity to {len(cpus)} of {num_there} processors"
    elif num_cores < num_there:
        source = f"hardware: {num_there} processors share them"
    quota = cpu_quota(root)
    if quota is not None and quota.num_cpus < num_cores:
        # One thread more than the quota pays for, and all of them wait for the one that was stopped.
        return max(1, int(quota.num_cpus)), quota.source
    return num_cores, source


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(psutil.cpu_count(logical=False) or os.cpu_count() or 1))


def _siblings(root: Path, cpu: int) -> str:
    """A text that the hardware threads of one core share; where the kernel does not tell, each is a core."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return str(cpu)


def read_cpu_name(root: Path = ROOT) -> str:
    """The processor's name as it gives it itself, on one line."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return " ".join(next(names, "").split()) or platform.processor() or platform.machine() or sys.platform
