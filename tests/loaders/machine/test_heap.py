"""Large blocks that are freed leave the process, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from offspec.loaders.machine import heap

BLOCKS = """
    import ctypes, runpy, sys
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    if sys.argv[2] == "with":
        runpy.run_path(sys.argv[1])["return_large_blocks"]()
    size = 6 * 2**20
    libc.free(libc.malloc(4 * size))  # glibc's own limit is that large from now on
    blocks, between = [], []
    for _ in range(16):
        blocks.append(libc.malloc(size))
        ctypes.memset(blocks[-1], 1, size)
        between.append(libc.malloc(2**18))  # more than is free in the heap of a process that has just begun
    for block in blocks:
        libc.free(block)
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_blocks_leave_the_process() -> None:
    kib = {
        name: int(
            subprocess.run(
                [sys.executable, "-c", textwrap.dedent(BLOCKS), heap.__file__, name],
                capture_output=True,
                check=True,
                text=True,
            ).stdout
        )
        for name in ("with", "without")
    }
    assert kib["with"] < kib["without"] - 64 * 1024
