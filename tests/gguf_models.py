"""Tiny checkpoints of transformers written as GGUF: as llama.cpp's conversion does it, names by the `gguf` package."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from .loaders.gguf_writing import write_gguf

Json = Mapping[str, Any]


def _rope(config: Json) -> dict[str, Any]:
    """transformers 5 has one dictionary, or one for each kind of layer."""
    said = config.get("rope_parameters") or {}
    return dict(said.get("full_attention", said))


def _window(config: Json) -> dict[str, Any]:
    return {"attention.sliding_window": config["sliding_window"]} if config.get("sliding_window") else {}


def _gemma2(config: Json) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": float(config["attn_logit_softcapping"]),
        "final_logit_softcapping": float(config["final_logit_softcapping"]),
        **_window(config),
    }


def _gemma3(config: Json) -> dict[str, Any]:
    return {
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        **_window(config),
    }


def _gemma4(config: Json) -> dict[str, Any]:
    layers, (full, *_) = range(config["num_hidden_layers"]), config["per_layer_config"].values()
    is_full = [kind == "full_attention" for kind in config["layer_types"]]
    own = len(layers) - config["num_kv_shared_layers"]
    wide = [config["intermediate_size"] * (2 if i >= own else 1) for i in layers]
    kv_heads = config["num_key_value_heads"], full.get("num_key_value_heads", config["num_key_value_heads"])
    return {
        **_gemma3(config),
        "attention.sliding_window_pattern": [not each for each in is_full],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.head_count_kv": [kv_heads[each] for each in is_full],
        "feed_forward_length": wide if config["use_double_wide_mlp"] else config["intermediate_size"],
        "final_logit_softcapping": float(config["final_logit_softcapping"]),
        **{f"attention.{each}_length": full["head_dim"] for each in ("key", "value")},
        **{f"attention.{each}_length_swa": config["head_dim"] for each in ("key", "value")},
        "rope.dimension_count": full["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
    }


def _rotary_share(config: Json) -> dict[str, Any]:
    share = _rope(config).get("partial_rotary_factor", 1.0)
    return {"rope.dimension_count": int(share * _head_dim(config))}


def _granite(config: Json) -> dict[str, Any]:
    return {
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "attention.scale": float(config["attention_multiplier"]),
        "logit_scale": float(config["logits_scaling"]),
    }


def _cohere(config: Json) -> dict[str, Any]:
    return {"logit_scale": float(config["logit_scale"]), **_window(config)}


def _ministral3(config: Json) -> dict[str, Any]:
    rope = _rope(config)
    return {
        "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
        "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
    }


@dataclass(frozen=True)
class Written:
    """How llama.cpp writes a family. arch: its name there. differences: of the metadata."""

    arch: str
    differences: Callable[[Json], dict[str, Any]] = lambda config: {}
    has_paired_heads: bool = False
    has_shifted_norms: bool = False
    eps: str = "rms_norm_eps"
    fused: Mapping[str, str] = field(default_factory=dict)


WRITTEN = {
    "llama": Written("llama", has_paired_heads=True),
    "mistral": Written("llama", has_paired_heads=True),
    "ministral3": Written("mistral3", _ministral3, has_paired_heads=True),
    "qwen2": Written("qwen2"),
    "qwen3": Written("qwen3"),
    "gemma2": Written("gemma2", _gemma2, has_shifted_norms=True),
    "gemma3_text": Written("gemma3", _gemma3, has_shifted_norms=True),
    "gemma4_text": Written("gemma4", _gemma4),
    "phi3": Written("phi3", lambda config: {**_rotary_share(config), **_window(config)}),
    "glm4": Written("glm4", _rotary_share),
    "granite": Written("granite", _granite, has_paired_heads=True),
    "olmo2": Written("olmo2"),
    "olmo3": Written("olmo2", _window),
    "cohere": Written("command-r", _cohere, eps="layer_norm_eps"),
    "cohere2": Written("cohere2", _cohere, eps="layer_norm_eps"),
    "smollm3": Written("smollm3", has_paired_heads=True),
    "starcoder2": Written("starcoder2", eps="norm_epsilon"),
    "nemotron": Written("nemotron", _rotary_share, has_shifted_norms=True, eps="norm_eps"),
    "exaone4": Written("exaone4", _window),
}


def write_model(
    path: Path,
    config: Json,
    tensors: Mapping[str, Tensor],
    kinds: Mapping[str, str] = {},
    vocabulary: Mapping[str, Any] | None = None,
) -> Path:
    """The GGUF file of a model: config as transformers' `to_dict` has it, tensors by Hugging Face's names.

    kinds: a part of a tensor's name in GGUF → its type; the others are F32. vocabulary: metadata of the tokenizer; None
    is two letters and their merge.
    """
    written = WRITTEN[config["model_type"]]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == written.arch)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    content = {name: _changed(name, tensor, config, written) for name, tensor in tensors.items()}
    if config["tie_word_embeddings"]:
        content.pop("lm_head.weight", None)
    scalars = [name for name in content if name.endswith("layer_scalar")]
    content |= {f"{name}.weight": content.pop(name) for name in scalars}
    renamed = {names.get_name(name, try_suffixes=(".weight", ".bias")): array for name, array in content.items()}
    renamed |= _factors(config)
    types = {name: kind for name in renamed for part, kind in kinds.items() if part in name}
    metadata = {f"{written.arch}.{key}": value for key, value in _metadata(config, written).items()}
    tokenizer = _letters(config) if vocabulary is None else vocabulary
    return write_gguf(path, written.arch, {**metadata, **tokenizer}, renamed, types)


def _changed(name: str, tensor: Tensor, config: Json, written: Written) -> np.ndarray:
    array = tensor.float().numpy()
    for projection, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if written.has_paired_heads and f".{projection}." in name:
            heads = config[key]
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
    return array + 1 if written.has_shifted_norms and name.endswith("norm.weight") else array


def _head_dim(config: Json) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _metadata(config: Json, written: Written) -> dict[str, Any]:
    eps_key = "layer_norm_rms_epsilon" if written.eps == "rms_norm_eps" else "layer_norm_epsilon"
    rope = _rope(config)
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        f"attention.{eps_key}": float(config[written.eps]),
        "rope.dimension_count": _head_dim(config),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "vocab_size": config["vocab_size"],
        **_scaling(config),
        **written.differences(config),
    }


def _scaling(config: Json) -> dict[str, Any]:
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        usual = 0.1 * math.log(rope["factor"]) + 1
        given = rope.get("attention_factor")
        return {
            **({"rope.scaling.attn_factor": given / usual} if given else {}),
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(config["max_position_embeddings"] / original) / math.log(original))
        return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": factor}
    return {}


def _factors(config: Json) -> dict[str, np.ndarray]:
    """What llama.cpp keeps of Llama 3's and of Phi's scaling: divisors of each frequency."""
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        kinds = ("long", "short")
        return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], dtype=np.float32) for kind in kinds}
    if rope.get("rope_type") == "proportional":
        half = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        turning = int(half * rope["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * (half - turning), dtype=np.float32)}
    if rope.get("rope_type") != "llama3":
        return {}
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, _head_dim(config), 2).double() / _head_dim(config))
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": (1 / (kept + (1 - kept) / factor)).float().numpy()}


def _letters(config: Json) -> dict[str, Any]:
    """Two letters and their merge, and names for the other ids."""
    size = config["vocab_size"]
    tokens = ["<end>", "a", "b", "ab", *(f"<{i}>" for i in range(4, size))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (size - 1),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
