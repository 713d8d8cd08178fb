"""Attention of rows to lists of slots, against the formula; the same bits for a row wherever its keys lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from offspec.backends.x86.row_attention import (
    BLOCK,
    KeySlots,
    KeysOfRows,
    Scores,
    Visible,
    attend_rows,
    attend_rows_of_texts,
    can_attend,
    row_attention,
    rows_of_tile,
)

from ...machines import each_width

pytestmark = each_width
PREFIX, NUM_SLOTS = 4 * BLOCK + 5, 400


@dataclass(frozen=True)
class Heads:
    """The shape of heads, and which keys their rows see. group: query heads that share one of `kv_heads` key heads."""

    size: int
    kv_heads: int
    group: int
    dtype: torch.dtype = torch.bfloat16
    cap: float | None = None
    window: int | None = None
    has_sinks: bool = False

    @property
    def scores(self) -> Scores:
        return Scores(
            self.size**-0.5, self.cap, torch.linspace(-1, 2, self.kv_heads * self.group) if self.has_sinks else None
        )


HEADS = [
    Heads(64, 2, 4),
    Heads(128, 1, 3, torch.float16, window=40),
    Heads(20, 3, 1, torch.float32),
    Heads(80, 2, 2, cap=30.0, window=3 * BLOCK),
    Heads(8, 1, 71),
    Heads(24, 2, 2, window=BLOCK, has_sinks=True),
]
each_heads = pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads.size}x{heads.group}")


@dataclass(frozen=True)
class Row:
    """What a row sees: slots below `end`, then `singles`."""

    end: int
    singles: tuple[int, ...]

    def slots(self, window: int | None) -> list[int]:
        every = [*range(self.end), *self.singles]
        return every if window is None else every[-window:]


def some_rows() -> list[Row]:
    """A chain of rows that see each other, then nodes of a tree, of few and of many single slots."""
    chance = torch.Generator().manual_seed(2)
    chain = [Row(PREFIX - 19 + i, ()) for i in range(20)]
    counts = [1, 2, 3, 40, 70, 1, 5]
    singles = [(torch.randperm(200, generator=chance)[:n] + PREFIX + 30).sort().values.tolist() for n in counts]
    return chain + [Row(PREFIX + 1, tuple(slots)) for slots in singles]


def visible(rows: Sequence[Row], heads: Heads) -> Visible:
    end, num = (torch.tensor(numbers) for numbers in ([r.end for r in rows], [len(r.singles) for r in rows]))
    first = torch.zeros_like(end) if heads.window is None else (end + num - heads.window).clamp(min=0)
    singles = torch.tensor([slot for row in rows for slot in row.singles], dtype=torch.int64)
    return Visible.of(first, end, singles, num, rows_of_tile(heads.group))


def numbers_for(heads: Heads, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    shapes = ((num_rows, heads.kv_heads * heads.group, heads.size), *[(heads.kv_heads, NUM_SLOTS, heads.size)] * 2)
    queries, keys, values = (torch.randn(shape, generator=chance).to(heads.dtype) for shape in shapes)
    return queries, keys, values


def attended(heads: Heads, queries: Tensor, parts: Sequence[KeySlots], rows: Sequence[Row]) -> Tensor:
    return attend_rows(queries, parts, visible(rows, heads), heads.scores)


def by_formula(heads: Heads, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row's result [heads, D] in fp64; keys, values [kv_heads, S, D]: those that it sees."""
    keys, values = (each.double().repeat_interleave(heads.group, 0) for each in (keys, values))
    scores = (keys @ query.double()[..., None])[..., 0] * heads.scores.scale
    if heads.cap is not None:
        scores = heads.cap * (scores / heads.cap).tanh()
    if (sinks := heads.scores.sinks) is not None:
        return (torch.cat((scores, sinks[:, None]), 1).softmax(-1)[:, None, :-1] @ values)[:, 0]
    return (scores.softmax(-1)[:, None] @ values)[:, 0]


@pytest.mark.each_value
@each_heads
def test_results_are_those_of_the_formula(heads: Heads) -> None:
    rows = some_rows()
    queries, keys, values = numbers_for(heads, len(rows))
    found = attended(heads, queries, [KeySlots(0, keys, values)], rows)
    assert found.dtype == heads.dtype
    for i, row in enumerate(rows):
        slots = row.slots(heads.window)
        expected = by_formula(heads, queries[i], keys[:, slots], values[:, slots])
        assert ((found[i] - expected).abs() <= 1e-5 + torch.finfo(heads.dtype).eps * expected.abs()).all()


