"""Exact products: the same bits for a row however many rows there are, in every format and shape."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT
from offspec.backends.choice import CPU, backend_of
from offspec.backends.cpu import can_be_exact
from offspec.backends.weights import PackedMatrix, Weight, dense
from offspec.loaders.files.checkpoint import Order
from offspec.loaders.formats.bf16_bits import pack
from offspec.loaders.formats.bf16_packed import PackedBf16Matrix
from offspec.loaders.formats.changed import ReorderedMatrix
from offspec.loaders.formats.grouped import GroupedMatrix
from offspec.loaders.formats.int8 import Int8Matrix
from offspec.loaders.machine.product_rates import sample

from ...machines import AMX, AVX512_BF16, by_processor, each_processor, needs_kernels, run

pytestmark = needs_kernels
each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
ROWS = (1, 2, 3, 4, 5, 8, 17, 64)
EXACT_ROWS = backend_of(CPU, EXACT)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_exact(weight: Weight, dtype: torch.dtype, most_rows: int = 70) -> None:
    """Of any rows together, any of them alone are the same; and they are those of the matrix's numbers."""
    num_outputs, num_columns = weight.shape
    x, bias = noise(most_rows, num_columns, seed=1).to(dtype), noise(num_outputs, seed=2).to(dtype)
    together = EXACT_ROWS.linear(x, weight, bias)
    for num_rows in ROWS:
        for first in (0, most_rows - num_rows):
            found = EXACT_ROWS.linear(x[first : first + num_rows], weight, bias)
            assert torch.equal(found, together[first : first + num_rows]), num_rows
    exact = x.double() @ dense(weight, torch.float32).double().T + bias.double()
    assert ((together.double() - exact).abs() <= 2**-6 * exact.abs().max()).all()


@pytest.mark.each_value
@each_processor
@each_dtype
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", [(7, 33), (65, 2048 + 96)], ids=str)
def test_plain_matrices(shape: tuple[int, int], stored: torch.dtype, dtype: torch.dtype) -> None:
    """Columns that no kernel reads, and more of them than a partial sum has."""
    assert_exact(noise(*shape).to(stored), dtype)


@pytest.mark.each_value
@each_processor
@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "bf16-packed"])
def test_streamed_bf16_has_the_bits_of_resident_fp16(is_packed: bool) -> None:
    """A resident matrix was rounded to fp16 when it was loaded, whose least numbers are larger than bf16's."""
    matrix = (1e-6 * noise(24, 2048)).bfloat16()
    bits = pack(matrix)
    assert bits is not None
    streamed = PackedBf16Matrix(bits) if is_packed else matrix
    x = (100 * noise(3, 2048, seed=1)).half()
    resident = EXACT_ROWS.linear(x, matrix.half())
    assert torch.equal(EXACT_ROWS.linear(x, streamed), resident)
    scratch = torch.empty(matrix.numel(), dtype=torch.float16)
    assert torch.equal(EXACT_ROWS.linear(x, streamed, scratch=scratch), resident)
    exact = x.double() @ matrix.double().T
    assert not torch.equal(resident, exact.half()), "no number was rounded"


WITH_KERNELS = ("nf4", "fp4", "int8", "Q8_0", "Q4_K", "Q6_K", "bf16-packed", "fp8", "w4a16")
UNPACKED_FIRST = ("awq", "gptq", "IQ2_XS", "IQ3_S")


@pytest.mark.each_value
@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("form", [*WITH_KERNELS, *UNPACKED_FIRST])
def test_packed_matrices(form: str, dtype: torch.dtype) -> None:
    weight = sample(form, (48, 512))
    assert weight is not None
    if isinstance(weight, GroupedMatrix | Int8Matrix):  # a sample's scales may be any numbers
        weight = replace(weight, scales=noise(*weight.scales.shape).abs().to(weight.scales.dtype) / 64)
    assert_exact(weight, dtype)


@each_processor
def test_many_rows() -> None:
    assert_exact(noise(33, 128).to(torch.bfloat16), torch.bfloat16, most_rows=1100)


def test_matrices_in_another_order() -> None:
    matrix = noise(32, 128).to(torch.bfloat16)
    assert_exact(ReorderedMatrix(matrix, Order(2, groups=2)), torch.bfloat16)


@pytest.mark.each_value
@pytest.mark.slow
@each_processor
@each_half
def test_packed_bf16_has_the_bits_of_the_plain_matrix(dtype: torch.dtype) -> None:
    packed, x = sample("bf16-packed", (48, 2304)), noise(9, 2304).to(dtype)
    assert isinstance(packed, PackedMatrix)
    plain = EXACT_ROWS.linear(x, packed.dequantize(torch.bfloat16))
    assert torch.equal(EXACT_ROWS.linear(x, packed), plain)
    assert torch.equal(EXACT_ROWS.linear(x[:1], packed), plain[:1])


@pytest.mark.each_value
@each_processor
@pytest.mark.parametrize("others", [["bf16"], ["bf16", "fp32"]], ids=["one kernel", "two kernels"])
def test_several_matrices_are_each_alone(others: list[str]) -> None:
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    weights = [noise(40 + 8 * i, 128, seed=i).to(dtypes[form]) for i, form in enumerate(["bf16", *others])]
    biases = [None, *(noise(len(weight), seed=9) for weight in weights[1:])]
    x = noise(3, 128).bfloat16()
    together = EXACT_ROWS.linears(x, weights, biases)
    alone = [EXACT_ROWS.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))


@pytest.mark.each_value
@each_processor
@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_are_used_again_behind_the_last_one(num_rows: int) -> None:
    weights = [noise(40, 128, seed=i).bfloat16() for i in range(6)]
    x = noise(num_rows, 128).bfloat16()
    together = EXACT_ROWS.linear_each(x, [1] * 6, weights)
    alone = [EXACT_ROWS.linear(x[i % num_rows, None], weight) for i, weight in enumerate(weights)]
    assert torch.equal(together, torch.cat(alone))


@by_processor("processor", run(AVX512_BF16), run(AMX))
def test_bf16_rows_take_bf16_factors() -> None:
    """fp16 weights are rounded to bf16, as when they are converted."""
    weight, x = noise(64, 256).to(torch.float16), noise(3, 256).to(torch.bfloat16)
    product = partial(EXACT_ROWS.linear, x)
    assert torch.equal(product(weight), product(weight.to(torch.bfloat16)))


def test_gradients_and_other_dtypes_take_their_usual_ways() -> None:
    weight, x = noise(64, 256), noise(2, 256)
    wide = x.double()
    assert torch.equal(EXACT_ROWS.linear(wide, weight), torch.nn.functional.linear(wide, weight.double()))
    half = x.to(torch.bfloat16).requires_grad_()
    assert EXACT_ROWS.linear(half, weight.to(torch.bfloat16)).requires_grad
    assert not can_be_exact(torch.float64)
