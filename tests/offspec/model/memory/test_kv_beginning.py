"""KV entries of a common beginning: stored once, and each text's logits are those of its twin with copies."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from weakref import ref

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT, FAST
from offspec.loaders.streaming.link import CopyStream
from offspec.model.config import ModelConfig, read_config
from offspec.model.decoder import CachedDecoder, Decoder, random_decoder, score_together
from offspec.model.memory.kv_beginning import FEWEST_SHARED, most_shared
from offspec.model.memory.kv_formats import KV_FORMATS, PLAIN, KVFormat
from offspec.model.memory.kv_in_ram import EntriesInRam
from offspec.model.memory.sequence_cache import total_bytes, total_entries
from offspec.model.pass_rows import TextRows

from ....fakes import FAMILIES, config_json
from ....machines import lanes, needs_kernels
from ..test_decoder import NO_NODES, Tree, random_tokens

CPU = torch.device("cpu")
LENGTH = 105  # of the common beginning: three blocks are shared, and nine entries copied
NUM_SHARED = 96
TREE = Tree(random_tokens(6, 7), [-1, -1, 0, 0, 1, 2])
COMMON = random_tokens(LENGTH)


def decoder_of(
    family: str = "llama-gqa", kv: KVFormat = PLAIN, *, dtype: torch.dtype = torch.bfloat16, in_ram: bool = False
) -> Decoder:
    """Exact in 16 bits."""
    config = read_config(config_json(FAMILIES[family]))
    assert isinstance(config, ModelConfig)
    decoder = random_decoder(config, 3, dtype=dtype, device=CPU)
    decoder.make_layer_caches = kv.layers
    decoder.arithmetic = EXACT if lanes() > 0 and dtype == torch.bfloat16 else FAST
    if in_ram:
        decoder.entries_in_ram = EntriesInRam(frozenset(range(1, config.num_layers)), kv, CopyStream(CPU))
    return decoder


def texts_of(decoder: Decoder, number: int, *, shares: bool, room: int = 0) -> list[CachedDecoder]:
    """Texts with the entries of COMMON, which the first one has computed."""
    texts = [CachedDecoder(decoder, room) for _ in range(number)]
    texts[0].score([*COMMON, 5], *TREE.round(0, 6))
    texts[0].keep([0, 3])
    for text in texts[1:]:
        text.cache.begin_like(texts[0].cache, LENGTH, shares=shares)
    return texts


def score(texts: Sequence[CachedDecoder], chains: Sequence[Sequence[int]], num_nodes: int = 6) -> list[Tensor]:
    rows = [TextRows(chain, *(TREE.round(0, num_nodes) if num_nodes else NO_NODES)) for chain in chains]
    scored = score_together(list(zip(texts, rows, strict=True)))
    return [torch.stack([logits[row] for row in range(len(logits))]) for logits in scored]


def life(texts: Sequence[CachedDecoder]) -> Iterator[Tensor]:
    """Logits of texts that go on together, keep scattered nodes, part, and go back into what they share."""
    chains = [random_tokens(3 + 7 * number, number) for number in range(len(texts))]
    yield from score(texts, chains)
    for number, text in enumerate(texts):
        text.keep([0, 2] if number % 2 else [1], [3] if number % 2 else [])
        text.keep([0] if number % 2 else [])
    yield from score(texts, [[3]] * len(texts), num_nodes=0)
    texts[1].truncate(LENGTH - 2)
    texts[0].truncate(FEWEST_SHARED + 9)
    texts[-1].truncate(FEWEST_SHARED - 9)
    yield from score(texts, [chain[:2] for chain in chains])
    for text in texts:
        text.keep([])
    yield texts[0].score(random_tokens(40, 8), *NO_NODES)
    yield from score(texts, [[9]] * len(texts), num_nodes=0)
    texts[1].cache.drop(4, 30)
    yield texts[1].score([7], *NO_NODES)


@pytest.mark.each_value
@needs_kernels
@pytest.mark.parametrize("family", ["gemma2", "gemma4-layer-inputs", "youtu"])
@pytest.mark.parametrize("kv", KV_FORMATS.values(), ids=str)
def test_bits_are_those_of_copies(family: str, kv: KVFormat) -> None:
    decoder = decoder_of(family, kv)
    each = (life(texts_of(decoder, 3, shares=shares)) for shares in (True, False))
    for number, (shared, copied) in enumerate(zip(*each, strict=True)):
        assert torch.equal(shared, copied), number


@needs_kernels
def test_entries_in_ram_are_shared() -> None:
    kv = KV_FORMATS["8"]
    near, far = (decoder_of("llama-gqa", kv, in_ram=in_ram) for in_ram in (False, True))
    for shared, copied in zip(life(texts_of(far, 3, shares=True)), life(texts_of(near, 3, shares=False)), strict=True):
        assert torch.equal(shared, copied)


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["gemma2", "gemma4-layer-inputs"])
@pytest.mark.parametrize("kv", [PLAIN, KV_FORMATS["4"]], ids=str)
def test_fast_arithmetic_rounds_otherwise_and_no_more(family: str, kv: KVFormat) -> None:
    decoder = decoder_of(family, kv, dtype=torch.float32)
    each = (life(texts_of(decoder, 3, shares=shares)) for shares in (True, False))
    for shared, copied in zip(*each, strict=True):
        assert (shared - copied).abs().max() <= (1e-4 if kv is PLAIN else 2e-2)


def test_a_beginning_is_counted_once_and_freed_with_its_last_text() -> None:
    decoder = decoder_of()
    copied = texts_of(decoder, 5, shares=False, room=160)
    texts = texts_of(decoder, 5, shares=True, room=160)
    caches = [text.cache for text in texts]
    beginning = caches[0].beginning
    assert beginning is not None
    assert [(cache.beginning, cache.num_in_beginning) for cache in caches] == [(beginning, NUM_SHARED)] * 5
    assert total_entries(caches) == 160 + 4 * (LENGTH - NUM_SHARED)
    assert total_bytes(caches) == caches[0].nbytes + 4 * (LENGTH - NUM_SHARED) * beginning.nbytes // NUM_SHARED
    assert caches[0].nbytes == copied[0].cache.nbytes
    assert total_bytes(text.cache for text in copied) > 2 * total_bytes(caches)
    alive = ref(beginning)
    del beginning
    texts[0].truncate(0)
    assert caches[0].beginning is None
    for text in texts[1:]:
        assert alive() is not None
        text.drop()
        caches.pop()
    gc.collect()
    assert alive() is None


def test_a_longer_beginning_replaces_a_shorter_one() -> None:
    """The first texts keep theirs; a text that goes on alone shares nothing new for a few entries."""
    decoder = decoder_of()
    first, second = texts_of(decoder, 2, shares=True)
    shorter = second.cache.beginning
    second.score(random_tokens(FEWEST_SHARED - 10, 4), *NO_NODES)
    third, fourth = CachedDecoder(decoder), CachedDecoder(decoder)
    third.cache.begin_like(second.cache, second.length - 20, shares=True)
    assert third.cache.beginning is second.cache.beginning is shorter
    second.score(random_tokens(20, 4), *NO_NODES)
    fourth.cache.begin_like(second.cache, second.length, shares=True)
    assert fourth.cache.beginning is second.cache.beginning is not shorter
    assert fourth.cache.num_in_beginning == most_shared(second.length)
    assert first.cache.beginning is third.cache.beginning is shorter
    entries = [text.cache.stored(second.length) for text in (second, fourth)]
    assert all(torch.equal(*pair) for pair in zip(*entries, strict=True))


def test_a_hybrid_shares_entries_and_copies_states() -> None:
    decoder = decoder_of("qwen3.5", dtype=torch.float32)
    found = []
    for shares in (True, False):
        first, second = CachedDecoder(decoder), CachedDecoder(decoder)
        first.score(COMMON, *NO_NODES)
        length = first.cache.restorable(LENGTH - 1)
        second.cache.begin_like(first.cache, length, shares=shares)
        assert second.cache.num_in_beginning == (NUM_SHARED if shares else 0)
        found.append(torch.cat(score([second, first], [COMMON[length:], [5]])))
    assert (found[0] - found[1]).abs().max() <= 1e-4
