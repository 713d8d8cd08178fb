"""A row's product has the same bits however many rows are multiplied, and wherever among them it lies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offspec.loaders.formats import dense
from offspec.loaders.formats.core import PackedMatrix
from offspec.loaders.formats.products import plain_product
from offspec.loaders.kernels.encodings import Encoding, Float16
from offspec.loaders.kernels.processor import can_pair, instructions
from offspec.loaders.kernels.row_product import RowProduct
from offspec.loaders.machine.product_costs import sample

from .test_row_product import MATRICES as ENCODED
from .test_row_product import each_encoding, needs_kernels, noise, parts_of, product_of

SHAPE = (51, 2304)  # no whole tiles or chunks; more columns than a partial sum has, also of bf16 factors
PANEL = 66  # rows that take a panel with every encoding, in no whole tiles
SLICES = [(place % 2, place % 2 + rows) for place, rows in enumerate((1, 1, 2, 3, 4, 5, 8, 17, 64))]
STORED = ("bf16", "nf4", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "bf16-packed")

needs_pairs = pytest.mark.skipif(not can_pair(), reason="this processor has no AVX512-BF16")


def assert_rows_alone_are_equal(product: RowProduct, x: Tensor, parts: list[Tensor], num_outputs: int) -> None:
    together = product(x, parts, num_outputs)
    for first, last in SLICES:
        assert torch.equal(product(x[first:last], parts, num_outputs), together[first:last]), (first, last)


@pytest.mark.slow
@each_encoding
def test_rows_do_not_depend_on_their_number(name: str, lanes: int) -> None:
    matrix = ENCODED[name][1](*SHAPE)
    assert_rows_alone_are_equal(product_of(name, lanes), noise(PANEL, SHAPE[1]), parts_of(matrix), SHAPE[0])


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


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("form", STORED)
def test_stored_weights(form: str) -> None:
    product, parts, _ = product_with(form)
    assert_rows_alone_are_equal(product, noise(PANEL, SHAPE[1]), parts, SHAPE[0])


@pytest.mark.slow
@needs_pairs
@pytest.mark.parametrize("form", STORED)
def test_products_in_pairs(form: str) -> None:
    """Rows do not depend on their number, and the numbers are those of factors rounded to bf16."""
    product, parts, numbers = product_with(form)
    x = noise(PANEL, SHAPE[1]).to(torch.bfloat16)
    assert_rows_alone_are_equal(product.in_pairs, x, parts, SHAPE[0])
    rounded = numbers.to(torch.bfloat16).double()
    exact, size = x.double() @ rounded.T, x.double().abs() @ rounded.abs().T
    found = product.in_pairs(x, parts, SHAPE[0]).double()
    assert ((found - exact).abs() <= 2e-6 * size + 2**-8 * exact.abs()).all()


@needs_kernels
@pytest.mark.parametrize("in_pairs", [False, pytest.param(True, marks=needs_pairs)])
def test_a_panel_does_not_change_a_bit(in_pairs: bool) -> None:
    """The same rows, once with weights that are unpacked in registers, once with a panel."""
    lanes = 16 if "avx512" in instructions() else 8
    matrix, x = noise(*SHAPE, seed=2).to(torch.bfloat16), noise(9, SHAPE[1]).to(torch.bfloat16)
    direct, by_panel = (RowProduct(with_most_direct(lanes, most), in_pairs=in_pairs) for most in (64, 0))
    assert torch.equal(direct(x, [matrix], SHAPE[0]), by_panel(x, [matrix], SHAPE[0]))


def with_most_direct(lanes: int, most: int) -> Encoding:
    encoding = Float16(lanes, "bf16")
    encoding.most_direct = most
    return encoding
