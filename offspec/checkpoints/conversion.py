"""`offspec.convert`: converts a checkpoint to another weight format, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike, fspath
from pathlib import Path

from offspec.loaders.convert import Conversion as Conversion
from offspec.loaders.convert import Progress
from offspec.loaders.convert import convert as convert_layers
from offspec.loaders.files.checkpoint import Checkpoint, without
from offspec.loaders.formats import blank_tensors
from offspec.loaders.params import ConvertParams

from ..errors import CheckpointError, UnsupportedModelError
from ..model.config import read_config
from ..model.decoder import wanted_shapes
from ..model.heads.mtp import mtp_names
from ..model.names import LAYER_PREFIX
from ..named_models import named_path
from .experts import by_expert
from .language_model import language_model
from .our_names import in_our_names


def convert(
    source: str | PathLike[str],
    target: str | PathLike[str],
    params: ConvertParams | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the checkpoint `source` (a path, a hub id or a name) to the checkpoint `target`; resumes if interrupted.

    `progress(bytes_done, bytes_total)` counts bytes of the source; its first call reports the bytes done before.
    Raises UsageError, CheckpointError (the source), StorageError (the target; repeat the call to resume).
    """
    params = params or ConvertParams()
    understand = _language_model if params.format == "keep" else without_blanks
    name = fspath(source)
    return convert_layers(
        str(named_path(name) or name),
        Path(target),
        params,
        layer_prefix=LAYER_PREFIX,
        revision=revision,
        progress=progress,
        understand=understand,
        kept=_mtp_layers,
    )


def _language_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under Hugging Face's names; of a multimodal model, the language model only."""
    return language_model(in_our_names(checkpoint))


def _mtp_layers(checkpoint: Checkpoint) -> Collection[str]:
    """The tensors of MTP layers, which in 4 bits accept little."""
    count = checkpoint.config.get("num_hidden_layers")
    return mtp_names(checkpoint.tensors, count).keys() if isinstance(count, int) else ()


def without_blanks(checkpoint: Checkpoint) -> Checkpoint:
    """`_language_model` with tensors of each expert, and without blank ones, which have no place in a plain file."""
    named = _language_model(checkpoint)
    try:
        config = read_config(named.config)
        wanted = wanted_shapes(config)
    except (CheckpointError, UnsupportedModelError):  # other programs may still support the result
        return named
    if config.experts is not None:
        named = by_expert(named, are_transposed=config.experts.is_transposed)
    blank = blank_tensors(named.tensors, wanted)
    return without(named, blank) if blank else named
