"""The product of rows with a matrix in tiles (AMX): 16 rows of each, and 32 columns, of bf16 in one instruction.

A thread takes some rows of the matrix at a time. Weights that are bf16 are read where they lie; others are unpacked to
a panel: for few rows of x block by block, which a core's first cache holds, while the sums stay in tiles; for more,
whole rows, which its second cache holds. Rows of x are laid out once for all threads: 16 of them side by side, pair of
columns by pair.

A row's result has the same bits however many rows are multiplied. A tile adds the products of 32 columns to a sum, and
then those of the next 32: of them, products of even columns are added one after another, products of odd columns, too,
and the sum of both is added to the sum so far (fp32; numbers below the smallest normal one count as 0). Source: Intel,
Instruction Set Extensions Programming Reference, TDPBF16PS. Fused multiplications and additions on any CPU, in this
order, give the same bits (`tests/backends/x86/test_tile_product.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from .compiler import Emitter, compile_ir, run_on_threads
from .encodings import Encoding, Float16, splat, transposed
from .loops import counted, taken
from .row_product import PARTS, ProductJob, RowProduct, multiply_text, round_text, unpack_text, worker_text

SIDE, COLUMNS = 16, 32  # rows of a tile, and bf16 numbers of a row
STRIP = 2 * SIDE  # rows of the matrix whose sums with two tiles of x are in registers together
MOST_STRIPS = 2  # that a thread takes at a time, for more rows of x than a tile has
CHUNK_BYTES = 2**20  # of weights in bf16, which leave room in a second cache: fewer strips if they are more
BLOCK_COLUMNS = 512  # of a panel
PANEL_NUMBERS = BLOCK_COLUMNS + 32  # of a row there, so that rows do not share a set of the first cache
_CONFIG_BYTES, _ROW_BYTES = 64, 64
_PANEL_ROW_BYTES = 2 * PANEL_NUMBERS
_SUMS, _WEIGHTS, _X = (0, 1, 2, 3), (4, 5), (6, 7)  # tiles: sums, for each of x's by turns; of the matrix; of x

_TILES = (
    "ptr %weights, i64 %stride, i64 %next_block, i1 %unpacks, ptr %x_tiles, i64 %count, ptr noalias %sums, "
    f"ptr noalias %panel, {PARTS}, i64 %first, i64 %last, i64 %columns, i64 %outputs"
)


class TileProduct(RowProduct):
    """bf16 rows x [R, K] times matrices [N, K] of one encoding, whose weights are rounded to bf16."""

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(encoding, in_pairs=True)

    def _panel_bytes(self, num_rows: int, num_columns: int) -> int:
        """Of a panel of the most rows that a thread takes; weights that need none have one for the last rows."""
        return MOST_STRIPS * STRIP * _PANEL_ROW_BYTES * -(-num_columns // BLOCK_COLUMNS)

    def _chunk(self, parts: Sequence[Tensor], num_outputs: int, num_rows: int, num_columns: int) -> tuple[int, bool]:
        fitting = CHUNK_BYTES // (STRIP * 2 * num_columns)
        num_strips = min(MOST_STRIPS, max(1, fitting)) if num_rows > SIDE else 1
        return STRIP * num_strips, not (isinstance(self.encoding, Float16) and self.encoding.has_bf16)

    def _placed(self, x: Tensor, jobs: Sequence[ProductJob]) -> tuple[Tensor, list[int]]:
        rows, starts = super()._placed(x, jobs)
        if all(job.num_rows == 1 for job in jobs):
            return rows, starts  # as they would be laid
        places, at, row_bytes = dict[tuple[int, int], int](), 0, 2 * x.shape[1]
        groups = dict.fromkeys((job.first_row, job.num_rows) for job in jobs)
        laid = torch.empty(sum(count for _, count in groups), x.shape[1], dtype=rows.dtype)
        words = [0, 0, x.shape[1]]
        for first, count in groups:
            places[first, count] = start = laid.data_ptr() + at * row_bytes
            for tile in range(0, count, SIDE):
                source = rows.data_ptr() + (first + tile) * row_bytes
                words += (source, min(SIDE, count - tile), start + tile * row_bytes)
            at += count
        words[1] = len(words[len(_LAY) :]) // len(_TILE_OF_X)
        run_on_threads(_lay(), words, min(torch.get_num_threads(), words[1]))
        return laid, [places[job.first_row, job.num_rows] for job in jobs]

    @property
    def source(self) -> str:
        return "".join(
            (
                self.encoding.functions,
                unpack_text(self.encoding, self._factors, PANEL_NUMBERS),
                _configure_text(),
                _keep_text(),
                _tiles_text(),
                round_text(self.encoding.lanes),
                worker_text(multiply_text(self._multiply)),
            )
        )

    def _multiply(self, e: Emitter, first: str, last: str) -> None:
        """With all rows of x: weights where they lie, or from a panel, which few rows fill strip by strip."""
        row_bytes, block_bytes = e.i64("mul", "%columns", 2), e.i64("mul", "%chunk", _PANEL_ROW_BYTES)
        in_place = e.address("%part0", e.i64("mul", first, row_bytes))
        is_whole = e.op(f"icmp eq i64 {e.i64('urem', e.i64('sub', last, first), STRIP)}, 0")
        is_direct = e.op(f"and i1 {is_whole}, {e.op('icmp eq i64 %uses_panel, 0')}")
        is_alone = e.op(f"icmp sle i64 %rows, {2 * SIDE}")
        e.do(f"br i1 {e.op(f'or i1 {is_direct}, {is_alone}')}, label %ready, label %unpack")
        e.label("unpack")

        def block(column: str) -> None:
            at = e.address("%panel", e.i64("mul", e.i64("udiv", column, BLOCK_COLUMNS), block_bytes))
            width = e.least(e.i64("sub", "%columns", column), str(BLOCK_COLUMNS))
            rows = f"i64 {first}, i64 {last}, i64 {column}, i64 {width}, i64 %columns"
            e.do(f"call void @unpack(ptr {at}, {PARTS}, {rows})")

        counted(e, "column", "0", "%columns", BLOCK_COLUMNS, block)
        e.do("br label %ready")
        e.label("ready")
        weights = e.op(f"select i1 {is_direct}, ptr {in_place}, ptr %panel")
        stride = e.op(f"select i1 {is_direct}, i64 {row_bytes}, i64 {_PANEL_ROW_BYTES}")
        next_panel = e.op(f"select i1 {is_alone}, i64 0, i64 {block_bytes}")
        next_block = e.op(f"select i1 {is_direct}, i64 {2 * BLOCK_COLUMNS}, i64 {next_panel}")
        unpacks = e.op(f"select i1 {is_direct}, i1 0, i1 {is_alone}")

        def tiles(row: str) -> None:
            count = e.least(e.i64("sub", "%rows", row), str(2 * SIDE))
            x = e.address("%x", e.i64("mul", row, row_bytes))
            sums = e.address("%out", e.i64("add", e.i64("mul", row, "%outputs"), first), "float")
            e.do(
                f"call void @tiles(ptr {weights}, i64 {stride}, i64 {next_block}, i1 {unpacks}, ptr {x}, i64 {count}, "
                f"ptr {sums}, ptr %panel, {PARTS}, i64 {first}, i64 {last}, i64 %columns, i64 %outputs)"
            )

        counted(e, "row", "0", "%rows", 2 * SIDE, tiles)
        e.do("call void @llvm.x86.tilerelease()")


@cache
def in_tiles(product: RowProduct) -> TileProduct:
    """The product in tiles, for matrices of the same encoding."""
    return TileProduct(product.encoding)


def _configure_text() -> str:
    """Sizes of tiles for `%count` rows of x, up to two tiles of them."""
    e = Emitter()
    config = e.op(f"alloca [{_CONFIG_BYTES} x i8], align 64")
    e.do(f"store <{_CONFIG_BYTES} x i8> zeroinitializer, ptr {config}, align 64")
    e.do(f"store i8 1, ptr {config}")
    behind = e.op(f"call i64 @llvm.smax.i64(i64 0, i64 {e.op(f'sub i64 %count, {SIDE}')})")
    for turn, count in enumerate(("%count", behind)):
        rows_of_x = e.op(f"call i64 @llvm.smin.i64(i64 {count}, i64 {SIDE})")
        width = e.op(f"trunc i64 {e.op(f'mul i64 {rows_of_x}, 4')} to i16")
        height = e.op(f"select i1 {e.op(f'icmp eq i64 {rows_of_x}, 0')}, i8 0, i8 {SIDE}")
        for tile in (*_SUMS[turn::2], _X[turn]):
            _size(e, config, tile, width, height)
    for tile in _WEIGHTS:
        _size(e, config, tile, str(_ROW_BYTES), str(SIDE))
    e.do(f"call void @llvm.x86.ldtilecfg(ptr {config})")
    e.do("ret void")
    return e.function("define internal void @configure(i64 %count)")


def _size(e: Emitter, config: str, tile: int, width: str, height: str) -> None:
    """A tile's bytes a row, and its rows."""
    e.do(f"store i16 {width}, ptr {e.address(config, str(16 + 2 * tile))}")
    e.do(f"store i8 {height}, ptr {e.address(config, str(48 + tile))}")


