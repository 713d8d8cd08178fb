"""Stand-ins for the disk: a reader over bytes in memory that can be slow, fail, or end early."""

from __future__ import annotations

import threading
from pathlib import Path

from offspec.errors import CheckpointError


class FakeReader:
    """Reads `files`; counts bytes; `gate` (when given) holds every read until it is set; `fail_at` raises there."""

    def __init__(self, files: dict[Path, bytes], gate: threading.Event | None = None) -> None:
        self.files, self.gate = files, gate
        self.fail_at: int | None = None
        self.bytes_read = 0
        self.reads: list[tuple[Path, int, int]] = []
        self.closed = False
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, out: memoryview, least: int) -> None:
        if self.gate is not None:
            assert self.gate.wait(10)
        if self.fail_at is not None and offset <= self.fail_at < offset + len(out):
            raise CheckpointError(f"{path}: cannot be read at byte {offset} (it was told to fail)")
        content = self.files[path][offset : offset + len(out)]
        assert len(content) >= least
        out[: len(content)] = content
        with self._lock:
            self.bytes_read += least
            self.reads.append((path, offset, len(out)))

    def close(self) -> None:
        self.closed = True
