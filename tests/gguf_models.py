"""Tiny checkpoints of transformers written as GGUF: as llama.cpp's conversion does it, names by the `gguf` package."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from .loaders.gguf_writing import write_gguf

Json = Mapping[str, Any]
SIGMOID = 2  # llama.cpp's number of a router's function


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


def _qwen35(config: Json) -> dict[str, Any]:
    return {
        **_rotary_share(config),
        **({"rope.dimension_sections": [*sections, 0]} if (sections := _rope(config).get("mrope_section")) else {}),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": 4,
        "block_count": config["num_hidden_layers"] + config.get("mtp_num_hidden_layers", 0),
        **({"nextn_predict_layers": 1} if config.get("mtp_num_hidden_layers") else {}),
    }


def _num_experts(config: Json) -> dict[str, Any]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next(config[name] for name in names if name in config)
    return {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}


def _inner_experts(config: Json) -> dict[str, Any]:
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    return {**_num_experts(config), "expert_feed_forward_length": inner}


def _qwen_experts(config: Json) -> dict[str, Any]:
    return {
        **_inner_experts(config),
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
    }


def _minimax_m2(config: Json) -> dict[str, Any]:
    return {**_inner_experts(config), "expert_gating_func": SIGMOID, **_rotary_share(config)}


def _glm4_moe(config: Json) -> dict[str, Any]:
    return {
        **_minimax_m2(config),
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "leading_dense_block_count": config["first_k_dense_replace"],
    }


def _lfm2(config: Json) -> dict[str, Any]:
    is_attention = [kind == "full_attention" for kind in config["layer_types"]]
    inner = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
    multiple = config["block_multiple_of"]
    return {
        "attention.head_count_kv": [config["num_key_value_heads"] if each else 0 for each in is_attention],
        "attention.layer_norm_rms_epsilon": float(config["norm_eps"]),
        "feed_forward_length": (inner + multiple - 1) // multiple * multiple,
        "shortconv.l_cache": config["conv_L_cache"],
    }


def _mamba(config: Json) -> dict[str, Any]:
    heads, size = config["mamba_n_heads"], config["mamba_d_head"]
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": heads * size,
        "ssm.time_step_rank": heads,
    }


def _granite_hybrid(config: Json) -> dict[str, Any]:
    kinds, shared = config["layer_types"], config["shared_intermediate_size"]
    experts = {**_num_experts(config), "expert_shared_feed_forward_length": shared}
    return {
        **_granite(config),
        **_mamba(config),
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        **(experts if config["num_local_experts"] else {"feed_forward_length": shared}),
        "rope.scaling.finetuned": False,
    }


def _nemotron_h(config: Json) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    return {
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "feed_forward_length": [config["intermediate_size"] * (kind == "mlp") for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }


def _deepseek2(config: Json) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    is_v3, weight = config["model_type"] == "deepseek_v3", _rope(config).get("mscale_all_dim")
    return {
        **_inner_experts(config),
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        **({"attention.q_lora_rank": config["q_lora_rank"]} if config["q_lora_rank"] else {}),
        "rope.dimension_count": rotated,
        **({"rope.scaling.yarn_log_multiplier": 0.1 * weight} if weight else {}),
        "expert_shared_count": config["n_shared_experts"],
        "expert_gating_func": SIGMOID if is_v3 else 1,
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "leading_dense_block_count": config["first_k_dense_replace"],
        **({"expert_group_count": config["n_group"]} if is_v3 else {}),
        **({"expert_group_used_count": config["topk_group"]} if is_v3 else {}),
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
    "mixtral": Written("llama", _num_experts, has_paired_heads=True),
    "qwen3_moe": Written("qwen3moe", _inner_experts),
    "qwen2_moe": Written("qwen2moe", _qwen_experts),
    "olmoe": Written("olmoe", _num_experts),
    "gpt_oss": Written("gpt-oss", lambda config: {**_inner_experts(config), **_window(config)}),
    "glm4_moe": Written("glm4moe", _glm4_moe),
    "minimax_m2": Written("minimax-m2", _minimax_m2),
    "deepseek_v2": Written("deepseek2", _deepseek2),
    "deepseek_v3": Written("deepseek2", _deepseek2),
    "granitemoe": Written("granitemoe", lambda config: {**_granite(config), **_num_experts(config)}, True),
    "qwen3_5_moe_text": Written("qwen35moe", lambda c: {**_qwen35(c), **_qwen_experts(c)}, has_shifted_norms=True),
    "qwen3_next": Written("qwen3next", lambda c: {**_qwen35(c), **_qwen_experts(c)}, has_shifted_norms=True),
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
    "qwen3_5_text": Written("qwen35", _qwen35, has_shifted_norms=True),
    "granitemoehybrid": Written("granitehybrid", _granite_hybrid, has_paired_heads=True),
    "falcon_h1": Written("falcon-h1", _mamba),
    "nemotron_h": Written("nemotron_h", _nemotron_h, eps="layer_norm_epsilon"),
    "lfm2": Written("lfm2", _lfm2, eps="norm_eps"),
}


def write_model(
    path: Path,
    config: Json,
    tensors: Mapping[str, Tensor],
    kinds: Mapping[str, str] = {},
    vocabulary: Mapping[str, Any] | None = None,
    blocks: Mapping[str, np.ndarray] = {},
) -> Path:
    """The GGUF file of a model: config as transformers' `to_dict` has it, tensors by Hugging Face's names.

    kinds: a part of a tensor's name in GGUF → its type; the others are F32. vocabulary: metadata of the tokenizer; None
    is two letters and their merge. blocks: bytes of tensors by their names in GGUF, in place of their numbers.
    """
    written = WRITTEN[config["model_type"]]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == written.arch)
    config = {"num_hidden_layers": len(config.get("layers_block_type") or ()), **config}
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"] + config.get("mtp_num_hidden_layers", 0))
    content = {
        name.replace(".dt_bias", ".dt_proj.bias"): _changed(name, tensor, config, written)
        for name, tensor in _parts(tensors, config)
    }
    if config["tie_word_embeddings"]:
        content.pop("lm_head.weight", None)
    scalars = [name for name in content if name.endswith("layer_scalar")]
    content |= {f"{name}.weight": content.pop(name) for name in scalars}
    renamed = {
        names.get_name(name, try_suffixes=(".weight", ".bias")) or name: array for name, array in content.items()
    }
    renamed |= {**_factors(config), **blocks}
    types = {name: kind for name in renamed for part, kind in kinds.items() if part in name}
    metadata = {f"{written.arch}.{key}": value for key, value in _metadata(config, written).items()}
    tokenizer = _letters(config) if vocabulary is None else vocabulary
    return write_gguf(path, written.arch, {**metadata, **tokenizer}, renamed, types)


def _parts(tensors: Mapping[str, Tensor], config: Json) -> Iterator[tuple[str, Tensor]]:
    """Tensors by the names that llama.cpp's conversion knows; it splits Granite 4's MLP, and experts' inputs."""
    shared_mlp = "mlp.shared_expert" if config.get("num_local_experts") else "mlp"  # Granite 4's
    for name, tensor in tensors.items():
        if ".experts." in name:
            yield from _expert_parts(name.replace("block_sparse_moe", "mlp"), tensor, config)
        elif name.endswith("kv_b_proj.weight"):
            sizes = config["qk_nope_head_dim"], config["v_head_dim"]
            of_keys, of_values = tensor.view(config["num_attention_heads"], sum(sizes), -1).split(sizes, 1)
            yield name.replace("kv_b", "k_b"), of_keys.transpose(1, 2)
            yield name.replace("kv_b", "v_b"), of_values
        elif name.endswith("in_proj_qkvz.weight"):
            yield from _ungrouped(name, tensor, config)
        elif name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"{shared_mlp}.{part}"), half
        else:
            is_backbone = config["model_type"] == "nemotron_h" and name.startswith("model.")
            stored = name.replace("model.", "backbone.", 1) if is_backbone else name
            stored = stored.replace("mlp.e_score", "mlp.gate.e_score").replace("correction_bias", "correction.bias")
            stored = stored.replace("block_sparse_moe.router", "mlp.gate").replace(".sinks", ".sinks.weight")
            is_vector = stored.endswith("shared_expert_gate.weight")
            yield (
                stored.replace("shared_mlp.output_linear", f"{shared_mlp}.down_proj"),
                (tensor[0] if is_vector else tensor),
            )


