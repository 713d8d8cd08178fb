"""Families some of whose layers keep a state: delta nets, Mamba2, short convolutions; some have experts, too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offspec.loaders.files.checkpoint import show

from ...errors import CheckpointError, UnsupportedModelError
from ..config_values import EPS_RANGE, Json, interval, number_in, numbers, positive
from ..rope_config import FULL, LINEAR, has_null_theta, read_rope, read_rotary_share
from ..shapes import (
    FEED_FORWARD,
    GROUPED_DELTA,
    GROUPED_RATES,
    NORMS_BEFORE,
    NORMS_BEHIND,
    OLMO_DELTA,
    SHARED_MLP,
    SPLIT_SHARED_MLP,
    DeltaShape,
    MambaShape,
    MlpNames,
    Multipliers,
    NormPlaces,
    QKNorm,
    ShortConvolutionShape,
)
from .dense import granite, olmo2
from .mixtures import granite_experts, qwen_experts
from .reading import Fields, biases, expert_layers

# Kinds of layers of hybrids with Mamba2, by their names in config.json.
NEMOTRON_H_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
MIXERS = {"mamba": "mamba", LINEAR: "mamba", "attention": "attention", FULL: "attention", "mlp": "mlp"}
# Kinds of layers in `layer_types` → the part beside the MLP; attention is the second.
DELTA_NETS = {LINEAR: "delta net", FULL: "attention"}
SHORT_CONVOLUTIONS = {"conv": "short convolution", FULL: "attention"}


def qwen3_5(config: Json, num_layers: int) -> Fields:
    """Gated delta nets in most layers; attention with a gate in the others, and RoPE for a share of each head."""
    interval = positive(config, "full_attention_interval", 4)
    mixers = _mixers(config, num_layers, DELTA_NETS, [(i + 1) % interval == 0 for i in range(num_layers)])
    bias, rope = bool(config.get("attention_bias")), read_rope(config)
    of_text = {key: value for key, value in rope.scaling.items() if not key.startswith("mrope")}  # that is of images
    return {
        "rope": replace(rope, scaling=of_text),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "norm": "rms plus one",
        "head_dim": positive(config, "head_dim", 256),
        "rotary_share": read_rotary_share(config),
        "has_attention_gate": True,
        "delta": DeltaShape(
            num_heads=positive(config, "linear_num_value_heads", 32),
            value_size=positive(config, "linear_value_head_dim", 128),
            key_heads=positive(config, "linear_num_key_heads", 16),
            key_size=positive(config, "linear_key_head_dim", 128),
            kernel=positive(config, "linear_conv_kernel_dim", 4),
            norm_eps=number_in(config, "rms_norm_eps", 1e-6, EPS_RANGE),
        ),
        "parts": tuple((mixer, "mlp") for mixer in mixers),
    }


def qwen3_5_moe(config: Json, num_layers: int) -> Fields:
    """Qwen3.5-MoE: Qwen3.5's layers, with experts in all of them."""
    fields = qwen3_5(config, num_layers)
    experts = qwen_experts({**config, "norm_topk_prob": True})
    return fields | {"experts": experts, "parts": tuple((mixer, "experts") for mixer, _ in fields["parts"])}


def qwen3_next(config: Json, num_layers: int) -> Fields:
    """Qwen3-Next: Qwen3.5's layers with other matrices, and experts in those that Qwen's keys name."""
    fields, second = qwen3_5(config, num_layers), expert_layers(config, num_layers)
    return fields | {
        "delta": replace(fields["delta"], names=GROUPED_RATES if config.get("has_split_inputs") else GROUPED_DELTA),
        "experts": qwen_experts(config),
        "parts": tuple((mixer, part) for (mixer, _), (_, part) in zip(fields["parts"], second, strict=True)),
    }


