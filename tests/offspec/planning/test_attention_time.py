"""Seconds of attention by hand, and that they grow with all that there is more of."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from offspec.backends.device_kinds import CPU, GPU, DeviceKind
from offspec.loaders.machine.gpus import KNOWN_GPUS
from offspec.loaders.machine.hardware import Rates
from offspec.model.memory.kv_cache import KVLayout
from offspec.model.memory.kv_formats import EIGHT_BIT, FOUR_BIT, PLAIN, KVFormat
from offspec.planning.attention_time import AttentionShape

RATES = Rates(matmul_flops={1: 1e12, 1000: 100e12}, memory_bytes_per_s=1e12)
LAYER = AttentionShape(256, 64, KVLayout(8, 128), cap=None, itemsize=2, kv=PLAIN, device=GPU)  # a 70B's
KEYS = 32768
NUMBERS = 2 * KEYS * 8 * 128
PRODUCT_S = 2 * 2 * 256 * 64 * KEYS * 128 / 100e12  # two products of every head's rows with all keys or values
MERGED = 256 * 64 * 128 * 28  # bytes


def test_seconds_of_a_layer_by_hand() -> None:
    assert LAYER.seconds(KEYS, RATES) == pytest.approx(PRODUCT_S + MERGED / 1e12)
    packed = replace(LAYER, kv=EIGHT_BIT)  # in parts of 8192 keys
    assert packed.seconds(KEYS, RATES) == pytest.approx(PRODUCT_S + (4 * MERGED + 4 * NUMBERS) / 1e12)
    capped = replace(LAYER, cap=50.0)  # in parts of 512 keys, in fp32
    scores = 64 * 256 * KEYS * (56 + 24)
    assert capped.seconds(KEYS, RATES) == pytest.approx(2 * PRODUCT_S + (64 * MERGED + scores) / 1e12)


@pytest.mark.parametrize(("kv", "cap", "device"), [(PLAIN, 50.0, GPU), (FOUR_BIT, None, GPU), (PLAIN, None, CPU)])
def test_more_takes_longer(kv: KVFormat, cap: float | None, device: DeviceKind) -> None:
    rates = KNOWN_GPUS["rtx4090"].rates()
    shape = replace(LAYER, kv=kv, cap=cap, device=device)
    by_keys = [shape.seconds(num_keys, rates) for num_keys in (1, 1000, 4096, 8192, 16384, 20000, 32768, 131072)]
    by_rows = [replace(shape, width=width).seconds(KEYS, rates) for width in (1, 8, 64, 128, 256, 512)]
    for times in (by_keys, by_rows):
        assert all(shorter <= longer for shorter, longer in pairwise(times))
        assert times[-1] > 2 * times[0]


@pytest.mark.parametrize(("cap", "itemsize", "head_dim"), [(50.0, 2, 128), (None, 8, 128), (None, 2, 4)])
def test_what_is_by_formula_takes_longer(cap: float | None, itemsize: int, head_dim: int) -> None:
    shape = replace(LAYER, cap=cap, itemsize=itemsize, layout=KVLayout(8, head_dim))
    assert shape.reason_for_formula is not None
    fused = replace(shape, cap=None, itemsize=2, layout=KVLayout(8, max(8, head_dim)))
    assert shape.seconds(KEYS, RATES) > 5 * fused.seconds(KEYS, RATES)
    assert replace(shape, is_whole=True).seconds(KEYS, RATES) < shape.seconds(KEYS, RATES)
