"""Rates of products are measured when they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offspec.backends.arithmetic import FAST, INT8
from offspec.loaders.files.checkpoint import TensorInfo
from offspec.loaders.formats import StoredWeight, format_named
from offspec.loaders.machine import product_rates as module
from offspec.loaders.machine.product_rates import ROWS, forms_of, has_kernel, product_flops, product_rates

from ...machines import NO_VECTORS, by_processor, needs_kernels

BF16 = torch.bfloat16


def test_rates_between_the_measured_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are interpolated; one row costs at least what a pass over the weights does."""
    seconds = {1: 1e-10, 16: 1e-10, 128: 8e-10}
    monkeypatch.setattr(module, "has_kernel", lambda form, device: True)
    monkeypatch.setattr(module, "_seconds", lambda backend, matrices, dtype, rows: seconds[rows])
    monkeypatch.setattr(module, "SHAPE", (64, 512))
    expected = {1: 2e10, 8: 1.6e11, 72: 144 / 4.5e-10, 256: 2 * 128 / 8e-10}
    assert product_flops("bf16", BF16, (1, 8, 72, 256)) == pytest.approx(expected)
    assert product_flops("bf16", BF16).keys() == set(ROWS)
    (rate,) = product_rates("bf16", BF16, (16,))
    assert (rate.flops, rate.bytes_per_s) == pytest.approx((32 / 1e-10, 2 / 1e-10))


@needs_kernels
@pytest.mark.parametrize(("form", "arithmetic"), [("bf16", FAST), ("nf4", FAST), ("Q4_K", INT8), ("fp32", FAST)])
def test_products_are_measured(form: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHAPE", (64, 512))
    monkeypatch.setattr(module, "CACHE_BYTES", 0)
    assert min(product_flops(form, BF16, arithmetic=arithmetic).values()) > 0


@by_processor("processor", NO_VECTORS)
def test_without_kernels_nothing_is_measured() -> None:
    assert not has_kernel("nf4")
    assert product_flops("bf16", BF16) == {}


def test_forms_of_weights() -> None:
    assert forms_of([stored("BF16"), stored("nf4", (64, 64)), stored("F32", (64,))]) == {"bf16", "nf4"}


def stored(form: str, shape: tuple[int, ...] = (8, 64)) -> StoredWeight:
    def nowhere(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        return TensorInfo(name, dtype, shape, Path(), 0, 0)

    found = format_named(form).sized(form, "weight", shape, nowhere)
    assert found is not None
    return found
