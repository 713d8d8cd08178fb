"""`choice.linear` on a CPU: by a kernel where there is one, otherwise by torch, and either way the same product."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.weights import Weight, dense
from offspec.backends.x86.row_product import RowProduct
from offspec.loaders.formats.four_bit import CODES, Layout4bit, Matrix4bit
from offspec.loaders.formats.int8 import Int8Matrix

from ..machines import NO_VECTORS, THIS, by_processor, lanes, needs_kernels, run

FORMS = ("bf16", "fp16", "int8", "nf4")
NUM_OUTPUTS, NUM_COLUMNS = 1030, 128
with_kernels_and_without = by_processor("processor", NO_VECTORS, run(THIS))


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
    """Counts what multiplies: kernels, and torch's products."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, run, torch_linear = Counter[str](), RowProduct.__call__, F.linear

        def count_kernel(product: RowProduct, *args: object) -> Tensor:
            self.calls["kernel"] += 1
            return run(product, *args)  # type: ignore[arg-type]

        def count_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            self.calls["torch"] += 1
            return torch_linear(x, weight, bias)

        monkeypatch.setattr(RowProduct, "__call__", count_kernel)
        monkeypatch.setattr(F, "linear", count_torch)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


@with_kernels_and_without
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_rows_has_a_kernel_where_there_is_one(form: str, dtype: torch.dtype, spy: Spy) -> None:
    weight, bias = matrix(form), noise(NUM_OUTPUTS, seed=2)
    scratch = torch.empty(NUM_OUTPUTS * NUM_COLUMNS, dtype=dtype)
    for shape in ((), (1,), (1, 3), (200,)):
        for added, memory in ((None, None), (bias, scratch)):
            spy.calls.clear()
            assert linear(noise(*shape, NUM_COLUMNS).to(dtype), weight, added, memory).shape == (*shape, NUM_OUTPUTS)
            assert spy.calls == {"kernel" if lanes() else "torch": 1}


# ------------------------------------------------------------------------------------------------ the same product


@pytest.mark.slow
@with_kernels_and_without
@pytest.mark.parametrize("form", FORMS)
def test_both_agree_within_rounding(form: str) -> None:
    weight, bias = matrix(form), noise(NUM_OUTPUTS, seed=2)
    for dtype, tolerance in {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}.items():
        for shape in ((), (1,), (7,), (2, 40)):
            x = noise(*shape, NUM_COLUMNS).to(dtype)
            for added in (None, bias):
                expected = x.double() @ dense(weight, torch.float32).double().T
                expected += 0 if added is None else added.double()
                found = linear(x, weight, added, torch.empty(NUM_OUTPUTS * NUM_COLUMNS, dtype=dtype))
                assert found.dtype == dtype
                size = float(expected.abs().max())
                torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * size)
    assert torch.equal(bias, noise(NUM_OUTPUTS, seed=2)), "it is left as it was"


@with_kernels_and_without
@pytest.mark.parametrize("form", FORMS)
def test_gradients_flow(form: str) -> None:
    """Training goes torch's way; beside it nothing changes."""
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
def test_without_gradients_a_weight_that_could_have_them_is_like_any(spy: Spy) -> None:
    weight = matrix("bf16")
    assert isinstance(weight, Tensor)
    weight.requires_grad_()
    with torch.no_grad():
        linear(noise(2, NUM_COLUMNS), weight)
    assert spy.calls == {"kernel": 1}
    linear(noise(2, NUM_COLUMNS), weight)
    assert spy.calls["torch"] == 1
