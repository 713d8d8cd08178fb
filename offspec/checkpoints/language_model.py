"""The language model of a checkpoint of text and images: its tensors, under the names that it has alone.

Knows nothing of what tensors are for.
"""

from __future__ import annotations

from dataclasses import replace

from offspec.loaders.checkpoint import Checkpoint, CheckpointView, TensorInfo, fault, show

from ..model.config import is_multimodal, text_config

# How names begin there → how they begin here. transformers writes the first two, and had the third in memory.
BEGINNINGS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
OTHER_MODULES = ("vision_tower", "multi_modal_projector")  # which make of images what the language model reads


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """What is loaded of a checkpoint: all of it, or the language model of one of text and images.

    Raises CheckpointError where config.json does not say what that model is, or a tensor is there under two names.
    """
    if not is_multimodal(checkpoint.config):
        return checkpoint
    tensors: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        own = _own_name(name)
        if own in tensors:
            raise fault(info.path, f"has {show(own)} under another name as well, {show(name)}; download it again")
        if not _is_of_another(name):
            tensors[own] = replace(info, name=own)
    told = (
        f"{checkpoint.path.name} is a model of text and images: the language model alone is loaded; images are not read"
    )
    return CheckpointView(checkpoint, tensors, text_config(checkpoint.config), (told,))


def _own_name(name: str) -> str:
    there = next((beginning for beginning in BEGINNINGS if name.startswith(beginning)), None)
    return name if there is None else BEGINNINGS[there] + name.removeprefix(there)


def _is_of_another(name: str) -> bool:
    return name.removeprefix("model.").split(".", 1)[0] in OTHER_MODULES
