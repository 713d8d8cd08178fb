"""Families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offspec.loaders.files.checkpoint import show

from ...errors import CheckpointError, UnsupportedModelError
from ..config_values import Json, integer, number_in, optional_number, positive
from ..rope import yarn_magnitude
from ..rope_config import FULL, SLIDING, read_rope, read_rotary_share
from ..shapes import (
    CLAMPED,
    EXPERT_MLP,
    JOINED_EXPERT_MLP,
    SHARED_EXPERT,
    SHARED_MLP,
    SPLIT_SHARED_MLP,
    ExpertGroups,
    ExpertsShape,
    LatentShape,
    MlpNames,
    QKNorm,
)
from .dense import granite, mistral, query_growth_of, qwen3
from .reading import Fields, alternating_windows, biases, expert_layers, numbers_of_experts, qwen_windows, refuse


def mixtral(config: Json, num_layers: int) -> Fields:
    """Mixtral: the softmax over all experts, then over the sum of the chosen ones."""
    num, num_used = numbers_of_experts(config)
    shape = ExpertsShape(
        num,
        num_used,
        positive(config, "intermediate_size"),
        router="block_sparse_moe.gate",
        prefix="block_sparse_moe.experts",
        names=MlpNames("w1", "w3", "w2"),
    )
    return {**mistral(config, num_layers), "experts": shape, "parts": (("attention", "experts"),) * num_layers}


def qwen3_moe(config: Json, num_layers: int) -> Fields:
    """Qwen3-MoE: Qwen3's attention, with another default of the heads' size."""
    num, num_used = numbers_of_experts(config)
    size = positive(config, "hidden_size") // positive(config, "num_attention_heads")
    config = {**config, "head_dim": positive(config, "head_dim", max(1, size))}
    inner, is_normed = positive(config, "moe_intermediate_size"), bool(config.get("norm_topk_prob", False))
    shape = ExpertsShape(num, num_used, inner, is_normed=is_normed)
    return {**qwen3(config, num_layers), "experts": shape, "parts": expert_layers(config, num_layers)}


def qwen2_moe(config: Json, num_layers: int) -> Fields:
    """Qwen2-MoE: Qwen2's attention, and a shared expert with a gate."""
    # Every second one of the first `max_window_layers` has a window, unless the layers are listed.
    first = integer(config, "max_window_layers", 28, least=0)
    kinds = [SLIDING if i % 2 == 0 and i < first else FULL for i in range(num_layers)]
    listed = kinds if config.get("layer_types") is None else config["layer_types"]
    return {
        "qkv_bias": bool(config.get("qkv_bias", True)),
        "windows": qwen_windows({**config, "layer_types": listed}, num_layers),
        "experts": qwen_experts(config),
        "parts": expert_layers(config, num_layers),
    }


def qwen_experts(config: Json) -> ExpertsShape:
    """Of Qwen2-MoE, Qwen3-Next and Qwen3.5-MoE, with a shared expert that has a gate."""
    num, num_used = numbers_of_experts(config)
    return ExpertsShape(
        num,
        num_used,
        positive(config, "moe_intermediate_size"),
        is_normed=bool(config.get("norm_topk_prob")),
        shared_size=positive(config, "shared_expert_intermediate_size"),
        shared_gate="mlp.shared_expert_gate",
        shared=SHARED_EXPERT,
        joined=JOINED_EXPERT_MLP,
    )


def olmoe(config: Json, num_layers: int) -> Fields:
    """OLMoE: queries and keys are normed over all heads."""
    refuse(config, "clip_qkv")
    num, num_used = numbers_of_experts(config)
    inner, is_normed = positive(config, "intermediate_size"), bool(config.get("norm_topk_prob"))
    return biases(config, mlp="") | {
        "qk_norm": True,
        "qk_norm_form": QKNorm(over="projection"),
        "experts": ExpertsShape(num, num_used, inner, is_normed=is_normed),
        "parts": (("attention", "experts"),) * num_layers,
    }


