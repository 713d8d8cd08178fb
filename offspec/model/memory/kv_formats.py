"""Formats of KV entries: as attention computes with them, or packed into integers of few bits.

Each entry is packed by itself: every group of numbers of one token and one head has its own scale. So entries do not
depend on what shares their pass. Keys need more bits than values, because their errors pass through the softmax
(KIVI, 2402.02750, section 3.2, sees the same). `--kv-cache 4` therefore has keys in 6 bits and values in 4; with both
in 4 bits, the perplexity of SmolLM2-135M grew by 6 % instead of 1 % (docs/results/long-texts.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.device_kinds import DeviceKind, kind_of

from .kv_cache import KVLayout, LayerCache, MemoryLayout, PlainLayers, StoredRows, neighbours
from .window_layers import kept_rows

LEAST_UNPACKED = 256  # entries that are unpacked at once, at least


@dataclass(frozen=True)
class Coding:
    """How the numbers of one head are packed: integers q of `bits` bits, 4, 6 or 8, in groups with a scale each.

    x = scale * q with q in -127 .. 127 for 8 bits, otherwise x = scale * (q + zero) with q from 0 on. Scales are fp16,
    zeros int8. A head's row of bytes: the low 4 bits of all q, two per byte; the other 2 bits, four per byte; scales;
    zeros. With 8 bits: all q, then scales.
    """

    bits: int
    group: int

    def __str__(self) -> str:
        """The name of the layout, for files; another layout needs another name."""
        return f"{self.bits} bit by {self.group}"

    def width(self, head_dim: int) -> int:
        """Bytes of a head's row: even, so that scales are aligned."""
        return sum(self._sizes(head_dim))

    def pack(self, numbers: Tensor) -> Tensor:
        """Numbers [..., head_dim] → uint8 [..., width]."""
        num_groups, group = self._groups(numbers.shape[-1])
        padded = F.pad(numbers.float(), (0, num_groups * group - numbers.shape[-1]))
        grouped = _in_groups(padded, num_groups)
        if self.bits == 8:
            scales = _as_scales(grouped.abs().amax(-1) / 127)
            codes = _divided(grouped, scales).round_().clamp_(-127, 127).to(torch.int8)
            return torch.cat((codes.flatten(-2).view(torch.uint8), scales.view(torch.uint8)), dim=-1)
        return self._packed_from_zero(grouped)

    def _packed_from_zero(self, grouped: Tensor) -> Tensor:
        """A scale of a group [..., groups, group] covers its range, and keeps the zero within int8."""
        low, high, top = grouped.amin(-1), grouped.amax(-1), 2**self.bits - 1
        scales = _as_scales(torch.maximum((high - low) / top, torch.maximum(low.abs(), high.abs()) / 120))
        zeros = _divided(low[..., None], scales).round_().clamp_(-128, 127)
        codes = _divided(grouped, scales).round_().sub_(zeros).clamp_(0, top).to(torch.uint8).flatten(-2)
        parts = [_joined(codes & 15, 4)]
        if self.bits == 6:
            parts.append(_joined(codes >> 4, 2))
        parts += [scales.view(torch.uint8), zeros[..., 0].to(torch.int8).view(torch.uint8)]
        row = torch.cat(parts, dim=-1)
        return F.pad(row, (0, row.shape[-1] % 2))

    def unpack(self, rows: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """uint8 [..., width] → numbers [..., head_dim] in `dtype`, computed in fp32."""
        num_groups, _ = self._groups(head_dim)
        *parts, stored_scales, stored_zeros, _ = rows.split_with_sizes(self._sizes(head_dim), dim=-1)
        scales = stored_scales.view(torch.float16).float()[..., None]
        if self.bits == 8:
            codes = _in_groups(parts[0].view(torch.int8), num_groups)
            unpacked = torch.empty(codes.shape, dtype=dtype, device=rows.device)
            torch.mul(codes, scales, out=unpacked)  # in one kernel on a GPU, without the product in fp32
        else:
            codes = _apart(parts[0], 4)
            if self.bits == 6:
                codes = codes | (_apart(parts[1], 2) << 4)
            offsets = stored_zeros.view(torch.int8)[..., None] * scales
            unpacked = torch.addcmul(offsets, _in_groups(codes, num_groups).float(), scales).to(dtype)
        return unpacked.flatten(-2)[..., :head_dim]

    def _groups(self, head_dim: int) -> tuple[int, int]:
        """The number of groups of a head, and of numbers in each: a multiple of 8, `group` or a little more at most.

        Heads that cannot be divided are padded with zeros.
        """
        for group in range(self.group * 5 // 32 * 8, 8, -8):
            if head_dim % group == 0:
                return head_dim // group, group
        num_groups = -(-head_dim // self.group)
        return num_groups, -(-head_dim // (8 * num_groups)) * 8

    def _sizes(self, head_dim: int) -> list[int]:
        """Bytes of the parts of a row, the last one without meaning."""
        num_groups, group = self._groups(head_dim)
        numbers = num_groups * group
        if self.bits == 8:
            return [numbers, 2 * num_groups, 0, 0]
        codes = [numbers // 2, *([numbers // 4] if self.bits == 6 else [])]
        return [*codes, 2 * num_groups, num_groups, (sum(codes) + num_groups) % 2]


def _in_groups(numbers: Tensor, num_groups: int) -> Tensor:
    """[..., N] → [..., groups, N / groups]"""
    return numbers.reshape(*numbers.shape[:-1], num_groups, -1)


def _as_scales(scales: Tensor) -> Tensor:
    return scales.clamp(max=torch.finfo(torch.float16).max).to(torch.float16)


def _divided(grouped: Tensor, scales: Tensor) -> Tensor:
    """grouped [..., groups, N] / scales [..., groups]; 0 where a scale is 0, which stands for zeros."""
    divisors = scales.float()[..., None]
    return grouped / torch.where(divisors == 0, torch.inf, divisors)


def _joined(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., N] of `bits` bits each → [..., N * bits / 8]; byte i has codes i, i + N * bits / 8, ..."""
    packed, *others = codes.chunk(8 // bits, dim=-1)
    for index, other in enumerate(others, start=1):
        packed = packed | (other << (bits * index))
    return packed


def _apart(joined: Tensor, bits: int) -> Tensor:
    """The inverse of `_joined`."""
    return torch.cat([(joined >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], dim=-1)


class PackedLayers(StoredRows):
    """Layers of one layout, packed: keys and values as uint8 [layers, kv_heads, capacity, width] each.

    Keys alone, if they are also the values.
    """

    def __init__(
        self,
        num_layers: int,
        layout: KVLayout,
        codings: tuple[Coding, Coding],
        *,
        dtype: torch.dtype,
        device: torch.device,
        by_slot: bool = False,
    ) -> None:
        """codings: of keys and of values. dtype: attention's."""
        self._codings = codings[: layout.num_stored]
        widths = [coding.width(layout.head_dim) for coding in self._codings]
        shape = num_layers, layout.num_heads, 0
        empty = [torch.empty(*shape, w, dtype=torch.uint8, device=device) for w in widths]
        super().__init__(num_layers, empty, by_slot=by_slot)
        self.format = " and ".join(map(str, self._codings))
        self.most_read = most_unpacked(layout, kind_of(device))
        self._head_dim = layout.head_dim
        self._dtype = dtype

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        for coding, rows, given in zip(self._codings, self._rows, (keys, values), strict=False):
            rows[layer, :, start : start + len(given)] = coding.pack(given).transpose(0, 1)

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for coding, rows, given in zip(self._codings, self._rows, (keys, values), strict=False):
            rows[layer].index_copy_(1, slots, coding.pack(given).transpose(0, 1))

    def read(self, layer: int, end: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """New tensors."""
        unpacked = [
            coding.unpack(rows[layer, :, first:end], self._head_dim, self._dtype)
            for coding, rows in zip(self._codings, self._rows, strict=True)
        ]
        return unpacked[0], unpacked[-1]


def most_unpacked(layout: KVLayout, device: DeviceKind) -> int:
    """Entries that are unpacked at once."""
    return max(LEAST_UNPACKED, device.unpacked_numbers // layout.numbers)


@dataclass(frozen=True)
class Unpacking:
    """What unpacking keys and values costs.

    For each number: bytes that are read and written, and bytes held beside the result. operations: on tensors, of a
    part of both.
    """

    traffic: int = 0
    held: int = 0
    operations: int = 0


@dataclass(frozen=True)
class KVFormat:
    """A format of KV entries, by its name as `kv_cache`.

    codings: of keys and of values; None if they stay as attention computes with them. in_steps, in_kernels: what
    unpacking costs where numbers are converted apart, or while operators compute (`DeviceKind.converts_in_kernels`).
    """

    name: str
    codings: tuple[Coding, Coding] | None = None
    in_steps: Unpacking = Unpacking()
    in_kernels: Unpacking = Unpacking()

    def unpacking(self, device: DeviceKind) -> Unpacking:
        return self.in_kernels if device.converts_in_kernels else self.in_steps

    @property
    def is_plain(self) -> bool:
        return self.codings is None

    def entry_bytes(self, layout: KVLayout, itemsize: int) -> int:
        """Bytes of one token's entry in a layer. itemsize: of attention's dtype."""
        if self.codings is None:
            return layout.numbers * itemsize
        return layout.num_heads * sum(coding.width(layout.head_dim) for coding in self.codings[: layout.num_stored])

    def unpacked_bytes(
        self, layout: KVLayout, num_keys: int, itemsize: int, device: DeviceKind, *, is_whole: bool = False
    ) -> int:
        """Bytes of the entries that attention unpacks at once: of `num_keys` keys, or of all of them if `is_whole`."""
        if self.codings is None:
            return 0
        entries = num_keys if is_whole else min(num_keys, most_unpacked(layout, device))
        held = layout.num_stored * itemsize + self.unpacking(device).held
        return layout.num_heads * layout.head_dim * entries * held

    def memory_bytes(self, layout: MemoryLayout, num_entries: int, itemsize: int, num_texts: int = 1) -> int:
        """Bytes of one layer's memory of texts with room for `num_entries` entries together."""
        if isinstance(layout, KVLayout):
            return kept_rows(layout, num_entries, num_texts) * self.entry_bytes(layout, itemsize)
        return layout.nbytes(num_entries, itemsize)

    def layers(self, layouts: Sequence[KVLayout], dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
        """A `MakeLayerCaches`: empty caches for these layers; neighbours with equal layouts share memory."""
        return [self.of_layout(count, layout, dtype, device) for layout, count in neighbours(layouts)]

    def of_layout(
        self, num_layers: int, layout: KVLayout, dtype: torch.dtype, device: torch.device, *, by_slot: bool = False
    ) -> PlainLayers | PackedLayers:
        """An empty cache for layers of one layout. by_slot: see `StoredRows`."""
        if self.codings is None:
            return PlainLayers(num_layers, layout, dtype=dtype, device=device, by_slot=by_slot)
        return PackedLayers(num_layers, layout, self.codings, dtype=dtype, device=device, by_slot=by_slot)


PLAIN = KVFormat("16")
EIGHT_BIT = KVFormat("8", (Coding(8, 32), Coding(8, 32)), Unpacking(12, 10, 4), Unpacking(4, 1, 4))
FOUR_BIT = KVFormat("4", (Coding(6, 64), Coding(4, 32)), Unpacking(24, 10, 38), Unpacking(24, 10, 38))
KV_FORMATS = {each.name: each for each in (PLAIN, EIGHT_BIT, FOUR_BIT)}
