"""Attention to parts with torch's CUDA operators, by twins that refuse what CUDA refuses, and on a card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offspec.backends.choice import backend_of
from offspec.backends.device_kinds import GPU, kind_of
from offspec.model.decoder import CachedDecoder
from offspec.model.memory.kv_cache import KVLayout
from offspec.model.memory.kv_formats import EIGHT_BIT, FOUR_BIT, PLAIN, KVFormat
from offspec.model.memory.sequence_cache import SequenceCache
from offspec.model.parts import split_attention
from offspec.model.parts.kv_attention import Visibility, attend, attend_by_parts
from offspec.model.parts.part import Attending
from offspec.model.parts.split_attention import (
    CUDA_EFFICIENT,
    CUDA_FLASH,
    ByFormula,
    KeyPart,
    OnCpu,
    OnCuda,
    aligned_bias,
    operator,
    reason_for_formula,
)
from offspec.model.pass_rows import AppendedRows, TextRows
from offspec.model.rope import Rotations
from offspec.planning.attention_time import AttentionShape
from offspec.scheduler.trees.token_tree import ROOT

from ....cuda_attention import TWINS, efficient, flash
from ..memory.test_kv_formats import life, with_caches

META = torch.device("meta")
aten = torch.ops.aten
REAL = OnCuda(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA's way with the twins in place of operators, on any device. Returns the names of those that are called."""
    called = list[str]()

    def recorded(name: str, twin: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            called.append(name)
            return twin(*args, **options)

        return call

    twins = OnCuda(recorded("flash", flash), recorded("efficient", efficient))
    monkeypatch.setattr("offspec.model.parts.kv_attention.part_attention", lambda queries, cap: twins)
    monkeypatch.setattr("offspec.model.pass_rows.part_attention", lambda queries, cap: twins)
    return called


def random_case(
    heads: int, kv_heads: int, num_rows: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values in a longer cache, and a mask; some rows have no key in a part."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(num_rows, heads, head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, kv_heads, 90, head_dim, generator=generator).to(dtype)[:, :, :77]
    mask = torch.rand(num_rows, 77, generator=generator) < 0.5
    mask[0, :64], mask[-1, 13:] = False, False
    mask[0, -1] = mask[-1, 5] = True
    return queries, keys, values, mask


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [1, 33])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 80)])
def test_cuda_parts_attend_as_the_whole_does(
    heads: int, kv_heads: int, head_dim: int, num_rows: int, dtype: torch.dtype, on_cuda: list[str]
) -> None:
    """In calls that CUDA takes, although parts begin and end anywhere, and rows have no key in some."""
    queries, keys, values, mask = random_case(heads, kv_heads, num_rows, head_dim, dtype)
    cuts = [(0, 13), (13, 14), (14, 64), (64, 77)]
    for seen in (mask, None):
        parts = [KeyPart(keys[:, a:b], values[:, a:b], None if seen is None else seen[:, a:b]) for a, b in cuts]
        expected = attend(queries.float(), keys.float(), values.float(), seen, scale=0.3)
        found = attend_by_parts(queries, parts, scale=0.3)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=TOLERANCE[dtype])
    without_mask = "efficient" if dtype == torch.float32 else "flash"
    assert on_cuda == ["efficient"] * 4 + [without_mask] * 4


