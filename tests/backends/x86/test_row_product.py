"""Compiled kernels against the plain twin: the matrix as fp32 numbers, and torch's product with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.cpu import can_multiply, plain_product
from offspec.backends.weights import PackedMatrix, Weight, dense
from offspec.backends.x86 import compiler
from offspec.backends.x86.encodings import Blocks, Encoding, Float16, FourBit, Int8
from offspec.backends.x86.processor import per_processor
from offspec.backends.x86.row_product import ProductJob, RowProduct
from offspec.backends.x86.scaled import Fp8, LowFirst, MxFp4
from offspec.loaders.formats.four_bit import CODES, Layout4bit, Matrix4bit, Nested
from offspec.loaders.formats.int8 import Int8Matrix
from offspec.loaders.formats.scaled import FP4, FP4_NUMBERS, Codes, ScaledLayout, ScaledMatrix

from ...machines import AVX2, THIS, by_processor, each_width, lanes, needs_kernels, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 65, 130)  # both sides of every `most_direct` and of every tile
OUTPUTS = (1, 3, 131)  # no whole tiles, chunks or panels
COLUMNS = (1, 1024 // 64 + 1, 3072 // 64)  # in blocks of 64: less than a panel, one and a bit, three
# What each encoding is tried with by default: matrices of no whole tiles and panels, and rows that reach every tile.
FEW_SHAPES, FEW_ROWS = ((1, 1), (131, 1024 // 64 + 1)), (1, 2, 7, 65, 67, 68, 69, 70)
each_shape = pytest.mark.parametrize(
    ("shapes", "rows"),
    [
        pytest.param(FEW_SHAPES, FEW_ROWS, id="few"),
        pytest.param([(n, k) for n in OUTPUTS for k in COLUMNS], ROWS, id="all", marks=pytest.mark.nightly),
    ],
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class FourBitMatrices:
    """How 4-bit matrices with random codes are made. outer: scales that share an outer one; 0: scales are fp32."""

    quant_type: str
    blocksize: int
    outer: int = 0

    def encoding(self, lanes: int) -> Encoding:
        return FourBit(lanes, CODES[self.quant_type], Blocks(self.blocksize, self.outer))

    def __call__(self, num_outputs: int, num_columns: int) -> Matrix4bit:
        num_blocks = num_outputs * num_columns // self.blocksize
        codes, nested = random_bytes(num_outputs * num_columns // 2), None
        scales = noise(num_blocks, seed=1).abs()
        if self.outer:
            outer = noise(-(-num_blocks // self.outer), seed=2).abs()
            nested = Nested(torch.linspace(-1, 1, 256), outer, 0.75, self.outer)
            scales = random_bytes(num_blocks)
        return Matrix4bit(
            Layout4bit((num_outputs, num_columns), self.quant_type, self.blocksize, nested), codes, scales
        )


def int8_matrix(num_outputs: int, num_columns: int) -> Int8Matrix:
    return Int8Matrix(random_bytes(num_outputs, num_columns).view(torch.int8), noise(num_outputs, seed=1).abs())


def scaled_matrix(codes: Codes, block: tuple[int, int], num_outputs: int, num_columns: int) -> ScaledMatrix:
    layout = ScaledLayout((num_outputs, num_columns), "", codes, (block[0] or num_outputs, block[1] or num_columns))
    raw = random_bytes(num_outputs, codes.row_bytes(num_columns))
    raw = torch.where((raw & 127) == 127, 126, raw) if codes.kind == "fp8" else raw  # NaN has a test of its own
    return ScaledMatrix(layout, raw, noise(*layout.grid, seed=1).abs())


def mxfp4_matrix(num_outputs: int, num_columns: int) -> ScaledMatrix:
    layout = ScaledLayout((num_outputs, num_columns), "mxfp4", FP4, (1, 32))
    exponents = (random_bytes(*layout.grid) % 20 + 115).view(torch.float8_e8m0fnu)
    return ScaledMatrix(layout, random_bytes(num_outputs, num_columns // 2), exponents)


FP8, PACKED = Codes("fp8", 8), Codes("packed", 4)
FOUR_BIT = {
    f"{made.quant_type}-{made.blocksize}{'-nested' if made.outer else ''}": made
    for made in (
        FourBitMatrices("nf4", 64),
        FourBitMatrices("nf4", 64, 256),
        FourBitMatrices("nf4", 128, 256),
        FourBitMatrices("fp4", 64, 16),
    )
}
# Name → the encoding for vectors of some lanes, and a matrix [N, K] of ordinary numbers.
MATRICES: dict[str, tuple[Callable[[int], Encoding], Callable[[int, int], Weight]]] = {
    "bf16": (lambda lanes: Float16(lanes, "bf16"), lambda n, k: noise(n, k).bfloat16()),
    "fp16": (lambda lanes: Float16(lanes, "fp16"), lambda n, k: noise(n, k).half()),
    "int8": (lambda lanes: Int8(lanes, 1 / 127), int8_matrix),
    "int8-rows": (lambda lanes: Int8(lanes, 1.0), partial(scaled_matrix, Codes("int8", 8), (1, 0))),
    "fp8-rows": (lambda lanes: Fp8(lanes, 1, 0), partial(scaled_matrix, FP8, (1, 0))),
    "fp8-whole": (lambda lanes: Fp8(lanes, 1, 0), partial(scaled_matrix, FP8, (0, 0))),
    "fp8-blocks": (lambda lanes: Fp8(lanes, 128, 128), partial(scaled_matrix, FP8, (128, 128))),
    "fp8-groups": (lambda lanes: Fp8(lanes, 1, 64), partial(scaled_matrix, FP8, (1, 64))),
    "w4-groups": (lambda lanes: LowFirst(lanes, range(-8, 8), Blocks(64)), partial(scaled_matrix, PACKED, (1, 64))),
    "mxfp4": (lambda lanes: MxFp4(lanes, FP4_NUMBERS), mxfp4_matrix),
    **{name: (made.encoding, made) for name, made in FOUR_BIT.items()},
}


# Compiling takes half a second: narrow vectors are tried with some encodings by default, wherever there are wide ones.
ONE_OF_EACH_KIND = ("bf16", "int8", "fp8-blocks", "w4-groups", "nf4-64-nested")
each_encoding = by_processor(
    "name, processor",
    *(run(name, THIS) for name in MATRICES),
    *(run(name, AVX2, nightly=name not in ONE_OF_EACH_KIND) for name in MATRICES),
)


@per_processor
def product_of(name: str) -> RowProduct:
    """Compiled once for all tests."""
    return RowProduct(MATRICES[name][0](lanes()))


def parts_of(matrix: Weight) -> list[Tensor]:
    if isinstance(matrix, Tensor):
        return [matrix]
    assert isinstance(matrix, PackedMatrix)
    assert matrix.kernel is not None
    return matrix.kernel[1]


def cases(name: str, shapes: Sequence[tuple[int, int]]) -> Iterator[Weight]:
    """shapes: outputs, and blocks of columns."""
    made = FOUR_BIT.get(name)
    for num_outputs, num_blocks in shapes:
        yield MATRICES[name][1](num_outputs, num_blocks * (64 if made is None else made.blocksize))


def assert_agrees(found: Tensor, x: Tensor, matrix: Tensor) -> None:
    """To what sums of fp32 products may lose, whatever their order, and the rounding to x's dtype.

    matrix: fp32 [N, K].
    """
    x64, matrix64 = x.double(), matrix.double()
    exact, size = x64 @ matrix64.T, x64.abs() @ matrix64.abs().T
    allowed = 2e-6 * size + torch.finfo(x.dtype).eps * exact.abs() + torch.finfo(x.dtype).smallest_normal
    assert found.dtype == x.dtype
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= allowed).all()


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.slow
@each_shape
@each_encoding
def test_products_are_those_of_the_plain_twin(
    name: str, shapes: Sequence[tuple[int, int]], rows: Sequence[int]
) -> None:
    product = product_of(name)
    for matrix in cases(name, shapes):
        num_outputs, num_columns = matrix.shape
        assert product.encoding.can_read(num_columns)
        twin = dense(matrix, torch.float32)
        for num_rows in rows:
            x = noise(num_rows, num_columns, seed=num_rows)
            assert_agrees(product(x, parts_of(matrix), num_outputs), x, twin)


@pytest.mark.slow
@each_encoding
def test_rows_of_any_dtype_and_dimensions(name: str) -> None:
    """Sums are fp32 and rounded once, at the end; rows may lie apart."""
    product, matrix = product_of(name), MATRICES[name][1](50, 1152)
    parts, twin = parts_of(matrix), dense(matrix, torch.float32)
    for num_rows in (1, 5, 17, 65):
        for dtype in DTYPES:
            x = noise(num_rows, 1152).to(dtype) / 64
            found = product(x, parts, 50)
            assert_agrees(found, x, twin)
            assert torch.equal(found, product(x.float(), parts, 50).to(dtype))
            apart = torch.stack((x, torch.full_like(x, torch.nan)), dim=-1)[..., 0]
            assert not apart.is_contiguous()
            assert torch.equal(product(apart, parts, 50), found)
            assert torch.equal(product(x[None, :, None], parts, 50), found[None, :, None])
        assert torch.equal(product(x[0], parts, 50), product(x[:1], parts, 50)[0])


@pytest.mark.slow
@each_width
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_what_is_no_number_comes_out_as_torch_has_it(name: str) -> None:
    product, matrix = product_of(name), MATRICES[name][1](9, 1088)
    assert isinstance(matrix, Tensor)
    matrix[0, 5], matrix[1, 1087], matrix[2, 3] = torch.nan, torch.inf, -torch.inf
    matrix[3, 7], matrix[3, 8] = torch.inf, -torch.inf
    matrix[4] = 0.0
    for num_rows in (1, 7, 130):
        x = noise(num_rows, 1088)
        x[1:2, 3] = torch.inf
        found, expected = product(x, [matrix], 9), x @ matrix.float().T
        assert torch.equal(found.isnan(), expected.isnan())
        assert found.isnan().any()
        special = ~expected.isfinite() & ~expected.isnan()
        assert special.any()
        assert torch.equal(found[special], expected[special])
        fine = expected.isfinite()
        assert fine.any()
        torch.testing.assert_close(found[fine], expected[fine], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@each_width
def test_denormal_weights_count() -> None:
    matrix = torch.full((4, 64), 2**-130, dtype=torch.bfloat16)
    found = product_of("bf16")(torch.full((1, 64), 2.0**20), [matrix], 4)
    assert torch.equal(found, torch.full((1, 4), 2.0**-104))


@pytest.mark.slow
@needs_kernels
def test_bytes_that_begin_anywhere() -> None:
    """Files keep them so; vectors of kernels need no alignment."""
    buffer = torch.zeros(64 * 64 * 2 + 2, dtype=torch.uint8)
    matrix = buffer[2:].view(torch.bfloat16).view(64, 64).copy_(noise(64, 64))
    assert matrix.data_ptr() % 16 == 2
    x = noise(3, 64, seed=1)
    assert_agrees(product_of("bf16")(x, [matrix], 64), x, matrix.float())


# ------------------------------------------------------------------------------------------------ threads


@pytest.mark.each_value
@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("pool", [False, True], ids=["openmp", "pool"])
@pytest.mark.parametrize("name", MATRICES)
def test_threads_change_no_bit(
    name: str, pool: bool, set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if pool:
        monkeypatch.setattr(compiler, "gnu_openmp", lambda: None)
    product, matrix = product_of(name), MATRICES[name][1](403, 1152)
    for num_rows in (1, 4, 130):
        x = noise(num_rows, 1152)
        set_threads(1)
        alone = product(x, parts_of(matrix), 403)
        set_threads(3)
        for _ in range(3):
            assert torch.equal(product(x, parts_of(matrix), 403), alone)


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another OpenMP")
def test_threads_are_torchs_own() -> None:
    assert compiler.gnu_openmp() is not None


# ------------------------------------------------------------------------------------------------ what it cannot read


def test_rows_that_are_no_whole_steps() -> None:
    for width in (8, 16):
        for encoding in (Float16(width, "bf16"), Int8(width, 1.0)):
            assert encoding.can_read(12 * width)
            assert not encoding.can_read(12 * width + width)
        blocks = FourBit(width, CODES["nf4"], Blocks(128))
        assert [blocks.can_read(columns) for columns in (64, 128, 192, 256)] == [False, True, False, True]
    assert FourBit(16, CODES["nf4"], Blocks(32)).can_read(96)
    assert not FourBit(16, CODES["nf4"], Blocks(16)).can_read(64)


@needs_kernels
def test_what_a_kernel_cannot_read_is_multiplied_after_a_change() -> None:
    """Padded, copied or unpacked; the result is torch's within rounding."""
    product = plain_product(torch.bfloat16)
    assert product is not None
    odd, whole = noise(6, 100).bfloat16(), noise(6, 128).bfloat16()
    for matrix in (odd, whole.view(128, 6).T, whole[:, ::2], whole[:, :64], whole[:0], whole[:, :0]):
        x = noise(3, matrix.shape[1], seed=1)
        assert not can_multiply(product, x, matrix)
        torch.testing.assert_close(linear(x, matrix), torch.nn.functional.linear(x, matrix.float()))
    assert can_multiply(product, noise(3, 128), whole)
    no_rows = torch.empty(0, 128)
    assert linear(no_rows, whole).shape == (0, 6)
    for packed in (int8_matrix(6, 100), FourBitMatrices("nf4", 64)(6, 96), FourBitMatrices("nf4", 128)(6, 192)):
        assert packed.kernel is None
        x = noise(3, packed.shape[1], seed=1)
        expected = torch.nn.functional.linear(x, dense(packed, torch.float32))
        torch.testing.assert_close(linear(x, packed), expected, rtol=1e-5, atol=1e-3)


