"""Reads the small files of a checkpoint, and a user's own: regular files of a bounded size, JSON of bounded memory.

A stranger's folder may hold a FIFO, which nobody writes to, a link to a device, which does not end, or JSON that takes
thirty times its size once it is parsed. Knows nothing of what the files say.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

# Indices and headers of the largest models have 0.2 million tensors of some 130 bytes each, so 27 MiB; other JSON files
# are far smaller.
MOST_JSON_BYTES = 32 * 2**20
# tokenizer.json of 256,000 tokens and as many merges, indented, has 33 MiB.
MOST_TOKENIZER_BYTES = 64 * 2**20
MOST_TEXT_BYTES = 256 * 2**20  # of texts that a user names, like a file of prompts
# Nine to a tensor in a header. A value takes some 330 bytes at most, with its text, its place in an object and its key.
MOST_JSON_VALUES = 2_000_000

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file, or a link to one, to read it. Raises OSError for anything else, without waiting for it."""
    _check_kind(os.stat(path).st_mode, allow_pipe=False)  # opening a device can do something already
    # Should something else have taken its place since, O_NONBLOCK does not wait for the other end of a FIFO.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        _check_kind(os.fstat(file.fileno()).st_mode, allow_pipe=False)
    except OSError:
        file.close()
        raise
    return file


def read_small_file(path: Path, most_bytes: int = MOST_JSON_BYTES, *, allow_pipe: bool = False) -> bytes:
    """All of a regular file. Raises OSError, whose `strerror` says why, for another kind and for a larger one.

    allow_pipe: for files that a user names, where a shell may put a pipe (`<(…)`); it is waited for.
    """
    _check_kind(os.stat(path).st_mode, allow_pipe=allow_pipe)
    with open(path, "rb") if allow_pipe else open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most_bytes + 1) if size <= most_bytes else b""
    if max(size, len(content)) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB, and no file of its kind is", str(path))
    return content


def parse_json(content: bytes, object_pairs_hook: PairsHook | None = None) -> Any:  # what JSON holds
    """The value of JSON text in UTF-8. Raises ValueError, also where it is too deep or has too many values."""
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
