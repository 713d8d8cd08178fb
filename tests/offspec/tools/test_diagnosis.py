"""Advice is computed from the figures, speaks of what matters on that machine, and is never long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec.loaders.machine.gpu_support import GpuFault
from offspec.loaders.machine.hardware import Disk, Gpu, Hardware, Memory, Rates
from offspec.loaders.machine.product_rates import ProductRate
from offspec.tools import diagnosis
from offspec.tools.diagnosis import MAX_ADVICE, Diagnosis, diagnose

from ...refusals import tells

GIB = 2**30

RATES = Rates(3.4e9, 25e9, 900e9, {64: 40e12}, 200e9, {"disk_bytes_per_s": "4 readers of 8 MiB, direct; shard"})
CARD = Gpu("RTX 4090", 0, 24 * GIB, 23 * GIB, (8, 9))
RAM = Memory(64 * GIB, 50 * GIB, 64 * GIB, "MemAvailable")
DESKTOP = Diagnosis(
    device="cuda:0",
    device_reason="found",
    hardware=Hardware(RAM, "CPU", 16, "hardware", CARD, RATES),
    disk=Disk(Path("/models"), "ext4", "/dev/nvme0n1", 900 * GIB),
    disk_reason="",
    torch_version="2.9.0+cu130",
    torch_has_gpus=True,
    bitsandbytes_version="0.50.2",
    load_average=0.5,
)
CPU_RATES = replace(RATES, host_to_device_bytes_per_s=None, matmul_flops={64: 1e11}, dequantise_elements_per_s=1e9)
NO_DRIVER = GpuFault("there is no NVIDIA driver", "if there is an NVIDIA card, install its driver", has_driver=False)
CPU_ONLY = replace(DESKTOP, device="cpu", device_reason=NO_DRIVER.reason, gpu_fault=NO_DRIVER,
                   hardware=replace(DESKTOP.hardware, gpu=None, rates=CPU_RATES))  # fmt: skip


def with_rates(found: Diagnosis, **changes: Any) -> Diagnosis:
    return replace(found, hardware=replace(found.hardware, rates=replace(found.hardware.rates, **changes)))


def with_card(**changes: Any) -> Diagnosis:
    return replace(DESKTOP, hardware=replace(DESKTOP.hardware, gpu=replace(CARD, **changes)))


def with_ram(found: Diagnosis, **changes: Any) -> Diagnosis:
    return replace(found, hardware=replace(found.hardware, ram=replace(found.hardware.ram, **changes)))


def test_a_good_desktop_is_told_what_streaming_costs() -> None:
    (line,) = DESKTOP.advice
    assert tells(line, "3.4 GB/s", "70B", "NF4", "40 GB", "11.8 s", "1.6 s", "53.7 GB")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        # 70.6e9 weights, twice 64 FLOP each at 5e11 a second: 18 s.
        (replace(CPU_ONLY, products=(ProductRate("nf4", 64, 5e11, 4e9),)), ("arithmetic", "18.1 s")),
        (with_ram(CPU_ONLY, total_bytes=16 * GIB, available_bytes=10 * GIB), ("8B", "NF4", "5.7 GB", "1.7 s")),
        (replace(DESKTOP, load_average=30.0), ("busy", 30, "16 cores")),
        (
            with_ram(DESKTOP, total_bytes=6 * GIB, limit="cgroup v2 memory.max of /"),
            ("6 GiB", "64 GiB", "cgroup v2 memory.max of /"),
        ),
        (replace(DESKTOP, bitsandbytes_version=None), ("pip install bitsandbytes",)),
        (replace(CPU_ONLY, gpu_fault=GpuFault("the driver is too old", "update it")), ("too old. Update it.",)),
        (CPU_ONLY, ("There is no NVIDIA driver. If there is an NVIDIA card, install its driver.",)),
        (with_card(capability=(7, 5)), ("bf16", "fp16", "`dtype=fp32`")),
        (
            with_rates(DESKTOP, sources={"disk_bytes_per_s": "1 reader, through the page cache, refused"}),
            ("ext4", "direct reads"),
        ),
        (with_rates(DESKTOP, disk_bytes_per_s=5e8), ("500 MB/s", "NVMe")),
        (with_rates(DESKTOP, host_to_device_bytes_per_s=3e9), ("link", "3 GB/s")),
        (with_card(free_bytes=10 * GIB), ("14 GiB", "card", "24 GiB")),
        (
            replace(DESKTOP, disk=Disk(Path("/models"), "ext4", "/dev/sda", 9 * 10**9)),
            ("/models", "9 GB", "70B", "40 GB"),
        ),
        (with_rates(DESKTOP, matmul_flops={64: 1e11}), ("card", "smaller model")),
    ],
)
def test_what_is_wrong_is_told(found: Diagnosis, words: tuple[object, ...]) -> None:
    assert any(tells(text, *words) for text in found.advice), found.advice


def test_nothing_measured_says_nothing_of_speed() -> None:
    for rates in (Rates(), Rates(sources={"disk_bytes_per_s": "not measured: no room"})):
        assert replace(DESKTOP, hardware=replace(DESKTOP.hardware, rates=rates), load_average=99.0).advice == []


def test_advice_is_never_long() -> None:
    worst = replace(
        with_ram(CPU_ONLY, total_bytes=GIB, available_bytes=0), bitsandbytes_version=None, load_average=99.0
    )
    assert len(worst.advice) == MAX_ADVICE


# ------------------------------------------------------------------------------------------------ looking


def test_quick_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "measure_rates", None)
    found = diagnose("cpu", tmp_path, quick=True)
    assert (found.device, found.device_reason, found.hardware.rates) == ("cpu", "as asked", Rates())
    assert found.disk is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "torch.float16"), ((8, 6), "torch.bfloat16")])
def test_old_cards_multiply_in_fp16(capability: tuple[int, int], dtype: str) -> None:
    card = replace(CARD, capability=capability)
    assert str(diagnosis.dtype_of(replace(DESKTOP.hardware, gpu=card))) == dtype
