"""Memory layouts of weights, for kernels: each encoding emits the instructions that decode them to fp32 vectors.

A kernel processes a row of a matrix [N, K] in steps of `step` weights. The vectors of a step may hold its weights in
another order; `interleave` describes it, and the other factor is stored in the same order.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .compiler import Emitter

# Names of the values that an encoding has computed for a row; the first is the address of its weights, the last that of
# the row's scratch, if the encoding has one.
Row = tuple[str, ...]
Vectors = Iterator[tuple[int, str]]  # first weight, counted from the step's, and the vector from there on


class Encoding(ABC):
    """A memory layout of weights, for vectors of `lanes` numbers.

    size, num_bytes: `size` weights take `num_bytes` bytes of the first part; size is a power of two.
    scratch: fp32 numbers that `begin_block` keeps for the steps of a block of `size` weights.
    step: weights per step. interleave: of each interleave · lanes weights, a vector holds every interleave-th, so
    vector 0 begins with weights 0 and `interleave`. most_direct: the number of rows of the other factor up to which
    repeated unpacking takes less time than a panel. is_decoded_first: whether all vectors of a step take fewer
    registers than their encoded form. is_row_by_row: whether each row of the matrix has so many values of its own in a
    step that one row after another needs fewer registers than all in turn, if the other factor has one row.
    functions: that its instructions call, if they are not LLVM's. has_bf16: whether it also makes bf16 vectors
    (`bf16_vectors`).
    """

    size: int
    num_bytes: int
    step: int
    scratch = 0
    interleave = 1
    most_direct = 8
    is_decoded_first = False
    is_row_by_row = False
    functions = ""
    has_bf16 = False

    def __init__(self, lanes: int) -> None:
        self.lanes, self.vector = lanes, f"<{lanes} x float>"

    def can_read(self, num_columns: int) -> bool:
        """Whether a row of `num_columns` weights is a whole number of steps."""
        return num_columns % self.step == 0

    @abstractmethod
    def row(self, e: Emitter, parts: Sequence[str], index: str, num_columns: str) -> Row:
        """Values that all steps of row `index` share. parts: addresses of the matrix's tensors."""

    def begin_block(self, e: Emitter, row: Row, column: str) -> None:  # noqa: B027 (without a scratch, nothing to do)
        """Put what steps share into the row's scratch. column: the first of a block of `size` weights."""

    @abstractmethod
    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        """step / lanes fp32 vectors of the weights from `column` on, in any order.

        Instructions for a vector are emitted when it is requested, so that few registers are in use at a time.
        """

    def bf16_vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        """The same weights as bf16 bits, <16 x i16> each, for encodings whose weights bf16 represents exactly."""
        raise NotImplementedError

    def pair_vectors(self, e: Emitter, factors: Factors, parts: Sequence[str], row: Row, column: str) -> Vectors:
        """The same weights rounded to bf16, as vectors of `factors` in pairs."""
        if self.has_bf16:
            return factors.joined(e, self.bf16_vectors(e, parts, row, column), are_bf16=True)
        return factors.joined(e, self.vectors(e, parts, row, column), are_bf16=False)

    def start(self, e: Emitter, base: str, index: str, row_bytes: str) -> str:
        """The address of row `index`, for a row's bytes."""
        return e.address(base, e.op(f"mul i64 {index}, {row_bytes}"))


