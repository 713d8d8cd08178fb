"""The user's folders: home, caches, data, settings and history, also of a user who has no home folder.

In a container, a user may be a number alone: without HOME, and unknown to the system. Then folders below NO_HOME stand
for his: nothing is there, and writing fails with an OSError, as in a home that may not be written.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Literal

Kind = Literal["cache", "config", "data", "state"]
NO_HOME = Path(os.devnull) / "no-home-folder"


def expand_home(path: str | os.PathLike[str]) -> Path:
    """The path with `~` replaced by a home folder; unchanged if there is none, for which `Path.expanduser` raises."""
    return Path(os.path.expanduser(path))


def home_folder() -> Path:
    """The user's home folder; NO_HOME if there is none."""
    home = expand_home("~")
    return home if home.is_absolute() else NO_HOME


def user_folder(kind: Kind) -> Path:
    """offspec's folder of this kind, which may not exist; below NO_HOME if there is no home folder."""
    import platformdirs

    author = None if kind == "data" else False  # as in earlier versions; it matters on Windows only
    try:
        folder: Path = getattr(platformdirs, f"user_{kind}_path")("offspec", appauthor=author)
    except RuntimeError:  # there is no home folder; older versions return a relative path
        return NO_HOME / kind
    return folder if folder.is_absolute() else NO_HOME / kind


def write_cached(file: Path, content: bytes) -> None:
    """Write a file of the cache atomically; without room or permission, it is not there the next time."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(number, "wb") as opened:
                opened.write(content)
            os.replace(temporary, file)
        finally:
            Path(temporary).unlink(missing_ok=True)
