"""Extracts the language model of a multimodal checkpoint: its tensors, under the names of a pure language model."""

from __future__ import annotations

from dataclasses import replace

from offspec.loaders.files.checkpoint import Checkpoint, CheckpointView, TensorInfo, fault, show

from ..model.config import is_multimodal, text_config

# A multimodal checkpoint's prefixes → a language model's. transformers writes the first two; the third is in memory.
BEGINNINGS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
# They encode images and sounds.
OTHER_MODULES = ("vision_tower", "multi_modal_projector", "visual", "audio_tower", "embed_vision", "embed_audio")


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """The part of a checkpoint that is loaded: all of it, or of a multimodal model the language model.

    Raises CheckpointError if config.json does not describe the language model, or a tensor has two names.
    """
    if not is_multimodal(checkpoint.config):
        return checkpoint
    tensors: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        own = _own_name(name)
        if own in tensors:
            raise fault(info.path, f"has {show(own)} under another name too, {show(name)}; download it again")
        if not _is_of_another(name):
            tensors[own] = replace(info, name=own)
    note = f"{checkpoint.path.name} is a multimodal model; offspec loads its language model only and reads no images"
    return CheckpointView(checkpoint, tensors, text_config(checkpoint.config), (note,))


def _own_name(name: str) -> str:
    there = next((beginning for beginning in BEGINNINGS if name.startswith(beginning)), None)
    return name if there is None else BEGINNINGS[there] + name.removeprefix(there)


def _is_of_another(name: str) -> bool:
    return name.removeprefix("model.").split(".", 1)[0] in OTHER_MODULES
