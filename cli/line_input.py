"""Input of chat lines: from a terminal with history, completion and paste, or from a pipe.

A message that begins with three quotes ends with three quotes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .reading import read_line

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output

QUOTES = '"""'
# Reads the next message or command, with its quotes; the argument is the initial text of the line, for editing.
# Raises EOFError at the end, KeyboardInterrupt for Ctrl-C.
ReadMessage = Callable[[str], str]


def is_open(text: str) -> bool:
    """Whether a message in three quotes has no end yet."""
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.rstrip().endswith(QUOTES))


def unquoted(text: str) -> str:
    """A message without its three quotes."""
    if not text.startswith(QUOTES):
        return text
    return text.rstrip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def read_from_pipe(proposed: str = "") -> str:
    """The next message of a pipe or file, as `ReadMessage`."""
    if not (line := read_line()):
        raise EOFError
    text = line.rstrip("\r\n")
    while is_open(text) and (line := read_line()):
        text += "\n" + line.rstrip("\r\n")
    return text


def open_history(file: Path) -> bool:
    """Create the file with access for its owner only; False if that fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        with file.open("ab"):
            return True
    except OSError:
        return False


def line_editor(
    history: Path | None,
    complete: Callable[[str], Iterable[str]],
    *,
    source: Input | None = None,
    sink: Output | None = None,
) -> ReadMessage:
    """A line editor. Enter sends, except inside three quotes; Alt-Enter always inserts a line break.

    history: a file for typed lines; None keeps them only during this session. complete: completions of a line's last
    word.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.shortcuts import CompleteStyle

    class CommandCompleter(Completer):
        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            text = document.text_before_cursor
            for word in complete(text):
                yield Completion(word, start_position=-len(text.split(" ")[-1]))

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        ">>> ",
        multiline=True,
        prompt_continuation="... ",
        history=InMemoryHistory() if history is None else FileHistory(str(history)),
        completer=CommandCompleter(),
        complete_style=CompleteStyle.READLINE_LIKE,  # a menu would not fit a narrow terminal
        key_bindings=bindings,
        enable_history_search=True,
        enable_suspend=True,
        input=source,
        output=sink,
    )
    return lambda proposed: session.prompt(default=proposed, handle_sigint=False)
