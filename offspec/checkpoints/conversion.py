"""`offspec.convert`: makes another checkpoint of one whose layers are named as this program's models name them."""

from __future__ import annotations

from pathlib import Path

from offspec.loaders.convert import Conversion, Progress
from offspec.loaders.convert import convert as convert_layers
from offspec.loaders.params import ConvertParams

from ..model.names import LAYER_PREFIX


def convert(
    source: str | Path,
    target: Path,
    params: ConvertParams | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Makes the checkpoint `target` of the checkpoint `source` (a folder or a hub id), or goes on with it.

    `progress(bytes_done, bytes_total)` counts bytes of the source; its first call tells what was there already.
    Raises UsageError, CheckpointError (the source), StorageError (the target; repeat the call to go on).
    """
    return convert_layers(source, target, params, layer_prefix=LAYER_PREFIX, revision=revision, progress=progress)
