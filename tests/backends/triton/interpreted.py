"""Triton's kernels in its interpreter, on the CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor

import offspec.backends.triton

from ...loaders.gguf_samples import same_bits


@contextmanager
def interpreted(name: str) -> Iterator[ModuleType]:
    """A module of `backends.triton`, imported anew: where a GPU has its kernels compiled, they are so elsewhere."""
    pytest.importorskip("triton", reason="Triton is not installed; it comes with torch's CUDA wheels")
    with pytest.MonkeyPatch.context() as patch:
        forget(name, patch)
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            yield importlib.import_module(f"offspec.backends.triton.{name}")
        finally:  # the one from before is restored next, if there was one
            del sys.modules[f"offspec.backends.triton.{name}"]
            delattr(offspec.backends.triton, name)


def forget(name: str, patch: pytest.MonkeyPatch) -> None:
    """As if the kernels' module had never been imported, until `patch` ends."""
    patch.delitem(sys.modules, f"offspec.backends.triton.{name}", raising=False)
    patch.delattr(offspec.backends.triton, name, raising=False)


def same_numbers(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, but in bf16, to which Triton's interpreter cuts numbers off where a GPU rounds them."""
    if found.dtype != torch.bfloat16:
        return same_bits(found, expected.to(found.dtype))
    return same_bits(found, (expected.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16())
