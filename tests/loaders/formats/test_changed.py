"""What a container keeps otherwise than its config means comes back as the architecture means it, wherever it lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.weights import dense
from offspec.errors import CheckpointError
from offspec.loaders.files.checkpoint import Change, Order, TensorInfo
from offspec.loaders.files.safetensors_folder import read_header
from offspec.loaders.formats import StoredWeight, stored_weights
from offspec.loaders.streaming.placement import Limits, Placement, Slots, places_of
from offspec.loaders.streaming.stored_model import StoredModel, StoredUnit
from offspec.loaders.streaming.tiers import TieredWeights

from ...refusals import refused
from ..gguf_samples import info_of, oracle, random_blocks, same_bits

CPU = torch.device("cpu")
HEADS, HEAD_DIM, COLUMNS = 3, 8, 256
NUM_ROWS = HEADS * HEAD_DIM
PAIRED = Order(2, groups=HEADS)
EMBEDDING = "embed"


def as_llama_cpp_has_it(weight: Tensor) -> Tensor:
    """convert_hf_to_gguf.py's `permute`."""
    return weight.reshape(HEADS, 2, HEAD_DIM // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def bytes_of(info: TensorInfo) -> Tensor:
    content = info.path.read_bytes()[info.offset : info.offset + info.nbytes]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def bind(stored: StoredWeight) -> Tensor:
    """As a plain tensor."""
    weight = stored.bind([bytes_of(info) for info in stored.streamed])
    return dense(weight, torch.float32)


def plain_infos(folder: Path, tensors: dict[str, Tensor], changes: dict[str, Change]) -> dict[str, TensorInfo]:
    save_file(tensors, folder / "model.safetensors")
    found = read_header(folder / "model.safetensors")
    return {name: replace(info, change=changes.get(name)) for name, info in found.items()}


def test_vectors(tmp_path: Path) -> None:
    norm = torch.randn(16).bfloat16().float()
    bias = torch.randn(NUM_ROWS)
    tensors = {"norm": norm + 1, "bias": as_llama_cpp_has_it(bias), "other": bias}
    infos = plain_infos(tmp_path, tensors, {"norm": Change(added=1.0), "bias": Change(rows=PAIRED)})
    found = stored_weights(infos)
    torch.testing.assert_close(bind(found["norm"]), (norm + 1) - 1, rtol=0, atol=0)
    assert torch.equal(bind(found["bias"]), bias)
    assert torch.equal(bind(found["other"]), bias)


def test_subtracted_before_rounding(tmp_path: Path) -> None:
    """1 + 2^-9 is 1 in bf16, and in fp16 stored numbers are widened first."""
    infos = plain_infos(tmp_path, {"norm": torch.full((4,), 1 + 2**-9)}, {"norm": Change(added=1.0)})
    layer = StoredUnit(stored_weights(infos))
    buffer = torch.zeros(layer.record.nbytes, dtype=torch.uint8)
    start, nbytes = layer.record.places["norm"]
    buffer[start : start + nbytes] = bytes_of(infos["norm"])
    for is_kept in (True, False):
        norm = layer.bind(buffer, torch.bfloat16, is_kept=is_kept)["norm"]
        assert isinstance(norm, Tensor)
        assert torch.equal(norm, torch.full((4,), 2**-9, dtype=torch.bfloat16))
    assert layer.cost(torch.float32).resident_bytes == 16


@pytest.mark.parametrize("form", ["F32", "BF16", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_with_reordered_rows(tmp_path: Path, form: str, with_bias: bool) -> None:
    change = Change(rows=PAIRED)
    if form in ("F32", "BF16"):
        dtype = torch.float32 if form == "F32" else torch.bfloat16
        plain = torch.randn(NUM_ROWS, COLUMNS).to(dtype)
        stored = stored_weights(plain_infos(tmp_path, {"w": as_llama_cpp_has_it(plain)}, {"w": change}))["w"]
    else:
        num_blocks = 1 if form == "Q4_K" else 8
        rows = random_blocks(form, NUM_ROWS, num_blocks)
        plain = oracle(form, rows)
        info = info_of(tmp_path / "m.gguf", "w", as_llama_cpp_has_it(rows), form, change)
        stored = stored_weights({"w": info})["w"]
    weight = stored.bind([bytes_of(stored.streamed[0])])
    assert tuple(weight.shape) == stored.shape == (NUM_ROWS, COLUMNS)
    assert stored.dtype == form
    assert stored.is_kept_as_read(torch.float32) == stored.is_packed == (form in ("Q4_K", "Q8_0"))
    assert same_bits(dense(weight, torch.float32), plain.float())
    assert same_bits(
        dense(weight, torch.bfloat16, torch.empty(NUM_ROWS * COLUMNS, dtype=torch.bfloat16)), plain.bfloat16()
    )
    x = torch.randn(2, 3, COLUMNS)
    bias = torch.randn(NUM_ROWS) if with_bias else None
    expected = F.linear(x, plain.float(), bias)
    found = linear(x, weight, bias, torch.empty(NUM_ROWS * COLUMNS))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert tuple(stored.to("cpu").sample(CPU).shape) == (NUM_ROWS, COLUMNS)


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((NUM_ROWS + 1, 4), Change(rows=PAIRED)),
        ((HEADS, 4), Change(rows=PAIRED)),
        ((4, NUM_ROWS + 1), Change(columns=PAIRED)),
        ((NUM_ROWS,), Change(columns=PAIRED)),
        ((NUM_ROWS, 4), Change(is_negative_exp=True)),
        ((NUM_ROWS, 4), Change(added=1.0)),
        ((), Change(added=1.0)),
    ],
)
def test_what_cannot_have_been_changed_so_is_refused(tmp_path: Path, shape: tuple[int, ...], change: Change) -> None:
    infos = plain_infos(tmp_path, {"w": torch.zeros(shape)}, {"w": change})
    with refused(CheckpointError, tmp_path, "'w'", "damaged"):
        stored_weights(infos)


# ------------------------------------------------------------------------------------------------ in their tiers


def model_on_disk(folder: Path) -> tuple[StoredModel, dict[str, Tensor]]:
    """Three layers with a changed matrix of each kind and a norm, and a quantised embedding; what they mean in fp32."""
    meant, infos = dict[str, Tensor](), dict[str, TensorInfo]()
    for index in range(3):
        plain, norm = torch.randn(NUM_ROWS, COLUMNS), torch.randn(COLUMNS).bfloat16().float()
        layer = folder / f"layer{index}"
        layer.mkdir()
        tensors = {"plain": as_llama_cpp_has_it(plain), "norm": norm + 2}
        found = plain_infos(layer, tensors, {"plain": Change(rows=PAIRED), "norm": Change(added=2.0)})
        rows = random_blocks("Q4_K", NUM_ROWS, 1, seed=index)
        found["packed"] = info_of(layer / "m.gguf", "packed", as_llama_cpp_has_it(rows), "Q4_K", Change(PAIRED))
        infos |= {f"l.{index}.{name}": replace(info, name=f"l.{index}.{name}") for name, info in found.items()}
        meant |= {
            f"l.{index}.plain": plain,
            f"l.{index}.norm": (norm + 2) - 2,
            f"l.{index}.packed": oracle("Q4_K", rows),
        }
    table = random_blocks("Q6_K", 900, 2)
    infos[EMBEDDING] = info_of(folder / "m.gguf", EMBEDDING, table, "Q6_K")
    meant[EMBEDDING] = oracle("Q6_K", table)
    stored = stored_weights(infos)
    layers = [
        StoredUnit({name: stored[f"l.{index}.{name}"] for name in ("plain", "norm", "packed")}) for index in range(3)
    ]
    return StoredModel(layers, {EMBEDDING: stored[EMBEDDING]}), meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resident", [(0, 1, 2), (1,), ()], ids=str)
def test_wherever_they_lie(tmp_path: Path, resident: tuple[int, ...], dtype: torch.dtype) -> None:
    model, meant = model_on_disk(tmp_path)
    on_disk = tuple(i for i in range(3) if i not in resident)
    slots = Slots(2, 0, max(layer.record.nbytes for layer in model.layers))
    placement = Placement(places_of(resident=resident, on_disk=on_disk), slots, (), Limits(None, 0), 0, 0)
    weights = TieredWeights(model, placement, dtype=dtype, device=CPU, row_tables=(EMBEDDING,))
    x = torch.randn(4, COLUMNS)
    for _ in range(2):
        for index in range(3):
            with weights.layer(index) as layer:
                assert same_bits(layer["norm"], meant[f"l.{index}.norm"].to(dtype))
                for name in ("plain", "packed"):
                    weight, expected = layer[name], meant[f"l.{index}.{name}"].to(dtype)
                    assert same_bits(dense(weight, dtype), expected)
                    found = linear(x.to(dtype), weight, None, weights.scratch)
                    tolerance = 1e-4 if dtype == torch.float32 else 0.3
                    sums = F.linear(x.to(dtype).float(), meant[f"l.{index}.{name}"].float())
                    torch.testing.assert_close(found.float(), sums, rtol=0.02, atol=tolerance)
                assert isinstance(layer["plain"], Tensor) == (index in resident)
    indices = torch.tensor([899, 0, 5, 899])
    assert same_bits(weights.rows(EMBEDDING, indices), meant[EMBEDDING][indices].to(dtype))
    weights.close()
