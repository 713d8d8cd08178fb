"""`offspec doctor`: a table that fits any terminal, or one JSON object, and progress only where somebody watches."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from offspec.cli.doctor import table
from offspec.loaders.machine.gpu_support import GpuFault
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.machine.product_rates import ProductRate

from ..offspec.tools.test_diagnosis import CPU_ONLY, DESKTOP
from .conftest import Offspec

MEASURED = Rates(2e9, None, 10e9, {1: 1e9, 64: 2e11}, None, {"disk_bytes_per_s": "direct", "matmul_flops": "bfloat16",
                 "dequantise_elements_per_s": "not measured: bitsandbytes is missing"})  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring without a clock, a disk or an import."""

    def measure(device: Any, dtype: Any, path: Path, progress: Any) -> Rates:
        progress("disk")
        return MEASURED

    monkeypatch.setattr("offspec.tools.diagnosis.measure_rates", measure)
    products = (ProductRate("bf16", 1, 3e10, 3e10), ProductRate("bf16", 256, 2e11, 8e8))
    monkeypatch.setattr("offspec.tools.diagnosis.measure_products", lambda dtype: products)


@pytest.mark.usefixtures("measured")
def test_the_table(offspec: Offspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    result = offspec("doctor", "--device", "cpu", "--path", tmp_path)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("RAM         ")
    assert "GPU         none used (--device cpu)" in lines
    assert "disk        2 GB/s (direct)" in lines
    assert "matmul      1 GFLOP/s at 1, 200 GFLOP/s at 64 (tokens at once; bfloat16)" in lines
    assert "bf16 x 1    30 GFLOP/s, 30 GB/s of weights" in lines
    assert "bf16 x 256  200 GFLOP/s, 800 MB/s of weights" in lines
    assert "NF4         - (not measured: bitsandbytes is missing)" in lines
    assert any(line.startswith("- This disk reads 2 GB/s") for line in lines)


@pytest.mark.usefixtures("measured")
def test_json_is_one_object_and_nothing_else(offspec: Offspec, tmp_path: Path) -> None:
    result = offspec("doctor", "--device", "cpu", "--path", tmp_path, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["hardware"]["rates"] == {**asdict(MEASURED), "matmul_flops": {"1": 1e9, "64": 2e11}}
    assert found["hardware"]["ram"]["available_bytes"] > 0
    assert found["disk"]["path"] == str(tmp_path)
    assert (found["device"], type(found["advice"])) == ("cpu", list)


@pytest.mark.parametrize("name", [".", "model.safetensors"])
def test_quick_shows_no_rates(offspec: Offspec, tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    result = offspec("doctor", "--quick", "--device", "cpu", "--path", tmp_path / name)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("RAM ")
    assert "easured" not in result.out
    assert result.out.isascii()
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(("flags", "shown"), [((), True), (("--quiet",), False)])
def test_progress_for_who_watches(
    offspec: Offspec, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], shown: bool
) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)
    result = offspec("doctor", "--device", "cpu", *flags)
    assert result.err.startswith("\r\x1b[Kmeasuring products ...") == shown
    assert result.err.endswith("\r\x1b[K") == shown


@pytest.mark.parametrize("found", [DESKTOP, CPU_ONLY])
@pytest.mark.parametrize("columns", [20, 80])
def test_the_table_fits(found: Any, columns: int) -> None:
    lines = table(found, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert all(line.isascii() for line in lines)


def test_the_last_lines_say_what_is_next() -> None:
    assert table(CPU_ONLY, 80).splitlines()[-2:] == ["Ready. Next:", '  offspec run builtin "def area("']
    broken = replace(DESKTOP, gpu_fault=GpuFault("torch has no CUDA", "install the CUDA wheel", has_driver=True))
    last = table(replace(broken, bitsandbytes_version=None), 100).split("\n\n")[-1]
    assert last.startswith("To do: Torch has no CUDA. Install the CUDA wheel.\nTo do: bitsandbytes is not installed")
    assert broken.as_dict()["to_do"] == ["Torch has no CUDA. Install the CUDA wheel."]
    inexact = replace(DESKTOP, exact_fault="Triton cannot build its kernels")
    assert inexact.to_do == ["Texts equal plain decoding's up to near-ties only: Triton cannot build its kernels."]


@pytest.mark.parametrize("arguments", [("--device", "tpu"), ("--path", "/not/there"), ("--fast",)])
def test_wrong_usage(offspec: Offspec, arguments: tuple[str, ...]) -> None:
    offspec("doctor", "--quick", *arguments).refusal(2, *arguments)
