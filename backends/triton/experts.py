"""Products of rows with the experts that they chose, on a GPU by Triton: one launch for one or two names of matrices.

Matrices lie anywhere in the device's memory and are given by their addresses, packed as GGUF's types (`gguf`) or
plain. So a layer of many experts takes two launches, whatever its rows chose, and the host need not know the choice.
Importing this module raises ImportError where Triton is not installed. With TRITON_INTERPRET=1 in the environment the
kernel runs on a CPU, slowly.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-unimported

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gguf import EXACT_TILES, LAYOUTS, STEP, BlockLayout, TritonTile, tiles_of

ALIGNED = 16  # bytes: of addresses, with which loads of several bytes are possible
PLAIN_BLOCK = 32  # numbers of a plain matrix that are taken like a block of a packed one


@triton.jit
def _bf16(block, part: tl.constexpr):
    weight = tl.arange(0, 32)[None, None, :]
    number = tl.load(block.to(tl.pointer_type(tl.bfloat16)) + weight).to(tl.float32)
    return number, tl.arange(0, 8)[None, :, None] * 32 + weight


@triton.jit
def _fp16(block, part: tl.constexpr):
    weight = tl.arange(0, 32)[None, None, :]
    number = tl.load(block.to(tl.pointer_type(tl.float16)) + weight).to(tl.float32)
    return number, tl.arange(0, 8)[None, :, None] * 32 + weight


@triton.jit
def _fp32(block, part: tl.constexpr):
    weight = tl.arange(0, 16)[None, None, :] + part * 16
    number = tl.load(block.to(tl.pointer_type(tl.float32)) + weight)
    return number, tl.arange(0, 8)[None, :, None] * 32 + weight


@triton.jit
def experts_kernel(
    x, order, experts, starts, firsts, addresses, out, num_places, num_experts, num_outputs, row_blocks, used, step,
    tile: tl.constexpr, size: tl.constexpr, parts: tl.constexpr, together: tl.constexpr,
    rows: tl.constexpr, outputs: tl.constexpr, alignment: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """The product of up to `rows` rows of one expert, from place `firsts[program 1]` on; see `multiply`.

    Programs whose place is not the first of such a tile, or whose expert has address 0, do nothing.
    """
    matrix = tl.program_id(2)
    first = tl.load(firsts + tl.program_id(1))
    expert = tl.load(experts + first)
    entry = addresses + matrix * step + expert
    address = tl.load(entry)
    if ((first - tl.load(starts + first)) % rows == 0) & (address != 0):
        output = tl.program_id(0) * outputs + tl.arange(0, outputs)
        output_there = tl.minimum(output, num_outputs - 1)
        place = tl.minimum(first + tl.arange(0, rows), num_places - 1)
        num_inputs = row_blocks * (STEP // together)
        x_rows = (tl.load(order + place).to(tl.int32) // used)[:, None] * num_inputs
        blocks = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), alignment)
        matrix_rows = output_there[:, None, None] * (row_blocks * size)
        total = tl.full((rows, outputs), 0.0, tl.float32)
        for number_of_step in range((row_blocks + together - 1) // together):
            block = number_of_step * together + tl.arange(0, together)[None, :, None]
            begin = blocks + (matrix_rows + tl.minimum(block, row_blocks - 1) * size)
            for part in tl.static_range(parts):
                number, inside = tile(begin, part)
                if together > 1:
                    number = tl.where(block < row_blocks, number, 0.0)
                weights = tl.reshape(number, (outputs, STEP // parts)).to(x.dtype.element_ty)
                column = number_of_step * STEP + tl.reshape(inside, (1, STEP // parts))
                some = tl.load(x + (x_rows + column), mask=column < num_inputs, other=0.0)
                total = tl.dot(some, tl.trans(weights), total, input_precision="ieee")
        if has_bias:
            bias = tl.load(entry + num_experts).to(tl.pointer_type(x.dtype.element_ty))
            total += tl.load(bias + output_there).to(tl.float32)[None, :]
        is_row = (first + tl.arange(0, rows) < num_places) & (tl.load(experts + place) == expert)
        row = tl.load(order + place)  # again: it would take registers all the time
        to = out + (matrix.to(tl.int64) * num_places + row)[:, None] * num_outputs + output[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=is_row[:, None] & (output < num_outputs)[None, :])


# fp32 takes twice as many registers, so it is taken in two parts.
PLAIN_LAYOUTS: Mapping[str, BlockLayout] = {
    "bf16": BlockLayout(_bf16, 2 * PLAIN_BLOCK, 8, 1),
    "fp16": BlockLayout(_fp16, 2 * PLAIN_BLOCK, 8, 1),
    "fp32": BlockLayout(_fp32, 4 * PLAIN_BLOCK, 8, 2, EXACT_TILES),
}
PLAIN_FORMS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def layout_of(form: str) -> BlockLayout | None:
    """Of a GGUF type, or of plain numbers; None for a form that the kernel does not know."""
    return LAYOUTS.get(form) or PLAIN_LAYOUTS.get(form)


def can_multiply(form: str, num_inputs: int) -> bool:
    """Whether the kernel knows matrices of this form with rows of so many inputs."""
    layout = layout_of(form)
    return layout is not None and num_inputs % (STEP.value // layout.together) == 0


def tiles_for(form: str, dtype: torch.dtype) -> tuple[TritonTile, ...]:
    """Of products of rows in this dtype with matrices of this form, by their rows; none of them spills."""
    return (PLAIN_LAYOUTS[form].tiles if form in PLAIN_LAYOUTS else tiles_of(form, dtype))[:2]


def tile_of(form: str, dtype: torch.dtype, rows: float) -> TritonTile:
    """Of products of about so many rows of an expert."""
    tiles = tiles_for(form, dtype)
    return next((tile for tile in tiles if tile.rows >= rows), tiles[-1])


def multiply(
    form: str,
    tile: TritonTile,
    x: Tensor,
    choice: tuple[Tensor, Tensor, Tensor, Tensor],
    addresses: Tensor,
    out: Tensor,
    *,
    step: int,
    **constants: int,
) -> None:
    """x [T, K] times the matrices [N, K] that each of its rows chose → out [matrices, R, N], contiguous, in x's dtype.

    R places, `used` for each row of x (or 1, where x has a row for each place), ordered by experts in `choice`: places
    `order`, `experts`, and `starts`, where each one's expert begins, int64 [R]; and int64 `firsts`, among which must be
    the places in that order where each tile of an expert's rows begins.
    addresses: int64 [num_matrices·step or more]: from the first matrix' entries on, an entry for each expert, 0 for
    those that are not computed; `step` entries on, the next matrix'. constants: `has_bias`, whether a matrix' entries
    are followed by those of its biases [N] in x's dtype; `alignment`, a divisor of all addresses, ALIGNED or 1.
    """
    layout = layout_of(form)
    assert layout is not None
    assert x.is_contiguous()
    num_matrices, num_places, num_outputs = out.shape
    order, experts, starts, firsts = choice
    num_rows, num_inputs = x.shape
    grid = triton.cdiv(num_outputs, tile.outputs), len(firsts), num_matrices
    experts_kernel[grid](
        x, order, experts, starts, firsts, addresses, out, num_places, addresses.shape[-1], num_outputs,
        num_inputs // (STEP.value // layout.together), num_places // num_rows, step,
        **layout.constants, **tile.constants, **constants, **tile.options,
    )  # fmt: skip
