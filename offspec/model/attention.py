"""Attention over a KV cache, and its masks.

The keys of a pass are in this order: the committed prefix, pending nodes of earlier rounds, then the pass's own rows.
These are a chain (each row attends to all keys before it), then tree nodes (each attends to the prefix, the chain, and
its own ancestors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CAPPED_SCORES = 2**23  # scores (heads * rows * keys) that `capped_attention` computes at once


@dataclass(frozen=True)
class Visibility:
    """The attention mask of one pass.

    start: slot of the pass's first row. positions [T]: absolute positions of the rows.
    key_positions [>= start + T]: absolute positions of all slots.
    tree_mask: bool [R, P + R] over the pending region (P entries before the pass, then its R tree rows); the last R
    rows of the pass are its nodes. None without a tree.
    """

    start: int
    positions: Tensor
    key_positions: Tensor
    tree_mask: Tensor | None

    def mask(self, first: int, last: int, window: int | None) -> Tensor | None:
        """Bool [last - first, start + last]: the keys that rows first .. last attend to; None for all keys."""
        num_rows, end = self.positions.shape[0], self.start + last
        num_nodes = 0 if self.tree_mask is None else self.tree_mask.shape[0]
        if last - first == 1 and num_nodes == 0 and (window is None or end <= window):
            return None
        device = self.positions.device
        slots = torch.arange(self.start + first, end, device=device)
        mask = torch.arange(end, device=device) <= slots[:, None]
        first_node = max(first, num_rows - num_nodes)
        if self.tree_mask is not None and first_node < last:
            rows = self.tree_mask[first_node - (num_rows - num_nodes) : last - (num_rows - num_nodes)]
            region = self.start + num_rows - self.tree_mask.shape[1]  # slot where the pending region begins
            mask[first_node - first :, region:] = rows[:, : end - region]
        if window is not None:
            mask &= self.positions[first:last, None] - self.key_positions[:end] < window
        return mask


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """Grouped-query attention of queries [T, heads, D] over keys and values [kv_heads, S, D]; returns [T, heads, D].

    scale: of scores; None is D ** -0.5. cap: c of c tanh(score / c), see `capped_attention`. The query heads that share
    a key head are stacked as further rows, so that keys and values are never repeated.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    stacked = (
        queries.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, num_kv_heads, -1, head_dim)
    )
    if mask is not None and group > 1:
        mask = mask.repeat(group, 1)
    if cap is None:
        out = F.scaled_dot_product_attention(stacked, keys[None], values[None], attn_mask=mask, scale=scale)
    else:
        out = capped_attention(stacked[0], keys, values, mask, head_dim**-0.5 if scale is None else scale, cap)
    return out.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)


def capped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """Attention with scores cap * tanh(score / cap) (Gemma 2, 2408.00118), which torch's attention does not support.

    queries [kv_heads, R, D], keys and values [kv_heads, S, D], mask bool [R, S]; returns [kv_heads, R, D]. Scores are
    fp32 matrices [R, S], computed for as many heads at once as CAPPED_SCORES allows, at least one.
    """
    step = max(1, CAPPED_SCORES // (queries.shape[1] * keys.shape[1]))
    found, exact = list[Tensor](), torch.promote_types(queries.dtype, torch.float32)
    for first in range(0, len(keys), step):
        some = slice(first, first + step)
        scores = (queries[some] @ keys[some].transpose(1, 2)).to(exact) * (scale / cap)
        scores = scores.tanh() * cap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        found.append(scores.softmax(-1).to(values.dtype) @ values[some])
    return torch.cat(found)
