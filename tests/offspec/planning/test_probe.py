"""Ways to multiply are chosen for large models on a CPU, and plans are told what the chosen ones take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offspec.backends.arithmetic import EXACT, FAST, INT8
from offspec.backends.products import TORCH, MethodCosts, ProductCosts, ProductKind, are_rows_exact
from offspec.checkpoints.opening import ModelFiles
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.machine.product_costs import product_flops
from offspec.planning import probe
from offspec.planning.probe import ProductRates, choose_products, measure_quick_rates, with_arithmetic

from ...machines import needs_kernels
from ...pair import build_pair

CPU = torch.device("cpu")
Forms = set[tuple[str, torch.dtype]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pair(tmp_path_factory.mktemp("pair")).target


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Forms]:
    """What is asked to be known; nothing is measured."""
    asked = list[Forms]()
    monkeypatch.setattr(probe, "know_products", lambda forms: asked.append(set(forms)))
    return asked


def test_models_that_are_large_enough(folder: Path, chosen: list[Forms], monkeypatch: pytest.MonkeyPatch) -> None:
    files = ModelFiles.open(folder, "bf16", "cpu", [])
    choose_products([(files, False)], CPU)
    assert chosen.pop() == set()
    count = sum(layer.num_weights for layer in files.stored.layers)
    bf16 = ("bf16", torch.bfloat16)
    for least, expected in ((count + 1, set()), (count, {("F32", torch.bfloat16), bf16})):
        monkeypatch.setattr(probe, "LEAST_CHOSEN_WEIGHTS", least)
        choose_products([(files, False)], CPU)
        assert chosen.pop() == expected
    choose_products([(files, True)], CPU)
    assert chosen.pop() == {bf16}, "what stays is bf16 by then, and no longer what was read"


def test_on_a_gpu_nothing_is_chosen(folder: Path, chosen: list[Forms], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LEAST_CHOSEN_WEIGHTS", 0)
    choose_products([(ModelFiles.open(folder, "bf16", "cpu", []), False)], torch.device("cuda"))
    assert chosen == []


def test_quick_rates_are_those_of_the_chosen_products(
    folder: Path, product_costs: ProductCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> float:
        pytest.fail("is known")

    files = ModelFiles.open(folder, "bf16", "cpu", [])
    rates = measure_quick_rates(files, CPU, 5e9)
    assert rates.matmul_flops.keys() == {1, 16, 128}, "measured as long as no costs are known"
    product_costs.set(ProductKind("bf16", torch.bfloat16, is_large=True), MethodCosts({TORCH: {1: 0.5, 16: 1.0}}))
    monkeypatch.setattr(probe, "measure_matmul", refuse)
    monkeypatch.setattr(
        "offspec.loaders.machine.product_costs._typical_s", lambda kind: 1.0
    )  # the machine is as it was
    rates = measure_quick_rates(files, CPU, 5e9)
    assert rates.matmul_flops == product_flops("bf16", torch.bfloat16)
    assert (rates.disk_bytes_per_s, rates.host_to_device_bytes_per_s) == (5e9, 5e9)
    assert rates.dequantise_elements_per_s is None


def test_a_large_exact_target_has_the_rates_of_its_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def product_flops(form: str, dtype: torch.dtype, arithmetic: str) -> dict[int, float]:
        asked.append(arithmetic)
        return {1: 3.0}

    monkeypatch.setattr(probe, "product_flops", product_flops)
    files, fast = ModelFiles.open(folder, "bf16", "cpu", []), Rates(5e9, matmul_flops={1: 1.0})
    assert with_arithmetic(fast, files, CPU, EXACT) is fast, "a small model's passes are short"
    monkeypatch.setattr(probe, "LEAST_CHOSEN_WEIGHTS", 0)
    assert with_arithmetic(fast, files, CPU, FAST) is fast
    assert with_arithmetic(fast, files, CPU, EXACT) == replace(fast, matmul_flops={1: 3.0})
    assert with_arithmetic(fast, files, CPU, INT8).matmul_flops == {1: 3.0}
    assert asked == [EXACT, INT8]


@needs_kernels
def test_where_no_form_is_known_exact_products_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_matmul(*args: object, **options: object) -> dict[int, float]:
        assert are_rows_exact()
        return {1: 3.0}

    monkeypatch.setattr(probe, "LEAST_CHOSEN_WEIGHTS", 0)
    monkeypatch.setattr(probe, "measure_matmul", measure_matmul)
    files = ModelFiles.open(folder, "fp32", "cpu", [])
    assert with_arithmetic(Rates(), files, CPU, EXACT).matmul_flops == {1: 3.0}


def test_drafts_need_not_be_exact(folder: Path) -> None:
    target, draft = (ModelFiles.open(folder, "bf16", "cpu", []) for _ in range(2))
    exact, fast = Rates(matmul_flops={1: 1.0}), Rates(matmul_flops={1: 2.0})
    rates_of = ProductRates(target, exact, "cpu", fast)
    assert (rates_of(target), rates_of(draft)) == (exact, fast)
    assert ProductRates(target, exact, "cuda")(draft) == exact, "nothing else is known"
