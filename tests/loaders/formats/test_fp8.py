"""fp8 matrices are what their definition makes of the same bytes, bit for bit; lies are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.weights import dense
from offspec.backends.x86.unpack import WORTH_COMPILING
from offspec.errors import CheckpointError, UnsupportedModelError
from offspec.loaders.formats import StoredWeight

from ...examples import examples
from ...machines import needs_kernels
from ...refusals import refused
from ..fakes import stored_with as open_with
from .test_formats import bound, without

Tensors = dict[str, Tensor]
NAME = "mlp.up_proj.weight"
SCALE, INVERSE = f"{NAME}_scale", f"{NAME}_scale_inv"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EXPONENTS = torch.float8_e8m0fnu


def noise(*shape: int, seed: int = 0) -> Tensor:
    """fp32"""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def equal(one: Tensor, other: Tensor) -> bool:
    """NaN where the other has it."""
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(-7.5), other.nan_to_num(-7.5))


def said(*, method: str = "fp8", **more: Any) -> dict[str, Any]:
    return {"quant_method": method, "activation_scheme": "dynamic"} | more


def codes(num_outputs: int, num_inputs: int) -> Tensor:
    """Every code there is, NaN too, in any order."""
    random = torch.randint(0, 256, (num_outputs, num_inputs), generator=torch.Generator().manual_seed(num_inputs))
    return random.to(torch.uint8).view(torch.float8_e4m3fn)


def finite(matrix: Tensor) -> Tensor:
    """NaN's codes replaced."""
    raw = matrix.view(torch.uint8)
    return torch.where((raw & 127) == 127, raw - 1, raw).view(torch.float8_e4m3fn)


def exponents(*shape: int) -> Tensor:
    return torch.randint(110, 140, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3)).view(EXPONENTS)


def by_definition(matrix: Tensor, scales: Tensor, height: int, width: int) -> Tensor:
    """fp64 [N, K]"""
    spread = scales.float().double().repeat_interleave(height, 0).repeat_interleave(width, 1)
    return matrix.float().double() * spread[: matrix.shape[0], : matrix.shape[1]]


def assert_right(weight: StoredWeight, expected: Tensor) -> None:
    assert (weight.dtype, weight.shape) == ("fp8", expected.shape)
    for dtype in DTYPES:
        memory = torch.empty(expected.numel() + 3, dtype=dtype)
        assert equal(dense(bound(weight), dtype), expected.float().to(dtype))
        assert equal(dense(bound(weight), dtype, memory), expected.float().to(dtype))