def _tiles_text() -> str:
    """Sums of rows first .. last of the matrix with `%count` rows of x, up to two tiles.

    weights: of the first block of columns, rows `%stride` bytes apart; the next block is `%next_block` behind. unpacks:
    to there, block by block, STRIP rows at a time. sums: of the first of these rows; `%outputs` a row of x.
    """
    e = Emitter()
    scratch = e.op(f"alloca [{SIDE * SIDE} x float], align 64")
    e.do("%height = sub i64 %last, %first")
    e.do("call void @configure(i64 %count)")
    e.do(f"%is_two = icmp sgt i64 %count, {SIDE}")
    e.do("br i1 %is_two, label %two, label %one")
    for name, num_tiles in (("two", 2), ("one", 1)):
        e.label(name)
        counted(e, f"{name}_strip", "0", "%height", STRIP, _strip(e, name, num_tiles, scratch))
        e.do("ret void")
    return e.function(f"define internal void @tiles({_TILES})")


def _strip(e: Emitter, name: str, num_tiles: int, scratch: str) -> Callable[[str], None]:
    """Sums of the STRIP rows of the matrix from a place on, with so many tiles of x."""

    def body(place: str) -> None:
        places = [place, e.op(f"add i64 {place}, {SIDE}")]
        start = e.op(f"select i1 %unpacks, i64 0, i64 {e.op(f'mul i64 %stride, {place}')}")
        second = e.op(f"add i64 {start}, {e.op(f'mul i64 %stride, {SIDE}')}")
        weights = [e.address("%weights", each) for each in (start, second)]
        xs = [("%x_tiles", "%count")]
        if num_tiles == 2:
            behind = e.address("%x_tiles", e.op(f"mul i64 %columns, {2 * SIDE}"))
            xs = [("%x_tiles", str(SIDE)), (behind, e.op(f"sub i64 %count, {SIDE}"))]
        used = [(i, j) for i in range(len(places)) for j in range(num_tiles)]
        for i, j in used:
            e.do(f"call void @llvm.x86.tilezero(i8 {_SUMS[2 * i + j]})")

        def block(first_column: str) -> None:
            stop = e.least(e.i64("add", first_column, BLOCK_COLUMNS), "%columns")
            e.do(f"br i1 %unpacks, label %{name}_unpack, label %{name}_unpacked")
            e.label(f"{name}_unpack")  # these rows, a block of columns, to the panel
            first = e.i64("add", "%first", place)
            last, width = e.least(e.i64("add", first, STRIP), "%last"), e.i64("sub", stop, first_column)
            rows = f"i64 {first}, i64 {last}, i64 {first_column}, i64 {width}, i64 %columns"
            e.do(f"call void @unpack(ptr %panel, {PARTS}, {rows})")
            e.do(f"br label %{name}_unpacked")
            e.label(f"{name}_unpacked")
            number = e.op(f"udiv i64 {first_column}, {BLOCK_COLUMNS}")
            offset = e.op(f"mul i64 {number}, %next_block")
            starts = [e.address(each, offset) for each in weights]

            def step(column: str) -> None:
                for j, (x, count) in enumerate(xs):  # 16 pairs of columns, of each row one
                    at = e.op(f"mul i64 {column}, {e.op(f'mul i64 {count}, 2')}")
                    width = e.op(f"mul i64 {count}, 4")
                    e.do(f"call void @llvm.x86.tileloadd64(i8 {_X[j]}, ptr {e.address(x, at)}, i64 {width})")
                at = e.op(f"mul i64 {e.op(f'sub i64 {column}, {first_column}')}, 2")
                for i, each in enumerate(starts):
                    e.do(f"call void @llvm.x86.tileloadd64(i8 {_WEIGHTS[i]}, ptr {e.address(each, at)}, i64 %stride)")
                    for j in range(num_tiles):
                        e.do(f"call void @llvm.x86.tdpbf16ps(i8 {_SUMS[2 * i + j]}, i8 {_WEIGHTS[i]}, i8 {_X[j]})")

            counted(e, f"{name}_column", first_column, stop, COLUMNS, step)

        counted(e, f"{name}_block", "0", "%columns", BLOCK_COLUMNS, block)
        for i, j in used:
            e.do(f"call void @llvm.x86.tilestored64(i8 {_SUMS[2 * i + j]}, ptr {scratch}, i64 {_ROW_BYTES})")
            left = e.op(f"sub i64 %height, {places[i]}")
            out = e.address("%sums", e.op(f"add i64 {e.op(f'mul i64 %outputs, {j * SIDE}')}, {places[i]}"), "float")
            e.do(f"call void @keep(ptr {scratch}, ptr {out}, i64 {xs[j][1]}, i64 {left}, i64 %outputs)")

    return body


