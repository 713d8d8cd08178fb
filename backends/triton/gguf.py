"""GGUF matrices on a GPU by Triton: unpacked to plain ones, or multiplied with few rows as they are.

A type is one function that computes a tile of numbers in registers from the bytes of some blocks, the same numbers as
`formats.gguf_blocks`: products of codes and 16-bit scales are exact in fp32. `unpack` writes them. `multiply` rounds
them to the dtype of the rows and multiplies there, so that a product reads the packed bytes once, and writes nothing
but its result. Importing this module raises ImportError where Triton is not installed. With TRITON_INTERPRET=1 in the
environment the kernels run on a CPU, slowly.

A step of 256 weights consists of 1 or 8 blocks (the dimension B below). Its weights come in parts, those that are
in the same bits of their bytes, of G groups with a scale each and S weights.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-unimported

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

STEP = tl.constexpr(256)  # weights
UNPACKED_STEPS = 8  # of a program that unpacks
NUM_PROGRAMS = 512  # of a product, at least: several for each multiprocessor; the inputs are split to get so many


@triton.jit
def _half(place):
    """The fp16 number at an address of bytes, which need not be even, as fp32."""
    lower, upper = tl.load(place).to(tl.uint16), tl.load(place + 1).to(tl.uint16)
    return (lower | (upper << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(place):
    return tl.load(place).to(tl.int32)


@triton.jit
def _signed(byte):
    """A byte as a number from -128 to 127."""
    return byte.to(tl.int8, bitcast=True).to(tl.float32)


# Each of these: addresses of blocks [N, B, 1], the part → fp32 [N, G, S], and the weights' places in a step [1, G, S].


@triton.jit
def _q8_0(block, part: tl.constexpr):
    group, weight = tl.arange(0, 8)[None, :, None], tl.arange(0, 16)[None, None, :] + part * 16
    return _signed(tl.load(block + 2 + weight)) * _half(block), group * 32 + weight


@triton.jit
def _q4_0(block, part: tl.constexpr):
    group, weight = tl.arange(0, 8)[None, :, None], tl.arange(0, 16)[None, None, :]
    code = _byte(block + 2 + weight) >> (part * 4) & 15
    return (code - 8).to(tl.float32) * _half(block), group * 32 + part * 16 + weight


@triton.jit
def _q4_1(block, part: tl.constexpr):
    group, weight = tl.arange(0, 8)[None, :, None], tl.arange(0, 16)[None, None, :]
    code = _byte(block + 4 + weight) >> (part * 4) & 15
    return code.to(tl.float32) * _half(block) + _half(block + 2), group * 32 + part * 16 + weight


@triton.jit
def _mxfp4(block, part: tl.constexpr):
    """Of a code: a sign, two bits of an exponent, one of a mantissa; the block's scale has fp32's exponent."""
    group, weight = tl.arange(0, 8)[None, :, None], tl.arange(0, 16)[None, None, :]
    code, exponent = _byte(block + 1 + weight) >> (part * 4) & 15, _byte(block)
    size = tl.where((code & 6) != 0, (2 + (code & 1)) << tl.maximum((code >> 1 & 3) - 1, 0), code & 1)
    scale = tl.where(exponent < 2, exponent + 1 << 21, exponent - 1 << 23).to(tl.float32, bitcast=True)
    return tl.where((code & 8) != 0, 0 - size, size).to(tl.float32) * scale, group * 32 + part * 16 + weight


@triton.jit
def _scale_and_low(block, group):
    """Q4_K's and Q5_K's: a scale and a minimum of 6 bit for each group, times their factors."""
    first, second, third = _byte(block + 4 + group % 4), _byte(block + 8 + group % 4), _byte(block + 12 + group % 4)
    scale = tl.where(group < 4, first & 63, (third & 15) | (first >> 6 << 4))
    low = tl.where(group < 4, second & 63, (third >> 4) | (second >> 6 << 4))
    return _half(block) * scale.to(tl.float32), _half(block + 2) * low.to(tl.float32)


@triton.jit
def _q4_k(block, part: tl.constexpr):
    chunk, weight = tl.arange(0, 4)[None, :, None], tl.arange(0, 32)[None, None, :]
    scale, low = _scale_and_low(block, 2 * chunk + part)
    code = _byte(block + 16 + chunk * 32 + weight) >> (part * 4) & 15
    return scale * code.to(tl.float32) - low, chunk * 64 + part * 32 + weight


@triton.jit
def _q5_k(block, part: tl.constexpr):
    chunk, weight = tl.arange(0, 4)[None, :, None], tl.arange(0, 32)[None, None, :]
    group = 2 * chunk + part
    scale, low = _scale_and_low(block, group)
    upper = _byte(block + 16 + weight) >> group & 1
    code = _byte(block + 48 + chunk * 32 + weight) >> (part * 4) & 15 | upper << 4
    return scale * code.to(tl.float32) - low, chunk * 64 + part * 32 + weight


@triton.jit
def _quarter(part: tl.constexpr):
    """Of types with 16 groups of 16: the half of a group [1, 4, 1], a weight's place among 32 [1, 4, 16], its group."""
    group, weight = tl.arange(0, 4)[None, :, None], tl.arange(0, 16)[None, None, :]
    half, place = group // 2, group % 2 * 16 + weight
    return half, place, half * 8 + part * 2 + group % 2


