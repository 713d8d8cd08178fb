"""Attention over a KV cache, and who sees whom. Knows nothing of weights, layers or tokens.

The keys of a pass lie in one row: the committed prefix, pending nodes of earlier rounds, then the pass's own rows: a
chain (each row sees all before it), then tree nodes (each sees the prefix, the chain, and its own ancestors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """Who sees whom in one pass.

    start: slot of the pass's first row. positions [T]: absolute positions of the rows.
    key_positions [>= start + T]: those of all slots.
    tree_mask: bool [R, P + R] over the pending region (P entries before the pass, then its R tree rows); the last R
    rows of the pass are its nodes. None where there is no tree.
    """

    start: int
    positions: Tensor
    key_positions: Tensor
    tree_mask: Tensor | None

    def mask(self, first: int, last: int, window: int | None) -> Tensor | None:
        """Bool [last - first, start + last]: which keys rows first .. last see; None when they see all of them."""
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


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of queries [T, heads, D] over keys and values [kv_heads, S, D]; returns [T, heads, D].

    The query heads that share a key head are stacked as further rows, so that keys and values are never repeated.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    stacked = (
        queries.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, num_kv_heads, -1, head_dim)
    )
    if mask is not None and group > 1:
        mask = mask.repeat(group, 1)
    out = F.scaled_dot_product_attention(stacked, keys[None], values[None], attn_mask=mask)
    return out.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
