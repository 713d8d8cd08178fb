"""bf16 matrices in about 12 bits a weight, without losing one: the layout, and packing and unpacking in plain torch.

The exponents of a trained matrix's weights say little: the 15 commonest of 16,384 neighbours cover 99.9 % or more. So
each weight is a byte with its sign and fraction, and a code of 4 bits for its exponent. A matrix [N, K] consists of

    low      uint8 [N, K]: sign (bit 7) and fraction (bits 0 to 6) of each weight
    codes    uint8 [N, ceil(K / 32) · 16]: of each 32 weights of a row, byte i has the code of weight i in its lower
             half, and that of weight 16 + i in its upper half
    groups   uint8 [G, 16 + 2 C]: of each group of rows the exponents that codes 0 to 14 stand for, a zero, and C
             values in bf16

Code 15 marks an exception, a weight with another exponent. Its byte in `low` is then not its sign and fraction, but
its place among the group's values. So everything lies at a fixed place, and any part of a row can be unpacked alone.
C is as large as the group with the most exceptions needs, at most 256. Where C is damaged or a place lies behind the
last value, the last one is taken: no file can make a kernel read elsewhere.

Exponents apart from the rest: DFloat11 (2504.11651), which codes them in 2.6 bits on average, by Huffman's method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from offspec.backends.choice import backend_of

BLOCK = 32  # weights of a row whose codes share 16 bytes
GROUP_WEIGHTS = 1 << 14  # of the rows of a group, unless one row has more
NUM_CODES, EXCEPTION, MOST_EXCEPTIONS = 15, 15, 256
TABLE_BYTES = 16
LEAST_GAIN = 0.9  # a matrix that would take a larger share of its bytes stays as it is
_TILE = 1 << 20  # weights at a time, so that temporary tensors stay in a core's cache


@dataclass(frozen=True)
class PackedBits:
    """A packed matrix; see the module for its parts."""

    shape: tuple[int, int]
    low: Tensor
    codes: Tensor
    groups: Tensor

    @property
    def num_bytes(self) -> int:
        return self.low.nbytes + self.codes.nbytes + self.groups.nbytes

    def rows(self, first: int, last: int) -> PackedBits:
        """Rows first .. last; first: the first row of a group."""
        height = group_rows(self.shape[1])
        assert first % height == 0
        some = slice(first, last)
        groups = self.groups[first // height : -(-last // height)]
        return PackedBits((last - first, self.shape[1]), self.low[some], self.codes[some], groups)


def group_rows(num_columns: int) -> int:
    """Rows that share a table: a power of two."""
    return 1 << max(0, (GROUP_WEIGHTS // max(1, num_columns)).bit_length() - 1)


def part_shapes(shape: tuple[int, int], num_values: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """The shapes of low, codes and groups, with room for so many values a group."""
    num_rows, num_columns = shape
    num_groups = -(-num_rows // group_rows(num_columns))
    return shape, (num_rows, -(-num_columns // BLOCK) * BLOCK // 2), (num_groups, TABLE_BYTES + 2 * num_values)


def pack(matrix: Tensor) -> PackedBits | None:
    """bf16 [N, K] on the CPU, contiguous → the same bits in fewer bytes; None where they would not be much fewer."""
    num_rows, num_columns = matrix.shape
    if not matrix.numel():
        return None
    height = group_rows(num_columns)
    step = height * max(1, _TILE // (height * num_columns))
    done = [_pack_groups(matrix[first : first + step], height) for first in range(0, num_rows, step)]
    num_values = max(1, *(int(counts.amax()) for _, _, _, counts in done))
    shape = (num_rows, num_columns)
    num_bytes = sum(map(math.prod, part_shapes(shape, num_values)))
    if num_values > MOST_EXCEPTIONS or num_bytes > LEAST_GAIN * matrix.nbytes:
        return None
    groups = torch.cat([_with_values(table, values, counts, num_values) for _, table, values, counts in done])
    low, codes = (torch.cat(parts) for parts in zip(*(parts for parts, _, _, _ in done), strict=True))
    return PackedBits(shape, low, codes, groups)


Parts = tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]


def _pack_groups(matrix: Tensor, height: int) -> Parts:
    """Some whole groups of rows → (low, codes), tables uint8 [G, 16], values int16 in order, their number by group."""
    num_rows, num_columns = matrix.shape
    num_groups = -(-num_rows // height)
    words = matrix.contiguous().view(torch.int16)
    exponents = (words >> 7).to(torch.uint8)  # cut off to 8 bits
    group = torch.arange(num_rows, dtype=torch.int32) // height
    places = (exponents.to(torch.int32) + (group << 8)[:, None]).flatten()
    counts, order = torch.bincount(places, minlength=num_groups << 8).view(-1, 256).topk(NUM_CODES, dim=1)
    order = torch.where(counts > 0, order, order[:, :1])  # what a group lacks has no code of its own
    code_of = torch.full((num_groups, 256), EXCEPTION, dtype=torch.uint8)
    code_of.scatter_(1, order.flip(1), torch.arange(NUM_CODES - 1, -1, -1, dtype=torch.uint8).expand_as(order))
    codes = code_of.flatten().index_select(0, places).view(num_rows, num_columns)
    low = (words & 0x7F | words >> 8 & 0x80).to(torch.uint8)
    found_rows, found_columns = (codes == EXCEPTION).nonzero(as_tuple=True)
    number = torch.bincount(group[found_rows], minlength=num_groups)
    first = number.cumsum(0) - number
    place = torch.arange(len(found_rows)) - first[group[found_rows].long()]
    low[found_rows, found_columns] = place.to(torch.uint8)
    tables = F.pad(order.to(torch.uint8), (0, TABLE_BYTES - NUM_CODES))
    # uint8 [R, K] → [R, ceil(K / 32) · 16], two codes a byte
    blocks = F.pad(codes, (0, -codes.shape[1] % BLOCK)).view(codes.shape[0], -1, 2, BLOCK // 2)
    return (low, (blocks[:, :, 0] | blocks[:, :, 1] << 4).flatten(1)), tables, words[found_rows, found_columns], number


def _with_values(tables: Tensor, values: Tensor, counts: Tensor, num_values: int) -> Tensor:
    """tables uint8 [G, 16] and, behind each, its own of the values int16, with room for so many."""
    placed = torch.zeros(len(tables), num_values, dtype=torch.int16)
    placed[torch.arange(num_values) < counts[:, None]] = values
    return torch.cat((tables, placed.view(torch.uint8)), dim=1)


def unpack(packed: PackedBits, out: Tensor) -> None:
    """packed [N, K] → out, contiguous [N, K] on its device, in any float dtype; bf16 gets the same bits.

    The plain twin of all kernels. Nothing in it waits for results of a device.
    """
    num_rows, num_columns = packed.shape
    height = group_rows(num_columns)
    step = height * max(1, backend_of(out.device).tile // max(1, height * num_columns))
    for first in range(0, num_rows, step):
        some = packed.rows(first, min(first + step, num_rows))
        words = _words(some, height)
        out[first : first + step] = words.view(torch.bfloat16)


def _words(packed: PackedBits, height: int) -> Tensor:
    """The bits of some whole groups of rows, int16 [R, K].

    One look-up a weight, in the bits that codes stand for and, behind them, the values of exceptions.
    """
    (num_rows, num_columns), device = packed.shape, packed.low.device
    tables, values = packed.groups[:, :TABLE_BYTES], packed.groups[:, TABLE_BYTES:].contiguous().view(torch.int16)
    choices = torch.cat(((tables.to(torch.int16) << 7).flatten(), values.flatten()))
    halves = packed.codes.view(num_rows, -1, 1, BLOCK // 2)
    codes = torch.cat((halves & 15, halves >> 4), dim=2).view(num_rows, -1)[:, :num_columns]
    is_apart, group = codes == EXCEPTION, torch.arange(num_rows, dtype=torch.int32, device=device)[:, None] // height
    num_values = values.shape[1]
    behind = tables.numel() + group * num_values + packed.low.clamp(max=num_values - 1)
    place = torch.where(is_apart, behind, codes + group * TABLE_BYTES)
    low = packed.low.to(torch.int16)
    rest = torch.where(is_apart, 0, low & 0x7F | low << 8 & -0x8000)
    return choices.index_select(0, place.flatten()).view(num_rows, num_columns) | rest
