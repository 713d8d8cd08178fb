"""What a test leaves in its process: threads, open files, child processes, and settings of the whole process.

`conftest.py` compares a `ProcessState` before and after each test, and before and after each module's fixtures. So the
test that leaves something fails by its own name, not a later one that finds it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

WAIT_S = 20.0  # for the threads and processes of a test that were told to end
# Threads that stay until the process ends, by the beginning of their names: kernels without OpenMP, and libraries' own.
# Those of asyncio end with their loop, which has a thread of its own here.
LASTING_THREADS = ("kernel_", "ray_", "tqdm", "asyncio_")
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# Variables that libraries set for good: pytest's own, and those of torch's compiler, which bitsandbytes imports.
LASTING_VARIABLES = {
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # Intel's OpenMP sets them when a library loads it
}


_reported: set[object] = set()  # threads and process ids that a test has failed for; no later test fails for them


@dataclass(frozen=True)
class ProcessState:
    """threads: running ones. processes: ids of children. settings: process-wide values by name."""

    threads: frozenset[threading.Thread]
    processes: frozenset[int]
    settings: dict[str, object]

    @classmethod
    def now(cls) -> ProcessState:
        return cls(_threads(), _children(), {name: value for name, value, _ in _settings()})

    def leftovers(self, files_below: Path | None) -> list[str]:
        """What was not there in this state; [] if nothing is left. files_below: a folder whose files must be closed.

        What nobody refers to any more is not a leftover, so a collection of garbage comes first. Threads and processes
        get time to end.
        """
        if not self._differs(files_below):
            return []
        gc.collect()
        _wait(lambda: _threads() <= self.threads and _children() <= self.processes)
        found = list(self._found(files_below))
        _reported.update(_threads() - self.threads, _children() - self.processes)
        self._restore()
        return found

    def _restore(self) -> None:
        """Set what was changed back, so that no later test fails for it."""
        for name, value, set_value in _settings():
            if name in self.settings and value != self.settings[name]:
                set_value(self.settings[name])

    def _differs(self, files_below: Path | None) -> bool:
        return next(self._found(files_below), None) is not None

    def _found(self, files_below: Path | None) -> Iterator[str]:
        yield from (f"thread {thread.name!r}" for thread in _threads() - self.threads)
        yield from (f"process {_command(pid)}" for pid in _children() - self.processes)
        yield from (f"open file {path}" for path in _open_files(files_below))
        for name, value, _ in _settings():
            before = self.settings.get(name, value)  # a module that the test imported had no value before
            if value != before:
                yield f"{name}: {_difference(before, value)}"


def _threads() -> frozenset[threading.Thread]:
    running = (thread for thread in threading.enumerate() if not thread.name.startswith(LASTING_THREADS))
    return frozenset(thread for thread in running if thread not in _reported)


def _children() -> frozenset[int]:
    """Ids of the children of this process, without the one that renders chat templates for all texts."""
    found = set[int]()
    for task in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        with suppress(OSError), open(f"/proc/self/task/{task}/children") as file:  # the thread may have ended
            found.update(map(int, file.read().split()))
    if (module := sys.modules.get("offspec.text.chat_template")) and (worker := module.WORKER._process):
        found.discard(worker.pid)
    return frozenset(pid for pid in found - _reported if "resource_tracker" not in _command(pid))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return str(pid)


def _open_files(folder: Path | None) -> Iterator[str]:
    """Files below `folder` that this process holds open; none where the system does not tell."""
    if folder is None or not os.path.isdir("/proc/self/fd"):
        return
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the one that listed the folder
            continue
        if path.startswith(f"{folder}{os.sep}"):
            yield path


def _settings() -> Iterator[tuple[str, Any, Callable[[Any], object]]]:
    """Names and values of what belongs to the whole process, and how each is set.

    What was measured of a real GPU stays: it is the same for all tests.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LASTING_VARIABLES}
    yield "environment", environment, _set_environment
    yield "working directory", os.getcwd(), os.chdir
    yield "sys.path", list(sys.path), partial(setattr, sys, "path")
    handlers = {number.name: signal.getsignal(number) for number in SIGNALS}
    yield "signal handlers", handlers, _set_handlers
    yield "disabled logging", logging.root.manager.disable, logging.disable
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_available()
    if torch is not None:
        yield "torch's default dtype", torch.get_default_dtype(), torch.set_default_dtype
        yield "torch's threads", torch.get_num_threads(), torch.set_num_threads
        yield "torch's gradients", torch.is_grad_enabled(), torch.set_grad_enabled
        deterministic = torch.are_deterministic_algorithms_enabled()
        yield "torch's deterministic algorithms", deterministic, torch.use_deterministic_algorithms
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        for place, settings, name in (
            ("matmul", matmul, "allow_bf16_reduced_precision_reduction"),
            ("matmul", matmul, "allow_fp16_reduced_precision_reduction"),
            ("matmul", matmul, "allow_tf32"),
            ("cudnn", cudnn, "allow_tf32"),
        ):
            yield f"torch's {place}.{name}", getattr(settings, name), partial(setattr, settings, name)
    if module := sys.modules.get("offspec.backends.on_gpu"):
        rows, kernels = module.FUSED_ROWS, module.WORKING_KERNELS
        if not has_gpu:
            yield "measured rows of fused products", dict(rows._rows), partial(_refill, rows._rows)
        yield "fixed fused products", rows.is_fixed, partial(setattr, rows, "is_fixed")
        if not has_gpu:
            yield "working kernels of a GPU", dict(kernels._works), partial(_refill, kernels._works)


def _set_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys() - LASTING_VARIABLES:
        del os.environ[name]
    os.environ.update(environment)


def _set_handlers(handlers: dict[str, Any]) -> None:
    for name, handler in handlers.items():
        signal.signal(signal.Signals[name], handler)


def _refill(values: dict[Any, Any], before: dict[Any, Any]) -> None:
    values.clear()
    values.update(before)


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        changed = sorted(
            str(key) for key in before.keys() | after.keys() if before.get(key, _ABSENT) != after.get(key, _ABSENT)
        )
        return f"changed {', '.join(changed)}"
    return f"was {before}, is {after}"


_ABSENT = object()


def _wait(is_over: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        if is_over():
            return
        waiting.wait(0.05)
