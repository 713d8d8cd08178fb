"""Conversations on a terminal, each kept in a file in the user's state folder, so that none is lost.

The files are those of `/save`. The newest ones stay. This module does not know what a conversation is.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from offspec.errors import UsageError
from offspec.user_files import parse_json, read_small_file, user_folder

MOST_FILES = 20


class KeptChat:
    """file: of the present conversation; None before it has one."""

    file: Path | None = None

    def file_to_write(self) -> Path:
        """Of the present conversation. A new one replaces the oldest of too many. Raises OSError."""
        if self.file is None:
            (folder := user_folder("state") / "chats").mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in _newest_first()[MOST_FILES - 1 :]:
                with suppress(OSError):
                    file.unlink()
            self.file = folder / f"{time.time_ns()}-{os.getpid()}.json"
        return self.file


def newest_file(model: str) -> Path:
    """The newest conversation with this model. Raises UsageError if there is none."""
    models = {file: _model_of(file) for file in _newest_first()}
    newest = next((file for file in models if models[file] == model), None)
    if newest is None:
        others = ", ".join(sorted({other for other in models.values() if other is not None}))
        remedy = f"name a model that has one: {others}" if others else "omit --resume"
        raise UsageError(f"--resume: no conversation with {model} is kept; {remedy}")
    return newest


def _newest_first() -> list[Path]:
    try:
        return sorted(
            (user_folder("state") / "chats").glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True
        )
    except OSError:  # another process has removed one
        return []


def _model_of(file: Path) -> str | None:
    try:
        content = parse_json(read_small_file(file))
    except (OSError, ValueError):
        return None
    model = content.get("model") if isinstance(content, dict) else None
    return model if isinstance(model, str) else None
