"""Stand-ins: a WeightSource that lends like a streaming one, and tiny random checkpoints of every family and feature.

A checkpoint folder is written by `transformers`, and the reference model is read back from that same folder, so that
both implementations are judged by one config.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from offspec.backends.weights import Weight
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import open_model
from offspec.loaders.streaming.stream import Unit
from offspec.loaders.streaming.weights import LentExperts, WeightSource
from offspec.model.decoder import Decoder
from offspec.planning.plan import all_resident

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")


class LendingWeights:
    """A WeightSource that takes back what it lent: outside the `with` block a layer's tensors are NaN.

    `lent` lists the layers asked for, in order.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.lent: list[int] = []

    @property
    def num_layers(self) -> int:
        return self.source.num_layers

    @property
    def bytes_streamed(self) -> int:
        return self.source.bytes_streamed

    @property
    def is_resident(self) -> bool:
        return False

    @property
    def scratch(self) -> Tensor | None:
        return self.source.scratch

    @contextmanager
    def lend(self, unit: Unit) -> Iterator[Mapping[str, Weight]]:
        assert isinstance(unit, int)
        self.lent.append(unit)
        with self.source.lend(unit) as weights:
            copies = {name: weight.clone() for name, weight in weights.items() if isinstance(weight, Tensor)}
        yield copies
        for tensor in copies.values():
            tensor.fill_(torch.nan)

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, Weight]]:
        return self.lend(index)

    def experts(self, layer: int, rows: Mapping[int, int]) -> Iterator[LentExperts]:
        """One after another, each valid until the next one."""
        for number in rows:
            for group in self.source.experts(layer, {number: rows[number]}):
                copies = {name: weight.clone() for name, weight in group[number].items() if isinstance(weight, Tensor)}
                yield {number: copies}
                for tensor in copies.values():
                    tensor.fill_(torch.nan)

    def expert_table(self, layer: int) -> None: ...

    def ahead(self, layer: int) -> None: ...

    def expect(self, layer: int, rows: Mapping[int, int]) -> None: ...

    def shared(self, name: str) -> Weight:
        return self.source.shared(name)

    def rows(self, name: str, indices: Tensor) -> Tensor:
        return self.source.rows(name, indices)

    def close(self) -> None:
        self.source.close()


# ------------------------------------------------------------------------------------------------ checkpoints

VOCAB_SIZE = 160
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Family:
    """What one tiny checkpoint differs in. `old_layout`: its config.json says rope_theta and rope_scaling.

    seed: of weights with which it does not repeat itself soon.
    """

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    old_layout: bool = False
    seed: int = 0


