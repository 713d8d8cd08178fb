"""The folder of a training run: settings, shards and checkpoints beside the result, until the result is written.

One process at a time works in it. A run that was stopped continues with the same settings only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..checkpoints.atomic_files import locked_name, write_atomically
from ..errors import StorageError, UsageError


@contextmanager
def run_folder(out: Path, settings: Mapping[str, object], *, resume: bool) -> Iterator[Path]:
    """The locked folder of the run that makes `out`, created or reopened; deleted if the body ends without an error.

    settings: what the result depends on, as JSON. resume: continue an interrupted run. Raises UsageError if there is an
    interrupted run without `resume`, none with it, or another process's; StorageError if it cannot be written.
    """
    work = work_folder(out)
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise _cannot_write(work, exc) from exc
    with locked_name(work, f"another process is making {out}; wait until it has ended, or choose another file (`out`)"):
        _open(work, json.dumps(settings, indent=1, sort_keys=True), resume=resume)
        yield work
        try:
            work.rename(_deleted(work))  # first, so that a killed process leaves nothing like an interrupted run
        except OSError as exc:
            raise StorageError(f"{work} cannot be deleted: {exc.strerror}; delete it by hand") from exc
        shutil.rmtree(_deleted(work), ignore_errors=True)


def work_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.work")


def _open(work: Path, wanted: str, *, resume: bool) -> None:
    settings = work / "settings.json"
    try:
        shutil.rmtree(_deleted(work), ignore_errors=True)  # left by a run that was stopped while deleting
        stored = settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else None
        if resume and stored is None:
            raise UsageError(f"there is nothing to resume at {work}; omit `resume`")
        if not resume and stored is not None:
            raise UsageError(f"{work} contains an interrupted run; continue it (`resume`), or delete the folder")
        if stored is not None and stored != wanted:
            raise UsageError(f"{work} contains a run with other settings; use the same settings, or delete the folder")
        work.mkdir(parents=True, exist_ok=True)
        if stored is None and any(part.name.startswith(("shard-", "step-")) for part in work.iterdir()):
            raise UsageError(f"{work} contains parts of a run, but not its settings; delete the folder")
    except OSError as exc:
        raise _cannot_write(work, exc) from exc
    if stored is None:
        write_atomically(settings, wanted.encode())


def _deleted(work: Path) -> Path:
    return work.with_name(f".{work.name}.deleted")


def _cannot_write(work: Path, exc: OSError) -> StorageError:
    return StorageError(f"{work} cannot be written: {exc.strerror}; choose another file (`out`)")
