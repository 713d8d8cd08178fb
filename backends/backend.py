"""What computes a decoder's rows, chosen from its device and arithmetic: a layer's weights have it.

`Backend` computes in the fastest ways; the exact ones compute a row with the same bits whatever rows share its pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .x86.row_steps import can_step, gate_rows, mix_rows, norm_rows, silu_rows

# torch computes the end of a tensor, and of a thread's share of it, by other instructions than the rest, which round
# exponentials otherwise: where the numbers are no multiple of TAIL, or more than SHARE. So it does with numbers that do
# not lie side by side.
TAIL, SHARE = 64, 32768


class Backend:
    """The fastest ways on a CPU. They keep gradients."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [..., N] over N, times weight [N]."""
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """function(x) of each number of x."""
        return function(x)

    def silu(self, x: Tensor) -> Tensor:
        """silu(x) of each number of x [T, N]."""
        return self.each(F.silu, x)

    def swiglu(self, gate: Tensor, up: Tensor, *, is_clamped: bool) -> Tensor | None:
        """SwiGLU's inner numbers [T, N] in one step, see `row_steps.gate_rows`; None: there is no such step."""
        return None

    def mix(self, outputs: Tensor, scales: Tensor) -> Tensor:
        """The sum [T, N] of each row's outputs, one after another: [T·used, N] times fp32 scales [T, used]."""
        total, *others = (outputs.view(*scales.shape, -1) * scales[..., None]).unbind(1)
        for each in others:
            total = total + each
        return total.to(outputs.dtype)


class FastOnGpu(Backend):
    """The fastest ways on a GPU."""

    def mix(self, outputs: Tensor, scales: Tensor) -> Tensor:
        return (outputs.view(*scales.shape, -1) * scales[..., None]).sum(1).to(outputs.dtype)


class ExactOnCpu(Backend):
    """By `backends.x86`, without gradients; where it has no kernel, torch's way of equal bits."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_rows(x, weight, eps) if can_step(x.dtype, x.shape[-1]) else super().rms_norm(x, weight, eps)

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """function(x) of so many whole vectors as torch takes alike."""
        numbers = F.pad(x.contiguous().view(-1), (0, -x.numel() % TAIL))
        return torch.cat([function(some) for some in torch.split(numbers, SHARE)])[: x.numel()].view(x.shape)

    def silu(self, x: Tensor) -> Tensor:
        """On all threads."""
        return silu_rows(x) if can_step(x.dtype, x.shape[-1]) else super().silu(x)

    def swiglu(self, gate: Tensor, up: Tensor, *, is_clamped: bool) -> Tensor | None:
        return gate_rows(gate, up, is_clamped=is_clamped) if can_step(gate.dtype, gate.shape[-1]) else None

    def mix(self, outputs: Tensor, scales: Tensor) -> Tensor:
        if can_step(outputs.dtype, outputs.shape[-1]):
            return mix_rows(outputs, scales)
        return super().mix(outputs, scales)


class ExactOnGpu(Backend):
    """By `backends.triton`; torch computes single numbers alike in any number of rows."""


FAST = Backend()


@cache
def backend_of(device_type: str, *, is_exact: bool) -> Backend:
    if device_type == "cpu":
        return ExactOnCpu() if is_exact else FAST
    return ExactOnGpu() if is_exact else FastOnGpu()