def _keep_text() -> str:
    """Sums [16, 16] of outputs and rows, to `%count` rows of the result, of which `%left` outputs are the matrix's."""
    e = Emitter()
    lines = [e.op(f"load <16 x float>, ptr {e.address('%sums', str(i * _ROW_BYTES))}, align 64") for i in range(SIDE)]
    mask = _lanes_below(e, "%left")
    for i, line in enumerate(transposed(e, lines)):
        e.do(f"br i1 {e.op(f'icmp slt i64 {i}, %count')}, label %row{i}, label %done")
        e.label(f"row{i}")
        place = e.address("%out", e.op(f"mul i64 %outputs, {i}"), "float")
        e.do(f"call void @llvm.masked.store.v16f32.p0(<16 x float> {line}, ptr {place}, i32 4, <16 x i1> {mask})")
    e.do("br label %done")
    e.label("done")
    e.do("ret void")
    return e.function("define internal void @keep(ptr %sums, ptr %out, i64 %count, i64 %left, i64 %outputs)")


def _lanes_below(e: Emitter, count: str) -> str:
    """A mask of the first lanes of 16."""
    most = e.op(f"call i64 @llvm.smin.i64(i64 {count}, i64 {SIDE})")
    numbers = ", ".join(f"i32 {i}" for i in range(SIDE))
    bound = splat(e, e.op(f"trunc i64 {most} to i32"), SIDE, "i32")
    return e.op(f"icmp slt <16 x i32> <{numbers}>, {bound}")


