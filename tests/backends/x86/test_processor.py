"""The instructions that kernels are made for: a value that tests set."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from offspec.backends.arithmetic import EXACT
from offspec.backends.cpu import ExactCpuBackend, plain_product
from offspec.backends.x86 import processor
from offspec.backends.x86.processor import (
    LEVELS,
    can_pair,
    describe_instructions,
    has_tiles,
    instructions,
    num_lanes,
    of_this_cpu,
    per_processor,
    using,
)

from ...machines import needs_kernels


@pytest.mark.parametrize(
    ("num_levels", "lanes", "text"),
    [
        (0, 0, ""),
        (1, 8, "AVX2"),
        (2, 16, "AVX2, AVX-512"),
        (3, 16, "AVX2, AVX-512, AVX512-BF16"),
        (4, 16, "AVX2, AVX-512, AVX512-BF16, AMX"),
    ],
)
def test_levels(num_levels: int, lanes: int, text: str) -> None:
    with using(LEVELS[:num_levels]):
        assert (num_lanes(), describe_instructions()) == (lanes, text)
        assert (can_pair(), has_tiles()) == (num_levels >= 3, num_levels == 4)


def test_the_instructions_before_return() -> None:
    with using(()), pytest.raises(ZeroDivisionError), using(LEVELS):
        1 / 0  # noqa: B018
    assert instructions() == of_this_cpu()


def test_results_belong_to_the_instructions() -> None:
    calls = list[int]()

    @per_processor
    def lanes(extra: int) -> int:
        calls.append(extra)
        return num_lanes() + extra

    for _ in range(2):
        for levels, expected in ((LEVELS[:1], 9), (LEVELS, 17)):
            with using(levels):
                assert lanes(1) == expected
    assert calls == [1, 1]


def test_each_processor_has_kernels_of_its_own() -> None:
    products = []
    for num_levels in range(1, len(LEVELS) + 1):
        with using(LEVELS[:num_levels]):
            product = plain_product(torch.bfloat16)
            assert product is not None
            products.append((ExactCpuBackend(EXACT).exact_kernel(product, torch.bfloat16), product.encoding.lanes))
    assert [lanes for _, lanes in products] == [8, 16, 16, 16]
    assert len({kernel for kernel, _ in products}) == len(LEVELS)


@pytest.mark.parametrize(
    ("limit", "num_levels"),
    [
        *((name, 0) for name in ("SSE41", "AVX")),
        *((name, 1) for name in ("AVX2", "avx2_vnni")),
        *((name, 2) for name in ("AVX512_CORE", "AVX512_CORE_VNNI")),
        *((name, 3) for name in ("AVX512_CORE_BF16", "AVX512_CORE_FP16")),
        *((name, 4) for name in ("AVX512_CORE_AMX", "AVX10_1_512", "", "nonsense")),
    ],
)
def test_levels_that_onednn_is_limited_to(limit: str, num_levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that has all of them."""
    features = {name: True for names in processor._FEATURES for name in names}
    monkeypatch.setattr(processor, "_host_features", lambda: features)
    monkeypatch.setattr(processor, "_are_tiles_granted", lambda: True)
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert of_this_cpu.__wrapped__() == frozenset(LEVELS[:num_levels])
    monkeypatch.setattr(processor, "_are_tiles_granted", lambda: False)
    assert of_this_cpu.__wrapped__() == frozenset(LEVELS[: min(num_levels, 3)])


# ------------------------------------------------------------------------------------------------ of this processor


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_processor_with_the_instructions_has_kernels() -> None:
    """So that what is skipped above is not skipped where it should run."""
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
    if platform.machine() != "x86_64" or not flags >= {"avx2", "fma", "f16c"}:
        pytest.skip("another processor")
    found = _instructions_with()
    assert "avx2" in found
    assert ("avx512" in found) == (flags >= {"avx512f", "avx512bw", "avx512vl", "avx512dq"})
    assert ("avx512_bf16" in found) == ("avx512" in found and "avx512_bf16" in flags)
    assert "amx" not in found or flags >= {"amx_tile", "amx_bf16"}  # Linux may refuse them


@cache
def _instructions_with(**environment: str) -> set[str]:
    """What a process has with these variables and no others that hide instructions: this one, or a new one."""
    hidden = {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"}
    if not environment and not hidden & os.environ.keys():
        return set(instructions())
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    say = "from offspec.backends.x86.processor import instructions; print(*instructions())"
    done = subprocess.run(
        [sys.executable, "-c", say], env=inherited | environment, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@needs_kernels
@pytest.mark.parametrize(
    ("capability", "limit", "expected"),
    [
        ("DEFAULT", "", set()),
        ("AVX2", "", {"avx2"}),
        ("AVX512", "AVX2", {"avx2"}),
        ("AVX512", "avx2_vnni", {"avx2"}),
        ("AVX512", "SSE41", set()),
        ("DEFAULT", "AVX2", set()),
    ],
)
def test_what_torch_does_not_use_kernels_do_not_use(
    capability: str, limit: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """capability: what torch says that it computes with. limit: oneDNN's."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert of_this_cpu.__wrapped__() == expected


@pytest.mark.nightly("three processes; the choice is tested by default")
@needs_kernels
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"avx2"}),
        ({"ATEN_CPU_CAPABILITY": "default"}, set()),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, {"avx2"}),
    ],
    ids=str,
)
def test_what_is_hidden_from_torch_is_hidden_from_kernels(environment: dict[str, str], expected: set[str]) -> None:
    assert _instructions_with(**environment) == expected


def test_another_kind_of_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert of_this_cpu.__wrapped__() == frozenset()


def test_without_llvmlite_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    assert of_this_cpu.__wrapped__() == frozenset()
