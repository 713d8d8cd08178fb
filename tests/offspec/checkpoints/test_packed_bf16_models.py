"""A bf16-packed checkpoint computes the bf16 one's logits, bit for bit, wherever its layers are; commands take it."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from offspec import ConvertParams, convert
from offspec.checkpoints.load import load_weights
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import model_to_plan, open_model
from offspec.loaders.machine.gpus import find_gpu
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.params import LOSSLESS_FORMAT
from offspec.loaders.streaming.placement import Limits, Placement, Slots, place, places_of
from offspec.loaders.units import GIB
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import Plan, make_plan, with_faster_residents

from ...machines import NO_VECTORS, THIS, by_processor, run
from ...pair import build_pair
from .test_grouped_models import NO_NODES

CPU = torch.device("cpu")
IDS = [(7 * i) % 300 for i in range(24)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of bf16 matrices."""
    pair = build_pair(tmp_path_factory.mktemp("pair"), num_layers=4, hidden_size=64, intermediate_size=128)
    convert(pair.target, folder := tmp_path_factory.mktemp("source") / "bf16", ConvertParams("bf16"))
    return folder


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source; its own layout is that of `plain`."""
    folder = tmp_path_factory.mktemp("packed") / "packed"
    convert(source, folder, ConvertParams(LOSSLESS_FORMAT))
    return folder


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tensors, each layer at the same place of a file as it is packed."""
    folder = tmp_path_factory.mktemp("plain") / "plain"
    convert(source, folder, ConvertParams("keep"))
    return folder


def everywhere(files: ModelFiles, num_resident: int) -> Placement:
    """So many layers are resident, the others on disk."""
    costs = [layer.cost(files.dtype) for layer in files.stored.layers]
    whole = place(costs, [], Limits(None, 2**40))
    resident, on_disk = (tuple(r) for r in np.split(np.arange(len(costs)), [num_resident]))
    slots = Slots(2, 0, max(cost.slot_bytes for cost in costs))
    return replace(whole, places=places_of(resident=resident, on_disk=on_disk), slots=slots)


def logits(folder: Path, dtype: str, num_resident: int, *, keeps_packed: bool = False) -> Tensor:
    """Of a long prompt, and of one token after it."""
    files = open_model(folder, dtype, []).keeping(packed=keeps_packed)
    weights = load_weights(files, everywhere(files, num_resident), CPU)
    with closing(weights):
        text = CachedDecoder(Decoder(files.config, weights, dtype=files.dtype, device=CPU), 64)
        return torch.cat([text.score(IDS, *NO_NODES), text.score([5], *NO_NODES)])


@pytest.mark.each_value
@pytest.mark.slow
@by_processor("processor", NO_VECTORS, run(THIS))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_logits_have_the_bits_of_the_plain_model(dtype: str, plain: Path, packed: Path) -> None:
    """Resident and unpacked, resident and packed, streamed."""
    expected = logits(plain, dtype, num_resident=3)
    for keeps_packed in (False, True):
        assert torch.equal(logits(packed, dtype, num_resident=3, keeps_packed=keeps_packed), expected)


# ------------------------------------------------------------------------------------------------------------ plans


QWEN_32B = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen-32b")
    (folder / "config.json").write_text(json.dumps(QWEN_32B))
    return folder


def planned(folder: Path, form: str, limits: Limits) -> Plan:
    files = model_to_plan(folder, form, "bf16", [])
    return make_plan(files, [], limits, MemoryOptions(), GIB // 2)


CARD = Limits(int(23.1 * GIB), 64 * GIB)


def test_a_card_keeps_more_layers_and_is_faster(large: Path) -> None:
    """32B in 16 bit on an RTX 4090: a third less time a byte, and a third more layers that stay."""
    rates = find_gpu("rtx4090").rates(1.51)
    plain, packed = (planned(large, form, CARD) for form in ("bf16", LOSSLESS_FORMAT))
    assert packed.stream_bytes < 0.7 * plain.stream_bytes
    assert len(packed.placement.resident) >= 1.25 * len(plain.placement.resident)
    assert packed.predict_pass_s(rates, 64) < 0.7 * plain.predict_pass_s(rates, 64)
    assert 8 * packed.stream_bytes / len(packed.placement.streamed) < 12.1 * packed.work.layer_elements * 1.001


def test_what_fits_plain_is_kept_plain(large: Path) -> None:
    """Nothing is unpacked in its passes, and it needs no scratch."""
    for limits in (Limits(None, 80 * GIB), Limits(75 * GIB, 80 * GIB)):
        made = planned(large, LOSSLESS_FORMAT, limits)
        plain = planned(large, "bf16", limits)
        assert not made.placement.streamed
        assert made.work.kept_elements == 0
        kept = [sum(cost.resident_bytes for cost in found.layers) for found in (made, plain)]
        assert kept[0] == pytest.approx(kept[1], rel=1e-5)
        tight = made.with_more(ram=-20 * GIB) if limits.device is None else made.with_more(vram=-20 * GIB)
        assert tight.work.kept_elements == tight.work.layer_elements
        assert not tight.with_more(ram=20 * GIB, vram=20 * GIB).work.kept_elements


def test_packed_residents_only_where_they_are_faster(large: Path) -> None:
    made = planned(large, LOSSLESS_FORMAT, Limits(None, 24 * GIB))
    fast = Rates(disk_bytes_per_s=3e9, matmul_flops={1: 5e10, 64: 1e12}, dequantise_elements_per_s=2e10)
    slow = replace(fast, disk_bytes_per_s=1e11, dequantise_elements_per_s=1e8)
    assert with_faster_residents(made, fast).placement.resident == made.placement.resident
    other = with_faster_residents(made, slow)
    assert len(other.placement.resident) < len(made.placement.resident)
    assert other.predict_pass_s(slow, 16) < made.predict_pass_s(slow, 16)
    assert (other.work.kept_elements, other.work.packed_elements) == (0, made.work.packed_elements)
    plain = planned(large, "bf16", Limits(None, 24 * GIB))
    assert with_faster_residents(plain, slow) is plain
