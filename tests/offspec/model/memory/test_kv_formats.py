"""KV entries in another format or split otherwise over caches: a pass runs on them, and nothing else knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.backends import device_kinds
from offspec.model.block import kv_layouts, memory_bytes
from offspec.model.config import read_config
from offspec.model.decoder import CachedDecoder, Decoder, pass_together
from offspec.model.early_exit import EarlyExit, shared_text
from offspec.model.memory.kv_cache import KVLayout, LayerCache, MakeLayerCaches, PlainLayers, plain_layers
from offspec.model.memory.kv_formats import EIGHT_BIT, FOUR_BIT, KV_FORMATS, PLAIN, Coding, KVFormat
from offspec.model.memory.sequence_cache import SequenceCache
from offspec.model.pass_rows import TextRows

from ....examples import examples
from ....fakes import FAMILIES, TinyModel, config_json
from ..test_decoder import NO_NODES, TREE_FAMILIES, Tree, random_tokens
from .kv_formats import fp32_layers, int8_layers

GetModel = Callable[[str], TinyModel]
CPU = torch.device("cpu")
PACKED = (EIGHT_BIT, FOUR_BIT)


def one_by_one(layouts: Sequence[KVLayout], dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    return [PlainLayers(1, layout, dtype=dtype, device=device) for layout in layouts]


def with_caches(decoder: Decoder, make: MakeLayerCaches) -> Decoder:
    return Decoder(decoder.config, decoder.weights, dtype=decoder.dtype, device=decoder.device, make_layer_caches=make)


TREE = Tree(random_tokens(9, 7), [-1, -1, 0, 0, 1, 2, 2, 5, 6])


def life(text: CachedDecoder) -> Iterator[Tensor]:
    """Logits of a text that grows, keeps scattered nodes with some of them waiting on, and is taken back."""
    yield text.score(random_tokens(20), *TREE.round(0, 9))
    text.keep([0, 2], [5, 7])
    yield text.score([], np.array([5]), np.array([3]), np.array([-1, 0, 1]))
    text.keep([0])
    text.truncate(text.length - 9)
    yield text.score(random_tokens(30, 3), *TREE.round(0, 4))
    text.keep([1])
    yield text.score([7], *NO_NODES)


@pytest.mark.each_value
@pytest.mark.parametrize("make", [fp32_layers, one_by_one])
@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_a_format_that_loses_nothing_gives_the_same_bits(
    tiny_model: GetModel, family: str, make: MakeLayerCaches
) -> None:
    decoder = tiny_model(family).decoder(torch.bfloat16)
    texts = CachedDecoder(decoder), CachedDecoder(with_caches(decoder, make))
    for expected, found in zip(*map(life, texts), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "make", [plain_layers, one_by_one, fp32_layers, int8_layers, EIGHT_BIT.layers, FOUR_BIT.layers]
)
def test_entries_are_copied_as_they_are_stored(tiny_model: GetModel, make: MakeLayerCaches) -> None:
    """Bit by bit: an 8-bit entry that was read and written again could have another scale."""
    decoder = with_caches(tiny_model("llama-gqa").decoder(torch.bfloat16), make)
    text, copy = CachedDecoder(decoder), CachedDecoder(decoder, 40)
    text.score(random_tokens(20), *NO_NODES)
    copy.cache.reserve(12)
    for mine, others in zip(copy.cache.stored(12), text.cache.stored(12), strict=True):
        assert mine.shape == others.shape
        assert mine.shape[-2] == 12
        mine.copy_(others)
    copy.cache.begin(12)
    text.truncate(12)
    assert (copy.length, copy.cache.format) == (12, text.cache.format)
    assert torch.equal(*(each.score(random_tokens(9, 3), *NO_NODES) for each in (text, copy)))


def shared_life(target: Decoder) -> Tensor:
    """Logits of a text and its draft, an exit after the first layer."""
    with target.weights.layer(1) as layer:
        exit_layer = EarlyExit(target, 1, dict(layer))  # type: ignore[arg-type]
    text, draft = shared_text(target, exit_layer)
    scored = [each.score(random_tokens(12), *TREE.round(0, 9)) for each in (draft, text)]
    for each in (text, draft):
        each.keep([0, 3])
    return torch.cat((*scored, text.score([9], *NO_NODES)))


# ------------------------------------------------------------------------------------------------ packed


class RoundedLayers(PlainLayers):
    """Plain entries, each as the format's packing returns it."""

    def __init__(self, count: int, layout: KVLayout, kv: KVFormat, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(count, layout, dtype=dtype, device=device)
        assert kv.codings is not None
        self._codings = kv.codings

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int) -> None:
        rounded = [
            coding.unpack(coding.pack(given), given.shape[-1], given.dtype)
            for coding, given in zip(self._codings, (keys, values), strict=True)
        ]  # of values that are keys, the second one is not stored
        super().write(layer, *rounded, start)