def _expert_parts(name: str, tensor: Tensor, config: Json) -> Iterator[tuple[str, Tensor]]:
    """Of tensors [experts, …]; gpt-oss has inputs before outputs, and rows of gate and `up` by turns."""
    base, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
    suffix, is_other = "bias" if is_bias else "weight", config["model_type"] == "gpt_oss"
    if is_other and not is_bias:
        tensor = tensor.transpose(1, 2)
    if base.endswith("down_proj"):
        yield f"{base}.{suffix}", tensor
    else:
        halves = (tensor[:, ::2], tensor[:, 1::2]) if is_other else tensor.chunk(2, 1)
        for part, half in zip(("gate", "up"), halves, strict=True):
            yield base.replace("gate_up_proj", f"{part}_proj.{suffix}"), half


def _ungrouped(name: str, tensor: Tensor, config: Json) -> Iterator[tuple[str, Tensor]]:
    """Qwen3-Next's matrix of queries, keys, values and gates of each key head: the gates apart, then the rest."""
    key_heads, key_size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_value_head_dim"] * config["linear_num_value_heads"] // key_heads
    pieces = tensor.view(key_heads, -1, tensor.shape[1]).split([key_size, key_size, values, values], 1)
    *mixed, gates = (piece.flatten(0, 1) for piece in pieces)
    yield name.replace("qkvz", "z"), gates
    yield name.replace("qkvz", "qkv"), torch.cat(mixed)


