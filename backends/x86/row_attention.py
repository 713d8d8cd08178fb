"""Attention of rows to the keys of one text, with the same bits for a row however many rows share its pass.

A row attends to a stretch of slots, then to single ones (`Visible`). Its keys, in this order, are the positions of its
text; they are taken in blocks of BLOCK positions that begin at multiples of BLOCK, with the online softmax of
FlashAttention (2205.14135) in fp32. A score adds products in the order of a head's numbers, a result in that of
positions. Neither depends on other rows, on slots, or on where a row's keys lie.

Rows share blocks of the stretch that all of them see: a block is unpacked once, keys transposed, for all queries of a
tile. A row takes single slots, and the rest of the block where they begin, by itself. Keys that a row does not see add
zeros, which change nothing. So keys and values of all slots in a tile's stretches must be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .compiler import Emitter, Kernel, run_on_threads
from .encodings import constant, of_items, splat, transposed
from .loops import counted, taken
from .powers import at_least, at_most, of_all, power_of_e
from .processor import num_lanes, per_processor

BLOCK = 32  # positions
TILE_QUERIES = 64  # queries for which a block is unpacked once, if the tile has several rows
MICRO_QUERIES = 6  # queries whose sums are in registers together
CHUNK_VECTORS = 4  # vectors of a query's result that are in registers together
MOST_GROUP = 256  # query heads that share a key head
KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LEAST = -1e30  # the largest score before any key was seen

# Work is 64-bit words: the threads' scratch, the bytes of each one's, the threads that have begun, which they count up,
# and the number of jobs. Then those of each job, which is a text's. Pointers: queries, results, largest scores and sums
# (`states`), keys, values, rows, tiles, slots; then numbers: rows, rows of all texts, key heads, query heads of a key
# head, rows of a tile, elements between key heads and between slots (of keys, of values), whether these keys are the
# first ones, and the last ones, and the next pair of a tile and a key head, which threads count up.
_WORK = ("scratch", "scratch_bytes", "next_thread", "num_jobs")
_POINTERS = ("queries", "results", "states", "keys", "values", "rows", "tiles", "slots")
_STRIDES = ("key_head", "key_slot", "value_head", "value_slot")
_NUMBERS = ("num_rows", "all_rows", "num_heads", "group", "tile_rows", *_STRIDES, "is_first", "is_last")
_COUNTED = ("next_tile",)
_JOB = (*_POINTERS, *_NUMBERS, *_COUNTED)
_ROW_WORDS, _TILE_WORDS = 5, 2


@dataclass(frozen=True)
class Visible:
    """The slots that each of R rows attends to, as a kernel needs them; the same for all heads.

    rows: int64 [R, 5]: the first slot of the stretch; the slot where the part of it ends that is taken in tiles; where
    the row's single slots begin in `slots`, their number, and how many first ones of them it does not see. tiles: int64
    [tiles, 2]: the first slot, a multiple of BLOCK, and the end of a tile's stretches. tile_rows: rows of a tile.
    moved: rows and slots on other devices, which all layers of a pass use.
    """

    rows: Tensor
    tiles: Tensor
    slots: Tensor
    tile_rows: int
    moved: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def end(self) -> int:
        """The end of the slots that rows attend to."""
        singles = int(self.slots.max()) + 1 if len(self.slots) else 0
        return max(singles, int(self.tiles[:, 1].max()))

    @cached_property
    def begin(self) -> int:
        """A multiple of BLOCK; no row attends to slots before it."""
        return int(self.tiles[:, 0].min())

    @cached_property
    def from_begin(self) -> Visible:
        """The same with slots that count from `begin`, for keys without those before it."""
        if self.begin == 0:
            return self
        rows = self.rows.clone()
        rows[:, :2] -= self.begin
        return Visible(rows, self.tiles - self.begin, self.slots - self.begin, self.tile_rows)

    @cached_property
    def first_single(self) -> int:
        """A slot from which on all keys must be given at once, because rows take some of them by themselves."""
        return int(self.slots.min()) if len(self.slots) else self.end

    @classmethod
    def of(cls, first: Tensor, end: Tensor, singles: Tensor, num_singles: Tensor, tile_rows: int) -> Visible:
        """first, end: int64 [R], each row's stretch. singles: all rows' single slots, one row after the other.

        num_singles: int64 [R]. The position of a slot in the stretch is its number, and single slots follow; a row does
        not see positions below `first`, in neither of them.
        """
        has_singles = num_singles > 0
        shared_end = torch.where(has_singles, end // BLOCK * BLOCK, end)
        num_left = end - shared_end  # of the stretch, in the block where single slots begin
        counts = num_left + num_singles
        offsets = counts.cumsum(0) - counts
        slots = torch.empty(int(counts.sum()), dtype=torch.int64)
        each = torch.repeat_interleave(torch.arange(len(first)), counts)
        place = torch.arange(len(slots)) - offsets[each]  # within a row's slots
        is_left = place < num_left[each]
        slots[is_left] = (shared_end[each] + place)[is_left]
        slots[~is_left] = singles
        unseen = (first - shared_end).clamp(min=0)
        rows = torch.stack((first, shared_end, offsets, counts, unseen), dim=1)
        tiles = [
            torch.stack((begin.min() // BLOCK * BLOCK, until.max()))
            for begin, until in zip(torch.split(first, tile_rows), torch.split(shared_end, tile_rows), strict=True)
        ]
        return cls(rows.contiguous(), torch.stack(tiles), slots, tile_rows)

    @classmethod
    def of_chain(cls, start: int, num_rows: int, window: int | None, tile_rows: int) -> Visible:
        """`of` for rows in slots from `start` on, each of which sees `window` slots up to its own; None: all."""
        rows = torch.zeros(num_rows, _ROW_WORDS, dtype=torch.int64)
        ends = torch.arange(start + 1, start + num_rows + 1, out=rows[:, 1])
        if window is not None:
            torch.clamp(ends - window, min=0, out=rows[:, 0])
        unseen = start + num_rows if window is None else window
        tiles = [
            [max(0, start + first + 1 - unseen) // BLOCK * BLOCK, start + min(first + tile_rows, num_rows)]
            for first in range(0, num_rows, tile_rows)
        ]
        return cls(rows, torch.tensor(tiles), torch.empty(0, dtype=torch.int64), tile_rows)

    @classmethod
    def together(cls, texts: Sequence[Visible]) -> Visible:
        """The rows of several texts, for slots that all of these texts have and all of their rows see as a stretch."""
        tile_rows = texts[0].tile_rows
        offsets = accumulate((len(text.slots) for text in texts), initial=0)
        stretches = torch.cat([text.rows for text in texts])
        for rows, offset in zip(torch.split(stretches, [len(text.rows) for text in texts]), offsets, strict=False):
            rows[:, 2] += offset
        tiles = [
            torch.stack((some[:, 0].min() // BLOCK * BLOCK, some[:, 1].max()))
            for some in torch.split(stretches, tile_rows)
        ]
        return cls(stretches, torch.stack(tiles), torch.cat([text.slots for text in texts]), tile_rows)


def rows_of_tile(group: int) -> int:
    """Rows of a tile, for `group` query heads that share a key head."""
    return max(1, TILE_QUERIES // group)


def can_attend(group: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for this CPU, dtype and number of query heads that share a key head."""
    return num_lanes() > 0 and dtype in KINDS and group <= MOST_GROUP


