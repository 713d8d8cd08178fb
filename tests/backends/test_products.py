"""`weights.linear` on a CPU: the way that the costs say, and whichever it is the same product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.products import (
    KERNEL,
    LARGE_ELEMENTS,
    TILE_ROWS,
    TILES,
    TORCH,
    MethodCosts,
    ProductCosts,
    ProductKind,
    between,
)
from offspec.backends.weights import Weight, dense, linear
from offspec.backends.x86.row_product import RowProduct
from offspec.loaders.formats.four_bit import CODES, Layout4bit, Matrix4bit
from offspec.loaders.formats.int8 import Int8Matrix

from ..machines import needs_kernels

FORMS = ("bf16", "fp16", "int8", "nf4")
WAYS = (TORCH, TILES, KERNEL)
NUM_OUTPUTS, NUM_COLUMNS = 2 * TILE_ROWS + 6, 128
# Kernels are best for few rows, tiles for more, torch for many.
COSTS = MethodCosts(
    {
        KERNEL: {1: 1e-10, 4: 1e-10, 16: 9e-10},
        TILES: {1: 3e-10, 4: 3e-10, 16: 3e-10, 64: 9e-10},
        TORCH: {1: 4e-10, 4: 4e-10, 16: 4e-10, 64: 4e-10},
    }
)
BEST = {1: KERNEL, 3: KERNEL, 12: TILES, 16: TILES, 64: TORCH, 200: TORCH}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(form: str, num_outputs: int = NUM_OUTPUTS, num_columns: int = NUM_COLUMNS) -> Weight:
    generator, shape = torch.Generator().manual_seed(1), (num_outputs, num_columns)
    if form == "int8":
        codes = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        return Int8Matrix(codes, noise(num_outputs).abs())
    if form in CODES:
        codes = torch.randint(0, 256, (num_outputs * num_columns // 2,), dtype=torch.uint8, generator=generator)
        return Matrix4bit(Layout4bit(shape, form, 64), codes, noise(num_outputs * num_columns // 64).abs())
    return noise(*shape, seed=1).to({"bf16": torch.bfloat16, "fp16": torch.float16}[form])


class Spy:
    """Counts what multiplies: kernels, and torch's products by the rows of their matrices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels, self.torch = 0, Counter[int]()
        run, torch_linear = RowProduct.__call__, F.linear

        def count_kernel(product: RowProduct, x: Tensor, parts: Sequence[Tensor], num_outputs: int) -> Tensor:
            self.kernels += 1
            return run(product, x, parts, num_outputs)

        def count_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            self.torch[weight.shape[0]] += 1
            return torch_linear(x, weight, bias)

        monkeypatch.setattr(RowProduct, "__call__", count_kernel)
        monkeypatch.setattr(F, "linear", count_torch)

    def way(self) -> str:
        """The one that was taken since it was last asked."""
        if self.kernels:
            assert not self.torch
            found = KERNEL
        else:
            (found,) = (way for way, calls in _TORCH_CALLS.items() if calls == self.torch)
        self.kernels, self.torch = 0, Counter()
        return found


_TORCH_CALLS = {TORCH: {NUM_OUTPUTS: 1}, TILES: {TILE_ROWS: 2, NUM_OUTPUTS % TILE_ROWS: 1}}


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def know(costs: ProductCosts, form: str, dtype: torch.dtype) -> None:
    for is_large in (False, True):
        costs.set(ProductKind(form, dtype, is_large), COSTS)


# ------------------------------------------------------------------------------------------------ which way


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_way_that_costs_least_is_taken(
    form: str, dtype: torch.dtype, product_costs: ProductCosts, spy: Spy
) -> None:
    know(product_costs, form, dtype)
    weight, bias = matrix(form), noise(NUM_OUTPUTS, seed=2)
    scratch = torch.empty(NUM_OUTPUTS * NUM_COLUMNS, dtype=dtype)
    for num_rows, best in BEST.items():
        expected = best if form in ("bf16", "fp16") or best == KERNEL else TORCH  # tiles are for plain matrices
        x = noise(num_rows, NUM_COLUMNS).to(dtype)
        for added in (None, bias):
            for memory in (None, scratch):
                linear(x, weight, added, memory)
                assert spy.way() == expected, num_rows


@needs_kernels
def test_rows_are_counted_over_all_dimensions(product_costs: ProductCosts, spy: Spy) -> None:
    know(product_costs, "bf16", torch.float32)
    weight = matrix("bf16")
    for shape, expected in {(): KERNEL, (3,): KERNEL, (1, 3): KERNEL, (3, 4): TILES, (10, 20): TORCH}.items():
        assert linear(noise(*shape, NUM_COLUMNS), weight).shape == (*shape, NUM_OUTPUTS)
        assert spy.way() == expected


