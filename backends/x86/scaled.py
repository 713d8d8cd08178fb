"""Encodings of matrices with a scale for each rectangle of them: fp8, and 4 bit as compressed-tensors has it."""

from __future__ import annotations

from collections.abc import Sequence

from .compiler import Emitter
from .encodings import Blocks, Encoding, FourBit, Row, Vectors, splat

_NAN = "0x7FF8000000000000"
_CODE_MASK = 0x7F  # all but the sign
_MOVED_MASK = -0x4001  # in 16 bits: all but the lower of two signs
_LEAST_EXPONENT = 0x00400000  # 2^-127, for exponent 0
_UNIT = "2.56e+02"  # what a code that was moved to where fp16 has its parts is to be multiplied with


class Fp8(Encoding):
    """e4m3, row after row, times a scale for each block of `height` rows and `width` columns (0: all columns).

    parts: codes uint8 [N · K], scales fp32 [ceil(N / height), ceil(K / width)].
    """

    size, num_bytes, most_direct = 1, 1, 4

    def __init__(self, lanes: int, height: int, width: int) -> None:
        super().__init__(lanes)
        self.step, self._height, self._width = 4 * lanes, height, width

    def can_read(self, num_columns: int) -> bool:
        return super().can_read(num_columns) and self._width % self.step == 0

    def row(self, e: Emitter, parts: Sequence[str], index: str, num_columns: str) -> Row:
        codes, down = self.start(e, parts[0], index, num_columns), e.op(f"udiv i64 {index}, {self._height}")
        if not self._width:
            return codes, self._scale(e, parts[1], down)
        blocks = e.op(f"udiv i64 {e.op(f'add i64 {num_columns}, {self._width - 1}')}, {self._width}")
        return codes, e.address(parts[1], e.op(f"mul i64 {down}, {blocks}"), "float")

    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        n, scale = self.lanes, row[1]
        if self._width:
            scale = self._scale(e, row[1], e.op(f"udiv i64 {column}, {self._width}"))
        for first in range(0, self.step, n):
            place = e.address(row[0], e.op(f"add i64 {column}, {first}"))
            codes = e.op(f"load <{n} x i8>, ptr {place}, align 1")
            wide = e.op(f"shl <{n} x i16> {e.op(f'sext <{n} x i8> {codes} to <{n} x i16>')}, splat (i16 7)")
            bits = e.op(f"and <{n} x i16> {wide}, splat (i16 {_MOVED_MASK})")
            numbers = e.op(f"fpext <{n} x half> {e.op(f'bitcast <{n} x i16> {bits} to <{n} x half>')} to {self.vector}")
            size = e.op(f"and <{n} x i8> {codes}, splat (i8 {_CODE_MASK})")
            is_nan = e.op(f"icmp eq <{n} x i8> {size}, splat (i8 {_CODE_MASK})")
            numbers = e.op(f"select <{n} x i1> {is_nan}, {self.vector} splat (float {_NAN}), {self.vector} {numbers}")
            yield first, e.op(f"fmul {self.vector} {numbers}, {scale}")

    def _scale(self, e: Emitter, base: str, index: str) -> str:
        scale = e.op(f"load float, ptr {e.address(base, index, 'float')}, align 4")
        return splat(e, e.op(f"fmul float {scale}, {_UNIT}"), self.lanes)


class LowFirst(FourBit):
    """The first of two codes in the lower half of a byte."""

    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        for first, weights in super().vectors(e, parts, row, column):
            yield first ^ self.lanes, weights


class MxFp4(LowFirst):
    """e2m1 with a power of two for each 32 weights, which is kept as its exponent plus 127 (E8M0).

    parts: codes uint8 [N · K / 2], exponents uint8 [N · K / 32]. Exponent 255, which is no number, counts as infinite.
    """

    def __init__(self, lanes: int, values: Sequence[float]) -> None:
        super().__init__(lanes, values, Blocks(32))

    def _scale(self, e: Emitter, parts: Sequence[str], block: str) -> str:
        exponent = e.op(f"zext i8 {e.op(f'load i8, ptr {e.address(parts[1], block)}')} to i32")
        bits = e.op(f"call i32 @llvm.umax.i32(i32 {e.op(f'shl i32 {exponent}, 23')}, i32 {_LEAST_EXPONENT})")
        return e.op(f"bitcast i32 {bits} to float")
