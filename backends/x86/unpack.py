"""A whole matrix in some encoding → plain rows of fp32, bf16 or fp16.

Threads take chunks of rows until none is left. Each number is rounded once, to the nearest, of two to the even one, as
torch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .compiler import Emitter, Kernel, run_on_threads
from .encodings import Encoding, RowReader, bf16_bits

CHUNK_ELEMENTS = 2**17  # that a thread takes at a time
WORTH_COMPILING = 2**18  # numbers from which on compiling (at least 0.1 s) takes less time than plain torch
MOST_PARTS = 5

_PARTS = ", ".join(f"ptr %part{i}" for i in range(MOST_PARTS))
_KINDS = {torch.float32: "float", torch.bfloat16: "i16", torch.float16: "half"}
# A job is 64-bit words: the address of the result; N, K; rows of a chunk; the next chunk, which threads count up; the
# addresses of the matrix's parts.
_JOB_WORDS = 5


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
        e, parts = Emitter(), [f"%part{i}" for i in range(MOST_PARTS)]
        e.label("entry")
        reader = RowReader(e, self.encoding, parts, 1)
        e.do("br label %row")
        e.label("row")
        e.do("%index = phi i64 [ %first, %entry ], [ %next_index, %row_end ]")
        reader.begin_rows(["%index"], "%columns")
        start = e.address("%out", e.op("mul i64 %index, %columns"), _KINDS[self.dtype])
        e.do("br label %step")
        e.label("step")
        e.do("%column = phi i64 [ 0, %row ], [ %next_column, %step_end ]")
        is_exact = self.dtype == torch.bfloat16 and self.encoding.has_bf16
        (vectors,) = reader.step("%column", as_bf16=is_exact)
        for first, weights in vectors:
            place = e.op(f"add i64 %column, {first}")
            stored = f"<16 x i16> {weights}" if is_exact else self._rounded(e, weights)
            e.do(f"store {stored}, ptr {e.address(start, place, _KINDS[self.dtype])}, align 1")
        e.do("br label %step_end")
        e.label("step_end")
        e.do(f"%next_column = add i64 %column, {self.encoding.step}")
        e.do(f"br i1 {e.op('icmp slt i64 %next_column, %columns')}, label %step, label %row_end")
        e.label("row_end")
        e.do("%next_index = add i64 %index, 1")
        e.do(f"br i1 {e.op('icmp slt i64 %next_index, %last')}, label %row, label %end")
        e.label("end")
        e.do("ret void")
        return e.function(
            f"define internal void @rows(ptr noalias %out, {_PARTS}, i64 %first, i64 %last, i64 %columns)"
        )

    def _rounded(self, e: Emitter, weights: str) -> str:
        """A vector in the dtype of the result, with its type before it."""
        lanes, vector = self.encoding.lanes, self.encoding.vector
        if self.dtype == torch.float32:
            return f"{vector} {weights}"
        if self.dtype == torch.float16:
            return f"<{lanes} x half> {e.op(f'fptrunc {vector} {weights} to <{lanes} x half>')}"
        return f"<{lanes} x i16> {bf16_bits(e, weights, lanes)}"


def _worker() -> str:
    e = Emitter()
    e.label("entry")
    places = [e.address("%job", str(i), "i64") for i in range(_JOB_WORDS + MOST_PARTS)]
    out = e.op(f"load ptr, ptr {places[0]}")
    outputs, columns, chunk = (e.op(f"load i64, ptr {place}") for place in places[1:4])
    parts = ", ".join(f"ptr {e.op(f'load ptr, ptr {place}')}" for place in places[_JOB_WORDS:])
    e.do("br label %next")
    e.label("next")
    first = e.op(f"atomicrmw add ptr {places[4]}, i64 {chunk} seq_cst")
    e.do(f"br i1 {e.op(f'icmp slt i64 {first}, {outputs}')}, label %some, label %end")
    e.label("some")
    last = e.op(f"call i64 @llvm.smin.i64(i64 {e.op(f'add i64 {first}, {chunk}')}, i64 {outputs})")
    e.do(f"call void @rows(ptr {out}, {parts}, i64 {first}, i64 {last}, i64 {columns})")
    e.do("br label %next")
    e.label("end")
    e.do("ret void")
    return e.function("define void @worker(ptr %job)")
