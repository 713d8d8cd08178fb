"""`--learn-file`: one process at a time trains into a file; the training is saved however the command ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offspec.errors import StorageError
from offspec.user_files import home_folder, locked_name

from .terminal import is_watched

if TYPE_CHECKING:
    from offspec import Engine
    from offspec.research.lora import Adapter


def learning_alone(file: Path) -> AbstractContextManager[None]:
    """Lock the file for this process. Without the lock, the last of two processes would overwrite the other's
    training.
    """
    refusal = f"another process trains into {file}: wait until it ends, or give another --learn-file"
    return locked_name(Path(os.path.realpath(file)), refusal)


def keep_learning(engine: Engine, file: Path, *, quiet: bool) -> None:
    """Save the training to `file`. Raises StorageError, which names the file that was written instead."""
    if (aligner := engine.aligner) is None or not aligner.num_steps:
        return
    try:
        _save(aligner.adapter, file)
    except (KeyboardInterrupt, SystemExit):  # a signal interrupted the write
        _save(aligner.adapter, file)
        raise
    if not quiet and is_watched():
        click.echo(f"offspec: saved {aligner.num_steps} training steps of the draft in {file}", err=True)


def _save(adapter: Adapter, file: Path) -> None:
    try:
        adapter.save(file)
    except StorageError as exc:
        why = exc.__cause__.strerror if isinstance(exc.__cause__, OSError) else exc
        outcome = "no temporary folder can be written either, so the draft's training is lost"
        if (place := _saved_elsewhere(adapter, file.name)) is not None:
            outcome = f"the draft's training is in {place}: move it, or give --learn-file {place}"
        raise StorageError(f"cannot write {file}: {why}; {outcome}") from exc


def _saved_elsewhere(adapter: Adapter, name: str) -> Path | None:
    """Save to a file of that name in a new folder, on the first disk with space for it; None if none has."""
    for parent in (None, home_folder(), Path.cwd()):  # None is the system's temporary folder
        with suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="offspec-", dir=parent))
            try:
                adapter.save(folder / name)
            except StorageError:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                return folder / name
    return None
