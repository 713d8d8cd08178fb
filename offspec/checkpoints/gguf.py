"""GGUF files as checkpoints: llama.cpp's names of tensors and metadata → Hugging Face's, family by family.

The sources are llama.cpp's conversion (convert_hf_to_gguf.py, gguf-py's constants) and its reader (llama-model.cpp,
`load_hparams`); `ARCHITECTURES` is the inverse of both. llama.cpp changes some weights. Such a tensor has a `Change`,
which the weight formats undo, so a copy made from a GGUF file is a normal checkpoint again. This module reads only
headers and the few numbers that scale RoPE.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offspec.loaders.files.checkpoint import (
    Change,
    Checkpoint,
    CheckpointView,
    Order,
    TensorInfo,
    as_config_json,
    fault,
    reading,
    show,
)
from offspec.loaders.files.gguf_file import GgufModel, Metadata, read_metadata

from ..model.config_values import MAX_LAYERS
from ..model.names import EMBEDDING, FINAL_NORM, HEAD, INPUT_NORM, INPUT_PROJECTION, INPUT_TABLE, in_layer
from ..text.gguf_tokenizer import read_gguf
from ..text.tokenizer_files import as_files

MOST_ROPE_NUMBERS = 4096  # half a head's dimensions; models have 64
ATTENTION_FACTOR = "rope.scaling.attn_factor"
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)", re.DOTALL)
_ONE_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d{1,6})")  # in files of 2023 and 2024, a tensor of its own
_UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SHARED = {
    "token_embd.weight": EMBEDDING,
    "output.weight": HEAD,
    "output_norm.weight": FINAL_NORM,
    "per_layer_token_embd.weight": INPUT_TABLE,
    "per_layer_model_proj.weight": INPUT_PROJECTION,
    "per_layer_proj_norm.weight": INPUT_NORM,
}
# Recommended sampling → its name in generation_config.json.
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
STILL = 1e20  # divisors of RoPE's frequencies above it mean that a pair does not turn

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_NORMS_AROUND = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_ATTENTION,
    **_MLP,
    **_NORMS_AROUND,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
}
_NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LLAMA = {**_ATTENTION, **_MLP, **_NORMS}


def _experts(prefix: str, router: str = "gate") -> dict[str, str]:
    """Names of a router and of matrices [experts, …]."""
    parts = ("gate", "up", "down", "gate_up")
    return {
        "ffn_gate_inp": f"{prefix}.{router}",
        **{f"ffn_{part}_exps": f"{prefix}.experts.{part}_proj" for part in parts},
    }


def _shared_experts(prefix: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"{prefix}.{part}_proj" for part in ("gate", "up", "down")}


_EXPERTS = _experts("mlp")
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_QWEN_EXPERTS = {**_EXPERTS, **_shared_experts("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_GRANITE_EXPERTS = _experts("block_sparse_moe", "router.layer")
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_out": "linear_attn.out_proj",
    "ssm_norm": "linear_attn.norm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
}
_QWEN35 = {
    **_ATTENTION,
    **_DELTA_NET,
    **_MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
_LFM2 = {
    **_ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
}
_MAMBA = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_GRANITE_HYBRID = {
    **_ATTENTION,
    **_NORMS,
    **{name: f"mamba.{tensor}" for name, tensor in _MAMBA.items()},
    **_GRANITE_EXPERTS,
    **dict.fromkeys(("ffn_gate", "ffn_gate_shexp"), "shared_mlp.gate_linear"),
    **dict.fromkeys(("ffn_up", "ffn_up_shexp"), "shared_mlp.up_linear"),
    **dict.fromkeys(("ffn_down", "ffn_down_shexp"), "shared_mlp.output_linear"),
}
_FALCON_H1 = {
    **_ATTENTION,
    **{name: f"mamba.{tensor}" for name, tensor in _MAMBA.items()},
    **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    "attn_norm": "input_layernorm",
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
}
_NEMOTRON_H = {
    **{name: tensor.replace("self_attn", "mixer") for name, tensor in _ATTENTION.items()},
    **{name: f"mixer.{tensor}" for name, tensor in _MAMBA.items()},
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "attn_norm": "norm",
}
_BY_GROUP = (".ssm_a", ".ssm_d", ".ssm_norm.weight")  # vectors to which llama.cpp gives a second dimension
_OF_HEADS = (".attn_k_b.weight", ".attn_v_b.weight")  # a matrix for each head
_SIGMOID = 2  # llama.cpp's number of a router's function
_ONE_ROW = ".ffn_gate_inp_shexp.weight"  # a matrix that llama.cpp stores as a vector
_CONVOLUTIONS = (".ssm_conv1d", ".shortconv.conv")  # llama.cpp drops their dimension of one input channel
_MTP = {  # of a layer behind the others, which drafts
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "nextn.shared_head_head": "lm_head",
    "nextn.embed_tokens": "embed_tokens",
}


class Keys:
    """The metadata of one architecture; each value is checked when it is read. Raises CheckpointError.

    tensors: names of the file's.
    """

    def __init__(self, path: Path, metadata: Metadata, arch: str, tensors: Collection[str]) -> None:
        self.path, self.arch, self._metadata, self.tensors = path, arch, metadata, tensors
        self._suffixes = {name.split(".", 2)[-1] for name in tensors}

    def has_tensor(self, name: str) -> bool:
        """Whether some layer has a tensor of this name."""
        return name in self._suffixes

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self._metadata

    def value(self, key: str) -> Any:
        return self._metadata.get(f"{self.arch}.{key}")

    def token_id(self, name: str) -> int | None:
        """None if the file names none; without the field, config.json would mean the family's default."""
        token_id = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        return token_id if isinstance(token_id, int) and not isinstance(token_id, bool) else None

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A number of at least `least`, or a list of equal ones; in it, layers without such a part have 0."""
        value = self.value(key)
        numbers = [item for item in value if item != 0] if isinstance(value, list) else []
        if numbers and all(item == numbers[0] for item in numbers):
            value = numbers[0]
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            why = "; a value per layer is not supported" if isinstance(value, list) else ""
            raise fault(self.path, f"{self.arch}.{key} must be an integer of at least {least}, not {show(value)}{why}")
        return value

    @property
    def num_layers(self) -> int:
        """Of all layers, also those of MTP; at most MAX_LAYERS: lists have an entry for each."""
        count = self.integer("block_count")
        if count > MAX_LAYERS:
            description = f"{self.arch}.block_count {count} exceeds the limit of {MAX_LAYERS}"
            raise fault(self.path, f"{description}; download it again")
        return count

    def by_layer(self, key: str, count: int, least: int = 1) -> list[int]:
        """A number of at least `least` for each of `count` layers; one number is every layer's."""
        value = self.value(key)
        if not isinstance(value, list):
            return [self.integer(key, least=least)] * count
        if len(value) != count or not all(isinstance(item, int) and item >= least for item in value):
            raise fault(self.path, f"{self.arch}.{key} must list {count} integers from {least} on, not {show(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise fault(self.path, f"{self.arch}.{key} must be a number, not {show(value)}; download it again")
        return float(value)


Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores one family of models.

    model_type: the family's in Hugging Face's config.json. names: of the tensors in a layer, whole or without .weight
    and .bias. differences: the family's additional fields of config.json. differs_by_layer: it reads
    lists of sizes by layer (`Keys.by_layer`). has_paired_heads: Q's and K's rows are in llama.cpp's order. norm_offset:
    llama.cpp added this to the weights of norms. change: of other tensors. shared: whole names of tensors outside the
    layers, if they differ. has_rope: config.json describes RoPE.
    """

    model_type: str
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    differences: Callable[[Keys, Config], Config] = lambda keys, config: {}
    has_paired_heads: bool = False
    norm_offset: float = 0.0
    differs_by_layer: bool = False
    change: Callable[[str, Config], Change | None] = lambda name, config: None
    shared: Mapping[str, str] = field(default_factory=dict)
    eps_key: str = "rms_norm_eps"
    has_rope: bool = True


# ------------------------------------------------------------------------------------------------------------ families


def _windows(keys: Keys, config: Config, period: int, default: int | None = None) -> Config:
    """Fields for sliding windows. Every `period`-th layer has none, unless the file lists the layers.

    default: the window if the file does not name one.
    """
    window = keys.value("attention.sliding_window")
    if not (default if window is None else window):
        return {"sliding_window": None}
    listed, count = keys.value("attention.sliding_window_pattern"), config["num_hidden_layers"]
    if isinstance(listed, int) and not isinstance(listed, bool) and listed > 0:
        period = listed
    has_window = [i % period < period - 1 for i in range(count)]
    if isinstance(listed, list) and len(listed) == count:
        has_window = [bool(item) for item in listed]
    kinds = ["sliding_attention" if each else "full_attention" for each in has_window]
    return {"sliding_window": keys.integer("attention.sliding_window", default), "layer_types": kinds}


def _partial_rotary(keys: Keys, config: Config) -> Config:
    """The field for RoPE on a part of a head."""
    return {"partial_rotary_factor": keys.integer("rope.dimension_count", config["head_dim"]) / config["head_dim"]}


def _gemma_scale(config: Config, largest: int) -> int:
    """The query's scale. llama.cpp recognises the largest model, which has another scale, by its number of layers."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(keys: Keys, config: Config) -> Config:
    """Early files of Gemma 2 name neither caps nor a window; these defaults are llama.cpp's."""
    return {
        "query_pre_attn_scalar": _gemma_scale(config, 46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        **_windows(keys, config, 2, default=4096),
    }


def _gemma3(keys: Keys, config: Config) -> Config:
    return {
        "query_pre_attn_scalar": _gemma_scale(config, 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        **_windows(keys, config, 6),
    }


def _gemma4(keys: Keys, config: Config) -> Config:
    """Layers with full attention have other heads; the file lists what differs (conversion of Gemma4Model)."""
    layers = config["num_hidden_layers"]
    windows = _windows(keys, config, 6)
    is_full = [kind == "full_attention" for kind in windows.get("layer_types", [])]
    kv_heads, inner = keys.by_layer("attention.head_count_kv", layers), keys.by_layer("feed_forward_length", layers)
    head_dims = [keys.integer("attention.key_length" if full else "attention.key_length_swa") for full in is_full]
    if windows["sliding_window"] is None or all(is_full):
        raise fault(keys.path, f"{keys.arch} has no layers with a sliding window, which is not supported")
    local = is_full.index(False)
    if keys.integer("rope.dimension_count_swa", head_dims[local]) != head_dims[local]:
        raise fault(keys.path, f"{keys.arch}.rope.dimension_count_swa other than a whole head is not supported")
    num_shared = keys.integer("attention.shared_kv_layers", 0, least=0)
    wide = [inner[0] * (2 if layer >= layers - num_shared else 1) for layer in range(layers)]
    if inner not in (wide, [inner[0]] * layers):
        raise fault(keys.path, f"{keys.arch}.feed_forward_length {show(inner)} is not supported")
    first_full = is_full.index(True) if True in is_full else 0
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")  # `rope_parameters` take their place
    divisors = (scaling or {}).get("long_factor", [])
    turning = sum(divisor < STILL for divisor in divisors) / len(divisors) if divisors else 0.25
    return {
        **windows,
        "head_dim": head_dims[local],
        "num_key_value_heads": kv_heads[local],
        "intermediate_size": inner[0],
        "per_layer_config": {
            str(layer): {"head_dim": head_dims[layer], "num_key_value_heads": kv_heads[layer]}
            for layer in range(layers)
            if is_full[layer]
        },
        "attention_k_eq_v": is_full[first_full] and f"blk.{first_full}.attn_v.weight" not in keys.tensors,
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": inner != [inner[0]] * layers,
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": turning},
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)},
        },
    }