@given(
    shape=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    block=st.tuples(*[st.sampled_from((1, 3, 16, 128, 1000))] * 2),
    kept=st.sampled_from((torch.float32, torch.bfloat16, EXPONENTS)),
    has_nan=st.booleans(),
)
@examples(60)
def test_blocks(
    shape: tuple[int, int],
    block: tuple[int, int],
    kept: torch.dtype,
    has_nan: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    matrix = codes(*shape) if has_nan else finite(codes(*shape))
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    scales = exponents(*grid) if kept is EXPONENTS else (10 ** noise(*grid)).to(kept)
    config = said(weight_block_size=list(block), scale_fmt="ue8m0" if kept is EXPONENTS else None)
    weights = open_with(tmp_path_factory.mktemp("any"), {NAME: matrix, INVERSE: scales}, config)
    assert_right(weights[NAME], by_definition(matrix, scales, *block))


@pytest.mark.parametrize("shape", [(), (1,), (40, 1), (40,)], ids=str)
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_rows_and_whole_matrices(method: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """As FBGEMM, AutoFP8 and Mistral have them."""
    matrix, scales = codes(40, 96), noise(*shape).abs() + 0.1
    name = SCALE if method == "fbgemm_fp8" else INVERSE
    beside = {"mlp.up_proj.input_scale": torch.ones(1), "mlp.up_proj.activation_scale": torch.ones(())}
    weight = open_with(tmp_path, {NAME: matrix, name: scales} | beside, said(method=method))[NAME]
    assert [info.name for info in weight.streamed] == [NAME, name]
    rows = scales.reshape(-1, 1)
    assert_right(weight, by_definition(matrix, rows, 40 if rows.shape[0] == 1 else 1, 96))


def test_several_tiles(tmp_path: Path) -> None:
    matrix, scales = codes(1300, 2000), noise(11, 16)
    matrix[:1048] = finite(matrix[:1048])
    weight = open_with(tmp_path, {NAME: matrix, INVERSE: scales}, said(weight_block_size=[128, 128]))[NAME]
    assert_right(weight, by_definition(matrix, scales, 128, 128))


@needs_kernels
@pytest.mark.parametrize("scales", [(1, 1), (300, 1), (3, 8)], ids=str)
def test_large_ones_are_unpacked_by_a_kernel_to_the_same_bits(scales: tuple[int, int], tmp_path: Path) -> None:
    matrix, config = codes(300, 1024), said(weight_block_size=[128, 128])
    numbers = (10 ** (4 * noise(*scales))).bfloat16()
    weight = open_with(tmp_path, {NAME: matrix, INVERSE: numbers}, config)[NAME]
    height, width = {1: (300, 1024), 300: (1, 1024), 3: (128, 128)}[scales[0]]
    assert math.prod(weight.shape) >= WORTH_COMPILING
    assert_right(weight, by_definition(matrix, numbers, height, width))


def test_as_transformers_has_it(tmp_path: Path) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    matrix, scales = finite(codes(256, 384)), noise(2, 3)
    weight = open_with(tmp_path, {NAME: matrix, INVERSE: scales}, said(weight_block_size=[128, 128]))[NAME]
    expected = fp8.Fp8Dequantize(None)._dequantize_one(matrix, scales)
    assert equal(dense(bound(weight), torch.float32), expected)


def test_modules_that_were_left_out_are_plain(tmp_path: Path) -> None:
    config = said(modules_to_not_convert=["lm_head"], weight_block_size=[128, 128])
    weights = open_with(tmp_path, {"lm_head.weight": noise(4, 8), "lm_head.input_scale": noise(1)}, config)
    assert {name: weight.is_packed for name, weight in weights.items()} == {"lm_head.weight": False}


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("scales", [(1, 1), (200, 1), (2, 2)], ids=str)
def test_kernels_know_nan(scales: tuple[int, int], tmp_path: Path) -> None:
    """And every other code, denormal ones too; each output is one of the matrix's numbers."""
    matrix = codes(200, 256)
    matrix.view(torch.uint8)[:, 0] = 56  # a row that is all NaN would not tell
    config = said(weight_block_size=[128, 128])
    weight = bound(open_with(tmp_path, {NAME: matrix, INVERSE: noise(*scales)}, config)[NAME])
    plain, wanted = dense(weight, torch.float32), torch.tensor([0, 1, 17, 255])
    for column in wanted.tolist():
        x = torch.zeros(1, 256)
        x[0, column] = 1
        found = linear(x, weight)[0]
        has_nan = plain.isnan().any(1)
        assert equal(found[~has_nan], plain[~has_nan, column])
        assert found[has_nan].isnan().all()


# ------------------------------------------------------------------------------------------------------------ refusals

SOUND = {NAME: codes(130, 256), INVERSE: torch.ones(2, 2)}
CHANGES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no scales": (lambda t: without(t, INVERSE), "weight_scale_inv"),
    "no codes": (lambda t: without(t, NAME), "missing"),
    "two kinds of scales": (lambda t: t | {SCALE: torch.ones(1)}, "weight_scale_inv and weight_scale"),
    "fewer scales": (lambda t: t | {INVERSE: torch.ones(2, 1)}, "F32 [2, 1]"),
    "scales without dimensions": (lambda t: t | {INVERSE: torch.ones(4)}, "F32 [4]"),
    "integer scales": (lambda t: t | {INVERSE: torch.ones(2, 2, dtype=torch.int64)}, "I64 [2, 2]"),
    "plain codes": (lambda t: t | {NAME: noise(130, 256)}, "F32 [130, 256]"),
    "codes in a row": (lambda t: t | {NAME: codes(1, 256)[0]}, "F8_E4M3 [256]"),
    "no rows": (lambda t: t | {NAME: codes(0, 256)}, "F8_E4M3 [0, 256]"),
    "other codes": (lambda t: t | {NAME: noise(130, 256).to(torch.float8_e5m2)}, "F8_E5M2"),
}


@pytest.mark.parametrize(("change", "word"), CHANGES.values(), ids=CHANGES)
def test_parts_that_do_not_fit(change: Callable[[Tensors], Tensors], word: str, tmp_path: Path) -> None:
    with refused(CheckpointError, tmp_path, word):
        open_with(tmp_path, change(SOUND), said(weight_block_size=[128, 128]))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (said(weight_block_size=[128, 64]), "(128, 64)"),
        (said(), "without blocks"),
        (said(weight_block_size=[128]), "weight_block_size [128]"),
        (said(weight_block_size=[128, 0]), "weight_block_size"),
        (said(weight_block_size="128x128"), "weight_block_size"),
        (said(weight_block_size=[128, True]), "weight_block_size"),
        (said(weight_block_size=[2**70, 128]), "weight_block_size"),
        (said(fmt="e5m2"), "'e5m2'"),
        (said(method="gguf"), "quantization_config"),
        (None, "quantization_config"),
    ],
)
def test_a_config_that_lies(config: object, word: str, tmp_path: Path) -> None:
    error = UnsupportedModelError if word == "'e5m2'" else CheckpointError
    with refused(error, tmp_path, word):
        open_with(tmp_path, SOUND, config)
