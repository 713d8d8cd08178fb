"""Attention over a KV cache, and who sees whom. Knows nothing of weights, layers or tokens.

The keys of a pass lie in one row: the committed prefix, pending nodes of earlier rounds, then the pass's own rows: a
chain (each row sees all before it), then tree nodes (each sees the prefix, the chain, and its own ancestors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CAPPED_SCORES = 2**23  # of rows * keys of one or several heads that `capped_attention` has at once


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
    """Attention whose scores are cap * tanh(score / cap) (Gemma 2, 2408.00118), which torch's own cannot do.

    queries [kv_heads, R, D], keys and values [kv_heads, S, D], mask bool [R, S]; returns [kv_heads, R, D]. Scores are
    fp32 matrices [R, S] of as many heads at a time as CAPPED_SCORES has room for, one at least.
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
