"""Families of models, as data: each family's differences from Llama's layout.

A family is an entry of `FAMILIES`, a function from its config.json to the differing fields of `ModelConfig`. It also
has an entry of `DEFAULTS` if its defaults for missing keys differ from Llama's in transformers.
The source is transformers' configuration and modeling files (5.23).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offspec.loaders.registry import named

from ..config_values import Json
from .reading import Fields

# To add a family, add one entry: the function from its config.json to the differing fields of ModelConfig.
FAMILIES: dict[str, Any] = {  # by `named`
    "llama": "dense.llama",
    "mistral": "dense.mistral",
    "ministral": "dense.mistral",
    "qwen2": "dense.qwen2",
    "qwen3": "dense.qwen3",
    "mixtral": "mixtures.mixtral",
    "qwen3_moe": "mixtures.qwen3_moe",
    "qwen2_moe": "mixtures.qwen2_moe",
    "qwen3_next": "hybrids.qwen3_next",
    "deepseek_v2": "mixtures.deepseek_v2",
    "deepseek_v3": "mixtures.deepseek_v3",
    "glm4_moe_lite": "mixtures.deepseek_v3",
    "kimi_k2": "mixtures.deepseek_v3",
    "mistral4": "mixtures.mistral4",
    "youtu": "mixtures.youtu",
    "qwen3_5_text": "hybrids.qwen3_5",
    "qwen3_5_moe_text": "hybrids.qwen3_5_moe",
    "ministral3": "dense.ministral3",
    "gemma": "dense.gemma",
    "gemma2": "dense.gemma2",
    "gemma3_text": "dense.gemma3",
    "gemma4_text": "dense.gemma4",
    "phi3": "dense.phi3",
    "glm": "dense.glm",
    "glm4": "dense.glm4",
    "glm4_moe": "mixtures.glm4_moe",
    "gpt_oss": "mixtures.gpt_oss",
    "minimax_m2": "mixtures.minimax_m2",
    "granite": "dense.granite",
    "granitemoe": "mixtures.granite_moe",
    "granitemoehybrid": "hybrids.granite_hybrid",
    "bamba": "hybrids.bamba",
    "falcon_h1": "hybrids.falcon_h1",
    "nemotron_h": "hybrids.nemotron_h",
    "olmo2": "dense.olmo2",
    "olmo3": "dense.olmo3",
    "olmoe": "mixtures.olmoe",
    "olmo_hybrid": "hybrids.olmo_hybrid",
    "lfm2": "hybrids.lfm2",
    "cohere": "dense.cohere",
    "cohere2": "dense.cohere2",
    "smollm3": "dense.smollm3",
    "starcoder2": "dense.starcoder2",
    "nemotron": "dense.nemotron",
    "exaone4": "dense.exaone4",
    "helium": "dense.helium",
    "seed_oss": "dense.seed_oss",
    "arcee": "dense.arcee",
    "ernie4_5": "dense.ernie",
    "hunyuan_v1_dense": "dense.hunyuan",
}
# Families whose config.json may leave out keys that follow from others.
COMPLETED = {
    "nemotron_h": "hybrids.nemotron_h_layers",
    "qwen3_5_moe_text": "mixtures.routed_inner_size",
}
# Multimodal models → the family of their language model, if `text_config` does not name it.
MULTIMODAL = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "lfm2_vl": "lfm2",
}
TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
}
PARTLY_ROTATED = (
    "phi3",
    "mistral4",
    "glm",
    "glm4",
    "glm4_moe",
    "minimax_m2",
    "nemotron",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "bamba",
)  # the families that read `partial_rotary_factor`


def family_fields(model_type: str) -> Callable[[Json, int], Fields]:
    """The function of a family in `FAMILIES`."""
    function: Callable[[Json, int], Fields] = named(__package__, FAMILIES[model_type])
    return function


def completed(config: Json) -> Json:
    """config.json with the keys that its family may leave out."""
    name = COMPLETED.get(config["model_type"])
    whole: Json = config if name is None else named(__package__, name)(config)
    return whole
