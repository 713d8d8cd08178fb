"""What a person watches goes to a terminal only, fits it, and is gone when the text comes."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from offspec import Stats, Step
from offspec.cli import terminal
from offspec.cli.terminal import LoadingBar, PassLine, ProgressLine, first_pass_shown, marked
from offspec.text.lookup_files import LookedUp

from .conftest import Offspec

STEP = Step([1, 2, 3], "ab\ncd", Stats(), None, 2, ("a", "b\nc", "d"))


def engine(layer: int = 0, moved: int = 0, layers: int = 80) -> Any:
    """What the line reads of an engine."""
    weights = SimpleNamespace(bytes_streamed=moved)
    target = SimpleNamespace(current_layer=layer, config=SimpleNamespace(num_layers=layers), weights=weights)
    return SimpleNamespace(target=target)


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)


# ------------------------------------------------------------------------------------------------ marks


def test_guesses_and_corrections_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert marked(STEP) == "\x1b[32mab\x1b[0m\n\x1b[32mc\x1b[0m\x1b[1;33md\x1b[0m"
    looked_up = replace(STEP, looked_up=LookedUp("notes.txt", 7, 1))
    assert marked(looked_up) == "\x1b[36ma\x1b[0m\x1b[32mb\x1b[0m\n\x1b[32mc\x1b[0m\x1b[1;33md\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert marked(STEP) == "ab\nc\x1b[4md\x1b[0m"


def test_marks_are_for_terminals(run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("chat", *run_args[1:], "--seed", 1)
    plain = offspec(*args, stdin=b"hi\n")
    assert offspec(*args, "--color-accepted", stdin=b"hi\n").out == plain.out
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(terminal, "shows_colors", lambda: True)
    monkeypatch.setattr("offspec.cli.chat.shows_colors", lambda: True)
    shown = offspec(*args, "--color-accepted", "--budget", "16", stdin=b"hi\n")  # where it is found nothing may pay
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown.out) == plain.out
    assert "\x1b[32m" in shown.out
    assert "\x1b[1;33m" in shown.out
    monkeypatch.undo()
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.shows_colors()


EVIL = "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x9b2J\x7f\ra\tb\n"
SHOWN = r"\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x9b2J\x7f\x0d" + "a\tb\n"


@pytest.fixture
def evil_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose first text has escape sequences."""
    from offspec import Engine

    generate = Engine.generate

    def changed(self: Engine, *args: Any, **more: Any) -> Iterator[Step]:
        steps = generate(self, *args, **more)
        step = next(steps)
        yield replace(step, text=EVIL + step.text, texts=(EVIL, *step.texts[1:]))
        yield from steps

    monkeypatch.setattr(Engine, "generate", changed)


@pytest.mark.usefixtures("evil_model")
@pytest.mark.parametrize("command", ["run", "chat"])
def test_escape_sequences_of_a_model_reach_pipes_only(
    command: str, run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, stdin = ((*run_args, "hi"), None) if command == "run" else (("chat", *run_args[1:]), b"hi\n/show\n")
    assert EVIL in offspec(*args, stdin=stdin).out
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    for flags in ((), ("--color-accepted",)):
        if command == "chat" or not flags:
            shown = re.sub(r"\x1b\[[0-9;]*[mDK]", "", offspec(*args, *flags, stdin=stdin).out)  # colours
            assert SHOWN in shown
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


# ------------------------------------------------------------------------------------------------ the first pass


def test_the_line_says_how_far_a_pass_is() -> None:
    watched = engine()
    seconds = iter([100.0, 102.0, 104.0])
    line = PassLine(watched, clock=lambda: next(seconds))
    assert line.text() == "first pass: layer 1/80"
    watched.target.current_layer, watched.target.weights.bytes_streamed = 19, 6 * 10**9
    assert line.text() == "first pass: layer 20/80, 1.5 GB/s, 12 s left"


def test_the_line_fits_and_is_taken_away(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    on_terminal(monkeypatch, 12)
    monkeypatch.setattr(terminal, "FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(terminal, "LOOK_EVERY_S", 0.01)

    def steps() -> Any:
        while "layer" not in (said := capsys.readouterr().err) and "first pass" not in said:
            pass  # a long first pass: until the line has been seen
        seen.append(said)
        yield STEP
        yield STEP

    seen: list[str] = []
    shown = first_pass_shown(engine(9), steps())
    assert next(shown) is STEP
    rest = capsys.readouterr().err
    assert rest.endswith("\r\x1b[K")
    assert list(shown) == [STEP]
    assert capsys.readouterr().err == ""
    for text in (*seen, rest):
        assert all(len(part) < 12 for part in re.split(r"\r\x1b\[K", text))


# ------------------------------------------------------------------------------------------------ loading


@pytest.mark.parametrize("columns", [30, 100])
def test_the_bar_tells_what_is_loaded(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch, columns)
    monkeypatch.setenv("TERM", "xterm")
    with LoadingBar("./model") as bar:
        bar(10**9, 4 * 10**9)
        bar(2 * 10**9, 4 * 10**9)
    text = capsys.readouterr().err
    assert "2.0/4.0" in text
    assert ("./model" in text) == (columns >= 80)


def test_a_model_that_is_there_at_once_has_no_bar(
    run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_terminal(monkeypatch, 80)
    monkeypatch.setattr(terminal, "FIRST_LOOK_S", 3600)
    assert "loading" not in offspec(*run_args, "hi").err
    monkeypatch.setattr(terminal, "SMALL_LOAD_BYTES", 0)
    assert "loading" in offspec(*run_args, "hi").err
    assert offspec(*run_args, "hi", "-q").err == ""


def test_progress_in_a_log_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 0.0
    line = ProgressLine(clock=lambda: now_s)
    for now_s in range(0, 200, 20):
        line.show(f"{now_s} of 200")
    line.show()
    assert capsys.readouterr().err == "offspec: 60 of 200\noffspec: 120 of 200\noffspec: 180 of 200\n"
    on_terminal(monkeypatch, 80)
    line.show("200 of 200")
    line.show()
    assert capsys.readouterr().err == "\r\x1b[K200 of 200\r\x1b[K"


def test_a_terminal_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.click, "echo", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    terminal.show_line("step 1 of 9")
