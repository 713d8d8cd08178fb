"""Triton's kernels, interpreted on the CPU, give the numbers of plain torch; the faster way is taken and kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from offspec.backends import on_gpu
from offspec.backends.on_gpu import FasterKernel, gguf_kernels, triton_kernels
from offspec.loaders.formats.bf16_bits import group_rows, pack, unpack
from offspec.loaders.formats.grouped import GroupedMatrix

from ...loaders.formats.test_formats import bound
from ...loaders.formats.test_grouped import FORMS, opened, random_matrix
from ...loaders.gguf_samples import same_bits
from ...scheduler.fakes import VirtualClock
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


# ------------------------------------------------------------------------------------------------ which way is taken


@pytest.mark.parametrize(("kernel_s", "plain_s"), [(0.0, 0.003), (0.003, 0.0)])
def test_the_faster_way_is_kept(kernel_s: float, plain_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    way, done, clock = FasterKernel(), list[str](), VirtualClock()
    monkeypatch.setattr(on_gpu, "time", SimpleNamespace(perf_counter=clock))

    def work(name: str, seconds: float) -> None:
        clock.now += seconds
        done.append(name)

    def run(kind: str) -> None:
        way.run(kind, CPU, lambda: work("kernel", kernel_s), lambda: work("plain", plain_s))

    faster = "kernel" if kernel_s < plain_s else "plain"
    assert way.is_kernel("a", CPU) is None
    run("a")
    assert way.is_kernel("a", CPU) == (faster == "kernel")
    assert set(done) == {"kernel", "plain"}
    assert done[-1] == faster
    done.clear()
    run("a")
    assert done == [faster]
    run("b")
    assert set(done) == {"kernel", "plain"}


def test_a_kernel_that_cannot_be_compiled_is_none() -> None:
    done = list[str]()

    def broken() -> None:
        raise RuntimeError("Failed to find C compiler")

    way = FasterKernel()
    for _ in range(2):
        way.run("a", CPU, broken, lambda: done.append("plain"))
    assert way.is_kernel("a", CPU) is False
    assert done


def test_without_triton_it_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name, found in (("unpack", triton_kernels), ("gguf", gguf_kernels)):
        forget(name, monkeypatch)
        assert found.__wrapped__() is None
