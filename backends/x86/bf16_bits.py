"""bf16 in about 12 bits a weight (`formats.bf16_bits`) as an encoding.

A byte shuffle looks up 16 exponents at once. Shifted by one bit, they are the lower 7 bits of a bf16 number's upper
byte and the upper bit of its lower byte. The vectors come out as `encodings.Float16` makes them of the plain matrix, in
the same order, so that products have the same bits. A step with exceptions, one of a hundred, is repaired in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from .compiler import Emitter
from .encodings import Encoding, Row, Vectors, of_bf16_bits

_BLOCK, _HALF = 32, 16  # weights of a block; codes a vector
_TABLE_BYTES = 16
_EXCEPTION = 15


class Bf16Bits(Encoding):
    """parts: low, codes and groups; int64 [3]: log2 of a group's rows, a group's bytes, and its last value's number."""

    size, num_bytes, most_direct = 1, 1, 4
    has_bf16 = True

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self.step = 4 * lanes
        self.functions = _repair(self.step)

    def row(self, e: Emitter, parts: Sequence[str], index: str, num_columns: str) -> Row:
        low = self.start(e, parts[0], index, num_columns)
        codes = self.start(e, parts[1], index, e.op(f"lshr i64 {num_columns}, 1"))
        shift, group_bytes, last = (e.op(f"load i64, ptr {e.address(parts[3], str(i), 'i64')}") for i in range(3))
        group = self.start(e, parts[2], e.op(f"lshr i64 {index}, {shift}"), group_bytes)
        table = e.op(f"load <16 x i8>, ptr {group}, align 1")
        upper, lower = e.op(f"lshr <16 x i8> {table}, splat (i8 1)"), e.op(f"shl <16 x i8> {table}, splat (i8 7)")
        return low, codes, upper, lower, e.address(group, str(_TABLE_BYTES)), last

    def vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        n = self.lanes
        for first, words in self.bf16_vectors(e, parts, row, column):
            for start in range(0, _HALF, n):
                some = words
                if n < _HALF:
                    some = e.shuffle("<16 x i16>", range(start, start + n), words)
                yield first + start, of_bf16_bits(e, some, n)

    def bf16_vectors(self, e: Emitter, parts: Sequence[str], row: Row, column: str) -> Vectors:
        """The step's weights as bits of bf16, <16 x i16> each."""
        low_start, codes_start, upper, lower, values, last = row[:6]
        lows = e.address(low_start, column)
        codes, words = list[str](), list[str]()
        for first in range(0, self.step, _BLOCK):
            place = e.op(f"lshr i64 {e.op(f'add i64 {column}, {first}')}, 1")
            both = e.op(f"load <16 x i8>, ptr {e.address(codes_start, place)}, align 1")
            codes += [e.op(f"and <16 x i8> {both}, splat (i8 15)"), e.op(f"lshr <16 x i8> {both}, splat (i8 4)")]
        for i, code in enumerate(codes):
            low = e.op(f"load <16 x i8>, ptr {e.address(lows, str(i * _HALF))}, align 1")
            words.append(_bf16(e, low, code, upper, lower))
        is_apart = [e.op(f"icmp eq <16 x i8> {code}, splat (i8 {_EXCEPTION})") for code in codes]
        for i, word in enumerate(self._repaired(e, words, is_apart, (lows, values, last))):
            yield i * _HALF, word

    def _repaired(self, e: Emitter, words: Sequence[str], is_apart: Sequence[str], places: Sequence[str]) -> list[str]:
        """The words with exceptions in place of what was made of their codes."""
        any_apart = is_apart[0]
        for other in is_apart[1:]:
            any_apart = e.op(f"or <16 x i1> {any_apart}, {other}")
        is_any = e.op(f"icmp ne i16 {e.op(f'bitcast <16 x i1> {any_apart} to i16')}, 0")
        name = is_any.removeprefix("%")
        e.do(f"br label %check_{name}")  # a block of its own, so that what follows can name where it comes from
        e.label(f"check_{name}")
        e.do(f"br i1 {is_any}, label %repair_{name}, label %whole_{name}")
        e.label(f"repair_{name}")
        mask = "0"
        for i, apart in enumerate(is_apart):
            bits = e.op(f"zext i16 {e.op(f'bitcast <16 x i1> {apart} to i16')} to i64")
            mask = e.op(f"or i64 {mask}, {e.op(f'shl i64 {bits}, {i * _HALF}')}")
        lows, values, last = places
        kinds = ", ".join(f"<16 x i16> {word}" for word in words)
        kind = "{ " + ", ".join(["<16 x i16>"] * len(words)) + " }"
        better = e.op(f"call {kind} @repair({kinds}, i64 {mask}, ptr {lows}, ptr {values}, i64 {last})")
        repaired = [e.op(f"extractvalue {kind} {better}, {i}") for i in range(len(words))]
        e.do(f"br label %whole_{name}")
        e.label(f"whole_{name}")
        return [
            e.op(f"phi <16 x i16> [ {word}, %check_{name} ], [ {other}, %repair_{name} ]")
            for word, other in zip(words, repaired, strict=True)
        ]


