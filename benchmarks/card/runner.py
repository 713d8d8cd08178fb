"""Runs the parts of a call: a process for each, with a watchdog; lanes at the same time. Nothing here imports torch.

A part that hangs, or leaves the device in error, ends with its process. A call that is killed leaves the lines that its
parts have written, and the same call with that file (`earlier`) runs the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .calls import ROOT, Part
from .processes import lead_group
from .report import tell
from .results import LOG_FILE, RESULTS_FILE, TABLE_FILE, Line, append, end_last_line, is_done, latest, read

LOG_BYTES = 2**20  # of each part
TRACEBACK_S = 5.0  # before the watchdog ends a part, the part prints where it is


@dataclass
class Run:
    """One call. folder: for results. models: for grown models. ram: bytes for weights as text, e.g. 100GiB."""

    folder: Path
    models: Path
    device: str
    minutes: float
    ram: str | None = None
    _began_s: float = field(default_factory=time.monotonic)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _is_ended: bool = False

    def run(self, parts: Sequence[Part], earlier: Iterable[Path] = ()) -> dict[str, Line]:
        """Run the parts that are not done, and return all results by part."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.models.mkdir(parents=True, exist_ok=True)
        end_last_line(self.folder / RESULTS_FILE)
        self._take_over(parts, earlier)
        results = self.results()
        missing = [part for part in parts if not is_done(results, part.name)]
        # A part that failed may fail again, after all others had their time.
        missing.sort(key=lambda part: "error" in results.get(part.name, {}))
        ended = {part.name: threading.Event() for part in missing}
        lanes = {part.lane: [each for each in missing if each.lane == part.lane] for part in missing}
        threads = [threading.Thread(target=self._run_lane, args=(lane, ended)) for lane in lanes.values()]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._end_all()
            for thread in threads:
                thread.join()
        self._write_table()
        return self.results()

    def results(self) -> dict[str, Line]:
        return latest(read(self.folder / RESULTS_FILE), self.device)

    @property
    def left_s(self) -> float:
        return 60 * self.minutes - (time.monotonic() - self._began_s)

    def _take_over(self, parts: Sequence[Part], earlier: Iterable[Path]) -> None:
        """Add earlier results to this call's, but those that belong to one machine."""
        present, of_a_call = self.results(), {part.name for part in parts if part.each_call}
        for file in earlier:
            for name, line in latest(read(file), self.device).items():
                if line["is_done"] and name not in of_a_call and not is_done(present, name):
                    append(self.folder, line)

    def _run_lane(self, parts: Sequence[Part], ended: dict[str, threading.Event]) -> None:
        for part in parts:
            for name in part.after:
                if name in ended:
                    ended[name].wait()
            try:
                if not self._is_ended:
                    self._run_part(part)
            finally:
                ended[part.name].set()
                self._write_table()

    def _run_part(self, part: Part) -> None:
        left_s = self.left_s
        if left_s < part.least_s:
            self._say(f"{part.name}: no time left; the next call with these results continues with it")
            return
        limit_s, began_s = min(part.limit_s, left_s), time.monotonic()
        self._say(f"{part.name} begins ({left_s:.0f} s left)")
        process = self._start(part, limit_s)
        pump = threading.Thread(target=self._pump, args=(part.name, process.stdout), daemon=True)
        pump.start()
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        self._end(process)
        pump.join(TRACEBACK_S)  # what has left the process group may hold the pipe
        took_s = time.monotonic() - began_s
        self._close(part, status, took_s)
        line = self.results().get(part.name, {})
        self._say(f"{part.name}: {line.get('error', 'done')} ({took_s:.0f} s)")

    def _start(self, part: Part, limit_s: float) -> subprocess.Popen[bytes]:
        options = ["--out", str(self.folder), "--models", str(self.models), "--device", self.device]
        options += ["--limit-s", str(max(1.0, limit_s - TRACEBACK_S))] + (["--ram", self.ram] if self.ram else [])
        command = [sys.executable, "-W", "default", "-m", "benchmarks.card.one_part", *options, part.name, *part.words]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lead_group,
        )
        with self._lock:
            self._processes.add(process)
        return process

    def _close(self, part: Part, status: int | None, took_s: float) -> None:
        """Say how a part ended that could not say so itself."""
        line = self.results().get(part.name)
        if status == 0 and line is not None and (line["is_done"] or "begun" not in line):
            return
        how = f"ended with status {status}" if status is not None else f"stopped by its watchdog after {took_s:.0f} s"
        base = line or {"part": part.name, "device": self.device, "figures": {}}
        if line is None or "begun" in line:
            append(self.folder, {**base, "is_done": False, "seconds": took_s, "error": f"{how}; see {LOG_FILE}"})

    def _pump(self, name: str, output: IO[bytes]) -> None:
        """Append a part's output to the log as it comes, up to LOG_BYTES."""
        num_bytes = 0
        with output:
            for text in output:
                if (num_bytes := num_bytes + len(text)) <= LOG_BYTES:
                    with self._lock, (self.folder / LOG_FILE).open("ab") as log:
                        log.write(f"[{name}] ".encode() + text)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with self._lock:
            self._processes.discard(process)

    def _end_all(self) -> None:
        with self._lock:
            self._is_ended, processes = True, list(self._processes)
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _write_table(self) -> None:
        with self._lock:
            (self.folder / TABLE_FILE).write_text(tell(self.results()), encoding="utf-8")

    def _say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)
