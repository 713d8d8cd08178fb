"""Runs one cell: one row on one prompt, in its own process and memory control group, with a time limit.

The page cache is dropped first. Each result is one line appended to a JSON Lines file, so that an interrupted run can
be resumed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.streaming import drop_page_cache, memory_group
from offspec import format_size

from .catalog import Row
from .prepare import Files
from .truth import Judgement

POLL_S = 0.2


@dataclass(frozen=True)
class Terms:
    """The conditions of all cells of a run."""

    shape: str
    ram: int
    threads: int
    num_tokens: int
    num_steady_tokens: int
    num_steady_prompts: int
    timeout_s: float


@dataclass
class Cell:
    """The result of a cell. status: ok, time (limit reached), memory (killed by the kernel), or failed; see `error`.

    arrivals: see workers/common.py. peak_bytes: of the group, including page cache; peak_anonymous_bytes: without page
    cache, sampled. If no group can be created, both are the process's resident memory, and `is_limited` is False.
    raw_disk_bytes_per_s: O_DIRECT reads of the checkpoint, measured before the cells of this prompt. load_average: of
    the previous minute.
    """

    row: str
    prompt: int
    shape: str
    ram: int
    threads: int
    num_tokens: int
    settings: dict[str, Any]
    date: str
    status: str = "ok"
    error: str = ""
    version: str = ""
    load_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_passes: int = 0
    load_read_bytes: int = 0
    read_bytes: int = 0
    peak_bytes: int = 0
    peak_anonymous_bytes: int = 0
    is_limited: bool = True
    raw_disk_bytes_per_s: float = 0.0
    load_average: float = 0.0
    judgement: Judgement | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for cells of the same measurement."""
        settings = json.dumps(self.settings, sort_keys=True)
        return (self.row, self.prompt, self.shape, self.ram, self.threads, self.num_tokens, settings)

    @property
    def first_token_s(self) -> float:
        return self.arrivals[0][0]

    @property
    def decode(self) -> tuple[int, float]:
        """Tokens after the first arrival, and their seconds."""
        (first_s, first), (last_s, last) = self.arrivals[0], self.arrivals[-1]
        return last - first, last_s - first_s


def blank(row: Row, prompt: int, terms: Terms) -> Cell:
    """A cell that has not run."""
    num_tokens = terms.num_steady_tokens if row.is_steady else terms.num_tokens
    now = time.strftime("%Y-%m-%d %H:%M")
    load = os.getloadavg()[0]
    return Cell(
        row.name, prompt, terms.shape, terms.ram, terms.threads, num_tokens, row.settings, now, load_average=load
    )


def run(cell: Cell, python: Path, worker: Path, files: Files, ids: list[int], terms: Terms, *, fits: bool) -> Cell:
    """Run a cell; fills `cell` in and returns it. fits: keep the model in RAM. A peer's failure raises no exception."""
    with tempfile.TemporaryDirectory() as folder:
        job, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        asked = {
            "model": str(files.model),
            "draft": str(files.draft),
            "prompt": ids,
            "num_tokens": cell.num_tokens,
            "threads": terms.threads,
            "ram": terms.ram,
            "fits": fits,
            "settings": cell.settings,
        }
        job.write_text(json.dumps(asked))
        drop_page_cache()
        with memory_group(terms.ram) as group, log.open("wb") as out:
            process = start([str(python), str(worker), str(job), str(result)], terms.threads, group, out, folder)
            try:
                cell.status, cell.peak_anonymous_bytes = wait(process, group, terms.timeout_s)
            finally:
                end(process)
            if group is not None:
                cell.peak_bytes = _number(group, "memory.max_usage_in_bytes", "memory.peak")
        _read(cell, result, log.read_text(errors="replace"), is_limited=group is not None)
    return cell


def start(command: list[str], threads: int, group: Path | None, out: Any, folder: str) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that its children end with it, and in the group from the start."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    enter = None if group is None else (lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
    return subprocess.Popen(
        command, env=env, cwd=folder, stdout=out, stderr=out, preexec_fn=enter, start_new_session=True
    )


def wait(process: subprocess.Popen[bytes], group: Path | None, timeout_s: float) -> tuple[str, int]:
    """(status, largest sampled anonymous memory)."""
    began, peak = time.monotonic(), 0
    while process.poll() is None:
        if time.monotonic() - began > timeout_s:
            return "time", peak
        if group is not None:
            peak = max(peak, _anonymous_bytes(group))
        time.sleep(POLL_S)
    if process.returncode == 0:
        return "ok", peak
    return ("memory" if process.returncode == -signal.SIGKILL else "failed"), peak


def end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _anonymous_bytes(group: Path) -> int:
    with suppress(OSError):
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(stat.get("total_rss", stat.get("anon", 0)))  # version 1, version 2
    return 0


def _number(group: Path, *names: str) -> int:
    return next((int((group / name).read_text()) for name in names if (group / name).exists()), 0)


def _read(cell: Cell, result: Path, log: str, *, is_limited: bool) -> None:
    cell.is_limited = is_limited
    if cell.status == "ok" and not result.exists():
        cell.status = "failed"
    if cell.status != "ok":
        cell.error = _why(cell, log)
        return
    said = json.loads(result.read_text(encoding="utf-8"))
    peak = said.pop("peak_rss_bytes")
    if not is_limited:
        cell.peak_bytes = cell.peak_anonymous_bytes = peak
    for name, value in said.items():
        setattr(cell, name, value)
    if len(cell.token_ids) < cell.num_tokens:
        cell.status, cell.error = "failed", f"ended after {len(cell.token_ids)} of {cell.num_tokens} tokens"
    cell.token_ids = cell.token_ids[: cell.num_tokens]


def _why(cell: Cell, log: str) -> str:
    if cell.status == "memory":
        return f"killed by the kernel; it needs more than {format_size(cell.ram)}"
    if cell.status == "time":
        return "time limit exceeded"
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "exited without a message"


# ------------------------------------------------------------------------------------------------ stored results


def append(file: Path, cell: Cell) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(asdict(cell)) + "\n")


def stored(file: Path) -> Iterator[Cell]:
    """Every cell in the file, oldest first."""
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            yield _cell(json.loads(line))


def _cell(said: Mapping[str, Any]) -> Cell:
    judgement = said["judgement"]
    return Cell(**{**said, "judgement": Judgement(**judgement) if judgement else None})
