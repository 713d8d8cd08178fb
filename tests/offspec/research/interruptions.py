"""Stops a training, as Ctrl-C would."""

from __future__ import annotations

from typing import Any


class Stop(Exception):  # noqa: N818 - it stands for Ctrl-C
    pass


def stop_at(wanted: str, at: int) -> Any:
    """A `Progress` that stops a run."""

    def progress(what: str, done: int, total: int) -> None:
        if what == wanted and done == at:
            raise Stop

    return progress