@each_heads
def test_a_row_does_not_depend_on_others_or_on_slots(heads: Heads) -> None:
    """Alone; with its keys side by side, as after a commit; with keys in several parts: the same bits."""
    rows = some_rows()
    queries, keys, values = numbers_for(heads, len(rows))
    together = attended(heads, queries, [KeySlots(0, keys, values)], rows)
    for i, row in enumerate(rows):
        query = queries[i : i + 1]
        assert torch.equal(attended(heads, query, [KeySlots(0, keys, values)], [row])[0], together[i])
        slots = row.slots(None)
        moved = KeySlots(0, keys[:, slots].contiguous(), values[:, slots].contiguous())
        assert torch.equal(attended(heads, query, [moved], [Row(len(slots), ())])[0], together[i])
    cuts = (0, BLOCK, 3 * BLOCK, NUM_SLOTS)
    parts = [
        KeySlots(first, keys[:, first:end].contiguous(), values[:, first:end].contiguous())
        for first, end in pairwise(cuts)
    ]
    assert torch.equal(attended(heads, queries, parts, rows), together)


@each_heads
def test_keys_that_a_row_does_not_see_do_not_matter(heads: Heads) -> None:
    rows = some_rows()
    queries, keys, values = numbers_for(heads, len(rows))
    found = attended(heads, queries[:1], [KeySlots(0, keys, values)], rows[:1])
    keys[:, rows[0].end :], values[:, rows[0].end :] = 3e4, -3e4
    assert torch.equal(attended(heads, queries[:1], [KeySlots(0, keys, values)], rows[:1]), found)
    assert torch.equal(attended(heads, queries, [KeySlots(0, keys, values)], rows)[:1], found)


def test_threads_change_no_bit(set_threads: Callable[[int], None]) -> None:
    heads, rows = HEADS[0], some_rows()
    queries, keys, values = numbers_for(heads, len(rows))
    parts = [KeySlots(0, keys, values)]
    set_threads(1)
    alone = attended(heads, queries, parts, rows)
    set_threads(3)
    assert torch.equal(attended(heads, queries, parts, rows), alone)


def test_what_is_no_number_stays_none() -> None:
    heads = Heads(8, 1, 1, torch.float32)
    queries, keys, values = numbers_for(heads, 1)
    keys[0, 3] = torch.nan
    assert attended(heads, queries, [KeySlots(0, keys, values)], [Row(5, ())]).isnan().all()
    assert attended(heads, queries, [KeySlots(0, keys, values)], [Row(3, ())]).isfinite().all()


def test_what_the_kernel_supports() -> None:
    assert can_attend(8, torch.bfloat16)
    assert not can_attend(8, torch.float64)
    assert not can_attend(512, torch.bfloat16)
    assert row_attention(64, "bf16", None) is row_attention(64, "bf16", None)


@each_heads
def test_texts_at_once_equal_each_alone(heads: Heads) -> None:
    """Rows of three texts, and one of no text between them."""
    rows = some_rows()
    queries, keys, values = numbers_for(heads, 2 * len(rows) + 6)
    texts, first_row = list[KeysOfRows](), 0
    for number, some in enumerate((rows, rows[:5], rows[::-1])):
        moved = (each.roll(number, 1).contiguous() for each in (keys, values))
        texts.append(KeysOfRows(first_row, KeySlots(0, *moved), visible(some, heads)))
        first_row += len(some) + (number == 1)
    together = attend_rows_of_texts(queries, texts, heads.scores)
    for first, part, seen in texts:
        some_queries = queries[first : first + len(seen.rows)]
        alone = attend_rows(some_queries, [part], seen, heads.scores)
        assert torch.equal(together[first : first + len(seen.rows)], alone)


@pytest.mark.each_value
@pytest.mark.parametrize("window", [None, 1, 7, 70])
@pytest.mark.parametrize(("start", "num_rows"), [(0, 1), (3, 40), (90, 5)])
def test_what_a_chain_sees(start: int, num_rows: int, window: int | None) -> None:
    """Equal to lists of slots that name each row's."""
    end = torch.arange(start + 1, start + num_rows + 1)
    first = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
    expected = Visible.of(first, end, end[:0], torch.zeros_like(end), 16)
    chain = Visible.of_chain(start, num_rows, window, 16)
    for one, other in ((chain.rows, expected.rows), (chain.tiles, expected.tiles), (chain.slots, expected.slots)):
        assert torch.equal(one, other)