# ------------------------------------------------------------------------------------------------ rows of x

# Words: the tiles that threads have taken, which they count up, the number of tiles, and of columns. Then of each tile
# the address of its first row, its number of rows, and where it goes.
_LAY, _TILE_OF_X = ("next_tile", "count", "columns"), ("source", "rows", "laid")


@cache
def _lay() -> Callable[..., None]:
    """The function that lays out tiles of rows: of each 32 columns 16 pairs, of each pair the rows."""
    e = Emitter()
    last = e.op("sub i64 %rows, 1")
    starts = list[str]()
    for i in range(SIDE):  # behind the last row it again, which is not kept
        row = e.op(f"call i64 @llvm.smin.i64(i64 {i}, i64 {last})")
        starts.append(e.address("%source", e.op(f"mul i64 {e.op(f'mul i64 {row}, %columns')}, 2")))
    mask = _lanes_below(e, "%rows")

    def block(column: str) -> None:
        at = e.op(f"mul i64 {column}, 2")
        pairs = [e.op(f"load <16 x float>, ptr {e.address(start, at)}, align 2") for start in starts]
        first = e.op(f"mul i64 {column}, {e.op('mul i64 %rows, 2')}")
        for i, line in enumerate(transposed(e, pairs)):
            place = e.address("%laid", e.op(f"add i64 {first}, {e.op(f'mul i64 %rows, {4 * i}')}"))
            e.do(f"call void @llvm.masked.store.v16f32.p0(<16 x float> {line}, ptr {place}, i32 2, <16 x i1> {mask})")

    counted(e, "column", "0", "%columns", COLUMNS, block)
    e.do("ret void")
    worker = Emitter()
    worker.words("%work", _LAY, counted=("next_tile",))

    def tile(index: str, _: str) -> None:
        place = worker.i64("add", worker.i64("mul", index, len(_TILE_OF_X)), len(_LAY))
        worker.words(worker.address("%work", place, "i64"), _TILE_OF_X, ("source", "laid"))
        worker.do("call void @lay(ptr %source, ptr %laid, i64 %rows, i64 %columns)")

    taken(worker, "%next_tile", 1, "%count", tile)
    lay = e.function("define internal void @lay(ptr %source, ptr %laid, i64 %rows, i64 %columns)")
    return compile_ir(lay + worker.function("define void @worker(ptr %work)"), "worker")
