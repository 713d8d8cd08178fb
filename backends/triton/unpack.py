"""AWQ's, GPTQ's and packed bf16 matrices → plain ones of fp32, bf16 or fp16 on a GPU, by Triton: one kernel a format.

Each number is computed in registers from the bytes that it needs and written once, where plain torch writes and reads a
tile several times. They are the same numbers: products of codes and 16-bit scales are exact in fp32. Triton comes with
torch's CUDA wheels; importing this module raises ImportError where it is not installed. With TRITON_INTERPRET=1 in the
environment the kernels run on a CPU, slowly.

The layouts are explained at `formats.grouped` and `formats.bf16_bits`. GGUF's types are in `gguf`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-unimported

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

INPUTS, OUTPUTS = tl.constexpr(16), tl.constexpr(128)  # of AWQ's and GPTQ's
WEIGHTS = tl.constexpr(1024)  # of a row of packed bf16


@triton.jit
def _awq(codes, zeros, scales, groups, out, num_inputs, num_outputs):
    row = tl.program_id(0).to(tl.int64) * INPUTS + tl.arange(0, INPUTS)[:, None]
    column = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    is_there = (row < num_inputs) & (column < num_outputs)
    words, shift = num_outputs // 8, ((column % 8 // 2) + column % 2 * 4).to(tl.int32) * 4
    group = tl.load(groups + row, mask=row < num_inputs, other=0)
    code = tl.load(codes + row * words + column // 8, mask=is_there, other=0) >> shift & 15
    zero = tl.load(zeros + group * words + column // 8, mask=is_there, other=0) >> shift & 15
    scale = tl.load(scales + group * num_outputs + column, mask=is_there, other=0).to(tl.float32)
    number = code.to(tl.float32) * scale - zero.to(tl.float32) * scale
    tl.store(out + row * num_outputs + column, number.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _gptq(codes, zeros, scales, groups, out, num_inputs, num_outputs, zero_offset):
    row = tl.program_id(0).to(tl.int64) * INPUTS + tl.arange(0, INPUTS)[:, None]
    column = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    is_there = (row < num_inputs) & (column < num_outputs)
    group = tl.load(groups + row, mask=row < num_inputs, other=0)
    code = tl.load(codes + row // 8 * num_outputs + column, mask=is_there, other=0) >> (row % 8 * 4).to(tl.int32) & 15
    word = tl.load(zeros + group * (num_outputs // 8) + column // 8, mask=is_there, other=0)
    zero = ((word >> (column % 8 * 4).to(tl.int32) & 15) + zero_offset) & 15
    scale = tl.load(scales + group * num_outputs + column, mask=is_there, other=0).to(tl.float32)
    number = code.to(tl.float32) * scale - zero.to(tl.float32) * scale
    tl.store(out + row * num_outputs + column, number.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _bf16_bits(low, codes, groups, out, num_columns, code_bytes, height, group_bytes):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WEIGHTS + tl.arange(0, WEIGHTS)
    is_there = column < num_columns
    byte = tl.load(low + row * num_columns + column, mask=is_there, other=0).to(tl.int32)
    place = column // 32 * 16 + column % 16
    pair = tl.load(codes + row * code_bytes + place, mask=is_there, other=0).to(tl.int32)
    code = pair >> (column % 32 // 16 * 4) & 15
    group = groups + row // height * group_bytes
    exponent = tl.load(group + code).to(tl.int32)
    bits = (byte & 128) << 8 | exponent << 7 | byte & 127
    is_apart = is_there & (code == 15)
    value = group + 16 + 2 * tl.minimum(byte, (group_bytes - 16) // 2 - 1)
    first = tl.load(value, mask=is_apart, other=0).to(tl.int32)
    second = tl.load(value + 1, mask=is_apart, other=0).to(tl.int32)
    bits = tl.where(is_apart, first | second << 8, bits)
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out + row * num_columns + column, bits.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=is_there)
    else:
        number = (bits << 16).to(tl.float32, bitcast=True)
        tl.store(out + row * num_columns + column, number.to(out.dtype.element_ty), mask=is_there)


def unpack_awq(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor, out: Tensor) -> None:
    """codes int32 [K, N/8], zeros int32 [G, N/8], scales [G, N], groups int64 [K] → out, contiguous [K, N]."""
    _awq[_grid(out)](codes, zeros, scales, groups, out, *out.shape)


def unpack_gptq(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor, out: Tensor, zero_offset: int) -> None:
    """codes int32 [K/8, N], zeros int32 [G, N/8], scales [G, N], groups int64 [K] → out, contiguous [K, N]."""
    _gptq[_grid(out)](codes, zeros, scales, groups, out, *out.shape, zero_offset)


def unpack_bf16_bits(low: Tensor, codes: Tensor, groups: Tensor, height: int, out: Tensor) -> None:
    """The parts of a packed bf16 matrix, and the rows of a group → out, contiguous [N, K]; bf16 gets the same bits."""
    num_rows, num_columns = out.shape
    grid = (num_rows, triton.cdiv(num_columns, WEIGHTS.value))
    _bf16_bits[grid](low, codes, groups, out, num_columns, codes.shape[1], height, groups.shape[1])


def _grid(out: Tensor) -> tuple[int, int]:
    return triton.cdiv(out.shape[0], INPUTS.value), triton.cdiv(out.shape[1], OUTPUTS.value)
