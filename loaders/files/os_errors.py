"""What errors say, and what to do where the system refuses to read or write a file."""

from __future__ import annotations

import errno
from pathlib import Path

from offspec.errors import StorageError

_NO_SPACE = "free space and repeat the command"
_REMEDIES = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EMFILE: "this process may open no more files: raise the limit (ulimit -n 4096)",
    errno.ENFILE: "the system has too many open files: close other programs",
    errno.ENOMEM: "close other programs, or raise this program's memory limit",
    errno.EIO: "check the disk",
    errno.ENAMETOOLONG: "give a shorter path",
}


def first_line(exc: BaseException) -> str:
    """The first line of an error's message, or the error's name."""
    return (str(exc).strip().splitlines() or [type(exc).__name__])[0]


def reason(exc: OSError) -> str:
    """What the system says, without the file's name."""
    return exc.strerror or str(exc) or type(exc).__name__


def remedy(exc: OSError, otherwise: str) -> str:
    """The remedy for what the process or the system lacks; `otherwise` if the error is about the file itself."""
    return _REMEDIES.get(exc.errno or 0, otherwise)


def cannot_write(path: Path, exc: OSError, otherwise: str = "check that you may write there") -> StorageError:
    """The one-line error for a file or folder that cannot be written."""
    description = f"{path} cannot be written ({reason(exc)}); {remedy(exc, otherwise)}"
    return StorageError(" ".join(description.splitlines()))
