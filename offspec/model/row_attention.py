"""What each row of a text's pass attends to, as lists of slots, for attention that does not depend on other rows.

The kernel is `backends.x86.row_attention`; on a GPU `backends.triton.rows` takes the same lists. A row's slots in
ascending order are its tokens' positions in ascending order: the committed prefix, a chain, then a node's ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from offspec.backends.x86.row_attention import BLOCK, KeySlots, KeysOfRows, Visible, rows_of_tile
from offspec.loaders.streaming.small_transfers import to_device

from .memory.sequence_cache import SequenceCache
from .parts.kv_attention import Visibility


def keys_from_begin(cache: SequenceCache, layer: int, visible: Visible) -> Iterator[KeySlots]:
    """The keys that `visible` names, counted from its first one, in parts that the cache can give."""
    for part in key_parts(cache, layer, visible, cache.most_read(layer), first=visible.begin):
        yield replace(part, first=part.first - visible.begin)


def all_keys(first_row: int, cache: SequenceCache, layer: int, visible: Visible) -> KeysOfRows:
    """What a text's rows see of a layer, as views of all of its keys. first_row: among the rows of several texts."""
    part = KeySlots(0, *cache.read(layer, visible.end, visible.begin))
    return KeysOfRows(first_row, part, visible.from_begin)


def moved_to(visible: Visible, device: torch.device) -> Visible:
    """Itself, with its rows and slots on the device, too; slots count from `Visible.begin`."""
    counted = visible.from_begin
    counted.moved[device] = to_device(counted.rows, device), to_device(counted.slots, device)
    return visible


def visible_slots(visibility: Visibility, first: int, last: int, window: int | None, group: int) -> Visible:
    """The slots that rows first .. last of a pass attend to; group: query heads that share a key head.

    window: as in `Visibility.mask`.
    """
    first_node = visibility.positions.shape[0] - visibility.num_nodes
    if last <= first_node:
        return Visible.of_chain(visibility.start + first, last - first, window, rows_of_tile(group))
    rows = torch.arange(first, last)
    is_node = rows >= first_node
    end = torch.where(is_node, visibility.region, visibility.start + rows + 1)
    slots, ends = visibility.node_slots
    ends = torch.cat((ends.new_zeros(1), ends))[max(first - first_node, 0) : last - first_node + 1]
    num_singles = torch.zeros(len(rows), dtype=torch.int64)
    num_singles[is_node], singles = ends.diff(), slots[ends[0] : ends[-1]]
    unseen = torch.zeros_like(end) if window is None else (end + num_singles - window).clamp(min=0)
    return Visible.of(unseen, end, singles, num_singles, rows_of_tile(group))


def key_parts(
    cache: SequenceCache, layer: int, visible: Visible, most: int | None, first: int = 0, end: int | None = None
) -> Iterator[KeySlots]:
    """The keys and values that `visible` names: at most `most` at once, then all that must be given together.

    first, end: only those of these slots, multiples of BLOCK; None: up to `visible.end`. What the text shares with
    others comes in parts of its own.
    """
    end, together = end or visible.end, min(visible.end, visible.first_single) // BLOCK * BLOCK
    step = end if most is None else max(BLOCK, most // BLOCK * BLOCK)
    cuts = () if most is None else (*range(step, together, step), together)
    inside = sorted({slot for slot in (*cuts, cache.num_in_beginning) if first < slot < end})
    for begin, until in pairwise((first, *inside, end)):
        yield KeySlots(begin, *cache.read(layer, until, begin))
