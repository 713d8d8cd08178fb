"""Files that are written whole or not at all, and locks on what one process alone may write.

Knows nothing of what is in them.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from offspec.loaders.file_locks import try_lock

from ..errors import StorageError, UsageError


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` where `path` is, all of it or nothing: a file beside it is written and renamed.

    A link stays, and the file that it leads to is written. A file that is there keeps its mode; a new one is the
    user's alone. Raises StorageError.
    """
    _check_kind(path)
    target = Path(os.path.realpath(path))
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                os.chmod(name, stat.S_IMODE(target.stat().st_mode))
            os.replace(name, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as exc:
        raise StorageError(f"{path} cannot be written: {exc.strerror}; nothing is lost, choose another file") from exc


def check_writable(path: Path) -> None:
    """Raises StorageError where `write_atomically` could not put a file at `path`; leaves nothing behind."""
    _check_kind(path)
    target = Path(os.path.realpath(path))
    try:
        tempfile.TemporaryFile(dir=target.parent, prefix=f".{target.name}.").close()
    except OSError as exc:
        raise StorageError(f"{path} cannot be written: {exc.strerror}; choose another file") from exc


def _check_kind(path: Path) -> None:
    """Renaming would put a file in the place of a device or a pipe."""
    if os.path.isdir(path):
        raise StorageError(f"{path} cannot be written: it is a folder; name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise StorageError(f"{path} cannot be written: it is no regular file; choose another file")


def lock(file: IO[Any], refusal: str) -> None:
    """Keep other processes from locking an open file until it is closed.

    Raises UsageError(refusal) where one has it.
    """
    if not try_lock(file.fileno()):
        raise UsageError(refusal)


@contextmanager
def locked_name(path: Path, refusal: str) -> Iterator[None]:
    """Be the only process that works on `path`, which need not exist; a hidden file beside it bears the lock meanwhile.

    Raises UsageError(refusal) where another process is, StorageError where that file cannot be made.
    """
    name = path.with_name(f".{path.name}.lock")
    try:
        file = _opened_and_locked(name, refusal)
    except OSError as exc:
        raise StorageError(f"{path} cannot be written: {exc.strerror}; choose another file") from exc
    with file:
        try:
            yield
        finally:
            with suppress(OSError):  # Windows keeps an open file: it stays there, empty and without a lock
                name.unlink()


def _opened_and_locked(name: Path, refusal: str) -> IO[bytes]:
    while True:
        file = name.open("ab")
        try:
            lock(file, refusal)
            if os.path.samestat(os.fstat(file.fileno()), name.stat()):
                return file
        except FileNotFoundError:
            pass  # between open and lock, whoever had it took it away
        except BaseException:
            file.close()
            raise
        file.close()
