"""What `offspec quantize` does beside `offspec.convert`: makes shadows by name, and tries results."""

from __future__ import annotations

from pathlib import Path

from offspec.loaders.convert import Conversion
from offspec.loaders.params import Progress

from ..checkpoints import shadows
from ..checkpoints.opening import open_model, open_target


def make_shadow(model: str, bits: int, folder: Path | None = None, *, progress: Progress | None = None) -> Conversion:
    """Make a shadow of MODEL (a path, a hub id or a name) in `folder`, or (None) in the user's cache.

    Raises the errors of `checkpoints.shadows.make_shadow`.
    """
    return shadows.make_shadow(open_target(model, None, "auto"), bits, folder, progress)


def check_runs(folder: Path) -> None:
    """Raises a subclass of OffspecError if offspec cannot run the checkpoint in this folder."""
    open_model(folder, "auto", [])