def _num_experts(keys: Keys, name: str = "num_local_experts") -> Config:
    """name: of the number of experts in the family's config.json."""
    return {name: keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count")}


def _llama(keys: Keys, config: Config) -> Config:
    """With experts, the model is a Mixtral."""
    if not keys.value("expert_count"):
        return {}
    return {"model_type": "mixtral", "sliding_window": None, **_num_experts(keys)}


def _qwen2_moe(keys: Keys, config: Config) -> Config:
    """Early files have one inner size: that of all experts that a row uses."""
    inner, used = keys.integer("feed_forward_length"), keys.integer("expert_used_count")
    return {
        **_num_experts(keys, "num_experts"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", max(1, inner // used)),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", inner),
        "norm_topk_prob": False,
    }


def _deepseek_experts(keys: Keys) -> Config:
    """The fields that DeepSeek's and GLM's mixtures have: the first layers are dense."""
    return {
        **_num_experts(keys, "n_routed_experts"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, least=0),
        "n_shared_experts": keys.integer("expert_shared_count", 0, least=0),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "norm_topk_prob": bool(keys.value("expert_weights_norm")),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
    }


def _deepseek2(keys: Keys, config: Config) -> Config:
    """DeepSeek-V2, or V3, whose router has a sigmoid. Files since April 2025 have matrices of keys and of values."""
    has_sigmoid, num_groups = keys.value("expert_gating_func") == _SIGMOID, keys.integer("expert_group_count", 1)
    rotated, is_split = keys.integer("rope.dimension_count"), keys.has_tensor("attn_k_b.weight")
    key_length, value_length = (f"attention.{name}_length{'_mla' if is_split else ''}" for name in ("key", "value"))
    scaling = config.get("rope_scaling")
    if scaling:
        weight = keys.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        scaling = {key: value for key, value in scaling.items() if key != "attention_factor"}
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    return {
        **_deepseek_experts(keys),
        "model_type": "deepseek_v3" if has_sigmoid else "deepseek_v2",
        "head_dim": rotated,
        "q_lora_rank": keys.integer("attention.q_lora_rank") if keys.has_tensor("attn_q_a.weight") else None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.integer(key_length) - rotated,
        "v_head_dim": keys.integer(value_length),
        "num_key_value_heads": config["num_attention_heads"],
        "topk_method": "noaux_tc" if has_sigmoid else "group_limited_greedy" if num_groups > 1 else "greedy",
        "rope_scaling": scaling,
        "has_split_latent": is_split,
    }


def _granite(keys: Keys, config: Config) -> Config:
    return {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _olmo2(keys: Keys, config: Config) -> Config:
    """With sliding windows, the model is OLMo 3."""
    return {"model_type": "olmo3", **_windows(keys, config, 4)} if keys.value("attention.sliding_window") else {}


def _cohere(keys: Keys, config: Config) -> Config:
    return {"logit_scale": keys.number("logit_scale", 0.0625), "tie_word_embeddings": True}


def _mistral3(keys: Keys, config: Config) -> Config:
    """Mistral 3's language model: Ministral 3 if queries are scaled by position, else a plain Mistral."""
    if not keys.has("attention.temperature_scale"):
        return {"sliding_window": None}
    scaling = {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {"rope_type": "default"})}
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    return {
        "model_type": "ministral3",
        "sliding_window": None,
        "rope_scaling": None,
        "rope_parameters": {
            **scaling,
            "original_max_position_embeddings": original,
            "llama_4_scaling_beta": keys.number("attention.temperature_scale"),
        },
    }


def _qwen35(keys: Keys, config: Config) -> Config:
    """The layers behind `num_hidden_layers` are of multi-token prediction."""
    num_layers = config["num_hidden_layers"] - keys.integer("nextn_predict_layers", 0, least=0)
    heads = keys.integer("ssm.time_step_rank")
    interval, listed = keys.integer("full_attention_interval", 4), keys.value("attention.recurrent_layers")
    is_recurrent = [(i + 1) % interval != 0 for i in range(num_layers)]
    if isinstance(listed, list) and len(listed) >= num_layers:
        is_recurrent = [bool(item) for item in listed[:num_layers]]
    return {
        "num_hidden_layers": num_layers,
        "layer_types": ["linear_attention" if each else "full_attention" for each in is_recurrent],
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": max(1, keys.integer("ssm.inner_size") // heads),
        **_partial_rotary(keys, config),
    }


def _qwen35_moe(keys: Keys, config: Config) -> Config:
    inner = keys.integer("expert_feed_forward_length")
    return {
        **_qwen35(keys, config),
        **_num_experts(keys, "num_experts"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", inner),
        "norm_topk_prob": True,
    }


def _change_of_delta_net(name: str, config: Config) -> Change | None:
    """llama.cpp sorts value heads by their place among those of one key head, and stores A instead of its logarithm."""
    key_heads, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    num_keys = 2 * key_heads * config["linear_key_head_dim"]

    def order(run: int = 1, kept: int = 0) -> Order | None:
        return None if config["linear_num_value_heads"] == key_heads else Order(key_heads, run=run, kept=kept)

    changes = {
        "in_proj_qkv.weight": Change(rows=order(size, num_keys)),
        "conv1d.weight": Change(rows=order(size, num_keys)),
        "in_proj_z.weight": Change(rows=order(size)),
        "out_proj.weight": Change(columns=order(size)),
        **dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight", "dt_bias"), Change(rows=order())),
        "A_log": Change(rows=order(), is_negative_exp=True),
    }
    change = changes.get(name.rpartition("linear_attn.")[2])
    return None if change == Change() else change


def _lfm2(keys: Keys, config: Config) -> Config:
    """Layers without key heads have a short convolution. The MLP's size is final."""
    if keys.value("attention.sliding_window"):
        raise fault(keys.path, "has sliding windows, which are not supported for lfm2")
    heads = keys.by_layer("attention.head_count_kv", config["num_hidden_layers"], least=0)
    return {
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if count else "conv" for count in heads],
    }


def _mamba(keys: Keys) -> Config:
    """The fields of Mamba2, by the names of Granite 4 H and Falcon-H1."""
    heads, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": max(1, inner // heads),
        "mamba_d_ssm": inner,
        "mamba_expand": max(1, inner // keys.integer("embedding_length")),
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has_tensor("ssm_in.bias"),
        "attention_bias": keys.has_tensor("attn_q.bias"),
        "mlp_bias": keys.has_tensor("ffn_up.bias"),
    }


def _granite_hybrid(keys: Keys, config: Config) -> Config:
    """Layers without key heads are Mamba2. llama.cpp splits the MLP's matrix of gate and input."""
    key_heads = keys.by_layer("attention.head_count_kv", config["num_hidden_layers"], least=0)
    experts = {"num_local_experts": 0, "shared_intermediate_size": config["intermediate_size"]}
    if keys.value("expert_count"):
        inner = keys.integer("expert_shared_feed_forward_length")
        experts = {**_num_experts(keys), "shared_intermediate_size": inner}
    return {
        **_granite(keys, config),
        **_mamba(keys),
        "layer_types": ["full_attention" if count else "linear_attention" for count in key_heads],
        "position_embedding_type": "rope" if keys.value("rope.scaling.finetuned") else "nope",
        **experts,
        "has_split_mlp": True,
    }


def _nemotron_h(keys: Keys, config: Config) -> Config:
    """A layer has key heads, an MLP, or neither, and is Mamba2 then."""
    layers = config["num_hidden_layers"]
    key_heads, inner = (keys.by_layer(f, layers, least=0) for f in ("attention.head_count_kv", "feed_forward_length"))
    kinds = [
        "full_attention" if heads else "mlp" if size else "linear_attention"
        for heads, size in zip(key_heads, inner, strict=True)
    ]
    shape = _mamba(keys)
    return {
        "layers_block_type": kinds,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": shape["mamba_n_heads"],
        "mamba_head_dim": shape["mamba_d_head"],
        "n_groups": shape["mamba_n_groups"],
        "ssm_state_size": shape["mamba_d_state"],
        "conv_kernel": shape["mamba_d_conv"],
        "use_conv_bias": shape["mamba_conv_bias"],
        "use_bias": shape["mamba_proj_bias"],
        "attention_bias": shape["attention_bias"],
        "mlp_bias": shape["mlp_bias"],
    }


def _change_of_decay(name: str, config: Config) -> Change | None:
    return Change(is_negative_exp=True) if name.endswith(".A_log") else None


_GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}

