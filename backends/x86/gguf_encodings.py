"""GGUF's quantised types as encodings of kernels: blocks are contiguous, and so are rows.

The layouts are those of ggml-common.h, explained in `formats.gguf_blocks`; the numbers are the same bit for bit, since
all but the last sum of a weight is exact. Blocks of 18, 34 or 210 bytes are not aligned, so every load is unaligned.
Blocks of 256 weights are read in quarters of 64 consecutive weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from .compiler import Emitter
from .encodings import Encoding, Factors, Row, Vectors, look_up, look_up_in, splat, table_of


def of_bytes(e: Emitter, operation: str, codes: str, number: int, count: int = 32) -> str:
    """An operation on each of `count` bytes and a constant."""
    return e.op(f"{operation} <{count} x i8> {codes}, splat (i8 {number})")


def of_words(e: Emitter, operation: str, codes: str, numbers: Sequence[int]) -> str:
    """An operation on 32-bit words and as many constants."""
    constants = ", ".join(f"i32 {number}" for number in numbers)
    return e.op(f"{operation} <{len(numbers)} x i32> {codes}, <{constants}>")


def either(e: Emitter, one: str, other: str, kind: str = "<32 x i8>") -> str:
    return e.op(f"or {kind} {one}, {other}")


@dataclass(frozen=True)
class UnpackingStep:
    """Where a step's weights are: the address of their block, which quarter of it (i64), the address of the scratch."""

    block: str
    quarter: str
    scratch: str


