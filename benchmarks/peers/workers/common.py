"""The common part of all workers: read the job, time the tokens, count the bytes, write the result.

    PYTHON WORKER.py JOB.json RESULT.json

Runs in the peer's environment, so it imports only the standard library. The clock starts with the call that gets the
prompt; the time to open the model is `load_s`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CONTEXT = 1024  # tokens of prompt and text that a model is opened for

Emit = Callable[[Sequence[int]], None]
Generate = Callable[[list[int], int, Emit], int | None]


@dataclass(frozen=True)
class Job:
    """One cell. model, draft: what the peer opens (its own format). ram: bytes that may be used.

    fits: the model is to be in RAM.
    """

    model: str
    draft: str
    prompt: list[int]
    num_tokens: int
    threads: int
    ram: int
    fits: bool
    settings: dict[str, Any]


@dataclass
class Result:
    """arrivals: (seconds since the start, number of token ids so far), for each arrival of tokens.

    num_passes: passes of the target as counted by the peer; otherwise one per arrival.
    """

    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    num_passes: int = 0
    load_s: float = 0.0
    load_read_bytes: int = 0
    read_bytes: int = 0
    peak_rss_bytes: int = 0
    version: str = ""


def run(load: Callable[[Job], tuple[Generate, str]]) -> None:
    """`load` opens the model and tells the peer's version; what it returns is called with the prompt."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    began = time.perf_counter()
    generate, version = load(job)
    result = Result(load_s=time.perf_counter() - began, load_read_bytes=disk_bytes(), version=version)
    began = time.perf_counter()

    def emit(tokens: Sequence[int]) -> None:
        result.token_ids += [int(token) for token in tokens]
        result.arrivals.append((time.perf_counter() - began, len(result.token_ids)))

    num_passes = generate(job.prompt, job.num_tokens, emit)
    result.num_passes = num_passes or len(result.arrivals)
    result.read_bytes = disk_bytes() - result.load_read_bytes
    result.peak_rss_bytes = peak_rss_bytes()
    Path(sys.argv[2]).write_text(json.dumps(asdict(result)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # some peers leave threads that keep the process, or take it down with a signal


def peak_rss_bytes() -> int:
    """VmHWM of proc_pid_status(5): getrusage(2) would count what the parent held before execve(2) as well."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def disk_bytes() -> int:
    """Bytes that this process has had read from disks (proc_pid_io(5)): page cache hits do not count,
    page faults do.
    """
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
