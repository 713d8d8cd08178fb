"""bf16 in fewer bytes: every bit comes back, whatever a matrix holds, in every way of unpacking; damage is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.cpu import plain_product
from offspec.backends.x86.bf16_bits import Bf16Bits
from offspec.backends.x86.processor import per_processor
from offspec.backends.x86.row_product import RowProduct
from offspec.backends.x86.unpack import Unpacker
from offspec.errors import CheckpointError
from offspec.loaders.files.checkpoint import DTYPE_BYTES, TensorInfo
from offspec.loaders.formats import stored_weights
from offspec.loaders.formats.bf16_bits import (
    EXCEPTION,
    LEAST_GAIN,
    MOST_EXCEPTIONS,
    PackedBits,
    group_rows,
    pack,
    part_shapes,
    unpack,
)
from offspec.loaders.formats.bf16_packed import PARTS, Bf16Packer, PackedBf16Matrix, PackedBf16Weight
from offspec.loaders.machine.product_rates import sample

from ...examples import examples
from ...machines import NO_VECTORS, THIS, by_processor, each_width, needs_kernels, run
from ...refusals import refused

BF16 = torch.bfloat16


def noise(*shape: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def every_pattern() -> Tensor:
    """bf16 [2048, 1024] of normal numbers, with all 65,536 patterns in it: NaN, infinities, denormals, both zeros."""
    matrix = noise(2048, 1024)
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(BF16)
    matrix.view(-1, 4096)[:, :128] = patterns.view(-1, 128)
    return matrix


def with_dead_rows() -> Tensor:
    """Rows of zeros, of denormals, and of numbers a millionth as large."""
    matrix = noise(37, 4096)
    matrix[3], matrix[8], matrix[20] = 0.0, noise(4096, scale=1e-39), noise(4096, scale=2e-8)
    return matrix


MATRICES = {"normal": noise(131, 1088), "every pattern": every_pattern(), "dead rows": with_dead_rows()}


def same_bits(found: Tensor, expected: Tensor) -> bool:
    integers = torch.int32 if expected.dtype is torch.float32 else torch.int16
    return torch.equal(found.view(integers), expected.view(integers))


def packed(matrix: Tensor) -> PackedBits:
    found = pack(matrix)
    assert found is not None
    return found


def unpacked(bits: PackedBits, dtype: torch.dtype = BF16) -> Tensor:
    out = torch.full(bits.shape, 7.0, dtype=dtype)
    unpack(bits, out)
    return out


# ------------------------------------------------------------------------------------------------ the bits


@pytest.mark.parametrize("name", MATRICES)
def test_every_bit_comes_back(name: str) -> None:
    matrix = MATRICES[name]
    bits = packed(matrix)
    assert same_bits(unpacked(bits), matrix)
    assert same_bits(unpacked(bits, torch.float32), matrix.float())
    assert tuple(part.shape for part in (bits.low, bits.codes, bits.groups)) == part_shapes(
        bits.shape, bits.groups.shape[1] // 2 - 8
    )


def test_bits_a_weight_of_a_normal_matrix() -> None:
    bits = packed(noise(1024, 4096))
    assert 12 < 8 * bits.num_bytes / math.prod(bits.shape) < 12.05


WORDS = st.one_of(
    st.integers(0, 0xFFFF),  # any pattern
    st.integers(0, 0x7F).map(lambda fraction: 0x3F80 | fraction),  # one exponent
    st.integers(0, 255).map(lambda exponent: exponent << 7),  # all exponents
    st.sampled_from((0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x0001, 0x807F)),
)


@st.composite
def adversarial(draw: st.DrawFn) -> Tensor:
    """Odd sizes; a row of one kind of numbers beside rows of others."""
    num_rows, num_columns = draw(st.integers(1, 40)), draw(st.sampled_from((1, 2, 31, 32, 33, 64, 97, 500, 20_000)))
    words = draw(st.lists(WORDS, min_size=1, max_size=40))
    seed, share = draw(st.integers(0, 99)), draw(st.sampled_from((0.0, 0.003, 0.1, 1.0)))
    generator = torch.Generator().manual_seed(seed)
    matrix = noise(num_rows, num_columns, seed=seed)
    picked = torch.tensor(words).to(torch.int16).view(BF16)[torch.randint(len(words), (matrix.numel(),))]
    is_picked = torch.rand(matrix.shape, generator=generator) < share
    return torch.where(is_picked, picked.view(matrix.shape), matrix)


@pytest.mark.slow
@given(adversarial())
@examples(60)
def test_adversarial_matrices(matrix: Tensor) -> None:
    bits = pack(matrix)
    if bits is not None:
        assert same_bits(unpacked(bits), matrix)
        assert bits.num_bytes <= LEAST_GAIN * matrix.nbytes
    parts = Bf16Packer().pack(matrix)
    assert (parts.keys() == {""}) == (bits is None)
    if bits is None:
        assert same_bits(parts[""], matrix)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1), (3, 7)])
def test_what_would_not_shrink_stays(shape: tuple[int, int]) -> None:
    assert pack(noise(*shape)) is None
    assert pack(torch.randint(-(1 << 15), 1 << 15, (64, 1024)).to(torch.int16).view(BF16)) is None


@pytest.mark.parametrize("exponent", [0, 1, 127, 254, 255])
def test_one_exponent_needs_no_exceptions(exponent: int) -> None:
    matrix = (torch.arange(128 * 512) % 128 | exponent << 7).to(torch.int16).view(128, 512).view(BF16)
    bits = packed(matrix)
    assert same_bits(unpacked(bits), matrix)
    assert not any(bool((half == EXCEPTION).any()) for half in (bits.codes & 15, bits.codes >> 4))


def test_as_many_exceptions_as_a_group_can_list() -> None:
    for count, has_room in ((MOST_EXCEPTIONS, True), (MOST_EXCEPTIONS + 1, False)):
        matrix = torch.full((16, 1024), 1.0, dtype=BF16)
        wide = torch.arange(15).repeat_interleave(20) << 7  # 15 exponents, more often than what follows
        matrix.view(torch.int16).view(-1)[: len(wide)] = wide.to(torch.int16)
        matrix.view(torch.int16).view(-1)[1000 : 1000 + count] = ((torch.arange(count) % 15 + 200) << 7).to(torch.int16)
        bits = pack(matrix)
        assert (bits is not None) == has_room or count <= MOST_EXCEPTIONS
        if bits is not None:
            assert same_bits(unpacked(bits), matrix)


def test_any_group_of_rows_is_unpacked_alone() -> None:
    matrix = MATRICES["dead rows"]
    bits, height = packed(matrix), group_rows(4096)
    assert height == 4
    for first in range(0, 37, height):
        last = min(37, first + 3)
        assert same_bits(unpacked(bits.rows(first, last)), matrix[first:last])


# ------------------------------------------------------------------------------------------------ kernels


@pytest.mark.each_value(together=2)
@each_width
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
@pytest.mark.parametrize("name", MATRICES)
def test_the_compiled_unpacker_is_its_twin(name: str, dtype: torch.dtype) -> None:
    matrix, bits = MATRICES[name], packed(MATRICES[name])
    found = torch.full(bits.shape, 7.0, dtype=dtype)
    unpacker(dtype)(PackedBf16Matrix(bits).kernel_parts, found)
    assert same_bits(found, unpacked(bits, dtype))
    assert dtype is not BF16 or same_bits(found, matrix)


@per_processor
def unpacker(dtype: torch.dtype) -> Unpacker:
    return Unpacker(Bf16Bits(8), dtype)


@per_processor
def products() -> tuple[RowProduct, RowProduct]:
    """The packed and the plain kernel."""
    packed_product, plain = PackedBf16Matrix(packed(noise(64, 256))).kernel, plain_product(BF16)
    assert packed_product is not None
    assert plain is not None
    return packed_product[0], plain


@pytest.mark.each_value
@pytest.mark.slow
@each_width
@pytest.mark.parametrize("name", MATRICES)
def test_the_fused_product_has_the_bits_of_the_plain_kernels(name: str) -> None:
    """Whatever is an exception, and however many rows: NaN where there is one, too."""
    matrix, (mine, plain) = MATRICES[name][:135], products()
    parts = PackedBf16Matrix(packed(matrix)).kernel_parts
    for num_rows in (1, 2, 3, 5, 17, 65):
        for dtype in (BF16, torch.float32):
            x = noise(num_rows, matrix.shape[1], seed=num_rows, scale=1).to(dtype)
            found, expected = (product(x, some, len(matrix)) for product, some in ((mine, parts), (plain, [matrix])))
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.each_value
@pytest.mark.slow
@by_processor("processor", NO_VECTORS, run(THIS))
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
def test_products_are_those_of_the_plain_matrix(dtype: torch.dtype) -> None:
    for shape in ((131, 1088), (70, 1000)):  # the second is no whole step of any kernel
        matrix = noise(*shape)
        held = PackedBf16Matrix(packed(matrix))
        scratch, bias = torch.empty(matrix.numel() + 3, dtype=dtype), noise(shape[0], seed=3).to(dtype)
        for num_rows in (1, 6, 70):
            x = noise(num_rows, shape[1], seed=1, scale=1).to(dtype)
            expected = linear(x, matrix, bias, scratch)
            assert torch.equal(linear(x, held, bias, scratch), expected)
            assert torch.equal(linear(x, held, bias), expected)
        assert torch.equal(linear(x[:0], held, bias), linear(x[:0], matrix, bias))


@needs_kernels
def test_no_file_makes_a_kernel_read_elsewhere() -> None:
    """Codes of exceptions everywhere, and places behind the last value."""
    bits = packed(noise(64, 1024))
    harmed = PackedBits(bits.shape, torch.full_like(bits.low, 255), torch.full_like(bits.codes, 255), bits.groups)
    last = bits.groups[:, -2:].contiguous().view(BF16).repeat_interleave(group_rows(1024), 0).expand(64, 1024)
    assert same_bits(unpacked(harmed), last.contiguous())
    found = torch.empty(64, 1024, dtype=BF16)
    unpacker(BF16)(PackedBf16Matrix(harmed).kernel_parts, found)
    assert same_bits(found, last.contiguous())
    assert plain_product(BF16) is not None


# ------------------------------------------------------------------------------------------------ files


def infos_of(bits: PackedBits, path: Path) -> dict[str, TensorInfo]:
    shapes = zip(PARTS, part_shapes(bits.shape, bits.groups.shape[1] // 2 - 8), strict=True)
    return {
        f"a.weight.{part}": TensorInfo(f"a.weight.{part}", "U8", shape, path, 0, math.prod(shape))
        for part, shape in shapes
    }


def changed_info(info: TensorInfo, *shape: int, dtype: str = "U8") -> TensorInfo:
    return TensorInfo(info.name, dtype, shape, info.path, 0, DTYPE_BYTES[dtype] * math.prod(shape))


def test_a_stored_weight(tmp_path: Path) -> None:
    matrix = noise(50, 1000)
    bits = packed(matrix)
    (stored,) = stored_weights(infos_of(bits, tmp_path / "file")).values()
    assert isinstance(stored, PackedBf16Weight)
    assert (stored.name, stored.shape, stored.dtype, stored.plain_dtype) == (
        "a.weight",
        (50, 1000),
        "bf16-packed",
        "BF16",
    )
    assert [dtype for dtype in (BF16, torch.float16, torch.float32) if stored.is_kept_as_read(dtype)] == [BF16]
    bound = stored.bind([part.flatten() for part in (bits.low, bits.codes, bits.groups)])
    assert same_bits(bound.dequantize(BF16), matrix)
    measured = sample("bf16-packed", (64, 256))
    assert isinstance(measured, PackedBf16Matrix)
    assert bool(measured.dequantize(torch.float32).isfinite().all())


@pytest.mark.parametrize("part", PARTS)
def test_a_weight_that_lacks_a_part(part: str, tmp_path: Path) -> None:
    infos = infos_of(packed(noise(50, 1000)), tmp_path / "file")
    del infos[f"a.weight.{part}"]
    with refused(CheckpointError, tmp_path / "file", "a.weight", part, "damaged"):
        stored_weights(infos)


@pytest.mark.parametrize(
    ("part", "shape"),
    [
        ("bf16_low", (50, 900)),
        ("bf16_low", (50000,)),
        ("bf16_low", (0, 1000)),
        ("bf16_codes", (50, 500)),
        ("bf16_codes", (49, 512)),
        ("bf16_groups", (3, 18)),  # the last group's exceptions are missing
        ("bf16_groups", (4, 16)),  # no room for one
        ("bf16_groups", (4, 19)),
        ("bf16_groups", (4, 16 + 2 * MOST_EXCEPTIONS + 2)),
        ("bf16_groups", (64,)),
        ("bf16_groups", ()),
    ],
)
def test_a_part_of_another_shape(part: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    infos = infos_of(packed(noise(50, 1000)), tmp_path / "file")
    infos[f"a.weight.{part}"] = changed_info(infos[f"a.weight.{part}"], *shape)
    with refused(CheckpointError, tmp_path / "file", "a.weight", "damaged"):
        stored_weights(infos)


def test_a_part_of_another_dtype_and_a_weight_that_is_there_twice(tmp_path: Path) -> None:
    infos = infos_of(packed(noise(50, 1000)), tmp_path / "file")
    wrong = changed_info(infos["a.weight.bf16_groups"], *infos["a.weight.bf16_groups"].shape, dtype="I8")
    with refused(CheckpointError, "a.weight", "I8", "damaged"):
        stored_weights(infos | {wrong.name: wrong})
    plain = TensorInfo("a.weight", "BF16", (50, 1000), tmp_path / "file", 0, 100_000)
    with refused(CheckpointError, "a.weight", "twice"):
        stored_weights(infos | {"a.weight": plain})