class BlockEncoding(Encoding):
    """Blocks of `size` weights in `num_bytes` (parts: the blocks). A step is 32 weights, or 64 of a larger block."""

    size = 32

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self.step = min(64, self.size)
        self._ints = f"<{lanes} x i32>"

    def row(self, e: Emitter, parts: Sequence[str], index: str, num_columns: str) -> Row:
        row_bytes = e.i64("mul", e.i64("udiv", num_columns, self.size), self.num_bytes)
        return (self.start(e, parts[0], index, row_bytes),)

    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        return self.numbers(e, self.place(e, row, column))

    def place(self, e: Emitter, row: Row, column: str) -> UnpackingStep:
        quarter = e.i64("lshr", e.i64("and", column, self.size - 1), 6)
        return UnpackingStep(self.block(e, row, column), quarter, row[-1])

    def block(self, e: Emitter, row: Row, column: str) -> str:
        return e.address(row[0], e.i64("mul", e.i64("udiv", column, self.size), self.num_bytes))

    @abstractmethod
    def numbers(self, e: Emitter, step: UnpackingStep) -> Vectors:
        """The vectors of a step."""

    # ---------------------------------------------------------------------------------------- pieces of blocks

    def half(self, e: Emitter, block: str, at: int, count: int) -> str:
        """The fp16 number at byte `at` as a vector of `count` floats.

        It is loaded with its neighbours. For one alone LLVM takes an instruction that keeps the rest of some register,
        and so waits for the sum that this register may hold.
        """
        start = min(at, self.num_bytes - 8)
        four = e.op(f"load <4 x half>, ptr {e.address(block, str(start))}, align 1")
        floats = e.op(f"fpext <4 x half> {four} to <4 x float>")
        return e.shuffle("<4 x float>", [(at - start) // 2] * count, floats)

    def halves(self, e: Emitter, block: str, count: int) -> list[str]:
        """The first fp16 numbers of a block, each as a vector."""
        return [self.half(e, block, 2 * i, self.lanes) for i in range(count)]

    def bytes(self, e: Emitter, place: str, extend: str = "zext") -> str:
        """A vector of i32 of the bytes from an address on."""
        loaded = e.op(f"load <{self.lanes} x i8>, ptr {place}, align 1")
        return e.op(f"{extend} <{self.lanes} x i8> {loaded} to {self._ints}")

    def floats(self, e: Emitter, codes: str) -> str:
        return e.op(f"sitofp {self._ints} {codes} to {self.vector}")

    def scaled(self, e: Emitter, numbers: str, scale: str, shift: str | None = None) -> str:
        """numbers · scale + shift."""
        if shift is None:
            return e.op(f"fmul {self.vector} {numbers}, {scale}")
        # The product is exact, so that nothing is rounded otherwise than by two instructions.
        return e.fma(self.vector, numbers, scale, shift)


# ------------------------------------------------------------------------------------------------------ blocks of 32


class Q8Zero(BlockEncoding):
    """d fp16, codes int8."""

    num_bytes = 34

    def numbers(self, e: Emitter, step: UnpackingStep) -> Vectors:
        (scale,) = self.halves(e, step.block, 1)
        for first in range(0, 32, self.lanes):
            codes = self.bytes(e, e.address(step.block, str(2 + first)), "sext")
            yield first, self.scaled(e, self.floats(e, codes), scale)


@dataclass(frozen=True)
class NibbleGroup:
    """Codes at an address: the lower halves of `count` bytes are those of weights from number `first` of the step on,
    then come the upper ones. lower, upper: names of the scale and, where there is one, the shift of these weights.
    """

    place: str
    count: int
    lower: tuple[str, ...]
    upper: tuple[str, ...]
    first: int = 0


class Nibbles(BlockEncoding):
    """4-bit codes: indices into a table of 16 values."""

    def __init__(self, lanes: int, values: Sequence[float]) -> None:
        super().__init__(lanes)
        self._values = values

    @abstractmethod
    def groups(self, e: Emitter, step: UnpackingStep) -> Iterator[NibbleGroup]:
        """The groups of a step."""

    def numbers(self, e: Emitter, step: UnpackingStep) -> Vectors:
        for group in self.groups(e, step):
            weights = [self._weights(e, factors) for factors in dict.fromkeys((group.lower, group.upper))]
            for first in range(0, group.count, self.lanes):
                codes = self.bytes(e, e.address(group.place, str(first)))
                moved = e.op(f"lshr {self._ints} {codes}, splat (i32 4)")
                yield group.first + first, weights[0](codes)
                yield group.first + group.count + first, weights[-1](moved)

    def pair_vectors(self, e: Emitter, factors: Factors, parts: Sequence[str], row: Row, column: str) -> Vectors:
        """A look-up finds 32 weights in a table of bf16, which has those of 16 codes twice, or by two scales."""
        for group in self.groups(e, self.place(e, row, column)):
            tables = [self.scaled(e, table_of(self._values), *scales) for scales in (group.lower, group.upper)]
            table = e.op(f"bitcast {factors.vector} {factors.rounded(e, *tables)} to <32 x i16>")
            loaded = e.op(f"load <{group.count} x i8>, ptr {group.place}, align 1")
            if group.count == 16:
                loaded = e.shuffle("<16 x i8>", [*range(16)] * 2, loaded)
            codes = e.op(f"zext <32 x i8> {loaded} to <32 x i16>")
            if group.count == 16:
                distances = ", ".join(f"i16 {4 * (i // 16)}" for i in range(32))
                words = e.op(f"lshr <32 x i16> {codes}, <{distances}>")
                yield group.first, self._found(e, factors, table, words)
                continue
            yield group.first, self._found(e, factors, table, e.op(f"and <32 x i16> {codes}, splat (i16 15)"))
            moved = e.op(f"lshr <32 x i16> {codes}, splat (i16 4)")
            yield group.first + 32, self._found(e, factors, table, e.op(f"or <32 x i16> {moved}, splat (i16 16)"))

    def _found(self, e: Emitter, factors: Factors, table: str, places: str) -> str:
        """Numbers of a table <32 x i16> by the lowest five bits of `places`."""
        words = e.op(f"call <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16> {table}, <32 x i16> {places})")
        return e.op(f"bitcast <32 x i16> {words} to {factors.vector}")

    def _weights(self, e: Emitter, factors: Sequence[str]) -> Callable[[str], str]:
        """What computes weights from codes, by their lowest four bits.

        A look-up finds products in a table that is scaled once. Codes are converted where that takes less time, as
        wider tables are two instructions.
        """
        if self.lanes == 16:
            table = self.scaled(e, table_of(self._values), *factors)
            return partial(look_up_in, e, table)
        return lambda codes: self.scaled(e, self._value(e, codes), *factors)

    def _value(self, e: Emitter, codes: str) -> str:
        least = int(self._values[0])
        if [*self._values] != [*range(least, least + 16)]:
            return look_up(e, self.lanes, self._values, codes)
        numbers = e.op(f"and {self._ints} {codes}, splat (i32 15)")
        return self.floats(e, e.op(f"add {self._ints} {numbers}, splat (i32 {least})"))


class NibblesOf32(Nibbles):
    """d fp16, m fp16 where there is one; of 16 bytes the lower codes, then the upper ones."""

    def __init__(self, lanes: int, values: Sequence[float], *, has_shift: bool = False) -> None:
        super().__init__(lanes, values)
        self._num_halves = 2 if has_shift else 1
        self.num_bytes = 16 + 2 * self._num_halves

    def groups(self, e: Emitter, step: UnpackingStep) -> Iterator[NibbleGroup]:
        factors = tuple(self.halves(e, step.block, self._num_halves))
        yield NibbleGroup(e.address(step.block, str(2 * self._num_halves)), 16, factors, factors)


class MXFour(Nibbles):
    """e uint8, then 16 bytes as in `NibblesOf32`; the scale is 2^(e - 128)."""

    num_bytes = 17

    def groups(self, e: Emitter, step: UnpackingStep) -> Iterator[NibbleGroup]:
        scale = splat(e, self.scale(e, step.block), self.lanes)
        yield NibbleGroup(e.address(step.block, "1"), 16, (scale,), (scale,))

    def scale(self, e: Emitter, block: str) -> str:
        """fp32's exponent is one less; below e = 2 it has none, but a bit of the fraction."""
        exponent = e.op(f"zext i8 {e.op(f'load i8, ptr {block}, align 1')} to i32")
        usual = e.op(f"shl i32 {e.op(f'sub i32 {exponent}, 1')}, 23")
        tiny = e.op(f"shl i32 {e.op(f'add i32 {exponent}, 1')}, 21")
        bits = e.op(f"select i1 {e.op(f'icmp ult i32 {exponent}, 2')}, i32 {tiny}, i32 {usual}")
        return e.op(f"bitcast i32 {bits} to float")


class FiveBit(BlockEncoding):
    """d fp16, m fp16 where there is one, the fifth bits of 32 codes in one word, then their lower four.

    Without m codes count from -16.
    """

    def __init__(self, lanes: int, *, has_shift: bool) -> None:
        super().__init__(lanes)
        self._num_halves = 2 if has_shift else 1
        self.num_bytes = 20 + 2 * self._num_halves

    def numbers(self, e: Emitter, step: UnpackingStep) -> Vectors:
        factors, ints = self.halves(e, step.block, self._num_halves), self._ints
        place = e.address(step.block, str(2 * self._num_halves))
        for first in range(0, 32, self.lanes):
            whole = self.bytes(e, e.address(place, str(4 + first % 16)))
            bits = e.op(f"load i{self.lanes}, ptr {e.address(place, str(first // 8))}, align 1")
            is_upper = e.op(f"bitcast i{self.lanes} {bits} to <{self.lanes} x i1>")
            lower = e.op(f"and {ints} {whole}, splat (i32 15)" if first < 16 else f"lshr {ints} {whole}, splat (i32 4)")
            upper = e.op(f"select <{self.lanes} x i1> {is_upper}, {ints} splat (i32 16), {ints} zeroinitializer")
            codes = either(e, lower, upper, ints)
            if self._num_halves == 1:
                codes = e.op(f"sub {ints} {codes}, splat (i32 16)")
            yield first, self.scaled(e, self.floats(e, codes), *factors)


# ------------------------------------------------------------------------------------------------------ blocks of 256


class LargeBlock(BlockEncoding):
    """The scales of a whole block are decoded together, before its first quarter, into the scratch.

    num_factors: fp32 numbers that come of it.
    """

    size = 256
    num_factors: int

    @property
    def is_row_by_row(self) -> bool:  # type: ignore[override]
        return self.lanes == 16

    @property
    def scratch(self) -> int:  # type: ignore[override]
        return self.num_factors

    def begin_block(self, e: Emitter, row: Row, column: str) -> None:
        factors = self.scales(e, self.block(e, row, column))
        e.do(f"store <{self.num_factors} x float> {factors}, ptr {row[-1]}, align 64")

    @abstractmethod
    def scales(self, e: Emitter, block: str) -> str:
        """The values for the scratch, [num_factors]."""

    def factors(self, e: Emitter, step: UnpackingStep, per_quarter: int, first: int = 0) -> list[str]:
        """Those of a quarter, from number `first` of the scratch on, each as a vector."""
        start = e.i64("add", e.i64("mul", step.quarter, per_quarter), first)
        places = [e.address(step.scratch, e.i64("add", start, i), "float") for i in range(per_quarter)]
        return [splat(e, e.op(f"load float, ptr {place}, align 4"), self.lanes) for place in places]

    def product(self, e: Emitter, codes: str, kind: str, count: int, factor: str) -> str:
        """factor · codes, these of an integer kind (its conversion's name and its own), as floats."""
        conversion, integer = kind.split()
        numbers = e.op(f"{conversion} <{count} x {integer}> {codes} to <{count} x float>")
        return e.op(f"fmul <{count} x float> {numbers}, {factor}")


class WithBytes(LargeBlock):
    """Codes whose bits are in several places: those of a block become bytes in the scratch, behind the factors.

    A vector is widened from memory in one instruction; from a register it would take two. per_quarter: scales.
    """

    extend, per_quarter = "zext", 4

    @property
    def scratch(self) -> int:  # type: ignore[override]
        return self.num_factors + self.size // 4

    def begin_block(self, e: Emitter, row: Row, column: str) -> None:
        super().begin_block(e, row, column)
        block = self.block(e, row, column)
        for quarter in range(4):
            codes = self.codes(e, block, quarter)
            place = e.address(row[-1], str(4 * self.num_factors + 64 * quarter))
            e.do(f"store <64 x i8> {codes}, ptr {place}, align 64")

    @abstractmethod
    def codes(self, e: Emitter, block: str, quarter: int) -> str:
        """Those of a quarter, <64 x i8>."""

    def numbers(self, e: Emitter, step: UnpackingStep) -> Vectors:
        place = e.address(e.address(step.scratch, str(4 * self.num_factors)), e.i64("shl", step.quarter, 6))
        firsts = range(
            0, self.num_factors, 4 * self.per_quarter
        )  # of the block's scales and, if there are some, shifts
        factors = [self.factors(e, step, self.per_quarter, first) for first in firsts]
        for first in range(0, 64, self.lanes):
            numbers = self.floats(e, self.bytes(e, e.address(place, str(first)), self.extend))
            part = [factor[first * len(factor) // 64] for factor in factors]
            yield first, self.scaled(e, numbers, *part)

    def masked(self, e: Emitter, place: str, moves: tuple[int, int], mask: int, *, is_twice: bool = True) -> str:
        """Bits of 32 bytes from an address on, twice, or of 64 bytes → <64 x i8>.

        moves: bits that the first and the last 32 are moved up, or down if negative. mask: of what is taken then.
        """
        words = e.op(f"load <{16 if is_twice else 32} x i16>, ptr {place}, align 1")
        if is_twice:
            words = e.shuffle("<16 x i16>", [*range(16)] * 2, words)
        distances = ", ".join(f"i16 {abs(moves[lane // 16])}" for lane in range(32))
        moved = e.op(f"{'lshr' if min(moves) < 0 else 'shl'} <32 x i16> {words}, <{distances}>")
        return of_bytes(e, "and", e.op(f"bitcast <32 x i16> {moved} to <64 x i8>"), mask, 64)

    def crumbs(self, e: Emitter, place: str, quarter: int) -> str:
        """Codes of two bits: four of a byte are 32 weights apart, 32 bytes are half a block."""
        down = -4 * (quarter % 2)
        return self.masked(e, e.address(place, str(32 * (quarter // 2))), (down, down - 2), 3)


class IQ4XS(Nibbles, LargeBlock):
    """d fp16, upper two bits of 8 scales, lower four, codes; scales less 32."""

    num_bytes, num_factors = 136, 8

    def scales(self, e: Emitter, block: str) -> str:
        lower = splat(e, e.op(f"load i32, ptr {e.address(block, '4')}, align 1"), 8, "i32")
        lower = of_words(e, "and", of_words(e, "lshr", lower, range(0, 32, 4)), [15] * 8)
        loaded = e.op(f"load i16, ptr {e.address(block, '2')}, align 1")
        upper = splat(e, e.op(f"zext i16 {loaded} to i32"), 8, "i32")
        upper = of_words(e, "and", of_words(e, "lshr", upper, range(0, 16, 2)), [3] * 8)
        codes = either(e, lower, of_words(e, "shl", upper, [4] * 8), "<8 x i32>")
        scale = self.half(e, block, 0, 8)
        return self.product(e, of_words(e, "sub", codes, [32] * 8), "sitofp i32", 8, scale)

    def groups(self, e: Emitter, step: UnpackingStep) -> Iterator[NibbleGroup]:
        codes = e.address(e.address(step.block, "8"), e.i64("shl", step.quarter, 5))
        for i, scale in enumerate(self.factors(e, step, 2)):
            yield NibbleGroup(e.address(codes, str(16 * i)), 16, (scale,), (scale,), 32 * i)


class WithMinima(LargeBlock):
    """Q4_K's and Q5_K's: d and dmin fp16, 8 scales and 8 minima of 6 bit in 12 bytes; w = d·s·code - dmin·min."""

    num_factors = 16

    def packed(self, e: Emitter, block: str) -> str:
        """The scales and the minima, <16 x i8>. `gguf_blocks._scales_and_lows` explains how they are packed."""
        words = e.op(f"load <4 x i32>, ptr {block}, align 1")
        packed_scales = e.shuffle("<4 x i32>", (1, 3, 2, 3), words)
        lower = of_words(e, "and", of_words(e, "lshr", packed_scales, (0, 0, 0, 4)), (0x3F3F3F3F, 0x0F0F0F0F) * 2)
        upper = of_words(e, "lshr", e.shuffle("<4 x i32>", (1, 1, 2, 2), words), [2] * 4)
        codes = either(e, lower, of_words(e, "and", upper, (0, 0x30303030) * 2), "<4 x i32>")
        return e.op(f"bitcast <4 x i32> {codes} to <16 x i8>")

    def scales(self, e: Emitter, block: str) -> str:
        """d · scales, then -dmin · minima."""
        halves = e.op(f"load <2 x half>, ptr {block}, align 1")
        both = e.op(f"fpext <2 x half> {halves} to <2 x float>")
        signed = e.op(f"fmul <2 x float> {both}, <float 1.0, float -1.0>")
        factor = e.shuffle("<2 x float>", [0] * 8 + [1] * 8, signed)
        return self.product(e, self.packed(e, block), "uitofp i8", 16, factor)


class Q4K(Nibbles, WithMinima):
    """Then codes of 4 bit: a quarter is the lower halves of 32 bytes, then their upper ones."""

    num_bytes = 144

    def groups(self, e: Emitter, step: UnpackingStep) -> Iterator[NibbleGroup]:
        codes = e.address(e.address(step.block, "16"), e.i64("shl", step.quarter, 5))
        scales, shifts = self.factors(e, step, 2), self.factors(e, step, 2, 8)
        lower, upper = zip(scales, shifts, strict=True)
        yield NibbleGroup(codes, 32, lower, upper)


class Q5K(WithMinima, WithBytes):
    """Then fifth bits (eight of a byte are 32 weights apart), then the lower four as in Q4_K."""

    num_bytes, per_quarter = 176, 2

    def codes(self, e: Emitter, block: str, quarter: int) -> str:
        lower = self.masked(e, e.address(block, str(48 + 32 * quarter)), (0, -4), 15)
        up = 4 - 2 * quarter
        upper = self.masked(e, e.address(block, "16"), (up, up - 1), 16)
        return either(e, lower, upper, "<64 x i8>")


class Q2K(WithBytes):
    """scales [16] (4 bit, above them 4 of a minimum), codes of 2 bit, d, dmin fp16."""

    num_bytes, num_factors = 84, 32

    def scales(self, e: Emitter, block: str) -> str:
        """d · scales, then -dmin · minima."""
        codes = e.op(f"load <16 x i8>, ptr {block}, align 1")
        factors = self.half(e, block, 80, 16), e.op(f"fneg <16 x float> {self.half(e, block, 82, 16)}")
        pieces = of_bytes(e, "and", codes, 15, 16), of_bytes(e, "lshr", codes, 4, 16)
        pair = [
            self.product(e, packed_scales, "uitofp i8", 16, factor)
            for packed_scales, factor in zip(pieces, factors, strict=True)
        ]
        return e.shuffle("<16 x float>", range(32), *pair)

    def codes(self, e: Emitter, block: str, quarter: int) -> str:
        return self.crumbs(e, e.address(block, "16"), quarter)


class Q3K(WithBytes):
    """third bits (eight of a byte are 32 weights apart), codes of 2 bit, 16 scales of 6 bit, d fp16."""

    num_bytes, num_factors, extend = 110, 16, "sext"

    def scales(self, e: Emitter, block: str) -> str:
        """Codes less 32: lower four bits in bytes 96 to 103, upper two in 104 to 107."""
        pair = e.op(f"load <2 x i32>, ptr {e.address(block, '96')}, align 1")
        lower = e.shuffle("<2 x i32>", (0, 1, 0, 1), pair)
        lower = of_words(e, "and", of_words(e, "lshr", lower, (0, 0, 4, 4)), [0x0F0F0F0F] * 4)
        upper = splat(e, e.op(f"load i32, ptr {e.address(block, '104')}, align 1"), 4, "i32")
        upper = of_words(e, "and", of_words(e, "lshr", upper, (0, 2, 4, 6)), [0x03030303] * 4)
        codes = either(e, lower, of_words(e, "shl", upper, [4] * 4), "<4 x i32>")
        numbers = of_bytes(e, "sub", e.op(f"bitcast <4 x i32> {codes} to <16 x i8>"), 32, 16)
        return self.product(e, numbers, "sitofp i8", 16, self.half(e, block, 108, 16))

    def codes(self, e: Emitter, block: str, quarter: int) -> str:
        up = 2 - 2 * quarter
        third = self.masked(e, block, (up, up - 1), 4)
        codes = either(e, self.crumbs(e, e.address(block, "32"), quarter), third, "<64 x i8>")
        return of_bytes(e, "sub", codes, 4, 64)


class Q6K(WithBytes):
    """lower four bits, upper two, scales int8 [16], d fp16; codes less 32."""

    num_bytes, num_factors, extend = 210, 16, "sext"

    def scales(self, e: Emitter, block: str) -> str:
        codes = e.op(f"load <16 x i8>, ptr {e.address(block, '192')}, align 1")
        return self.product(e, codes, "sitofp i8", 16, self.half(e, block, 208, 16))

    def codes(self, e: Emitter, block: str, quarter: int) -> str:
        return of_bytes(e, "sub", self.unsigned(e, block, quarter), 32, 64)

    def unsigned(self, e: Emitter, block: str, quarter: int) -> str:
        """The codes of a quarter, <64 x i8>."""
        half, down = divmod(quarter, 2)
        lower = self.masked(e, e.address(block, str(64 * half)), (-4 * down, -4 * down), 15, is_twice=False)
        moves = (0, -2) if down else (4, 2)
        upper = self.masked(e, e.address(block, str(128 + 32 * half)), moves, 48)
        return either(e, lower, upper, "<64 x i8>")


def block_encoding(name: str, lanes: int, values: Sequence[float]) -> BlockEncoding | None:
    """The encoding of a type; None for other types. values: of the 16 codes of a type that looks them up."""
    return _ENCODINGS[name](lanes, values) if name in _ENCODINGS else None


_ENCODINGS: Mapping[str, Callable[[int, Sequence[float]], BlockEncoding]] = {
    "Q4_0": lambda lanes, _: NibblesOf32(lanes, range(-8, 8)),
    "Q4_1": lambda lanes, _: NibblesOf32(lanes, range(16), has_shift=True),
    "Q4_K": lambda lanes, _: Q4K(lanes, range(16)),
    "IQ4_NL": NibblesOf32,
    "IQ4_XS": IQ4XS,
    "MXFP4": MXFour,
    "Q8_0": lambda lanes, _: Q8Zero(lanes),
    "Q5_0": lambda lanes, _: FiveBit(lanes, has_shift=False),
    "Q5_1": lambda lanes, _: FiveBit(lanes, has_shift=True),
    "Q2_K": lambda lanes, _: Q2K(lanes),
    "Q3_K": lambda lanes, _: Q3K(lanes),
    "Q5_K": lambda lanes, _: Q5K(lanes),
    "Q6_K": lambda lanes, _: Q6K(lanes),
}
