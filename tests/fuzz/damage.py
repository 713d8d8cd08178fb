"""Damages files, by seeds, and says what may come of it: an error of ours within a deadline, or nothing."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import pytest

from offspec.errors import OffspecError
from offspec.stats import peak_host_bytes

NUM_CASES = int(os.environ.get("FUZZ_CASES", "50"))  # of each test; `FUZZ_CASES=5000 pytest tests/fuzz` takes its time
DEADLINE_S = 20
MOST_BYTES = 1 << 30  # more than before
ALLOWED = (OffspecError, click.UsageError)
PIECES = (
    *(b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\n", b"\r\n", b'"', b"\\", b"{", b"}", b"[" * 5000),
    *(
        b"null",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"-1",
        b"0",
        b"9" * 400,
        b"18446744073709551616",
        b"true",
        b'"x"',
        b"[]",
    ),
    *(b"{}", b"[[]]", b'{"line": []}', b'"\\ud800"', b"1.5", b"\x00\x00\x00\x80", b"\xff" * 8),
)


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Some bytes flipped, cut out, repeated, or replaced by what readers stumble over; one to three times."""
    for _ in range(draw.randint(1, 3)):
        first = draw.randint(0, len(content))
        last = min(len(content), first + draw.choice((0, 1, 4, 8, 30, len(content))))
        before, part, after = content[:first], content[first:last], content[last:]
        kind = draw.randrange(5)
        if kind == 0 and part:
            part = bytes([part[0] ^ (1 << draw.randrange(8))]) + part[1:]
        elif kind == 1:
            part = b""
        elif kind == 2:
            part *= 2
        elif kind == 3:
            part = draw.choice(PIECES)
        else:
            after = b""
        content = before + part + after
    return content


@contextmanager
def deadline(seconds: float = DEADLINE_S) -> Iterator[None]:
    """Raises TimeoutError in the body after so long."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError(f"a hang: more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_bytes_anew() -> int:
    """The process's peak of memory, which begins again here where the kernel can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_host_bytes()


def judge(what: str, act: Callable[[], object]) -> None:
    """Fails the test for a foreign exception, a hang, an error of several lines, or too much memory."""
    before = peak_bytes_anew()
    try:
        with deadline():
            act()
    except ALLOWED as exc:
        if "\n" in str(exc):
            pytest.fail(f"{what}: an error of several lines: {exc!r}")
    except BaseException as exc:  # noqa: BLE001 (a panic of a library in Rust is no Exception)
        pytest.fail(f"{what}: {type(exc).__name__}: {exc}")
    if (grown := peak_host_bytes() - before) > MOST_BYTES:
        pytest.fail(f"{what}: {grown} bytes of memory")


def fuzz(name: str, file: Path, act: Callable[[], object]) -> None:
    """`act` reads `file`, which is sound now, in NUM_CASES damaged forms."""
    sound = file.read_bytes()
    judge(f"{name}, sound", act)
    for seed in range(NUM_CASES):
        content = damaged(sound, random.Random(f"{name} {seed}"))
        file.write_bytes(content)
        judge(f"{name}, case {seed}", act)


def special_files(folder: Path) -> dict[str, Path]:
    """What may lie where a file is looked for, by its kind."""
    found = {kind: folder / kind for kind in ("pipe", "folder", "loop", "dangling", "to zero", "to pipe", "empty")}
    os.mkfifo(found["pipe"])
    found["folder"].mkdir()
    found["loop"].symlink_to(found["loop"])
    found["dangling"].symlink_to(folder / "nothing")
    found["to zero"].symlink_to("/dev/zero")
    found["to pipe"].symlink_to(found["pipe"])
    found["empty"].write_bytes(b"")
    return found | {"missing": folder / "missing", "under a file": found["empty"] / "file"}
