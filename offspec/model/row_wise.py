"""Functions of single numbers, with the same bits for a row however many rows there are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offspec.loaders.formats.products import are_rows_exact

# torch computes the end of a tensor, and of a thread's share of it, by other instructions than the rest, which round
# exponentials otherwise: where the numbers are no multiple of TAIL, or more than SHARE. So it does with numbers that do
# not lie side by side.
TAIL, SHARE = 64, 32768


def row_wise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) of each number of x [T, N]; inside `exact_rows`, on a CPU, so many rows at once as do not matter."""
    if not are_rows_exact() or x.device.type != "cpu" or len(x) <= 1:
        return function(x)
    width = x.shape[1]
    step = max(1, SHARE // width) if width % TAIL == 0 else 1
    return torch.cat([function(rows) for rows in torch.split(x.contiguous(), step)])
