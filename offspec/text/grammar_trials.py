"""Starts the process that tries constraints (`grammar_worker`), and hands it a socket for each trial."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import OffspecError, UsageError
from . import grammar_worker
from .grammar_constraint import Part
from .grammar_library import NAMES

CAN_TRY = hasattr(os, "fork") and hasattr(socket, "send_fds")
MOST_CPU_S = 5.0  # of a trial; 4,000 properties, each with a pattern, take 2 s
MOST_TRIAL_BYTES = 2**31  # of its address space


class GrammarTrials:
    """The process. It ends with the object's `close`, or with this process."""

    def __init__(self, vocabulary: Mapping[str, Any]) -> None:
        """vocabulary: of `ConstraintCompiler.vocabulary_for_trials`. Raises OffspecError if it cannot be started."""
        home = str(Path(__file__).resolve().parent.parent.parent)  # of offspec, where no .pth file is read
        settings = json.dumps([[home, *sys.path], MOST_CPU_S, MOST_TRIAL_BYTES])
        command = [sys.executable, "-I", "-S", grammar_worker.__file__, settings]
        self._process: subprocess.Popen[bytes] | None = None
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                silent: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), **silent)
            grammar_worker.send(self._control, vocabulary)
            if not self._control.recv(1):
                raise OSError("it ended at its start")
        except (OSError, ValueError) as exc:
            self.close()
            raise OffspecError(f"the process that tries constraints cannot be started ({exc})") from exc

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def begin(self, part: Part) -> tuple[socket.socket, bytes]:
        """A socket to a new process, whose closing ends it, and what to send there.

        It answers with `grammar_worker.packed` seconds or an error, or not at all. Raises OSError if there is no
        process any more.
        """
        constraint, start = part
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"t"], [theirs.fileno()])
        return ours, grammar_worker.packed({"kind": constraint.kind, "text": constraint.text, "start": start})

    def close(self) -> None:
        self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def ended(part: Part) -> UsageError:
    """The error of a trial that ended without an answer."""
    needs = f"more than {MOST_CPU_S:g} s of processor time, or {MOST_TRIAL_BYTES >> 20} MiB of memory"
    return UsageError(f"the {NAMES[part[0].kind]} needs {needs} to be compiled; simplify it")
