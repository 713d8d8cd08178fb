"""KV entries of a beginning that several texts have in common, stored once (DeFT, 2404.00242).

A text's first entries are a `SharedBeginning`'s, which nobody writes to, and the others its own. Python's references
count the texts: the last one frees it. A text that goes back into its beginning shares less of it from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offspec.backends.x86.row_attention import BLOCK

from .kv_cache import EntriesBySlot, LayerCache

FEWEST_SHARED = 2 * BLOCK  # entries; fewer are copied


def most_shared(length: int) -> int:
    """How many of the first `length` entries may be shared: whole blocks of exact attention's, and not few."""
    whole = length // BLOCK * BLOCK
    return whole if whole >= FEWEST_SHARED else 0


@dataclass(frozen=True, eq=False)
class SharedBeginning:
    """The first `length` entries of texts. layers: full, one for each memory of a text that has KV entries."""

    layers: tuple[LayerCache, ...]
    length: int

    @property
    def nbytes(self) -> int:
        return sum(layers.nbytes for layers in self.layers)


class ContinuedLayers(EntriesBySlot):
    """Layers of one text: the first `num_shared` entries of `beginning`, then the text's own."""

    def __init__(self, beginning: LayerCache, num_shared: int, rest: LayerCache) -> None:
        self.beginning = beginning
        self.num_shared = num_shared
        self.rest = rest

    @property
    def num_layers(self) -> int:
        return self.rest.num_layers

    @property
    def format(self) -> str:
        return self.rest.format

    @property
    def most_read(self) -> int | None:
        return self.rest.most_read

    @property
    def nbytes(self) -> int:
        """The text's own bytes; those of a `SharedBeginning` are counted once for all texts."""
        return self.rest.nbytes

    def empty(self) -> LayerCache:
        return self.rest.empty()

    def reserve(self, capacity: int, in_use: int) -> None:
        self.rest.reserve(capacity - self.num_shared, in_use - self.num_shared)

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        self.rest.write(layer, keys, values, start - self.num_shared)

    def scatter(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self.rest.scatter(layer, keys, values, slots - self.num_shared)

    def move(self, start: int, slots: Tensor) -> None:
        self.rest.move(start - self.num_shared, slots - self.num_shared)

    def read(self, layer: int, end: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Of slots on both sides of `num_shared`, new tensors."""
        if end <= self.num_shared:
            return self.beginning.read(layer, end, first)
        behind = self.rest.read(layer, end - self.num_shared, max(first - self.num_shared, 0))
        if first >= self.num_shared:
            return behind
        before = self.beginning.read(layer, self.num_shared, first)
        keys, values = (torch.cat(pair, dim=1) for pair in zip(before, behind, strict=True))
        return keys, values

    def stored(self, layer: int, end: int, first: int = 0) -> list[Tensor]:
        """Views that nobody may write to, or, of slots on both sides of `num_shared`, new tensors."""
        if end <= self.num_shared:
            return self.beginning.stored(layer, end, first)
        behind = self.rest.stored(layer, end - self.num_shared, max(first - self.num_shared, 0))
        if first >= self.num_shared:
            return behind
        before = self.beginning.stored(layer, self.num_shared, first)
        return [torch.cat(pair, dim=-2) for pair in zip(before, behind, strict=True)]


def split_off(layers: LayerCache, length: int, in_use: int, capacity: int) -> ContinuedLayers:
    """Make the first `length` of a text's `in_use` entries a beginning, with own room up to `capacity` behind it.

    `layers` must not be used any more.
    """
    own_layers = _copy_of(layers, length, in_use, capacity)
    if isinstance(layers, ContinuedLayers):
        return ContinuedLayers(_copy_of(layers, 0, length, length), length, own_layers)
    layers.reserve(length, length)
    return ContinuedLayers(layers, length, own_layers)


def continued(layers: LayerCache, num_shared: int, end: int) -> LayerCache:
    """The first `end` entries of `layers`: shared as far as `num_shared`, the others copied."""
    own_layers = _copy_of(layers, num_shared, end, end)
    if not num_shared:
        return own_layers
    assert isinstance(layers, ContinuedLayers)
    assert num_shared <= layers.num_shared
    return ContinuedLayers(layers.beginning, num_shared, own_layers)


def _copy_of(layers: LayerCache, first: int, end: int, capacity: int) -> LayerCache:
    """The entries first .. end of `layers`, in a cache with room for first .. capacity."""
    copies = layers.empty()
    copies.reserve(capacity - first, 0)
    for layer in range(layers.num_layers):
        pairs = zip(copies.stored(layer, end - first), layers.stored(layer, end, first), strict=True)
        for mine, others in pairs:
            mine.copy_(others)
    return copies
