"""Which chunks of a text its last token attends to most: as counted head by head, in parts, and in a pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from offspec import Engine
from offspec.model.decoder import CachedDecoder, pass_together
from offspec.model.memory.chunk_attention import CHUNK, NUM_SINKS, ChunkAttention, num_chunks, positions_of
from offspec.model.memory.kv_formats import EIGHT_BIT
from offspec.model.pass_rows import TextRows

from ....pair import Pair, build_pair

LENGTH = NUM_SINKS + 9 * CHUNK + 5


def expected(keys: Tensor, queries: Tensor, count: int, end: int) -> set[int]:
    """By one head and chunk after the other. keys [kv_heads, S, head_dim], queries [heads, head_dim]."""
    group, sums = len(queries) // len(keys), torch.zeros(end)
    for head, query in enumerate(queries):
        attention = (keys[head // group] @ query).softmax(0)
        sums += torch.stack([attention[positions_of(chunk)].sum() for chunk in range(end)])
    sums[1:] += sums[:-1].clone()  # the text goes on
    return set(sums.topk(count).indices.tolist())


def test_chunks_follow_the_sinks() -> None:
    assert [num_chunks(length) for length in (0, NUM_SINKS, NUM_SINKS + CHUNK - 1, NUM_SINKS + CHUNK)] == [0, 0, 0, 1]
    assert positions_of(2) == slice(NUM_SINKS + 2 * CHUNK, NUM_SINKS + 3 * CHUNK)


@pytest.mark.parametrize("cuts", [[], [7, 70]])
def test_the_best_chunks_are_those_with_the_most_attention(cuts: list[int]) -> None:
    torch.manual_seed(0)
    attention = ChunkAttention(0)
    keys, queries = (torch.randn(layers, *shape) for layers, shape in ((2, (2, LENGTH, 8)), (2, (4, 8))))
    for layer in range(2):
        attention.observe(3 + layer, queries[layer], keys[layer].tensor_split(cuts, dim=1))
    for count, end in ((1, 9), (3, 9), (3, 5)):
        found = attention.best([3, 4, 9], count, end)
        assert {layer: set(chunks) for layer, chunks in found.items()} == {
            3 + layer: expected(keys[layer], queries[layer], count, end) for layer in range(2)
        }
    assert attention.best([3], 8, 5) == {}, "fewer chunks than are wanted"
    attention.clear()
    assert attention.best([3, 4], 1, 9) == {}


# ------------------------------------------------------------------------------------------------ in a pass


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pair: Pair = build_pair(tmp_path_factory.mktemp("pair"))
    with Engine.load(str(pair.target), draft="none", device="cpu", dtype="fp32") as engine:
        yield engine


def text_of(engine: Engine, length: int, *, least: int = 0) -> CachedDecoder:
    text = CachedDecoder(engine.target)
    pass_together([(text, TextRows.of_chain([3 + i % 7 for i in range(length - 1)]))])
    text.attention = ChunkAttention(least)
    return text


@pytest.mark.parametrize("kv", [None, EIGHT_BIT], ids=["plain", "8 bits"])
def test_a_pass_tells_what_its_last_certain_token_attends_to(
    engine: Engine, kv: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and beside another text the same; of a text that is too short, nothing."""
    if kv is not None:
        monkeypatch.setattr(engine.target, "make_layer_caches", EIGHT_BIT.layers)
    alone, beside, short = text_of(engine, LENGTH), text_of(engine, LENGTH), text_of(engine, 20, least=21)
    pass_together([(alone, TextRows.of_chain([5]))])
    pass_together([(each, TextRows.of_chain([5])) for each in (short, beside)])
    layers = range(engine.target.config.num_layers)
    assert short.attention is not None
    assert short.attention.best(layers, 1, 9) == {}
    found = []
    for text in (alone, beside):
        assert text.attention is not None
        found.append({layer: set(chunks) for layer, chunks in text.attention.best(layers, 3, 9).items()})
    assert found[0] == found[1]
    assert [*found[0]] == [*layers]
