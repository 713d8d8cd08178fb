"""A conversation in a real terminal: typed by tmux, read off the screen."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ..tmux import Tmux

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None or sys.platform == "win32", reason="needs tmux"),
]
PROMPT = ">>>"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    homes = {name: str(tmp_path) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {
        **homes,
        "OFFSPEC_CONFIG": "",
        "OMP_NUM_THREADS": "1",
        "PATH": path,
        "ATEN_CPU_CAPABILITY": "default",
        "LC_ALL": "C.UTF-8",
    }


def ready(screen: str) -> bool:
    return screen.endswith(f"\n{PROMPT}")


def ask(terminal: Tmux, *lines: str) -> str:
    """Type lines, and wait until the chat is ready again; returns what came after the last of them."""
    before = terminal.screen.count(f"\n{PROMPT}")
    terminal.type(*lines)
    shown = terminal.wait(lambda screen: screen.count(f"\n{PROMPT}") > before and ready(screen))
    return shown.rpartition(f" {lines[-1]}\n")[2].removesuffix(PROMPT).strip()


def saved(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def start(terminal: Tmux) -> None:
    terminal.type("offspec chat builtin --max-new-tokens 60 --device cpu")
    terminal.wait(ready)


def test_a_pasted_message_and_what_is_typed_during_a_reply_in_a_narrow_terminal_without_utf8(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """A pasted message is one message, and what is typed is the next line."""
    plain = {**environment, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "NO_COLOR": "1"}
    with Tmux(tmp_path, plain, columns=36, rows=40) as terminal:
        start(terminal)
        terminal.paste("def area(width,\n         height):")
        terminal.wait(lambda screen: screen.endswith("height):"))
        ask(terminal, "")
        ask(terminal, "/save talk.json")
        ask(terminal, "/set ignore-eos true")
        ask(terminal, "/set max-new-tokens 150")
        terminal.type("def endless(")
        terminal.wait(lambda screen: "def endless(\ndef " in screen)  # the reply has begun
        terminal.type("/undo")
        shown = terminal.wait(lambda screen: "removed: def endless(" in screen and ready(screen))
    assert [turn["message"] for turn in saved(tmp_path / "talk.json")["turns"]] == [
        "def area(width,\n         height):"
    ]
    reply, _, after = shown.partition("def endless(\n")[2].partition(f"\n{PROMPT}")
    assert "/undo" not in reply
    assert after.startswith(" /undo\n")