def can_attend_on_gpu(group: int, head_dim: int, itemsize: int) -> bool:
    """Whether the operands of `triton.rows.attention_kernel` fit in the shared memory of any card from Turing on."""
    padded_group, padded_dim = (1 << (size - 1).bit_length() for size in (max(16, group), max(16, head_dim)))
    return (padded_group + 2 * BLOCK) * padded_dim * itemsize <= 64 * 1024


@dataclass(frozen=True)
class Scores:
    """How a query's scores are made. scale: of products. cap: c of c tanh(score / c).

    sinks: [heads], each head's score of a key without a value that every row attends to; None: there are none.
    """

    scale: float
    cap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class KeySlots:
    """Keys and values [kv_heads, slots, D] from slot `first` on, with a head's numbers side by side."""

    first: int
    keys: Tensor
    values: Tensor

    @property
    def end(self) -> int:
        return self.first + self.keys.shape[1]


class KeysOfRows(NamedTuple):
    """A text's keys, and what its rows see of them; its first row among those of all texts."""

    first_row: int
    part: KeySlots
    visible: Visible


def attend_rows_of_texts(queries: Tensor, texts: Sequence[KeysOfRows], scores: Scores) -> Tensor:
    """`attend_rows` of several texts at once, each with all of its keys in one part → [R, heads, D].

    Results of rows that are in none of the texts mean nothing.
    """
    attention = RunningAttention.of(queries, texts[0].part.keys.shape[0], scores)
    attention.add_each(texts)
    return attention.final(queries)


def attend_rows(queries: Tensor, parts: Iterable[KeySlots], visible: Visible, scores: Scores) -> Tensor:
    """Grouped-query attention of queries [R, heads, D] on the CPU → [R, heads, D] in their dtype.

    parts: keys and values in that dtype, one part after the other up to `visible.end`. All but the last part end at a
    multiple of BLOCK, at most at `visible.first_single`.
    """
    attention: RunningAttention | None = None
    for part in parts:
        if attention is None:
            attention = RunningAttention.of(queries, part.keys.shape[0], scores)
        attention.add(part, visible)
    assert attention is not None, "attention to no keys"
    return attention.final(queries)


