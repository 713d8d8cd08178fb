"""Advisory locks on open files. A lock ends when its file is closed, at the latest when its process ends.

Linux and macOS: flock. Windows: one byte far after the content, because others cannot read locked bytes.
The package filelock opens its file itself; these locks are on descriptors that hold content (`has_name`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, Any

_LOCKED_BYTE = 2**31 - 2  # Windows: the C library seeks in 32 bits


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; False if another open file has the lock, in this process or another.

    On file systems without locks it returns True and locks nothing.
    """
    try:
        _lock(descriptor)
    except (BlockingIOError, PermissionError):  # PermissionError: on Windows
        return False
    except OSError:
        pass
    return True


def has_name(file: IO[Any], path: Path) -> bool:
    """Whether `path` still names this open file: others may have removed or replaced it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
