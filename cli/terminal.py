"""A terminal: a bar during loading, a line during the first pass, marked tokens, harmless text, keys that wait.

Bar and line go to stderr, and only if stderr is a terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from offspec import format_quantity, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress

    from offspec import Engine, Stats, Step

T = TypeVar("T")
SMALL_LOAD_BYTES = 2**28  # a smaller model loads too fast for a bar
FIRST_LOOK_S, LOOK_EVERY_S = 1.0, 0.5
SELDOM_S = 60.0  # between two lines of progress in a log
ACCEPTED, CORRECTION, PLAIN = "\x1b[32m", "\x1b[1;33m", "\x1b[0m"
LOOKED_UP = "\x1b[36m"  # cyan
COLORS = (LOOKED_UP, ACCEPTED, CORRECTION)
UNDERLINED = "\x1b[4m"
# Escape sequences change titles, write the clipboard or type keys; a carriage return hides what is before it.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def is_watched() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def show_line(text: str = "") -> None:
    """Replace the current progress line. A closed terminal does not interrupt the work."""
    with suppress(OSError):
        click.echo(f"\r\x1b[K{text}", err=True, nl=False)


class ProgressLine:
    """Progress on stderr: on a terminal a line that the next one replaces, in a log a line every SELDOM_S."""

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """quiet: nothing is shown. clock: in seconds."""
        self._quiet, self._clock, self._told_s = quiet, clock, clock()

    def show(self, text: str = "") -> None:
        """text: empty at the end, which removes the line."""
        if self._quiet:
            return
        if is_watched():
            show_line(text)
        elif text and (now_s := self._clock()) - self._told_s >= SELDOM_S:
            self._told_s = now_s
            with suppress(OSError):
                click.echo(f"offspec: {text}", err=True)


def as_shown(text: str, stream: TextIO | None = None) -> str:
    """Text of a model or a file, for stdout or another stream. On a terminal, control characters are spelt: \\x1b.

    Newline and tab remain, and what goes to pipes and files is unchanged.
    """
    stream = sys.stdout if stream is None else stream
    return text.translate(CONTROLS) if stream is not None and stream.isatty() else text


def draft_off(stats: Stats) -> str:
    """Since when and why a request's draft is switched off; empty if it is not."""
    if stats.draft_off_since is None or stats.plain_pass_s is None:
        return ""
    since = (
        f"off since pass {stats.draft_off_since} of {stats.num_passes}, but for trials, as it costs more than it brings"
    )
    cost = f"a pass without it takes {1e3 * stats.plain_pass_s:.1f} ms"
    if (round_s := stats.draft_round_s) is not None:
        least = round_s / stats.plain_pass_s
        cost += f", each round of drafting {1e3 * round_s:.1f} ms more, which {least:.2f} further tokens would pay for"
    num_accepted = max(0, stats.num_tokens - stats.num_passes)
    brought = f"{num_accepted} of {stats.num_drafted_tokens} drafted tokens were accepted"
    return f"{since}: {cost}{f'; {brought}' if stats.num_drafted_tokens else ''}; --budget 16 forces it"


