"""Reads what commands are given: a prompt, a line of standard input, a file that the user names."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click

from offspec.user_files import MOST_TEXT_BYTES, read_small_file

IDLE_S = 3  # seconds without input after which a note says that the command waits for the pipe


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from --prompt-file, or from a pipe and the argument, the pipe first ("-" is the pipe alone)."""
    if file is not None:
        if argument is not None:
            raise click.UsageError("Give PROMPT or --prompt-file, not both.")
        return read_file(file)
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    if argument is None and not is_piped:
        raise click.UsageError("Give a PROMPT, --prompt-file, or pipe one in.")
    if argument is None or argument == "-":
        return "" if sys.stdin is None else _piped(sys.stdin.buffer.read, "standard input")
    # Bytes that the locale cannot decode are usually UTF-8; Python keeps them as surrogates.
    words = _decoded(argument.encode("utf-8", "surrogateescape"), "PROMPT")
    if not is_piped:
        return words
    # Print a note if standard input stays empty for IDLE_S seconds: the process may have inherited it.
    with suppress(OSError, ValueError):  # stdin without a descriptor, or Windows, where select takes no pipes
        if not select.select([sys.stdin.fileno()], [], [], IDLE_S)[0]:
            note = "offspec: waiting for standard input, which goes before PROMPT; `< /dev/null` skips it"
            click.echo(note, err=True)
    before = _piped(sys.stdin.buffer.read, "standard input").rstrip("\r\n")
    return "\n\n".join(filter(None, (before, words)))


def read_line() -> str:
    """The next line of standard input with its line end; empty at the end of input. Raises click.UsageError."""
    if sys.stdin is None:
        return ""
    try:
        return _piped(readline := sys.stdin.buffer.readline, "a line of standard input")
    except _TooLongError:  # skip the rest of this line
        while (part := readline(MOST_TEXT_BYTES)) and not part.endswith(b"\n"):
            pass
        raise


class _TooLongError(click.UsageError):
    pass


def _piped(read: Callable[[int], bytes], where: str) -> str:
    """Text from standard input, at most MOST_TEXT_BYTES. Raises click.UsageError."""
    content = read(MOST_TEXT_BYTES + 1)
    if len(content) > MOST_TEXT_BYTES:
        raise _TooLongError(f"Input from {where} exceeds {MOST_TEXT_BYTES >> 20} MiB; shorten it.")
    return _decoded(content, where)


def read_file(file: Path) -> str:
    """The text of a file, unchanged. Raises click.UsageError if it is not UTF-8."""
    return _decoded(read_bytes(file), str(file))


def read_bytes(file: Path) -> bytes:
    """The bytes of a file or pipe that the user names. Raises click.UsageError if it cannot be read."""
    try:
        return read_small_file(file, MOST_TEXT_BYTES, allow_pipe=True)
    except OSError as exc:
        raise click.UsageError(f"Cannot read {file}: {exc.strerror}.") from exc


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")  # editors and PowerShell write a byte order mark
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"{where} is not UTF-8 text (byte {exc.start}).") from exc
