"""A row's product has the same bits however many rows are multiplied, and wherever among them it lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT
from offspec.backends.cpu import ExactCpuBackend, plain_product
from offspec.backends.weights import PackedMatrix, dense
from offspec.backends.x86.encodings import Encoding, Float16
from offspec.backends.x86.row_product import RowProduct
from offspec.loaders.machine.product_rates import sample

from ...machines import AVX2, AVX512, AVX512_BF16, by_processor, each_processor, lanes, run
from .test_row_product import MATRICES as ENCODED
from .test_row_product import each_encoding, noise, parts_of, product_of

SHAPE = (51, 2304)  # no whole tiles or chunks; more columns than a partial sum has, also of bf16 factors
PANEL = 66  # rows that take a panel with every encoding, in no whole tiles
SLICES = [(place % 2, place % 2 + rows) for place, rows in enumerate((1, 1, 2, 3, 4, 5, 8, 17, 64))]
STORED = ("bf16", "nf4", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "bf16-packed")


def assert_rows_alone_are_equal(product: RowProduct, x: Tensor, parts: list[Tensor], num_outputs: int) -> None:
    together = product(x, parts, num_outputs)
    for first, last in SLICES:
        assert torch.equal(product(x[first:last], parts, num_outputs), together[first:last]), (first, last)


@pytest.mark.slow
@each_encoding
def test_rows_do_not_depend_on_their_number(name: str) -> None:
    matrix = ENCODED[name][1](*SHAPE)
    assert_rows_alone_are_equal(product_of(name), noise(PANEL, SHAPE[1]), parts_of(matrix), SHAPE[0])


def product_with(form: str) -> tuple[RowProduct, list[Tensor], Tensor]:
    """A kernel for stored weights of a form, a matrix's parts, and its numbers in fp32."""
    matrix = sample(form, SHAPE)
    if isinstance(matrix, PackedMatrix):
        assert matrix.kernel is not None
        return *matrix.kernel, dense(matrix, torch.float32)
    numbers = noise(*SHAPE, seed=1).to(torch.bfloat16)
    product = plain_product(torch.bfloat16)
    assert product is not None
    return product, [numbers], numbers.float()


@pytest.mark.each_value
@pytest.mark.slow
@each_processor
@pytest.mark.parametrize("form", STORED)
def test_stored_weights(form: str) -> None:
    """Rows do not depend on their number, and the numbers are those of factors in fp32, or rounded to bf16."""
    plain, parts, numbers = product_with(form)
    for dtype in (torch.float32, torch.bfloat16):
        product, x = ExactCpuBackend(EXACT).exact_kernel(plain, dtype), noise(PANEL, SHAPE[1]).to(dtype)
        assert_rows_alone_are_equal(product, x, parts, SHAPE[0])
        factors = (numbers if product is plain else numbers.to(dtype)).double()
        exact, size = x.double() @ factors.T, x.double().abs() @ factors.abs().T
        sums = product(x, parts, SHAPE[0]).double()
        assert ((sums - exact).abs() <= 2e-6 * size + torch.finfo(dtype).eps * exact.abs()).all()


@by_processor("in_pairs, processor", run(False, AVX2), run(False, AVX512), run(True, AVX512_BF16))
def test_a_panel_does_not_change_a_bit(in_pairs: bool) -> None:
    """The same rows, once with weights that are unpacked in registers, once with a panel."""
    matrix, x = noise(*SHAPE, seed=2).to(torch.bfloat16), noise(9, SHAPE[1]).to(torch.bfloat16)
    direct, by_panel = (RowProduct(with_most_direct(most), in_pairs=in_pairs) for most in (64, 0))
    assert torch.equal(direct(x, [matrix], SHAPE[0]), by_panel(x, [matrix], SHAPE[0]))


def with_most_direct(most: int) -> Encoding:
    encoding = Float16(lanes(), "bf16")
    encoding.most_direct = most
    return encoding
