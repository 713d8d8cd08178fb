"""Weights in memory are the checkpoint's, converted, by layer and short name; what cannot be read is refused first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offspec.errors import CheckpointError
from offspec.loaders.checkpoint import Checkpoint
from offspec.loaders.weights import RamWeights, WeightSource

Tensors = dict[str, torch.Tensor]


def toy_tensors(num_layers: int = 3) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed.weight": torch.randn(7, 4, generator=generator)}
    for index in range(num_layers):
        tensors[f"model.layers.{index}.mix.weight"] = torch.randn(4, 4, generator=generator)
        tensors[f"model.layers.{index}.norm"] = torch.randn(4, generator=generator)
    return tensors


def open_with(folder: Path, tensors: Tensors) -> Checkpoint:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


def refusal(checkpoint: Checkpoint, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        RamWeights.load(checkpoint, dtype=torch.float32, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def by_full_name(weights: WeightSource, names: Tensors) -> Tensors:
    """What the source holds, put back under the names of the checkpoint."""
    found = {name: weights.shared(name) for name in names if not name.startswith("model.layers.")}
    for index in range(weights.num_layers):
        with weights.layer(index) as layer:
            found |= {f"model.layers.{index}.{short}": tensor.clone() for short, tensor in layer.items()}
    return found


def test_load_is_what_was_saved(tmp_path: Path) -> None:
    tensors = toy_tensors()
    weights = RamWeights.load(open_with(tmp_path, tensors), dtype=torch.float32)
    assert weights.num_layers == 3
    torch.testing.assert_close(by_full_name(weights, tensors), tensors, rtol=0, atol=0)


def test_layers_have_short_names(tmp_path: Path) -> None:
    weights = RamWeights.load(open_with(tmp_path, toy_tensors()), dtype=torch.float32)
    with weights.layer(1) as layer:
        assert set(layer) == {"mix.weight", "norm"}


def test_more_than_ten_layers_are_in_the_order_of_numbers() -> None:
    tensors = {f"model.layers.{index}.w": torch.tensor(float(index)) for index in (11, 3, 10, 2, *range(4, 10), 0, 1)}
    weights = RamWeights.from_tensors(tensors)
    for index in range(12):
        with weights.layer(index) as layer:
            assert layer["w"] == index


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_floating_dtypes_are_converted(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in toy_tensors().items()}
    weights = RamWeights.load(open_with(tmp_path, tensors), dtype=wanted)
    expected = {name: tensor.to(wanted) for name, tensor in tensors.items()}
    torch.testing.assert_close(by_full_name(weights, tensors), expected, rtol=0, atol=0)
    assert weights.nbytes == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.uint8, "U8"),
        (torch.int8, "I8"),
        (torch.int32, "I32"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
    ],
)
def test_quantised_weights_are_refused(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    tensors = toy_tensors() | {"model.layers.1.mix.weight": torch.ones(4, 4).to(stored)}
    message = refusal(open_with(tmp_path, tensors))
    assert f"tensor 'model.layers.1.mix.weight' is {dtype}: quantised checkpoints are not read" in message
    assert "model.safetensors" in message


def test_ignored_tensors_are_not_read(tmp_path: Path) -> None:
    tensors = toy_tensors() | {"tied.head": torch.zeros(1000, dtype=torch.int8)}
    seen: list[tuple[int, int]] = []
    weights = RamWeights.load(
        open_with(tmp_path, tensors),
        dtype=torch.float32,
        ignore={"tied.head", "not.there"},
        progress=lambda done, total: seen.append((done, total)),
    )
    with pytest.raises(CheckpointError, match=r"tensor 'tied\.head' is missing"):
        weights.shared("tied.head")
    assert seen[-1] == (weights.nbytes, weights.nbytes)


def test_progress_counts_bytes_of_the_files(tmp_path: Path) -> None:
    checkpoint = open_with(tmp_path, toy_tensors())
    seen: list[tuple[int, int]] = []
    RamWeights.load(checkpoint, dtype=torch.bfloat16, progress=lambda done, total: seen.append((done, total)))
    done = [entry[0] for entry in seen]
    assert len(seen) == len(checkpoint.tensors)
    assert done == sorted(done)
    assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes)


def test_weights_do_not_change_with_the_file(tmp_path: Path) -> None:
    tensors = toy_tensors()
    weights = RamWeights.load(open_with(tmp_path, tensors), dtype=torch.float32)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    torch.testing.assert_close(by_full_name(weights, tensors), tensors, rtol=0, atol=0)


def test_sharded(tmp_path: Path) -> None:
    tensors = toy_tensors()
    (tmp_path / "config.json").write_text("{}")
    index = {name: f"part{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for shard in set(index.values()):
        save_file({name: tensors[name] for name in tensors if index[name] == shard}, tmp_path / shard)
    quoted = ", ".join(f'"{name}": "{shard}"' for name, shard in index.items())
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{quoted}}}}}')
    weights = RamWeights.load(Checkpoint.open(tmp_path), dtype=torch.float32)
    torch.testing.assert_close(by_full_name(weights, tensors), tensors, rtol=0, atol=0)


def test_a_gap_in_the_layers_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in toy_tensors(5).items() if ".2." not in name}
    checkpoint = open_with(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    message = refusal(checkpoint)
    assert "layer 2 is missing (model.layers.2.*), but there are tensors up to layer 4" in message


def test_no_layers_are_refused(tmp_path: Path) -> None:
    checkpoint = open_with(tmp_path, toy_tensors())
    assert "no tensor is named transformer.h.0.*" in refusal(checkpoint, layer_prefix="transformer.h.")


def test_layer_prefix() -> None:
    tensors = {"h.0.w": torch.ones(2), "h.1.w": torch.zeros(2), "model.layers.0.w": torch.ones(1)}
    weights = RamWeights.from_tensors(tensors, layer_prefix="h.")
    assert weights.num_layers == 2
    assert weights.shared("model.layers.0.w") is tensors["model.layers.0.w"]


@pytest.mark.parametrize("name", ["model.layers.norm", "model.layers.00.w", "model.layers.0", "modelxlayers.7.w"])
def test_names_that_only_resemble_a_layer_are_shared(name: str) -> None:
    weights = RamWeights.from_tensors(toy_tensors() | {name: torch.ones(1)})
    assert weights.num_layers == 3
    assert weights.shared(name) == 1


def test_missing_shared_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'nowhere' is missing; the checkpoint is incomplete"):
        RamWeights.from_tensors(toy_tensors()).shared("nowhere")


def test_from_tensors_copies_nothing_and_counts_tied_memory_once() -> None:
    tensors = toy_tensors()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    weights = RamWeights.from_tensors(tensors | {"head": tensors["model.embed.weight"]})
    assert weights.shared("head") is tensors["model.embed.weight"]
    assert weights.nbytes == nbytes


def test_file_that_went_or_changed_after_it_was_opened(tmp_path: Path) -> None:
    checkpoint = open_with(tmp_path, toy_tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert "model.safetensors: cannot be read" in refusal(checkpoint)
    path.unlink()
    assert "model.safetensors: cannot be read" in refusal(checkpoint)


def test_close_lets_go() -> None:
    weights = RamWeights.from_tensors(toy_tensors())
    weights.close()
    assert weights.nbytes == 0
