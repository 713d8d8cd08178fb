"""GGUF's quantised types as encodings of kernels: the blocks lie one behind the other, a row behind the one before.

The layouts are those of ggml-common.h, explained in `formats.gguf_blocks`; the numbers are the same bit for bit, since
all but the last sum of a weight is exact. Blocks of 18, 34 or 210 bytes lie anywhere, so every load is unaligned.
Blocks of 256 weights are read by quarters: 64 weights that lie one behind the other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from .compiler import Emitter
from .encodings import LOOK_UP, Encoding, Row, look_up, splat


def i32(e: Emitter, operation: str, left: str, right: str | int) -> str:
    """An operation on two numbers of 32 bit."""
    return e.op(f"{operation} i32 {left}, {right}")


def i64(e: Emitter, operation: str, left: str, right: str | int) -> str:
    """An operation on two numbers of 64 bit, as addresses are."""
    return e.op(f"{operation} i64 {left}, {right}")


def narrow(e: Emitter, number: str) -> str:
    """The lower half of an i64."""
    return e.op(f"trunc i64 {number} to i32")


class BlockEncoding(Encoding):
    """Blocks of `size` weights in `num_bytes` (parts: the blocks). A step is 32 weights, or 64 of a larger block."""

    size, most_direct = 32, 4

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self.step = min(64, self.size)
        self._ints = f"<{lanes} x i32>"

    def row(self, e: Emitter, parts: Sequence[str], index: str, num_columns: str) -> Row:
        row_bytes = i64(e, "mul", i64(e, "udiv", num_columns, self.size), self.num_bytes)
        return (self.start(e, parts[0], index, row_bytes),)

    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> list[str]:
        block = i64(e, "udiv", column, self.size)
        place = e.address(row[0], i64(e, "mul", block, self.num_bytes))
        return self.numbers(e, place, i64(e, "lshr", i64(e, "and", column, self.size - 1), 6))

    @abstractmethod
    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        """The fp32 vectors of a step of the block at this address. quarter: i64, the number of the step in it."""

    # ---------------------------------------------------------------------------------------- pieces of blocks

    def half(self, e: Emitter, block: str, at: int) -> str:
        """The fp16 number at byte `at` as a float."""
        return e.op(f"fpext half {e.op(f'load half, ptr {e.address(block, str(at))}, align 1')} to float")

    def word(self, e: Emitter, place: str, bits: int) -> str:
        """The number of `bits` bits at an address, as i32."""
        loaded = e.op(f"load i{bits}, ptr {place}, align 1")
        return loaded if bits == 32 else e.op(f"zext i{bits} {loaded} to i32")

    def bytes(self, e: Emitter, place: str, count: int, extend: str = "zext") -> list[str]:
        """Vectors of i32 of so many bytes from an address on."""
        loads = [
            f"load <{self.lanes} x i8>, ptr {e.address(place, str(i))}, align 1" for i in range(0, count, self.lanes)
        ]
        return [e.op(f"{extend} <{self.lanes} x i8> {e.op(load)} to {self._ints}") for load in loads]

    def each(self, e: Emitter, operation: str, vectors: Sequence[str], other: str | int) -> list[str]:
        """An operation on vectors of i32 with a constant, or with a vector."""
        other = f"splat (i32 {other})" if isinstance(other, int) else other
        return [e.op(f"{operation} {self._ints} {vector}, {other}") for vector in vectors]

    def both(self, e: Emitter, lower: Sequence[str], upper: Sequence[str], shift: int) -> list[str]:
        """lower | upper << shift, vector by vector."""
        moved = self.each(e, "shl", upper, shift)
        return [e.op(f"or {self._ints} {low}, {high}") for low, high in zip(lower, moved, strict=True)]

    def nibbles(self, e: Emitter, place: str, count: int) -> list[str]:
        """The lower halves of so many bytes, then the upper ones."""
        whole = self.bytes(e, place, count)
        return self.each(e, "and", whole, 15) + self.each(e, "lshr", whole, 4)

    def fields(self, e: Emitter, vectors: Sequence[str], place: str, mask: int) -> list[str]:
        """The bits of `mask` from bit `place` (i32) on."""
        moved = self.each(e, "lshr", vectors, splat(e, place, self.lanes, "i32"))
        return self.each(e, "and", moved, mask)

    def floats(self, e: Emitter, codes: Sequence[str]) -> list[str]:
        return [e.op(f"sitofp {self._ints} {vector} to {self.vector}") for vector in codes]

    def scaled(
        self, e: Emitter, numbers: Sequence[str], scales: Sequence[str], shifts: Sequence[str] | None = None
    ) -> list[str]:
        """numbers · scale + shift; floats `scales` and `shifts`, each for its share of the vectors."""
        share, found = len(numbers) // len(scales), list[str]()
        for i, scale in enumerate(scales):
            factor = splat(e, scale, self.lanes)
            addend = None if shifts is None else splat(e, shifts[i], self.lanes)
            for vector in numbers[i * share : (i + 1) * share]:
                if addend is None:
                    found.append(e.op(f"fmul {self.vector} {vector}, {factor}"))
                else:  # the product is exact, so that nothing is rounded otherwise than by two instructions
                    operands = ", ".join(f"{self.vector} {operand}" for operand in (vector, factor, addend))
                    found.append(e.op(f"call {self.vector} @llvm.fma.v{self.lanes}f32({operands})"))
        return found

    def times(self, e: Emitter, factor: str, codes: Sequence[str]) -> list[str]:
        """factor · code for codes that are i32."""
        numbers = [e.op(f"sitofp i32 {code} to float") for code in codes]
        return [e.op(f"fmul float {factor}, {number}") for number in numbers]


# ------------------------------------------------------------------------------------------------------ blocks of 32


class Q8Zero(BlockEncoding):
    """d fp16, codes int8."""

    num_bytes = 34

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        codes = self.bytes(e, e.address(block, "2"), 32, "sext")
        return self.scaled(e, self.floats(e, codes), [self.half(e, block, 0)])


class Q4Zero(BlockEncoding):
    """d fp16, codes of 4 bit, less 8."""

    num_bytes, most_direct = 18, 12

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        codes = self.each(e, "sub", self.nibbles(e, e.address(block, "2"), 16), 8)
        return self.scaled(e, self.floats(e, codes), [self.half(e, block, 0)])


class Q4One(BlockEncoding):
    """d, m fp16, codes of 4 bit."""

    num_bytes, most_direct = 20, 12

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        codes = self.nibbles(e, e.address(block, "4"), 16)
        return self.scaled(e, self.floats(e, codes), [self.half(e, block, 0)], [self.half(e, block, 2)])


class FiveBit(BlockEncoding):
    """The fifth bits of 32 codes in one word, then their lower four."""

    def codes(self, e: Emitter, place: str) -> list[str]:
        word = splat(e, self.word(e, place, 32), self.lanes, "i32")
        lower = self.nibbles(e, e.address(place, "4"), 16)
        upper = []
        for first in range(0, 32, self.lanes):
            places = ", ".join(f"i32 {first + lane}" for lane in range(self.lanes))
            upper += self.each(e, "and", self.each(e, "lshr", [word], f"<{places}>"), 1)
        return self.both(e, lower, upper, 4)


class Q5Zero(FiveBit):
    """d fp16, codes of 5 bit, less 16."""

    num_bytes = 22

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        codes = self.each(e, "sub", self.codes(e, e.address(block, "2")), 16)
        return self.scaled(e, self.floats(e, codes), [self.half(e, block, 0)])


class Q5One(FiveBit):
    """d, m fp16, codes of 5 bit."""

    num_bytes = 24

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        codes = self.codes(e, e.address(block, "4"))
        return self.scaled(e, self.floats(e, codes), [self.half(e, block, 0)], [self.half(e, block, 2)])


class LookedUp(BlockEncoding):
    """Codes of 4 bit that stand for 16 values."""

    most_direct = 12

    def __init__(self, lanes: int, values: Sequence[float]) -> None:
        super().__init__(lanes)
        self._values, self.declarations = values, LOOK_UP[lanes]

    def values(self, e: Emitter, place: str) -> list[str]:
        """Of 16 bytes: their lower codes' values, then the upper ones'."""
        whole = self.bytes(e, place, 16)  # what is above four bits is not looked at
        codes = whole + self.each(e, "lshr", whole, 4)
        return [look_up(e, self.lanes, self._values, code) for code in codes]


class IQ4NL(LookedUp):
    """d fp16, codes."""

    num_bytes = 18

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        return self.scaled(e, self.values(e, e.address(block, "2")), [self.half(e, block, 0)])


# ------------------------------------------------------------------------------------------------------ blocks of 256


class IQ4XS(LookedUp):
    """d fp16, upper two bits of 8 scales, lower four, codes; scales less 32."""

    size, num_bytes = 256, 136

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        lower = self.word(e, e.address(e.address(block, "4"), quarter), 8)
        shift = i32(e, "shl", narrow(e, quarter), 2)
        upper = i32(e, "lshr", self.word(e, e.address(block, "2"), 16), shift)
        scales = []
        for i in range(2):
            low = i32(e, "and", i32(e, "lshr", lower, 4 * i), 15)
            high = i32(e, "and", i32(e, "shl", i32(e, "lshr", upper, 2 * i), 4), 48)
            scales.append(i32(e, "sub", i32(e, "or", low, high), 32))
        codes = e.address(e.address(block, "8"), i64(e, "shl", quarter, 5))
        values = self.values(e, codes) + self.values(e, e.address(codes, "16"))
        return self.scaled(e, values, self.times(e, self.half(e, block, 0), scales))


class WithMinima(BlockEncoding):
    """Q4_K's and Q5_K's: d and dmin fp16, 8 scales and 8 minima of 6 bit in 12 bytes; w = d·s·code - dmin·min."""

    size = 256

    def scales_and_shifts(self, e: Emitter, block: str, quarter: str) -> tuple[list[str], list[str]]:
        """Two each. The packing is explained at `gguf_blocks._scales_and_lows`; here two bytes at a time."""
        pair = i64(e, "shl", i64(e, "and", quarter, 1), 1)
        first, second, third = (self.word(e, e.address(e.address(block, str(at)), pair), 16) for at in (4, 8, 12))
        is_first = e.op(f"icmp ult i64 {quarter}, 2")
        found = []
        for own, lower in ((first, third), (second, i32(e, "lshr", third, 4))):
            whole = i32(e, "and", own, 0x3F3F)
            upper = i32(e, "and", i32(e, "lshr", own, 2), 0x3030)
            pieces = i32(e, "or", i32(e, "and", lower, 0x0F0F), upper)
            codes = e.op(f"select i1 {is_first}, i32 {whole}, i32 {pieces}")
            found.append([i32(e, "and", codes, 255), i32(e, "lshr", codes, 8)])
        lowest = e.op(f"fneg float {self.half(e, block, 2)}")
        return self.times(e, self.half(e, block, 0), found[0]), self.times(e, lowest, found[1])


class Q4K(WithMinima):
    """Then codes of 4 bit: a quarter is the lower halves of 32 bytes, then their upper ones."""

    num_bytes = 144

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        place = e.address(e.address(block, "16"), i64(e, "shl", quarter, 5))
        codes = self.floats(e, self.nibbles(e, place, 32))
        return self.scaled(e, codes, *self.scales_and_shifts(e, block, quarter))


class Q5K(WithMinima):
    """Then fifth bits (eight of a byte are 32 weights apart), then the lower four as in Q4_K."""

    num_bytes = 176

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        place = e.address(e.address(block, "48"), i64(e, "shl", quarter, 5))
        lower, whole = self.nibbles(e, place, 32), self.bytes(e, e.address(block, "16"), 32)
        bit = i32(e, "shl", narrow(e, quarter), 1)
        upper = self.fields(e, whole, bit, 1) + self.fields(e, whole, i32(e, "or", bit, 1), 1)
        codes = self.floats(e, self.both(e, lower, upper, 4))
        return self.scaled(e, codes, *self.scales_and_shifts(e, block, quarter))


class ByCrumbs(BlockEncoding):
    """Types with pieces of two bits: four of a byte are 32 weights apart, 32 bytes are half a block."""

    size = 256

    def crumbs(self, e: Emitter, place: str, quarter: str) -> list[str]:
        """The two bits of 64 codes of a quarter, from where the block has such bytes."""
        half = i64(e, "shl", i64(e, "lshr", quarter, 1), 5)
        whole = self.bytes(e, e.address(place, half), 32)
        bit = self.odd(e, quarter, 4)
        return self.fields(e, whole, bit, 3) + self.fields(e, whole, i32(e, "or", bit, 2), 3)

    def odd(self, e: Emitter, quarter: str, times: int) -> str:
        """i32: `times` in the second quarter of a half, else 0."""
        return i32(e, "mul", i32(e, "and", narrow(e, quarter), 1), times)

    def four(self, e: Emitter, word: str) -> list[str]:
        """The four bytes of an i32, each as i32."""
        moved = [i32(e, "lshr", word, 8 * i) for i in range(4)]
        return [i32(e, "and", piece, 255) for piece in moved]


class Q2K(ByCrumbs):
    """scales [16] (4 bit, above them 4 of a minimum), codes of 2 bit, d, dmin fp16."""

    num_bytes = 84

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        word = self.word(e, e.address(block, i64(e, "shl", quarter, 2)), 32)
        scales = self.four(e, i32(e, "and", word, 0x0F0F0F0F))
        lows = self.four(e, i32(e, "and", i32(e, "lshr", word, 4), 0x0F0F0F0F))
        codes = self.floats(e, self.crumbs(e, e.address(block, "16"), quarter))
        lowest = e.op(f"fneg float {self.half(e, block, 82)}")
        return self.scaled(e, codes, self.times(e, self.half(e, block, 80), scales), self.times(e, lowest, lows))


class Q3K(ByCrumbs):
    """third bits (eight of a byte are 32 weights apart), codes of 2 bit, 16 scales of 6 bit, d fp16."""

    num_bytes = 110

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        bit = i32(e, "shl", narrow(e, quarter), 1)
        whole = self.bytes(e, block, 32)
        upper = self.fields(e, whole, bit, 1) + self.fields(e, whole, i32(e, "or", bit, 1), 1)
        codes = self.both(e, self.crumbs(e, e.address(block, "32"), quarter), upper, 2)
        numbers = self.floats(e, self.each(e, "sub", codes, 4))
        return self.scaled(e, numbers, self.times(e, self.half(e, block, 108), self._scales(e, block, quarter, bit)))

    def _scales(self, e: Emitter, block: str, quarter: str, bit: str) -> list[str]:
        """Four, less 32: lower four bits in bytes 96 to 103, upper two in 104 to 107."""
        place = e.address(e.address(block, "96"), i64(e, "shl", i64(e, "and", quarter, 1), 2))
        shift = i32(e, "shl", i32(e, "lshr", bit, 2), 2)
        lower = i32(e, "and", i32(e, "lshr", self.word(e, place, 32), shift), 0x0F0F0F0F)
        upper = i32(e, "lshr", self.word(e, e.address(block, "104"), 32), bit)
        upper = i32(e, "shl", i32(e, "and", upper, 0x03030303), 4)
        return [i32(e, "sub", code, 32) for code in self.four(e, i32(e, "or", lower, upper))]


class Q6K(ByCrumbs):
    """lower four bits, upper two, scales int8 [16], d fp16; codes less 32."""

    num_bytes = 210

    def numbers(self, e: Emitter, block: str, quarter: str) -> list[str]:
        half = i64(e, "shl", i64(e, "lshr", quarter, 1), 6)
        lower = self.fields(e, self.bytes(e, e.address(block, half), 64), self.odd(e, quarter, 4), 15)
        upper = self.crumbs(e, e.address(block, "128"), quarter)
        numbers = self.floats(e, self.each(e, "sub", self.both(e, lower, upper, 4), 32))
        places = e.address(e.address(block, "192"), i64(e, "shl", quarter, 2))
        loaded = [e.op(f"load i8, ptr {e.address(places, str(i))}") for i in range(4)]
        scales = [e.op(f"sext i8 {scale} to i32") for scale in loaded]
        return self.scaled(e, numbers, self.times(e, self.half(e, block, 208), scales))


def block_encoding(name: str, lanes: int, iq4_values: Sequence[float]) -> BlockEncoding | None:
    """The encoding of a type; None for those that have none. iq4_values: what the 16 codes of IQ4's types stand for."""
    if name in _LOOKED_UP:
        return _LOOKED_UP[name](lanes, iq4_values)
    return _PLAIN[name](lanes) if name in _PLAIN else None


_LOOKED_UP: Mapping[str, Callable[[int, Sequence[float]], BlockEncoding]] = {"IQ4_NL": IQ4NL, "IQ4_XS": IQ4XS}
_PLAIN: Mapping[str, Callable[[int], BlockEncoding]] = {
    "Q8_0": Q8Zero,
    "Q4_0": Q4Zero,
    "Q4_1": Q4One,
    "Q5_0": Q5Zero,
    "Q5_1": Q5One,
    "Q2_K": Q2K,
    "Q3_K": Q3K,
    "Q4_K": Q4K,
    "Q5_K": Q5K,
    "Q6_K": Q6K,
}
