"""Kernels for GGUF's quantised types unpack as the `gguf` package does, to the bit; products are the twin's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offspec.backends.x86.gguf_encodings import BlockEncoding, block_encoding
from offspec.backends.x86.processor import per_processor
from offspec.backends.x86.row_product import RowProduct
from offspec.backends.x86.unpack import WORTH_COMPILING, Unpacker
from offspec.loaders.formats import format_named
from offspec.loaders.formats.gguf import QUANTISED, GgufMatrix
from offspec.loaders.formats.gguf_blocks import GRID_TYPES, VALUES
from offspec.loaders.machine.product_rates import has_kernel, of_no_file, sample

from ...loaders.gguf_samples import NAMES, edge_blocks, matrix_of, oracle, random_blocks, same_bits
from ...machines import AVX2, AVX512, THIS, by_processor, each_choice_with_kernels, lanes, needs_kernels, run
from .test_row_bits import STORED

ENCODED = [name for name in NAMES if name not in GRID_TYPES]
ONE_OF_EACH_KIND = ("Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_XS")
# Compiling takes half a second: narrow vectors, which differ in what is said once for all types, for some types only.
# `test_row_bits.py` compares products of the types in STORED with their numbers.
each_product = by_processor(
    "name, processor",
    *(run(name, THIS) for name in ENCODED if name not in STORED),
    *(run(name, AVX2, nightly=name != "Q4_K") for name in ONE_OF_EACH_KIND),
)
UNPACKED = [(name, torch.float32) for name in ENCODED] + [("Q4_K", torch.bfloat16), ("Q4_K", torch.float16)]
each_unpacker = by_processor(
    "name, dtype, processor",
    *(run(*case, AVX512) for case in UNPACKED),
    *(run(*case, AVX2, nightly=case[0] not in ONE_OF_EACH_KIND) for case in UNPACKED),
)


def encoding_of(name: str) -> BlockEncoding:
    found = block_encoding(name, lanes(), VALUES.get(name, ()))
    assert found is not None
    return found


@per_processor
def product_of(name: str) -> RowProduct:
    return RowProduct(encoding_of(name))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def blocks(name: str, num_rows: int, num_columns: int) -> Tensor:
    return random_blocks(name, num_rows, num_columns // QUANTISED[name].num_weights)


def test_every_type_without_a_grid_has_an_encoding() -> None:
    for name in NAMES:
        found = block_encoding(name, 8, VALUES.get(name, ()))
        assert (found is None) == (name in GRID_TYPES)
        if found is not None:
            assert (found.size, found.num_bytes) == (QUANTISED[name].num_weights, QUANTISED[name].num_bytes)


@each_unpacker
def test_unpacked_as_the_gguf_package_does(name: str, dtype: torch.dtype) -> None:
    unpack = Unpacker(encoding_of(name), dtype)
    for rows in (edge_blocks(name), random_blocks(name, 37, 3), random_blocks(name, 300, 16)):
        expected = oracle(name, rows).to(dtype)
        shifted = torch.empty(rows.numel() + 1, dtype=torch.uint8)[1:].view(rows.shape).copy_(rows)
        found = torch.full_like(expected, torch.nan)
        unpack([shifted], found)
        assert same_bits(found, expected)


@needs_kernels
def test_rounded_as_torch_does() -> None:
    """d = 2^-5, codes up to 127, minima: numbers between those of 8 and 11 bit, on both sides of the middle."""
    rows = random_blocks("Q5_1", 64, 64, seed=5)
    expected = oracle("Q5_1", rows)
    for dtype in (torch.bfloat16, torch.float16):
        found = torch.empty(expected.shape, dtype=dtype)
        Unpacker(encoding_of("Q5_1"), dtype)([rows], found)
        assert same_bits(found, expected.to(dtype))
        assert not torch.equal(found.float(), expected)


@pytest.mark.slow
@each_product
def test_products_are_those_of_the_plain_twin(name: str) -> None:
    """For few rows, a panel's and many; for no whole tiles of outputs; for less than a panel's columns and more."""
    product = product_of(name)
    for num_outputs, num_columns in ((1, 256), (131, 1280)):
        rows = blocks(name, num_outputs, num_columns)
        matrix = oracle(name, rows)
        assert product.encoding.can_read(num_columns)
        for num_rows in (1, 2, 3, 4, 5, 8, 13, 64):
            x = noise(num_rows, num_columns)
            exact, size = x.double() @ matrix.double().T, x.double().abs() @ matrix.double().abs().T
            found = product(x, [rows], num_outputs)
            assert found.shape == exact.shape
            assert ((found - exact).abs() <= 2e-6 * size).all()


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0"])
def test_panels_of_an_odd_number_of_small_blocks(name: str) -> None:
    """1024 columns and 32: behind the last 32 the panel has other weights, which no product may take in."""
    product, rows, x = product_of(name), blocks(name, 50, 1056), noise(24, 1056)
    matrix = oracle(name, rows)
    found, size = product(x, [rows], 50), x.abs() @ matrix.abs().T
    assert ((found - x @ matrix.T).abs() <= 1e-5 * size).all()


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_threads_change_no_bit(name: str, set_threads: Callable[[int], None]) -> None:
    rows, product, unpack = blocks(name, 1500, 512), product_of(name), Unpacker(encoding_of(name), torch.bfloat16)
    found = []
    for num_threads in (1, 3):
        set_threads(num_threads)
        out = torch.empty(1500, 512, dtype=torch.bfloat16)
        unpack([rows], out)
        found.append((out, *(product(noise(num_rows, 512), [rows], 1500) for num_rows in (1, 40))))
    assert all(torch.equal(alone, shared) for alone, shared in zip(*found, strict=True))


# ------------------------------------------------------------------------------------------------ as the format has it


@needs_kernels
def test_large_matrices_are_unpacked_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = blocks("Q6_K", WORTH_COMPILING // 256, 256)
    matrix, expected = matrix_of("Q6_K", rows), oracle("Q6_K", rows)
    monkeypatch.setattr(GgufMatrix, "unpack", None)  # so that the kernel it has to be
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(expected.shape, dtype=dtype)
        assert matrix.dequantize(dtype, out) is out
        assert same_bits(out, expected.to(dtype))


@each_choice_with_kernels
def test_what_can_be_measured() -> None:
    for name in NAMES:
        assert has_kernel(name) == (name not in GRID_TYPES), name
        weight = sample(name, (64, 256))
        assert weight is not None, name
        assert tuple(weight.shape) == (64, 256), name
        stored = format_named(name).sized(name, "weight", (64, 256), of_no_file)
        assert stored is not None, name
        assert sum(info.nbytes for info in stored.streamed) == blocks(name, 64, 256).numel(), name
