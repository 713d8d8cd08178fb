"""What weight formats change in the process, and what they keep in it. Nothing else in `loaders/formats` does so.

- Importing bitsandbytes (once, by whoever first needs it): while it is imported, `torch.compile` is a function that
  returns what it is given, `sys.modules["kernels"]` is None, logging below CRITICAL is off, and warnings are ignored.
  Without that it prints warnings about kernels that are not used here, downloads one from the hub where it finds the
  package `kernels`, and wraps operations in torch.compile, which takes seconds to import. All is put back afterwards.
- `FUSED_ROWS`: how many rows each shape of packed matrices is multiplied with as it lies there. It is measured when a
  model is loaded, and kept for as long as the process lives: two models with equal shapes compute alike.
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

import torch

from offspec.errors import OffspecError


class FusedRows:
    """Rows up to which a fused product was measured to be faster, by (shape, dtype, device); 0 unless set."""

    def __init__(self) -> None:
        self._rows: dict[tuple[tuple[int, ...], torch.dtype, torch.device], int] = {}

    def get(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
        """The most rows that are multiplied with a packed matrix [N, K] without dequantising it first."""
        return self._rows.get((shape, dtype, device), 0)

    def set(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, rows: int) -> None:
        self._rows[shape, dtype, device] = rows

    def clear(self) -> None:
        self._rows.clear()


FUSED_ROWS = FusedRows()


@cache
def bitsandbytes_functional() -> ModuleType:
    """The module `bitsandbytes.functional`, imported without its noise. Raises OffspecError where it is missing."""
    try:
        with _quiet_import():
            import bitsandbytes.functional as functional
    except Exception as exc:  # everything: a broken CUDA set-up makes it raise anything
        reason = " ".join(str(exc).split())
        raise OffspecError(
            f"4-bit weights need bitsandbytes, which cannot be imported ({reason}); pip install 'bitsandbytes>=0.50'"
        ) from exc
    assert isinstance(functional, ModuleType)
    return functional


@cache
def has_bitsandbytes() -> bool:
    """Whether it can be imported. On a GPU torch computes the same without it, in several times the time."""
    try:
        bitsandbytes_functional()
    except OffspecError:
        return False
    return True


@contextmanager
def _quiet_import() -> Iterator[None]:
    level, unused = logging.root.manager.disable, object()
    before, compiler = sys.modules.get("kernels", unused), torch.compile
    logging.disable(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # to import it is an ImportError, which it expects
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        torch.compile = compiler
        sys.modules.pop("kernels", None)
        if isinstance(before, ModuleType):
            sys.modules["kernels"] = before


@contextmanager
def one_thread() -> Iterator[None]:
    """A sum's last bits depend on how many threads share it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