@triton.jit
def _q6_k(block, part: tl.constexpr):
    half, place, group = _quarter(part)
    lower = _byte(block + half * 64 + part % 2 * 32 + place) >> (part // 2 * 4) & 15
    upper = _byte(block + 128 + half * 32 + place) >> (part * 2) & 3
    scale = _half(block + 208) * _signed(tl.load(block + 192 + group))
    return scale * ((lower | (upper << 4)) - 32).to(tl.float32), half * 128 + part * 32 + place


@triton.jit
def _q3_k(block, part: tl.constexpr):
    half, place, group = _quarter(part)
    upper = _byte(block + place) >> (half * 4 + part) & 1
    code = _byte(block + 32 + half * 32 + place) >> (part * 2) & 3 | upper << 2
    lower = _byte(block + 96 + group % 8) >> (group // 8 * 4) & 15
    scale = lower | (_byte(block + 104 + group % 4) >> (group // 4 * 2) & 3) << 4
    number = _half(block + 108) * (scale - 32).to(tl.float32) * (code - 4).to(tl.float32)
    return number, half * 128 + part * 32 + place


@triton.jit
def _q2_k(block, part: tl.constexpr):
    half, place, group = _quarter(part)
    both = _byte(block + group)
    scale, low = _half(block + 80) * (both & 15).to(tl.float32), _half(block + 82) * (both >> 4).to(tl.float32)
    code = _byte(block + 16 + half * 32 + place) >> (part * 2) & 3
    return scale * code.to(tl.float32) - low, half * 128 + part * 32 + place


@triton.jit
def unpack_kernel(
    blocks, out, num_blocks, tile: tl.constexpr, size: tl.constexpr, parts: tl.constexpr, together: tl.constexpr,
    steps: tl.constexpr,
):  # fmt: skip
    """together: blocks of a step, of `size` bytes each. steps: of a program."""
    step = tl.program_id(0).to(tl.int64) * steps + tl.arange(0, steps)[:, None, None]
    block = step * together + tl.arange(0, together)[None, :, None]
    is_there = block < num_blocks
    start = blocks + tl.minimum(block, num_blocks - 1) * size
    for part in tl.static_range(parts):
        number, place = tile(start, part)
        tl.store(out + step * STEP + place, number.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def multiply_kernel(
    x, blocks, out, num_rows, num_outputs, row_blocks, steps, tile: tl.constexpr, size: tl.constexpr,
    parts: tl.constexpr, together: tl.constexpr, rows: tl.constexpr, outputs: tl.constexpr,
):  # fmt: skip
    """x [num_rows, K], contiguous, and blocks [num_outputs, row_blocks, size] → out [splits, num_rows, num_outputs].

    A program computes `rows` times `outputs` sums over `steps` steps of the inputs.
    """
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    num_inputs = row_blocks * (STEP // together)
    x_rows = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * num_inputs
    matrix_rows = blocks + tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None, None] * row_blocks * size
    total = tl.full((rows, outputs), 0.0, tl.float32)
    first, num_steps = tl.program_id(2) * steps, (row_blocks + together - 1) // together
    for step in range(first, tl.minimum(first + steps, num_steps)):
        block = step * together + tl.arange(0, together)[None, :, None]
        start = matrix_rows + tl.minimum(block, row_blocks - 1) * size
        for part in tl.static_range(parts):
            number, place = tile(start, part)
            if together > 1:
                number = tl.where(block < row_blocks, number, 0.0)
            weights = tl.reshape(number, (outputs, STEP // parts)).to(x.dtype.element_ty)
            column = step * STEP + tl.reshape(place, (1, STEP // parts))
            some = tl.load(x_rows + column, mask=column < num_inputs, other=0.0)
            total = tl.dot(some, tl.trans(weights), total, input_precision="ieee")
    is_there = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    row += tl.program_id(2) * num_rows
    place = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_there)


@dataclass(frozen=True)
class TritonTile:
    """The rows and outputs of a program that multiplies, and its warps. Tensor cores take at least 16 rows.

    num_stages: steps whose memory is read ahead; two leave room for several programs per multiprocessor.
    """

    rows: int
    outputs: int
    num_warps: int
    num_stages: int = 2

    @property
    def constants(self) -> dict[str, int]:
        """Arguments of the kernel."""
        return {"rows": self.rows, "outputs": self.outputs}

    @property
    def options(self) -> dict[str, int]:
        """Arguments of Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# A program reads its rows again for each of its tiles: the more rows, the more outputs it should compute with them.
# With tensor cores these spill next to no registers (`tests/backends/triton/test_compiles.py`).
TILES = (TritonTile(16, 32, 4), TritonTile(32, 32, 4), TritonTile(64, 64, 8))
# Of types that take more registers: with 64 rows they spill up to 4 KB a thread.
NARROW_TILES = (TritonTile(16, 32, 4), TritonTile(32, 64, 8))
# Of fp32, for which there are no tensor cores. Larger ones spill 2 to 5 KB, or take more shared memory than a card has.
EXACT_TILES = (TritonTile(16, 32, 4, num_stages=1),)


@dataclass(frozen=True)
class BlockLayout:
    """A type's function, the bytes of a block, the blocks of a step, its parts, and tiles of products in 16 bits."""

    tile: Any
    num_bytes: int
    together: int
    num_parts: int
    tiles: tuple[TritonTile, ...] = TILES

    @property
    def constants(self) -> dict[str, Any]:
        """Arguments of the kernels."""
        return {"tile": self.tile, "size": self.num_bytes, "together": self.together, "parts": self.num_parts}


LAYOUTS: Mapping[str, BlockLayout] = {
    "Q4_0": BlockLayout(_q4_0, 18, 8, 2),
    "Q4_1": BlockLayout(_q4_1, 20, 8, 2),
    "Q8_0": BlockLayout(_q8_0, 34, 8, 2),
    "MXFP4": BlockLayout(_mxfp4, 17, 8, 2),
    "Q2_K": BlockLayout(_q2_k, 84, 1, 4),
    "Q3_K": BlockLayout(_q3_k, 110, 1, 4),
    "Q4_K": BlockLayout(_q4_k, 144, 1, 2),
    "Q5_K": BlockLayout(_q5_k, 176, 1, 2),
    "Q6_K": BlockLayout(_q6_k, 210, 1, 4, NARROW_TILES),
}


def tiles_of(form: str, dtype: torch.dtype) -> tuple[TritonTile, ...]:
    """Of products of rows in this dtype with a matrix of this type, in the order of their rows."""
    return EXACT_TILES if dtype == torch.float32 else LAYOUTS[form].tiles


def unpack(form: str, blocks: Tensor, out: Tensor) -> None:
    """blocks: uint8, contiguous, of one of the types in LAYOUTS → out, contiguous [N, K], on the same device."""
    layout = LAYOUTS[form]
    num_blocks = blocks.numel() // layout.num_bytes
    grid = (triton.cdiv(num_blocks, UNPACKED_STEPS * layout.together),)
    unpack_kernel[grid](blocks, out, num_blocks, **layout.constants, steps=UNPACKED_STEPS)


def multiply(form: str, x: Tensor, blocks: Tensor) -> Tensor:
    """x [..., K] times the matrix [N, K] in blocks uint8 [N, bytes of a row], contiguous → [..., N] in x's dtype."""
    layout, num_outputs = LAYOUTS[form], blocks.shape[0]
    row_blocks, x = blocks.shape[1] // layout.num_bytes, x.contiguous()
    num_rows = x.numel() // x.shape[-1]
    tiles = tiles_of(form, x.dtype)
    tile = next((tile for tile in tiles if tile.rows >= num_rows), tiles[-1])
    programs = triton.cdiv(num_outputs, tile.outputs), triton.cdiv(num_rows, tile.rows)
    num_steps = triton.cdiv(row_blocks, layout.together)
    steps = triton.cdiv(num_steps, min(num_steps, triton.cdiv(NUM_PROGRAMS, programs[0] * programs[1])))
    num_splits = triton.cdiv(num_steps, steps)
    sums = x.new_empty(num_splits, num_rows, num_outputs, dtype=x.dtype if num_splits == 1 else torch.float32)
    multiply_kernel[(*programs, num_splits)](
        x, blocks, sums, num_rows, num_outputs, row_blocks, steps, **layout.constants, **tile.constants, **tile.options
    )
    product = sums[0] if num_splits == 1 else sums.sum(0).to(x.dtype)
    return product.view(*x.shape[:-1], num_outputs)