@dataclass(frozen=True)
class Factors:
    """The numbers that a product multiplies, as vectors, and the instruction that adds products to fp32 sums.

    item, vector: LLVM's types of a number and of a vector; sums: of a vector of sums.
    """

    dtype: torch.dtype
    item: str
    vector: str
    sums: str

    @classmethod
    def fp32(cls, lanes: int) -> Factors:
        vector = f"<{lanes} x float>"
        return cls(torch.float32, "float", vector, vector)

    @classmethod
    def in_pairs(cls) -> Factors:
        """bf16 numbers, of which two products at a time are added to each of 16 sums (AVX512-BF16)."""
        return cls(torch.bfloat16, "bfloat", "<32 x bfloat>", "<16 x float>")

    @property
    def is_paired(self) -> bool:
        return self.dtype == torch.bfloat16

    def added(self, e: Emitter, total: str, one: str, other: str) -> str:
        """total + one · other."""
        if self.is_paired:
            operands = f"{self.sums} {total}, {self.vector} {one}, {self.vector} {other}"
            return e.op(f"call {self.sums} @llvm.x86.avx512bf16.dpbf16ps.512({operands})")
        return e.fma(self.vector, one, other, total)

    def joined(self, e: Emitter, vectors: Vectors, *, are_bf16: bool) -> Vectors:
        """Vectors of 16 numbers, fp32 or the bits of bf16 (<16 x i16>), as vectors of 32 bf16 numbers.

        The weights of each pair of vectors are 32 in a row, whichever vector comes first.
        """
        waiting: dict[int, str] = {}
        for first, vector in vectors:
            start = first // 32 * 32
            if start not in waiting:
                waiting[start] = vector
                continue
            lower, upper = (waiting.pop(start), vector) if first > start else (vector, waiting.pop(start))
            if are_bf16:
                words = e.shuffle("<16 x i16>", range(32), lower, upper)
                yield start, e.op(f"bitcast <32 x i16> {words} to {self.vector}")
            else:
                yield start, self.rounded(e, lower, upper)

    def rounded(self, e: Emitter, lower: str, upper: str) -> str:
        """Two vectors of 16 fp32 numbers as one of 32 bf16 numbers."""
        operands = f"{self.sums} {upper}, {self.sums} {lower}"
        return e.op(f"call {self.vector} @llvm.x86.avx512bf16.cvtne2ps2bf16.512({operands})")


class Float16(Encoding):
    """bf16 or fp16, row after row."""

    size, num_bytes, most_direct = 1, 2, 16

    def __init__(self, lanes: int, dtype: str) -> None:
        """dtype: bf16 or fp16."""
        super().__init__(lanes)
        self.step, self.has_bf16 = 4 * lanes, dtype == "bf16"

    def row(self, e: Emitter, parts: Sequence[str], index: str, num_columns: str) -> Row:
        return (self.start(e, parts[0], index, e.op(f"mul i64 {num_columns}, 2")),)

    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        n = self.lanes
        for first in range(0, self.step, n):
            place = e.address(row[0], e.op(f"add i64 {column}, {first}"), "i16")
            item = "i16" if self.has_bf16 else "half"
            yield first, of_items(e, e.op(f"load <{n} x {item}>, ptr {place}, align 1"), item, n)

    def bf16_vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        for first in range(0, self.step, 16):
            place = e.address(row[0], e.op(f"add i64 {column}, {first}"), "i16")
            yield first, e.op(f"load <16 x i16>, ptr {place}, align 1")


class Float32(Encoding):
    """fp32, row after row."""

    size, num_bytes, most_direct = 1, 4, 16

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self.step = 4 * lanes

    def row(self, e: Emitter, parts: Sequence[str], index: str, num_columns: str) -> Row:
        return (self.start(e, parts[0], index, e.op(f"mul i64 {num_columns}, 4")),)

    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        for first in range(0, self.step, self.lanes):
            place = e.address(row[0], e.op(f"add i64 {column}, {first}"), "float")
            yield first, e.op(f"load {self.vector}, ptr {place}, align 4")


