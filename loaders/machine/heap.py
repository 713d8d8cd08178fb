"""The heap of the C library, from which torch takes a CPU's tensors."""

from __future__ import annotations

import ctypes
import sys

LARGE = 2**22  # bytes; smaller blocks come and go too often for a call of the system each
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def return_large_blocks() -> None:
    """Let glibc give large blocks back to the system when they are freed, in this process from now on.

    By default it does so up to the first such block only: then it keeps blocks of up to 32 MiB in its heap, and gaps
    between them, which no plan counts (mallopt(3)). Other C libraries are left as they are.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