def gpt_oss(config: Json, num_layers: int) -> Fields:
    """gpt-oss: sinks, biases everywhere, every second layer with a window, and experts with a clamped activation."""
    for key, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.get(key, value) != value:
            raise UnsupportedModelError(f"{key} {show(config[key])} is not supported for gpt_oss, only {value}")
    num, num_used = numbers_of_experts(config)
    is_split = bool(config.get("has_split_experts"))
    shape = ExpertsShape(
        num,
        num_used,
        positive(config, "intermediate_size"),
        scores="softmax of chosen",
        has_bias=True,
        router="mlp.router",
        names=EXPERT_MLP if is_split else MlpNames("gate_up_proj", "gate_up_proj", "down_proj", is_interleaved=True),
        is_transposed=not is_split,
    )
    config = {"sliding_window_pattern": 2, **config}
    return biases(config, mlp="") | {
        "has_sinks": True,
        "windows": alternating_windows(config, num_layers),
        "activation": CLAMPED,
        "experts": shape,
        "parts": (("attention", "experts"),) * num_layers,
    }


def glm4_moe(config: Json, num_layers: int) -> Fields:
    """GLM-4.5 and newer: the first layers are dense."""
    num, num_used = numbers_of_experts(config)
    inner, num_dense = positive(config, "moe_intermediate_size"), integer(config, "first_k_dense_replace", 1, least=0)
    shape = ExpertsShape(
        num,
        num_used,
        inner,
        scores="sigmoid",
        is_normed=bool(config.get("norm_topk_prob", True)),
        scale=number_in(config, "routed_scaling_factor", 1.0),
        groups=_expert_groups(config, num, num_used),
        correction="mlp.gate.e_score_correction_bias",
        has_fp32_router=True,
        shared_size=inner * integer(config, "n_shared_experts", 1, least=0),
    )
    return {
        "qkv_bias": bool(config.get("attention_bias")),
        "qk_norm": bool(config.get("use_qk_norm")),
        "rotary_share": read_rotary_share(config),
        "experts": shape,
        "parts": tuple(("attention", "mlp" if i < num_dense else "experts") for i in range(num_layers)),
    }


def _expert_groups(config: Json, num: int, num_used: int, num_ranked: int = 2) -> ExpertGroups | None:
    """Groups of experts by DeepSeek's keys; None if all of them are used. Raises CheckpointError.

    num_ranked: how many of a group's experts rank it.
    """
    groups = ExpertGroups(positive(config, "n_group", 1), positive(config, "topk_group", 1), num_ranked)
    if groups.num_used >= groups.num:
        return None
    size = num // groups.num
    if num % groups.num or size < groups.num_ranked or groups.num_used * size < num_used:
        used = f"topk_group {groups.num_used} of n_group {groups.num}"
        raise CheckpointError(f"config.json: {used} groups cannot give {num_used} of {num} experts")
    return groups


def minimax_m2(config: Json, num_layers: int) -> Fields:
    """MiniMax-M2: queries and keys are normed over all heads. Releases give RoPE's share as `rotary_dim`."""
    num, num_used = numbers_of_experts(config)
    shape = ExpertsShape(
        num,
        num_used,
        positive(config, "intermediate_size"),
        scores="sigmoid",
        correction="block_sparse_moe.e_score_correction_bias",
        router="block_sparse_moe.gate",
        prefix="block_sparse_moe.experts",
        names=MlpNames("w1", "w3", "w2"),
    )
    share = read_rotary_share(config)
    if config.get("rotary_dim") is not None and share == 1:
        share = positive(config, "rotary_dim") / positive(config, "head_dim")
    return {
        "qk_norm": True,
        "qk_norm_form": QKNorm(over="projection"),
        "rotary_share": share,
        "experts": shape,
        "parts": (("attention", "experts"),) * num_layers,
    }


def _latent(config: Json, dense: Sequence[bool]) -> Fields:
    """Latent attention. dense: which layers have an MLP; the others have experts."""
    if config.get("moe_layer_freq") != 1:
        refuse(config, "moe_layer_freq")
    query_rank = None if config.get("q_lora_rank") is None else positive(config, "q_lora_rank")
    latent = LatentShape(
        rank=positive(config, "kv_lora_rank"),
        query_rank=query_rank,
        key_size=positive(config, "qk_nope_head_dim"),
        rope_size=positive(config, "qk_rope_head_dim"),
        value_size=positive(config, "v_head_dim"),
        is_split=bool(config.get("has_split_latent")),
    )
    rope = read_rope(config)
    # The growth of DeepSeek's scores in stretched texts: YaRN's, on numbers without RoPE, too.
    weight = optional_number(rope.scaling, "mscale_all_dim") if rope.scaling.get("mscale_all_dim") else None
    growth = 1.0 if weight is None else yarn_magnitude(rope.scaling["factor"], weight) ** 2
    return {
        "num_kv_heads": 1,
        "head_dim": latent.entry_size,
        "latent": latent,
        "rope": rope,
        "attention_scale": (latent.key_size + latent.rope_size) ** -0.5 * growth,
        "has_interleaved_rope": bool(config.get("rope_interleave", True)),
        "parts": tuple(("latent attention", "mlp" if is_dense else "experts") for is_dense in dense),
    }


