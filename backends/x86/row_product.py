"""The product of rows with a matrix in some encoding, written for as many rows at a time as registers hold.

Each thread has a region of the matrix's rows, and takes chunks of it, which lie one after another, as a CPU fetches
ahead best; then it takes what is left of the others', so that one that is held up by other work does not make the
others wait. For few rows of x (`Encoding.most_direct`) weights are unpacked in registers as they come from memory, at
memory's speed. For more, a chunk's weights are unpacked once, part by part along K, to a panel that a core's cache
holds, and the panel is multiplied with all rows.

A row's result has the same bits however many rows are multiplied: every sum along K is made of partial sums over as
many columns as a panel has, each of them in vectors in the order of columns, then over the halves of the vector.

Several matrices, each with rows of its own, are multiplied in the same call, and regions are whole matrices if there
are as many as threads.

Sums are fp32 of fp32 factors, or with `in_pairs` of bf16 factors, two at a time, by an instruction of AVX512-BF16.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .compiler import Emitter, Kernel, is_recording, run_on_threads
from .encodings import Encoding, Factors, Float16, RowReader, Unpacked, Vectors, bf16_bits, fp16_bits
from .loops import counted, taken
from .processor import num_lanes
from .row_steps import lay_rows

# Without a panel: rows of x at a time, and bytes of weights that a thread takes at a time, which stay in its cache.
FEW_TILE_ROWS, CHUNK_BYTES = 4, 2**17
# With one: its rows and the bytes of each, 192 KiB, and rows of x at a time, 24 KiB, which a first-level cache holds.
PANEL_ROWS, PANEL_ROW_BYTES, PANEL_TILE_ROWS = 48, 4096, 6
MOST_PARTS, CACHE_LINE = 5, 64
MOST_DIRECT_PAIRED = 64  # rows of bf16 in pairs without a panel, if they are no longer than a panel's
FETCH_AHEAD = 8  # rows of the matrix between one that is read and one that is fetched into the caches meanwhile

PARTS = ", ".join(f"ptr %part{i}" for i in range(MOST_PARTS))
_NO_PARTS = (0,) * MOST_PARTS
BLOCK = (
    f"ptr noalias %x, ptr noalias %out, {PARTS}, "
    "i64 %first, i64 %last, i64 %width, i64 %columns, i64 %outputs, i1 %add, i1 %fetch"
)
BLOCK_NAMES = BLOCK.replace("noalias ", "")

# Work is 64-bit words: the address of the panels, the threads that have begun, which they count up, the number of
# threads, of jobs, one for each matrix, and of regions of each, the dtype that results are rounded to (of ROUNDED; 0:
# none), and a panel's bytes. Then those of each job: addresses of x and the sums; N, K, R; rows of a chunk and of a
# region; whether there are panels; addresses of the rounded result and of the matrix's parts. Last, of each region, the
# rows that were taken from it, which threads count up.
_WORK = ("panels", "next_thread", "threads", "jobs", "regions", "kind", "panel_bytes")
_POINTERS = ("x", "out", "rounded", *(f"part{i}" for i in range(MOST_PARTS)))
_JOB = ("x", "out", "outputs", "columns", "rows", "chunk", "region", "uses_panel", *_POINTERS[2:])
ROUNDED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class OutputTile:
    """Rows of x and rows of the matrix whose products are in registers together."""

    rows: int
    outputs: int


class ProductJob(NamedTuple):
    """A matrix [N, K] in its encoding's `parts`, and the rows of x that it multiplies."""

    parts: Sequence[Tensor]
    num_outputs: int
    first_row: int
    num_rows: int


