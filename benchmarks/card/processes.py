"""Child processes that end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """In a new process, before its program starts: on Linux it ends when its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def lead_group() -> None:
    """As `end_with_parent`, in a process group of its own, which can be ended as a whole."""
    os.setpgid(0, 0)
    end_with_parent()