def _yarn(**settings: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    } | settings


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.2, 1.5, 2.0, 3.0, 5.0, 9.0],
}
_NESTED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0},
}
_STRETCHED = {kind: {**said, "rope_theta": 50000.0} for kind, said in _NESTED.items()}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_QUARTER = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 24,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
}
_FALCON_H1 = {
    **_MAMBA,
    "mamba_d_ssm": 96,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": True,
    "time_step_limit": [0.05, 2.0],
    "embedding_multiplier": 6.0,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.1,
    "ssm_multipliers": [0.9, 1.2, 0.8, 1.3, 0.7],
    "ssm_out_multiplier": 0.8,
}
_GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}
_GRANITE_H = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    **_MAMBA,
    **_GRANITE,
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
}
_EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "head_dim": 24,
    "mamba_num_heads": 4,
    "mamba_head_dim": 20,
    "ssm_state_size": 12,
    "n_groups": 2,
    "time_step_min": 1e-9,  # transformers limits a prompt's steps by it
}
_NO_ROPE = {"rope_type": "default", "rope_theta": None}
_EXACT_MLP = {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_PROPORTIONAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.25},
}
_MIXED_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_FOUR = {"num_hidden_layers": 4, "sliding_window": 8}  # layers, so that each kind comes twice
_PAIRS = {**_FOUR, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA4 = {
    **_PAIRS,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 2.0,
}
_LATENT = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
_GEMMA = {"head_dim": 24, "tie_word_embeddings": True, "query_pre_attn_scalar": 100, **_FOUR}

FAMILIES = {
    "llama-mha": Family("llama", {"num_key_value_heads": 4}),
    "llama-gqa": Family("llama"),
    "llama-mqa": Family("llama", {"num_key_value_heads": 1}),
    "llama-tied": Family("llama", {"tie_word_embeddings": True}),
    "llama-biased": Family("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": Family("llama", {"head_dim": 24}),
    "llama-eps": Family("llama", {"rms_norm_eps": 0.05}),
    "llama-linear": Family("llama", rope=_LINEAR),
    "llama-linear-old": Family("llama", rope=_LINEAR, old_layout=True),
    "llama-llama3": Family("llama", rope=_LLAMA3),
    "llama-llama3-old": Family("llama", rope=_LLAMA3, old_layout=True),
    "llama-yarn": Family("llama", rope=_yarn()),
    "llama-yarn-old": Family("llama", rope=_yarn(), old_layout=True),
    "llama-yarn-attention-factor": Family("llama", rope=_yarn(attention_factor=1.3)),
    "llama-yarn-mscale": Family("llama", rope=_yarn(mscale=1.5, mscale_all_dim=0.5)),
    "llama-yarn-mscale-alone": Family("llama", rope=_yarn(mscale=1.5)),
    "llama-yarn-untruncated": Family("llama", rope=_yarn(truncate=False)),
    "llama-yarn-betas": Family("llama", rope=_yarn(beta_fast=2.0, beta_slow=0.1)),
    "mistral-window": Family("mistral", {"sliding_window": 9}),
    "mistral": Family("mistral", {"sliding_window": None, "head_dim": 24}, old_layout=True),
    "mistral-layer-types": Family("mistral", {"sliding_window": 8, "layer_types": _ALTERNATING}),
    "ministral": Family("ministral", {"sliding_window": 8, "layer_types": _ALTERNATING, "head_dim": 24}),
    "qwen2": Family("qwen2", {"use_sliding_window": False, "sliding_window": 8, "tie_word_embeddings": True}),
    "qwen2-window": Family("qwen2", _MIXED_WINDOWS),
    "qwen2-window-old": Family("qwen2", _MIXED_WINDOWS, old_layout=True),
    "qwen2-layer-types": Family("qwen2", {**_MIXED_WINDOWS, "layer_types": _ALTERNATING}),
    "qwen2-yarn-old": Family("qwen2", rope=_yarn(rope_theta=1000000.0), old_layout=True),
    "qwen3": Family("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biased-window": Family("qwen3", {"head_dim": 32, "attention_bias": True, **_MIXED_WINDOWS}),
    "gemma": Family("gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": Family("gemma2", {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma2-uncapped": Family("gemma2", {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": Family("gemma3_text", {**_GEMMA, **_PAIRS, "final_logit_softcapping": 2.0}, rope=_NESTED),
    "gemma4": Family("gemma4_text", {**_GEMMA4, "hidden_size_per_layer_input": 0}, rope=_PROPORTIONAL),
    "gemma4-layer-inputs": Family(
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
        rope=_PROPORTIONAL,
    ),
    "phi3": Family("phi3", {"sliding_window": 9}),
    "phi3-longrope": Family(
        "phi3",
        {"original_max_position_embeddings": 128, "tie_word_embeddings": True},
        rope={**_LONG, "partial_rotary_factor": 0.75},
        seed=1,
    ),
    "glm": Family("glm", {"head_dim": 24}, rope={**_PARTIAL, "partial_rotary_factor": 1 / 3}),
    "glm4": Family("glm4", {"head_dim": 16}, rope=_PARTIAL),
    "granite": Family("granite", {**_GRANITE, "attention_bias": True}),
    "granite-dense-hybrid": Family(
        "granitemoehybrid",
        {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.2,
        },
    ),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", _PAIRS, rope=_STRETCHED),
    "cohere": Family("cohere", {"logit_scale": 0.5, "attention_bias": True}),
    "cohere-qk-norm": Family("cohere", {"logit_scale": 2.0, "use_qk_norm": True, "tie_word_embeddings": False}),
    "cohere2": Family("cohere2", {**_PAIRS, "logit_scale": 2.0}),
    "ministral3": Family("ministral3", {"head_dim": 24, "sliding_window": None}, rope=_GROWING),
    "smollm3": Family("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3-window": Family("smollm3", {**_FOUR, "use_sliding_window": True, "no_rope_layers": [1, 0, 0, 1]}),
    "starcoder2": Family("starcoder2", {"sliding_window": 9}, seed=4),
    "nemotron": Family("nemotron", {"attention_bias": True, "mlp_bias": True}, rope=_PARTIAL),
    "exaone4": Family("exaone4", _PAIRS),
    "exaone4-full": Family("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "helium": Family("helium", {"head_dim": 16}),
    "seed-oss": Family("seed_oss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    "arcee": Family("arcee"),
    "ernie": Family("ernie4_5", {"head_dim": 24, "use_bias": True}),
    "hunyuan": Family("hunyuan_v1_dense", {"head_dim": 24}),
    "qwen3.5": Family("qwen3_5_text", {"head_dim": 32, "num_hidden_layers": 4, **_DELTA}, rope=_QUARTER),
    "granite-h": Family("granitemoehybrid", _GRANITE_H),
    "bamba": Family(
        "bamba",
        {**_MAMBA, "attn_layer_indices": [1], "mamba_proj_bias": True, "mamba_conv_bias": False, "mlp_bias": True},
        rope=_PARTIAL,
    ),
    "falcon-h1": Family("falcon_h1", _FALCON_H1),
    "falcon-h1-norm-first": Family("falcon_h1", {**_FALCON_H1, "mamba_norm_before_gate": True}),
    "falcon-h1-unnormed": Family("falcon_h1", {**_FALCON_H1, "mamba_rms_norm": False, "projectors_bias": True}),
    "nemotron-h": Family("nemotron_h", {**_NEMOTRON_H, "use_bias": True, "mlp_bias": True}),
    "olmo-hybrid": Family("olmo_hybrid", {"num_hidden_layers": 4, **_DELTA, "linear_num_key_heads": 4}, rope=_NO_ROPE),
    "lfm2": Family(
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    "lfm2-biased": Family(
        "lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "conv_L_cache": 5, **_EXACT_MLP}
    ),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": Family(
        "qwen3_moe",
        {
            "head_dim": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-moe": Family("qwen2_moe", {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 24}),
    "olmoe": Family("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "glm4-moe": Family(
        "glm4_moe",
        {
            **_EXPERTS,
            "head_dim": 24,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
        rope=_PARTIAL,
    ),
    "minimax-m2": Family(
        "minimax_m2", {"head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 2}, rope=_PARTIAL
    ),
    "granite-moe": Family(
        "granitemoe",
        {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "granite-h-moe": Family("granitemoehybrid", {**_GRANITE_H, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3.5-moe": Family(
        "qwen3_5_moe_text",
        {
            **_DELTA,
            **_EXPERTS,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "shared_expert_intermediate_size": 24,
        },
        rope=_QUARTER,
    ),
    "qwen3-next": Family(
        "qwen3_next",
        {
            **_DELTA,
            **_EXPERTS,
            "head_dim": 32,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [2],
        },
        rope=_PARTIAL,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {**_FOUR, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        rope=_yarn(truncate=False, factor=2.0),
    ),
    "deepseek-v2": Family(
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
        },
        seed=5,
    ),
    "deepseek-v2-lite": Family(
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None},
        rope=_yarn(mscale=0.707, mscale_all_dim=0.707),
        seed=1,
    ),
    "deepseek-v3": Family(
        "deepseek_v3",
        {**_LATENT, "num_hidden_layers": 3, "q_lora_rank": 24, "n_group": 3, "topk_group": 2},
        rope=_yarn(mscale=1.0, mscale_all_dim=1.0),
        old_layout=True,
    ),
    "glm4-moe-lite": Family(
        "glm4_moe_lite",
        {**_LATENT, "q_lora_rank": 24, "mlp_layer_types": ["dense", "sparse"], "rope_interleave": False},
    ),
    "mistral4": Family(
        "mistral4",
        {**_LATENT, "q_lora_rank": 24, "n_group": 3, "topk_group": 2},
        rope={**_GROWING, "partial_rotary_factor": 1 / 3},
    ),
    "youtu": Family("youtu", {**_LATENT, "q_lora_rank": None}, seed=4),
    "hunyuan-alpha": Family(
        "hunyuan_v1_dense",
        {"head_dim": 24},
        rope={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        seed=1,
    ),
}
DELTA_NETS = ("qwen3.5", "qwen3.5-moe", "qwen3-next", "olmo-hybrid")
MAMBAS = (
    "granite-h",
    "granite-h-moe",
    "bamba",
    "falcon-h1",
    "falcon-h1-norm-first",
    "falcon-h1-unnormed",
    "nemotron-h",
)
LATENTS = (
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "glm4-moe-lite",
    "mistral4",
    "youtu",
)  # families with latent attention
# They differ from others in the frequencies of positions alone, or in how config.json writes them.
ROPE_VARIANTS = tuple(
    name for name in FAMILIES if name.endswith("-old") or any(w in name for w in ("yarn", "linear", "llama3"))
)
# They have the same parts as another family. Sizes differ, frequencies of positions, or which vectors there are.
VARIANTS = (
    *ROPE_VARIANTS,
    *("llama-mqa", "llama-tied", "llama-head-dim", "llama-eps", "mistral", "mistral-layer-types", "ministral"),
    *("qwen2-window", "gemma", "gemma2-uncapped", "glm", "granite-dense-hybrid", "cohere", "smollm3-window"),
    *("exaone4-full", "ernie", "seed-oss", "hunyuan-alpha", "falcon-h1-unnormed", "lfm2-biased", "deepseek-v2-lite"),
)
ALIKE = ("olmoe", "minimax-m2", "granite-moe", "qwen3-moe")  # other mixtures have each of their parts
HYBRIDS = (*DELTA_NETS, *MAMBAS, "lfm2", "lfm2-biased")  # families with layers that keep a state of the text


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint folder, and the model that transformers makes of it (fp32, eager attention)."""

    folder: Path
    reference: PreTrainedModel

    def decoder(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Decoder:
        """Read from the folder anew, the way the engine does it."""
        files = replace(open_model(self.folder, "fp32", []), dtype=dtype)
        return load_decoder(files, all_resident(files), device)

    def lending_decoder(self) -> tuple[Decoder, LendingWeights]:
        """One whose layers are taken back after use."""
        plain = self.decoder()
        weights = LendingWeights(plain.weights)
        return Decoder(plain.config, weights, dtype=plain.dtype, device=plain.device), weights


def config_json(family: Family) -> dict[str, Any]:
    """The family's config.json, as short as it can be, in the layout of transformers 5."""
    return {"model_type": family.model_type, **_SHAPE, **family.settings, "rope_parameters": dict(family.rope)}


def in_old_layout(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as it was written before transformers 5."""
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    scaling = dict(config["rope_parameters"])
    if "full_attention" in scaling:
        if (local := scaling["sliding_attention"])["rope_theta"] != scaling["full_attention"]["rope_theta"]:
            old["rope_local_base_freq"] = local["rope_theta"]
        scaling = dict(scaling["full_attention"])
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    if "partial_rotary_factor" in scaling:
        old["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    return old | {"rope_scaling": None if scaling["type"] == "default" else scaling}


def build(family: Family, folder: Path) -> TinyModel:
    """Writes the family's checkpoint into `folder`; the reference is what transformers makes of it."""
    pytest.importorskip("transformers", reason="the reference: pip install transformers")
    from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # 5.24 knows its images only
    config = AutoConfig.for_model(**config_json(family))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model, torch.Generator().manual_seed(family.seed))
    model.save_pretrained(folder)
    if family.old_layout:
        config_file = folder / "config.json"
        old = in_old_layout(json.loads(config_file.read_text()))
        old.pop("layer_types", None)  # younger than the old layout; `max_window_layers` says it there
        config_file.write_text(json.dumps(old))
    if family.old_layout or family.model_type == "mistral":  # with types of layers, reading makes another model of it
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return TinyModel(folder, model.eval())


@torch.no_grad()
def randomise(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Weights under which every part matters: sharp attention, spread logits, norms away from 1 and biases from 0.

    Embeddings are small, so that what a layer adds outweighs them; a tied head would else repeat the last token.
    """
    model_type = model.config.model_type
    adds_one = model_type.startswith("gemma") and model_type != "gemma4_text"  # to a norm's weight
    unit = 0 if adds_one or model_type in ("nemotron", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next") else 1
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.copy_(unit + 0.5 + 0.3 * noise)
        elif name.endswith("norm.weight"):
            parameter.copy_(unit + 0.3 * noise)
        elif name.endswith(("bias", "sinks")):
            parameter.copy_(0.2 * noise)
        elif model_type == "gpt_oss" and ".experts." in name:  # transposed
            parameter.copy_(noise / parameter.shape[-2] ** 0.5)
        elif name.endswith("embed_tokens.weight"):
            scaled = model_type.startswith("gemma")  # by 8, when they are read
            parameter.copy_((0.02 if scaled else 0.15) * noise)
        else:
            gain = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
            parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)
