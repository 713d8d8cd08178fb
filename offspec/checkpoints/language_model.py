"""The language model in a checkpoint of any container: its tensors, under Hugging Face's names of such a model alone.

A multimodal checkpoint has tensors of other models, too. Some families are written under two names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from offspec.loaders.files.checkpoint import Checkpoint, CheckpointView, TensorInfo, fault, show
from offspec.loaders.registry import named

from ..model.config import is_multimodal, text_config

# Checkpoints of containers with names of their own, by class → what gives them Hugging Face's.
TRANSLATIONS = {"GgufModel": "gguf.translated", "MistralCheckpoint": "mistral.translated"}
# A multimodal checkpoint's prefixes → a language model's. transformers writes the first two; the third is in memory.
BEGINNINGS = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
_GRANITE_EXPERTS = {
    r"\.block_sparse_moe\.input_linear\.": ".block_sparse_moe.experts.gate_up_proj.",
    r"\.block_sparse_moe\.output_linear\.": ".block_sparse_moe.experts.down_proj.",
}
# By model_type: names under which some tensors are stored → the usual ones, which transformers reads, too.
OTHER_NAMES = {
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoehybrid": _GRANITE_EXPERTS,
    "nemotron_h": {r"^backbone\.": "model."},
    "olmo_hybrid": {
        r"\.attention_layer_norm\.": ".input_layernorm.",
        r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
    },
}
# They encode images and sounds.
OTHER_MODULES = ("vision_tower", "multi_modal_projector", "visual", "audio_tower", "embed_vision", "embed_audio")


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """The part of a checkpoint that is loaded: all of it, or of a multimodal model the language model.

    Raises CheckpointError if config.json does not describe the language model, or a tensor has two names;
    UnsupportedModelError for a model in another layout that is not supported.
    """
    if translated := TRANSLATIONS.get(type(checkpoint).__name__):
        checkpoint = named(__package__, translated)(checkpoint)
    if is_multimodal(checkpoint.config):
        note = (
            f"{checkpoint.path.name} is a multimodal model; offspec loads its language model only and reads no images"
        )
        return CheckpointView(checkpoint, _renamed(checkpoint, BEGINNINGS), text_config(checkpoint.config), (note,))
    names = OTHER_NAMES.get(str(checkpoint.config.get("model_type")))
    return checkpoint if names is None else CheckpointView(checkpoint, _renamed(checkpoint, names))


def _renamed(checkpoint: Checkpoint, names: Mapping[str, str]) -> dict[str, TensorInfo]:
    """The language model's tensors by their usual names. names: patterns → what replaces them."""
    tensors = dict[str, TensorInfo]()
    for name, info in checkpoint.tensors.items():
        usual = next((re.sub(old, new, name) for old, new in names.items() if re.search(old, name)), name)
        if usual in tensors:
            raise fault(info.path, f"has {show(usual)} under another name too, {show(name)}; download it again")
        if name.removeprefix("model.").split(".", 1)[0] not in OTHER_MODULES:
            tensors[usual] = replace(info, name=usual)
    return tensors
