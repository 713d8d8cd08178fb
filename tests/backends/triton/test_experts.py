"""Products with chosen experts in one launch, interpreted on the CPU: those of each expert's own matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from offspec.backends.expert_table import Chosen
from offspec.backends.on_gpu import GGUF_WITH_KERNELS, expert_kernels

from ...loaders.gguf_samples import oracle, random_blocks
from .interpreted import interpreted

pytestmark = pytest.mark.slow
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INTERPRETED = (*sorted(GGUF_WITH_KERNELS), "fp16", "fp32")  # Triton's interpreter cannot multiply bf16
SOME = {("Q4_0", 1), ("fp16", 7)}
NUM_EXPERTS, NUM_USED, NUM_OUTPUTS = 3, 2, 36
CASES = [
    pytest.param(form, num_rows, marks=() if (form, num_rows) in SOME else pytest.mark.nightly)
    for form in INTERPRETED
    for num_rows in (1, 7)
]


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with interpreted("gguf"), interpreted("experts") as module:
        yield module


def matrices_of(form: str, dtype: torch.dtype, num: int, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    """Matrices of experts as they are stored, and as plain ones of `dtype`."""
    if form in PLAIN:
        generator = torch.Generator().manual_seed(2)
        plain = [torch.randn(NUM_OUTPUTS, 288, generator=generator).to(PLAIN[form]) for _ in range(num)]
        return [each.to(device) for each in plain], plain
    stored = [random_blocks(form, NUM_OUTPUTS, 2 if "_K" in form else 9, seed=seed) for seed in range(num)]
    return [each.to(device) for each in stored], [oracle(form, each).to(dtype) for each in stored]


def addresses_of(names: Sequence[Sequence[Tensor]]) -> Tensor:
    """Of the matrices of several names, each with a row for biases behind it."""
    rows = [row for each in names for row in ([matrix.data_ptr() for matrix in each], [0] * len(each))]
    return torch.tensor(rows)


def products(
    kernels: Any, form: str, x: Tensor, chosen: Tensor, stored: Sequence[Sequence[Tensor]], **options: Any
) -> Tensor:
    """x by the experts that its rows chose, of each name: [names, places, N]; NaN where nothing was computed."""
    addresses = options.pop("addresses", addresses_of(stored)).to(x.device)
    tile = kernels.tile_of(form, x.dtype, options.pop("rows", 1))
    out = torch.full((len(stored), chosen.numel(), NUM_OUTPUTS), torch.nan, dtype=x.dtype, device=x.device)
    choice = Chosen(chosen, NUM_EXPERTS).tiles(tile.rows)
    options = {"step": 2 * NUM_EXPERTS, "alignment": 1, "has_bias": False, **options}
    kernels.multiply(form, tile, x, choice, addresses, out, **options)
    return out


def expected_of(x: Tensor, chosen: Tensor, plain: Sequence[Tensor]) -> Tensor:
    return torch.stack(
        [plain[number].double() @ row.double() for row, some in zip(x, chosen.tolist(), strict=True) for number in some]
    )


def chosen_by(num_rows: int, num_experts: int = NUM_EXPERTS) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.stack(
        [torch.randperm(num_experts, generator=generator)[:NUM_USED].sort().values for _ in range(num_rows)]
    )


def rows_for(plain: Sequence[Tensor], num_rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, plain[0].shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_near(found: Tensor, expected: Tensor, bound: float) -> None:
    assert (found.double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize(("form", "num_rows"), CASES)
def test_each_row_is_multiplied_by_its_experts(kernels: ModuleType, form: str, num_rows: int) -> None:
    """By two matrices of each expert at once; then each place by a third one."""
    dtype = PLAIN.get(form, torch.float32)
    stored, plain = matrices_of(form, dtype, 3 * NUM_EXPERTS)
    names = [stored[i * NUM_EXPERTS : (i + 1) * NUM_EXPERTS] for i in range(3)]
    x, chosen = rows_for(plain, num_rows, dtype), chosen_by(num_rows)
    both = products(kernels, form, x, chosen, names[:2])
    bound = 1e-5 if dtype == torch.float32 else 0.01
    for index, found in enumerate(both):
        assert_near(found, expected_of(x, chosen, plain[index * NUM_EXPERTS :]), bound)
    inner = rows_for(plain, chosen.numel(), dtype)
    third = products(kernels, form, inner, chosen, names[2:])[0]
    assert_near(third, expected_of(inner, chosen.view(-1, 1), plain[2 * NUM_EXPERTS :]), bound)


def test_experts_without_addresses_are_left_out(kernels: ModuleType) -> None:
    stored, plain = matrices_of("fp32", torch.float32, NUM_EXPERTS)
    x, chosen, addresses = rows_for(plain, 6, torch.float32), chosen_by(6), addresses_of([stored])
    addresses[0, 1::2] = 0
    found = products(kernels, "fp32", x, chosen, [stored], addresses=addresses)[0]
    is_there = chosen.flatten() % 2 == 0
    assert found[~is_there].isnan().all()
    assert_near(found[is_there], expected_of(x, chosen, plain)[is_there], 1e-5)


@pytest.mark.parametrize("rows", [1, pytest.param(64, marks=pytest.mark.nightly)])
def test_experts_of_many_rows_take_several_tiles(kernels: ModuleType, rows: int) -> None:
    """Of 70 rows: of 140 places only some are among those that may begin a tile."""
    stored, plain = matrices_of("fp16", torch.float16, NUM_EXPERTS)
    x, chosen = rows_for(plain, 70, torch.float16), chosen_by(70)
    assert len(Chosen(chosen, NUM_EXPERTS).tiles(16)[3]) < 20
    found = products(kernels, "fp16", x, chosen, [stored], rows=rows)[0]
    assert_near(found, expected_of(x, chosen, plain), 0.01)


def test_biases(kernels: ModuleType) -> None:
    stored, plain = matrices_of("fp32", torch.float32, NUM_EXPERTS)
    x, chosen = rows_for(plain, 3, torch.float32), chosen_by(3)
    biases = list(torch.randn(NUM_EXPERTS, NUM_OUTPUTS))
    addresses = addresses_of([stored])
    addresses[1] = torch.tensor([bias.data_ptr() for bias in biases])
    found = products(kernels, "fp32", x, chosen, [stored], addresses=addresses, has_bias=True)[0]
    assert_near(found, expected_of(x, chosen, plain) + torch.stack([biases[n] for n in chosen.flatten()]), 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [*sorted(GGUF_WITH_KERNELS), *PLAIN])
@pytest.mark.parametrize("num_rows", [1, 16, 200])
def test_on_a_gpu(form: str, num_rows: int) -> None:
    compiled = expert_kernels()
    if compiled is None:
        pytest.skip("Triton is not installed")
    dtype = PLAIN.get(form, torch.bfloat16)
    stored, plain = matrices_of(form, dtype, 2 * NUM_EXPERTS, "cuda")
    x, chosen = rows_for(plain, num_rows, dtype), chosen_by(num_rows)
    names = [stored[:NUM_EXPERTS], stored[NUM_EXPERTS:]]
    alignment = compiled.ALIGNED if all(each.data_ptr() % compiled.ALIGNED == 0 for each in stored) else 1
    for rows in (1, 17, 64):
        both = products(compiled, form, x.to("cuda"), chosen.to("cuda"), names, rows=rows, alignment=alignment).cpu()
        for index, found in enumerate(both):
            assert_near(found, expected_of(x, chosen, plain[index * NUM_EXPERTS :]), 0.02)
