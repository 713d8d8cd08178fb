"""Which backend computes: the one place where a device's type decides it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .arithmetic import FAST
from .backend import Backend
from .cpu import CpuBackend, ExactCpuBackend
from .gpu import ExactGpuBackend, GpuBackend
from .weights import Weight

CPU = torch.device("cpu")


@cache
def backend_of(device: torch.device, arithmetic: str = FAST) -> Backend:
    """arithmetic: of `arithmetic.ARITHMETIC`; on a GPU rows in 8 bits are exact ones."""
    if device.type == "cpu":
        return CpuBackend() if arithmetic == FAST else ExactCpuBackend(arithmetic)
    return GpuBackend() if arithmetic == FAST else ExactGpuBackend(device)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """`Backend.linear` in the fastest way on the device of x."""
    return backend_of(x.device).linear(x, weight, bias, scratch)
