"""Products of rows in 8 bits beside plain twins: rounded rows as numbers, times the matrix by the gguf package."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import BYTE_FORMS
from offspec.backends.x86.byte_product import FORMS, TILE_ROWS, ByteProduct, byte_product
from offspec.backends.x86.byte_rows import LAYOUTS, to_bytes
from offspec.backends.x86.gguf_encodings import block_encoding
from offspec.backends.x86.processor import per_processor
from offspec.backends.x86.row_product import ProductJob
from offspec.backends.x86.row_steps import ITEMS
from offspec.loaders.formats.gguf_blocks import VALUES

from ...loaders.gguf_samples import NAMES, oracle, random_blocks
from ...machines import AVX2, THIS, by_processor, each_width, lanes, needs_kernels, run

COLUMNS = 512
ROWS = (1, 2, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS + 3)
# Compiling takes a second: narrow vectors for one type of each kind by default.
each_kind = by_processor(
    "name, processor",
    *(run(name, THIS) for name in FORMS),
    *(run(name, AVX2, nightly=name not in ("Q6_K", "MXFP4")) for name in FORMS),
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of very different sizes, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[:-1], generator=generator).exp()[..., None]
    if len(x) > 2:
        x[2] = 0
    return x


def rounded(x: Tensor, size: int) -> Tensor:
    """The plain twin of `to_bytes`, as numbers."""
    blocks = x.float().unflatten(-1, (-1, size))
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.where(largest > 0, 127 / largest, 0)).round()
    return (codes * (largest / 127)).flatten(-2)


@per_processor
def product_of(name: str) -> ByteProduct:
    encoding = block_encoding(name, lanes(), VALUES.get(name, ()))
    assert encoding is not None
    product = byte_product(name, encoding, VALUES.get(name, ()))
    assert product is not None
    return product


def matrix(name: str, num_outputs: int) -> tuple[Tensor, Tensor]:
    """Blocks, and the numbers that they stand for."""
    blocks = random_blocks(name, num_outputs, COLUMNS // block_size(name))
    return blocks, oracle(name, blocks)


def block_size(name: str) -> int:
    encoding = block_encoding(name, 8, VALUES.get(name, ()))
    assert encoding is not None
    return encoding.size


@each_width
@pytest.mark.parametrize("dtype", ITEMS, ids=str)
@pytest.mark.parametrize("size", LAYOUTS)
def test_rows(dtype: torch.dtype, size: int) -> None:
    x, layout = noise(5, COLUMNS).to(dtype), LAYOUTS[size]
    found = to_bytes(x, size).view(5, -1, layout.num_bytes)
    codes, scales = found[..., :size].view(torch.int8), found[..., layout.scale : layout.scale + 4].view(torch.float32)
    assert torch.equal((codes.float() * scales).flatten(1), rounded(x, size))
    assert codes[[0, 1, 3, 4]].int().abs().amax(-1).eq(127).all()
    if size == 256:
        sums = found[..., layout.sums : layout.sums + 32].view(torch.int16)
        assert torch.equal(sums.int(), codes.int().unflatten(-1, (-1, 16)).sum(-1, dtype=torch.int32))


@needs_kernels
@pytest.mark.parametrize("name", ["Q4_K", "MXFP4"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(name: str, number: float) -> None:
    """So that logits say it."""
    product, (blocks, _) = product_of(name), matrix(name, 9)
    x = noise(3, COLUMNS)
    x[1, 7] = number
    found = product(x, [blocks], 9)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], product(x[[0, 2]], [blocks], 9))


@each_kind
def test_products(name: str) -> None:
    """Up to fp32's rounding, and a row has the same bits with any others."""
    product, (blocks, numbers) = product_of(name), matrix(name, 37)
    x = noise(max(ROWS), COLUMNS)
    numbers = numbers.double()
    expected = rounded(x, block_size(name)).double() @ numbers.T
    size = rounded(x, block_size(name)).double().abs() @ numbers.abs().T
    found = product(x, [blocks], 37)
    # A minimum, and what codes count from, are added apart, and may be many times the weights.
    assert ((found - expected).abs() <= 1e-5 * size + 1e-4 * x.abs().amax() * numbers.abs().amax()).all()
    for count in ROWS:
        assert torch.equal(product(x[:count], [blocks], 37), found[:count])
        assert torch.equal(product(x[-count:], [blocks], 37), found[-count:])


@needs_kernels
def test_dtypes() -> None:
    """Rows of any dtype; sums are rounded once."""
    product, (blocks, _) = product_of("Q4_K"), matrix("Q4_K", 9)
    for dtype in ITEMS:
        x = noise(3, COLUMNS).to(dtype)
        wide = product(x, [blocks], 9, torch.float32)
        assert torch.equal(product(x, [blocks], 9), wide.to(dtype))
        assert torch.equal(product(x.float(), [blocks], 9), wide)


@needs_kernels
@pytest.mark.parametrize("num_threads", [1, 3])
def test_several_matrices(num_threads: int, set_threads: Callable[[int], None]) -> None:
    """Each with rows of its own, on any number of threads."""
    product = product_of("Q4_K")
    blocks = random_blocks("Q4_K", 300, 2)
    x = noise(5, COLUMNS)
    jobs = [ProductJob([blocks[:200]], 200, 0, 2), ProductJob([blocks[200:]], 100, 2, 3)]
    set_threads(num_threads)
    found = product.each(x, jobs)
    whole = product(x, [blocks], 300)
    assert torch.equal(found, torch.cat([whole[:2, :200].flatten(), whole[2:, 200:].flatten()]))


def test_types() -> None:
    """Others have scales of another form, or codes that products of bytes cannot take."""
    assert tuple(FORMS) == BYTE_FORMS
    assert set(FORMS) < set(NAMES)
    encoding = block_encoding("Q2_K", 8, ())
    assert encoding is not None
    assert byte_product("Q2_K", encoding, ()) is None
