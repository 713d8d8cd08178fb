"""RMSNorm and sums of rows in one call, against torch's operations; the same bits for a row among any others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.x86.row_steps import (
    ITEMS,
    add_rows,
    can_step,
    gate_rows,
    lay_rows,
    mix_rows,
    norm_rows,
    silu_rows,
    turn_heads,
)
from offspec.model.parts.mlp import clamped
from offspec.model.rope import rotate

from ...machines import each_width, lanes

pytestmark = each_width
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


def turns(dtype: torch.dtype, num_rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(num_rows, 1, head_dim, generator=torch.Generator().manual_seed(3))
    return angles.cos().to(dtype), angles.sin().to(dtype)


@each_dtype
def test_rows_as_fp32(dtype: torch.dtype) -> None:
    x = noise(dtype, ROWS, 128)
    assert torch.equal(lay_rows(x, 1), x.float())
    apart = x.float().view(ROWS, -1, lanes(), 2).transpose(2, 3)
    assert torch.equal(lay_rows(x, 2), apart.reshape(ROWS, 128))


@each_dtype
@pytest.mark.parametrize("head_dim", [32, 192])
def test_rotations(dtype: torch.dtype, head_dim: int) -> None:
    """With the bits of torch's operations."""
    x, (cos, sin) = noise(dtype, ROWS, 3, head_dim), turns(dtype, ROWS, head_dim)
    turned = turn_heads(x, cos, sin)
    assert turned.dtype == dtype
    assert torch.equal(turned, rotate(x, cos, sin))
    assert torch.equal(turn_heads(x[:, 1:2], cos, sin), turned[:, 1:2])


@each_dtype
def test_sums_of_two(dtype: torch.dtype) -> None:
    """With the bits of torch's."""
    x, other = noise(dtype, ROWS, 64), noise(dtype, 64, ROWS).T
    assert torch.equal(add_rows(x, other), x + other)
    assert torch.equal(add_rows(x[2:3], other[5]), x[2:3] + other[5])
    assert torch.equal(add_rows(x, other[5]), x + other[5])


@each_dtype
@pytest.mark.parametrize("is_clamped", [False, True])
def test_gates(dtype: torch.dtype, is_clamped: bool) -> None:
    gate, up = 8 * noise(dtype, ROWS, 768), 8 * noise(dtype, 768, ROWS).T
    gate[3, :5] = torch.tensor([-300.0, -81.0, 0.0, 89.0, 300.0])
    found = gate_rows(gate, up, is_clamped=is_clamped)
    assert found.dtype == dtype
    wide, other = gate.double(), up.double()
    assert_near(found, clamped(wide) * (other.clamp(-7, 7) + 1) if is_clamped else F.silu(wide) * other)
    for first, last in ((0, 1), (5, 7), (2, 33)):
        assert torch.equal(gate_rows(gate[first:last], up[first:last], is_clamped=is_clamped), found[first:last])
    gate[1, 1], up[2, 2] = torch.nan, torch.nan
    assert gate_rows(gate, up, is_clamped=is_clamped).isnan().nonzero().tolist() == [[1, 1], [2, 2]]


@each_dtype
def test_silu(dtype: torch.dtype) -> None:
    x = 8 * noise(dtype, ROWS, 768)
    x[3, :5] = torch.tensor([-300.0, -81.0, 0.0, 89.0, 300.0])
    found = silu_rows(x)
    assert found.dtype == dtype
    assert_near(found, F.silu(x.double()))
    assert torch.equal(silu_rows(x[5:7]), found[5:7])
    x[1, 1] = torch.nan
    assert silu_rows(x).isnan().nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_take_every_row(num_threads: int, set_threads: Callable[[int], None]) -> None:
    x = noise(torch.float32, 600, 128)
    set_threads(num_threads)
    normed = norm_rows(x, torch.ones(128), 1e-6)
    assert_near(normed, F.rms_norm(x.double(), (128,), None, 1e-6))


def test_which_rows_have_kernels() -> None:
    assert can_step(torch.bfloat16, 64)
    assert not can_step(torch.float64, 64)
    assert not can_step(torch.bfloat16, 65)
