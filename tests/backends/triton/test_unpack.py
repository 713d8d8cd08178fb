"""Triton's kernels, interpreted on the CPU, give the numbers of plain torch, which computes where they do not run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from offspec.backends.on_gpu import WorkingKernels, gguf_kernels, triton_kernels
from offspec.loaders.formats.bf16_bits import group_rows, pack, unpack
from offspec.loaders.formats.grouped import GroupedMatrix

from ...loaders.formats.test_formats import bound
from ...loaders.formats.test_grouped import FORMS, opened, random_matrix
from ...loaders.gguf_samples import same_bits
from .interpreted import forget, interpreted

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with interpreted("unpack") as module:
        yield module


@pytest.mark.parametrize("form", FORMS)
def test_awq_and_gptq(kernels: ModuleType, form: str, tmp_path: Path) -> None:
    for num_outputs, num_inputs, size in ((8, 64, 32), (264, 40, 16)):
        packed = bound(opened(tmp_path, form, random_matrix(form, num_outputs, num_inputs, size), size))
        assert isinstance(packed, GroupedMatrix)
        for dtype in (torch.float32, torch.float16):
            upright = torch.full((num_inputs, num_outputs), torch.nan, dtype=dtype)
            packed.unpack_with(kernels, upright)
            assert same_bits(upright.t().contiguous(), packed.dequantize(dtype).contiguous())


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 1056), (7, 62), (3, 2048)])
def test_packed_bf16(kernels: ModuleType, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Every bit, NaN's too, and exceptions."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    matrix[1, 5:25] = torch.arange(20).exp2().bfloat16() * 1e-30
    matrix.view(torch.int16)[2, :3] = torch.tensor([0x7F81, -1, 1]).to(torch.int16)
    bits = pack(matrix)
    assert bits is not None
    found = torch.full(shape, 7.0, dtype=dtype)
    kernels.unpack_bf16_bits(bits.low, bits.codes, bits.groups, group_rows(shape[1]), found)
    expected = torch.empty(shape, dtype=dtype)
    unpack(bits, expected)
    assert (
        same_bits(found, expected) if dtype != torch.float16 else torch.equal(found.nan_to_num(), expected.nan_to_num())
    )
    assert dtype != torch.bfloat16 or same_bits(found, matrix)


# ------------------------------------------------------------------------------------------------ which one is taken


@pytest.mark.parametrize("runs", [True, False])
def test_a_kernel_that_does_not_run_is_left_to_torch(runs: bool) -> None:
    done, kernels = list[str](), WorkingKernels()

    def kernel() -> None:
        if not runs:
            raise RuntimeError("Failed to find C compiler")
        done.append("kernel")

    assert kernels.has("a", CPU) is None
    for _ in range(2):
        kernels.run("a", CPU, kernel, lambda: done.append("plain"))
    assert kernels.has("a", CPU) is runs
    assert done == ["kernel" if runs else "plain"] * 2


def test_without_triton_it_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name, found in (("unpack", triton_kernels), ("gguf", gguf_kernels)):
        forget(name, monkeypatch)
        assert found.__wrapped__() is None