class _Panels(threading.local):
    """Memory for the panels of this thread's products. It stays, as recordings name its address."""

    def __init__(self) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8)]

    def address(self, num_bytes: int) -> int:
        """Of so many bytes, aligned to a cache's line."""
        if num_bytes > len(self._memory[-1]) - CACHE_LINE:
            self._memory.append(torch.empty(max(num_bytes, 2 * len(self._memory[-1])) + CACHE_LINE, dtype=torch.uint8))
        return -(-self._memory[-1].data_ptr() // CACHE_LINE) * CACHE_LINE


_PANELS = _Panels()


class RowProduct(Kernel):
    """x [R, K] times a matrix [N, K] stored in `encoding`."""

    def __init__(self, encoding: Encoding, *, in_pairs: bool = False) -> None:
        """in_pairs: round both factors to bf16, and add their products in pairs (`can_pair`)."""
        super().__init__()
        self.in_bytes: RowProduct | None = None  # the product with rows in 8 bits, where there is one
        self.encoding, self._factors = encoding, Factors.in_pairs() if in_pairs else Factors.fp32(encoding.lanes)

    @cached_property
    def in_pairs(self) -> RowProduct:
        """The product with bf16 factors in pairs, for matrices of the same encoding."""
        return RowProduct(self.encoding, in_pairs=True)

    def _most_direct(self, num_columns: int) -> int:
        """The number of rows up to which weights are unpacked in registers.

        Products in pairs take less time, so unpacking again pays for fewer rows. Pairs of bf16 weights are read as they
        are; but rows of x of more than a panel's columns do not stay in a first-level cache.
        """
        most = self.encoding.most_direct
        if not self._factors.is_paired:
            return most
        if not isinstance(self.encoding, Float16):
            return FEW_TILE_ROWS
        return MOST_DIRECT_PAIRED if num_columns <= _panel_columns(self._factors) else most

    def __call__(
        self, x: Tensor, parts: Sequence[Tensor], num_outputs: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """x [..., K] on the CPU, parts: the matrix's tensors (see the encoding) → [..., N] in `dtype`, or x's.

        The sums are fp32, rounded to that dtype at the end. K must be one that the encoding `can_read`.
        """
        rows = x.reshape(-1, x.shape[-1])
        return self.each(rows, [ProductJob(parts, num_outputs, 0, len(rows))], dtype).view(*x.shape[:-1], num_outputs)

    def each(self, x: Tensor, jobs: Sequence[ProductJob], dtype: torch.dtype | None = None) -> Tensor:
        """Rows of x [R, K] on the CPU times several matrices, as `__call__` for each of them alone.

        Returns the jobs' results [rows, N] one after another in one dimension, in `dtype`, or x's.
        """
        dtype, num_columns, num_threads = dtype or x.dtype, x.shape[1], torch.get_num_threads()
        laid, starts = self._placed(x, jobs)
        out = torch.empty(sum([job.num_rows * job.num_outputs for job in jobs]))
        kind = ROUNDED.get(dtype, 0)
        rounded = torch.empty_like(out, dtype=dtype) if kind else out
        panel_bytes = self._panel_bytes(max([job.num_rows for job in jobs]), num_columns)
        regions = -(-num_threads // len(jobs))
        words = [_PANELS.address(num_threads * panel_bytes), 0, num_threads, len(jobs), regions, kind, panel_bytes]
        at_out, at_rounded = out.data_ptr(), rounded.data_ptr()
        for at_rows, (parts, num_outputs, _, num_rows) in zip(starts, jobs, strict=True):
            chunk, has_panel = self._chunk(parts, num_outputs, num_rows, num_columns)
            region = -(-num_outputs // (regions * chunk)) * chunk
            words += (at_rows, at_out, num_outputs, num_columns, num_rows, chunk, region, has_panel)
            words += (at_rounded, *[part.data_ptr() for part in parts], *_NO_PARTS[len(parts) :])
            at_out += out.itemsize * num_rows * num_outputs
            at_rounded += rounded.itemsize * num_rows * num_outputs
        words += (0,) * (len(jobs) * regions)
        run_on_threads(self.prepare(), words, num_threads)
        del laid  # the kernel has read it
        return rounded.to(dtype)

    def _panel_bytes(self, num_rows: int, num_columns: int) -> int:
        """Of one thread's panel; 0 if no job of so many rows has one."""
        return PANEL_ROWS * PANEL_ROW_BYTES if num_rows > self._most_direct(num_columns) else 0

    def _chunk(self, parts: Sequence[Tensor], num_outputs: int, num_rows: int, num_columns: int) -> tuple[int, bool]:
        """Rows of the matrix that a thread takes at a time, and whether it unpacks them to a panel."""
        has_panel = num_rows > self._most_direct(num_columns)
        return PANEL_ROWS if has_panel else _chunk_rows(num_outputs, parts[0].nbytes), has_panel

    def _placed(self, x: Tensor, jobs: Sequence[ProductJob]) -> tuple[Tensor, list[int]]:
        """Rows x [R, K] as the kernel reads them, and the address of each job's first one."""
        rows = self._laid_out(x)
        row_bytes = rows.nbytes // max(1, len(rows))
        return rows, [rows.data_ptr() + job.first_row * row_bytes for job in jobs]

    def _laid_out(self, x: Tensor) -> Tensor:
        """[R, K] in the factors' dtype, each row in the order in which the encoding has the weights."""
        apart, is_wide = self.encoding.interleave, self._factors.dtype == torch.float32
        is_laid = apart == 1 and x.dtype == self._factors.dtype
        if is_recording() and is_wide and not is_laid and self.encoding.lanes == num_lanes():
            return lay_rows(x, apart)
        if apart > 1:
            x = x.reshape(x.shape[0], -1, self.encoding.lanes, apart).transpose(2, 3)
        return x.to(self._factors.dtype).contiguous()

    # ---------------------------------------------------------------------------------------- the text

    @property
    def source(self) -> str:
        factors, lanes = self._factors, self.encoding.lanes
        few = [OutputTile(rows, _few_outputs(rows, self.encoding)) for rows in range(1, FEW_TILE_ROWS + 1)]
        panel = [OutputTile(rows, 4 if lanes == 16 else 2) for rows in range(1, PANEL_TILE_ROWS + 1)]
        unpacked = Unpacked(lanes, factors, _panel_columns(factors), self.encoding.step, _order(self.encoding, factors))
        return "".join(
            (
                self.encoding.functions,
                _product("few", self.encoding, factors, few),
                _product("panel", unpacked, factors, panel),
                unpack_text(self.encoding, factors, _panel_columns(factors)),
                round_text(lanes),
                worker_text(multiply_text(self._multiply)),
            )
        )

    def _multiply(self, e: Emitter, first: str, last: str) -> None:
        """Without a panel, or part by part along K with one."""
        item, panel_columns = self._factors.item, _panel_columns(self._factors)
        e.do(f"br i1 {e.op('icmp ne i64 %uses_panel, 0')}, label %panels, label %few")
        e.label("few")
        few_rows(e, item, "%columns", FEW_TILE_ROWS, first, last)
        e.do("br label %done")
        e.label("panels")
        chunk_rows = e.i64("sub", last, first)
        nothing = ", ".join(["ptr null"] * (MOST_PARTS - 1))

        def part(column: str) -> None:
            width = e.least(e.i64("sub", "%columns", column), str(panel_columns))
            rows = f"i64 {first}, i64 {last}, i64 {column}, i64 {width}, i64 %columns"
            e.do(f"call void @unpack(ptr %panel, {PARTS}, {rows})")
            adds = e.op(f"icmp sgt i64 {column}, 0")

            def tile(row: str) -> None:
                x = e.address("%x", e.i64("add", e.i64("mul", row, "%columns"), column), item)
                out = e.address("%out", e.i64("add", e.i64("mul", row, "%outputs"), first), "float")
                e.do(
                    f"call void @panel(i64 {e.i64('sub', '%rows', row)}, ptr {x}, ptr {out}, ptr %panel, {nothing}, "
                    f"i64 0, i64 {chunk_rows}, i64 {width}, i64 %columns, i64 %outputs, i1 {adds}, i1 0)"
                )

            counted(e, "row", "0", "%rows", PANEL_TILE_ROWS, tile)

        counted(e, "column", "0", "%columns", panel_columns, part)
        e.do("br label %done")
        e.label("done")


@cache
def _chunk_rows(num_outputs: int, nbytes: int) -> int:
    """Rows of a matrix of `nbytes` bytes that a thread takes at a time without a panel."""
    return max(8, CHUNK_BYTES * num_outputs // max(1, nbytes) // 8 * 8)


def _few_outputs(num_rows: int, encoding: Encoding) -> int:
    """Rows of the matrix at a time without a panel: as many sums as hide the time of an addition, and fit registers.

    Weights of about 16 bits come at memory's speed, which has more of it for fewer streams.
    """
    if num_rows == 1:
        return 8 if encoding.lanes == 16 and not (encoding.has_bf16 or isinstance(encoding, Float16)) else 4
    return 4 if encoding.lanes == 16 else 2


def _order(encoding: Encoding, factors: Factors) -> list[int]:
    """The first weights of a step's vectors, in the order in which an encoding has them."""
    e = Emitter()
    reader = RowReader(e, encoding, [f"%part{i}" for i in range(MOST_PARTS)], 1)
    reader.begin_rows(["%index"], "%columns")
    (vectors,) = reader.step("%column", factors)
    return [first for first, _ in vectors]


def worker_text(multiply: str) -> str:
    """The function `worker`. multiply: the function of that name, which does a job's regions."""
    e = Emitter()
    e.words("%work", _WORK, ("panels",), ("next_thread",))
    thread = e.op("atomicrmw add ptr %next_thread, i64 1 seq_cst")
    panel = e.address("%panels", e.i64("mul", thread, "%panel_bytes"))
    num_regions = e.i64("mul", "%jobs", "%regions")
    begin = e.i64("udiv", e.i64("mul", thread, num_regions), "%threads")
    all_taken = e.address("%work", e.i64("add", e.i64("mul", "%jobs", len(_JOB)), len(_WORK)), "i64")

    def region(turn: str) -> None:
        number = e.i64("urem", e.i64("add", begin, turn), num_regions)
        words_before = e.i64("add", e.i64("mul", e.i64("udiv", number, "%regions"), len(_JOB)), len(_WORK))
        job, taken_of_it = e.address("%work", words_before, "i64"), e.address(all_taken, number, "i64")
        region = e.i64("urem", number, "%regions")
        e.do(f"call void @multiply(ptr {job}, ptr {panel}, i64 %kind, i64 {region}, ptr {taken_of_it})")

    counted(e, "turn", "0", num_regions, 1, region)
    e.do("ret void")
    return multiply + e.function("define void @worker(ptr %work)")


def multiply_text(multiply: Callable[[Emitter, str, str], None]) -> str:
    """The function `multiply`. multiply: emits all products with rows first .. last of the matrix of `%job`."""
    e = Emitter()
    e.words("%job", _JOB, _POINTERS)
    begin = e.i64("mul", "%number", "%region")
    size = e.least("%region", e.i64("sub", "%outputs", begin))

    def chunk(first: str, last: str) -> None:
        first, last = e.i64("add", begin, first), e.i64("add", begin, last)
        multiply(e, first, last)
        e.do(f"call void @round(i64 %kind, ptr %out, ptr %rounded, i64 {first}, i64 {last}, i64 %rows, i64 %outputs)")

    taken(e, "%taken", "%chunk", size, chunk)
    head = "ptr %job, ptr %panel, i64 %kind, i64 %number, ptr %taken"
    return e.function(f"define internal void @multiply({head})")


def few_rows(e: Emitter, item: str, stride: str, tile_rows: int, first: str, last: str) -> None:
    """Products by the function `few`, of `tile_rows` rows of x at a time, which are `stride` items apart."""

    def few(row: str) -> None:
        x = e.address("%x", e.i64("mul", row, stride), item)
        out = e.address("%out", e.i64("mul", row, "%outputs"), "float")
        e.do(
            f"call void @few(i64 {e.i64('sub', '%rows', row)}, ptr {x}, ptr {out}, {PARTS}, i64 {first}, i64 {last}, "
            f"i64 %columns, i64 %columns, i64 %outputs, i1 0, i1 {e.op(f'icmp eq i64 {row}, 0')})"
        )

    counted(e, "few_row", "0", "%rows", tile_rows, few)


def round_text(lanes: int) -> str:
    """Round rows of sums, columns first .. last of `%outputs`, to numbers of 16 bits of the dtype `%kind`."""
    e = Emitter()
    width = e.op("sub i64 %last, %first")
    whole = e.op(f"sub i64 %last, {e.op(f'urem i64 {width}, {lanes}')}")

    def rows_of(kind: str, number: Callable[[Emitter, str, int], str]) -> Callable[[str], None]:
        def row(index: str) -> None:
            start = e.op(f"mul i64 {index}, %outputs")

            def numbers(count: int) -> Callable[[str], None]:
                def some(column: str) -> None:
                    place = e.op(f"add i64 {start}, {column}")
                    sums = e.op(f"load <{count} x float>, ptr {e.address('%out', place, 'float')}, align 4")
                    bits = number(e, sums, count)
                    e.do(f"store <{count} x i16> {bits}, ptr {e.address('%rounded', place, 'i16')}, align 2")

                return some

            counted(e, f"{kind}_vector", "%first", whole, lanes, numbers(lanes))
            counted(e, f"{kind}_single", whole, "%last", 1, numbers(1))

        return row

    e.do("switch i64 %kind, label %end [ i64 1, label %bf16 i64 2, label %fp16 ]")
    for kind, number in (("bf16", bf16_bits), ("fp16", fp16_bits)):
        e.label(kind)
        counted(e, f"{kind}_row", "0", "%rows", 1, rows_of(kind, number))
        e.do("br label %end")
    e.label("end")
    e.do("ret void")
    head = "i64 %kind, ptr noalias %out, ptr noalias %rounded, i64 %first, i64 %last, i64 %rows, i64 %outputs"
    return e.function(f"define internal void @round({head})")


def _panel_columns(factors: Factors) -> int:
    """Columns of a panel, and of a partial sum."""
    return PANEL_ROW_BYTES // factors.dtype.itemsize


def _product(name: str, encoding: Encoding, factors: Factors, tiles: Sequence[OutputTile]) -> str:
    """A function of as many rows of x as the largest tile has, or `%rows` if these are fewer."""
    text = "".join(_block(name, encoding, factors, tile) for tile in dict.fromkeys((*tiles, OutputTile(1, 1))))
    e = Emitter()
    cases = " ".join(f"i64 {tile.rows}, label %rows{tile.rows}" for tile in tiles[:-1])
    e.do(f"switch i64 %rows, label %rows{tiles[-1].rows} [ {cases} ]")
    for tile in tiles:
        e.label(f"rows{tile.rows}")
        done = e.op(f"call i64 @{name}_{tile.rows}_{tile.outputs}({BLOCK_NAMES})")
        for i in range(tile.rows):  # what is left, fewer than a tile has
            x = e.address("%x", e.op(f"mul i64 %columns, {i}"), factors.item)
            out = e.address("%out", e.op(f"mul i64 %outputs, {i}"), "float")
            rest = BLOCK_NAMES.replace("%first", done).replace("%x", x, 1).replace("%out", out, 1)
            e.op(f"call i64 @{name}_1_1({rest})")
        e.do("ret void")
    return text + e.function(f"define internal void @{name}(i64 %rows, {BLOCK})")


def _block(name: str, encoding: Encoding, factors: Factors, tile: OutputTile) -> str:
    """Products of `tile.rows` rows of x with rows first .. last of the matrix, `tile.outputs` at a time while there are
    as many; returns the first that is left. add: to what the result holds. fetch: the rows behind meanwhile.
    """
    e, vector = Emitter(), encoding.vector
    sums = [(i, j) for i in range(tile.rows) for j in range(tile.outputs)]
    e.label("entry")
    reader = RowReader(e, encoding, [f"%part{i}" for i in range(MOST_PARTS)], tile.outputs)
    e.do("br label %outputs_loop")
    e.label("outputs_loop")
    e.do("%output = phi i64 [ %first, %entry ], [ %next_output, %store ]")
    e.do(f"%next_output = add i64 %output, {tile.outputs}")
    e.do(f"br i1 {e.op('icmp sle i64 %next_output, %last')}, label %rows_begin, label %end")
    e.label("rows_begin")
    indices = [e.op(f"add i64 %output, {j}") for j in range(tile.outputs)]
    starts = reader.begin_rows(indices, "%columns")
    xs = [e.address("%x", e.op(f"mul i64 %columns, {i}"), factors.item) for i in range(tile.rows)]
    e.do("br label %partial")
    e.label("partial")
    e.do("%start = phi i64 [ 0, %rows_begin ], [ %next_column, %store ]")
    e.do("%adds = phi i1 [ %add, %rows_begin ], [ 1, %store ]")
    behind = e.op(f"add i64 %start, {_panel_columns(factors)}")
    stop = e.op(f"call i64 @llvm.smin.i64(i64 {behind}, i64 %width)")
    e.do("br label %step")
    e.label("step")
    e.do("%column = phi i64 [ %start, %partial ], [ %next_column, %step_end ]")
    for i, j in sums:
        e.do(f"%sum{i}_{j} = phi {vector} [ zeroinitializer, %partial ], [ %new{i}_{j}, %step_end ]")
    if name == "few" and tile.outputs > 1:
        e.do("br i1 %fetch, label %fetch_ahead, label %compute")
        e.label("fetch_ahead")
        fetch(e, encoding, starts, "%column", max(FETCH_AHEAD, tile.outputs))
        e.do("br label %compute")
        e.label("compute")
    _step(e, factors, reader.step("%column", factors), xs, is_row_by_row=encoding.is_row_by_row)
    e.do("br label %step_end")
    e.label("step_end")
    e.do(f"%next_column = add i64 %column, {encoding.step}")
    e.do(f"br i1 {e.op(f'icmp slt i64 %next_column, {stop}')}, label %step, label %store")
    e.label("store")
    kind = f"<{tile.outputs} x float>"
    for i in range(tile.rows):
        place = e.address("%out", e.op(f"add i64 {e.op(f'mul i64 %outputs, {i}')}, %output"), "float")
        loaded = e.op(f"load {kind}, ptr {place}, align 4")
        before = e.op(f"select i1 %adds, {kind} {loaded}, {kind} splat (float -0.0)")
        total = reduced(e, [f"%new{i}_{j}" for j in range(tile.outputs)], encoding.lanes)
        e.do(f"store {kind} {e.op(f'fadd {kind} {total}, {before}')}, ptr {place}, align 4")
    e.do(f"br i1 {e.op('icmp slt i64 %next_column, %width')}, label %partial, label %outputs_loop")
    e.label("end")
    e.do("ret i64 %output")
    return e.function(f"define internal i64 @{name}_{tile.rows}_{tile.outputs}({BLOCK})")


def reduced(e: Emitter, vectors: Sequence[str], lanes: int) -> str:
    """The sums of as many vectors as a power of two, as one vector.

    Of each vector the upper half is added to the lower half, until one number is left. Two vectors' halves share an
    instruction, which changes no bit.
    """
    part = lanes  # numbers that are left of each vector
    while part > 1:
        halves = [[i for i in range(lanes) if (i % part >= part // 2) == is_upper] for is_upper in (False, True)]
        if len(vectors) > 1:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
            halves = [[*half, *(lanes + i for i in half)] for half in halves]
        else:
            pairs = [(vectors[0], "poison")]
        both = [[e.shuffle(f"<{lanes} x float>", half, *pair) for half in halves] for pair in pairs]
        lanes, part = len(halves[0]), part // 2
        vectors = [e.op(f"fadd <{lanes} x float> {lower}, {upper}") for lower, upper in both]
    return vectors[0]


def fetch(
    e: Emitter, encoding: Encoding, starts: Sequence[str], column: str, num_ahead: int, step: int | None = None
) -> None:
    """Prefetch the step at `column` of the rows `num_ahead` after those that begin at `starts`.

    step: its weights; None: the encoding's.

    A CPU prefetches by itself if one block of memory is read sequentially, but hardly if several are read by turns.
    """
    ahead = e.op(f"mul i64 {_bytes_of(e, encoding, '%columns')}, {num_ahead}")
    behind = e.op(f"add i64 {_bytes_of(e, encoding, column)}, {ahead}")
    for start in starts:
        for line in range(0, (step or encoding.step) * encoding.num_bytes // encoding.size, CACHE_LINE):
            place = e.address(start, e.op(f"add i64 {behind}, {line}"))
            e.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 3, i32 1)")


def _bytes_of(e: Emitter, encoding: Encoding, num_weights: str) -> str:
    """The bytes of `num_weights` weights of a row."""
    return e.op(f"udiv i64 {e.op(f'mul i64 {num_weights}, {encoding.num_bytes}')}, {encoding.size}")


def _step(e: Emitter, factors: Factors, weights: Sequence[Vectors], xs: Sequence[str], *, is_row_by_row: bool) -> None:
    """One step along K: what is added to each sum. weights: of each row of the matrix."""
    new: dict[tuple[int, int], str] = {}
    in_turn: Iterator[tuple[Sequence[int], Sequence[tuple[int, str]]]]  # rows of the matrix, and a vector of each
    if is_row_by_row and len(xs) == 1:
        in_turn = (([j], [vector]) for j, vectors in enumerate(weights) for vector in vectors)
    else:
        in_turn = ((range(len(weights)), vectors) for vectors in zip(*weights, strict=True))
    for outputs, vectors in in_turn:
        place = e.op(f"add i64 %column, {vectors[0][0]}")
        for i, x in enumerate(xs):
            factor = e.op(f"load {factors.vector}, ptr {e.address(x, place, factors.item)}, align 2")
            for j, (_, weight) in zip(outputs, vectors, strict=True):
                new[i, j] = factors.added(e, new.get((i, j), f"%sum{i}_{j}"), weight, factor)
    for (i, j), value in new.items():
        e.do(f"%new{i}_{j} = bitcast {factors.sums} {value} to {factors.sums}")


def unpack_text(encoding: Encoding, factors: Factors, stride: int) -> str:
    """Rows first .. last of the matrix, `%width` columns from `%start` on, to a panel. stride: of its rows."""
    e = Emitter()
    reader = RowReader(e, encoding, [f"%part{i}" for i in range(MOST_PARTS)], 1)

    def row(index: str) -> None:
        starts = reader.begin_rows([index], "%columns")
        panel = e.i64("mul", e.i64("sub", index, "%first"), stride)

        def step(done: str) -> None:
            column = e.i64("add", "%start", done)
            fetch(e, encoding, starts, column, FETCH_AHEAD)
            (vectors,) = reader.step(column, factors)
            for first, weights in vectors:
                place = e.address("%panel", e.i64("add", e.i64("add", panel, done), first), factors.item)
                e.do(f"store {factors.vector} {weights}, ptr {place}, align 2")

        counted(e, "done", "0", "%width", encoding.step, step)

    counted(e, "index", "%first", "%last", 1, row)
    e.do("ret void")
    head = f"ptr noalias %panel, {PARTS}, i64 %first, i64 %last, i64 %start, i64 %width, i64 %columns"
    return e.function(f"define internal void @unpack({head})")
