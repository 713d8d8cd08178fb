"""The process that runs a model's code: what it may do, what ends it, and that nothing outside is hurt."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

pytest.importorskip("resource", reason="the limits are those of POSIX")

from benchmarks.real import sandbox
from benchmarks.real.sandbox import Limits, failure_of

from ..machines import is_root

SMALL = Limits(cpu_s=2, wall_s=20, memory_bytes=2**28, file_bytes=2**12)


def failure(source: str, limits: Limits = SMALL) -> str:
    return failure_of(dedent(source), limits)


def test_what_a_solution_may_do() -> None:
    source = """
        import collections, hashlib, math, os, random, re, typing
        from dataclasses import dataclass
        assert hashlib.md5(b"").hexdigest()
        assert os.listdir() == []
        open("notes.txt", "w").write("inside its folder")
        assert open("notes.txt").read()
        print("words " * 100_000)
        @dataclass
        class P:
            x: "int"
        assert P(1).x == 1
        if __name__ == "__main__":
            raise SystemExit
    """
    assert failure(source) == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert False", "AssertionError"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("import os\nos._exit(0)", "exited before its end"),
        ("class E(Exception):\n    def __str__(self):\n        raise E\nraise E", "an exception"),
        ("x = bytearray(2**40)", "MemoryError"),
        ("with open('large', 'wb') as file:\n    file.write(bytes(2**13))", "OSError"),
        ("import os, signal\nos.abort()", "ended by SIGABRT"),
    ],
)
def test_what_fails_has_its_reason(source: str, reason: str) -> None:
    assert failure(source).startswith(reason)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nwhile True:\n    os.fork()",
        "import os\nos.kill(os.getppid(), 9)",
        "import socket\nsocket.create_connection(('127.0.0.1', 9))",
        "try:\n    import os\n    os.fork()\nexcept BaseException:\n    pass",
    ],
)
def test_processes_signals_and_the_network_are_refused(source: str) -> None:
    assert failure(source).startswith("refused: ")


def test_the_kernel_starts_no_process_either() -> None:
    """Without the hook, which sees Python's own calls only: a fork by the C library, a thread."""
    assert failure("import ctypes\nassert ctypes.CDLL(None).fork() == -1") == ""
    assert "start new thread" in failure("import threading\nthreading.Thread(target=print).start()")


@pytest.mark.skipif(not is_root(), reason="as another user than root, files are protected by the hook alone")
def test_code_of_root_runs_as_a_user_of_no_files(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    libc = f"import ctypes\nassert ctypes.CDLL(None).unlink({os.fsencode(victim)!r}) == -1"
    assert failure(f"import os\nassert os.geteuid() != 0\n{libc}") == ""
    assert victim.read_text() == "whole"


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--net", "true"], stderr=subprocess.DEVNULL).returncode,
    reason="leaving the network needs root's rights; elsewhere the hook alone refuses sockets",
)
def test_code_of_root_has_no_network() -> None:
    assert failure("assert [line.split(':')[0].strip() for line in open('/proc/self/net/dev')][2:] == ['lo']") == ""


@pytest.mark.parametrize(
    "act",
    [
        "open(PATH, 'w')",
        "os.rename(PATH, 'mine')",
        "os.symlink(PATH, 'link') or open('link', 'w')",
        "open('../' * 20 + PATH, 'a')",
    ],
)
def test_nothing_outside_its_folder_is_changed(act: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    before = victim.stat()
    assert failure(f"import os\nPATH = {str(victim)!r}\nopen('mine', 'w')\n{act}").startswith("refused: ")
    assert (victim.read_text(), victim.stat().st_mode) == ("whole", before.st_mode)
    assert list(tmp_path.iterdir()) == [victim]


def test_the_end_cannot_be_pretended() -> None:
    """What the code writes into the pipe of reports is not the token, and hides the token that follows."""
    source = """
        import os
        for number in range(3, 1024):
            try:
                os.write(number, b"x")
            except OSError:
                pass
    """
    assert failure(source).startswith("x")


def test_what_does_not_end_is_ended() -> None:
    reasons = ("ran longer than 0.5 s", "not started within 0.5 s")
    assert failure("import time\ntime.sleep(600)", Limits(wall_s=0.5)) in reasons


@pytest.mark.nightly("computes until a limit of seconds")
@pytest.mark.slow
def test_processor_time_is_limited() -> None:
    """Also of code that ignores the first signal."""
    first = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)"
    limits = Limits(cpu_s=1, wall_s=100)
    assert failure(f"{first}\nwhile True: pass", limits) in ("ended by SIGXCPU", "ended by SIGKILL")


def test_where_limits_do_not_hold_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error, not a wrong answer."""
    monkeypatch.setattr(sandbox, "CHILD", tmp_path / "absent.py")
    with pytest.raises(OSError, match="cannot be limited"):
        failure("assert True")
    monkeypatch.undo()
    with pytest.raises(OSError, match="cannot be limited"):
        failure("assert True", Limits(memory_bytes=2**70))
