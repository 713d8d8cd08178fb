"""A new user's first conversation in a real terminal: typed by tmux, read off the screen."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine, SamplingParams
from offspec.session import Session

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


@pytest.mark.nightly("a process in a terminal, typed at; the commands are tested by default")
def test_a_first_conversation(tmp_path: Path, environment: dict[str, str]) -> None:
    file, later = tmp_path / "talk.json", tmp_path / "later.json"
    with Tmux(tmp_path, environment) as terminal:
        start(terminal)
        assert "/help shows the commands, Ctrl-D exits." in terminal.screen
        assert ask(terminal, "def area(").startswith("def ")

        ask(terminal, '"""', "def volume(width,", "           height):", '"""')
        assert '>>> """\n... def volume(width,\n...            height):\n... """' in terminal.screen

        ask(terminal, "/set ignore-eos true")
        ask(terminal, "/set max-new-tokens 100000")
        terminal.type("def endless(")
        terminal.wait(lambda screen: "def endless(\ndef " in screen)  # the reply has begun
        terminal.press("C-c")
        terminal.wait(lambda screen: "(stopped; " in screen and ready(screen))
        ask(terminal, "/set ignore-eos false")
        ask(terminal, "/set max-new-tokens 60")
        assert ask(terminal, "def again(")

        first = ask(terminal, "/regen")
        assert "temperature is 0, so the reply will be the same" in first
        assert "removed: def again(" in ask(terminal, "/undo")
        assert "did you mean /regen?" in ask(terminal, "/regn")
        assert "3 turns saved in talk.json" in ask(terminal, "/save talk.json")
        terminal.press("C-d")
        terminal.wait(lambda screen: screen.endswith("\n$"))

        start(terminal)
        assert "3 turns loaded from talk.json" in ask(terminal, "/load talk.json")
        ask(terminal, "def area(")
        ask(terminal, "def close(self")
        rows = [line.split() for line in ask(terminal, "/stats").splitlines()]
        assert [row[0] for row in rows[1:-1]] == ["1", "2", "3", "4", "5"]
        (prompt, new, reply), (next_prompt, next_new) = map(int, rows[4][1:4]), map(int, rows[5][1:3])
        assert new < prompt  # talk.json.kv has the entries of the first conversation
        assert next_new in {next_prompt - (prompt + reply), next_prompt - (prompt + reply) + 1}

        terminal.press(*["Up"] * 5)  # past this conversation's four lines: the history knows those of the first one
        terminal.wait(lambda screen: screen.endswith(">>> /save talk.json"))
        terminal.press("C-c")
        terminal.wait(lambda screen: ready(screen) and "(Ctrl-D exits)" in screen)
        terminal.press("/", "s", "a", "Tab")
        terminal.wait(lambda screen: screen.endswith(">>> /save"))
        terminal.type(" later.json")
        terminal.wait(lambda screen: "5 turns saved in later.json" in screen)
        terminal.type("/exit")
        terminal.wait(lambda screen: screen.endswith("\n$"))

    turns = saved(file)["turns"]
    assert [turn["message"] for turn in turns] == [
        "def area(",
        "def volume(width,\n           height):",
        "def endless(",
    ]
    assert [turn["finish_reason"] == "interrupted" for turn in turns] == [False, False, True]
    assert saved(later)["turns"][:3] == turns

    with Engine.load("builtin", device="cpu") as engine:
        session = Session(engine)
        session.load(later)
        for number in (0, 1, 3, 4):
            ids = session.encode(session.turns[: number + 1])
            assert engine.complete(ids, SamplingParams(max_new_tokens=60)) == session.turns[number].reply


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
