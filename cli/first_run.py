"""What a newcomer may do next: told once per user, after the first text on a terminal."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import click

from offspec.user_files import user_folder

if TYPE_CHECKING:
    from offspec import Engine


def tell_next_once(engine: Engine) -> None:
    """Name `offspec chat` on stderr, unless this user has seen that; for models that chat, on terminals only.

    A file in the user's cache folder remembers it. Where none can be written, nothing is told.
    """
    streams = (sys.stdout, sys.stderr)
    if not all(stream is not None and stream.isatty() for stream in streams) or not engine.tokenizer.has_chat_template:
        return
    marker = user_folder("cache") / "told-of-chat"
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch(exist_ok=False)
    except OSError:
        return
    click.echo(f"next: offspec chat {shlex.quote(engine.name)}", err=True)
