"""Families of models, as data: each family's differences from Llama's layout.

A family is an entry of `FAMILIES`, a function from its config.json to the differing fields of `ModelConfig`. It also
has an entry of `DEFAULTS` if its defaults for missing keys differ from Llama's in transformers.
The source is transformers' configuration and modeling files (5.23).
"""

from __future__ import annotations

from collections.abc import Callable

from ..config_values import Json
from .dense import (
    arcee,
    cohere,
    cohere2,
    ernie,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4,
    granite,
    helium,
    hunyuan,
    llama,
    ministral3,
    mistral,
    nemotron,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
    starcoder2,
)
from .hybrids import (
    bamba,
    falcon_h1,
    granite_hybrid,
    lfm2,
    nemotron_h,
    nemotron_h_layers,
    olmo_hybrid,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)
from .mixtures import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    granite_moe,
    minimax_m2,
    mistral4,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    routed_inner_size,
    youtu,
)
from .reading import Fields

# To add a family, add one entry: its config.json → the differing fields of ModelConfig.
FAMILIES: dict[str, Callable[[Json, int], Fields]] = {
    "llama": llama,
    "mistral": mistral,
    "ministral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "qwen2_moe": qwen2_moe,
    "qwen3_next": qwen3_next,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "glm4_moe_lite": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "mistral4": mistral4,
    "youtu": youtu,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "ministral3": ministral3,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "phi3": phi3,
    "glm": glm,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "minimax_m2": minimax_m2,
    "granite": granite,
    "granitemoe": granite_moe,
    "granitemoehybrid": granite_hybrid,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmoe": olmoe,
    "olmo_hybrid": olmo_hybrid,
    "lfm2": lfm2,
    "cohere": cohere,
    "cohere2": cohere2,
    "smollm3": smollm3,
    "starcoder2": starcoder2,
    "nemotron": nemotron,
    "exaone4": exaone4,
    "helium": helium,
    "seed_oss": seed_oss,
    "arcee": arcee,
    "ernie4_5": ernie,
    "hunyuan_v1_dense": hunyuan,
}
# Families whose config.json may leave out keys that follow from others.
COMPLETED: dict[str, Callable[[Json], Json]] = {
    "nemotron_h": nemotron_h_layers,
    "qwen3_5_moe_text": routed_inner_size,
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
