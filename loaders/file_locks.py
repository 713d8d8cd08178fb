"""Advisory locks on open files. A lock ends when its file is closed, so with its process, however that ends.

Linux and macOS: flock. Windows: one byte far behind the content, as others cannot read locked bytes.
"""

from __future__ import annotations

import os
import sys

_LOCKED_BYTE = 2**31 - 2  # Windows: the C library seeks in 32 bits


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; False where another open file has the lock, in this process or another.

    True without a lock on file systems that have none: work goes on there as if it were alone.
    """
    try:
        _lock(descriptor)
    except (BlockingIOError, PermissionError):  # PermissionError is what Windows says
        return False
    except OSError:
        pass
    return True


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
