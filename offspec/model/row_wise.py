"""Functions of single numbers, with the same bits for a row however many rows there are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.products import are_rows_exact, must_be_exact
from offspec.backends.x86.row_steps import can_step, silu_rows

# torch computes the end of a tensor, and of a thread's share of it, by other instructions than the rest, which round
# exponentials otherwise: where the numbers are no multiple of TAIL, or more than SHARE. So it does with numbers that do
# not lie side by side.
TAIL, SHARE = 64, 32768


def row_wise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) of each number of x; inside `exact_rows`, on a CPU, of so many whole vectors as torch takes alike."""
    if not are_rows_exact() or x.device.type != "cpu":
        return function(x)
    numbers = F.pad(x.contiguous().view(-1), (0, -x.numel() % TAIL))
    return torch.cat([function(some) for some in torch.split(numbers, SHARE)])[: x.numel()].view(x.shape)


def silu(x: Tensor) -> Tensor:
    """silu(x) of each number of x [T, N]; as `row_wise`, but on all threads."""
    is_step = x.device.type == "cpu" and must_be_exact(x) and can_step(x.dtype, x.shape[-1])
    return silu_rows(x) if is_step else row_wise(F.silu, x)
