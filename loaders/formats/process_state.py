"""All process-wide state of weight formats.

- The import of bitsandbytes, on first use. During the import, `torch.compile` returns its argument unchanged,
  `sys.modules["kernels"]` is None, logging below CRITICAL is off, and warnings are ignored. Otherwise bitsandbytes
  would print warnings about unused kernels, download one from the hub if the package `kernels` is installed, and wrap
  operations in torch.compile, whose import takes seconds. Everything is restored afterwards.
- `one_thread`: sets the number of torch's threads to one inside a `with` block.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch

from offspec.errors import OffspecError


@cache
def bitsandbytes_functional() -> ModuleType:
    """The module `bitsandbytes.functional`, imported silently. Raises OffspecError if the import fails."""
    try:
        with _quiet_import():
            import bitsandbytes.functional as functional
    except Exception as exc:  # a broken CUDA installation may raise any error
        reason = " ".join(str(exc).split())
        raise OffspecError(
            f"4-bit weights need bitsandbytes, which cannot be imported ({reason}); pip install 'bitsandbytes>=0.50'"
        ) from exc
    assert isinstance(functional, ModuleType)
    return functional


@cache
def has_bitsandbytes() -> bool:
    """Whether bitsandbytes can be imported. Without it, torch computes the same on a GPU, several times slower."""
    try:
        bitsandbytes_functional()
    except OffspecError:
        return False
    return True


@contextmanager
def _quiet_import() -> Iterator[None]:
    level, unused = logging.root.manager.disable, object()
    before = sys.modules.get("kernels", unused)
    wrappers = {name: getattr(torch, name) for name in ("compile", "_disable_dynamo")}
    logging.disable(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # its import then raises ImportError
    for name in wrappers:  # each would import torch's compiler, for seconds: at once, or at the first product
        setattr(torch, name, _unwrapped)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        for name, wrapper in wrappers.items():
            setattr(torch, name, wrapper)
        sys.modules.pop("kernels", None)
        if isinstance(before, ModuleType):
            sys.modules["kernels"] = before


def _unwrapped(function: Any = None, **_: Any) -> Any:
    """In place of a decorator, with or without options."""
    return function or _unwrapped


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body with one thread: the last bits of a sum depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
