"""Triton's kernels for GGUF's types, interpreted on the CPU: the numbers of the reference, and its products."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.gpu import GpuBackend
from offspec.backends.on_gpu import FUSED_ROWS, GGUF_WITH_KERNELS, WORKING_KERNELS, gguf_kernels
from offspec.loaders.formats import gguf
from offspec.loaders.formats.gguf import GgufMatrix

from ...loaders.gguf_samples import NAMES, edge_blocks, matrix_of, oracle, random_blocks, same_bits
from .interpreted import interpreted, same_numbers

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
TYPES = ("Q4_0", "Q4_1", "Q8_0", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# Rows, outputs, and blocks of a row: one tile and several, whole and not, and inputs in one and in several splits.
SIZES = ((1, 3, 1), (17, 24, 3), (17, 40, 3), (70, 65, 9))
# What types with small blocks and with large ones have in common, the default run tries with these.
SOME = ("Q4_0", "Q4_K")
WIDE = ("Q4_0", "Q6_K")  # of the two kinds of tiles in 16 bits
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def nightly_unless(is_default: bool, name: str, value: object) -> Any:
    return pytest.param(name, value, marks=() if is_default else pytest.mark.nightly)


numbers_that_are_none = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's
UNPACKED = [nightly_unless(t is torch.float32 or name in SOME, name, t) for name in TYPES for t in DTYPES]
DAILY = {*((name, SIZES[0]) for name in TYPES), *((name, size) for name in SOME for size in SIZES[1:3])}
DAILY.add(("Q4_0", SIZES[3]))
MULTIPLIED = [nightly_unless((name, s) in DAILY, name, s) for name in TYPES for s in SIZES]


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with interpreted("gguf") as module:
        yield module


def rows_of(num_rows: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_which_types_have_kernels(kernels: ModuleType) -> None:
    assert [name for name in NAMES if name in kernels.LAYOUTS] == sorted(TYPES, key=NAMES.index)
    assert set(TYPES) == GGUF_WITH_KERNELS


@numbers_that_are_none
@pytest.mark.parametrize(("name", "dtype"), UNPACKED, ids=str)
def test_unpacked(kernels: ModuleType, name: str, dtype: torch.dtype) -> None:
    assert_unpacked(kernels, name, dtype, random_blocks(name, 3, 2))
    if dtype != torch.bfloat16:
        assert_unpacked(kernels, name, dtype, edge_blocks(name)[::30])


@pytest.mark.nightly("interprets every edge of every type; the default run has random blocks")
@numbers_that_are_none
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_all_edges_are_unpacked(kernels: ModuleType, name: str, dtype: torch.dtype) -> None:
    assert_unpacked(kernels, name, dtype, edge_blocks(name))


def assert_unpacked(kernels: ModuleType, name: str, dtype: torch.dtype, rows: Tensor) -> None:
    """Blocks that begin at any byte."""
    expected = oracle(name, rows)
    shifted = torch.empty(rows.numel() + 1, dtype=torch.uint8)[1:].view(rows.shape).copy_(rows)
    found = torch.full(expected.shape, torch.nan, dtype=dtype)
    kernels.unpack(name, shifted, found)
    assert same_numbers(found, expected)


@pytest.mark.parametrize(("name", "size"), MULTIPLIED, ids=str)
def test_multiplied(kernels: ModuleType, name: str, size: tuple[int, int, int]) -> None:
    num_rows, num_outputs, num_blocks = size
    blocks = random_blocks(name, num_outputs, num_blocks)
    matrix = oracle(name, blocks)
    x = rows_of(num_rows, matrix.shape[1], torch.float32)
    expected = x.double() @ matrix.double().T
    found = kernels.multiply(name, x, blocks)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * (x.abs().double() @ matrix.abs().double().T).max()


def test_rows_of_several_dimensions_in_16_bits(kernels: ModuleType) -> None:
    """They are rounded to the rows' dtype before the product, which sums in fp32."""
    blocks = random_blocks("Q4_K", 24, 2)
    x = rows_of(6, 512, torch.float16).view(2, 3, 512)
    expected = x.float() @ oracle("Q4_K", blocks).half().float().T
    found = kernels.multiply("Q4_K", x, blocks)
    assert (found.dtype, found.shape) == (torch.float16, (2, 3, 24))
    assert (found.float() - expected).abs().max() <= 2e-3 * expected.abs().max()


