"""Products and attention on a GPU, by Triton, with the same bits for a row however many rows there are.

The order in which a sum goes along the inputs depends on the matrix alone: no inputs are split among programs. 16 rows
are a tile, which tensor cores take as one. Tiles of more rows read a matrix less often from the L2 cache; they are used
where the card computes the same bits with them, which is tried once (Hopper has other instructions for 64 rows).
Attention takes a row alone: its keys in the
order of their positions, from the slots where they lie, with the online softmax of FlashAttention (2205.14135). Sums
are fp32. Importing this module raises ImportError where Triton is not installed. With TRITON_INTERPRET=1 in the
environment the kernels run on a CPU, slowly.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, allow-any-unimported

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # of a tile for few rows, and query heads that share a key head, rounded up to it
KEYS = 32  # positions at a time


@dataclass(frozen=True)
class Tile:
    """Rows and outputs of a program, inputs at a time, and what Triton needs."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, int]:
        """Arguments of the kernel."""
        return {"rows": self.rows, "outputs": self.outputs, "inputs": self.inputs}

    @property
    def options(self) -> dict[str, int]:
        """Arguments of Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# By the bytes of a number. Programs of few outputs keep all processors busy also with one row.
TILES = {2: Tile(ROWS, 32, 128, 4, 3), 4: Tile(ROWS, 32, 32, 4, 2)}
TILES_OF_MANY = {2: (Tile(64, 64, 32, 4, 3), Tile(32, 64, 64, 4, 3)), 4: (Tile(32, 32, 32, 4, 2),)}
TRIED = 70, 500, 2000  # rows, outputs and inputs of the products by which tiles are compared


@triton.jit
def product_kernel(
    x, matrix, out, num_rows, num_outputs, num_inputs,
    rows: tl.constexpr, outputs: tl.constexpr, inputs: tl.constexpr,
):  # fmt: skip
    """x [num_rows, K] times matrix [num_outputs, K], both contiguous → out [num_rows, num_outputs].

    Programs with the same weights run at the same time, so that all but one of them read these from the L2 cache.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    output = tl.program_id(1) * outputs + tl.arange(0, outputs)
    x_rows = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * num_inputs
    matrix_rows = matrix + tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * num_inputs
    total = tl.full((rows, outputs), 0.0, tl.float32)
    for first in range(0, num_inputs, inputs):
        column = first + tl.arange(0, inputs)[None, :]
        is_there = column < num_inputs
        some = tl.load(x_rows + column, mask=is_there, other=0.0)
        weights = tl.load(matrix_rows + column, mask=is_there, other=0.0)
        total = tl.dot(some, tl.trans(weights), total, input_precision="ieee")
    place = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    is_there = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_there)


def multiply(x: Tensor, matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., K] times a plain matrix [N, K] of its dtype, contiguous → [..., N] in `dtype`, by default in x's."""
    many = x.numel() // matrix.shape[1] > ROWS
    return _multiply(x, matrix, dtype or x.dtype, tile_of_many(x.dtype, x.device) if many else TILES[x.dtype.itemsize])


def _multiply(x: Tensor, matrix: Tensor, dtype: torch.dtype, tile: Tile) -> Tensor:
    num_outputs, num_inputs = matrix.shape
    x, num_rows = x.contiguous(), x.numel() // num_inputs
    out = x.new_empty(*x.shape[:-1], num_outputs, dtype=dtype)
    grid = triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs)
    product_kernel[grid](x, matrix, out, num_rows, num_outputs, num_inputs, **tile.constants, **tile.options)
    return out


@cache
def tile_of_many(dtype: torch.dtype, device: torch.device) -> Tile:
    """The first of TILES_OF_MANY that gives the bits of TILES on this device, on random numbers; or that of TILES."""
    generator, few = torch.Generator().manual_seed(0), TILES[dtype.itemsize]
    *sizes, num_inputs = TRIED
    x, matrix = (torch.randn(size, num_inputs, generator=generator).to(device, dtype) for size in sizes)
    expected = _multiply(x, matrix, torch.float32, few)
    same = (t for t in TILES_OF_MANY[dtype.itemsize] if torch.equal(_multiply(x, matrix, torch.float32, t), expected))
    return next(same, few)


