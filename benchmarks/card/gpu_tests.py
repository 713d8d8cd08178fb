"""Runs the tests marked gpu of one file, plainly or under one of CUDA's sanitizers. Nothing here imports torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from .calls import GRAPH_TESTS, ROOT
from .processes import end_with_parent
from .results import Figures

TOLD = 400  # characters of a failure in the results; the log has all
NO_TESTS = 5  # pytest's status if it selected none
SUMMARY = re.compile(r"={9} .*SUMMARY: (?P<summary>.*)")
REPORTS = re.compile(r"={9} (?P<report>(?!COMPUTE-SANITIZER|.*SUMMARY).+)")


def tests(file: str) -> Iterator[Figures]:
    """Numbers of tests by outcome, seconds, and what failed."""
    figures, status = run_tests(file, [])
    yield figures
    if status not in (0, NO_TESTS):
        raise RuntimeError(f"pytest ended with status {status}: {figures.get('failed', 0)} tests failed")


def sanitizer(tool: str, file: str) -> Iterator[Figures]:
    """What `tool` (memcheck, racecheck or synccheck) reports about the tests of a file."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        yield {"compute-sanitizer": "not on this machine"}
        return
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [program, "--tool", tool, "--target-processes", "all", "--print-limit", "20", "--log-file", str(log)]
        # Without torch's cache each tensor is an allocation of its own, whose bounds are checked. Capture needs it.
        caching = {} if file == GRAPH_TESTS else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        figures, status = run_tests(file, command, caching)
        text = log.read_text(errors="replace") if log.exists() else ""
    print(text)
    yield figures | {"status": status, **told_by_sanitizer(text)}


def told_by_sanitizer(text: str) -> Figures:
    """The summary, and the first reports."""
    summaries = [found["summary"] for found in SUMMARY.finditer(text)]
    return {"summary": summaries, "reports": [found["report"][:TOLD] for found in REPORTS.finditer(text)][:5]}


def run_tests(file: str, prefix: Sequence[str], environment: dict[str, str] | None = None) -> tuple[Figures, int]:
    """pytest's results and status, with the project's options for several processes switched off."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        options = [
            "-o",
            "addopts=",
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            "-m",
            "gpu",
            "-v",
            f"--junitxml={report}",
        ]
        command = [*prefix, sys.executable, "-m", "pytest", *options, file]
        variables = {**os.environ, **(environment or {})}
        run = subprocess.run(command, cwd=ROOT, env=variables, preexec_fn=end_with_parent, check=False)
        return (read_report(report) if report.exists() else {}), run.returncode


def read_report(file: Path) -> Figures:
    """A JUnit file's tests: how many passed, failed and were skipped, and the first line of each failure."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    failures = {case.get("name", ""): found for case in cases if (found := failure_of(case)) is not None}
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "slowest_s": max((float(case.get("time", 0)) for case in cases), default=0.0),
        "failures": failures,
    }


def failure_of(case: ElementTree.Element) -> str | None:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return (found.get("message") or found.text or kind)[:TOLD]
    return None