@pytest.mark.each_value
@pytest.mark.parametrize("name", [pytest.param(t, marks=() if t in WIDE else pytest.mark.nightly) for t in TYPES])
@pytest.mark.parametrize("num_rows", [3, 17, 70])
def test_every_tile_of_16_bits(kernels: ModuleType, name: str, num_rows: int) -> None:
    blocks = random_blocks(name, 65, 3)
    matrix = oracle(name, blocks).half().double()
    x = rows_of(num_rows, matrix.shape[1], torch.float16)
    found = kernels.multiply(name, x, blocks)
    assert (found.dtype, found.shape) == (torch.float16, (num_rows, 65))
    bound = (x.abs().double() @ matrix.abs().T).max()
    assert (found - x.double() @ matrix.T).abs().max() <= 1e-3 * bound


def test_rows_that_are_not_contiguous(kernels: ModuleType) -> None:
    blocks, x = random_blocks("Q8_0", 5, 8), rows_of(256, 4, torch.float32).T
    assert torch.equal(kernels.multiply("Q8_0", x, blocks), kernels.multiply("Q8_0", x.contiguous(), blocks))


def test_a_matrix_is_multiplied_by_the_kernel_up_to_the_rows_for_which_it_is_faster(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, asked = random_blocks("Q4_K", 8, 1), list[int]()
    matrix, bias = matrix_of("Q4_K", blocks), torch.arange(8.0)
    assert matrix.fused_linear is None, "a CPU has a kernel of its own"

    class Counting(GgufMatrix):
        @property
        def fused_linear(self) -> Any:
            return self.counted

        def counted(self, x: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
            asked.append(len(x))
            return self.multiplied(x, bias)

    monkeypatch.setattr(gguf, "gguf_kernels", lambda: kernels)
    on_gpu = Counting(matrix.kind, blocks)
    x = rows_of(3, 256, torch.float32)
    expected = linear(x, matrix, bias)
    backend = GpuBackend()
    torch.testing.assert_close(backend.linear(x, on_gpu, bias), expected, rtol=1e-4, atol=1e-4)
    assert asked == [], "no rows are known"
    FUSED_ROWS.set("Q4_K", matrix.shape, torch.float32, CPU, 2)
    try:
        assert torch.allclose(backend.linear(x[:2], on_gpu, bias), expected[:2], rtol=1e-4, atol=1e-4)
        backend.linear(x, on_gpu, bias)
        backend.linear(x[:2].clone().requires_grad_(), on_gpu, bias).sum().backward()
    finally:
        FUSED_ROWS.clear()
    assert asked == [2], "more rows, and rows with gradients, are multiplied with the unpacked matrix"


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_both_ways_give_the_oracles_numbers(name: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = torch.cat((random_blocks(name, 400, 8), edge_blocks(name).repeat(1, 8)))
    matrix, expected = matrix_of(name, rows.to(device)), oracle(name, rows)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        plain = torch.empty(expected.shape, dtype=dtype, device=device)
        matrix.unpack(plain)
        assert same_bits(plain.cpu(), expected.to(dtype))
        assert same_bits(matrix.dequantize(dtype).cpu(), expected.to(dtype))
        compiled = gguf_kernels()
        if compiled is not None and name in compiled.LAYOUTS:
            assert WORKING_KERNELS.has((name, dtype), device) is not None
            found = torch.full_like(plain, torch.nan)
            compiled.unpack(name, matrix.blocks, found)
            assert same_bits(found.cpu(), expected.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_on_a_gpu_products_without_unpacking(name: str) -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda", torch.cuda.current_device())
    blocks = random_blocks(name, 1000, 8 if "_K" in name else 64)
    matrix, expected = matrix_of(name, blocks.to(device)), oracle(name, blocks)
    multiply = matrix.fused_linear
    assert multiply is not None
    for num_rows in (1, 16, 40, 64, 100):
        x = rows_of(num_rows, expected.shape[1], torch.bfloat16)
        wanted = x.float() @ expected.bfloat16().float().T
        found = multiply(x.to(device)).cpu().float()
        assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()
