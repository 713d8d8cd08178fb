"""The vector instructions that kernels use: those of this CPU that torch uses, too, or others that a test sets."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Each level implies those before it. The names of `instructions`, and what people call them.
NAMES = {"avx2": "AVX2", "avx512": "AVX-512", "avx512_bf16": "AVX512-BF16", "amx": "AMX"}
LEVELS = tuple(NAMES)
_FEATURES = (  # LLVM's names of what a level needs
    ("avx2", "fma", "f16c"),
    ("avx512f", "avx512bw", "avx512vl"),
    ("avx512bf16",),
    ("amx-tile", "amx-bf16"),
)
_OF_TORCH = {"AVX2": 1, "AVX512": len(LEVELS)}  # capability → levels
# Beginnings of oneDNN's names (ONEDNN_MAX_CPU_ISA) → levels; the longest that fits counts.
_OF_ONEDNN = {"SSE41": 0, "AVX": 0, "AVX2": 1, "AVX512_CORE": 2, "AVX512_CORE_BF16": 3, "AVX512_CORE_FP16": 3}
_OF_ONEDNN |= {"AVX512_CORE_AMX": 4, "AVX10": 4}
_ARCH_REQUEST_PERMISSION, _TILE_DATA, _ARCH_PRCTL = 0x1023, 18, 158  # Linux on x86-64: arch_prctl(2)


class _Set:
    """names: the instructions that a test has set; None: this CPU's."""

    names: frozenset[str] | None = None


def instructions() -> frozenset[str]:
    """Names of LEVELS that kernels may use: those of the CPU, unless torch is configured not to use them.

    Empty if kernels are impossible: on another kind of CPU, or without llvmlite. Variables that hide instructions from
    torch (`ATEN_CPU_CAPABILITY`) or from oneDNN (`ONEDNN_MAX_CPU_ISA`) hide them from kernels, too.
    """
    return of_this_cpu() if _Set.names is None else _Set.names


@contextmanager
def using(names: Iterable[str]) -> Iterator[None]:
    """Inside, kernels are made for these instructions. Kernels of those that the CPU lacks can be chosen, not run."""
    before, _Set.names = _Set.names, frozenset(names)
    try:
        yield
    finally:
        _Set.names = before


def per_processor(function: Callable[P, R]) -> Callable[P, R]:
    """`functools.cache` for each set of instructions: for kernels, and choices between them."""
    results = dict[Hashable, R]()

    @wraps(function)
    def of_instructions(*args: P.args, **kwargs: P.kwargs) -> R:
        key = instructions(), args, tuple(kwargs.items())
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return of_instructions


def num_lanes() -> int:
    """fp32 numbers per vector; 0 if there are no kernels for this CPU."""
    names = instructions()
    return 16 if "avx512" in names else 8 if "avx2" in names else 0


def can_pair() -> bool:
    """Whether there is an instruction that adds products of bf16 numbers in pairs."""
    return "avx512_bf16" in instructions()


def has_tiles() -> bool:
    """Whether there are instructions for products of tiles (AMX)."""
    return "amx" in instructions()


def describe_instructions() -> str:
    """The vector instructions that products are computed with here, as text; "" if there are none."""
    return ", ".join(text for name, text in NAMES.items() if name in instructions())


@cache
def of_this_cpu() -> frozenset[str]:
    """The names of `instructions` without a test."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    features, num_levels = _host_features(), min(_OF_TORCH.get(torch.backends.cpu.get_cpu_capability(), 0), _limit())
    has_level = [all(features.get(name) for name in names) for names in _FEATURES] + [False]
    num_levels = min(num_levels, has_level.index(False))
    if num_levels == len(LEVELS) and not _are_tiles_granted():
        num_levels -= 1
    return frozenset(LEVELS[:num_levels])


def _limit() -> int:
    """The number of levels that ONEDNN_MAX_CPU_ISA leaves."""
    name = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    fitting = [beginning for beginning in _OF_ONEDNN if name.startswith(beginning)]
    return _OF_ONEDNN[max(fitting, key=len)] if fitting else len(LEVELS)


def _host_features() -> Mapping[str, bool]:
    try:
        from llvmlite import binding
    except (ImportError, OSError):
        return {}
    return dict(binding.get_host_cpu_features())


def _are_tiles_granted() -> bool:
    """Ask Linux for this process's tiles, whose registers it saves only then. Other systems are not asked."""
    try:
        call = ctypes.CDLL(None).syscall
    except (AttributeError, OSError, TypeError):
        return False
    return platform.system() == "Linux" and call(_ARCH_PRCTL, _ARCH_REQUEST_PERMISSION, _TILE_DATA) == 0
