"""`--learn-file`: one process learns into a file at a time, and what was learnt outlives whatever ends the command."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offspec.checkpoints.atomic_files import locked_name
from offspec.errors import StorageError

from .terminal import is_watched

if TYPE_CHECKING:
    from offspec import Engine
    from offspec.training.lora import Adapter


def learning_alone(file: Path) -> AbstractContextManager[None]:
    """The file is this process's to write: of two that had read it,
    the last to end would undo what the other learnt.
    """
    refusal = f"another process learns into {file}: wait until that one ends, or give another --learn-file"
    return locked_name(Path(os.path.realpath(file)), refusal)


@contextmanager
def learning_kept(engine: Engine, file: Path | None, *, quiet: bool) -> Generator[None, None, None]:
    """Write what the draft learnt in the body to `file`, where it is to learn at all; also when an exception
    or a signal ends the body.

    Raises StorageError where `file` cannot be written, with the place where it was written instead.
    """
    try:
        yield
    finally:
        aligner = engine.aligner
        if file is not None and aligner is not None and aligner.num_steps:
            try:
                _save(aligner.adapter, file)
            except (KeyboardInterrupt, SystemExit):  # a signal while it was written
                _save(aligner.adapter, file)
                raise
            if not quiet and is_watched():
                click.echo(f"offspec: what the draft learnt in {aligner.num_steps} steps is in {file}", err=True)


def _save(adapter: Adapter, file: Path) -> None:
    try:
        adapter.save(file)
    except StorageError as exc:
        why = exc.__cause__.strerror if isinstance(exc.__cause__, OSError) else exc
        place = _saved_elsewhere(adapter, file.name)
        if place is None:
            raise StorageError(
                f"{file} cannot be written: {why}; nor can a temporary folder, so what the draft learnt is lost"
            ) from exc
        raise StorageError(
            f"{file} cannot be written: {why}; what the draft learnt is in {place}: move it, or give --learn-file "
            f"{place}"
        ) from exc


def _saved_elsewhere(adapter: Adapter, name: str) -> Path | None:
    """A file of that name in a new folder, on the first disk that has room for it; None where none has."""
    for parent in (None, Path.home(), Path.cwd()):  # None is the system's temporary folder
        with suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="offspec-", dir=parent))
            try:
                adapter.save(folder / name)
            except StorageError:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                return folder / name
    return None
