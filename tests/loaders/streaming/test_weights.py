"""Names become layers, and `RamWeights` hands out what it was given."""

from __future__ import annotations

import pytest
import torch

from offspec.errors import CheckpointError
from offspec.loaders.streaming.weights import RamWeights, split_names

from ...refusals import refused
from ..fakes import LAYER_PREFIX, toy_tensors


def test_more_than_ten_layers_are_in_the_order_of_numbers() -> None:
    tensors = {f"model.layers.{index}.w": torch.tensor(float(index)) for index in (11, 3, 10, 2, *range(4, 10), 0, 1)}
    weights = RamWeights.from_tensors(tensors, LAYER_PREFIX)
    for index in range(12):
        with weights.layer(index) as layer:
            assert layer["w"] == index


def test_layer_prefix() -> None:
    tensors = {"h.0.w": torch.ones(2), "h.1.w": torch.zeros(2), "model.layers.0.w": torch.ones(1)}
    weights = RamWeights.from_tensors(tensors, layer_prefix="h.")
    assert weights.num_layers == 2
    assert weights.shared("model.layers.0.w") is tensors["model.layers.0.w"]


@pytest.mark.parametrize("name", ["model.layers.norm", "model.layers.00.w", "model.layers.0", "modelxlayers.7.w"])
def test_names_that_only_resemble_a_layer_are_shared(name: str) -> None:
    weights = RamWeights.from_tensors(toy_tensors() | {name: torch.ones(1)}, LAYER_PREFIX)
    assert weights.num_layers == 3
    assert weights.shared(name) == 1


def test_missing_shared_tensor() -> None:
    with refused(CheckpointError, "'nowhere'", "missing"):
        RamWeights.from_tensors(toy_tensors(), LAYER_PREFIX).shared("nowhere")


def test_from_tensors_copies_nothing() -> None:
    tensors = toy_tensors()
    weights = RamWeights.from_tensors(tensors | {"head": tensors["model.embed.weight"]}, LAYER_PREFIX)
    assert weights.shared("head") is tensors["model.embed.weight"]


def test_a_gap_in_the_layers_is_refused() -> None:
    names = [name for name in toy_tensors(5) if ".2." not in name]
    with refused(CheckpointError, "layer 2", "model.layers.2", "layer 4"):
        split_names(names, "model.layers.")


def test_no_layers_are_refused() -> None:
    with refused(CheckpointError, "transformer.h.0"):
        split_names(toy_tensors(), "transformer.h.")


def test_close_lets_go() -> None:
    weights = RamWeights.from_tensors(toy_tensors(), LAYER_PREFIX)
    weights.close()
    assert weights.num_layers == 0
