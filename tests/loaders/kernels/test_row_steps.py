"""RMSNorm and sums of rows in one call, against torch's operations; the same bits for a row among any others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.kernels.compiler import instructions
from offspec.loaders.kernels.row_steps import ITEMS, Mix, Norm, can_step, mix_rows, norm_rows

pytestmark = pytest.mark.skipif(not instructions(), reason="this processor has no kernels")
each_dtype = pytest.mark.parametrize("dtype", ITEMS, ids=str)
ROWS, WIDTHS = 33, (64, 2880)


def noise(dtype: torch.dtype, *shape: int) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


def assert_near(result: Tensor, expected: Tensor) -> None:
    """Equal up to one rounding to the result's dtype, and fp32's before it."""
    most = torch.finfo(result.dtype).eps * expected.abs() + 1e-5
    assert ((result.double() - expected).abs() <= most).all()


@each_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(dtype: torch.dtype, width: int) -> None:
    x, weight = noise(dtype, ROWS, 3, width), noise(dtype, width)
    normed = norm_rows(x, weight, 1e-2)
    assert normed.dtype == dtype
    assert_near(normed, F.rms_norm(x.double(), (width,), weight.double(), 1e-2))
    for first, last in ((0, 1), (5, 7), (2, 33)):
        assert torch.equal(norm_rows(x[first:last], weight, 1e-2), normed[first:last])


@each_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_sums(dtype: torch.dtype, width: int) -> None:
    x, scales = noise(dtype, ROWS * 5, width), torch.rand(ROWS, 5, generator=torch.Generator().manual_seed(1))
    mixed = mix_rows(x, scales)
    assert mixed.dtype == dtype
    expected, size = (
        (each.view(ROWS, 5, width) * scales.double()[..., None]).sum(1) for each in (x.double(), x.double().abs())
    )
    assert ((mixed.double() - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-6 * size).all()
    for first, last in ((0, 1), (5, 7), (2, 33)):
        assert torch.equal(mix_rows(x[5 * first : 5 * last], scales[first:last]), mixed[first:last])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_take_every_row(num_threads: int) -> None:
    x, before = noise(torch.float32, 600, 128), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        normed = norm_rows(x, torch.ones(128), 1e-6)
    finally:
        torch.set_num_threads(before)
    assert_near(normed, F.rms_norm(x.double(), (128,), None, 1e-6))


def test_half_vectors() -> None:
    """The kernels of processors without AVX-512."""
    x, scales, out = noise(torch.bfloat16, 6, 24), torch.rand(2, 3), torch.empty(2, 24, dtype=torch.bfloat16)
    Mix(torch.bfloat16, 8)(2, 72, (x, scales, out), (24, 3))
    expected = (x.double().view(2, 3, 24) * scales[..., None]).sum(1)
    assert ((out.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
    normed = torch.empty_like(x)
    Norm(torch.bfloat16, 8)(6, 24, (x, torch.ones(24).bfloat16(), normed), (24, 0))
    assert_near(normed, F.rms_norm(x.double(), (24,), None, 0.0))


def test_which_rows_have_kernels() -> None:
    assert can_step(torch.bfloat16, 64)
    assert not can_step(torch.float64, 64)
    assert not can_step(torch.bfloat16, 65)