@dataclass(frozen=True)
class RunningAttention:
    """Scaled queries, fp32 [kv_heads, R, group, D], and their results so far.

    results: of the same shape. states: fp32 [kv_heads, R, group, 2], each query's largest score and softmax's sum,
    unless the results are final. cap: see `Scores`. has_begun: both have something before any keys.
    """

    queries: Tensor
    results: Tensor
    states: Tensor
    cap: float | None = None
    has_begun: bool = False

    @classmethod
    def of(cls, queries: Tensor, num_heads: int, scores: Scores) -> RunningAttention:
        """Before any keys, but after the sinks. queries: [R, heads, D]. num_heads: of keys."""
        num_rows, _, head_dim = queries.shape
        scaled = (queries.float() * scores.scale).view(num_rows, num_heads, -1, head_dim)
        by_head = scaled.view(num_heads, 1, -1, head_dim) if num_rows == 1 else scaled.transpose(0, 1).contiguous()
        states = by_head.new_empty(*by_head.shape[:3], 2)
        if scores.sinks is None:
            return cls(by_head, torch.empty_like(by_head), states, scores.cap)
        states[..., 0], states[..., 1] = scores.sinks.view(num_heads, 1, -1), 1.0
        return cls(by_head, torch.zeros_like(by_head), states, scores.cap, has_begun=True)

    def add(self, part: KeySlots, visible: Visible) -> None:
        """Attend to these keys, too."""
        assert len(visible.rows) == self.queries.shape[1]
        self.add_each([KeysOfRows(0, part, visible)])

    def add_each(self, texts: Sequence[KeysOfRows]) -> None:
        """Attend to the keys of several texts, too, each with rows of its own."""
        row_attention(self.queries.shape[-1], KINDS[texts[0].part.keys.dtype], self.cap)(self, texts)

    def of_rows(self, rows: slice) -> RunningAttention:
        """A copy for some of the rows, which goes on by itself."""
        queries, results, states = (each[:, rows].contiguous() for each in (self.queries, self.results, self.states))
        return replace(self, queries=queries, results=results, states=states)

    def final(self, queries: Tensor) -> Tensor:
        """The results after the last keys, as `queries` [R, heads, D] in shape and dtype."""
        results = self.results if len(queries) == 1 else self.results.transpose(0, 1)
        return results.reshape(queries.shape).to(queries.dtype)


@per_processor
def row_attention(head_dim: int, kind: str, cap: float | None) -> RowAttention:
    """The kernel for heads of `head_dim` numbers of a kind (of KINDS)."""
    return RowAttention(head_dim, kind, cap, lanes=num_lanes())


def _tiles_of(part: KeySlots, visible: Visible) -> Tensor:
    """The tiles that rows see of a part."""
    is_last = part.end >= visible.end
    assert is_last or (part.end % BLOCK == 0 and part.end <= visible.first_single)
    return visible.tiles if is_last and part.first == 0 else visible.tiles.clamp(part.first, part.end)


def _job(attention: RunningAttention, text: KeysOfRows, tiles: Tensor) -> list[int]:
    """The words of one text's job, in the order of _JOB."""
    first_row, part, visible = text
    (key_head, key_slot, key_number), (value_head, value_slot, value_number) = part.keys.stride(), part.values.stride()
    assert key_number == value_number == 1
    num_heads, all_rows, group, head_dim = attention.queries.shape
    query, item = 4 * group * first_row, part.keys.itemsize  # in bytes of a query's fp32 numbers
    return [
        attention.queries.data_ptr() + head_dim * query,
        attention.results.data_ptr() + head_dim * query,
        attention.states.data_ptr() + 2 * query,
        part.keys.data_ptr() - part.first * key_slot * item,  # where slot 0 would be
        part.values.data_ptr() - part.first * value_slot * item,
        visible.rows.data_ptr(),
        tiles.data_ptr(),
        visible.slots.data_ptr(),
        len(visible.rows),
        all_rows,
        num_heads,
        group,
        visible.tile_rows,
        key_head,
        key_slot,
        value_head,
        value_slot,
        part.first == 0 and not attention.has_begun,
        part.end >= visible.end,
        0,
    ]