class Int8(Encoding):
    """Integers of 8 bit, row after row, times `unit` and a scale for each row (parts: codes, fp32 scales [N])."""

    size, num_bytes, most_direct = 1, 1, 4

    def __init__(self, lanes: int, unit: float) -> None:
        super().__init__(lanes)
        self.step, self._unit = 4 * lanes, unit

    def row(self, e: Emitter, parts: Sequence[str], index: str, num_columns: str) -> Row:
        scale = e.op(f"load float, ptr {e.address(parts[1], index, 'float')}, align 4")
        scale = e.op(f"fmul float {scale}, {constant(self._unit)}")
        return self.start(e, parts[0], index, num_columns), splat(e, scale, self.lanes)

    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        n = self.lanes
        for first in range(0, self.step, n):
            place = e.address(row[0], e.op(f"add i64 {column}, {first}"))
            codes = e.op(f"load <{n} x i8>, ptr {place}, align 1")
            numbers = e.op(f"sitofp <{n} x i8> {codes} to {self.vector}")
            yield first, e.op(f"fmul {self.vector} {numbers}, {row[1]}")


@dataclass(frozen=True)
class Blocks:
    """Scales of a `FourBit` matrix. size: weights a scale. outer_size: scales that share an outer one, where they are
    codes of 8 bit themselves; 0 where they are fp32.
    """

    size: int
    outer_size: int = 0


