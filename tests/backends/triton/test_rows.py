"""Triton's kernels for rows with equal bits, interpreted on the CPU: beside the CPU's kernels, and for any rows."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offspec.backends import gpu
from offspec.backends.arithmetic import EXACT
from offspec.backends.backend import ExactRows
from offspec.backends.choice import CPU, backend_of
from offspec.backends.on_gpu import WorkingKernels, row_kernels
from offspec.backends.x86.row_attention import KeySlots, Scores, Visible, attend_rows, rows_of_tile

from ...machines import needs_kernels
from .interpreted import interpreted

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with interpreted("rows") as module:
        module.TRIED = 33, 40, 70  # interpreted, the card's would take a quarter of a minute
        yield module


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter has no bf16 products
def test_products(kernels: ModuleType, dtype: torch.dtype) -> None:
    """Columns and outputs that fill no tile, and rows that fill one, and several."""
    x, matrix = noise(19, 150).to(dtype), noise(40, 150, seed=1).to(dtype)
    together = kernels.multiply(x, matrix, torch.float32)
    for first, last in ((0, 1), (2, 5), (3, 19)):
        assert torch.equal(kernels.multiply(x[first:last], matrix, torch.float32), together[first:last])
    torch.testing.assert_close(together, x.float() @ matrix.float().T, rtol=1e-5, atol=1e-4)
    assert kernels.multiply(x[None], matrix).shape == (1, 19, 40)


@needs_kernels
@pytest.mark.parametrize(
    "scores",
    [
        pytest.param(Scores(0.2), id="plain", marks=pytest.mark.nightly),
        pytest.param(Scores(0.2, 3.0, torch.linspace(-1, 2, 6)), id="capped"),
    ],
)
def test_attention(kernels: ModuleType, scores: Scores) -> None:
    """Rows that see a stretch, single slots behind it, or both from some position on, in heads of an odd size."""
    first, end = torch.tensor([0, 0, 5, 65, 34]), torch.tensor([40, 41, 64, 70, 33])
    num_singles, singles = torch.tensor([0, 2, 1, 0, 2]), torch.tensor([80, 85, 90, 95, 99])
    visible = Visible.of(first, end, singles, num_singles, rows_of_tile(3))
    queries, keys, values = noise(5, 6, 24), noise(2, 100, 24, seed=1), noise(2, 100, 24, seed=2)
    expected = attend_rows(queries, [KeySlots(0, keys, values)], visible, scores)
    together = kernels.attend(queries, keys, values, visible.rows, visible.slots, **vars(scores))
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-5)
    for row in (1, 4):
        some = visible.rows[row : row + 1].contiguous()
        alone = kernels.attend(queries[row : row + 1], keys, values, some, visible.slots, **vars(scores))
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.parametrize("runs", [True, False])
def test_kernels_that_cannot_be_built_are_found_before_a_pass(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = list[Any]()

    def multiply(*operands: Any) -> None:
        launches.append(operands)
        if not runs:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "row_kernels", lambda: SimpleNamespace(multiply=multiply))
    monkeypatch.setattr(gpu, "WORKING_KERNELS", WorkingKernels())
    backend = gpu.ExactGpuBackend(CPU)  # which stands for a card
    rows = ExactRows(torch.float16, keeps_states=False, has_experts=False, has_packed_keys=False, group=4, head_dim=64)
    assert backend.reason_against(rows) is None
    assert launches == [], "a target that fits on the card need not wait for a compiler"
    assert (backend.fault() is None) == runs
    assert len(launches) == 1
    assert runs or "C compiler" in (backend.reason_against(rows) or "")


def test_they_multiply_plain_weights(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `linear` calls them for exact rows on a GPU, beside the CPU's kernel."""
    monkeypatch.setattr(gpu, "row_kernels", lambda: kernels)
    x, matrix = noise(3, 64), noise(64, 8, seed=1).T
    torch.testing.assert_close(gpu.ExactGpuBackend().linear(x, matrix), backend_of(CPU, EXACT).linear(x, matrix))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu_rows_have_equal_bits(dtype: torch.dtype) -> None:
    """What `reason_against_exactness` waits for: products and attention of 1 to 256 rows."""
    compiled = row_kernels()
    if compiled is None:
        pytest.skip("Triton is not installed; it comes with torch's CUDA wheels")
    device = torch.device("cuda", torch.cuda.current_device())
    x, matrix = (noise(*shape).to(device, dtype) for shape in ((256, 4096), (1000, 4096)))
    together = compiled.multiply(x, matrix)
    queries, keys, values = (noise(n, heads, 128).to(device, dtype) for n, heads in ((256, 8), (2, 999), (2, 999)))
    none, end = torch.zeros(256, dtype=torch.int64), torch.arange(700, 956)
    visible = Visible.of(none, end, none[:0], none, rows_of_tile(4))
    rows, slots = visible.rows.to(device), visible.slots.to(device)
    attended = compiled.attend(queries, keys, values, rows, slots, scale=0.1)
    for num_rows in (1, 2, 3, 8, 64):
        assert torch.equal(compiled.multiply(x[-num_rows:], matrix), together[-num_rows:])
        found = compiled.attend(queries[-num_rows:], keys, values, rows[-num_rows:].contiguous(), slots, scale=0.1)
        assert torch.equal(found, attended[-num_rows:])
