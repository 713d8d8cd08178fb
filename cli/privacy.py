"""What clients of `offspec serve` may not learn: the folders of this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offspec.checkpoints.small_files import expand_home

if TYPE_CHECKING:
    from offspec import Engine


def public_name(model: str) -> str:
    """A model's name without its parent folders; a hub id is unchanged."""
    path = expand_home(model)
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
    """The folders of the engine's models, in each form that a message may contain; longest first."""
    names = (engine.name, engine.draft_name, engine.tokenizer.folder)
    given = [path for path in map(expand_home, filter(None, names)) if path.is_dir()]
    forms = {form for path in given for form in (path, path.absolute(), path.resolve())}
    return sorted((form for form in forms if form.is_absolute()), key=lambda form: -len(str(form)))