@needs_kernels
def test_rows_that_do_not_fit_the_matrix_are_torchs_error() -> None:
    """A kernel would read past the matrix's end."""
    for matrix in (noise(6, 128).bfloat16(), int8_matrix(6, 128), FourBitMatrices("nf4", 64)(6, 128)):
        with pytest.raises(RuntimeError, match="shapes"):
            linear(noise(3, 256), matrix)


@pytest.mark.slow
@needs_kernels
def test_a_matrix_without_rows() -> None:
    for num_rows in (1, 130):
        found = product_of("int8")(noise(num_rows, 64), [torch.empty(0, 64), torch.empty(0)], 0)
        assert found.shape == (num_rows, 0)


@each_width
@pytest.mark.parametrize("num_rows", [1, 5, 66])
def test_results_are_rounded_as_torch_rounds(num_rows: int) -> None:
    """Of 51 outputs, no whole vectors; also of what is no number, and of no dtype that kernels round to."""
    matrix = noise(51, 1152).to(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x = noise(num_rows, 1152).to(dtype)
        x[-1, 3] = torch.nan if num_rows > 1 else 1.0
        sums = product_of("bf16")(x, [matrix], 51, torch.float32)
        rounded = product_of("bf16")(x, [matrix], 51)
        assert (sums.dtype, rounded.dtype) == (torch.float32, dtype)
        torch.testing.assert_close(rounded, sums.to(dtype), rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------------ several matrices


SPANS = [(0, 1), (1, 3), (4, 40), (2, 1), (45, 17)]  # of each matrix: the first one, and their number


@each_width
@pytest.mark.parametrize("name", ["bf16", "nf4-64-nested", "fp8-blocks"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_matrices_in_one_call_have_the_bits_of_each_alone(
    name: str, num_threads: int, set_threads: Callable[[int], None]
) -> None:
    product, whole, half = product_of(name), *(MATRICES[name][1](n, 1152) for n in (200, 100))
    jobs = list[ProductJob]()
    for i, span in enumerate(SPANS):
        first, *others = parts_of(half if i == 2 else whole)
        jobs.append(ProductJob([first.roll(i, 0), *others], 100 if i == 2 else 200, *span))
    x = noise(62, 1152)
    set_threads(num_threads)
    together = product.each(x, jobs)
    alone = [product(x[job.first_row :][: job.num_rows], job.parts, job.num_outputs).flatten() for job in jobs]
    assert torch.equal(together, torch.cat(alone))
