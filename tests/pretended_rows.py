"""In place of `backends.triton.rows` on the pretended device: its arguments and results, by torch operations."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply(x: Tensor, matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return (x.float() @ matrix.float().T).to(dtype or x.dtype)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Of all keys, with a mask. Nothing is read back to the host."""
    assert cap is None
    assert sinks is None
    place, number = torch.arange(keys.shape[1], device=queries.device), torch.arange(len(slots), device=queries.device)
    first, shared_end, offset, count = (rows[:, column, None] for column in range(4))
    is_own = (number >= offset) & (number < offset + count) & (shared_end + number - offset >= first)
    is_single = (is_own.float() @ (slots[:, None] == place).float()) > 0
    mask = ((place >= first) & (place < shared_end)) | is_single
    group = queries.shape[1] // keys.shape[0]
    keys, values = (each.float().repeat_interleave(group, 0) for each in (keys, values))
    scores = (queries.float().transpose(0, 1) @ keys.transpose(1, 2)) * scale
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
    return (weights @ values).transpose(0, 1).to(queries.dtype)
