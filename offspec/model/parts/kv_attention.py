"""Attention over a KV cache, and its masks.

Over many keys, or keys that are unpacked for each use, attention is computed by parts of the keys, and their results
are merged by their softmax sums (FlashAttention, 2205.14135). Most parts need no mask.

The keys of a pass are in this order: the committed prefix, pending nodes of earlier rounds, then the pass's own rows.
These are a chain (each row attends to all keys before it), then tree nodes (each attends to the prefix, the chain, and
its own ancestors).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.trees.token_tree import IntArray, ancestor_mask, node_paths

from .split_attention import KeyPart, part_attention

CAPPED_SCORES = 2**23  # scores (heads * rows * keys) that `capped_attention` computes at once
MASKED_KEYS = 4096  # keys of a part with a mask


@dataclass(frozen=True)
class KeyRange:
    """A part of the keys: slots first .. end, and the bool mask [T, end - first] of T rows; None for all of them."""

    first: int
    end: int
    mask: Tensor | None

    def split(self, most: int) -> Iterator[KeyRange]:
        """Parts of at most `most` keys."""
        for first in range(self.first, self.end, most):
            yield self._part(first, min(first + most, self.end))

    def cut(self, slots: Sequence[int]) -> list[KeyRange]:
        """The parts between these slots, which are inside and ascending."""
        return [self._part(first, end) for first, end in pairwise((self.first, *slots, self.end))]

    def _part(self, first: int, end: int) -> KeyRange:
        mask = None if self.mask is None else self.mask[:, first - self.first : end - self.first]
        return KeyRange(first, end, mask)


@dataclass(frozen=True)
class Visibility:
    """The attention mask of one pass.

    start: slot of the pass's first row. positions [T]: absolute positions of the rows.
    key_positions [>= start + T]: absolute positions of all slots.
    parents: int64 [P + R], as in `TokenTree`, of the pending region: P entries before the pass, then its tree rows.
    num_nodes: R; so many last rows of the pass are nodes.
    """

    start: int
    positions: Tensor
    key_positions: Tensor
    parents: IntArray
    num_nodes: int

    @property
    def region(self) -> int:
        """The slot where the pending region begins, or would begin; a chain of the pass lies before it."""
        return self.start + self.positions.shape[0] - (len(self.parents) if self.num_nodes else 0)

    @property
    def num_before(self) -> int:
        """P."""
        return len(self.parents) - self.num_nodes

    @cached_property
    def node_slots(self) -> tuple[Tensor, Tensor]:
        """Slots on the paths to the nodes, path after path, each with its node; where each path ends among them [R]."""
        nodes, lengths = node_paths(self.parents, self.num_before)
        return torch.from_numpy(nodes) + self.region, torch.from_numpy(lengths.cumsum())

    @cached_property
    def tree_mask(self) -> Tensor:
        """Bool [R, P + R] on the device: which nodes of the region are on the path to each node, itself included."""
        return to_device(torch.from_numpy(ancestor_mask(self.parents, self.num_before)), self.positions.device)

    def ancestors(self, first: int, last: int) -> Tensor:
        """Bool [last - first, P + last]: `tree_mask` of the nodes first .. last."""
        return self.tree_mask[first:last, : self.num_before + last]

    def num_certain(self, first: int) -> int:
        """The number of first slots whose tokens precede all rows from `first` on."""
        return min(self.start + first, self.region)

    def first_seen(self, first: int, last: int, window: int | None) -> int:
        """The first slot that one of the rows first .. last may attend to."""
        if window is None or self.start + last <= window:
            return 0
        return max(0, self.num_certain(first) - window + 1)

    def ranges(self, first: int, last: int, window: int | None) -> list[KeyRange]:
        """The keys that rows first .. last attend to: those that all of them do, then a few with masks."""
        end, certain = self.start + last, self.num_certain(first)
        begin = self.first_seen(first, last, window)
        free = certain if window is None or end <= window else begin
        key_ranges = [KeyRange(begin, free, None)] if begin < free else []
        for at in range(free, end, MASKED_KEYS):
            until = min(at + MASKED_KEYS, end)
            key_ranges.append(KeyRange(at, until, self.mask(first, last, window, at, until)))
        return key_ranges

    def mask(
        self, first: int, last: int, window: int | None, begin: int = 0, until: int | None = None
    ) -> Tensor | None:
        """Bool [last - first, until - begin]: the keys that rows first .. last attend to; None for all keys.

        Of slots begin .. until, by default all up to the last row's.
        """
        num_rows, num_nodes, end = self.positions.shape[0], self.num_nodes, self.start + last
        if last - first == 1 and num_nodes == 0 and (window is None or end <= window):
            return None
        device, until = self.positions.device, end if until is None else until
        slots = torch.arange(self.start + first, end, device=device)
        mask = torch.arange(begin, until, device=device) <= slots[:, None]
        first_node, at = max(first, num_rows - num_nodes), max(self.region, begin)
        if num_nodes and first_node < last and at < until:
            rows = self.tree_mask[first_node - (num_rows - num_nodes) : last - (num_rows - num_nodes)]
            mask[first_node - first :, at - begin :] = rows[:, at - self.region : until - self.region]
        if window is not None:
            mask &= self.positions[first:last, None] - self.key_positions[begin:until] < window
        return mask


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention of queries [T, heads, D] over keys and values [kv_heads, S, D]; returns [T, heads, D].

    scale: of scores; None is D ** -0.5. cap: c of c tanh(score / c), see `capped_attention`. sinks: see `sink_result`.
    The query heads that share a key head are stacked as further rows, so that keys and values are never repeated.
    """
    if sinks is not None:
        return attend_by_parts(queries, [KeyPart(keys, values, mask)], scale=scale, cap=cap, sinks=sinks)
    grouped = _grouped(queries, keys.shape[0])
    stacked, group = grouped.flatten(1, 2), grouped.shape[1]
    if mask is not None and group > 1:
        mask = mask.repeat(group, 1)
    if cap is None:
        out = F.scaled_dot_product_attention(stacked[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
    else:
        out = capped_attention(stacked, keys, values, mask, _scale(queries, scale), cap)
    return _ungrouped(out.view(grouped.shape))


def attend_by_parts(
    queries: Tensor,
    parts: Iterable[KeyPart],
    *,
    scale: float | None = None,
    cap: float | None = None,
    before: PartialResult | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` over the keys and values of all parts, which are used one after the other.

    A row may have no key in a part, but has one in some part. before: of parts that are not given. sinks: see
    `sink_result`; None if there are none, or `before` has them.
    """
    merged = merge_parts(queries, parts, scale=scale, cap=cap, before=before, sinks=sinks)
    return _ungrouped(merged.total.to(queries.dtype))


@dataclass(frozen=True)
class PartialResult:
    """Attention to some of the keys: results [kv_heads, group, T, D] and logarithms of their softmax's sums."""

    total: Tensor
    sums: Tensor

    def of_rows(self, rows: slice) -> PartialResult:
        return PartialResult(self.total[:, :, rows], self.sums[:, :, rows])

    def merged(self, other: PartialResult) -> PartialResult:
        """Attention to the keys of both (2205.14135, section 3.1)."""
        sums = torch.logaddexp(self.sums, other.sums).clamp(min=torch.finfo(self.sums.dtype).min)  # -inf - -inf is NaN
        total, added = (each.total * (each.sums - sums).exp()[..., None] for each in (self, other))
        return PartialResult(total + added, sums)


def sink_result(queries: Tensor, num_kv_heads: int, sinks: Tensor) -> PartialResult:
    """Attention of queries [T, heads, D] to sinks alone: each head's key without a value, with the score sinks [heads].

    So a head may attend to nothing (StreamingLLM, 2309.17453; gpt-oss, whose sinks are learnt).
    """
    num_rows, num_heads, head_dim = queries.shape
    exact = torch.promote_types(queries.dtype, torch.float32)
    sums = sinks.to(exact).view(num_kv_heads, -1, 1).expand(-1, -1, num_rows)
    return PartialResult(sums.new_zeros(num_kv_heads, num_heads // num_kv_heads, num_rows, head_dim), sums)


def merge_parts(
    queries: Tensor,
    parts: Iterable[KeyPart],
    *,
    scale: float | None = None,
    cap: float | None = None,
    before: PartialResult | None = None,
    sinks: Tensor | None = None,
) -> PartialResult:
    """`attend_by_parts`, to which further parts may be added."""
    attend_to_part = part_attention(queries, cap)
    merged, grouped = before, None
    for part in parts:
        if grouped is None:
            grouped = _grouped(queries, part.keys.shape[0])
            merged = merged if sinks is None else sink_result(queries, part.keys.shape[0], sinks)
        attended, sums = attend_to_part(grouped, part, _scale(queries, scale))
        result = PartialResult(attended.to(sums.dtype), sums)
        merged = result if merged is None else merged.merged(result)
    assert merged is not None, "attention to no keys"
    return merged


def _scale(queries: Tensor, scale: float | None) -> float:
    return queries.shape[-1] ** -0.5 if scale is None else scale


def _grouped(queries: Tensor, num_kv_heads: int) -> Tensor:
    """Queries [T, heads, D] → [kv_heads, group, T, D]: those that share a key head together, as rows of one matrix."""
    num_rows, num_heads, head_dim = queries.shape
    group = num_heads // num_kv_heads
    by_head = queries.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    return by_head.reshape(num_kv_heads, -1, head_dim).view(num_kv_heads, group, num_rows, head_dim)


def _ungrouped(grouped: Tensor) -> Tensor:
    """Results [kv_heads, group, T, D] → [T, heads, D]."""
    return grouped.permute(2, 0, 1, 3).flatten(1, 2)


def capped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """Attention with scores cap * tanh(score / cap) (Gemma 2, 2408.00118), which torch's attention does not support.

    queries [kv_heads, R, D], keys and values [kv_heads, S, D], mask bool [R, S]; returns [kv_heads, R, D]. Scores are
    fp32 matrices [R, S], computed for as many heads at once as CAPPED_SCORES allows, at least one.
    """
    step = max(1, CAPPED_SCORES // (queries.shape[1] * keys.shape[1]))
    attended, exact = list[Tensor](), torch.promote_types(queries.dtype, torch.float32)
    for first in range(0, len(keys), step):
        some = slice(first, first + step)
        scores = (queries[some] @ keys[some].transpose(1, 2)).to(exact) * (scale / cap)
        scores = scores.tanh() * cap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        attended.append(scores.softmax(-1).to(values.dtype) @ values[some])
    return torch.cat(attended)
