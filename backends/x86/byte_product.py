"""The product of rows in 8 bits (`byte_rows`) with a matrix in GGUF's blocks: integers within a block, fp32 between.

llama.cpp computes so: a row is rounded once, and then multiplied with the codes of weights, which takes a third of the
time of their numbers. Sums of integers are exact, and blocks are added in their order, so a row's result has the same
bits however many rows are multiplied.

A block has 32 weights with one scale, or 256 in groups that have small integers as scales. Of the latter, products of
codes are multiplied with these integers, too. What is added to all weights of a group, its minimum or what codes count
from, is multiplied with the sums of the row's codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from .byte_rows import LAYOUTS, ByteLayout, to_bytes
from .compiler import Emitter
from .encodings import Encoding, splat
from .gguf_encodings import Q5K, Q6K, BlockEncoding, MXFour, WithMinima, of_bytes
from .loops import counted
from .row_product import (
    BLOCK,
    BLOCK_NAMES,
    MOST_PARTS,
    RowProduct,
    fetch,
    few_rows,
    multiply_text,
    reduced,
    round_text,
    worker_text,
)

# Rows of the matrix between one that is read and one that is fetched into the caches meanwhile. One is read after the
# other, because a CPU fetches one stretch of memory by itself: by fours, they came at half the speed.
FETCH_AHEAD = 4
TILE_ROWS = 8  # rows of x at a time
MOST_ROWS, LARGE = 2**62, 256  # there are no panels: codes are unpacked again for each few rows


class ByteProduct(RowProduct):
    """Rows rounded to 8 bits, times matrices of the same encoding."""

    def __init__(self, encoding: BlockEncoding, form: ByteForm[Any]) -> None:
        super().__init__(encoding)
        self._form = form

    def _most_direct(self, num_columns: int) -> int:
        return MOST_ROWS

    def _laid_out(self, x: Tensor) -> Tensor:
        return to_bytes(x, self.encoding.size)

    @property
    def source(self) -> str:
        layout, form = LAYOUTS[self.encoding.size], self._form
        return "".join(
            (
                *(_block(self.encoding, form, layout, rows) for rows in range(1, TILE_ROWS + 1)),
                _few(),
                round_text(self.encoding.lanes),
                worker_text(multiply_text(self._multiply)),
            )
        )

    def _multiply(self, e: Emitter, first: str, last: str) -> None:
        layout = LAYOUTS[self.encoding.size]
        row_bytes = e.i64("udiv", e.i64("mul", "%columns", layout.num_bytes), layout.size)
        few_rows(e, "i8", row_bytes, TILE_ROWS, first, last)


class Dots:
    """Instructions for products of bytes, whose vectors may be two of the CPU's."""

    def __init__(self, lanes: int) -> None:
        self._is_wide = lanes == 16

    def of_bytes(self, e: Emitter, unsigned: str, signed: str, count: int = 64) -> str:
        """Sums of each two products of bytes, as words."""
        if count == 32:
            return e.op(f"call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8> {unsigned}, <32 x i8> {signed})")
        if self._is_wide:
            return e.op(f"call <32 x i16> @llvm.x86.avx512.pmaddubs.w.512(<64 x i8> {unsigned}, <64 x i8> {signed})")
        return self._halves(e, (unsigned, signed), "<64 x i8>", lambda one, other: self.of_bytes(e, one, other, 32))

    def of_words(self, e: Emitter, one: str, other: str, count: int = 32) -> str:
        """Sums of each two products of words, as i32."""
        if count == 16:
            return e.op(f"call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> {one}, <16 x i16> {other})")
        if self._is_wide:
            return e.op(f"call <16 x i32> @llvm.x86.avx512.pmaddw.d.512(<32 x i16> {one}, <32 x i16> {other})")
        return self._halves(e, (one, other), "<32 x i16>", lambda one, other: self.of_words(e, one, other, 16))

    def _halves(self, e: Emitter, vectors: Sequence[str], kind: str, operation: Callable[..., str]) -> str:
        half, size, part = (32, 16, "<16 x i16>") if kind == "<64 x i8>" else (16, 8, "<8 x i32>")
        places = range(half), range(half, 2 * half)
        results = [operation(*(e.shuffle(kind, each, vector) for vector in vectors)) for each in places]
        return e.shuffle(part, range(2 * size), *results)


