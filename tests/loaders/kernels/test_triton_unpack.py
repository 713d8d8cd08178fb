"""Triton's kernels, interpreted on the CPU, give the numbers of plain torch; the faster way is taken and kept."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import offspec.loaders.kernels
from offspec.loaders.formats.bf16_bits import group_rows, pack, unpack
from offspec.loaders.formats.gguf import unpack_reference
from offspec.loaders.formats.grouped import GroupedMatrix
from offspec.loaders.formats.on_gpu import FASTER_WAY, FasterWay, triton_kernels

from ..gguf_samples import NAMES, edge_blocks, matrix_of, oracle, random_blocks, same_bits
from ..test_formats import bound
from ..test_grouped import FORMS, opened, random_matrix

CPU = torch.device("cpu")
MODULE = "offspec.loaders.kernels.triton_unpack"
KERNEL_TYPES = ("Q8_0", "Q4_K", "Q6_K")


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """For this module only, where a GPU has them compiled elsewhere."""
    pytest.importorskip("triton", reason="Triton is not installed; it comes with torch's CUDA wheels")
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.import_module(MODULE)
        forget(patch)


def forget(patch: pytest.MonkeyPatch) -> None:
    """As if the kernels' module had never been imported, until `patch` ends."""
    patch.delitem(sys.modules, MODULE, raising=False)
    patch.delattr(offspec.loaders.kernels, "triton_unpack", raising=False)


def close_to(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, but in bf16, to which Triton's interpreter cuts numbers off where a GPU rounds them."""
    if found.dtype != torch.bfloat16:
        return same_bits(found, expected.to(found.dtype))
    return same_bits(found, (expected.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that are none
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", KERNEL_TYPES)
def test_gguf(kernels: ModuleType, name: str, dtype: torch.dtype) -> None:
    for rows in (random_blocks(name, 5, 3), *([edge_blocks(name)] if dtype != torch.bfloat16 else [])):
        expected = oracle(name, rows)
        shifted = torch.empty(rows.numel() + 1, dtype=torch.uint8)[1:].view(rows.shape).copy_(rows)
        found = torch.full(expected.shape, torch.nan, dtype=dtype)
        kernels.unpack_gguf(name, shifted, found)
        assert close_to(found, expected)


def test_which_types_have_a_kernel(kernels: ModuleType) -> None:
    assert [name for name in NAMES if kernels.unpacks(name)] == sorted(KERNEL_TYPES, key=NAMES.index)


@pytest.mark.parametrize("form", FORMS)
def test_awq_and_gptq(kernels: ModuleType, form: str, tmp_path: Path) -> None:
    for num_outputs, num_inputs, size in ((8, 64, 32), (264, 40, 16)):
        packed = bound(opened(tmp_path, form, random_matrix(form, num_outputs, num_inputs, size), size))
        assert isinstance(packed, GroupedMatrix)
        for dtype in (torch.float32, torch.float16):
            upright = torch.full((num_inputs, num_outputs), torch.nan, dtype=dtype)
            packed.unpack_with(kernels, upright)
            assert same_bits(upright.t().contiguous(), packed.dequantize(dtype).contiguous())


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
def test_the_faster_way_is_kept(kernel_s: float, plain_s: float) -> None:
    way, done = FasterWay(), list[str]()

    def work(name: str, seconds: float) -> None:
        time.sleep(seconds)
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

    way = FasterWay()
    for _ in range(2):
        way.run("a", CPU, broken, lambda: done.append("plain"))
    assert way.is_kernel("a", CPU) is False
    assert done


def test_without_triton_it_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    forget(monkeypatch)
    assert triton_kernels.__wrapped__() is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_both_ways_give_the_oracles_numbers(name: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = torch.cat((random_blocks(name, 400, 8), edge_blocks(name).repeat(1, 8)))
    matrix, expected = matrix_of(name, rows.to(device)), oracle(name, rows)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        plain = torch.empty(expected.shape, dtype=dtype, device=device)
        unpack_reference(matrix, plain)
        assert same_bits(plain.cpu(), expected.to(dtype))
        assert same_bits(matrix.dequantize(dtype).cpu(), expected.to(dtype))
        compiled = triton_kernels()
        if compiled is not None and compiled.unpacks(name):
            assert FASTER_WAY.is_kernel((name, dtype), device) is not None
            found = torch.full_like(plain, torch.nan)
            compiled.unpack_gguf(name, matrix.blocks, found)
            assert same_bits(found.cpu(), expected.to(dtype))
