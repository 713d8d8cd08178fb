"""Checkpoints of any container under Hugging Face's names, by which the rest of the program knows tensors."""

from __future__ import annotations

from offspec.loaders.files.checkpoint import Checkpoint
from offspec.loaders.files.gguf_file import GgufModel
from offspec.loaders.files.mistral_folder import MistralCheckpoint

from . import gguf, mistral


def in_hf_names(checkpoint: Checkpoint) -> Checkpoint:
    """Raises CheckpointError, UnsupportedModelError."""
    if isinstance(checkpoint, GgufModel):
        return gguf.translated(checkpoint)
    return mistral.translated(checkpoint) if isinstance(checkpoint, MistralCheckpoint) else checkpoint
