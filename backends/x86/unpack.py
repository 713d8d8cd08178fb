"""A whole matrix in some encoding → plain rows of fp32, bf16 or fp16.

Threads take chunks of rows until none is left. Each number is rounded once, to the nearest, of two to the even one, as
torch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .compiler import Emitter, Kernel, run_on_threads
from .encodings import ITEMS, Encoding, RowReader, stored
from .loops import counted, taken
from .row_product import MOST_PARTS, PARTS

CHUNK_ELEMENTS = 2**17  # that a thread takes at a time
WORTH_COMPILING = 2**18  # numbers from which on compiling (at least 0.1 s) takes less time than plain torch
# A job is 64-bit words: the address of the result; N, K; rows of a chunk; the next row, which threads count up; the
# addresses of the matrix's parts.
_JOB = ("out", "outputs", "columns", "chunk", "next_row", *(f"part{i}" for i in range(MOST_PARTS)))


class Unpacker(Kernel):
    """Unpacks matrices [N, K] stored in `encoding` to `dtype`."""

    def __init__(self, encoding: Encoding, dtype: torch.dtype) -> None:
        """encoding: one that makes vectors in the order of the weights. dtype: fp32, bf16 or fp16."""
        super().__init__()
        assert encoding.interleave == 1
        self.encoding, self.dtype = encoding, dtype
        self._num_asked = 0

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def is_worthwhile(self, num_elements: int) -> bool:
        """Whether to unpack so many numbers with it: it is compiled, or they are worth it with those before them."""
        self._num_asked += num_elements
        return self.is_compiled or self._num_asked >= WORTH_COMPILING

    def __call__(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """parts: what the matrix consists of (see the encoding), on the CPU; out: contiguous [N, K], in `dtype`.

        K must be one that the encoding `can_read`.
        """
        num_rows, num_columns = out.shape
        chunk = max(1, CHUNK_ELEMENTS // max(1, num_columns))
        words = [out.data_ptr(), num_rows, num_columns, chunk, 0, *(part.data_ptr() for part in parts)]
        words += [0] * (MOST_PARTS - len(parts))
        run_on_threads(self.prepare(), words, min(torch.get_num_threads(), max(1, -(-num_rows // chunk))))

    # ---------------------------------------------------------------------------------------- the text

    @property
    def source(self) -> str:
        return self.encoding.functions + self._rows() + _worker()

    def _rows(self) -> str:
        """Rows first .. last of the matrix."""
        e, item = Emitter(), ITEMS[self.dtype]
        is_exact = self.dtype == torch.bfloat16 and self.encoding.has_bf16
        reader = RowReader(e, self.encoding, [f"%part{i}" for i in range(MOST_PARTS)], 1)

        def row(index: str) -> None:
            reader.begin_rows([index], "%columns")
            start = e.address("%out", e.i64("mul", index, "%columns"), item)

            def step(column: str) -> None:
                (vectors,) = reader.step(column, as_bf16=is_exact)
                for first, weights in vectors:
                    kept = f"<16 x i16> {weights}" if is_exact else stored(e, weights, item, self.encoding.lanes)
                    e.do(f"store {kept}, ptr {e.address(start, e.i64('add', column, first), item)}, align 1")

            counted(e, "column", "0", "%columns", self.encoding.step, step)

        counted(e, "row", "%first", "%last", 1, row)
        e.do("ret void")
        return e.function(f"define internal void @rows(ptr noalias %out, {PARTS}, i64 %first, i64 %last, i64 %columns)")


def _worker() -> str:
    e = Emitter()
    e.words("%job", _JOB, ("out", *_JOB[5:]), ("next_row",))
    call = f"call void @rows(ptr %out, {PARTS}, i64 {{}}, i64 {{}}, i64 %columns)"
    taken(e, "%next_row", "%chunk", "%outputs", lambda first, last: e.do(call.format(first, last)))
    return e.function("define void @worker(ptr %job)")