# Triton's own reductions cannot be interpreted by a module that is imported anew, as tests do.


@triton.jit
def _sum(one, other):
    return one + other


@triton.jit
def _largest(one, other):
    return tl.maximum(one, other)


@triton.jit
def attention_kernel(
    queries, keys, values, rows, slots, sinks, out, head_dim, scale, cap, key_head, key_slot, value_head, value_slot,
    group: tl.constexpr, padded_group: tl.constexpr, padded_dim: tl.constexpr, block: tl.constexpr,
    is_capped: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    """Of one row and one key head; see `attend`. Positions are taken in blocks that begin at multiples of `block`."""
    row, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    first, shared_end = tl.load(rows + row * 5), tl.load(rows + row * 5 + 1)
    offset, count = tl.load(rows + row * 5 + 2), tl.load(rows + row * 5 + 3)
    query, number = tl.arange(0, padded_group)[:, None], tl.arange(0, padded_dim)[None, :]
    place = (row * num_heads + head) * group * head_dim + query * head_dim + number
    is_query = (query < group) & (number < head_dim)
    some = tl.load(queries + place, mask=is_query, other=0.0)
    most = tl.full((padded_group,), -1e30, tl.float32)
    sums = tl.full((padded_group,), 0.0, tl.float32)
    total = tl.full((padded_group, padded_dim), 0.0, tl.float32)
    if has_sinks:
        of_group = tl.arange(0, padded_group)
        most = tl.load(sinks + head * group + of_group, mask=of_group < group, other=0.0)
        sums = tl.full((padded_group,), 1.0, tl.float32)
    for begin in range(first // block * block, shared_end + count, block):
        position = begin + tl.arange(0, block)
        is_single = position >= shared_end
        is_there = (position >= first) & (position < shared_end + count)
        slot = tl.load(slots + offset + position - shared_end, mask=is_there & is_single, other=0)
        slot = tl.where(is_single, slot, position)
        is_number = is_there[:, None] & (number < head_dim)
        key = tl.load(keys + head * key_head + slot[:, None] * key_slot + number, mask=is_number, other=0.0)
        value = tl.load(values + head * value_head + slot[:, None] * value_slot + number, mask=is_number, other=0.0)
        scores = tl.dot(some, tl.trans(key), input_precision="ieee") * scale
        if is_capped:
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
        scores = tl.where(is_there[None, :], scores, -1e30)
        new_most = tl.maximum(most, tl.reduce(scores, 1, _largest))
        weights = tl.where(is_there[None, :], tl.exp(scores - new_most[:, None]), 0.0)
        shrinkage = tl.exp(most - new_most)
        sums = sums * shrinkage + tl.reduce(weights, 1, _sum)
        weighted = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrinkage[:, None] + weighted
        most = new_most
    tl.store(out + place, (total / sums[:, None]).to(out.dtype.element_ty), mask=is_query)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention of queries [R, heads, D] to keys and values [kv_heads, slots, D] → [R, heads, D].

    rows, slots: of `row_attention.Visible`, on the device. scale, cap, sinks: of `row_attention.Scores`.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads, queries = keys.shape[0], queries.contiguous()
    group, out = num_heads // num_kv_heads, torch.empty_like(queries)
    strides = (keys.stride(0), keys.stride(1), values.stride(0), values.stride(1))
    has_sinks, is_capped = sinks is not None, cap is not None
    sinks = queries if sinks is None else sinks.float()
    attention_kernel[num_rows, num_kv_heads](
        queries, keys, values, rows, slots, sinks, out, head_dim, scale, cap or 1.0, *strides,
        **constants(group, head_dim), is_capped=is_capped, has_sinks=has_sinks, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out


def constants(group: int, head_dim: int) -> dict[str, int]:
    """Arguments of the kernel of attention, for query heads that share a key head, and the numbers of a head."""
    return {
        "group": group,
        "padded_group": max(ROWS, triton.next_power_of_2(group)),
        "padded_dim": max(16, triton.next_power_of_2(head_dim)),
        "block": KEYS,
    }
