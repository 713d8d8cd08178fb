"""The machine that runs the tests: no other file of them reads what it has (`tests/house/test_machines.py`).

Kernels are made for the instructions of a processor, which a test sets by one of the marks below. torch's own
arithmetic is always this machine's.
"""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest

from offspec.backends.x86.processor import LEVELS, NAMES, num_lanes, of_this_cpu

THIS, NO_VECTORS = "this processor", "no vectors"
AVX2, AVX512, AVX512_BF16, AMX = (NAMES[level] for level in LEVELS)
# Names of processors → their instructions.
PROCESSORS = {NO_VECTORS: frozenset[str](), THIS: of_this_cpu()}
PROCESSORS |= {text: frozenset(LEVELS[: LEVELS.index(level) + 1]) for level, text in NAMES.items()}


def needs(processor: str) -> pytest.MarkDecorator:
    """Skips a test that runs kernels with instructions that this machine lacks."""
    is_here = PROCESSORS[NO_VECTORS] < PROCESSORS[processor] <= PROCESSORS[THIS]
    return pytest.mark.skipif(not is_here, reason=f"needs {'vectors' if processor == THIS else processor}")


def run(*values: Any, nightly: bool = False) -> Any:
    """Values of parameters, the last of which is the processor that runs kernels."""
    marks = [needs(values[-1]), *([pytest.mark.nightly] if nightly else [])]
    return pytest.param(*values, marks=marks)


def by_processor(names: str, *runs: Any) -> pytest.MarkDecorator:
    """Parameters of a test, one of them `processor`."""
    return pytest.mark.parametrize(names, runs, indirect=["processor"])


each_processor = by_processor("processor", *map(run, (AVX2, AVX512, AVX512_BF16, AMX)))
each_width = by_processor("processor", run(AVX2), run(AVX512))  # of kernels that differ in their vectors alone
# Without running a kernel: also with instructions that this machine lacks.
each_choice = by_processor("processor", *NAMES.values(), NO_VECTORS)
each_choice_with_kernels = by_processor("processor", *NAMES.values())
# Of what takes long.
this_processor = by_processor(
    "processor", run(THIS), *(run(name, nightly=True) for name in (AVX2, AVX512, AVX512_BF16))
)
needs_kernels = needs(THIS)


def lanes() -> int:
    """fp32 numbers per vector of the processor that is set; 0 if it has no kernels."""
    return num_lanes()


def num_cpus() -> int:
    return os.cpu_count() or 1


def ram_bytes() -> int:
    return psutil.virtual_memory().total


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
