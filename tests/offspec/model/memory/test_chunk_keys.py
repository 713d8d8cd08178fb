"""The mean keys of a text's chunks, and which of them a row attends to most."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offspec.model.memory.chunk_keys import CHUNK, ChunkKeys, num_chunks, positions_of
from offspec.model.memory.draft_window import NUM_SINKS

HEADS, DIM, LENGTH = 2, 8, NUM_SINKS + 9 * CHUNK + 5
LAYERS = [(HEADS, DIM), (HEADS, DIM), (1, 2 * DIM)]


def filled(length: int = LENGTH) -> list[Tensor]:
    """Keys of each layer, [length, heads, dim]."""
    return [torch.randn(length, heads, dim) for heads, dim in LAYERS]


def extended(chunks: ChunkKeys, keys: list[Tensor], length: int, most: int = 100) -> None:
    def keys_of(layer: int, first: int, last: int) -> Tensor:
        assert last - first <= most
        return keys[layer][positions_of(first).start : positions_of(last - 1).stop].transpose(0, 1)

    chunks.extend(num_chunks(length), keys_of, most)


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
@pytest.mark.parametrize("most", [2, 100])
def test_the_best_chunks_are_those_with_the_most_attention(steps: tuple[int, ...], most: int) -> None:
    torch.manual_seed(0)
    keys, chunks = filled(), ChunkKeys(len(LAYERS))
    for length in steps:
        extended(chunks, keys, length, most)
    queries = {layer: torch.randn(4, dim) for layer, (_, dim) in enumerate(LAYERS)}
    for count, end in ((1, 9), (3, 9), (3, 5), (8, 2)):
        found = chunks.best(queries, count, end)
        for layer, rows in queries.items():
            assert set(found[layer]) == expected(keys[layer], rows, min(count, end), end)


def test_another_text_has_its_own_chunks() -> None:
    torch.manual_seed(1)
    chunks, queries = ChunkKeys(len(LAYERS)), {layer: torch.randn(4, dim) for layer, (_, dim) in enumerate(LAYERS)}
    for length in (LENGTH, NUM_SINKS + 5 * CHUNK):
        keys = filled(length)
        chunks.clear()
        extended(chunks, keys, length)
        assert set(chunks.best(queries, 2, 4)[1]) == expected(keys[1], queries[1], 2, 4)