# By llama.cpp's names.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", {**_LLAMA, **_MIXTRAL_EXPERTS}, _llama, has_paired_heads=True),
    "mistral3": Architecture("mistral", differences=_mistral3, has_paired_heads=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {**_LLAMA, **_EXPERTS},
        lambda keys, config: {
            **_num_experts(keys, "num_experts"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
            "norm_topk_prob": True,
        },
    ),
    "qwen2moe": Architecture("qwen2_moe", {**_LLAMA, **_QWEN_EXPERTS}, _qwen2_moe),
    "olmoe": Architecture(
        "olmoe",
        {**_LLAMA, **_EXPERTS},
        lambda keys, config: {**_num_experts(keys, "num_experts"), "norm_topk_prob": False},
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **_ATTENTION,
            **_experts("mlp", "router"),
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        # Every second layer has a window. YaRN's borders are not rounded, as in the original.
        lambda keys, config: {
            **_num_experts(keys),
            **_windows(keys, config, 2),
            "intermediate_size": keys.integer("expert_feed_forward_length"),
            "rope_scaling": {**scaling, "truncate": False} if (scaling := config.get("rope_scaling")) else None,
            "has_split_experts": True,
        },
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        {**_LLAMA, **_MIXTRAL_EXPERTS, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        lambda keys, config: {
            **_num_experts(keys),
            "intermediate_size": keys.integer("expert_feed_forward_length"),
            **_partial_rotary(keys, config),
        },
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {
            **_ATTENTION,
            **_MLP,
            **_EXPERTS,
            **_shared_experts("mlp.shared_experts"),
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            **_MTP,
        },
        # The layers behind `num_hidden_layers` are of multi-token prediction.
        lambda keys, config: {
            **_deepseek_experts(keys),
            "num_hidden_layers": config["num_hidden_layers"] - keys.integer("nextn_predict_layers", 0, least=0),
            **_partial_rotary(keys, config),
        },
    ),
    "gemma2": Architecture("gemma2", {**_ATTENTION, **_MLP, **_NORMS_AROUND}, _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", {**_ATTENTION, **_MLP, **_NORMS_AROUND}, _gemma3, norm_offset=1.0),
    "gemma4": Architecture("gemma4_text", _GEMMA4, _gemma4, differs_by_layer=True),
    "phi3": Architecture(
        "phi3",
        {**_ATTENTION, "attn_qkv": "self_attn.qkv_proj", **_FUSED_MLP, **_NORMS},
        lambda keys, config: {
            "sliding_window": keys.value("attention.sliding_window") or None,
            "original_max_position_embeddings": keys.integer(
                "rope.scaling.original_context_length", config["max_position_embeddings"]
            ),
            **_partial_rotary(keys, config),
        },
    ),
    "glm4": Architecture("glm4", {**_ATTENTION, **_FUSED_MLP, **_GLM4_NORMS}, _partial_rotary),
    "granite": Architecture("granite", differences=_granite, has_paired_heads=True),
    "deepseek2": Architecture(
        "deepseek_v3",
        {
            **_LLAMA,
            **_EXPERTS,
            **_shared_experts("mlp.shared_experts"),
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
        },
        _deepseek2,
    ),
    "granitemoe": Architecture(
        "granitemoe",
        {**_LLAMA, **_GRANITE_EXPERTS},
        lambda keys, config: {**_granite(keys, config), **_num_experts(keys), "has_split_mlp": True},
        has_paired_heads=True,
    ),
    "olmo2": Architecture("olmo2", {**_ATTENTION, **_MLP, **_NORMS_BEHIND}, _olmo2),
    "command-r": Architecture("cohere", differences=_cohere, eps_key="layer_norm_eps"),
    "cohere2": Architecture(
        "cohere2",
        differences=lambda keys, config: {**_cohere(keys, config), **_windows(keys, config, 4)},
        eps_key="layer_norm_eps",
    ),
    "smollm3": Architecture(
        "smollm3",
        # Every fourth layer has no RoPE; llama.cpp's files do not state this.
        differences=lambda keys, config: {
            "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
        },
        has_paired_heads=True,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {**_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj", **_NORMS},
        lambda keys, config: {
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "sliding_window": keys.value("attention.sliding_window") or None,
        },
        eps_key="norm_epsilon",
    ),
    "nemotron": Architecture(
        "nemotron",
        differences=lambda keys, config: {"hidden_act": "relu2", **_partial_rotary(keys, config)},
        norm_offset=1.0,
        eps_key="norm_eps",
    ),
    "exaone4": Architecture(
        "exaone4", {**_ATTENTION, **_MLP, **_NORMS_BEHIND}, lambda keys, config: _windows(keys, config, 4)
    ),
    "qwen35": Architecture("qwen3_5_text", {**_QWEN35, **_MTP}, _qwen35, norm_offset=1.0, change=_change_of_delta_net),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        {**_QWEN35, **_QWEN_EXPERTS, **_MTP},
        _qwen35_moe,
        norm_offset=1.0,
        change=_change_of_delta_net,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        {**_QWEN35, **_QWEN_EXPERTS, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
        # Early files have the original's one matrix of queries, keys, values and gates.
        lambda keys, config: {**_qwen35_moe(keys, config), "has_split_inputs": not keys.has_tensor("ssm_in.weight")},
        norm_offset=1.0,
        change=_change_of_decay,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid", _GRANITE_HYBRID, _granite_hybrid, has_paired_heads=True, change=_change_of_decay
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        _FALCON_H1,
        # llama.cpp multiplies the factors into the weights.
        lambda keys, config: {
            **_mamba(keys),
            "mamba_rms_norm": keys.has_tensor("ssm_norm.weight"),
            "mamba_norm_before_gate": False,
            "projectors_bias": keys.has_tensor("ssm_out.bias"),
        },
        change=_change_of_decay,
        shared={"output_norm.weight": "model.final_layernorm.weight"},
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        _NEMOTRON_H,
        _nemotron_h,
        change=_change_of_decay,
        shared={"token_embd.weight": "model.embeddings.weight", "output_norm.weight": "model.norm_f.weight"},
        has_rope=False,
    ),
    "lfm2": Architecture(
        "lfm2",
        _LFM2,
        _lfm2,
        shared=dict.fromkeys(("token_embd_norm.weight", "output_norm.weight"), "model.embedding_norm.weight"),
    ),
}


def _target_layers(keys: Keys) -> list[int]:
    """The target's layers whose inputs the head reads, counted from 0."""
    layers = keys.value("target_layers") or keys.value("extract_layers")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise fault(keys.path, f"{keys.arch}.target_layers must list layers, not {show(layers)}")
    return layers


def _dflash(keys: Keys, config: Config) -> Config:
    """With a Markov head, the head is DSpark's."""
    is_dspark = "markov_w1.weight" in keys.tensors
    return {
        "architectures": ["DFlashDraftModel"],
        **_windows(keys, config, 1),
        "use_sliding_window": True,
        "block_size": keys.integer("block_size"),
        "dflash_config": {
            "mask_token_id": keys.token_id("mask"),
            "target_layer_ids": [layer - 1 for layer in _target_layers(keys)],
            "output_multiplier": keys.value("logit_scale"),
            "final_logit_softcapping": keys.value("final_logit_softcapping"),
            "sample_from_anchor": keys.value("sample_from_anchor") if keys.has("sample_from_anchor") else is_dspark,
        },
    }


# Heads that draft for a model in another file, by llama.cpp's names (src/models/eagle3.cpp, dflash.cpp).
HEADS: dict[str, Architecture] = {
    "eagle3": Architecture(
        "llama",
        {**_LLAMA, "attn_norm_2": "hidden_norm"},
        lambda keys, config: {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_aux_hidden_state_layer_ids": _target_layers(keys),
            "norm_before_residual": bool(keys.value("norm_before_residual")),
        },
        has_paired_heads=True,
    ),
    "dflash": Architecture(
        "qwen3",
        differences=_dflash,
        shared={
            "enc.output_norm.weight": "hidden_norm.weight",
            "markov_w1.weight": "markov_head.markov_w1.weight",
            "markov_w2.weight": "markov_head.markov_w2.weight",
            "conf_proj.weight": "confidence_head.proj.weight",
            "conf_proj.bias": "confidence_head.proj.bias",
        },
    ),
}


# ---------------------------------------------------------------------------------------------------------- translation


@dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF model under Hugging Face's names (a `checkpoint.Checkpoint`)."""

    model: GgufModel
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    notes: tuple[str, ...] = ()
    generation_config: Mapping[str, Any] = field(default_factory=dict)  # without end tokens: the tokenizer knows them

    @property
    def path(self) -> Path:
        return self.model.path

    @property
    def tokenizer_path(self) -> Path:
        return self.model.tokenizer_path

    def companions(self) -> dict[str, bytes]:
        """The tokenizer and the sampling, as the files of a folder. Raises TokenizerError, UnsupportedModelError."""
        files = as_files(*read_gguf(read_metadata(self.tokenizer_path), self.tokenizer_path))
        config = {**json.loads(files.get("generation_config.json", "{}")), **self.generation_config}
        return {**files, "generation_config.json": as_config_json(config)} if config else files

    def config_json(self) -> bytes:
        return as_config_json(self.config)


# `general.file_type` of llama.cpp's include/llama.h (`llama_ftype`).
_FROM_7_ON = (
    *("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"),
    *("IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M"),
    *("IQ4_XS", "IQ1_M", "BF16"),
)
_FILE_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", **dict(enumerate(_FROM_7_ON, 7)), 38: "MXFP4"}
_SIZE_LABEL = re.compile(r"(?:\d{1,3}x)?\d{1,4}(?:\.\d{1,3})?[KMBT](?:-A\d{1,4}(?:\.\d{1,3})?[KMBT])?")


def gguf_labels(checkpoint: Checkpoint) -> tuple[str | None, str | None]:
    """The model's size and the mixture of types as a GGUF file names them, "1.5B" and "Q4_K_M"; None for what it lacks.

    Its tensors say less: a tied head is stored twice, and a mixture has several types.
    """
    while isinstance(checkpoint, CheckpointView):
        checkpoint = checkpoint.whole
    if not isinstance(checkpoint, GgufCheckpoint):
        return None, None
    metadata = checkpoint.model.metadata
    size, number = metadata.get("general.size_label"), metadata.get("general.file_type")
    is_size = isinstance(size, str) and _SIZE_LABEL.fullmatch(size) is not None
    return size if is_size else None, _FILE_TYPES.get(number) if type(number) is int else None


def translated(model: GgufModel) -> GgufCheckpoint:
    """The model under Hugging Face's names. Raises CheckpointError for an unsupported model."""
    path, metadata = model.path, model.metadata
    arch = metadata.get("general.architecture")
    if metadata.get("general.type", "model") != "model" or arch == "clip":
        raise fault(
            path, f"is not a language model, but {show(metadata.get('general.type', arch))}; choose the model's file"
        )
    if is_head(model):
        raise fault(path, f"is a head ({arch}), which drafts for a model; give it as the draft of its model")
    kind = _architecture(path, arch)
    if metadata.get(f"{arch}.expert_count") and "ffn_gate_inp" not in kind.names:
        description = f"is a mixture of experts of {arch}, which is not supported in GGUF files"
        raise fault(path, f"{description}; use its safetensors checkpoint with pip install 'offspec[transformers]'")
    return _checkpoint(model, str(arch), kind)


def _architecture(path: Path, arch: object) -> Architecture:
    """The supported architecture of this name. Raises CheckpointError."""
    if isinstance(arch, str) and arch in ARCHITECTURES:
        return ARCHITECTURES[arch]
    description = f"has the architecture {show(arch)}, which is not supported in GGUF files"
    raise fault(path, f"{description}; supported: {', '.join(ARCHITECTURES)}; use the original safetensors checkpoint")


def is_head(model: GgufModel) -> bool:
    """Whether the file has a head instead of a model, or a model's MTP layer without the model's layers."""
    if model.metadata.get("general.architecture") in HEADS:
        return True
    layers = [match for name in model.tensors if (match := _LAYER.fullmatch(name))]
    return any(each[2].startswith("nextn.") for each in layers) and all(int(each[1]) for each in layers)


def translated_head(model: GgufModel) -> GgufCheckpoint:
    """The head under its project's names. Raises CheckpointError.

    An MTP layer's file may have copies of the target's embedding and head, which are left out.
    """
    arch = str(model.metadata.get("general.architecture"))
    if arch in HEADS:
        return _checkpoint(model, arch, HEADS[arch])
    checkpoint = _checkpoint(model, arch, _architecture(model.path, arch))
    layer = {name: info for name, info in checkpoint.tensors.items() if name.startswith("mtp.")}
    return replace(checkpoint, tensors=layer)


def _checkpoint(model: GgufModel, arch: str, kind: Architecture) -> GgufCheckpoint:
    config = _config(Keys(model.path, model.metadata, arch, model.tensors), kind, model)
    tensors: dict[str, TensorInfo] = {}
    for name, info in model.tensors.items():
        if name in _UNUSED or name.endswith(".attn_rot_embd.weight"):
            continue
        named = _translated(info, kind, config)
        if tensors.setdefault(named.name, named) is not named:
            description = f"has {show(named.name)} twice, once as tensor {show(info.name)}"
            raise fault(info.path, f"{description}; the file is damaged, download it again")
    # The sampling's numbers as they were before they were stored in 32 bits.
    # Drop the vocabulary's lists (8 MiB for 49,000 tokens), so that they do not stay in memory with the model.
    sampling = {
        _SAMPLING[key]: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in model.metadata.items()
        if key in _SAMPLING
    }
    return GgufCheckpoint(replace(model, metadata=model.config), config, tensors, generation_config=sampling)


def _translated(info: TensorInfo, kind: Architecture, config: Config) -> TensorInfo:
    """The tensor under Hugging Face's name. An unknown tensor keeps its name, and the decoder refuses it."""
    base, _, suffix = info.name.rpartition(".")
    if match := _LAYER.fullmatch(info.name):
        name = _name_in_layer(int(match[1]), match[2], kind, config["num_hidden_layers"])
    else:
        name = {**_SHARED, **kind.shared}.get(info.name) or (
            FINAL_NORM.replace("weight", suffix) if base == "output_norm" else info.name
        )
    is_flat = base.endswith(_CONVOLUTIONS) and len(info.shape) == 2
    shape = (info.shape[0], 1, info.shape[1]) if is_flat else info.shape
    if info.name.endswith(_BY_GROUP):
        shape = (math.prod(shape),)
    if info.name.endswith(_OF_HEADS) and len(shape) == 3:
        shape = (shape[0] * shape[1], shape[2])
    if info.name.endswith(_ONE_ROW):
        shape = (1, math.prod(shape))
    return replace(info, name=name, shape=shape, change=_change(info.name, name, kind, config))


def _name_in_layer(layer: int, name: str, kind: Architecture, num_layers: int) -> str:
    """Under Hugging Face's names, layers behind the last one are `mtp`'s."""
    base, _, suffix = name.rpartition(".")
    if match := _ONE_EXPERT.fullmatch(base):
        experts, _, matrix = kind.names.get(f"{match[1]}_exps", match[1]).rpartition(".")
        return in_layer(layer, f"{experts}.{match[2]}.{matrix}.{suffix}")
    short = kind.names.get(name) or f"{kind.names.get(base, base)}.{suffix}"
    if layer < num_layers or "nextn.eh_proj" not in kind.names:
        return in_layer(layer, short)
    return f"mtp.{short}" if base.startswith("nextn.") else f"mtp.layers.{layer - num_layers}.{short}"


def names_of(stored_names: Collection[str], model_type: str, num_layers: int) -> dict[str, str]:
    """llama.cpp's names of a model's matrices → Hugging Face's; {} for a model of which no GGUF file is known."""
    kind = next((each for each in ARCHITECTURES.values() if each.model_type == model_type), None)
    if kind is None:
        return {}
    matches = {name: match for name in stored_names if (match := _LAYER.fullmatch(name))}
    in_layers = {name: _name_in_layer(int(match[1]), match[2], kind, num_layers) for name, match in matches.items()}
    return in_layers | {name: _SHARED[name] for name in stored_names if name in _SHARED}


def _change(stored_name: str, name: str, kind: Architecture, config: Config) -> Change | None:
    """stored_name: llama.cpp's. name: Hugging Face's."""
    if (change := kind.change(name, config)) is not None:
        return change
    if kind.has_paired_heads and (match := re.search(r"self_attn\.(q|k)_proj\.(weight|bias)$", name)):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        return Change(rows=Order(2, groups=heads))
    if kind.norm_offset and stored_name.endswith("norm.weight") and not stored_name.endswith(".ssm_norm.weight"):
        return Change(added=kind.norm_offset)
    return None


_CLASSES = {  # Hugging Face's names of models that do not follow from model_type
    "granitemoe": "GraniteMoe",
    "granitemoehybrid": "GraniteMoeHybrid",
    "minimax_m2": "MiniMaxM2",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_5_text": "Qwen3_5",
    "smollm3": "SmolLM3",
}


def _config(keys: Keys, kind: Architecture, model: GgufModel) -> Config:
    """The fields of config.json."""
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    eps_key = "attention.layer_norm_rms_epsilon" if kind.eps_key == "rms_norm_eps" else "attention.layer_norm_epsilon"
    names = model.tensors.keys()
    table, tokens = model.tensors.get("token_embd.weight"), model.metadata.get("tokenizer.ggml.tokens")
    # A head that shares its target's embedding may say no more than the tokenizer's list.
    vocab_size = len(tokens) if isinstance(tokens, list) else None
    config: Config = {
        "model_type": kind.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": heads,
        "head_dim": keys.integer("attention.key_length", max(1, hidden // heads)),
        "max_position_embeddings": keys.integer("context_length"),
        "vocab_size": table.shape[0] if table is not None else keys.integer("vocab_size", vocab_size),
        kind.eps_key: keys.number(eps_key, 1e-5),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        "torch_dtype": "bfloat16",
        "bos_token_id": keys.token_id("bos"),
        "eos_token_id": keys.token_id("eos"),
        "pad_token_id": keys.token_id("padding"),
    }
    if not kind.differs_by_layer:
        config["intermediate_size"] = keys.integer("feed_forward_length", keys.value("expert_feed_forward_length"))
        config["num_key_value_heads"] = keys.integer("attention.head_count_kv", heads)
    if kind.has_rope:
        config |= {"rope_theta": keys.number("rope.freq_base", 10000.0), "rope_scaling": _rope_scaling(keys, model)}
    config |= kind.differences(keys, config)
    name = "".join(part.capitalize() for part in config["model_type"].removesuffix("_text").split("_"))
    return {"architectures": [f"{_CLASSES.get(config['model_type'], name)}ForCausalLM"], **config}


# ----------------------------------------------------------------------------------------------------------------- RoPE


def _rope_scaling(keys: Keys, model: GgufModel) -> Config | None:
    """The field rope_scaling of config.json; None without scaling."""
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    long, short = (_numbers(model, f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    if long is not None and short is not None:
        given = {"attention_factor": keys.number(ATTENTION_FACTOR)} if keys.has(ATTENTION_FACTOR) else {}
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short, **given}
    if (divisors := _numbers(model, "rope_freqs.weight")) is not None:  # Llama 3.1's scaling, computed beforehand
        factors = {"long_factor": divisors, "short_factor": divisors, "original_max_position_embeddings": original}
        return {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, **factors}
    factor_number = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    kind = keys.value("rope.scaling.type")
    if kind is None and factor_number != 1.0:  # files of 2023 have no type, and call the factor scale_linear
        kind = "linear"
    if kind == "yarn":
        # As in llama.cpp, the file's factor multiplies the usual one; mscale_all_dim changes the usual one's divisor.
        named = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        settings = {name: keys.number(key) for name, key in named.items() if keys.has(key)}
        if keys.has(ATTENTION_FACTOR) or keys.has("rope.scaling.yarn_log_multiplier"):
            magnitude = 0.1 * math.log(max(factor_number, 1.0))
            divisor = 1.0 + magnitude * keys.number("rope.scaling.yarn_log_multiplier", 0.0)
            settings["attention_factor"] = keys.number(ATTENTION_FACTOR, 1.0) * (1.0 + magnitude) / divisor
        return {"original_max_position_embeddings": original, "rope_type": "yarn", "factor": factor_number, **settings}
    if keys.number(ATTENTION_FACTOR, 1.0) != 1.0:
        raise fault(keys.path, f"{keys.arch}.{ATTENTION_FACTOR} is supported with YaRN and LongRoPE only")
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor_number}
    description = f"{keys.arch}.rope.scaling.type {show(kind)} is not supported"
    raise fault(keys.path, f"{description}; supported: none, linear, yarn")


def _numbers(model: GgufModel, name: str) -> list[float] | None:
    """The contents of a small fp32 tensor; None if it is missing, or the file has its header only."""
    info = model.tensors.get(name)
    if info is None:
        return None
    if info.dtype != "F32" or len(info.shape) != 1 or info.shape[0] > MOST_ROPE_NUMBERS:
        raise fault(info.path, f"tensor {show(name)} is {info.dtype} {list(info.shape)}, not RoPE factors")
    with reading(info.path), info.path.open("rb") as file:
        file.seek(info.offset)
        content = file.read(info.nbytes)
    return list(struct.unpack(f"<{info.shape[0]}f", content)) if len(content) == info.nbytes else None