def _dense_layers(config: Json, num_layers: int) -> list[bool]:
    """Which layers have an MLP: the first ones, or those that `mlp_layer_types` lists. Raises CheckpointError."""
    if (kinds := config.get("mlp_layer_types")) is None:
        num_dense = integer(config, "first_k_dense_replace", 0, least=0)
        return [layer < num_dense for layer in range(num_layers)]
    is_list = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
    if not is_list or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: mlp_layer_types must list {num_layers} of dense, sparse")
    return [kind == "dense" for kind in kinds]


def _deepseek_experts(config: Json, num_ranked: int) -> ExpertsShape:
    """num_ranked: how many of a group's experts rank it."""
    num, num_used = numbers_of_experts(config)
    inner = positive(config, "moe_intermediate_size")
    return ExpertsShape(
        num,
        num_used,
        inner,
        is_normed=bool(config.get("norm_topk_prob")),
        scale=number_in(config, "routed_scaling_factor", 1.0),
        groups=_expert_groups(config, num, num_used, num_ranked),
        has_fp32_router=True,
        shared_size=inner * integer(config, "n_shared_experts", 0, least=0),
    )


def deepseek_v2(config: Json, num_layers: int) -> Fields:
    """DeepSeek-V2 and V2-Lite, which has neither a latent of queries nor groups of experts."""
    refuse(config, "norm_topk_prob")
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        refuse(config, "topk_method")
    shape = _deepseek_experts(config, num_ranked=1)
    return {
        **biases(config),
        **_latent(config, _dense_layers(config, num_layers)),
        "has_interleaved_rope": True,
        "experts": replace(shape, groups=None) if method == "greedy" else shape,
    }


def deepseek_v3(config: Json, num_layers: int) -> Fields:
    """DeepSeek-V3 and R1, GLM-4.7-Flash, Kimi K2: experts' scores are sigmoids, plus a correction where they choose."""
    for key, value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if config.get(key) != value:
            refuse(config, key)
    shape = _deepseek_experts(config, num_ranked=2)
    return {
        **biases(config, mlp=""),
        **_latent(config, _dense_layers(config, num_layers)),
        "experts": replace(shape, scores="sigmoid", correction="mlp.gate.e_score_correction_bias"),
    }


def mistral4(config: Json, num_layers: int) -> Fields:
    """Mistral Small 4: softmax scores, and queries that are scaled by their position."""
    fields = _latent(config, _dense_layers(config, num_layers))
    return {
        **biases(config, mlp=""),
        **fields,
        "experts": replace(_deepseek_experts(config, num_ranked=2), joined=JOINED_EXPERT_MLP),
        "query_growth": query_growth_of(fields["rope"]),
    }


def youtu(config: Json, num_layers: int) -> Fields:
    return biases(config, mlp="") | _latent(config, [True] * num_layers)


def routed_inner_size(config: Json) -> Json:
    """A config.json with the inner size of the experts that a row uses, for a family without dense MLPs."""
    used = positive(config, "moe_intermediate_size") * positive(config, "num_experts_per_tok")
    return {**config, "intermediate_size": used}


def granite_moe(config: Json, num_layers: int) -> Fields:
    return granite(config, num_layers) | {
        "mlp_bias": False,
        "experts": granite_experts(config),
        "parts": (("attention", "experts"),) * num_layers,
    }


def granite_experts(config: Json, shared_size: int = 0) -> ExpertsShape:
    """Of Granite, whose tensors `checkpoints.language_model` renames."""
    num, num_used = numbers_of_experts(config)
    return ExpertsShape(
        num,
        num_used,
        positive(config, "intermediate_size"),
        scores="softmax of chosen",
        shared_size=shared_size,
        router="block_sparse_moe.router.layer",
        prefix="block_sparse_moe.experts",
        shared=SPLIT_SHARED_MLP if config.get("has_split_mlp") else SHARED_MLP,
        names=EXPERT_MLP if config.get("has_split_mlp") else JOINED_EXPERT_MLP,
    )
