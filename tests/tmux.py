"""A real terminal, driven: tmux types keys and reads the screen."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

PATIENCE_S = 300.0  # for a machine that has other things to do


class Tmux:
    """A shell in a terminal of its own, with a prompt of `$ `. Lines that scroll away are kept."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *, columns: int = 90, rows: int = 60) -> None:
        self._tmux = [shutil.which("tmux") or "tmux", "-f", "/dev/null", "-L", f"offspec-{uuid.uuid4().hex}"]
        size = ("-x", str(columns), "-y", str(rows))
        given = [part for name, value in environment.items() for part in ("-e", f"{name}={value}")]
        # PATH is the caller's, whatever is given. Tmux starts its commands by the user's shell, which may be none.
        self._environment = {**os.environ, **environment, "SHELL": "/bin/sh"}
        self._call("new-session", "-d", *size, *given, "-c", str(folder), "/bin/sh")
        try:
            self.type("PS1='$ '; clear")  # whatever shell and user this is
            self.wait(lambda screen: screen == "$")
        except BaseException:
            self._call("kill-server")
            raise

    def __enter__(self) -> Tmux:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call("kill-server")

    def type(self, *lines: str) -> None:
        """Type lines, each with Enter."""
        for line in lines:
            self._call("send-keys", "-l", line)
            self.press("Enter")

    def press(self, *keys: str) -> None:
        """Keys by tmux's names: Enter, C-c, C-d, Tab, Up."""
        self._call("send-keys", *keys)

    def paste(self, text: str) -> None:
        """As from the clipboard, bracketed where the program asks for that."""
        self._call("set-buffer", text)
        self._call("paste-buffer", "-p")

    @property
    def screen(self) -> str:
        """Everything that was shown so far, without trailing blanks."""
        shown = self._call("capture-pane", "-p", "-S", "-")
        return "\n".join(line.rstrip() for line in shown.splitlines()).rstrip()

    def wait(self, there: Callable[[str], bool]) -> str:
        """The screen, once it is as it should be. Raises TimeoutError, with the screen."""
        until = time.monotonic() + PATIENCE_S
        while not there(screen := self.screen):
            if time.monotonic() > until:
                raise TimeoutError(f"the screen is not as it should be:\n{screen}")
            time.sleep(0.05)
        return screen

    def _call(self, *arguments: str) -> str:
        command = [*self._tmux, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=self._environment
        )
        return done.stdout
