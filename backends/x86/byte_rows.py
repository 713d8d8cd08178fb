"""Rows of numbers in 8 bits, as products with GGUF's blocks take them (`byte_product`): a block has one scale.

A number is scale · code, and the largest one of a block has the code 127 or -127 (ggml's Q8_K and Q8_0). A block with a
number that is not finite has such a scale, so that products with it are not finite either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .compiler import Emitter
from .encodings import splat
from .loops import counted
from .row_steps import RowStep, kernel_of

GROUP, LANES = 16, 16  # codes that have a sum, and numbers of a vector


@dataclass(frozen=True)
class ByteLayout:
    """Where a block's numbers are. size: codes. sums: the place of int16 sums of each GROUP codes. scale: fp32."""

    size: int
    sums: int
    scale: int
    num_bytes: int


# In whole cache lines.
LAYOUTS = {32: ByteLayout(32, 32, 36, 64), 256: ByteLayout(256, 256, 288, 320)}


def to_bytes(x: Tensor, size: int) -> Tensor:
    """Rows [R, K] in blocks of `size` (of LAYOUTS), which K is a multiple of: uint8 [R, bytes]."""
    x, layout = x.contiguous(), LAYOUTS[size]
    num_rows, width = x.shape
    out = torch.empty(num_rows, width // size * layout.num_bytes, dtype=torch.uint8)
    kernel_of(KINDS[size], x.dtype)(num_rows, width, (x, out), (width, out.shape[1]))
    return out


class ToBytes(RowStep):
    """A row's blocks."""

    names, pointers = ("x", "out", "width", "bytes"), 2
    layout: ByteLayout

    def __init__(self, dtype: torch.dtype, lanes: int) -> None:
        super().__init__(dtype, LANES)  # LLVM makes two of a vector where registers have 8 numbers

    def emit(self, e: Emitter, words: dict[str, str]) -> None:
        layout, vector, ints = self.layout, f"<{LANES} x float>", f"<{LANES} x i32>"
        x = self.row(e, words["x"], words["width"])
        out = e.address(words["out"], e.op(f"mul i64 %index, {words['bytes']}"))

        def block(column: str) -> None:
            place = e.address(out, e.op(f"mul i64 {e.op(f'udiv i64 {column}, {layout.size}')}, {layout.num_bytes}"))
            firsts = range(0, layout.size, LANES)
            numbers = [self.load(e, x, e.op(f"add i64 {column}, {first}")) for first in firsts]
            most = "zeroinitializer"
            for each in numbers:
                size = e.op(f"call {vector} @llvm.fabs.v{LANES}f32({vector} {each})")
                most = e.op(f"call {vector} @llvm.maximum.v{LANES}f32({vector} {most}, {vector} {size})")
            largest = e.op(f"call float @llvm.vector.reduce.fmaximum.v{LANES}f32({vector} {most})")
            inverse = e.op(f"fdiv float 127.0, {largest}")
            is_zero = e.op(f"fcmp oeq float {largest}, 0.0")
            factor = splat(e, e.op(f"select i1 {is_zero}, float 0.0, float {inverse}"), LANES)
            for first, each in zip(firsts, numbers, strict=True):
                scaled = e.op(f"fmul {vector} {each}, {factor}")
                whole = e.op(f"call {vector} @llvm.rint.v{LANES}f32({vector} {scaled})")
                codes = e.op(f"call {ints} @llvm.fptosi.sat.v{LANES}i32.v{LANES}f32({vector} {whole})")
                stored = e.op(f"trunc {ints} {codes} to <{LANES} x i8>")
                e.do(f"store <{LANES} x i8> {stored}, ptr {e.address(place, str(first))}, align 16")
                total = e.op(f"call i32 @llvm.vector.reduce.add.v{LANES}i32({ints} {codes})")
                sums = e.address(place, str(layout.sums + 2 * (first // GROUP)))
                e.do(f"store i16 {e.op(f'trunc i32 {total} to i16')}, ptr {sums}, align 2")
            scale = e.op(f"fdiv float {largest}, 127.0")
            e.do(f"store float {scale}, ptr {e.address(place, str(layout.scale))}, align 4")

        counted(e, "block", "0", words["width"], layout.size, block)


class ToSmallBytes(ToBytes):
    layout = LAYOUTS[32]


class ToLargeBytes(ToBytes):
    layout = LAYOUTS[256]


KINDS = {32: ToSmallBytes, 256: ToLargeBytes}
