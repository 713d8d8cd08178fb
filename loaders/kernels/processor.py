"""The vector instructions that kernels may use here: those of the CPU that torch uses, too."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from functools import cache

import torch


@cache
def instructions() -> frozenset[str]:
    """Vector instructions that kernels may use: those of the CPU, unless torch is configured not to use them.

    Empty if kernels are impossible: on another kind of CPU, or without llvmlite. Of avx2, avx512 and avx512_bf16, each
    implies those before it. Variables that hide instructions from torch (`ATEN_CPU_CAPABILITY`) or from oneDNN
    (`ONEDNN_MAX_CPU_ISA`) hide them from kernels, too.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    capability, features = _capability(), _host_features()
    names = set[str]()
    if capability in ("AVX2", "AVX512") and features.get("avx2") and features.get("fma") and features.get("f16c"):
        names.add("avx2")
        if capability == "AVX512" and all(features.get(name) for name in ("avx512f", "avx512bw", "avx512vl")):
            names.add("avx512")
            if features.get("avx512bf16"):
                names.add("avx512_bf16")
    return frozenset(names)


def has_amx() -> bool:
    """Whether torch multiplies bf16 matrices with AMX here, which is faster than our kernels for many rows."""
    return "avx512_bf16" in instructions() and bool(_host_features().get("amx-bf16"))


_NAMES = {"avx2": "AVX2", "avx512": "AVX-512", "avx512_bf16": "AVX512-BF16"}


def describe_instructions() -> str:
    """The vector instructions that products are computed with here, as text; "" if unknown."""
    names = [_NAMES[name] for name in sorted(instructions())]
    if has_amx():
        names.append("AMX")
    return ", ".join(names)


def _capability() -> str:
    """What torch computes with, "AVX512", "AVX2" or less, or what oneDNN may if that is less."""
    capability, limit = torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in ("SSE41", "AVX"):
        return "DEFAULT"
    return "AVX2" if limit.startswith("AVX2") and capability == "AVX512" else capability


def _host_features() -> Mapping[str, bool]:
    try:
        from llvmlite import binding
    except (ImportError, OSError):
        return {}
    return dict(binding.get_host_cpu_features())
