"""Joules that a card has used, by NVML's counter (Volta and newer). The driver brings the library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

LIBRARY = "libnvidia-ml.so.1"
JOULES_PER_UNIT = 1e-3  # nvmlDeviceGetTotalEnergyConsumption counts millijoules since the driver was loaded


def energy_meter(device: torch.device) -> Callable[[], float] | None:
    """A function that returns joules so far, of which differences count; None where they cannot be read."""
    if device.type != "cuda":
        return None
    try:
        library = ctypes.CDLL(LIBRARY)
        meter = _meter_of(library, device)
        meter()
    except (OSError, AttributeError):
        return None
    return meter


def _meter_of(library: ctypes.CDLL, device: torch.device) -> Callable[[], float]:
    """Raises OSError if the library refuses."""
    handle = ctypes.c_void_p()
    _check(library.nvmlInit_v2())
    # NVML counts cards in another order than CUDA, so the card is named.
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    _check(library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)))

    def joules() -> float:
        count = ctypes.c_ulonglong()
        _check(library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(count)))
        return count.value * JOULES_PER_UNIT

    return joules


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"NVML returned {status}")