def test_costs_are_those_of_form_dtype_and_size(product_costs: ProductCosts, spy: Spy) -> None:
    x, weight = noise(3, NUM_COLUMNS), matrix("bf16")
    small = ProductKind("bf16", torch.float32, is_large=False)
    tiles = MethodCosts({TORCH: {1: 2e-9}, TILES: {1: 1e-9}})
    for other in (
        ProductKind("fp16", torch.float32, is_large=False),
        ProductKind("bf16", torch.bfloat16, is_large=False),
        ProductKind("bf16", torch.float32, is_large=True),
    ):
        product_costs.set(other, tiles)
        linear(x, weight)
        assert spy.way() == TORCH
    product_costs.set(small, tiles)
    linear(x, weight)
    assert spy.way() == TILES
    product_costs.set(small, MethodCosts({TORCH: {1: 1e-9}, TILES: {1: 2e-9}}))
    linear(x, weight)
    assert spy.way() == TORCH
    assert not ProductKind.of("bf16", torch.float32, LARGE_ELEMENTS - 1).is_large
    assert ProductKind.of("bf16", torch.float32, LARGE_ELEMENTS).is_large


def test_what_was_forgotten_is_unknown(product_costs: ProductCosts, spy: Spy) -> None:
    know(product_costs, "bf16", torch.float32)
    linear(noise(16, NUM_COLUMNS), matrix("bf16"))
    assert spy.way() == TILES
    product_costs.clear()
    assert product_costs.get(ProductKind("bf16", torch.float32, is_large=False)) is None
    linear(noise(16, NUM_COLUMNS), matrix("bf16"))
    assert spy.way() == TORCH


@pytest.mark.usefixtures("product_costs")
@pytest.mark.parametrize("form", FORMS)
def test_without_costs_products_are_torchs_to_the_bit(form: str) -> None:
    weight, bias = matrix(form), noise(NUM_OUTPUTS, seed=2)
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows in (1, 5, 64):
            x = noise(num_rows, NUM_COLUMNS).to(dtype)
            expected = F.linear(x, dense(weight, dtype), bias.to(dtype))
            assert torch.equal(linear(x, weight, bias), expected)
            scratch = torch.empty(NUM_OUTPUTS * NUM_COLUMNS, dtype=dtype)
            assert torch.equal(linear(x, weight, bias, scratch), expected)


def test_the_line_between_points() -> None:
    points = {16: 4.0, 1: 1.0, 4: 2.0}
    assert [between(points, place) for place in (0, 1, 4, 16)] == [1.0, 1.0, 2.0, 4.0]
    assert between(points, 3) == pytest.approx(1 + 2 / 3)
    assert between(points, 10) == pytest.approx(3.0)
    assert between(points, 64) == pytest.approx(16.0)  # at its rate a row
    assert between({8: 2.0}, 4) == 2.0
    assert COSTS.least(1) == pytest.approx(1e-10)
    assert {num_rows: COSTS.method(num_rows) for num_rows in BEST} == BEST


# ------------------------------------------------------------------------------------------------ the same product


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_all_ways_agree_within_rounding(form: str, product_costs: ProductCosts) -> None:
    weight, bias = matrix(form), noise(NUM_OUTPUTS, seed=2)
    for dtype, tolerance in {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}.items():
        for shape in ((), (1,), (7,), (2, 40)):
            x = noise(*shape, NUM_COLUMNS).to(dtype)
            for added in (None, bias):
                expected = x.double() @ dense(weight, torch.float32).double().T
                expected += 0 if added is None else added.double()
                for way in WAYS:
                    product_costs.forced = way
                    found = linear(x, weight, added, torch.empty(NUM_OUTPUTS * NUM_COLUMNS, dtype=dtype))
                    assert found.dtype == dtype
                    size = float(expected.abs().max())
                    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("way", WAYS)
def test_a_bias_is_left_as_it_is(way: str, product_costs: ProductCosts) -> None:
    product_costs.forced = way
    bias = noise(NUM_OUTPUTS, seed=2)
    linear(noise(3, NUM_COLUMNS), matrix("bf16"), bias)
    assert torch.equal(bias, noise(NUM_OUTPUTS, seed=2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_flow(form: str, way: str, product_costs: ProductCosts) -> None:
    """Training goes torch's way; beside it nothing changes."""
    product_costs.forced = way
    weight, x = matrix(form), noise(5, NUM_COLUMNS).requires_grad_()
    linear(x, weight).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dense(weight, torch.float32).sum(0).expand(5, -1), rtol=1e-4, atol=1e-4)
    if isinstance(weight, Tensor):
        weight.requires_grad_()
        linear(x.detach(), weight).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        expected = x.detach().sum(0).expand(NUM_OUTPUTS, -1)
        torch.testing.assert_close(weight.grad.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", FORMS)
def test_no_unpacked_copy_waits_for_gradients(form: str) -> None:
    """Training a head multiplies with the target's packed one many times in a step."""
    kept = list[int]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(noise(5, NUM_COLUMNS).requires_grad_(), matrix(form))
    assert max(kept, default=0) < NUM_OUTPUTS * NUM_COLUMNS


@needs_kernels
def test_without_gradients_a_weight_that_could_have_them_is_like_any(product_costs: ProductCosts, spy: Spy) -> None:
    product_costs.forced = KERNEL
    weight = matrix("bf16")
    assert isinstance(weight, Tensor)
    weight.requires_grad_()
    with torch.no_grad():
        linear(noise(2, NUM_COLUMNS), weight)
    assert spy.way() == KERNEL
    linear(noise(2, NUM_COLUMNS), weight)
    assert spy.way() == TORCH
