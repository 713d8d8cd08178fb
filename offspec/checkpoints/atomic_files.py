"""Files that are written whole or not at all. Knows nothing of what is in them."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from ..errors import StorageError


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` where `path` is, all of it or nothing: a file beside it is written and renamed. Raises StorageError."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except OSError as exc:
        raise StorageError(f"{path} cannot be written: {exc.strerror}; nothing is lost, choose another file") from exc


def check_writable(path: Path) -> None:
    """Raises StorageError where `write_atomically` could not put a file at `path`; leaves nothing behind."""
    if path.is_dir():
        raise StorageError(f"{path} cannot be written: it is a folder; name a file in it")
    try:
        tempfile.TemporaryFile(dir=path.parent, prefix=f".{path.name}.").close()
    except OSError as exc:
        raise StorageError(f"{path} cannot be written: {exc.strerror}; choose another file") from exc