class _Scratch:
    """Where a thread's intermediate results are: bytes from the start of its scratch."""

    def __init__(self, head_dim: int, lanes: int) -> None:
        self.padded = -(-head_dim // lanes) * lanes  # numbers of a head, in whole vectors
        most_queries = max(MOST_GROUP, TILE_QUERIES)
        self.keys = 0  # fp32 [padded, BLOCK]
        self.values = self.keys + 4 * self.padded * BLOCK  # fp32 [BLOCK, padded]
        self.zeros = self.values + 4 * self.padded * BLOCK  # a head's numbers
        self.key_places = self.zeros + 4 * self.padded  # addresses [BLOCK]
        self.value_places = self.key_places + 8 * BLOCK
        self.weights = self.value_places + 8 * BLOCK  # fp32 [MICRO_QUERIES, BLOCK]
        self.shrinkage = self.weights + 4 * MICRO_QUERIES * BLOCK  # fp32 [MICRO_QUERIES], in 64 bytes
        self.most = self.shrinkage + 64  # fp32 [queries]: the largest score
        self.sums = self.most + 4 * most_queries  # fp32 [queries]: of the softmax
        self.begins = self.sums + 4 * most_queries  # int64 [queries]: positions that a query sees
        self.ends = self.begins + 8 * most_queries
        self.totals = -(-(self.ends + 8 * most_queries) // 64) * 64  # fp32 [queries, padded]

    def num_bytes(self, num_queries: int) -> int:
        return -(-(self.totals + 4 * self.padded * num_queries) // 4096) * 4096


@dataclass(frozen=True)
class _Tile:
    """Names of a tile's values in the module: addresses of its first query and first row, and how many it has.

    keys, values: of its key head, in slot 0.
    """

    queries: str
    results: str
    states: str
    keys: str
    values: str
    rows: str
    num_rows: str
    num_queries: str


class RowAttention(Kernel):
    """The kernel for heads of one size and dtype."""

    def __init__(self, head_dim: int, kind: str, cap: float | None, *, lanes: int) -> None:
        super().__init__()
        self.head_dim, self.kind, self.cap, self.lanes = head_dim, kind, cap, lanes
        self.vector, self.ints = f"<{lanes} x float>", f"<{lanes} x i32>"
        self.item = {"bf16": "i16", "fp16": "half", "fp32": "float"}[kind]
        self.places = _Scratch(head_dim, lanes)
        self.padded = self.places.padded
        self.micro = MICRO_QUERIES if lanes == 16 else 2

    def __call__(self, attention: RunningAttention, texts: Sequence[KeysOfRows]) -> None:
        """Add attention to these keys to the results, which are final after the last part. See `attend_rows`."""
        num_heads, _, group, _ = attention.queries.shape
        tiles = [_tiles_of(part, visible) for _, part, visible in texts]
        num_threads = min(torch.get_num_threads(), num_heads * sum([len(each) for each in tiles]))
        tile_rows = max([text.visible.tile_rows for text in texts])
        scratch_bytes = self.places.num_bytes(group * tile_rows)
        scratch = torch.empty(num_threads * scratch_bytes, dtype=torch.uint8)
        words = [scratch.data_ptr(), scratch_bytes, 0, len(texts)]
        for text, of_text in zip(texts, tiles, strict=True):
            words += _job(attention, text, of_text)
        run_on_threads(self.prepare(), words, num_threads)

    # ---------------------------------------------------------------------------------------- the text

    @property
    def source(self) -> str:
        queries = "".join([self._queries(count) for count in dict.fromkeys((self.micro, 1))])
        return self._unpack() + queries + self._all_queries() + self._worker()

    # ---------------------------------------------------------------------------------------- a block of keys

    def _unpack(self) -> str:
        """Unpack keys and values from their places; keys are transposed."""
        e, n = Emitter(), self.lanes
        keys, values, key_places, value_places = (
            self._in_scratch(e, place)
            for place in (self.places.keys, self.places.values, self.places.key_places, self.places.value_places)
        )
        last = self.padded - n if self.head_dim < self.padded else self.padded  # where whole vectors end

        def transpose(column: str, *, is_whole: bool) -> None:
            for group in range(0, BLOCK, n):
                square = []
                for i in range(group, group + n):
                    start = e.op(f"load ptr, ptr {e.address(key_places, str(i), 'ptr')}, align 8")
                    square.append(self._load(e, e.address(start, column, self.item), is_whole=is_whole))
                for i, vector in enumerate(transposed(e, square)):
                    row = e.op(f"mul i64 {e.op(f'add i64 {column}, {i}')}, {BLOCK}")
                    self._store(e, vector, e.address(keys, e.op(f"add i64 {row}, {group}"), "float"))

        counted(e, "columns", "0", str(last), n, lambda column: transpose(column, is_whole=True))
        if last < self.padded:
            transpose(str(last), is_whole=False)

        def copy(index: str) -> None:
            start = e.op(f"load ptr, ptr {e.address(value_places, index, 'ptr')}, align 8")
            row = e.address(values, e.op(f"mul i64 {index}, {self.padded}"), "float")
            for column in range(0, self.padded, n):
                place = e.address(start, str(column), self.item)
                vector = self._load(e, place, is_whole=column < last)
                self._store(e, vector, e.address(row, str(column), "float"))

        counted(e, "values", "0", str(BLOCK), 1, copy)
        e.do("ret void")
        return e.function("define internal void @unpack(ptr noalias %scratch)")

    def _load(self, e: Emitter, place: str, *, is_whole: bool) -> str:
        """A vector of numbers as fp32; a head's last one may have fewer, and zeros behind them."""
        n, kind = self.lanes, f"<{self.lanes} x {self.item}>"
        if is_whole:
            loaded = e.op(f"load {kind}, ptr {place}, align 2")
        else:
            there = self.head_dim % n
            mask = ", ".join(f"i1 {int(i < there)}" for i in range(n))
            operands = f"ptr {place}, i32 2, <{n} x i1> <{mask}>, {kind} zeroinitializer"
            name = {"i16": "i16", "half": "f16", "float": "f32"}[self.item]
            loaded = e.op(f"call {kind} @llvm.masked.load.v{n}{name}.p0({operands})")
        return of_items(e, loaded, self.item, n)

    # ---------------------------------------------------------------------------------------- queries and a block

    def _queries(self, count: int) -> str:
        """Attention of `count` queries from number `%first` on to the block that begins at position `%start`."""
        e = Emitter()
        scores = self._scores(e, count)
        shrinkage, weights = self._in_scratch(e, self.places.shrinkage), self._in_scratch(e, self.places.weights)
        for i in range(count):
            shrunk = self._softmax(e, i, scores[i], e.address(weights, str(i * BLOCK), "float"))
            e.do(f"store float {shrunk}, ptr {e.address(shrinkage, str(i), 'float')}, align 4")
        self._add_values(e, count, weights, shrinkage)
        e.do("ret void")
        head = f"define internal void @queries{count}(ptr noalias %scratch, ptr noalias %query, i64 %first, i64 %start)"
        return e.function(head)

    def _scores(self, e: Emitter, count: int) -> list[list[str]]:
        """Scores of each query, as vectors."""
        keys, vectors = self._in_scratch(e, self.places.keys), BLOCK // self.lanes
        queries = [e.address("%query", str(i * self.head_dim), "float") for i in range(count)]

        def add(column: str, sums: Sequence[str]) -> list[str]:
            row = e.address(keys, e.op(f"mul i64 {column}, {BLOCK}"), "float")
            loaded = [self._vector(e, e.address(row, str(j * self.lanes), "float")) for j in range(vectors)]
            new = []
            for i, query in enumerate(queries):
                number = e.op(f"load float, ptr {e.address(query, column, 'float')}, align 4")
                factor = splat(e, number, self.lanes)
                new += [e.fma(self.vector, factor, key, sums[i * vectors + j]) for j, key in enumerate(loaded)]
            return new

        zeros = [(self.vector, "zeroinitializer")] * (count * vectors)
        dot_products = counted(e, "scores", "0", str(self.head_dim), 1, add, zeros)
        return [dot_products[i * vectors : (i + 1) * vectors] for i in range(count)]

    def _softmax(self, e: Emitter, index: int, scores: Sequence[str], weights: str) -> str:
        """Store the weights of one query's keys, its largest score and its sum; returns what to multiply sums by."""
        query = e.op(f"add i64 %first, {index}")
        begin, end = (
            self._number(e, self._in_scratch(e, place), query) for place in (self.places.begins, self.places.ends)
        )
        scores = [self._capped(e, score) for score in scores]
        scores = [self._masked(e, score, j * self.lanes, begin, end) for j, score in enumerate(scores)]
        most_place, sum_place = (
            e.address(self._in_scratch(e, place), query, "float") for place in (self.places.most, self.places.sums)
        )
        before = e.op(f"load float, ptr {most_place}, align 4")
        most = self._over_lanes(e, [*scores, splat(e, before, self.lanes)], self._greater)
        all_most = splat(e, most, self.lanes)
        powers = [power_of_e(e, e.op(f"fsub {self.vector} {score}, {all_most}"), self.lanes) for score in scores]
        difference = e.op(f"fsub float {before}, {most}")
        shrunk_all = power_of_e(e, splat(e, difference, self.lanes), self.lanes)
        shrunk = e.op(f"extractelement {self.vector} {shrunk_all}, i64 0")
        total = self._over_lanes(e, powers, lambda e, one, other: e.op(f"fadd {self.vector} {one}, {other}"))
        kept = e.op(f"fmul float {e.op(f'load float, ptr {sum_place}, align 4')}, {shrunk}")
        e.do(f"store float {e.op(f'fadd float {kept}, {total}')}, ptr {sum_place}, align 4")
        e.do(f"store float {most}, ptr {most_place}, align 4")
        for j, weight in enumerate(powers):
            self._store(e, weight, e.address(weights, str(j * self.lanes), "float"))
        return shrunk

    def _number(self, e: Emitter, places: str, query: str) -> str:
        """A position of `places` [queries], counted from the block's start, as a vector of i32."""
        position = e.op(f"load i64, ptr {e.address(places, query, 'i64')}, align 8")
        number = e.op(f"trunc i64 {e.op(f'sub i64 {position}, %start')} to i32")
        return splat(e, number, self.lanes, "i32")

    def _masked(self, e: Emitter, scores: str, first: int, begin: str, end: str) -> str:
        """Scores of a block's keys from number `first` on; minus infinity of those that the query does not see."""
        n, ints = self.lanes, self.ints
        numbers = f"<{', '.join(f'i32 {first + i}' for i in range(n))}>"
        after = e.op(f"icmp sge {ints} {numbers}, {begin}")
        before = e.op(f"icmp slt {ints} {numbers}, {end}")
        is_seen = e.op(f"and <{n} x i1> {after}, {before}")
        return e.op(f"select <{n} x i1> {is_seen}, {self.vector} {scores}, {self.vector} splat (float {_MINUS_INF})")

    def _capped(self, e: Emitter, scores: str) -> str:
        """cap · tanh(score / cap), with tanh(z) = 1 - 2 / (exp(2 z) + 1)."""
        if self.cap is None:
            return scores
        twice = e.op(f"fmul {self.vector} {scores}, {of_all(2 / self.cap)}")
        twice = at_least(e, at_most(e, twice, 20.0, self.lanes), -20.0, self.lanes)
        above = e.op(f"fadd {self.vector} {power_of_e(e, twice, self.lanes)}, {of_all(1.0)}")
        part = e.op(f"fdiv {self.vector} {of_all(-2.0 * self.cap)}, {above}")
        return e.op(f"fadd {self.vector} {part}, {of_all(self.cap)}")

    def _over_lanes(self, e: Emitter, vectors: Sequence[str], joined: Callable[[Emitter, str, str], str]) -> str:
        """All numbers of some vectors as one."""
        total, n, distance = vectors[0], self.lanes, self.lanes // 2
        for other in vectors[1:]:
            total = joined(e, total, other)
        while distance:
            other = e.shuffle(self.vector, [(i + distance) % n for i in range(n)], total)
            total, distance = joined(e, total, other), distance // 2
        return e.op(f"extractelement {self.vector} {total}, i64 0")

    def _greater(self, e: Emitter, one: str, other: str) -> str:
        is_greater = e.op(f"fcmp ogt {self.vector} {one}, {other}")
        return e.op(f"select <{self.lanes} x i1> {is_greater}, {self.vector} {one}, {self.vector} {other}")

    def _add_values(self, e: Emitter, count: int, weights: str, shrinkage: str) -> None:
        """Shrink the results of the queries, and add values times weights to them."""
        n, values = self.lanes, self._in_scratch(e, self.places.values)
        totals = e.address(self._in_scratch(e, self.places.totals), e.op(f"mul i64 %first, {self.padded}"), "float")
        factors = [
            splat(e, e.op(f"load float, ptr {e.address(shrinkage, str(i), 'float')}, align 4"), n) for i in range(count)
        ]
        for first in range(0, self.padded, CHUNK_VECTORS * n):
            columns = range(first, min(first + CHUNK_VECTORS * n, self.padded), n)
            places = [
                e.address(totals, str(i * self.padded + column), "float") for i in range(count) for column in columns
            ]
            before = [
                e.op(f"fmul {self.vector} {self._vector(e, place)}, {factors[k // len(columns)]}")
                for k, place in enumerate(places)
            ]

            def add(key: str, sums: Sequence[str], columns: range = columns) -> list[str]:
                row = e.address(values, e.op(f"mul i64 {key}, {self.padded}"), "float")
                loaded = [self._vector(e, e.address(row, str(column), "float")) for column in columns]
                new = []
                for i in range(count):
                    place = e.address(weights, e.op(f"add i64 {key}, {i * BLOCK}"), "float")
                    weight = splat(e, e.op(f"load float, ptr {place}, align 4"), n)
                    new += [
                        e.fma(self.vector, weight, value, sums[i * len(columns) + j]) for j, value in enumerate(loaded)
                    ]
                return new

            summed = counted(e, f"values{first}", "0", str(BLOCK), 1, add, [(self.vector, number) for number in before])
            for place, number in zip(places, summed, strict=True):
                self._store(e, number, place)

    def _all_queries(self) -> str:
        """Attention of queries first .. last to the block that begins at position `%start`."""
        e, micro = Emitter(), self.micro
        count = e.op("sub i64 %last, %first")
        whole = e.op(f"sub i64 %last, {e.op(f'urem i64 {count}, {micro}')}")

        def call(count: int) -> Callable[[str], None]:
            def do(index: str) -> None:
                query = e.address("%query", e.op(f"mul i64 {index}, {self.head_dim}"), "float")
                e.do(f"call void @queries{count}(ptr %scratch, ptr {query}, i64 {index}, i64 %start)")

            return do

        counted(e, "whole", "%first", whole, micro, call(micro))
        counted(e, "single", whole, "%last", 1, call(1))
        e.do("ret void")
        head = "define internal void @all_queries(ptr %scratch, ptr %query, i64 %first, i64 %last, i64 %start)"
        return e.function(head)

    # ---------------------------------------------------------------------------------------- tiles

    def _worker(self) -> str:
        e = Emitter()
        e.words("%work", _WORK, ("scratch",), ("next_thread",))
        thread = e.op("atomicrmw add ptr %next_thread, i64 1 seq_cst")
        scratch = e.address("%scratch", e.i64("mul", thread, "%scratch_bytes"))
        zeros = e.address(scratch, str(self.places.zeros))
        for column in range(0, self.padded, self.lanes):
            self._store(e, "zeroinitializer", e.address(zeros, str(column), "float"))

        def text(index: str) -> None:
            place = e.i64("add", e.i64("mul", index, len(_JOB)), len(_WORK))
            e.do(f"call void @text(ptr {e.address('%work', place, 'i64')}, ptr {scratch})")

        counted(e, "job", "0", "%num_jobs", 1, text)
        e.do("ret void")
        return self._text() + e.function("define void @worker(ptr %work)")

    def _text(self) -> str:
        """The tiles of one text's job, until none is left."""
        e = Emitter()
        e.words("%job", _JOB, _POINTERS, _COUNTED)
        above = e.i64("add", "%num_rows", e.i64("sub", "%tile_rows", 1))
        num_tiles = e.i64("mul", e.i64("udiv", above, "%tile_rows"), "%num_heads")
        taken(e, "%next_tile", 1, num_tiles, lambda item, _: self._tile(e, item))
        return e.function("define internal void @text(ptr %job, ptr %scratch)")

    def _tile(self, e: Emitter, item: str) -> None:
        """Attention of a tile's queries to all keys of the job; item: a tile and a key head."""
        index, head = e.i64("udiv", item, "%num_heads"), e.i64("urem", item, "%num_heads")
        tile = self._tile_names(e, index, head)
        starts, ends = (e.op(f"icmp ne i64 %{name}, 0") for name in ("is_first", "is_last"))
        self._begin(e, tile)
        self._exchange(e, "resume", tile, e.op(f"select i1 {starts}, i64 0, i64 {tile.num_queries}"), is_back=True)
        words = e.address("%tiles", e.i64("mul", index, _TILE_WORDS), "i64")
        first_slot, end_slot = (
            e.op(f"load i64, ptr {e.address(words, str(i), 'i64')}, align 8") for i in range(_TILE_WORDS)
        )

        def block(start: str) -> None:
            self._unpack_keys(e, tile, lambda key: e.i64("add", start, key), e.i64("sub", end_slot, start))
            self._attend(e, tile, "0", tile.num_queries, start)

        counted(e, "block", first_slot, end_slot, BLOCK, block)
        num_rows = e.op(f"select i1 {ends}, i64 {tile.num_rows}, i64 0")
        counted(e, "row", "0", num_rows, 1, lambda row: self._single_slots(e, tile, row))
        self._end(e, tile, e.op(f"select i1 {ends}, i64 {tile.num_queries}, i64 0"))
        self._exchange(e, "suspend", tile, e.op(f"select i1 {ends}, i64 0, i64 {tile.num_queries}"), is_back=False)

    def _tile_names(self, e: Emitter, index: str, head: str) -> _Tile:
        first_row = e.i64("mul", index, "%tile_rows")
        num_rows = e.i64("sub", e.least(e.i64("add", first_row, "%tile_rows"), "%num_rows"), first_row)
        queries_before = e.i64("mul", e.i64("add", e.i64("mul", head, "%all_rows"), first_row), "%group")
        numbers = e.i64("mul", queries_before, self.head_dim)
        return _Tile(
            e.address("%queries", numbers, "float"),
            e.address("%results", numbers, "float"),
            e.address("%states", e.i64("mul", queries_before, 2), "float"),
            e.address("%keys", e.i64("mul", head, "%key_head"), self.item),
            e.address("%values", e.i64("mul", head, "%value_head"), self.item),
            e.address("%rows", e.i64("mul", first_row, _ROW_WORDS), "i64"),
            num_rows,
            e.i64("mul", num_rows, "%group"),
        )

    def _attend(self, e: Emitter, tile: _Tile, first: str, last: str, start: str) -> None:
        """Attention of queries first .. last to the keys that were unpacked, whose block begins at `start`."""
        e.do(f"call void @all_queries(ptr %scratch, ptr {tile.queries}, i64 {first}, i64 {last}, i64 {start})")

    def _single_slots(self, e: Emitter, tile: _Tile, row: str) -> None:
        """Attention of one row's queries to its single slots, block by block."""
        words = e.address(tile.rows, e.i64("mul", row, _ROW_WORDS), "i64")
        offset, count, unseen = (e.op(f"load i64, ptr {e.address(words, str(i), 'i64')}, align 8") for i in (2, 3, 4))
        slots, first = e.address("%slots", offset, "i64"), e.i64("mul", row, "%group")
        last = e.i64("add", first, "%group")
        counted(e, "single_sees", first, last, 1, lambda query: self._note_sight(e, query, unseen, count))

        def block(start: str) -> None:
            def slot(key: str) -> str:
                return e.op(f"load i64, ptr {e.address(slots, e.i64('add', start, key), 'i64')}, align 8")

            self._unpack_keys(e, tile, slot, e.i64("sub", count, start))
            self._attend(e, tile, first, last, start)

        counted(e, "single", "0", count, BLOCK, block)

    def _kept(self, e: Emitter) -> tuple[str, str, str]:
        """Where the scratch has the queries' largest scores, sums and totals."""
        places = self.places
        return self._in_scratch(e, places.most), self._in_scratch(e, places.sums), self._in_scratch(e, places.totals)

    def _begin(self, e: Emitter, tile: _Tile) -> None:
        """Nothing was seen by any query of the tile."""
        most, sums, totals = self._kept(e)

        def begin(query: str) -> None:
            words = e.address(tile.rows, e.i64("mul", e.i64("udiv", query, "%group"), _ROW_WORDS), "i64")
            begins, ends = (e.op(f"load i64, ptr {e.address(words, str(i), 'i64')}, align 8") for i in (0, 1))
            self._note_sight(e, query, begins, ends)
            e.do(f"store float {constant(LEAST)}, ptr {e.address(most, query, 'float')}, align 4")
            e.do(f"store float 0.0, ptr {e.address(sums, query, 'float')}, align 4")
            row = e.address(totals, e.op(f"mul i64 {query}, {self.padded}"), "float")
            for column in range(0, self.padded, self.lanes):
                self._store(e, "zeroinitializer", e.address(row, str(column), "float"))

        counted(e, "begin_query", "0", tile.num_queries, 1, begin)

    def _note_sight(self, e: Emitter, query: str, begin: str, end: str) -> None:
        for places, position in ((self.places.begins, begin), (self.places.ends, end)):
            e.do(f"store i64 {position}, ptr {e.address(self._in_scratch(e, places), query, 'i64')}, align 8")

    def _unpack_keys(self, e: Emitter, tile: _Tile, slot_of: Callable[[str], str], count: str) -> None:
        """Unpack the first `count` keys of a block, and zeros behind them. slot_of: emits the slot of a key."""
        most, zeros = e.least(count, str(BLOCK)), self._in_scratch(e, self.places.zeros)
        each = [
            (self._in_scratch(e, self.places.key_places), tile.keys, "%key_slot"),
            (self._in_scratch(e, self.places.value_places), tile.values, "%value_slot"),
        ]

        def note(key: str) -> None:
            slot = slot_of(key)
            for places, start, stride in each:
                place = e.address(start, e.op(f"mul i64 {slot}, {stride}"), self.item)
                e.do(f"store ptr {place}, ptr {e.address(places, key, 'ptr')}, align 8")

        def fill(key: str) -> None:
            for places, _, _ in each:
                e.do(f"store ptr {zeros}, ptr {e.address(places, key, 'ptr')}, align 8")

        name = most.removeprefix("%")
        counted(e, f"place_{name}", "0", most, 1, note)
        counted(e, f"none_{name}", most, str(BLOCK), 1, fill)
        e.do("call void @unpack(ptr %scratch)")

    def _exchange(self, e: Emitter, name: str, tile: _Tile, num_queries: str, *, is_back: bool) -> None:
        """Copy what was computed so far from the scratch to the results and states; is_back: from there."""
        most, sums, totals = self._kept(e)

        def copy(inside: str, outside: str) -> None:
            source, goal = (outside, inside) if is_back else (inside, outside)
            e.do(f"store float {e.op(f'load float, ptr {source}, align 4')}, ptr {goal}, align 4")

        def query(index: str) -> None:
            total = e.address(totals, e.op(f"mul i64 {index}, {self.padded}"), "float")
            result = e.address(tile.results, e.op(f"mul i64 {index}, {self.head_dim}"), "float")
            state = e.address(tile.states, e.op(f"mul i64 {index}, 2"), "float")
            for i, places in enumerate((most, sums)):
                copy(e.address(places, index, "float"), e.address(state, str(i), "float"))

            def number(column: str) -> None:
                copy(e.address(total, column, "float"), e.address(result, column, "float"))

            counted(e, f"{name}_column", "0", str(self.head_dim), 1, number)

        counted(e, name, "0", num_queries, 1, query)

    def _end(self, e: Emitter, tile: _Tile, num_queries: str) -> None:
        """The results: totals, divided by the softmax's sums."""
        _, sums, totals = self._kept(e)

        def end(query: str) -> None:
            total = e.address(totals, e.op(f"mul i64 {query}, {self.padded}"), "float")
            result = e.address(tile.results, e.op(f"mul i64 {query}, {self.head_dim}"), "float")
            divisor = e.op(f"load float, ptr {e.address(sums, query, 'float')}, align 4")

            def divide(column: str) -> None:
                number = e.op(f"load float, ptr {e.address(total, column, 'float')}, align 4")
                place = e.address(result, column, "float")
                e.do(f"store float {e.op(f'fdiv float {number}, {divisor}')}, ptr {place}, align 4")

            counted(e, "divide", "0", str(self.head_dim), 1, divide)

        counted(e, "end_query", "0", num_queries, 1, end)

    # ---------------------------------------------------------------------------------------- pieces

    def _in_scratch(self, e: Emitter, place: int) -> str:
        return e.address("%scratch", str(place))

    def _vector(self, e: Emitter, place: str) -> str:
        return e.op(f"load {self.vector}, ptr {place}, align 4")

    def _store(self, e: Emitter, vector: str, place: str) -> None:
        e.do(f"store {self.vector} {vector}, ptr {place}, align 4")


_MINUS_INF = "0xFFF0000000000000"