def _mixers(config: Json, num_layers: int, parts: Mapping[str, str], attends: Sequence[bool]) -> list[str]:
    """Each layer's part beside its MLP. parts: kinds in `layer_types` → parts; attends: without `layer_types`."""
    kinds, (other, attention) = config.get("layer_types"), parts
    if kinds is None:
        kinds = [attention if each else other for each in attends]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in tuple(parts) for kind in kinds):
        raise CheckpointError(f"config.json: layer_types must list {num_layers} of {', '.join(parts)}")
    return [parts[kind] for kind in kinds]


def _mamba_mixers(config: Json, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer of a hybrid with Mamba2, under its old name or transformers 5's."""
    kinds = config.get("layers_block_type") or config.get("layer_types") or ["mamba"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types must list {num_layers} layers (num_hidden_layers)")
    if unknown := [kind for kind in kinds if not isinstance(kind, str) or kind not in MIXERS]:
        description = f"layer type {show(unknown[0])} is not supported for {config['model_type']}"
        raise UnsupportedModelError(f"{description}; supported: {', '.join(MIXERS)}")
    return tuple(MIXERS[kind] for kind in kinds)


def _mamba(config: Json, inner: int, **differing: Any) -> MambaShape:
    """Mamba2 by the keys of Granite 4 H, Bamba and Falcon-H1. inner: numbers of all heads' inputs of a row."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {show(config['hidden_act'])} is not supported behind a convolution")
    heads = positive(config, "mamba_n_heads", 128)
    size = config.get("mamba_d_head", "auto")
    shape = MambaShape(
        num_heads=heads,
        head_size=max(1, inner // heads) if size == "auto" else positive(config, "mamba_d_head"),
        num_groups=positive(config, "mamba_n_groups", 1),
        state_size=positive(config, "mamba_d_state", 256),
        kernel=positive(config, "mamba_d_conv", 4),
        step_limits=interval(config, "time_step_limit", (0.0, math.inf)),
        has_conv_bias=bool(config.get("mamba_conv_bias", True)),
        has_in_bias=bool(config.get("mamba_proj_bias")),
        has_out_bias=bool(config.get("mamba_proj_bias")),
    )
    if shape.inner != inner:
        description = f"config.json: mamba_n_heads {heads} times mamba_d_head {shape.head_size} must be {inner}"
        raise CheckpointError(f"{description} (mamba_expand times hidden_size, or mamba_d_ssm)")
    return _checked(replace(shape, **differing))


def _checked(shape: MambaShape) -> MambaShape:
    if shape.num_heads % shape.num_groups:
        description = (
            f"config.json: {shape.num_heads} heads of Mamba2 are not a multiple of its {shape.num_groups} groups"
        )
        raise CheckpointError(description)
    return shape


def _expanded(config: Json) -> int:
    return positive(config, "mamba_expand", 2) * positive(config, "hidden_size")


def granite_hybrid(config: Json, num_layers: int) -> Fields:
    """Mamba2 or attention, and one MLP, or experts beside it; in some models attention in each layer."""
    mixers, shared_size = _mamba_mixers(config, num_layers), positive(config, "shared_intermediate_size")
    has_experts = bool(config.get("num_local_experts"))
    if (position := config.get("position_embedding_type")) not in ("rope", "nope", None):
        raise UnsupportedModelError(f"position_embedding_type {position!r} is not supported")
    return granite(config, num_layers) | {
        "mlp_bias": False,
        "intermediate_size": shared_size,
        "experts": granite_experts(config, shared_size) if has_experts else None,
        "mlp": SPLIT_SHARED_MLP if config.get("has_split_mlp") else SHARED_MLP,
        "unrotated": () if position == "rope" else tuple(range(num_layers)),
        "mamba": _mamba(config, _expanded(config)) if "mamba" in mixers else None,
        "parts": tuple((mixer, "experts" if has_experts else "mlp") for mixer in mixers),
    }


def bamba(config: Json, num_layers: int) -> Fields:
    """Mamba2 in all layers but those that `attn_layer_indices` lists."""
    indices = config.get("attn_layer_indices") or []
    if not isinstance(indices, list):
        raise CheckpointError(f"config.json: attn_layer_indices must be a list, not {show(indices)}")
    mixers = tuple("attention" if i in indices else "mamba" for i in range(num_layers))
    return biases(config) | {
        "norms": NormPlaces(before_mlp="pre_ff_layernorm"),
        "mlp": FEED_FORWARD,
        "final_norm": "model.final_layernorm.weight",
        "rotary_share": read_rotary_share(config),
        "mamba": _mamba(config, _expanded(config)),
        "parts": tuple((mixer, "mlp") for mixer in mixers),
    }


def falcon_h1(config: Json, num_layers: int) -> Fields:
    """Attention and Mamba2 side by side in each layer, and factors almost everywhere."""
    inner = positive(config, "mamba_d_ssm", 1024) if config.get("mamba_d_ssm", 0) is not None else _expanded(config)
    norm = "before gate" if config.get("mamba_norm_before_gate", True) else "after gate"
    gate, down = _factors(config, "mlp_multipliers", 2)
    names = ("attention_in", "attention_out", "ssm_in", "ssm_out")
    factors = {name: number_in(config, f"{name}_multiplier", 1.0) for name in names}
    fields: Fields = {
        "norms": NormPlaces(before_mlp="pre_ff_layernorm"),
        "mlp": FEED_FORWARD,
        "final_norm": "model.final_layernorm.weight",
        "embedding_scale": number_in(config, "embedding_multiplier", 1.0),
        "logit_scale": number_in(config, "lm_head_multiplier", 1.0),
        "multipliers": Multipliers(**factors, gate=gate, down=down, ssm=_factors(config, "ssm_multipliers", 5)),
        "mamba": _mamba(
            config,
            inner,
            has_out_bias=bool(config.get("projectors_bias")),
            norm=norm if config.get("mamba_rms_norm") else None,
        ),
        "parts": (("attention beside mamba", "mlp"),) * num_layers,
    }
    if config.get("key_multiplier") is not None:
        head_dim = positive(
            config, "head_dim", positive(config, "hidden_size") // positive(config, "num_attention_heads")
        )
        fields["attention_scale"] = number_in(config, "key_multiplier", 1.0) * head_dim**-0.5
    return biases(config) | fields


def _factors(config: Json, key: str, count: int) -> tuple[float, ...]:
    factors = numbers(config[key], key) if config.get(key) is not None else (1.0,) * count
    if len(factors) != count:
        raise CheckpointError(f"config.json: {key} must list {count} numbers, not {len(factors)}")
    return factors


def nemotron_h_layers(config: Json) -> Json:
    """A config.json of Nemotron-H that lists its layers and their number: early files have a letter for each layer."""
    kinds, letters = config.get("layers_block_type") or config.get("layer_types"), config.get("hybrid_override_pattern")
    if kinds is None and isinstance(letters, str):
        kinds = [NEMOTRON_H_LETTERS.get(letter, letter) for letter in letters]
    if not isinstance(kinds, list) or not kinds:
        raise CheckpointError("config.json: layers_block_type must list the kinds of layers")
    return {**config, "layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def nemotron_h(config: Json, num_layers: int) -> Fields:
    """Each layer is Mamba2, attention without positions, or an MLP, alone.

    transformers limits dt of a prompt, but not of later tokens, to at least `time_step_min`; llama.cpp does not, and
    neither does this.
    """
    shape = MambaShape(
        num_heads=positive(config, "mamba_num_heads", 128),
        head_size=positive(config, "mamba_head_dim", 64),
        num_groups=positive(config, "n_groups", 8),
        state_size=positive(config, "ssm_state_size", 128),
        kernel=positive(config, "conv_kernel", 4),
        prefix="mixer",
        step_limits=interval(config, "time_step_limit", (0.0, math.inf)),
        has_conv_bias=bool(config.get("use_conv_bias", True)),
        has_in_bias=bool(config.get("use_bias")),
        has_out_bias=bool(config.get("use_bias")),
    )
    if config.get("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"mamba_hidden_act {show(config['mamba_hidden_act'])} is not supported")
    return biases(config) | {
        "rms_norm_eps": number_in(config, "layer_norm_epsilon", 1e-5, EPS_RANGE),
        "head_dim": positive(config, "head_dim", positive(config, "attention_head_dim", 128)),
        "norms": NormPlaces("norm", None, "norm", None),
        "activation": config.get("mlp_hidden_act", "relu2"),
        "mlp": MlpNames(None, "mixer.up_proj", "mixer.down_proj"),
        "attention": "mixer",
        "attention_output": "mixer.o_proj",
        "embedding_table": "model.embeddings.weight",
        "final_norm": "model.norm_f.weight",
        "unrotated": tuple(range(num_layers)),
        "mamba": _checked(shape),
        "parts": tuple((mixer,) for mixer in _mamba_mixers(config, num_layers)),
    }


def olmo_hybrid(config: Json, num_layers: int) -> Fields:
    """OLMo 3's attention, whose norms are behind it, without RoPE as released; gated delta nets with norms before."""
    attends = [i % 4 == 3 for i in range(num_layers)]
    mixers = _mixers(config, num_layers, DELTA_NETS, attends if any(attends) else [*attends[1:], True])
    heads = positive(config, "num_attention_heads")
    key_heads = positive(config, "linear_num_key_heads", heads)
    key_size = positive(config, "linear_key_head_dim", max(1, 3 * positive(config, "hidden_size") // (4 * key_heads)))
    return olmo2(config, num_layers) | {
        "unrotated": tuple(range(num_layers)) if has_null_theta(config) else (),
        "layer_norms": tuple(NORMS_BEHIND if mixer == "attention" else NORMS_BEFORE for mixer in mixers),
        "delta": DeltaShape(
            num_heads=positive(config, "linear_num_value_heads", heads),
            value_size=positive(config, "linear_value_head_dim", 2 * key_size),
            key_heads=key_heads,
            key_size=key_size,
            kernel=positive(config, "linear_conv_kernel_dim", 4),
            norm_eps=1e-5,
            top_rate=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
            names=OLMO_DELTA,
        ),
        "parts": tuple((mixer, "mlp") for mixer in mixers),
    }


def lfm2(config: Json, num_layers: int) -> Fields:
    """Short convolutions in most layers, attention in the others."""
    attending = config.get("full_attn_idxs")
    if not isinstance(attending, list):
        attending = range(num_layers)
    mixers = _mixers(config, num_layers, SHORT_CONVOLUTIONS, [i in attending for i in range(num_layers)])
    return {
        "rms_norm_eps": number_in(config, "norm_eps", 1e-5, EPS_RANGE),
        "activation": "silu",
        "qk_norm": True,
        "qk_norm_form": QKNorm("self_attn.q_layernorm", "self_attn.k_layernorm"),
        "attention_output": "self_attn.out_proj",
        "norms": NormPlaces("operator_norm", None, "ffn_norm", None),
        "final_norm": "model.embedding_norm.weight",
        "mlp": MlpNames("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
        "intermediate_size": _lfm2_inner_size(config),
        "tied_head": bool(config.get("tie_embedding", config["tie_word_embeddings"])),
        "short_convolution": ShortConvolutionShape(positive(config, "conv_L_cache", 3), bool(config.get("conv_bias"))),
        "parts": tuple((mixer, "mlp") for mixer in mixers),
    }


def _lfm2_inner_size(config: Json) -> int:
    """Of the MLP: two thirds of config.json's, times a factor, rounded up, unless it says that its size is final."""
    size = positive(config, "block_ff_dim", positive(config, "intermediate_size"))
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    scaled = int(number_in(config, "block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = positive(config, "block_multiple_of", 256)
    return max(1, -(-scaled // multiple)) * multiple
