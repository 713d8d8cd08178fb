"""Matrices in oneDNN's order: the same products, the same values, and layers that keep nothing of their buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from offspec.backends.weights import dense, linear
from offspec.loaders.formats import blocked as module
from offspec.loaders.formats.blocked import BlockedMatrix, can_be_blocked
from offspec.loaders.streaming.tiers import TierOptions

from ...machines import needs_blocked_order
from ..fakes import open_with
from ..streaming.test_tiers import ALL, SOME, tiered

BF16 = torch.bfloat16
SHAPES = [(48, 32), (256, 128), (33, 65), (1, 16), (704, 256)]


def matrix(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@needs_blocked_order
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_matrix(shape: tuple[int, int]) -> None:
    plain, bias = matrix(shape), matrix((1, shape[0]), 1)[0]
    blocked = BlockedMatrix(plain)
    for num_rows in (1, 2, 16, 33, 130):
        rows = matrix((num_rows, shape[1]), 2)
        for added in (None, bias):
            torch.testing.assert_close(linear(rows, blocked, added), linear(rows, plain, added), rtol=2e-2, atol=2e-2)


@needs_blocked_order
@pytest.mark.parametrize("shape", SHAPES)
def test_the_matrix_can_be_had_back(shape: tuple[int, int]) -> None:
    plain = matrix(shape)
    blocked = BlockedMatrix(plain)
    assert (blocked.shape, blocked.dtype) == (shape, BF16)
    torch.testing.assert_close(dense(blocked, BF16), plain, rtol=0, atol=0)
    scratch = torch.empty(plain.numel() + 3, dtype=torch.float32)
    made = dense(blocked, torch.float32, scratch)
    torch.testing.assert_close(made, plain.float(), rtol=0, atol=0)
    assert made.data_ptr() == scratch.data_ptr()


@needs_blocked_order
def test_other_arithmetic_than_the_matrix_was_stored_for() -> None:
    plain, rows = matrix((48, 32)), matrix((3, 32), 1).float()
    torch.testing.assert_close(linear(rows, BlockedMatrix(plain)), rows @ plain.float().T, rtol=1e-5, atol=1e-5)


@needs_blocked_order
def test_what_cannot_be_blocked() -> None:
    assert can_be_blocked(matrix((4, 4)))
    for other in (matrix((4, 4)).float(), matrix((4, 4))[0], torch.zeros(4, 4, dtype=torch.uint8), "matrix"):
        assert not can_be_blocked(other)


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_a_processor_or_torch_without_it(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def refuse(matrix: Tensor) -> None:
        raise error("not here")

    monkeypatch.setattr(module, "BlockedMatrix", refuse)
    assert not module.is_supported.__wrapped__(BF16)


def layers() -> dict[str, Tensor]:
    return {
        f"model.layers.{index}.{name}": tensor
        for index in range(3)
        for name, tensor in {
            "mix.weight": matrix((48, 32), index),
            "norm": matrix((1, 16 + 16 * index), 10 + index)[0],  # records of several sizes
        }.items()
    } | {"head": matrix((8, 8), 20)}


@needs_blocked_order
@pytest.mark.parametrize("resident", [ALL, SOME])
def test_layers_keep_what_they_hold(tmp_path: Path, resident: tuple[int, ...]) -> None:
    tensors = layers()
    weights = tiered(open_with(tmp_path, tensors), BF16, resident, options=TierOptions(blocked=True))
    for index in range(3):
        with weights.layer(index) as layer:
            assert isinstance(layer["mix.weight"], BlockedMatrix) == (resident == ALL)  # else a pass waits for the disk
            for short, weight in layer.items():
                wanted = tensors[f"model.layers.{index}.{short}"]
                torch.testing.assert_close(dense(weight, BF16), wanted, rtol=0, atol=0)
    torch.testing.assert_close(weights.shared("head"), tensors["head"], rtol=0, atol=0)
    weights.close()


@needs_blocked_order
def test_a_layer_of_which_a_matrix_cannot_be_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one is not read over it."""
    tensors = layers()
    monkeypatch.setattr(
        module, "can_be_blocked", lambda weight: bool((weight != tensors["model.layers.1.mix.weight"]).any())
    )
    weights = tiered(open_with(tmp_path, tensors), BF16, options=TierOptions(blocked=True))
    for index in range(3):
        with weights.layer(index) as layer:
            assert isinstance(layer["mix.weight"], BlockedMatrix) == (index != 1)
            for short, weight in layer.items():
                wanted = tensors[f"model.layers.{index}.{short}"]
                torch.testing.assert_close(dense(weight, BF16), wanted, rtol=0, atol=0)
    weights.close()


def test_other_dtypes_stay_as_they_are(tmp_path: Path) -> None:
    tensors = layers()
    weights = tiered(open_with(tmp_path, tensors), torch.float32, options=TierOptions(blocked=True))
    for index in range(3):
        with weights.layer(index) as layer:
            for short, weight in layer.items():
                assert isinstance(weight, Tensor)
                torch.testing.assert_close(weight, tensors[f"model.layers.{index}.{short}"].float(), rtol=0, atol=0)
    weights.close()
