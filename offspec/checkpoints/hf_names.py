"""Checkpoints of any container under Hugging Face's names, by which the rest of the program knows tensors."""

from __future__ import annotations

from offspec.loaders.files.checkpoint import Checkpoint
from offspec.loaders.registry import named

# Containers with names of their own, as classes of checkpoints → what translates them.
TRANSLATIONS = {"GgufModel": "gguf.translated", "MistralCheckpoint": "mistral.translated"}


def in_hf_names(checkpoint: Checkpoint) -> Checkpoint:
    """Raises CheckpointError, UnsupportedModelError."""
    name = TRANSLATIONS.get(type(checkpoint).__name__)
    translated: Checkpoint = checkpoint if name is None else named(__package__, name)(checkpoint)
    return translated
