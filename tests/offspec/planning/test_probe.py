"""Ways to multiply are chosen for large models on a CPU, and plans are told what the chosen ones take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offspec.backends import device_kinds
from offspec.backends.arithmetic import EXACT, FAST, INT8
from offspec.backends.choice import backend_of
from offspec.backends.device_kinds import DeviceKind
from offspec.checkpoints.opening import open_model
from offspec.loaders.machine.hardware import Rates
from offspec.planning import probe
from offspec.planning.probe import ProductRates, measure_quick_rates, prepare_kernels, with_arithmetic

from ...machines import needs_kernels
from ...pair import build_pair

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pair(tmp_path_factory.mktemp("pair")).target


@needs_kernels
def test_models_that_are_large_enough_have_their_kernels_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[set[str]]()
    monkeypatch.setattr(probe, "kernels_of", lambda forms, dtype: compiled.append(forms) or [])
    files = open_model(folder, "bf16", [])
    count = sum(layer.num_weights for layer in files.stored.layers)
    for least in (count + 1, count):
        monkeypatch.setattr(probe, "LEAST_MEASURED_WEIGHTS", least)
        prepare_kernels([files], backend_of(CPU))
    assert compiled == [{"fp32"}]


def test_quick_rates_are_those_of_products(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_model(folder, "bf16", [])
    monkeypatch.setattr(probe, "product_flops", lambda form, dtype, device: {1: 2.0} if form == "bf16" else {})
    rates = measure_quick_rates(files, CPU, 5e9)
    assert rates.matmul_flops == {1: 2.0}
    assert (rates.disk_bytes_per_s, rates.host_to_device_bytes_per_s) == (5e9, 5e9)
    assert rates.dequantise_elements_per_s is None


def test_a_large_target_has_the_rates_of_its_arithmetic(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def product_flops(form: str, dtype: torch.dtype, arithmetic: str, device: DeviceKind) -> dict[int, float]:
        asked.append(arithmetic)
        return {1: 3.0}

    monkeypatch.setattr(probe, "product_flops", product_flops)
    files, fast = open_model(folder, "bf16", []), Rates(5e9, matmul_flops={1: 1.0})
    assert with_arithmetic(fast, files, CPU, EXACT) is fast, "a small model's passes are short"
    monkeypatch.setattr(probe, "LEAST_MEASURED_WEIGHTS", 0)
    assert with_arithmetic(fast, files, CPU, FAST) is fast
    assert with_arithmetic(fast, files, CPU, EXACT) is fast, "a CPU's kernels are exact"
    assert with_arithmetic(fast, files, CPU, INT8) == replace(fast, matmul_flops={1: 3.0})
    assert asked == [INT8]


def test_drafts_need_not_be_exact(folder: Path) -> None:
    target, draft = (open_model(folder, "bf16", []) for _ in range(2))
    exact, fast = Rates(matmul_flops={1: 1.0}), Rates(matmul_flops={1: 2.0})
    rates_of = ProductRates(target, exact, device_kinds.CPU, fast)
    assert (rates_of(target), rates_of(draft)) == (exact, fast)
    assert ProductRates(target, exact, device_kinds.GPU)(draft) == exact, "nothing else is known"
