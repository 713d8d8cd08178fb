"""Made-up `LayerCache`s: one layer each, entries as fp32 copies or in 8 bit with a scale for each entry and head."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from offspec.model.memory.kv_cache import EntriesBySlot, KVLayout, LayerCache


class Fp32Layer(EntriesBySlot):
    """Loses nothing of 16-bit numbers. Keys and values apart, [capacity, kv_heads, head_dim], unlike `PlainLayers`."""

    num_layers, format = 1, "fp32"
    most_read: int | None = None

    def __init__(self, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._entries = [torch.zeros(0, layout.num_heads, layout.head_dim, device=device) for _ in range(2)]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._entries)

    def empty(self) -> Fp32Layer:
        other = copy(self)
        other._entries = [part.new_zeros(0, *part.shape[1:]) for part in self._entries]
        return other

    def stored(self, layer: int, end: int, first: int = 0) -> list[Tensor]:
        assert layer == 0
        return [part[first:end].transpose(0, 1) for part in self._entries]

    def reserve(self, capacity: int, in_use: int) -> None:
        grown = [part.new_zeros(capacity, *part.shape[1:]) for part in self._entries]
        for new, old in zip(grown, self._entries, strict=True):
            new[:in_use] = old[:in_use]
        self._entries = grown

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        self.scatter(layer, keys, values, torch.arange(start, start + len(keys), device=keys.device))

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        assert layer == 0
        for part, new in zip(self._entries, (keys, values), strict=True):
            part.index_copy_(0, slots, new.float())

    def read(self, layer: int, end: int, first: int = 0) -> tuple[Tensor, Tensor]:
        assert layer == 0
        keys, values = (part[first:end].transpose(0, 1).to(self._dtype) for part in self._entries)
        return keys, values

    def move(self, start: int, slots: Tensor) -> None:
        for part in self._entries:
            part[start : start + len(slots)] = part[slots]


class Int8Layer(Fp32Layer):
    """What is read is what 8 bits hold of what was written; each entry's largest number of a head is its scale."""

    format = "rounded"

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        super().scatter(layer, rounded(keys), rounded(values), slots)


def rounded(x: Tensor) -> Tensor:
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return (x / scale).round().to(torch.int8) * scale


def fp32_layers(layouts: Sequence[KVLayout], dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    return [Fp32Layer(layout, dtype, device) for layout in layouts]


def int8_layers(layouts: Sequence[KVLayout], dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    return [Int8Layer(layout, dtype, device) for layout in layouts]
