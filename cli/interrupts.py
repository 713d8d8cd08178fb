"""Ctrl-C where there is nothing to save or write: it ends the program at once, without a traceback.

This module imports nothing that takes time: until then Ctrl-C shows a traceback.
"""

from __future__ import annotations

# `signal` imports enum, which takes longer than all before it.
import _signal as signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False  # not typing's, see `offspec/__init__.py`
if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130  # the exit code


def end_at_once(number: int, frame: FrameType | None) -> None:
    """A handler of SIGINT."""
    os._exit(INTERRUPTED)


def handle_interrupts(*, at_once: bool) -> None:
    """From now on Ctrl-C ends the process, or (not at_once) raises KeyboardInterrupt; nothing if it is ignored."""
    handler = signal.getsignal(signal.SIGINT)
    if at_once and handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
    elif not at_once and handler is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
