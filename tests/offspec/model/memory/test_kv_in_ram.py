"""KV entries in RAM: what a pass finds is what it finds on the device, to the bit, whatever happens between passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from offspec.loaders.accelerators.accelerator import DeviceEvent
from offspec.loaders.streaming.link import CopyStream
from offspec.model.decoder import CachedDecoder, Decoder, score_together
from offspec.model.memory.kv_cache import KVLayout
from offspec.model.memory.kv_formats import EIGHT_BIT, KV_FORMATS, KVFormat
from offspec.model.memory.kv_in_ram import EntriesInRam, LayersInRam
from offspec.model.memory.sequence_cache import SequenceCache
from offspec.model.pass_rows import TextRows

from ....fakes import TinyModel
from ..test_decoder import NO_NODES, TREE_FAMILIES, random_tokens
from .test_kv_formats import TREE, life, shared_life, with_caches

GetModel = Callable[[str], TinyModel]
CPU = torch.device("cpu")
FORMATS = pytest.mark.parametrize("kv", KV_FORMATS.values(), ids=str)


def spilled(decoder: Decoder, kv: KVFormat, *layers: int) -> Decoder:
    """The same decoder, with the entries of these layers in RAM; by default, of all."""
    found = with_caches(decoder, kv.layers)
    numbers = frozenset(layers or range(decoder.config.num_layers))
    found.entries_in_ram = EntriesInRam(numbers, kv, CopyStream(CPU))
    return found


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("family", [*TREE_FAMILIES, "youtu"])
def test_a_text_finds_the_same_bits(tiny_model: GetModel, family: str, kv: KVFormat) -> None:
    decoder = tiny_model(family).decoder(torch.bfloat16)
    expected = list(life(CachedDecoder(with_caches(decoder, kv.layers))))
    last = decoder.config.num_layers - 1
    for layers in ((), (0,), (last,)):
        for found, wanted in zip(life(CachedDecoder(spilled(decoder, kv, *layers))), expected, strict=True):
            assert torch.equal(found, wanted)


@FORMATS
def test_texts_of_one_pass_have_entries_of_their_own(tiny_model: GetModel, kv: KVFormat) -> None:
    decoder = tiny_model("llama-gqa").decoder()
    found = list[torch.Tensor]()
    for each in (with_caches(decoder, kv.layers), spilled(decoder, kv)):
        texts = [CachedDecoder(each) for _ in range(3)]
        for length in (9, 30, 1):
            rows = [TextRows(random_tokens(length + 7 * i, i), *TREE.round(0, 4 + i)) for i in range(3)]
            found += [logits[0] for logits in score_together(list(zip(texts, rows, strict=True)))]
            for text in texts:
                text.keep([1], [3])
                text.keep([])
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert torch.equal(one, other)


def test_an_early_exit_shares_entries_in_ram(tiny_model: GetModel) -> None:
    decoder = tiny_model("llama-gqa").decoder(torch.bfloat16)
    targets = with_caches(decoder, EIGHT_BIT.layers), spilled(decoder, EIGHT_BIT)
    assert torch.equal(*map(shared_life, targets))


@FORMATS
def test_entries_are_copied_between_places(tiny_model: GetModel, kv: KVFormat) -> None:
    """Files and parked texts do not depend on which layers' entries are in RAM."""
    decoder = tiny_model("llama-gqa").decoder(torch.bfloat16)
    decoders = with_caches(decoder, kv.layers), spilled(decoder, kv, 0), spilled(decoder, kv)
    texts = [CachedDecoder(each) for each in decoders]
    texts[0].score(random_tokens(20), *NO_NODES)
    for source, text in pairwise(texts):
        text.score(random_tokens(5, 8), *NO_NODES)  # the slots on the device have something else
        text.truncate(0)
        text.cache.reserve(20)
        assert text.cache.format == source.cache.format
        for mine, others in zip(text.cache.stored(20), source.cache.stored(20), strict=True):
            assert mine.shape == others.shape
            mine.copy_(others)
        text.cache.begin(20)
    logits = [text.score(random_tokens(3, 4), *TREE.round(0, 4)) for text in texts]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


class LateCopies(CopyStream):
    """Each copy happens when something waits for it, and not before, as it may on a device."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._queued = list[Sequence[tuple[torch.Tensor, torch.Tensor]]]()
        self._done = 0

    def run(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        self._queued.append(copies)
        return len(self._queued)

    def wait(self, arrival: Any) -> None:
        for copies in self._queued[self._done : arrival]:
            super().run(copies)
        self._done = max(self._done, arrival)

    def finish(self) -> None:
        self.wait(len(self._queued))


@FORMATS
def test_copies_may_happen_late(tiny_model: GetModel, kv: KVFormat) -> None:
    """Also behind changes of what they copy: entries that were moved, or belong to another text by then."""
    decoder = tiny_model("llama-gqa").decoder(torch.bfloat16)
    expected = list(life(CachedDecoder(with_caches(decoder, kv.layers))))
    late = spilled(decoder, kv)
    late.entries_in_ram = EntriesInRam(frozenset({0, 1, 2}), kv, LateCopies())
    text = CachedDecoder(late)
    for _ in range(2):
        for found, wanted in zip(life(text), expected, strict=True):
            assert torch.equal(found, wanted)
        text.truncate(0)


class CountingCopies(CopyStream):
    """Counts copies to the device, and what waits for them."""

    num_copies = 0

    def run(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DeviceEvent:
        self.num_copies += 1
        return super().run(copies)


def cache_of(num_layers: int, copies: CopyStream) -> SequenceCache:
    kv, layout = KV_FORMATS["16"], KVLayout(1, 8)
    part = LayersInRam(num_layers, layout, kv, dtype=torch.float32, device=CPU, copies=copies)
    return SequenceCache([part], CPU)


def one_pass(cache: SequenceCache, count: int) -> None:
    cache.extend(count)
    for layer in range(cache.num_layers):
        entries = torch.full((count, 1, 8), float(layer + 1))
        cache.write(layer, entries, -entries, cache.size)
        keys, values = cache.read(layer, cache.size + count)
        assert (keys == layer + 1).all()
        assert (values == -layer - 1).all()
    cache.append(count, 0)


def test_the_next_layer_follows_while_one_is_in_use() -> None:
    copies = CountingCopies(CPU)
    cache = cache_of(4, copies)
    cache.reserve(100)
    one_pass(cache, 10)
    assert copies.num_copies == 0  # there was nothing before
    for count, expected in ((1, 5), (3, 5)):
        copies.num_copies = 0
        one_pass(cache, count)
        assert copies.num_copies == expected  # each layer's, and the first one's latest or next


def test_slots_that_were_cut_back_are_brought_again() -> None:
    cache = cache_of(3, CopyStream(CPU))
    one_pass(cache, 6)
    cache.append(0, 0)
    cache.extend(4)
    for layer in range(3):
        cache.write(layer, torch.arange(4.0)[:, None, None].expand(4, 1, 8), torch.zeros(4, 1, 8), 6)
    cache.append(0, 4)
    cache.keep([1, 3])
    for layer in range(3):
        keys, _ = cache.read(layer, 8)
        assert keys[0, :, 0].tolist() == [layer + 1.0] * 6 + [1.0, 3.0]


def test_bytes_are_those_of_ram_and_two_layers_on_the_device() -> None:
    cache = cache_of(5, CopyStream(CPU))
    cache.reserve(7)
    assert cache.nbytes == (5 + 2) * 7 * 2 * 8 * 4
    assert np.isfinite(cache.stored(7)[0].numpy()).all()
