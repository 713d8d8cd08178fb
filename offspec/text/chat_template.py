"""Chat templates: messages → text, by the checkpoint's own template, which is an untrusted program.

One process renders all templates (`template_worker`). It starts on first use, and the system ends it if a template does
not end. A rendering costs a message in each direction, about 0.1 ms.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from ..errors import TokenizerError
from . import template_worker

DEADLINE_S = 10.0  # of one rendering; the longest chats take a tenth of a second
MOST_WORKER_BYTES = 2**30  # of the worker's address space; jinja2 needs 40 MiB
MOST_CHARACTERS = 2**26  # of a rendered chat: twice the largest request to a server


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render a template with variables, which must be JSON. Raises TokenizerError with the reason."""
    answer = WORKER.ask({"source": source, "variables": dict(variables)})
    if "text" not in answer:
        raise TokenizerError(answer["error"])
    return answer["text"]


class Worker:
    """The rendering process; it takes one request at a time."""

    def __init__(self, deadline_s: float = DEADLINE_S, most_bytes: int = MOST_WORKER_BYTES) -> None:
        self._limits = (deadline_s, most_bytes, MOST_CHARACTERS)
        self._turn = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it

    def ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        """{"text": …} or {"error": …}. Raises TokenizerError if the process cannot start or is ended meanwhile."""
        with self._turn:
            is_ours = self._process is not None and self._owner == os.getpid()  # false in a forked process
            process = self._process if is_ours and self._process is not None else self._start()
            self._process = None  # after an interrupted exchange, the process is not used again
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                template_worker.send(process.stdin, request)  # type: ignore[arg-type]
                answer = template_worker.receive(process.stdout)  # type: ignore[arg-type]
                if answer is not None:
                    self._process = process
                    return dict(answer)
            except BrokenPipeError:
                pass
            finally:
                if self._process is None:
                    _end(process)
        raise TokenizerError(
            f"it did not end within {self._limits[0]:g} s, or needed more than {self._limits[1] >> 20} MiB of memory"
        )

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._turn:
            process, self._process = self._process, None
            if process is not None:
                _end(process)

    def _start(self) -> subprocess.Popen[bytes]:
        self._owner = os.getpid()
        settings = json.dumps([sys.path, *self._limits])
        # -I -S: modules come from our own sys.path, not from the environment or .pth files.
        command = [sys.executable, "-I", "-S", str(Path(template_worker.__file__)), settings]
        try:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except (OSError, ValueError) as exc:
            raise TokenizerError(f"the rendering process cannot be started ({exc})") from exc


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # also closes the pipes


WORKER = Worker()
atexit.register(WORKER.close)
