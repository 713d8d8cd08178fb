"""Writes safetensors files whole or not at all: temporary name, fsync, read back, rename.

The header is padded to make the data page-aligned. Tensors are sorted by descending size of their elements, so that
each is aligned to its dtype without a hole (the format allows no holes).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from offspec.errors import StorageError

from .checkpoint import DTYPE_BYTES
from .file_locks import has_name
from .os_errors import cannot_write

PART_SUFFIX = ".part"
PAGE_BYTES = 4096
CHUNK_BYTES = 8 * 2**20


Later = Callable[[Callable[[], None]], None]


def at_once(work: Callable[[], None]) -> None:
    """A `Later` that does not wait."""
    work()


@dataclass(frozen=True)
class ShardPiece:
    """One tensor to write. `chunks` yields its bytes, exactly as many as dtype and shape need."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[memoryview]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def write_shard(
    path: Path, pieces: Sequence[ShardPiece], later: Later = at_once, check: Callable[[], None] = lambda: None
) -> None:
    """Write a safetensors file by `write_verified`. Raises StorageError, and any error of `chunks`."""
    ordered = sorted(pieces, key=_place)

    def content() -> Iterator[memoryview]:
        yield memoryview(header(ordered))
        for piece in ordered:
            yield from piece.chunks()

    write_verified(path, content(), later, check)


def write_verified(
    path: Path, content: Iterable[memoryview], later: Later = at_once, check: Callable[[], None] = lambda: None
) -> None:
    """Write a file whole or not at all, even on a power failure. Several processes may write the same one.

    It gets its final name only after its content was read back and verified. later: runs the reading back, perhaps
    during other work. check: called before the file is made, and before it gets its name; raises StorageError if this
    process may not write there any more. Raises StorageError.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    with _storing(path, part):
        check()
        path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(part, "x+")
    try:
        with _storing(path, part):
            written = _write(file, content)
        later(partial(_verify, path, part, file, written, check))
    except BaseException:
        file.close()
        raise


def _verify(path: Path, part: Path, file: FileIO, written: tuple[int, int], check: Callable[[], None]) -> None:
    with _storing(path, part):
        with file:  # Windows renames no open file
            if written != _read_back(file):
                raise StorageError(
                    f"{path}: the data read back differ from the data written; check this machine's disk and memory"
                )
            check()
            if not has_name(file, part):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        os.replace(part, path)
        sync_folder(path.parent)


class Background:
    """A `Later` on a thread: one piece of work at a time, during whatever comes between two of them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._running: Future[None] | None = None

    def __call__(self, work: Callable[[], None]) -> None:
        """Start it when the one before has ended, whose error is raised here."""
        self.wait()
        self._running = self._thread.submit(work)

    def wait(self) -> None:
        """Wait for the last one; raises its error."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *error: object) -> None:
        """After an error the last one ends, too; its own error is dropped."""
        self._thread.shutdown()
        if error[0] is None:
            self.wait()


PLAIN_METADATA = {"format": "pt"}  # transformers requires it


def header(pieces: Sequence[ShardPiece], metadata: Mapping[str, str] = PLAIN_METADATA) -> bytes:
    """Length and JSON header of a file of consecutive pieces, padded to whole pages. It begins with the metadata."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for piece in pieces:
        offsets = [end, end + piece.nbytes]
        entries[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": offsets}
        end += piece.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    return struct.pack("<Q", len(text)) + text


def _place(piece: ShardPiece) -> tuple[int, bool, str]:
    # Quantisation states go last, so that the streamed tensors of a layer are contiguous.
    return -DTYPE_BYTES[piece.dtype], ".quant_state." in piece.name, piece.name


def _write(file: FileIO, content: Iterable[memoryview]) -> tuple[int, int]:
    """Number and checksum of the bytes written."""
    nbytes, checksum = 0, 0
    for chunk in content:
        done = 0
        while done < chunk.nbytes:
            done += file.write(chunk[done:])
        nbytes, checksum = nbytes + chunk.nbytes, zlib.crc32(chunk, checksum)
    return nbytes, checksum


def _read_back(file: FileIO) -> tuple[int, int]:
    """Flush the file; number and checksum of the bytes on the disk itself, not in the page cache."""
    nbytes, checksum = 0, 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    os.fsync(file.fileno())
    forget_cached(file.fileno())
    file.seek(0)
    while count := file.readinto(buffer):
        nbytes, checksum = nbytes + count, zlib.crc32(buffer[:count], checksum)
    forget_cached(file.fileno())
    return nbytes, checksum


def forget_cached(descriptor: int, offset: int = 0, nbytes: int = 0) -> None:
    """Drop the page cache of a range of a file (0 bytes: to its end), to keep other data cached."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storing(path: Path, part: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        with contextlib.suppress(OSError):
            part.unlink()  # an incomplete file is useless, and the next try may need its space
        if isinstance(exc, FileNotFoundError):
            raise removed_meanwhile(path) from exc
        raise cannot_write(path, exc) from exc


def removed_meanwhile(path: Path) -> StorageError:
    """The error for a file or folder that somebody removed or replaced while this process wrote it."""
    description = f"{path} was removed or replaced while it was written; wait until no other process writes there"
    return StorageError(" ".join(f"{description}, and repeat the command".splitlines()))
