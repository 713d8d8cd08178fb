"""Compiled kernels in the user's cache, so that only the first process waits a second for LLVM.

A file has a kernel's machine code behind its SHA-256: a file that is damaged is compiled again. Its name is a hash of
all that the code depends on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from hashlib import sha256

from offspec.user_folders import user_folder, write_cached

DIGEST_BYTES = 32


def kept_code(key: str, compile_it: Callable[[], bytes]) -> bytes:
    """The object file of this key; compiled and written if there is none."""
    file = user_folder("cache") / "kernels" / f"{sha256(key.encode()).hexdigest()[:32]}.o"
    with contextlib.suppress(OSError):
        content = file.read_bytes() if file.is_file() else b""  # not from a pipe, which nobody may write
        if sha256(content[DIGEST_BYTES:]).digest() == content[:DIGEST_BYTES]:
            return content[DIGEST_BYTES:]
    code = compile_it()
    write_cached(file, sha256(code).digest() + code)
    return code
