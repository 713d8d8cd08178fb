"""Reads small files of a checkpoint or a user: regular files of bounded size, and JSON within bounded memory.

An untrusted folder may contain a FIFO without a writer, a link to an endless device, or JSON that needs thirty times
its size when parsed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

# Indices and headers of the largest models have 0.2 million tensors of some 130 bytes each: 27 MiB. Other JSON files
# are far smaller.
MOST_JSON_BYTES = 32 * 2**20
# tokenizer.json of 256,000 tokens and as many merges, indented, has 33 MiB.
MOST_TOKENIZER_BYTES = 64 * 2**20
MOST_TEXT_BYTES = 256 * 2**20  # of a user's text files, such as prompts
# A header has nine values per tensor. A value needs some 330 bytes at most, with its text, its key and its object
# entry.
MOST_JSON_VALUES = 2_000_000

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises OSError for other kinds, without blocking."""
    _check_kind(os.stat(path).st_mode, allow_pipe=False)  # opening a device may have side effects
    # If a FIFO has replaced the file since, O_NONBLOCK does not wait for its writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        _check_kind(os.fstat(file.fileno()).st_mode, allow_pipe=False)
    except OSError:
        file.close()
        raise
    return file


def read_small_file(path: Path, most_bytes: int = MOST_JSON_BYTES, *, allow_pipe: bool = False) -> bytes:
    """The content of a regular file. Raises OSError, with the reason in `strerror`, for other kinds and larger files.

    allow_pipe: also read from a pipe, as shells pass for `<(…)`, and wait for its writer.
    """
    _check_kind(os.stat(path).st_mode, allow_pipe=allow_pipe)
    with open(path, "rb") if allow_pipe else open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most_bytes + 1) if size <= most_bytes else b""
    if max(size, len(content)) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB, the limit for such files", str(path))
    return content


def parse_json(content: bytes, object_pairs_hook: PairsHook | None = None) -> Any:  # what JSON holds
    """The value of JSON text in UTF-8. Raises ValueError, also for too deep nesting or too many values."""
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_JSON_VALUES:
        raise ValueError(f"it has more than {MOST_JSON_VALUES} values")
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=object_pairs_hook)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def _check_kind(mode: int, *, allow_pipe: bool) -> None:
    if stat.S_ISREG(mode) or (allow_pipe and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode))):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
