"""A matrix has one exact product, whatever holds it: resident, streamed, alone or beside others, once or again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT
from offspec.backends.choice import CPU, backend_of
from offspec.backends.weights import Weight, dense
from offspec.loaders.formats.bf16_bits import pack
from offspec.loaders.formats.bf16_packed import PackedBf16Matrix
from offspec.loaders.formats.grouped import GroupedMatrix
from offspec.loaders.formats.int8 import Int8Matrix
from offspec.loaders.machine.product_rates import sample

from ...machines import needs_kernels

pytestmark = needs_kernels
BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
COLUMNS = (32, 64, 96, 160, 176, 352)
ROWS = (1, 2, 5, 17, 64)
OUTPUTS = 40
PLAIN = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
PACKED = ("nf4", "fp4", "int8", "fp8", "w4a16", "awq", "gptq", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS")
EXACT_ROWS = backend_of(CPU, EXACT)
WAYS: dict[str, Callable[[Tensor, Weight], Tensor]] = {
    "linear": EXACT_ROWS.linear,
    "linears": lambda x, weight: EXACT_ROWS.linears(x, [weight, weight], [None, None])[1],
    "linear_each": lambda x, weight: EXACT_ROWS.linear_each(x, [len(x), len(x)], [weight, weight])[len(x) :],
    "linear_fp32": lambda x, weight: EXACT_ROWS.linear_fp32(x, weight).to(x.dtype),
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(num_columns: int, dtype: torch.dtype) -> Tensor:
    return noise(max(ROWS), num_columns, seed=1).to(dtype)


def assert_one_product(weights: list[Weight], x: Tensor) -> None:
    """Each of the weights, which hold the same matrix, in each way and again, with the bits of one row alone."""
    expected = torch.cat([EXACT_ROWS.linear(row[None], weights[0]) for row in x])
    logits = torch.cat([EXACT_ROWS.linear_fp32(row[None], weights[0]) for row in x])
    for weight in weights:
        for num_rows in ROWS:
            for name, way in WAYS.items():
                for _ in range(2):
                    assert torch.equal(way(x[:num_rows], weight), expected[:num_rows]), (name, num_rows)
            assert torch.equal(EXACT_ROWS.linear_fp32(x[:num_rows], weight), logits[:num_rows]), num_rows
    assert logits.dtype == FP32


@pytest.mark.each_value(together=2)
@each_dtype
@pytest.mark.parametrize("num_columns", COLUMNS)
@pytest.mark.parametrize("stored", PLAIN)
def test_plain_matrices(stored: str, num_columns: int, dtype: torch.dtype) -> None:
    """A resident one was converted to the rows' dtype when it was loaded; a streamed one is as it is stored."""
    matrix = (noise(OUTPUTS, num_columns) * 2e-6).to(PLAIN[stored])
    assert_one_product([matrix.to(dtype), matrix], rows(num_columns, dtype))


@pytest.mark.each_value
@each_dtype
@pytest.mark.parametrize("num_columns", COLUMNS)
def test_packed_bf16(num_columns: int, dtype: torch.dtype) -> None:
    """A resident one was unpacked, and then converted. Many of these numbers fp16 has not."""
    bits = pack((noise(OUTPUTS, num_columns) * 2e-6).bfloat16())
    assert bits is not None
    streamed = PackedBf16Matrix(bits)
    assert_one_product([streamed.dequantize(BF16).to(dtype), streamed], rows(num_columns, dtype))


@pytest.mark.each_value
@each_dtype
@pytest.mark.parametrize("form", PACKED)
def test_quantised_matrices(form: str, dtype: torch.dtype) -> None:
    """They are multiplied as they are stored, wherever they lie."""
    weight = sample(form, (OUTPUTS, 512))
    assert weight is not None
    if isinstance(weight, GroupedMatrix | Int8Matrix):  # a sample's scales may be any numbers
        weight = replace(weight, scales=noise(*weight.scales.shape).abs().to(weight.scales.dtype) / 64)
    assert dense(weight, FP32).isfinite().all()
    assert_one_product([weight], rows(512, dtype))
