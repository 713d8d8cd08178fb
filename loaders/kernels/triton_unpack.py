"""Packed matrices → plain ones of fp32, bf16 or fp16 on a GPU, by Triton: one kernel a format.

Each number is computed in registers from the bytes that it needs and written once, where plain torch writes and reads a
tile several times. They are the same numbers: products of codes and 16-bit scales are exact in fp32. Triton comes with
torch's CUDA wheels; importing this module raises ImportError where it is not installed. With TRITON_INTERPRET=1 in the
environment the kernels run on a CPU, slowly.

The layouts are explained at `formats.gguf_blocks`, `formats.grouped` and `formats.bf16_bits`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-unimported

from __future__ import annotations

from collections.abc import Callable, Mapping

import triton
import triton.language as tl
from torch import Tensor

BLOCKS = tl.constexpr(8)  # of GGUF's that a program unpacks
INPUTS, OUTPUTS = tl.constexpr(16), tl.constexpr(128)  # of AWQ's and GPTQ's
WEIGHTS = tl.constexpr(1024)  # of a row of packed bf16


@triton.jit
def _half(place):
    """The fp16 number at an address of bytes, which need not be even, as fp32."""
    lower, upper = tl.load(place).to(tl.uint16), tl.load(place + 1).to(tl.uint16)
    return (lower | (upper << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _signed(byte):
    """A byte as a number from -128 to 127."""
    return byte.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _q8_0(blocks, out, num_blocks):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    weight = tl.arange(0, 32)[None, :]
    is_there = block < num_blocks
    start = blocks + tl.minimum(block, num_blocks - 1) * 34
    number = _signed(tl.load(start + 2 + weight)) * _half(start)
    tl.store(out + block * 32 + weight, number.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _q4_k(blocks, out, num_blocks):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    weight = tl.arange(0, 256)[None, :]
    is_there = block < num_blocks
    start = blocks + tl.minimum(block, num_blocks - 1) * 144
    group = weight // 32
    first, second, third = (tl.load(start + at + group % 4).to(tl.int32) for at in (4, 8, 12))
    scale = tl.where(group < 4, first & 63, (third & 15) | (first >> 6 << 4))
    low = tl.where(group < 4, second & 63, (third >> 4) | (second >> 6 << 4))
    code = tl.load(start + 16 + weight // 64 * 32 + weight % 32).to(tl.int32) >> (group % 2 * 4) & 15
    number = _half(start) * scale.to(tl.float32) * code.to(tl.float32) - _half(start + 2) * low.to(tl.float32)
    tl.store(out + block * 256 + weight, number.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _q6_k(blocks, out, num_blocks):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    weight = tl.arange(0, 256)[None, :]
    is_there = block < num_blocks
    start = blocks + tl.minimum(block, num_blocks - 1) * 210
    half, quarter, place = weight // 128, weight % 128 // 32, weight % 32
    lower = tl.load(start + half * 64 + quarter % 2 * 32 + place).to(tl.int32) >> (quarter // 2 * 4) & 15
    upper = tl.load(start + 128 + half * 32 + place).to(tl.int32) >> (quarter * 2) & 3
    scale = _half(start + 208) * _signed(tl.load(start + 192 + weight // 16))
    number = scale * ((lower | (upper << 4)) - 32).to(tl.float32)
    tl.store(out + block * 256 + weight, number.to(out.dtype.element_ty), mask=is_there)


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


_GGUF: Mapping[str, tuple[Callable[..., None], int]] = {"Q8_0": (_q8_0, 34), "Q4_K": (_q4_k, 144), "Q6_K": (_q6_k, 210)}


def unpacks(form: str) -> bool:
    """Whether there is a kernel for GGUF matrices of a type."""
    return form in _GGUF


def unpack_gguf(form: str, blocks: Tensor, out: Tensor) -> None:
    """blocks: uint8, contiguous, of a type that it `unpacks` → out, contiguous [N, K], on the same device."""
    kernel, num_bytes = _GGUF[form]
    num_blocks = blocks.numel() // num_bytes
    kernel[(triton.cdiv(num_blocks, BLOCKS.value),)](blocks, out, num_blocks)  # type: ignore[index]


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
