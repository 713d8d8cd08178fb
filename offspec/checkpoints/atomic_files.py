"""Atomic writes of files, and locks on files that only one process may write."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from offspec.loaders.files.file_locks import has_name, try_lock
from offspec.loaders.files.os_errors import cannot_write

from ..errors import StorageError, UsageError

OTHER_FILE = "choose another file"
WAIT_S = 0.1  # between two tries to get a lock


def refuse_replacing(path: Path, is_own: Callable[[Path], bool]) -> None:
    """Raises UsageError if there is a file with content that is not `is_own`: it must not be overwritten."""
    try:
        has_content = path.exists() and path.stat().st_size > 0
    except OSError as exc:
        raise UsageError(f"`out={path}` cannot be read: {exc.strerror}; choose another file") from exc
    if has_content and not is_own(path):
        raise UsageError(f"`out={path}` is a file of something else, and is not overwritten; choose another file")


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically: write a temporary file in the same folder and rename it.

    A link stays a link; its target is written. An existing file keeps its mode; a new one is readable by the user
    only. Raises StorageError.
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
        raise cannot_write(path, exc, f"the existing files are unchanged, {OTHER_FILE}") from exc


@contextmanager
def writing_whole(path: Path, refusal: str) -> Iterator[IO[bytes]]:
    """A large file to write: it becomes `path` when the body ends, and only then. One writer at a time.

    An error or a killed process leaves the file that was there. What a killed process wrote has a hidden name,
    `.NAME.part`, which the next writer uses again. Links and modes as in `write_atomically`. Raises UsageError(refusal)
    while another process writes it, StorageError.
    """
    _check_kind(path)
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.part")
    with locked_name(target, refusal):
        try:
            part.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            with open(os.open(part, flags, 0o600), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                os.chmod(part, stat.S_IMODE(target.stat().st_mode))
            os.replace(part, target)
        except OSError as exc:
            raise cannot_write(path, exc, OTHER_FILE) from exc
        finally:
            with suppress(OSError):
                part.unlink()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill: it becomes `path` when the body ends, and only then. Raises StorageError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.rename(path)
    except (OSError, SafetensorError) as exc:
        raise StorageError(f"{path} cannot be written: {exc}; choose another folder (`out`)") from exc
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_writable(path: Path) -> None:
    """Raises StorageError if `write_atomically` could not write `path`. Leaves no files."""
    _check_kind(path)
    target = Path(os.path.realpath(path))
    try:
        tempfile.TemporaryFile(dir=target.parent, prefix=f".{target.name}.").close()
    except OSError as exc:
        raise cannot_write(path, exc, OTHER_FILE) from exc


def _check_kind(path: Path) -> None:
    """Raises StorageError for anything but a regular file: renaming would replace a device or a pipe."""
    if os.path.isdir(path):
        raise StorageError(f"{path} cannot be written: it is a folder; choose a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise StorageError(f"{path} cannot be written: it is not a regular file; choose another file")


def lock(file: IO[Any], refusal: str) -> None:
    """Lock an open file until it is closed. Raises UsageError(refusal) if another process has locked it."""
    if not try_lock(file.fileno()):
        raise UsageError(refusal)


@contextmanager
def locked_name(path: Path, refusal: str | None = None) -> Iterator[None]:
    """Lock the name `path`, which need not exist, by a temporary hidden file in the same folder.

    While another process holds the lock, it raises UsageError(refusal); without a refusal it waits, and makes the
    folder. Raises StorageError if the file cannot be created.
    """
    name = path.with_name(f".{path.name}.lock")
    try:
        if refusal is None:
            path.parent.mkdir(parents=True, exist_ok=True)
        file = _opened_and_locked(name, refusal)
    except OSError as exc:
        raise cannot_write(path, exc, OTHER_FILE) from exc
    with file:
        try:
            yield
        finally:
            with suppress(OSError):  # Windows cannot delete an open file; it stays, empty and unlocked
                name.unlink()


def _opened_and_locked(name: Path, refusal: str | None) -> IO[bytes]:
    while True:
        with ExitStack() as closing:
            file = closing.enter_context(name.open("ab"))
            if not try_lock(file.fileno()):
                if refusal is not None:
                    raise UsageError(refusal)
                time.sleep(WAIT_S)
            elif has_name(file, name):  # else its previous owner deleted it between open and lock
                closing.pop_all()
                return file