W = TypeVar("W")


class ByteForm(ABC, Generic[W]):
    """How a block of an encoding, as W, is multiplied. count: fp32 sums of a row; vector: their type."""

    count: int

    def __init__(self, encoding: BlockEncoding) -> None:
        self.encoding, self.dots = encoding, Dots(encoding.lanes)
        self.vector = f"<{self.count} x float>"

    @abstractmethod
    def unpacked(self, e: Emitter, block: str) -> W:
        """What a block of the matrix is multiplied with, for `added`."""

    @abstractmethod
    def added(self, e: Emitter, total: str, weights: W, x: str, layout: ByteLayout) -> str:
        """The sums of a row plus those of a block at the address `x`."""

    def numbers(self, e: Emitter, integers: str) -> str:
        return e.op(f"sitofp <{self.count} x i32> {integers} to {self.vector}")

    def times(self, e: Emitter, one: str, other: str) -> str:
        return e.op(f"fmul {self.vector} {one}, {other}")

    def scale(self, e: Emitter, x: str, layout: ByteLayout) -> str:
        """The scale of a row's block, as a vector."""
        return splat(e, e.op(f"load float, ptr {e.address(x, str(layout.scale))}, align 4"), self.count)


# ------------------------------------------------------------------------------------------------------ blocks of 256


@dataclass(frozen=True)
class LargeWeights:
    """codes: <64 x i8> of each quarter. scales: <32 x i16>, of each two codes. of_sums: <16 x i16>, what the sums of 16
    codes of a row are multiplied with. factor: of all. low: the factor of the sums; None: they are integers beside the
    others, -32 times. Both are vectors.
    """

    codes: list[str]
    scales: list[str]
    of_sums: str
    factor: str
    low: str | None


class LargeForm(ByteForm[LargeWeights]):
    """Blocks of 256."""

    count = 16

    def added(self, e: Emitter, total: str, weights: LargeWeights, x: str, layout: ByteLayout) -> str:
        whole = "zeroinitializer"
        for quarter, (codes, scales) in enumerate(zip(weights.codes, weights.scales, strict=True)):
            row = e.op(f"load <64 x i8>, ptr {e.address(x, str(64 * quarter))}, align 64")
            products = self.dots.of_words(e, self.dots.of_bytes(e, codes, row), scales)
            whole = e.op(f"add <16 x i32> {whole}, {products}")
        sums = e.op(f"load <16 x i16>, ptr {e.address(x, str(layout.sums))}, align 32")
        eight = self.dots.of_words(e, weights.of_sums, sums, 16)
        if weights.low is None:
            eight = e.op(f"shl <8 x i32> {eight}, splat (i32 5)")
        lows = e.shuffle("<8 x i32>", range(16), eight, "zeroinitializer")
        if weights.low is None:
            whole = e.op(f"sub <16 x i32> {whole}, {lows}")
        products = self.times(e, self.numbers(e, whole), weights.factor)
        if weights.low is not None:
            products = e.fma(self.vector, self.numbers(e, lows), weights.low, products)
        return e.fma(self.vector, products, self.scale(e, x, layout), total)

    def half(self, e: Emitter, block: str, at: int) -> str:
        return self.encoding.half(e, block, at, self.count)