def rounded_layers(kv: KVFormat) -> MakeLayerCaches:
    def make(layouts: Sequence[KVLayout], dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
        return [RoundedLayers(1, layout, kv, dtype=dtype, device=device) for layout in layouts]

    return make


@pytest.mark.each_value
@pytest.mark.parametrize("kv", PACKED)
@pytest.mark.parametrize("family", [*TREE_FAMILIES, "youtu"])
def test_packed_attention_is_that_of_unpacked_entries(
    tiny_model: GetModel, family: str, kv: KVFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although only a few entries are unpacked at once. In fp64, as below: in fp32 a code may flip at a border."""
    monkeypatch.setattr(device_kinds, "CPU", replace(device_kinds.CPU, unpacked_numbers=1))
    monkeypatch.setattr("offspec.model.memory.kv_formats.LEAST_UNPACKED", 7)
    decoder = tiny_model(family).decoder(torch.float64)
    texts = CachedDecoder(with_caches(decoder, kv.layers)), CachedDecoder(with_caches(decoder, rounded_layers(kv)))
    for found, expected in zip(*map(life, texts), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("kv", PACKED, ids=str)
@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_codes_do_not_depend_on_what_shared_a_pass(tiny_model: GetModel, family: str, kv: KVFormat) -> None:
    """In fp64, where no rounding of products comes near the border of two codes; in fp32 it sometimes does."""
    decoder = with_caches(tiny_model(family).decoder(torch.float64), kv.layers)
    tokens = random_tokens(40)
    plain, grown, other = (CachedDecoder(decoder) for _ in range(3))
    plain.score(tokens[:16], *NO_NODES)
    for token in tokens[16:]:
        expected = plain.score([token], *NO_NODES)
    grown.score(tokens[:20], *NO_NODES)
    accepted = Tree([tokens[20], 7, tokens[21], 9, tokens[22]], [-1, -1, 0, 0, 2])
    pass_together([(other, TextRows(tokens[:9], *TREE.round(0, 9))), (grown, TextRows([], *accepted.round(0, 5)))])
    grown.keep([0, 2, 4])
    found = grown.score(tokens[23:], *NO_NODES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for one, same in zip(grown.cache.stored(40), plain.cache.stored(40), strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("most", [1, 2**25])
def test_long_texts_are_attended_to_by_parts(tiny_model: GetModel, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all at once, within rounding."""
    decoder = tiny_model("mistral-window").decoder()
    expected = list(life(CachedDecoder(decoder)))
    monkeypatch.setattr("offspec.model.pass_rows.MASK_ELEMENTS", most)
    monkeypatch.setattr("offspec.model.parts.kv_attention.MASKED_KEYS", 5)
    for found, wanted in zip(life(CachedDecoder(decoder)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * wanted.std().item())


@given(
    st.sampled_from(sorted({coding for kv in PACKED for coding in kv.codings or ()}, key=str)),
    st.integers(1, 200),
    st.integers(0, 2**31),
    st.sampled_from([1e-30, 1e-6, 1.0, 1e4, 1e7]),
)
@examples(150)
def test_packing_rounds_each_entry_by_itself(coding: Coding, head_dim: int, seed: int, size: float) -> None:
    numbers = size * torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(seed))
    numbers[0, 0] += 5 * size
    numbers[1] = 0
    packed = coding.pack(numbers)
    assert packed.shape == (3, 2, coding.width(head_dim))
    assert torch.equal(coding.pack(numbers[2:]), packed[2:])
    found = coding.unpack(packed, head_dim, torch.float32)
    assert found.isfinite().all()
    assert (found[1] == 0).all()
    assert (coding.unpack(torch.zeros_like(packed), head_dim, torch.float32) == 0).all()
    if 1e-6 < size < 1e7:  # within the range of scales
        step = (numbers.amax(-1) - numbers.amin(-1)).maximum(numbers.abs().amax(-1)) / (2 ** (coding.bits - 1) - 1)
        assert ((found - numbers).abs().amax(-1) <= 1.01 * step).all()


# ------------------------------------------------------------------------------------------------ bytes


@pytest.mark.each_value
@pytest.mark.parametrize("kv", KV_FORMATS.values())
@pytest.mark.parametrize("family", [*TREE_FAMILIES, "deepseek-v3", "youtu", "gpt-oss"])
def test_bytes_are_counted_as_they_are_allocated(family: str, kv: KVFormat) -> None:
    """By layer, sliding windows included."""
    config = read_config(config_json(FAMILIES[family]))
    for layers in (range(config.num_layers), range(1), range(1, config.num_layers)):
        layouts = [layout for layout in kv_layouts(config, layers) if layout is not None]
        cache = SequenceCache(kv.layers(layouts, torch.bfloat16, CPU), CPU)
        for capacity in (1, 77):
            cache.reserve(capacity)
            assert cache.nbytes == memory_bytes(config, capacity, 2, layers, kv) > 0
    assert memory_bytes(config, 77, 2) == memory_bytes(config, 77, 2, range(config.num_layers))


def test_neighbours_of_one_layout_lie_together() -> None:
    wide, narrow = KVLayout(4, 16), KVLayout(1, 8)
    parts = plain_layers([wide, wide, narrow, wide], torch.float32, CPU)
    assert [part.num_layers for part in parts] == [2, 1, 1]
    cache = SequenceCache(parts, CPU)
    cache.reserve(3)
    for layer, layout in enumerate((wide, wide, narrow, wide)):
        entry = torch.full((1, layout.num_heads, layout.head_dim), float(layer))
        cache.write(layer, entry, -entry, 2)
    for layer, layout in enumerate((wide, wide, narrow, wide)):
        keys, values = cache.read(layer, 3)
        assert keys.shape == (layout.num_heads, 3, layout.head_dim)
        assert (keys[:, 2] == layer).all()
        assert (values[:, 2] == -layer).all()
    assert cache.nbytes == 3 * sum(PLAIN.entry_bytes(layout, 4) for layout in (wide, wide, narrow, wide))


@pytest.mark.parametrize(
    "make", [plain_layers, one_by_one, fp32_layers, int8_layers, EIGHT_BIT.layers, FOUR_BIT.layers]
)
def test_entries_never_written_read_as_zeros(make: MakeLayerCaches) -> None:
    (cache,) = make([KVLayout(2, 4)], torch.bfloat16, CPU)
    torch.use_deterministic_algorithms(True)  # torch then fills memory that it does not initialise with NaN
    try:
        cache.reserve(5, 0)
        cache.write(0, torch.ones(2, 2, 4, dtype=torch.bfloat16), torch.ones(2, 2, 4, dtype=torch.bfloat16), 1)
        cache.reserve(9, 3)
    finally:
        torch.use_deterministic_algorithms(False)
    for part in cache.read(0, 9):
        assert (part.float().sum((0, 2)) / 8).round(decimals=2).tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0]