@pytest.mark.each_value
@pytest.mark.parametrize("kv", [PLAIN, EIGHT_BIT, FOUR_BIT], ids=lambda kv: kv.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
def test_a_decoder_attends_by_cuda_operators(
    tiny_model: Any, family: str, dtype: torch.dtype, kv: KVFormat, on_cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, trees and windows, as by formula, within what the dtype rounds; codes of packed entries may flip."""
    monkeypatch.setattr("offspec.model.pass_rows.MASK_ELEMENTS", 1)
    monkeypatch.setattr("offspec.model.parts.kv_attention.MASKED_KEYS", 5)
    decoder = with_caches(tiny_model(family).decoder(dtype), kv.layers)
    with monkeypatch.context() as patch:
        patch.setattr("offspec.model.parts.kv_attention.part_attention", lambda queries, cap: ByFormula())
        expected = list(life(CachedDecoder(decoder)))
    assert on_cuda == []
    tolerance = 1e-4 if dtype == torch.float32 and kv.is_plain else 0.1
    for found, wanted in zip(life(CachedDecoder(decoder)), expected, strict=True):
        assert (found - wanted).float().std() < tolerance * wanted.float().std()
    has_flash = dtype == torch.bfloat16 and family == "llama-gqa"  # all that a window shows has a mask
    assert set(on_cuda) == ({"flash", "efficient"} if has_flash else {"efficient"})


@pytest.mark.parametrize("num_rows", [1, 33])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_and_results_are_those_of_the_real_operators(
    num_rows: int, is_masked: bool, dtype: torch.dtype
) -> None:
    """Schemas take the arguments, and results have the twins' shapes, on a device without memory."""
    queries, mask = torch.zeros(2, 3, num_rows, 16, dtype=dtype), torch.ones(num_rows, 21, dtype=torch.bool)
    keys = torch.zeros(2, 21, 16, dtype=dtype)
    part = KeyPart(keys, keys, mask if is_masked else None)
    on_meta = KeyPart(keys.to(META), keys.to(META), mask.to(META) if is_masked else None)
    for real, twin in zip(REAL(queries.to(META), on_meta, 0.5), TWINS(queries, part, 0.5), strict=True):
        assert (real.shape, real.dtype) == (twin.shape, twin.dtype)
        assert real.stride() == twin.stride()


def test_a_bias_is_aligned_and_hides_what_the_mask_hides() -> None:
    mask = torch.rand(3, 21, generator=torch.Generator().manual_seed(0)) < 0.5
    for dtype in TOLERANCE:
        bias = aligned_bias(mask, dtype)
        assert bias.shape == mask.shape
        assert bias.stride() == (32, 1)
        assert torch.equal(bias == 0, mask)
        assert (bias[~mask] < -6e4).all()
        assert bias.isfinite().all()  # minus infinity alone makes NaN of a row


@pytest.mark.parametrize(
    ("head_dim", "dtype", "cap", "device", "expected"),
    [
        (128, torch.bfloat16, None, "cuda", None),
        (512, torch.float16, None, "cuda", None),
        (4, torch.float32, None, "cuda", None),
        (128, torch.bfloat16, 50.0, "cuda", "capped"),
        (128, torch.float64, None, "cuda", "64 bits"),
        (4, torch.bfloat16, None, "cuda", "4 numbers"),
        (5, torch.float64, None, "cpu", None),
        (128, torch.float32, 50.0, "cpu", "capped"),
    ],
)
def test_what_no_operator_takes_is_by_formula(
    head_dim: int, dtype: torch.dtype, cap: float | None, device: str, expected: str | None
) -> None:
    reason = reason_for_formula(head_dim, dtype.itemsize, cap, kind_of(torch.device(device)))
    assert (reason is None) if expected is None else (reason is not None and expected in reason)


def test_the_card_and_the_build_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds for CPUs have no operator of CUDA's; old cards have neither FlashAttention nor bf16."""
    device, detect = torch.device("cuda:0"), split_attention.cuda_operators.__wrapped__
    queries = torch.empty(1, 1, 16, dtype=torch.bfloat16, device=META)
    capability = [(8, 9)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability[0])
    monkeypatch.setattr(split_attention, "cuda_operators", detect)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
    assert isinstance(split_attention.part_attention(queries, None), ByFormula)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert detect(device) == REAL
    assert isinstance(split_attention.part_attention(queries, None), OnCuda)
    assert isinstance(split_attention.part_attention(queries, 30.0), ByFormula)
    capability[0] = (7, 5)
    assert detect(device) == OnCuda(None, REAL.efficient, takes_bf16=False)
    assert isinstance(split_attention.part_attention(queries, None), ByFormula)
    assert isinstance(split_attention.part_attention(queries.half(), None), OnCuda)
    capability[0] = (8, 0)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert detect(device) == OnCuda(None, REAL.efficient)


def test_an_operator_with_other_arguments_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert operator(CUDA_FLASH) is REAL.flash
    assert operator(CUDA_EFFICIENT) is REAL.efficient
    assert isinstance(split_attention.part_attention(torch.empty(1, 1, 8), None), OnCpu)
    monkeypatch.setitem(split_attention.ARGUMENTS, CUDA_FLASH, {"query", "renamed"})
    monkeypatch.setitem(split_attention.ARGUMENTS, "absent", set())
    assert operator(CUDA_FLASH) is None
    assert operator("absent") is None


# ------------------------------------------------------------------------------------------------ kernels

VIEWS = {
    *(aten.view, aten.expand, aten.permute, aten.slice, aten.transpose, aten.unsqueeze, aten.select, aten.alias),
    *(aten._unsafe_view, aten.as_strided, aten.detach, aten.split_with_sizes, aten.empty, aten._reshape_alias),
    *(aten.squeeze, aten.split, aten.promote_types),
}


class Kernels(TorchDispatchMode):
    """The operations in its scope that work on numbers, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket not in VIEWS:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def kernels_of_a_layer(kv: KVFormat, num_keys: int, num_rows: int, cap: float | None = None) -> list[str]:
    """Of a 70B's attention, with `num_rows` - 1 nodes behind a token and a text of `num_keys`."""
    layout, dtype = KVLayout(8, 128), torch.bfloat16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offspec.model.memory.kv_formats.kind_of", lambda device: GPU)
        cache = SequenceCache(kv.layers([layout] * 2, dtype, META), META)
    cache.reserve(num_keys + num_rows)
    nodes = num_rows - 1
    visibility = Visibility(
        num_keys,
        torch.empty(num_rows, dtype=torch.long, device=META),
        torch.empty(num_keys + num_rows, dtype=torch.long, device=META),
        np.full(nodes, ROOT),
        nodes,
    )
    positions = Rotations(visibility.positions)
    chain, backend = TextRows.of_chain([0]), backend_of(META)
    rows = AppendedRows(chain, num_keys - 1, cache, visibility, positions, [(0, num_rows)], backend)
    queries = torch.empty(num_rows, 64, 128, dtype=dtype, device=META)
    keys = queries[:, :8]
    config = SimpleNamespace(attention_scale=None, attention_cap=cap)
    shape = SimpleNamespace(num_kv_heads=8)
    parts = (SimpleNamespace(layer=i, entries_of=i, window=None, config=config, shape=shape) for i in range(2))
    first, second = (cast(Attending, part) for part in parts)
    rows.attend(first, queries, (keys, keys), 0, num_rows)  # which makes the masks of the pass
    with Kernels() as kernels:
        rows.attend(second, queries, (keys, keys), 0, num_rows)
    return kernels.names


@pytest.mark.parametrize(
    ("kv", "num_parts", "most"),
    [(PLAIN, 1, 20), (EIGHT_BIT, 4, 105), (FOUR_BIT, 4, 290)],
    ids=lambda value: getattr(value, "name", None),
)
def test_kernels_of_a_layer_behind_a_long_text(
    kv: KVFormat, num_parts: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70B, 256 nodes behind 32k tokens, and the plan counts as many. By formula they were 1317, 1745 and 3440."""
    monkeypatch.setattr(split_attention, "cuda_operators", lambda device: REAL)
    names = kernels_of_a_layer(kv, 32768, 257)
    assert len(names) <= most, names
    operators = [name for name in names if name.startswith("_scaled_dot_product")]
    assert operators == [CUDA_FLASH] * num_parts + [CUDA_EFFICIENT]
    shape = AttentionShape(257, 64, KVLayout(8, 128), None, 2, kv, GPU)
    assert shape.num_operations(32768) == pytest.approx(len(names), rel=0.1)


def test_capped_scores_are_by_formula_on_a_gpu() -> None:
    names = kernels_of_a_layer(PLAIN, 16384, 257, cap=50.0)
    assert not [name for name in names if name.startswith("_scaled_dot_product")]
    assert names.count("tanh_") == AttentionShape(257, 64, KVLayout(8, 128), 50.0, 2, PLAIN, GPU).num_parts(16384) + 1


# ------------------------------------------------------------------------------------------------ a card


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("num_rows", [1, 7, 33, 257])
def test_operators_of_a_card_agree_with_the_formula(num_rows: int, head_dim: int, dtype: torch.dtype) -> None:
    """Results and sums, with masks and without, of keys within a longer cache; and each part of a row without keys."""
    device, generator = torch.device("cuda:0"), torch.Generator().manual_seed(0)
    queries = torch.randn(4, 3, num_rows, head_dim, generator=generator).to(device, dtype)
    cached = torch.randn(2, 4, 2100, head_dim, generator=generator).to(device, dtype)
    mask = torch.rand(num_rows, 1501, generator=generator) < 0.5
    mask[0] = False
    operators = split_attention.part_attention(queries, None)
    assert isinstance(operators, OnCuda)
    for seen in (None, mask.to(device)):
        part = KeyPart(*cached[:, :, 13:1514].unbind(), seen)
        found, expected = (way(queries, part, head_dim**-0.5) for way in (operators, ByFormula()))
        rows = slice(0 if seen is None else 1, None)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(
                one[:, :, rows].float(), other[:, :, rows], rtol=0, atol=TOLERANCE[dtype], msg=str((seen is None,))
            )
        assert found[0].isfinite().all()
        if seen is not None:
            assert (found[1][:, :, 0] < -6e4).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kv", [EIGHT_BIT, FOUR_BIT], ids=lambda kv: kv.name)
def test_a_card_unpacks_as_the_cpu_does(kv: KVFormat) -> None:
    numbers = torch.randn(300, 4, 128, generator=torch.Generator().manual_seed(0))
    for coding in kv.codings or ():
        packed = coding.pack(numbers)
        for dtype in TOLERANCE:
            expected = coding.unpack(packed, 128, dtype)
            assert torch.equal(coding.unpack(packed.cuda(), 128, dtype).cpu(), expected)