def wrapped(text: str, indent: str = "") -> str:
    """Text for stderr. On a terminal, lines that are too wide are broken between words, and go on behind `indent`."""
    if not is_watched():
        return text
    wrap = textwrap.TextWrapper(
        max(columns(), 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrap.fill(line) for line in text.split("\n"))


@contextmanager
def keys_held() -> Iterator[None]:
    """Meanwhile the terminal does not echo what is typed; the next line has it. Ctrl-C still interrupts."""
    before = _terminal_settings()
    if before is None:
        yield
        return
    import termios

    held = [*before]
    held[0] &= ~termios.ICRNL  # Enter stays the key that a line editor reads
    held[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, held)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _terminal_settings() -> list[Any] | None:
    """Those of standard input; None if it is no terminal, and on Windows, which echoes only while a program reads."""
    if sys.platform == "win32" or sys.stdin is None or not sys.stdin.isatty():
        return None
    import termios

    try:
        return termios.tcgetattr(sys.stdin)
    except (OSError, ValueError, termios.error):
        return None


def columns() -> int:
    return shutil.get_terminal_size().columns


def table(rows: Sequence[Sequence[str]], num_left: int = 0) -> list[str]:
    """A line for each row, its cells as wide as their column: of the first `num_left` columns with spaces behind them,
    of the others before them.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class TimeLeft:
    """The estimated time left, at the rate since the first call; work of an earlier run does not count."""

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None

    def __call__(self, now: float, done: int, total: int) -> str:
        """Text like ", 40 s left"; empty in the first second. now: `time.monotonic()`; done, total: in any unit."""
        if self._start is None:
            self._start = now, done
        seconds, since = now - self._start[0], done - self._start[1]
        return f", {format_seconds((total - done) * seconds / since)} left" if seconds >= 1 and since else ""


class LoadingBar:
    """A progress bar on stderr: model, GB loaded, GB/s and time left; nothing for a small model.

    Called with (bytes done, bytes in total), as `Engine.load` does.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: Progress | None = None

    def __call__(self, bytes_done: int, bytes_total: int) -> None:
        if bytes_total < SMALL_LOAD_BYTES:
            return
        if self._bar is None:
            self._bar = self._start(bytes_total)
        self._bar.update(self._bar.task_ids[0], completed=bytes_done)

    def _start(self, bytes_total: int) -> Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        figures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
        # A narrow terminal has space for the figures only.
        around = (TextColumn("loading {task.description}"), BarColumn()) if columns() >= 80 else ()
        bar = Progress(*around, *figures, console=Console(stderr=True), transient=True)
        bar.add_task(self._name, total=bytes_total)
        bar.start()
        return bar

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def first_pass_shown(
    engine: Engine, steps: Generator[T, None, None], *, quiet: bool = False
) -> Generator[T, None, None]:
    """Yields `steps` unchanged; on a terminal, a line shows the progress of a long first pass. Closes `steps`."""
    line = PassLine(engine)
    if not quiet and is_watched():
        line.start()
    try:
        for step in steps:
            line.done()
            yield step
    finally:
        line.done()
        steps.close()


class PassLine:
    """A line with a pass's current layer and the rate of streaming, so that a slow pass does not look hung.

    A thread reads the figures from the engine during the pass.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds."""
        self._engine, self._stop, self._clock = engine, threading.Event(), clock
        self._thread: threading.Thread | None = None
        self._began, self._bytes_before = clock(), engine.target.weights.bytes_streamed

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="offspec-pass-line", daemon=True)
        self._thread.start()

    def done(self) -> None:
        """Stop updating the line, and remove it."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        shown, wait_s = False, FIRST_LOOK_S
        while not self._stop.wait(wait_s):
            show_line(self.text()[: columns() - 1])
            shown, wait_s = True, LOOK_EVERY_S
        if shown:
            show_line()

    def text(self) -> str:
        """The current text of the line."""
        target, seconds = self._engine.target, self._clock() - self._began
        layer, layers = target.current_layer + 1, target.config.num_layers
        moved = target.weights.bytes_streamed - self._bytes_before
        rate = f", {format_quantity(moved / seconds, 'B/s')}" if moved else ""
        left = f", {format_seconds(seconds / layer * (layers - layer))} left" if 1 < layer < layers else ""
        return f"first pass: layer {layer}/{layers}{rate}{left}"


def shows_colors() -> bool:
    """Whether stdout accepts escape codes: a terminal other than TERM=dumb."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def marked(step: Step) -> str:
    """A step's text: accepted draft tokens, those of them that a file for lookup has, and the target's own tokens in
    three colours (NO_COLOR: the target's are underlined).
    """
    looked_up, accepted, correction = ("", "", UNDERLINED) if os.environ.get("NO_COLOR") else COLORS
    first, cut = step.looked_up.num_tokens if step.looked_up else 0, step.num_accepted
    parts = ((step.texts[:first], looked_up), (step.texts[first:cut], accepted), (step.texts[cut:], correction))
    return "".join(_styled("".join(texts), style) for texts, style in parts)


def _styled(text: str, style: str) -> str:
    """Style each line separately, so that a colour ends at the line's end."""
    text = as_shown(text)
    if not style:
        return text
    return "\n".join(f"{style}{line}{PLAIN}" if line else "" for line in text.split("\n"))
