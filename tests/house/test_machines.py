"""Tests do not know the machine: what it has they set, or take from `tests/machines.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
INSTRUCTIONS = {
    *("instructions", "num_lanes", "can_pair", "has_tiles", "describe_instructions", "of_this_cpu"),
    *("get_host_cpu_features", "get_host_cpu_name", "get_cpu_capability"),
}
READS = INSTRUCTIONS | {
    *("is_supported", "cpu_count", "process_cpu_count", "sched_getaffinity", "cpu_affinity", "cpu_freq"),
    *("virtual_memory", "swap_memory", "getloadavg"),
    *("geteuid", "getuid", "uname", "getlocale", "getpreferredencoding", "getencoding"),
}
FILES = re.compile(
    r"/proc/(cpuinfo|meminfo|version)|/proc/sys/|/sys/(devices|fs/cgroup)|\blscpu\b|SC_(NPROC|PHYS|AVPHYS|LEVEL)"
)
CODE = re.compile(rf"\b({'|'.join(sorted(READS - {'geteuid', 'getuid'}))})\(")
SUSPECT = re.compile(rf"\b({'|'.join(sorted(READS))}|platform)\b|{FILES.pattern}")  # parsing takes longer
# A file → what it tests, and what is the machine's there.
MAY_READ = {
    "machines.py": "is the one place",
    "house/test_machines.py": "names what is read",
    "backends/x86/test_processor.py": "how instructions are read",
    "loaders/machine/test_hardware.py": "how hardware is read: real control groups, and texts of pretended ones",
}


def reads_in(source: str) -> Iterator[tuple[int, str]]:
    """Lines that read the machine, and how, as far as source can tell. To replace a function by its name is to set."""
    for node in ast.walk(ast.parse(source)) if SUSPECT.search(source) else ():
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in READS:
                yield node.lineno, name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = {alias.name for alias in node.names} | {module}
            yield from ((node.lineno, name) for name in names & (READS | {"platform"}) if name is not None)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for match in (FILES.search(node.value), CODE.search(node.value)):
                if match is not None:
                    yield node.lineno, match[0]


@pytest.mark.parametrize(
    "line",
    [
        'if "avx512" in instructions(): pass',
        "from offspec.backends.x86.processor import can_pair",
        "lanes = products.num_lanes()",
        "mark = pytest.mark.skipif(not processor.of_this_cpu(), reason='')",
        "flags = Path('/proc/cpuinfo').read_text()",
        "workers = os.cpu_count() or 1",
        "from os import cpu_count",
        "cores = len(os.sched_getaffinity(0))",
        "ram = psutil.virtual_memory().total",
        "import platform",
        "from platform import machine",
        "is_root = os.geteuid() == 0",
        "size = Path('/sys/devices/system/cpu/cpu0/cache/index2/size').read_text()",
        "run(sys.executable, '-c', 'import os; print(os.cpu_count())')",
        "run('lscpu')",
        "cores = os.sysconf('SC_NPROCESSORS_ONLN')",
        "encoding = locale.getpreferredencoding()",
        "needs_order = pytest.mark.skipif(not is_supported(BF16), reason='')",
    ],
)
def test_reads_are_seen(line: str) -> None:
    assert list(reads_in(line))


@pytest.mark.parametrize(
    "line",
    [
        "monkeypatch.setattr(os, 'cpu_count', lambda: 4)",
        "monkeypatch.setattr('platform.machine', lambda: 'arm64')",
        "with using(LEVELS[:2]): pass",
        "body = {'instructions': 'Be short.'}",
        "reply(instructions='Be short.')",
        "is_linux = sys.platform == 'linux'",
        "threads = torch.get_num_threads()",
        "Path('/proc/self/status').read_text()",
        "os.sysconf('SC_CLK_TCK')",
    ],
)
def test_nothing_else_is(line: str) -> None:
    assert not list(reads_in(line))


def test_tests_do_not_know_the_machine() -> None:
    reads = [
        f"tests/{name}:{line}: {read}"
        for file in sorted(TESTS.rglob("*.py"))
        if (name := file.relative_to(TESTS).as_posix()) not in MAY_READ
        for line, read in reads_in(file.read_text(encoding="utf-8"))
    ]
    assert not reads, "set it, or take it from tests/machines.py"


def test_exceptions_are_needed() -> None:
    for name in MAY_READ:
        assert list(reads_in((TESTS / name).read_text(encoding="utf-8"))), name
