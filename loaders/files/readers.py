"""Reads bytes of files into memory, in large reads that bypass the page cache if the file system allows it.

Without the page cache, the memory in use is the planned memory. `HostBuffer` is the memory to read into.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch

from .checkpoint import fault
from .os_errors import reason, remedy

BLOCK_BYTES = 4096  # O_DIRECT needs offsets, lengths and addresses in multiples of this, on all common disks
READ_BYTES = 8 * 2**20  # one read: large enough for full speed, small enough for quick cancellation
HUGE_PAGE_BYTES = 2 * 2**20
HEADER_BYTES, NUM_SAMPLES = 2**16, 8  # what is read to tell a changed file: other weights differ in nearly every block


def align_down(number: int, multiple: int = BLOCK_BYTES) -> int:
    return number // multiple * multiple


def align_up(number: int, multiple: int = BLOCK_BYTES) -> int:
    return -(-number // multiple) * multiple


class HostBuffer:
    """`nbytes` of private anonymous memory, aligned for O_DIRECT, in huge pages if the kernel supports them.

    With ordinary pages, the same disk reads at a half to a third of the speed. `tensor` (uint8, [nbytes]) and `view`
    are the same memory, which is freed with its last reference.
    """

    def __init__(self, nbytes: int) -> None:
        alignment = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else BLOCK_BYTES
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        try:
            memory = mmap.mmap(-1, nbytes + alignment, **private)
        except OSError as exc:
            raise MemoryError(f"cannot map {nbytes} bytes ({exc.strerror})") from exc
        if alignment == HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # without kernel support, ordinary pages are only slower
                memory.madvise(mmap.MADV_HUGEPAGE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % alignment
        self._hold(memoryview(memory)[start : start + nbytes])

    def _hold(self, view: memoryview) -> None:
        self.view, self.nbytes = view, len(view)
        self.tensor = torch.frombuffer(view, dtype=torch.uint8) if len(view) else torch.empty(0, dtype=torch.uint8)

    @classmethod
    def side_by_side(cls, sizes: Sequence[int]) -> tuple[HostBuffer, list[HostBuffer]]:
        """One buffer, and consecutive parts of it with these sizes, each aligned for O_DIRECT."""
        starts = [0, *accumulate(align_up(size) for size in sizes)]
        whole, parts = cls(starts[-1]), [cls.__new__(cls) for _ in sizes]
        for part, start, size in zip(parts, starts, sizes, strict=False):
            part._hold(whole.view[start : start + size])
        return whole, parts

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


class Reader(Protocol):
    """Reads parts of files. Thread-safe."""

    def read(self, path: Path, offset: int, out: memoryview, least: int) -> None:
        """Fill `out` with the bytes of `path` from `offset` on, at least `least` bytes: the file may end after them.

        Raises CheckpointError with file, offset and cause.
        """

    def close(self) -> None: ...


class FileReader:
    """Reads with O_DIRECT if file system and alignment allow it, otherwise through the page cache.

    `fallbacks` maps files read through the page cache to the reason. direct=False is the plain twin. Files are closed
    by `close`, or when nothing refers to the reader any more; the next read opens them again.
    """

    def __init__(self, *, direct: bool = True) -> None:
        self.fallbacks: dict[Path, str] = {}
        self._direct = direct
        self._files: dict[tuple[Path, bool], int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_files, self._files).atexit = False

    def read(self, path: Path, offset: int, out: memoryview, least: int) -> None:
        try:
            done = 0
            while done < least:
                rest = out[done:]
                count = self._read_some(path, offset + done, rest)
                if count == 0:
                    size = path.stat().st_size  # not offset + done: reads begin at whole pages, maybe beyond the end
                    raise fault(path, f"ends at byte {size}, inside its data: it is truncated; download it again")
                done += count
        except OSError as exc:
            where = f"cannot be read at byte {offset} ({reason(exc)})"
            raise fault(path, f"{where}; {remedy(exc, 'check the disk')}") from exc

    def close(self) -> None:
        with self._lock:
            _close_files(self._files)

    def _read_some(self, path: Path, offset: int, out: memoryview) -> int:
        if self._direct and path not in self.fallbacks and _is_aligned(offset, out):
            try:
                return os.preadv(self._open(path, direct=True), [out], offset)
            except OSError as exc:
                if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.fallbacks[path] = f"the file system refuses direct reads ({exc.strerror})"
        file = self._open(path, direct=False)
        count = _pread_into(file, out, offset, self._lock)
        if hasattr(os, "posix_fadvise"):  # each pass reads the data once, so caching is useless
            os.posix_fadvise(file, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def _open(self, path: Path, *, direct: bool) -> int:
        with self._lock:
            if (path, direct) not in self._files:
                flags = os.O_RDONLY | (os.O_DIRECT if direct else 0) | getattr(os, "O_BINARY", 0)
                self._files[path, direct] = os.open(path, flags)
            return self._files[path, direct]


def _close_files(files: dict[tuple[Path, bool], int]) -> None:
    while files:
        os.close(files.popitem()[1])


class FileStates:
    """Detects changed files by device, inode and size, and where the modification time differs, by samples.

    A new time stamp alone is no change. A deleted file is not an error: open descriptors still read its content.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._before = {path: (state, _samples(path)) for path in paths if (state := _state(path)) is not None}

    def check(self) -> None:
        """Raises CheckpointError for a file that was rewritten or replaced. Needs one system call per file."""
        for path, (before, samples) in self._before.items():
            state = _state(path)
            if state is None or state == before:
                continue
            if state[:-1] != before[:-1] or _samples(path) not in (samples, None):
                raise fault(
                    path, "was changed while in use, so its weights may differ from the loaded ones; load it again"
                )
            self._before[path] = state, samples


def _state(path: Path) -> tuple[int, ...] | None:
    """Device, inode, size, modification time."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _samples(path: Path) -> bytes | None:
    """A hash of a file's header and of blocks up to its end; None if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(file.read(HEADER_BYTES))
            for number in range(NUM_SAMPLES):
                file.seek(max(0, size - BLOCK_BYTES) * number // (NUM_SAMPLES - 1))
                digest.update(file.read(BLOCK_BYTES))
            return digest.digest()
    except OSError:
        return None


def _is_aligned(offset: int, out: memoryview) -> bool:
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv") or offset % BLOCK_BYTES or len(out) % BLOCK_BYTES:
        return False
    return len(out) > 0 and ctypes.addressof(ctypes.c_char.from_buffer(out)) % BLOCK_BYTES == 0


def _pread_into(file: int, out: memoryview, offset: int, lock: threading.Lock) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(file, [out], offset)
    with lock:  # Windows has one position per file
        os.lseek(file, offset, os.SEEK_SET)
        content = os.read(file, len(out))
    out[: len(content)] = content
    return len(content)
