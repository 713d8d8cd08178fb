"""The mean keys of a text's chunks, and which of them a row attends to most."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offspec.model.memory.chunk_keys import CHUNK, ChunkKeys, num_chunks, positions_of
from offspec.model.memory.draft_window import NUM_SINKS
from offspec.model.memory.kv_cache import KVLayout, LayerCache, plain_layers
from offspec.model.memory.kv_formats import EIGHT_BIT

HEADS, DIM, LENGTH = 2, 8, NUM_SINKS + 9 * CHUNK + 5
LAYOUTS = [KVLayout(HEADS, DIM), KVLayout(HEADS, DIM), KVLayout(1, 2 * DIM)]


def filled(number: int, length: int = LENGTH) -> tuple[list[tuple[LayerCache, int]], list[Tensor]]:
    """Where the entries of LAYOUTS are, and the keys, [length, heads, dim] each."""
    torch.manual_seed(number)
    made = EIGHT_BIT.layers if number else plain_layers
    caches = made(LAYOUTS, torch.float32, torch.device("cpu"))
    entries = [(cache, layer) for cache in caches for layer in range(cache.num_layers)]
    keys = [torch.randn(length, layout.num_heads, layout.head_dim) for layout in LAYOUTS]
    for cache in caches:
        cache.reserve(length, 0)
    for (cache, layer), each in zip(entries, keys, strict=True):
        cache.write(layer, each, torch.zeros_like(each), 0)
    return entries, keys


def expected(keys: Tensor, queries: Tensor, count: int, end: int) -> set[int]:
    """One head and chunk after the other."""
    group = len(queries) // keys.shape[1]
    sums = torch.zeros(end)
    for head, query in enumerate(queries):
        means = torch.stack([keys[positions_of(chunk), head // group].mean(0) for chunk in range(end)])
        sums += (means @ query).softmax(0)
    return set(sums.topk(count).indices.tolist())


def test_chunks_follow_the_sinks() -> None:
    assert [num_chunks(length) for length in (0, NUM_SINKS, NUM_SINKS + CHUNK - 1, NUM_SINKS + CHUNK)] == [0, 0, 0, 1]
    assert positions_of(2) == slice(NUM_SINKS + 2 * CHUNK, NUM_SINKS + 3 * CHUNK)


@pytest.mark.parametrize("steps", [(LENGTH,), (3, 40, 41, 90, LENGTH)], ids=["at once", "bit by bit"])
@pytest.mark.parametrize("number", [0, 1], ids=["plain", "8 bits"])
def test_the_best_chunks_are_those_with_the_most_attention(steps: tuple[int, ...], number: int) -> None:
    (entries, keys), chunks = filled(number), ChunkKeys()
    for length in steps:
        chunks.extend(entries, length)
    queries = {layer: torch.randn(4, layout.head_dim) for layer, layout in enumerate(LAYOUTS)}
    for count, end in ((1, 9), (3, 9), (3, 5), (8, 2)):
        found = chunks.best(queries, count, end)
        for layer, rows in queries.items():
            assert set(found[layer]) == expected(keys[layer], rows, min(count, end), end)


def test_another_text_has_its_own_chunks() -> None:
    chunks, queries = ChunkKeys(), {layer: torch.randn(4, layout.head_dim) for layer, layout in enumerate(LAYOUTS)}
    for length in (LENGTH, NUM_SINKS + 5 * CHUNK):
        entries, keys = filled(0, length)
        chunks.clear()
        chunks.extend(entries, length)
        assert set(chunks.best(queries, 2, 4)[1]) == expected(keys[1], queries[1], 2, 4)