class FormWithMinima(LargeForm):
    """Q4_K and Q5_K."""

    def unpacked(self, e: Emitter, block: str) -> LargeWeights:
        assert isinstance(self.encoding, WithMinima)
        words = e.op(f"zext <16 x i8> {self.encoding.packed(e, block)} to <16 x i16>")
        scales = [e.shuffle("<16 x i16>", [2 * quarter + i // 16 for i in range(32)], words) for quarter in range(4)]
        minima = e.shuffle("<16 x i16>", [8 + i // 2 for i in range(16)], words)
        low = e.op(f"fneg {self.vector} {self.half(e, block, 2)}")
        return LargeWeights(
            [self.codes(e, block, quarter) for quarter in range(4)], scales, minima, self.half(e, block, 0), low
        )

    def codes(self, e: Emitter, block: str, quarter: int) -> str:
        if isinstance(self.encoding, Q5K):
            return self.encoding.codes(e, block, quarter)
        loaded = e.op(f"load <16 x i16>, ptr {e.address(block, str(16 + 32 * quarter))}, align 1")
        twice = e.shuffle("<16 x i16>", [i % 16 for i in range(32)], loaded)
        distances = ", ".join(f"i16 {4 * (i // 16)}" for i in range(32))
        moved = e.op(f"lshr <32 x i16> {twice}, <{distances}>")
        return of_bytes(e, "and", e.op(f"bitcast <32 x i16> {moved} to <64 x i8>"), 15, 64)


class SixBitForm(LargeForm):
    """Q6_K."""

    def unpacked(self, e: Emitter, block: str) -> LargeWeights:
        assert isinstance(self.encoding, Q6K)
        loaded = e.op(f"load <16 x i8>, ptr {e.address(block, '192')}, align 1")
        words = e.op(f"sext <16 x i8> {loaded} to <16 x i16>")
        scales = [e.shuffle("<16 x i16>", [4 * quarter + i // 8 for i in range(32)], words) for quarter in range(4)]
        codes = [self.encoding.unsigned(e, block, quarter) for quarter in range(4)]
        return LargeWeights(codes, scales, words, self.half(e, block, 208), None)


# ------------------------------------------------------------------------------------------------------ blocks of 32


@dataclass(frozen=True)
class SmallWeights:
    """signed: <32 x i8>. sizes: without their signs. factor: of all, a vector."""

    signed: str
    sizes: str
    factor: str


class SmallForm(ByteForm[SmallWeights]):
    """Blocks of 32 with one scale: Q8_0, Q4_0, IQ4_NL and MXFP4. values: of codes of 4 bits, in a table."""

    count = 8

    def __init__(self, encoding: BlockEncoding, values: Sequence[int] = ()) -> None:
        super().__init__(encoding)
        self._values = values

    def unpacked(self, e: Emitter, block: str) -> SmallWeights:
        first = 1 if isinstance(self.encoding, MXFour) else 2
        if isinstance(self.encoding, MXFour):
            factor = splat(e, self.encoding.scale(e, block), self.count)
        else:
            factor = self.encoding.half(e, block, 0, self.count)
        place = e.address(block, str(first))
        if not self._values:
            signed = e.op(f"load <32 x i8>, ptr {place}, align 1")
        else:
            loaded = e.op(f"load <8 x i16>, ptr {place}, align 1")
            twice = e.shuffle("<8 x i16>", [*range(8)] * 2, loaded)
            distances = ", ".join(f"i16 {4 * (i // 8)}" for i in range(16))
            moved = e.op(f"bitcast <16 x i16> {e.op(f'lshr <16 x i16> {twice}, <{distances}>')} to <32 x i8>")
            table = ", ".join(f"i8 {value}" for value in [*self._values] * 2)
            places = of_bytes(e, "and", moved, 15)
            signed = e.op(f"call <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8> <{table}>, <32 x i8> {places})")
        return SmallWeights(signed, e.op(f"call <32 x i8> @llvm.abs.v32i8(<32 x i8> {signed}, i1 0)"), factor)

    def added(self, e: Emitter, total: str, weights: SmallWeights, x: str, layout: ByteLayout) -> str:
        row = e.op(f"load <32 x i8>, ptr {x}, align 32")
        moved = e.op(f"call <32 x i8> @llvm.x86.avx2.psign.b(<32 x i8> {row}, <32 x i8> {weights.signed})")
        pairs = self.dots.of_bytes(e, weights.sizes, moved, 32)
        whole = self.dots.of_words(e, pairs, "splat (i16 1)", 16)
        scaled = self.times(e, self.numbers(e, whole), self.scale(e, x, layout))
        return e.fma(self.vector, scaled, weights.factor, total)


# ------------------------------------------------------------------------------------------------------ the kernel


def _block(encoding: Encoding, form: ByteForm[Any], layout: ByteLayout, num_rows: int) -> str:
    """Products of `num_rows` rows of x with rows first .. last of the matrix."""
    e, rows = Emitter(), range(num_rows)
    stride = e.op(f"udiv i64 {e.op(f'mul i64 %columns, {layout.num_bytes}')}, {layout.size}")
    xs = [e.address("%x", e.op(f"mul i64 {stride}, {i}")) for i in rows]

    def output(index: str) -> None:
        parts = [f"%part{i}" for i in range(MOST_PARTS)]
        (start, *_) = encoding.row(e, parts, index, "%columns")

        def step(column: str, sums: Sequence[str]) -> list[str]:
            if layout.size == LARGE:
                fetch(e, encoding, [start], column, FETCH_AHEAD, layout.size)
            number = e.op(f"udiv i64 {column}, {layout.size}")
            weights = form.unpacked(e, e.address(start, e.op(f"mul i64 {number}, {encoding.num_bytes}")))
            block = e.op(f"mul i64 {number}, {layout.num_bytes}")
            return [
                form.added(e, total, weights, e.address(x, block), layout) for x, total in zip(xs, sums, strict=True)
            ]

        begin = [(form.vector, "zeroinitializer")] * num_rows
        totals = counted(e, "column", "0", "%columns", layout.size, step, begin)
        for i, each in enumerate(totals):
            place = e.address("%out", e.op(f"add i64 {e.op(f'mul i64 %outputs, {i}')}, {index}"), "float")
            total = reduced(e, [each], form.count)
            e.do(f"store float {e.op(f'extractelement <1 x float> {total}, i64 0')}, ptr {place}, align 4")

    counted(e, "output", "%first", "%last", 1, output)
    e.do("ret void")
    return e.function(f"define internal void @few_{num_rows}({BLOCK})")


def _few() -> str:
    """A function of TILE_ROWS rows of x, or of `%rows` if these are fewer."""
    e = Emitter()
    cases = " ".join(f"i64 {rows}, label %rows{rows}" for rows in range(1, TILE_ROWS))
    e.do(f"switch i64 %rows, label %rows{TILE_ROWS} [ {cases} ]")
    for rows in range(1, TILE_ROWS + 1):
        e.label(f"rows{rows}")
        e.do(f"call void @few_{rows}({BLOCK_NAMES})")
        e.do("ret void")
    return e.function(f"define internal void @few(i64 %rows, {BLOCK})")


# GGUF's types that are multiplied so.
FORMS: Mapping[str, Callable[[BlockEncoding, Sequence[int]], ByteForm[Any]]] = {
    "Q4_K": lambda encoding, _: FormWithMinima(encoding),
    "Q5_K": lambda encoding, _: FormWithMinima(encoding),
    "Q6_K": lambda encoding, _: SixBitForm(encoding),
    "Q8_0": lambda encoding, _: SmallForm(encoding),
    "Q4_0": lambda encoding, _: SmallForm(encoding, range(-8, 8)),
    "IQ4_NL": SmallForm,
    "MXFP4": SmallForm,
}


def byte_product(name: str, encoding: BlockEncoding, values: Sequence[int]) -> ByteProduct | None:
    """The product with matrices of a type; None for other types. values: see `gguf_encodings.block_encoding`."""
    return ByteProduct(encoding, FORMS[name](encoding, values)) if name in FORMS else None
