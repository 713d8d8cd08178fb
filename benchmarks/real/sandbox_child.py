"""The limited process of `sandbox.py`: limits itself, runs the code from standard input, and reports to a pipe.

It imports nothing of this project. Started as `python -I -B sandbox_child.py PIPE`, in its folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from types import ModuleType
from typing import Any, NoReturn

READY = b"ready\n"  # as in sandbox.py
CLONE_NEWNET = 0x40000000
PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 8, 38
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH = 1 << 2
FIRST_UNUSED_ID = 0x70000000  # user ids above it belong to nobody; each process has another one
MOST_REASON = 200  # characters
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED = (
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "pty.spawn"),
    *("os.kill", "os.killpg", "signal.pthread_kill", "socket.", "subprocess.Popen"),
)
CHANGES = (
    *("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.removexattr", "os.rename", "os.rmdir"),
    *("os.setxattr", "os.symlink", "os.truncate", "os.utime", "shutil.rmtree"),
)


def limit(job: dict[str, Any]) -> None:
    """Raises OSError."""
    cpu_s = job["cpu_s"]
    for name, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),  # the second one ends code that ignores SIGXCPU
        (resource.RLIMIT_AS, job["memory_bytes"], job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"], job["file_bytes"]),
        (resource.RLIMIT_NPROC, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(name, (soft, hard))
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        leave_root(libc)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def leave_root(libc: ctypes.CDLL) -> None:
    """Leave the network, and become a user of no files; the kernel limits no number of processes of root.

    What remains is the right to read, because Python's library may lie in root's home.
    """
    libc.unshare(CLONE_NEWNET)  # may be refused in a container; the hook refuses sockets in any case
    unused = FIRST_UNUSED_ID + os.getpid()
    os.chown(".", unused, unused)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(unused, unused, unused)
    os.setresuid(unused, unused, unused)
    for kept in (CAP_DAC_READ_SEARCH, 0):
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        sets = (ctypes.c_uint32 * 6)(kept, kept, 0)  # effective, permitted, inheritable, twice
        if libc.capset(header, sets) == 0:
            return
    raise OSError(ctypes.get_errno(), "capset")


def watch(reports: int, folder: str) -> None:
    """End this process at its first act that concerns others."""

    def is_outside(path: object) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False  # an open file
        real = os.path.realpath(os.fsdecode(path))
        return real != os.devnull and not real.startswith(folder + os.sep)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            is_refused = bool(flags & WRITES) and is_outside(path)
        elif event in CHANGES:
            is_refused = any(map(is_outside, args))
        else:
            is_refused = event.startswith(REFUSED)
        if is_refused:
            end(reports, f"refused: {event} {args!r}")

    sys.addaudithook(hook)


def end(reports: int, report: str) -> NoReturn:
    os.write(reports, report[:MOST_REASON].encode(errors="replace"))
    os._exit(0)


def reason_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except BaseException:  # noqa: BLE001 - the code's own exceptions may do anything
        return "an exception"


def main() -> None:
    reports, folder, job = int(sys.argv[1]), os.path.realpath("."), json.load(sys.stdin)
    try:
        limit(job)
    except (OSError, ValueError) as exc:
        end(reports, str(exc))
    os.write(reports, READY)
    module = sys.modules["answer"] = ModuleType("answer")  # so that a block under `__main__` does not run
    watch(reports, folder)
    try:
        exec(compile(job["source"], "answer.py", "exec"), module.__dict__)
    except BaseException as exc:  # noqa: BLE001 - SystemExit is a failure, too
        end(reports, reason_of(exc))
    end(reports, job["token"])


if __name__ == "__main__":
    main()