def _changed_mamba(name: str, array: np.ndarray, config: Json) -> np.ndarray:
    """A in place of its logarithm, dimensions of groups and of one input channel, and Falcon-H1's factors."""
    if name.endswith("A_log"):
        return -np.exp(array)[:, None]
    if name.endswith(".D"):
        return array[:, None]
    if name.endswith("conv1d.weight"):
        return array.squeeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return array.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    return array * _falcon_factors(name, config) if config["model_type"] == "falcon_h1" else array


def _falcon_factors(name: str, config: Json) -> Any:
    factors = {
        "down_proj.weight": config["mlp_multipliers"][1],
        "gate_proj.weight": config["mlp_multipliers"][0],
        "k_proj.weight": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj.weight": config["attention_in_multiplier"],
        "v_proj.weight": config["attention_in_multiplier"],
        "o_proj.weight": config["attention_out_multiplier"],
        "out_proj.weight": config["ssm_out_multiplier"],
        "lm_head.weight": config["lm_head_multiplier"],
        "embed_tokens.weight": config["embedding_multiplier"],
    }
    if name.endswith("in_proj.weight"):
        groups = config["mamba_n_groups"] * config["mamba_d_state"]
        widths = [config["mamba_d_ssm"]] * 2 + [groups] * 2 + [config["mamba_n_heads"]]
        return config["ssm_in_multiplier"] * np.repeat(np.float32(config["ssm_multipliers"]), widths)[:, None]
    return np.float32(next((factor for end, factor in factors.items() if name.endswith(end)), 1.0))


def _changed(name: str, tensor: Tensor, config: Json, written: Written) -> np.ndarray:
    array = tensor.float().numpy()
    for projection, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if written.has_paired_heads and f".{projection}." in name:
            heads = config[key]
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
    if config["model_type"] in ("granitemoehybrid", "falcon_h1", "nemotron_h"):
        return _changed_mamba(name, array, config)
    if "linear_attn." in name:
        return _changed_delta_net(name, array, config)
    if name.endswith("conv.conv.weight"):
        array = array.squeeze(1)
    return array + 1 if written.has_shifted_norms and name.endswith("norm.weight") else array


def _changed_delta_net(name: str, array: np.ndarray, config: Json) -> np.ndarray:
    """llama.cpp sorts value heads by their place among those of a key head (`_reorder_v_heads`)."""
    if config["model_type"] == "qwen3_next":
        return -np.exp(array) if "A_log" in name else array.squeeze(1) if "conv1d" in name else array
    key_heads = config["linear_num_key_heads"]
    num_keys = 2 * key_heads * config["linear_key_head_dim"]

    def sorted_heads(numbers: np.ndarray) -> np.ndarray:
        by_head = numbers.reshape(key_heads, config["linear_num_value_heads"] // key_heads, -1, *numbers.shape[1:])
        return by_head.swapaxes(0, 1).reshape(numbers.shape)

    if "norm" in name:
        return array
    if "in_proj_qkv" in name or "conv1d" in name:
        array = array.reshape(len(array), -1)
        return np.concatenate((array[:num_keys], sorted_heads(array[num_keys:])))
    if "out_proj" in name:
        return sorted_heads(array.T).T
    return sorted_heads(-np.exp(array) if "A_log" in name else array)


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
