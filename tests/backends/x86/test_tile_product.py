"""Products in tiles: a row's bits do not depend on other rows, and are those of fused additions in one order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT
from offspec.backends.cpu import ExactCpuBackend, plain_product
from offspec.backends.x86.tile_product import COLUMNS, SIDE, TileProduct, in_tiles

from ...machines import AMX, AVX512_BF16, by_processor, run
from .test_row_bits import PANEL, SHAPE, STORED, assert_rows_alone_are_equal, product_with
from .test_row_product import noise

EXACT_ROWS = ExactCpuBackend(EXACT)

with_tiles = by_processor("processor", run(AMX))
LEAST = 2.0**-126  # the smallest normal number


@pytest.fixture(params=[1, 3], autouse=True)
def num_threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> None:
    set_threads(request.param)


def chains(matrix: Tensor, x: Tensor) -> Tensor:
    """Sums fp32 [R, N] of x [R, K] and a matrix [N, K], both bf16, by the rule in `tile_product`.

    A product of bf16 numbers is exact in fp64, and so is nearly each sum before it is rounded to fp32.
    """
    columns = [each.double().unflatten(-1, (-1, SIDE, 2)) for each in (matrix, x)]
    total = torch.zeros(len(x), len(matrix))
    for block in range(matrix.shape[1] // COLUMNS):
        even_and_odd = torch.zeros(2, len(x), len(matrix))
        for pair in range(SIDE):
            weights, numbers = (each[:, block, pair] for each in columns)
            products = numbers.T[:, :, None] * weights.T[:, None, :]
            even_and_odd = (products + even_and_odd.double()).float()
        total = total + (even_and_odd[0] + even_and_odd[1])
    return total


@pytest.mark.each_value
@with_tiles
@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**40])
@pytest.mark.parametrize("shape", [(1, 64), (16, 128), (40, 1088)], ids=str)
def test_sums_are_those_of_fused_additions(shape: tuple[int, int], scale: float) -> None:
    product = plain_product(torch.bfloat16)
    assert product is not None
    matrix, x = (noise(*shape, seed=1) * scale).bfloat16(), noise(35, shape[1]).bfloat16()
    assert torch.equal(in_tiles(product)(x, [matrix], shape[0], torch.float32), chains(matrix, x))


@with_tiles
def test_numbers_below_the_smallest_normal_one_are_zero() -> None:
    product = plain_product(torch.bfloat16)
    assert product is not None
    matrix, x = torch.full((1, 64), LEAST / 2).bfloat16(), torch.full((1, 64), 2.0).bfloat16()
    assert in_tiles(product)(x, [matrix], 1, torch.float32).item() == 0
    assert in_tiles(product)(x, [matrix * 2], 1, torch.float32).item() == 128 * LEAST


@pytest.mark.each_value
@pytest.mark.slow
@with_tiles
@pytest.mark.parametrize("form", STORED)
def test_rows_do_not_depend_on_their_number(form: str) -> None:
    """With whole rows of the matrix and with blocks of them, for rows of bf16 as they are and others."""
    product, parts, numbers = product_with(form)
    x = noise(PANEL, SHAPE[1]).bfloat16()
    assert_rows_alone_are_equal(in_tiles(product), x, parts, SHAPE[0])
    rounded = numbers.bfloat16().double()
    exact, size = x.double() @ rounded.T, x.double().abs() @ rounded.abs().T
    result = in_tiles(product)(x, parts, SHAPE[0]).double()
    assert ((result - exact).abs() <= 2e-6 * size + 2**-8 * exact.abs()).all()


@pytest.mark.each_value
@with_tiles
@pytest.mark.parametrize("num_outputs", [1, 15, 16, 33, 200])
def test_each_number_of_outputs_and_rows(num_outputs: int) -> None:
    """Also those that leave no whole tile; what is behind a result stays as it is."""
    product = plain_product(torch.bfloat16)
    assert product is not None
    matrix = noise(num_outputs, 576, seed=1).bfloat16()
    for num_rows in (1, 15, 16, 17, 32, 33, 130):
        x = noise(num_rows, 576).bfloat16()
        result = in_tiles(product)(x, [matrix], num_outputs, torch.float32)
        alone = torch.cat([in_tiles(product)(row[None], [matrix], num_outputs, torch.float32) for row in x])
        assert torch.equal(result, alone), num_rows
        assert torch.allclose(result, x.float() @ matrix.float().T, atol=1e-4, rtol=1e-4), num_rows


@with_tiles
def test_several_matrices_with_rows_of_their_own() -> None:
    matrices = [noise(48, 128, seed=seed).bfloat16() for seed in range(5)]
    x = noise(40, 128).bfloat16()
    counts = [3, 1, 17, 2, 17]
    together = EXACT_ROWS.linear_each(x, counts, matrices)
    alone = [EXACT_ROWS.linear(rows, matrix) for rows, matrix in zip(x.split(counts), matrices, strict=True)]
    assert torch.equal(together, torch.cat(alone))
    for result, matrix in zip(EXACT_ROWS.linears(x, matrices, [None] * 5), matrices, strict=True):
        assert torch.equal(result, EXACT_ROWS.linear(x, matrix))


@by_processor("takes_tiles, processor", (True, AMX), (False, AVX512_BF16))
def test_where_exact_rows_take_tiles(takes_tiles: bool) -> None:
    """bf16 rows, where the processor has tiles: a choice that needs none."""
    product = plain_product(torch.bfloat16)
    assert product is not None
    kernel = EXACT_ROWS.exact_kernel(product, torch.bfloat16)
    assert isinstance(kernel, TileProduct) if takes_tiles else kernel is product.in_pairs
    assert EXACT_ROWS.exact_kernel(product, torch.float32) is EXACT_ROWS.exact_kernel(product, torch.float16) is product
