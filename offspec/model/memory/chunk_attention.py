"""Which chunks of a long text a draft with a window reads beside its end: those that the target attends to most.

TriForce (2404.11912, section 4.1) draws a small KV cache from the target's: the text is cut into chunks, and a query
picks some of them by their mean keys. Here the target's own attention picks them, by all keys, while its pass has them
at hand: that takes one row of attention more, no memory, and brings more tokens per pass (docs/results/long-texts.md).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_SINKS = 4  # first entries that a window always has: StreamingLLM's number (2309.17453)
CHUNK = 16  # entries; the first chunk follows the sinks


def num_chunks(length: int) -> int:
    """Whole chunks in a text of `length` tokens."""
    return max(0, length - NUM_SINKS) // CHUNK


def positions_of(chunk: int) -> slice:
    """Of the chunk's tokens; also the slots of the chunk in that place of a cache which begins with sinks."""
    return slice(NUM_SINKS + chunk * CHUNK, NUM_SINKS + (chunk + 1) * CHUNK)


class ChunkAttention:
    """The attention of a text's last scored token to the text's chunks, in each layer: the sum over its heads.

    A chunk also counts what the chunk before it gets: a text that repeats an earlier one is there some tokens later.
    """

    def __init__(self, least_length: int) -> None:
        """least_length: of a text whose attention is wanted."""
        self.least_length = least_length
        self._by_layer: dict[int, Tensor] = {}  # [chunks]

    def clear(self) -> None:
        """Forget the text."""
        self._by_layer.clear()

    def observe(self, layer: int, queries: Tensor, keys: Iterable[Tensor]) -> None:
        """Record a token's attention to the text up to it.

        queries [heads, head_dim]: scaled as in attention. keys: in parts of [kv_heads, S, head_dim].
        """
        # Each part: [kv_heads, group, S].
        parts = (queries.view(part.shape[0], -1, part.shape[2]) @ part.transpose(1, 2) for part in keys)
        scores = torch.cat([*parts], dim=-1)
        attention = scores.float().softmax(-1).sum((0, 1))
        count = num_chunks(len(attention))
        whole = attention[NUM_SINKS : NUM_SINKS + count * CHUNK]
        chunks = whole.view(count, CHUNK).sum(-1)
        self._by_layer[layer] = chunks + F.pad(chunks[:-1], (1, 0))

    def best(self, layers: Iterable[int], count: int, end: int) -> dict[int, list[int]]:
        """Layer → the `count` chunks before chunk `end` with the most attention, in any order.

        Only of layers with as many chunks. All wait for the device once.
        """
        scores = {layer: self._by_layer[layer][:end] for layer in layers if layer in self._by_layer}
        chosen = {layer: chunks.topk(count).indices for layer, chunks in scores.items() if len(chunks) >= count}
        if not chosen:
            return {}
        return dict(zip(chosen, torch.stack([*chosen.values()]).tolist(), strict=True))
