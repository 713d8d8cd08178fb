"""Runs Python code that a model wrote, as a process with limits, and says whether it ran to its end.

The kernel limits processor time, memory and the size of files, and starts no further process or thread. The process
has a session and an empty temporary folder of its own, nothing of our environment, and ends with its whole group.
Where this program is root, the process also becomes a user of no files, keeps of root's rights only that to read, and
has no network. An audit hook ends it at its first attempt to start a process, to use a socket, to signal another
process, or to write or delete outside its folder (`sandbox_child.py`). Where this program is not root, this hook alone
keeps it from the network and from the user's other files.

This protects from what models write by mistake. It is no jail for code that is made to break out.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

CHILD = Path(__file__).with_name("sandbox_child.py")
READY = b"ready\n"  # what the child reports when its limits hold
MOST_REPORT = 4096  # bytes
ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads cannot start


@dataclass(frozen=True)
class Limits:
    """cpu_s: whole seconds of processor time. wall_s: seconds. memory_bytes: address space. file_bytes: of a file."""

    cpu_s: int = 10
    wall_s: float = 30.0
    memory_bytes: int = 2**30
    file_bytes: int = 2**20


def failure_of(source: str, limits: Limits | None = None) -> str:
    """Run `source` as a module; "" if it ran to its end, otherwise why not, in a few words.

    An exit before the end is a failure, too. Raises OSError if the process cannot be limited.
    """
    limits = limits or Limits()
    token = secrets.token_hex(16)  # reported at the end; the code does not know it
    job = {"source": source, "token": token, **asdict(limits)}
    with TemporaryDirectory() as folder, TemporaryFile() as stdin:
        stdin.write(json.dumps(job).encode())
        stdin.seek(0)
        read_end, write_end = os.pipe()
        with open(read_end, "rb", buffering=0) as reports:
            try:
                child = subprocess.Popen(
                    [sys.executable, "-I", "-B", str(CHILD), str(write_end)],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env=ENVIRONMENT,
                    start_new_session=True,
                    pass_fds=(write_end,),
                )
            finally:
                os.close(write_end)
            try:
                report, is_late = _report(reports.fileno(), limits.wall_s)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # before `wait`, so that the number is still the child's
                status = child.wait()
    return _failure(report, token, is_late, status, limits)


def _report(reports: int, wall_s: float) -> tuple[bytes, bool]:
    """What the child wrote until its end; whether it ran too long."""
    os.set_blocking(reports, False)
    report, end = b"", time.monotonic() + wall_s
    while len(report) < MOST_REPORT:
        readable, _, _ = select.select([reports], [], [], max(0.0, end - time.monotonic()))
        if not readable:
            return report, True
        part = os.read(reports, MOST_REPORT)
        if not part:
            break
        report += part
    return report, False


def _failure(report: bytes, token: str, is_late: bool, status: int, limits: Limits) -> str:
    if not report.startswith(READY):
        if is_late:
            return f"not started within {limits.wall_s:g} s"
        raise OSError(f"a process cannot be limited here: {report.decode(errors='replace') or f'exit status {status}'}")
    said = report.removeprefix(READY).decode(errors="replace")
    if is_late:
        return f"ran longer than {limits.wall_s:g} s"
    if said == token:
        return ""
    if not said:
        return f"ended by {signal.Signals(-status).name}" if status < 0 else "exited before its end"
    return said