class FourBit(Encoding):
    """Two codes a byte, high one first, each standing for one of 16 values, times a scale for each block.

    parts: codes uint8 [N · K / 2]; scales fp32 [blocks], or codes of them uint8 [blocks], the values of these codes
    fp32 [256], the outer scales fp32, and what is added to each scale, fp32 [1].
    """

    size, num_bytes, interleave = 2, 1, 2

    def __init__(self, lanes: int, values: Sequence[float], blocks: Blocks) -> None:
        super().__init__(lanes)
        self.step = max(2 * lanes, min(4 * lanes, blocks.size))
        self._values, self._blocks = values, blocks
        self.is_decoded_first = lanes == 8

    def can_read(self, num_columns: int) -> bool:
        return num_columns % self._blocks.size == 0 and self._blocks.size % self.step == 0

    def row(self, e: Emitter, parts: Sequence[str], index: str, num_columns: str) -> Row:
        first = e.op(f"mul i64 {index}, {num_columns}")
        return e.address(parts[0], e.op(f"lshr i64 {first}, 1")), e.op(f"udiv i64 {first}, {self._blocks.size}")

    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        n = self.lanes
        block = e.op(f"add i64 {row[1]}, {e.op(f'udiv i64 {column}, {self._blocks.size}')}")
        scale = splat(e, self._scale(e, parts, block), n)
        place = e.address(row[0], e.op(f"lshr i64 {column}, 1"))
        for first in range(0, self.step // 2, n):
            codes = e.op(f"load <{n} x i8>, ptr {e.address(place, str(first))}, align 1")
            low = e.op(f"zext <{n} x i8> {codes} to <{n} x i32>")  # what is above its four bits is not looked at
            high = e.op(f"lshr <{n} x i32> {low}, splat (i32 4)")
            for place_in_pair, code in enumerate((high, low)):
                value = look_up(e, n, self._values, code)
                yield 2 * first + place_in_pair * n, e.op(f"fmul {self.vector} {value}, {scale}")

    def _scale(self, e: Emitter, parts: Sequence[str], block: str) -> str:
        if not self._blocks.outer_size:
            return e.op(f"load float, ptr {e.address(parts[1], block, 'float')}, align 4")
        code = e.op(f"zext i8 {e.op(f'load i8, ptr {e.address(parts[1], block)}')} to i64")
        value = e.op(f"load float, ptr {e.address(parts[2], code, 'float')}, align 4")
        outer = e.op(f"udiv i64 {block}, {self._blocks.outer_size}")
        outer = e.op(f"load float, ptr {e.address(parts[3], outer, 'float')}, align 4")
        offset = e.op(f"load float, ptr {parts[4]}, align 4")
        return e.op(f"fadd float {e.op(f'fmul float {value}, {outer}')}, {offset}")


class Unpacked(Encoding):
    """Factors, `stride` a row: what other encodings are unpacked to where there are many rows."""

    size = 1

    def __init__(self, lanes: int, factors: Factors, stride: int, step: int, order: Sequence[int]) -> None:
        """step, order: of the encoding that was unpacked, and the first weights of its vectors as they come."""
        super().__init__(lanes)
        self.num_bytes, self.step = factors.dtype.itemsize, step
        self._factors, self._stride, self._order = factors, stride, order

    def row(self, e: Emitter, parts: Sequence[str], index: str, num_columns: str) -> Row:
        return (self.start(e, parts[0], index, str(self.num_bytes * self._stride)),)

    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        for first in self._order:
            place = e.address(row[0], e.op(f"add i64 {column}, {first}"), self._factors.item)
            yield first, e.op(f"load {self._factors.vector}, ptr {place}, align 2")

    def pair_vectors(self, e: Emitter, factors: Factors, parts: Sequence[str], row: Row, column: str) -> Vectors:
        return self.vectors(e, parts, row, column)


class RowReader:
    """The steps of one kernel along rows of the matrix, each row with a scratch if the encoding needs one."""

    def __init__(self, e: Emitter, encoding: Encoding, parts: Sequence[str], count: int) -> None:
        """In the first block of a function; count: rows at a time."""
        self.encoding, self._e, self._parts = encoding, e, parts
        self._scratch = [e.op(f"alloca [{encoding.scratch} x float], align 64") for _ in range(count)]
        self._rows: list[Row] = []

    def begin_rows(self, indices: Sequence[str], num_columns: str) -> list[str]:
        """These rows from here on; returns the addresses where their weights begin."""
        encoded_rows = [self.encoding.row(self._e, self._parts, index, num_columns) for index in indices]
        self._rows = [(*row, scratch) for row, scratch in zip(encoded_rows, self._scratch, strict=True)]
        return [row[0] for row in encoded_rows]

    def step(self, column: str, factors: Factors | None = None, *, as_bf16: bool = False) -> list[Vectors]:
        """The vectors of each row's step, after what comes before the first step of a block.

        factors: what a product needs; without them the encoding's vectors, or its `bf16_vectors`.
        """
        e, encoding = self._e, self.encoding
        if encoding.scratch:
            inside = e.op(f"and i64 {column}, {encoding.size - 1}")
            e.do(f"br i1 {e.op(f'icmp eq i64 {inside}, 0')}, label %new_block, label %in_block")
            e.label("new_block")
            for row in self._rows:
                encoding.begin_block(e, row, column)
            e.do("br label %in_block")
            e.label("in_block")
        if factors is not None and factors.is_paired:
            each = [encoding.pair_vectors(e, factors, self._parts, row, column) for row in self._rows]
        else:
            vectors = encoding.bf16_vectors if as_bf16 else encoding.vectors
            each = [vectors(e, self._parts, row, column) for row in self._rows]
        return [iter(list(vectors)) for vectors in each] if encoding.is_decoded_first and factors else each


def splat(e: Emitter, number: str, lanes: int, kind: str = "float") -> str:
    """A vector of one number, fp32 or of another kind."""
    one = e.op(f"insertelement <{lanes} x {kind}> poison, {kind} {number}, i64 0")
    return e.op(f"shufflevector <{lanes} x {kind}> {one}, <{lanes} x {kind}> poison, <{lanes} x i32> zeroinitializer")


def transposed(e: Emitter, rows: Sequence[str]) -> list[str]:
    """A square of vectors of a power of two numbers: those at place i of all of them become vector i."""
    square, n, distance = list(rows), len(rows), 1
    kind = f"<{n} x float>"
    while distance < n:
        lower = [i if not i & distance else n + (i ^ distance) for i in range(n)]
        upper = [i ^ distance if not i & distance else n + i for i in range(n)]
        for i in range(n):
            if not i & distance:
                pair = square[i], square[i | distance]
                square[i], square[i | distance] = (e.shuffle(kind, places, *pair) for places in (lower, upper))
        distance *= 2
    return square


def look_up(e: Emitter, lanes: int, values: Sequence[float], codes: str) -> str:
    """Look up codes i32 [lanes] in a table of 16 values, by their lowest four bits → [lanes]."""
    if lanes == 16:
        return look_up_in(e, table_of(values), codes)
    call = "call <8 x float> @llvm.x86.avx2.permps(<8 x float> {}, <8 x i32> {})"
    lower, upper = (e.op(call.format(table_of(half), codes)) for half in (values[:8], values[8:]))
    bit = e.op(f"shl <8 x i32> {codes}, splat (i32 28)")  # the fourth, where a sign is
    is_upper = e.op(f"icmp slt <8 x i32> {bit}, zeroinitializer")
    return e.op(f"select <8 x i1> {is_upper}, <8 x float> {upper}, <8 x float> {lower}")


def look_up_in(e: Emitter, table: str, codes: str) -> str:
    """Look up codes i32 [16] in a vector of 16 values, by their lowest four bits → [16]."""
    return e.op(f"call <16 x float> @llvm.x86.avx512.permvar.sf.512(<16 x float> {table}, <16 x i32> {codes})")


def table_of(values: Sequence[float]) -> str:
    """A constant vector."""
    return "<" + ", ".join(f"float {constant(value)}" for value in values) + ">"


def constant(value: float) -> str:
    """An fp32 constant: LLVM writes the bits of the double that equals it."""
    (single,) = struct.unpack("<f", struct.pack("<f", value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}"


ITEMS = {torch.bfloat16: "i16", torch.float16: "half", torch.float32: "float"}  # what is loaded of a dtype's numbers


def of_items(e: Emitter, numbers: str, item: str, count: int) -> str:
    """Numbers as one of ITEMS, in fp32."""
    if item == "i16":
        return of_bf16_bits(e, numbers, count)
    return numbers if item == "float" else e.op(f"fpext <{count} x half> {numbers} to <{count} x float>")


def stored(e: Emitter, numbers: str, item: str, count: int) -> str:
    """Numbers fp32 rounded to those of one of ITEMS, with the type that is stored before them."""
    if item == "float":
        return f"<{count} x float> {numbers}"
    return f"<{count} x i16> {(bf16_bits if item == 'i16' else fp16_bits)(e, numbers, count)}"


def of_bf16_bits(e: Emitter, bits: str, count: int) -> str:
    """The fp32 numbers <count x float> whose upper halves are <count x i16>: what these are as bf16."""
    wide = e.op(f"zext <{count} x i16> {bits} to <{count} x i32>")
    return e.op(f"bitcast <{count} x i32> {e.op(f'shl <{count} x i32> {wide}, splat (i32 16)')} to <{count} x float>")


def bf16_bits(e: Emitter, numbers: str, count: int) -> str:
    """The bits of `count` fp32 numbers rounded to bf16, ties to even, as <count x i16>.

    Not every CPU has an instruction for it, and LLVM calls a function then.
    """
    wide = f"<{count} x i32>"
    bits = e.op(f"bitcast <{count} x float> {numbers} to {wide}")
    odd = e.op(f"and {wide} {e.op(f'lshr {wide} {bits}, splat (i32 16)')}, splat (i32 1)")
    above = e.op(f"add {wide} {e.op(f'add {wide} {bits}, splat (i32 32767)')}, {odd}")
    is_nan = e.op(f"fcmp uno <{count} x float> {numbers}, {numbers}")
    kept = e.op(f"select <{count} x i1> {is_nan}, {wide} splat (i32 {0x7FC00000}), {wide} {above}")
    return e.op(f"trunc {wide} {e.op(f'lshr {wide} {kept}, splat (i32 16)')} to <{count} x i16>")


def fp16_bits(e: Emitter, numbers: str, count: int) -> str:
    """As `bf16_bits`, of fp16."""
    half = e.op(f"fptrunc <{count} x float> {numbers} to <{count} x half>")
    return e.op(f"bitcast <{count} x half> {half} to <{count} x i16>")
