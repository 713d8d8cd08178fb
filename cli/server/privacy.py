"""What clients of `offspec serve` may not learn: the folders of this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offspec.user_files import expand_home

if TYPE_CHECKING:
    from offspec import Engine


PART = re.compile(r"-\d{5}-of-\d{5}$")  # at the end of the stem of a GGUF file that is one of several


def public_name(model: str) -> str:
    """A folder's name, or the stem of a file's, without parent folders; a hub id is unchanged."""
    path = expand_home(model)
    if path.is_file():
        return PART.sub("", path.stem)  # links are not followed: in the hub's cache, they lead to hashes
    return path.resolve().name if path.is_dir() else model


def without_paths(message: str, folders: Sequence[Path] = ()) -> str:
    """A message without this machine's folders; files keep their names.

    folders: known folders, removed whatever characters they contain. Other folders are recognised in quotes, or if
    they contain neither spaces nor punctuation.
    """
    for folder in folders:
        message = message.replace(f"{folder}/", "").replace(str(folder), folder.name)
    message = re.sub(r"(['\"])/[^'\"]*/([^'\"/]*)\1", r"\1\2\1", message)
    return re.sub(r"(?<![\w:/.<])/(?:[^\s/:;,'\"()]+/)+", "", message)


def model_folders(engine: Engine) -> list[Path]:
    """The folders of the engine's models or their files, in each form that a message may contain; longest first."""
    names = (engine.name, engine.draft_name, engine.tokenizer.folder)
    named = [expand_home(name) for name in names if name is not None]
    given = [path if path.is_dir() else path.parent for path in named if path.exists()]
    forms = {form for path in given for form in (path, path.absolute(), path.resolve())}
    return sorted((form for form in forms if form.is_absolute() and form.name), key=lambda form: -len(str(form)))
