"""GGUF's quantised types are what the `gguf` package makes of the same blocks, bit for bit; what lies is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from offspec.backends import gpu
from offspec.backends.choice import linear
from offspec.backends.cpu import CpuBackend
from offspec.errors import CheckpointError, UnsupportedModelError
from offspec.loaders.files.checkpoint import TensorInfo
from offspec.loaders.files.gguf_types import GGUF_TYPES
from offspec.loaders.formats import stored_weights
from offspec.loaders.formats.gguf import QUANTISED, GgufMatrix
from offspec.loaders.formats.gguf_blocks import GRID_TYPES, HALVES, check_grid
from offspec.loaders.streaming.weights import RamWeights

from ...refusals import refused
from ..gguf_samples import NAMES, edge_blocks, info_of, matrix_of, oracle, random_blocks, same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_every_quantised_type_is_read() -> None:
    assert {kind.name for kind in GGUF_TYPES.values()} - {"F32", "F16", "BF16", "I64"} == set(NAMES) == set(HALVES)


@pytest.mark.parametrize("name", NAMES)
def test_dequantised_as_the_gguf_package_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a matrix is no whole number of tiles, and its bytes begin at an odd place."""
    monkeypatch.setattr(CpuBackend, "tile", 4096)
    rows = random_blocks(name, 23, 3)
    expected = oracle(name, rows)
    assert expected.isfinite().all()
    shifted = torch.empty(rows.numel() + 1, dtype=torch.uint8)[1:].view(rows.shape).copy_(rows)
    for matrix in (matrix_of(name, rows), matrix_of(name, shifted)):
        assert matrix.shape == tuple(expected.shape)
        for dtype in DTYPES:
            assert same_bits(matrix.dequantize(dtype), expected.to(dtype))
            out = torch.full(matrix.shape, torch.nan, dtype=dtype)
            assert matrix.dequantize(dtype, out) is out
            assert same_bits(out, expected.to(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_edge_values(name: str) -> None:
    blocks = edge_blocks(name)
    expected = oracle(name, blocks)
    for rows in (blocks, blocks[5:6]):
        found = torch.empty(rows.shape[0], expected.shape[1])
        matrix_of(name, rows).unpack(found)
        assert same_bits(found, expected if len(rows) > 1 else expected[5:6])
        assert same_bits(matrix_of(name, rows).dequantize(torch.float32), found)


@pytest.mark.parametrize("name", NAMES)
def test_products_and_rows(name: str) -> None:
    rows = random_blocks(name, 40, 2, seed=1)
    matrix, plain = matrix_of(name, rows), oracle(name, rows)
    x, bias = torch.randn(5, plain.shape[1]), torch.randn(40)
    scratch = torch.empty(plain.numel())
    expected = F.linear(x, plain, bias)
    torch.testing.assert_close(linear(x, matrix, bias, scratch), expected, rtol=1e-5, atol=1e-4 * plain.abs().max())
    indices = torch.tensor([39, 0, 7, 7])
    taken = matrix.take(indices)
    assert isinstance(taken, GgufMatrix)
    assert same_bits(taken.dequantize(torch.float32), plain[indices])


def test_a_packed_embedding_in_memory() -> None:
    rows = random_blocks("Q6_K", 40, 1)
    weights = RamWeights([], {"embed": matrix_of("Q6_K", rows)}, torch.bfloat16)
    indices = torch.tensor([3, 3, 39])
    assert same_bits(weights.rows("embed", indices), oracle("Q6_K", rows)[indices].bfloat16())


# ------------------------------------------------------------------------------------------- reading checkpoints


@pytest.fixture
def info(tmp_path: Path) -> TensorInfo:
    return info_of(tmp_path / "model.gguf", "w", random_blocks("Q4_K", 8, 3), "Q4_K")


def test_a_weight_is_its_blocks(info: TensorInfo) -> None:
    weight = stored_weights({"w": info})["w"]
    assert (weight.name, weight.shape, weight.dtype, weight.is_packed) == ("w", (8, 768), "Q4_K", True)
    assert weight.streamed == (info,)
    assert weight.is_kept_as_read(torch.float16)
    raw = torch.frombuffer(bytearray(info.path.read_bytes()), dtype=torch.uint8)
    matrix = weight.bind([raw])
    assert isinstance(matrix, GgufMatrix)
    assert matrix.blocks.data_ptr() == raw.data_ptr()
    assert same_bits(matrix.dequantize(torch.float32), oracle("Q4_K", raw.view(8, -1)))


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_ordinary_numbers(name: str, tmp_path: Path) -> None:
    info = info_of(tmp_path / "model.gguf", "w", random_blocks(name, 8, 3), name)
    sample = stored_weights({"w": info})["w"].sample(torch.device("cpu"))
    assert not isinstance(sample, torch.Tensor)
    assert sample.shape == info.shape
    assert sample.dequantize(torch.float32).isfinite().all()


@pytest.mark.parametrize(
    ("shape", "nbytes", "said"),
    [
        ((8 * 768,), 8 * 432, "should be a matrix"),
        ((2, 4, 768), 8 * 432, "should be a matrix"),
        ((0, 768), 0, "should be a matrix"),
        ((8, 760), 8 * 432, "with 760 inputs, not a multiple of 256"),
        ((8, 768), 8 * 432 - 1, "in 3455 bytes, but needs 3456"),
        ((8, 768), 8 * 768, "in 6144 bytes, but needs 3456"),
        ((10**9, 10**9 // 256 * 256), 8 * 432, "but needs"),
    ],
)
def test_damaged_shapes_are_refused(info: TensorInfo, shape: tuple[int, ...], nbytes: int, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as error:
        stored_weights({"w": replace(info, shape=shape, nbytes=nbytes)})
    assert str(info.path) in str(error.value)
    assert "\n" not in str(error.value)


def test_grids_need_the_gguf_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from offspec.loaders.formats import gguf_blocks

    monkeypatch.setitem(sys.modules, "gguf", None)
    gguf_blocks._grid.cache_clear()
    for name in NAMES:
        info = info_of(tmp_path / "model.gguf", "w", random_blocks(name, 1, 1), name)
        if name in GRID_TYPES:
            with refused(UnsupportedModelError, name, "pip install 'offspec[gguf]'"):
                stored_weights({"w": info})
        else:
            assert stored_weights({"w": info})["w"].dtype == name
    monkeypatch.undo()
    for name in GRID_TYPES:
        check_grid(name)


def test_blocks_are_those_that_ggml_has() -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for number, kind in GGUF_TYPES.items():
        assert GGMLQuantizationType(number).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.num_weights, kind.num_bytes)
    assert len(QUANTISED) == 20


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_a_large_head_is_multiplied_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where there is no memory for all of it unpacked; the last slice is shorter."""
    rows = random_blocks(name, 23, 2)
    matrix = matrix_of(name, rows)
    monkeypatch.setattr(gpu, "SLICE", 10 * matrix.shape[1] + 3)
    x = torch.randn(3, matrix.shape[1], generator=torch.Generator().manual_seed(0))
    expected = x @ oracle(name, rows).T
    torch.testing.assert_close(
        gpu.GpuBackend().linear_fp32(x, matrix), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
    )
    assert gpu.slice_elements(matrix.shape) == gpu.SLICE
