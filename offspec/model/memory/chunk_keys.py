"""Which chunks of a long text a draft with a window reads beside its end, by the mean keys of all chunks.

TriForce (2404.11912, section 4.1) draws a small KV cache from the target's: the text is cut into chunks, and a query
picks those whose mean keys it attends to most. The means take a fraction 1 / (2 CHUNK) of the entries' memory, so they
stay on the device where the entries themselves lie in RAM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..block import memory_layouts
from ..config import ModelConfig
from .draft_window import NUM_SINKS
from .kv_cache import KVLayout, LayerCache

CHUNK = 32  # entries; the first chunk follows the sinks
LEAST_CHUNKS = 64  # room is made for so many more at once
MOST_READ = 4096  # entries at once, if a cache returns views of any number


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


class ChunkKeys:
    """The mean keys of a text's whole chunks, by layer."""

    def __init__(self) -> None:
        self._means: list[Tensor] = []  # [kv_heads, capacity, head_dim] of each layer
        self._length = 0  # chunks

    def clear(self) -> None:
        """Forget the text."""
        self._length = 0

    def extend(self, entries: Sequence[tuple[LayerCache, int]], num_tokens: int) -> None:
        """Add the chunks that a text of `num_tokens` tokens has by now.

        entries: where each layer's are: a cache, and the layer's place in it.
        """
        if (wanted := num_chunks(num_tokens)) <= self._length:
            return
        for layer, (cache, place) in enumerate(entries):
            most = max(1, (cache.most_read or MOST_READ) // CHUNK)
            for first in range(self._length, wanted, most):
                last = min(first + most, wanted)
                keys, _ = cache.read(place, positions_of(last - 1).stop, positions_of(first).start)
                by_chunk = keys.reshape(len(keys), last - first, CHUNK, -1)
                self._room(layer, keys, wanted)[:, first:last] = by_chunk.mean(2)
        self._length = wanted

    def _room(self, layer: int, keys: Tensor, wanted: int) -> Tensor:
        """The layer's means, with room for as many chunks as are wanted."""
        if layer == len(self._means):
            self._means.append(keys.new_empty(keys.shape[0], 0, keys.shape[2]))
        old = self._means[layer]
        if wanted > old.shape[1]:
            self._means[layer] = old.new_empty(old.shape[0], wanted + LEAST_CHUNKS, old.shape[2])
            self._means[layer][:, : self._length] = old[:, : self._length]
        return self._means[layer]

    def best(self, queries: Mapping[int, Tensor], count: int, end: int) -> dict[int, list[int]]:
        """Layer → the `count` chunks before chunk `end` that a row attends to most, over all heads; any order.

        queries: of layers, [heads, head_dim], scaled as in attention. All layers wait for the device once.
        """
        count = min(count, end)
        chosen = [self._attention(layer, rows, end).topk(count).indices for layer, rows in queries.items()]
        return dict(zip(queries, torch.stack(chosen).tolist(), strict=True))

    def _attention(self, layer: int, queries: Tensor, end: int) -> Tensor:
        """[end]: a row's attention to chunks, if each were its mean key; the sum over heads."""
        means = self._means[layer][:, :end]
        scores = queries.view(means.shape[0], -1, means.shape[2]) @ means.transpose(1, 2)
        return scores.float().softmax(-1).sum((0, 1))