def _bf16(e: Emitter, low: str, code: str, upper: str, lower: str) -> str:
    """Sign and fraction, <16 x i8>, and codes of exponents → <16 x i16>."""
    shuffle = "call <16 x i8> @llvm.x86.ssse3.pshuf.b.128(<16 x i8> {}, <16 x i8> {})"
    sign = e.op(f"and <16 x i8> {low}, splat (i8 -128)")
    fraction = e.op(f"and <16 x i8> {low}, splat (i8 127)")
    top = e.op(f"or <16 x i8> {sign}, {e.op(shuffle.format(upper, code))}")
    bottom = e.op(f"or <16 x i8> {fraction}, {e.op(shuffle.format(lower, code))}")
    pairs = e.shuffle("<16 x i8>", [place for i in range(16) for place in (i, 16 + i)], bottom, top)
    return e.op(f"bitcast <32 x i8> {pairs} to <16 x i16>")


def _repair(step: int) -> str:
    """A function that puts exceptions in their places: bits of `mask` say which weights of the step they are.

    An exception's byte in `low` is the number of its value.
    """
    count = step // _HALF
    words = ", ".join(f"<16 x i16> %words{i}" for i in range(count))
    kind = "{ " + ", ".join(["<16 x i16>"] * count) + " }"
    e = Emitter()
    e.label("entry")
    memory = e.op(f"alloca [{step} x i16], align 32")
    places = [e.address(memory, str(i * _HALF), "i16") for i in range(count)]
    for i, place in enumerate(places):
        e.do(f"store <16 x i16> %words{i}, ptr {place}, align 32")
    e.do("br label %next")
    e.label("next")
    e.do("%left = phi i64 [ %mask, %entry ], [ %rest, %next ]")
    weight = e.op("call i64 @llvm.cttz.i64(i64 %left, i1 false)")
    place = e.address("%low", weight)
    number = e.op(f"zext i8 {e.op(f'load i8, ptr {place}')} to i64")
    number = e.op(f"call i64 @llvm.umin.i64(i64 {number}, i64 %last)")
    value = e.op(f"load i16, ptr {e.address('%values', number, 'i16')}, align 1")
    e.do(f"store i16 {value}, ptr {e.address(memory, weight, 'i16')}, align 2")
    e.do(f"%rest = and i64 %left, {e.op('sub i64 %left, 1')}")
    e.do(f"br i1 {e.op('icmp ne i64 %rest, 0')}, label %next, label %end")
    e.label("end")
    repaired = "poison"
    for i, place in enumerate(places):
        repaired = e.op(
            f"insertvalue {kind} {repaired}, <16 x i16> {e.op(f'load <16 x i16>, ptr {place}, align 32')}, {i}"
        )
    e.do(f"ret {kind} {repaired}")
    head = f"define internal {kind} @repair({words}, i64 %mask, ptr %low, ptr %values, i64 %last) cold"
    return e.function(head)
