"""Which chunks of a long text a draft with a window reads beside its end, by the mean keys of all chunks.

TriForce (2404.11912, section 4.1) draws a small KV cache from the target's: the text is cut into chunks, and a query
picks those whose mean keys it attends to most. The means take a fraction 1 / (2 CHUNK) of the entries' memory, so they
stay on the device where the entries themselves lie in RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..block import memory_layouts
from ..config import ModelConfig
from .draft_window import NUM_SINKS
from .kv_cache import KVLayout

CHUNK = 32  # entries; the first chunk follows the sinks
LEAST_CHUNKS = 64  # room is made for so many more at once


def num_chunks(length: int) -> int:
    """Whole chunks in a text of `length` tokens."""
    return max(0, length - NUM_SINKS) // CHUNK


def positions_of(chunk: int) -> slice:
    """Of the chunk's tokens; also the slots of the chunk in that place of a cache which begins with sinks."""
    return slice(NUM_SINKS + chunk * CHUNK, NUM_SINKS + (chunk + 1) * CHUNK)


def chunk_bytes(config: ModelConfig, itemsize: int, num_tokens: int, num_texts: int) -> int:
    """Bytes of the mean keys of `num_texts` texts with `num_tokens` tokens together, the room for more included."""
    layouts = [layout for layer in memory_layouts(config) for layout in layer if isinstance(layout, KVLayout)]
    a_chunk = itemsize * sum(layout.num_heads * layout.head_dim for layout in layouts)
    return a_chunk * (num_tokens // CHUNK + num_texts * LEAST_CHUNKS)


KeysOf = Callable[[int, int, int], Tensor]  # layer, first and last chunk → [kv_heads, (last - first) * CHUNK, head_dim]


class ChunkKeys:
    """The mean keys of a text's first chunks, by layer."""

    def __init__(self, num_layers: int) -> None:
        self._means: list[Tensor | None] = [None] * num_layers  # [kv_heads, capacity, head_dim]
        self._length = 0  # chunks

    def clear(self) -> None:
        """Forget the text."""
        self._length = 0

    def extend(self, length: int, keys_of: KeysOf, most: int) -> None:
        """Have the text's first `length` chunks. keys_of: a layer's keys of some of them, at most `most` at once."""
        for first in range(self._length, length, most):
            last = min(first + most, length)
            for layer in range(len(self._means)):
                keys = keys_of(layer, first, last)
                by_chunk = keys.reshape(len(keys), last - first, CHUNK, -1)
                self._room(layer, keys, length)[:, first:last] = by_chunk.mean(2)
            self._length = last

    def _room(self, layer: int, keys: Tensor, length: int) -> Tensor:
        """The layer's means, with room for `length` chunks."""
        old = self._means[layer]
        if old is not None and length <= old.shape[1]:
            return old
        grown = keys.new_empty(keys.shape[0], length + LEAST_CHUNKS, keys.shape[2])
        if old is not None:
            grown[:, : self._length] = old[:, : self._length]
        self._means[layer] = grown
        return grown

    def best(self, queries: Mapping[int, Tensor], count: int, end: int) -> dict[int, list[int]]:
        """Layer → the `count` chunks before chunk `end` that a row attends to most, over all heads; any order.

        queries: of layers, [heads, head_dim], scaled as in attention. All layers wait for the device once.
        """
        count = min(count, end)
        chosen = [self._attention(layer, rows, end).topk(count).indices for layer, rows in queries.items()]
        return dict(zip(queries, torch.stack(chosen).tolist(), strict=True))

    def _attention(self, layer: int, queries: Tensor, end: int) -> Tensor:
        """[end]: a row's attention to chunks, if each were its mean key; the sum over heads."""
        means = self._means[layer]
        assert means is not None, "a layer without chunks"
        means = means[:, :end]
        scores = queries.view(means.shape[0], -1, means.shape[2]) @ means.transpose(1, 2)
        return scores.float().softmax(-1).sum((0, 1))
