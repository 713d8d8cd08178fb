"""Whether torch can compute on this machine's GPUs. If not: why, and the remedy. torch is imported only when asked.

Driver versions: "CUDA Toolkit Release Notes", minimum required driver for CUDA minor version compatibility.
Kernels: "CUDA C++ Programming Guide", binary and PTX compatibility.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..files.os_errors import first_line

INSTALL = "https://pytorch.org/get-started/locally"
LEAST_DRIVERS = {13: "580", 12: "525 (Windows: 528)", 11: "450 (Windows: 452)"}  # by torch's CUDA


@dataclass(frozen=True)
class GpuFault:
    """Why a GPU cannot be used, and the remedy. has_driver: there is a driver, so there should be a usable card."""

    reason: str
    remedy: str
    has_driver: bool = True

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


def gpu_fault() -> GpuFault | None:
    """Why torch finds no CUDA device; None if it finds one."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the fault that is returned here
        if torch.cuda.is_available():
            return None
    if torch.version.cuda is None and torch.version.hip is None:
        reason = f"this torch ({torch.__version__}) is built for CPUs only"
        return GpuFault(reason, f"if there is a graphics card, install torch for it ({INSTALL})", has_driver=False)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # tells what is wrong, where `is_available` does not
    except (RuntimeError, AssertionError) as exc:
        return fault_of(exc)
    return _hidden("")


def card_fault(index: int) -> GpuFault | None:
    """Why torch has no kernels for a CUDA device; None if it has."""
    import torch

    if torch.version.cuda is None:  # ROCm's architectures have other names
        return None
    capability, built = torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    if has_kernels_for(capability, built):
        return None
    card = "{} (sm_{}{})".format(torch.cuda.get_device_name(index), *capability)
    reason = f"this torch ({torch.__version__}) has no kernels for the {card}, only {', '.join(built)}"
    newer = "CUDA 12.8 or newer" if capability >= (10, 0) else "an older CUDA, such as 12.6"
    return GpuFault(reason, f"install torch for {newer} ({INSTALL})")


def has_kernels_for(capability: tuple[int, int], built: Iterable[str]) -> bool:
    """Whether kernels for these architectures ("sm_86", "compute_90") run on a card; if none is known, yes.

    Binaries (sm) run on cards of the same major version, from their minor version on. PTX (compute) is compiled for any
    later card. With "f", either runs on the major version only; with "a", on this very card only.
    """
    architectures = [parsed for name in built if (parsed := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name))]
    for kind, major, minor, limit in (parsed.groups() for parsed in architectures):
        version = int(major), int(minor)
        runs_later = version[0] == capability[0] or (kind == "compute" and not limit)
        if version == capability or (limit != "a" and version < capability and runs_later):
            return True
    return not architectures


def fault_of(exc: BaseException) -> GpuFault:
    """The fault that torch reports by an exception."""
    text = " ".join(str(exc).split())
    for pattern, fault in _FAULTS.items():
        if re.search(pattern, text, re.IGNORECASE):
            return fault if isinstance(fault, GpuFault) else fault(text)
    return GpuFault(first_line(exc).rstrip("."), "check that nvidia-smi shows the card")


def _too_old(text: str) -> GpuFault:
    import torch

    number = re.search(r"found version (\d+)", text)
    version = int(number[1]) if number else 0
    cuda = torch.version.cuda or "?"
    reason = f"the NVIDIA driver is too old: it supports CUDA up to {version // 1000}.{version % 1000 // 10}, "
    reason += f"and this torch ({torch.__version__}) needs CUDA {cuda}"
    least = LEAST_DRIVERS.get(int(cuda.partition(".")[0])) if cuda[0].isdigit() else None
    update = f"update the driver to {least} or newer" if least else "update the driver"
    return GpuFault(reason, f"{update} (WSL: in Windows), or install torch for an older CUDA ({INSTALL})")


def _hidden(text: str) -> GpuFault:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        reason = f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every card"
        return GpuFault(reason, "unset it, or name a card by its number", has_driver=False)
    return GpuFault("the NVIDIA driver shows no card", "check that nvidia-smi -L lists one", has_driver=False)


_FAULTS: dict[str, GpuFault | Callable[[str], GpuFault]] = {  # what torch or CUDA writes → its explanation
    r"driver on your system is too old|driver version is insufficient": _too_old,
    r"found no nvidia driver": GpuFault(
        "there is no NVIDIA driver",
        "if there is an NVIDIA card, install its driver (WSL: in Windows); a container has to be given the GPUs",
        has_driver=False,
    ),
    r"no cuda gpus are available|no cuda-capable device": _hidden,
    r"display driver / cuda driver combination|forward compatibility was attempted": GpuFault(
        "the parts of the NVIDIA driver have different versions, as after an update",
        "restart the machine; in a container, remove the package cuda-compat",
    ),
    r"cuda unknown error|cuda error: unknown error": GpuFault(
        "CUDA cannot be initialised (unknown error), as after a suspend",
        "restart the machine, or reload the driver's module (modprobe -r nvidia_uvm && modprobe nvidia_uvm)",
    ),
    r"cuda error: out of memory": GpuFault("CUDA error: out of memory", "close other programs that use the card"),
}
