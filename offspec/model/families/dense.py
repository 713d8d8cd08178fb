"""Families of attention and an MLP in every layer, by their differences from Llama's layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import CheckpointError
from ..config_values import EPS_RANGE, Json, integer, mapping, number_in, optional_number, positive
from ..rope_config import (
    FULL,
    ORIGINAL_CONTEXT,
    SLIDING,
    THETA_RANGE,
    RopeConfig,
    read_rope,
    read_ropes,
    read_rotary_share,
)
from ..shapes import (
    FUSED_MLP,
    NORMS_AROUND,
    NORMS_BEHIND,
    UNGATED_MLP,
    LayerInputs,
    LayerShape,
    MlpNames,
    NormPlaces,
    QKNorm,
)
from .defaults import GEMMA4_ROPES
from .reading import Fields, alternating_windows, biases, listed_windows, qwen_windows, refuse, window_of


def llama(config: Json, num_layers: int) -> Fields:
    """Llama; also Arcee, whose MLP has no gate (see `FAMILIES`)."""
    return biases(config)


def mistral(config: Json, num_layers: int) -> Fields:
    """Mistral, and Ministral, which lists its layers' kinds, under either name."""
    window = window_of(config)
    if config.get("layer_types") is not None:
        return {"windows": listed_windows(config, num_layers, window)}
    return {"windows": (window,) * num_layers}


def ministral3(config: Json, num_layers: int) -> Fields:
    """Queries are scaled by their position, as in Llama 4."""
    rope = read_rope(config)
    windows = (window_of({"sliding_window": None, **config}),) * num_layers
    return {"windows": windows, "rope": rope, "query_growth": query_growth_of(rope)}


def query_growth_of(rope: RopeConfig) -> tuple[float, int] | None:
    """Llama 4's scaling of queries, if the family has it."""
    beta = optional_number(rope.scaling, "llama_4_scaling_beta")
    return None if beta is None else (beta, positive(rope.scaling, ORIGINAL_CONTEXT))


def qwen2(config: Json, num_layers: int) -> Fields:
    return {"qkv_bias": True, "windows": qwen_windows(config, num_layers)}


def qwen3(config: Json, num_layers: int) -> Fields:
    bias = bool(config.get("attention_bias"))
    windows = qwen_windows(config, num_layers)
    head_dim = positive(config, "head_dim", 128)  # other families' default is hidden_size / heads
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "windows": windows, "head_dim": head_dim}


def gemma(config: Json, num_layers: int) -> Fields:
    """The first release's `gelu` means the tanh approximation."""
    refuse(config, "use_bidirectional_attention")
    fields = {
        **biases(config, mlp=""),
        "norm": "rms plus one",
        "embedding_scale": math.sqrt(positive(config, "hidden_size")),
        "is_embedding_scale_rounded": True,
    }
    return fields | ({"activation": "gelu_pytorch_tanh"} if config["hidden_act"] == "gelu" else {})


def gemma2(config: Json, num_layers: int) -> Fields:
    return gemma(config, num_layers) | {
        "activation": config["hidden_activation"] or "gelu_pytorch_tanh",
        "norms": NORMS_AROUND,
        "windows": alternating_windows(config, num_layers),
        "attention_scale": number_in(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_cap": optional_number(config, "attn_logit_softcapping"),
        "logit_cap": optional_number(config, "final_logit_softcapping"),
    }


def gemma3(config: Json, num_layers: int) -> Fields:
    rope, local = read_ropes(config)
    fields = gemma2(config, num_layers) | {"qk_norm": True, "rope": rope}
    # transformers ignores config.json's cap of attention for this family.
    return fields | {"attention_cap": None, "local_rope": None if local == rope else local}


def gemma4(config: Json, num_layers: int) -> Fields:
    """The dense ones. Layers with full attention have other heads; the last layers may share earlier ones' entries."""
    refuse(config, "enable_moe_block")
    if config.get("use_bidirectional_attention") == "all":
        refuse(config, "use_bidirectional_attention")
    config = {**config, "rope_parameters": mapping(config, "rope_parameters") or GEMMA4_ROPES}
    rope, local = read_ropes(config)
    windows = (*alternating_windows(config, num_layers)[:-1], None)  # transformers makes the last one full
    size = integer(config, "hidden_size_per_layer_input", 256, least=0)
    inputs = LayerInputs(size, num_layers, positive(config, "vocab_size_per_layer_input", 262144)) if size else None
    return {
        **biases(config, mlp=""),
        "activation": config["hidden_activation"],
        "attention_scale": 1.0,
        "embedding_scale": math.sqrt(positive(config, "hidden_size")),
        "is_embedding_scale_rounded": True,
        "has_value_norm": True,
        "layer_inputs": inputs,
        "local_rope": local,
        "logit_cap": optional_number(config, "final_logit_softcapping"),
        "norms": NORMS_AROUND,
        "parts": (("attention", "mlp", *(("layer input",) if inputs else ()), "layer scale"),) * num_layers,
        "qk_norm": True,
        "rope": rope,
        "shapes": tuple(_gemma4_shape(config, windows, layer) for layer in range(num_layers)),
        "windows": windows,
    }


def _gemma4_shape(config: Json, windows: Sequence[int | None], layer: int) -> LayerShape:
    is_full, num_own = windows[layer] is None, len(windows) - integer(config, "num_kv_shared_layers", 0, least=0)
    shared = None
    if layer >= num_own:
        alike = [i for i in range(max(num_own, 0)) if (windows[i] is None) == is_full]
        if not alike:
            raise CheckpointError(f"config.json: num_kv_shared_layers leaves layer {layer} no earlier one of its kind")
        shared = alike[-1]
    has_wide_mlp = shared is not None and bool(config.get("use_double_wide_mlp"))
    are_values_keys = is_full and bool(config.get("attention_k_eq_v"))
    full = {"head_dim": positive(config, "global_head_dim", 512)}
    if are_values_keys and config.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = positive(config, "num_global_key_value_heads")
    listed = mapping(config, "per_layer_config")  # transformers 5 lists the layers that differ
    differing = mapping(listed, str(layer)) if "per_layer_config" in config else full if is_full else {}
    return LayerShape(
        num_kv_heads=positive({**config, **differing}, "num_key_value_heads"),
        head_dim=positive({**config, **differing}, "head_dim"),
        intermediate_size=positive(config, "intermediate_size") * (2 if has_wide_mlp else 1),
        number=layer,
        entries_of=shared,
        are_values_keys=are_values_keys,
    )


def phi3(config: Json, num_layers: int) -> Fields:
    window = window_of({"sliding_window": None, **config})
    return {
        "has_fused_qkv": True,
        "mlp": FUSED_MLP,
        "windows": (window,) * num_layers,
        "rotary_share": read_rotary_share(config),
        "rope": _phi3_rope(config),
    }


def _phi3_rope(config: Json) -> RopeConfig:
    """Early files call LongRoPE su, or yarn."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = mapping(config, key)
    if (scaling.get("rope_type") or scaling.get("type")) in ("su", "yarn"):
        config = {**config, key: {**scaling, "rope_type": "longrope"}}
    return read_rope(config)


def glm(config: Json, num_layers: int) -> Fields:
    return {
        "qkv_bias": bool(config["attention_bias"]),
        "mlp": FUSED_MLP,
        "rotary_share": read_rotary_share(config),
        "has_interleaved_rope": True,
    }


def glm4(config: Json, num_layers: int) -> Fields:
    norms = NormPlaces("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return glm(config, num_layers) | {"norms": norms}


def granite(config: Json, num_layers: int) -> Fields:
    return biases(config) | {
        "embedding_scale": number_in(config, "embedding_multiplier", 1.0),
        "residual_scale": number_in(config, "residual_multiplier", 1.0),
        "attention_scale": number_in(config, "attention_multiplier", 1.0),
        "logit_scale": 1 / number_in(config, "logits_scaling", 1.0),
    }


def olmo2(config: Json, num_layers: int) -> Fields:
    return biases(config, mlp="") | {"norms": NORMS_BEHIND, "qk_norm": True, "qk_norm_form": QKNorm(over="projection")}


def olmo3(config: Json, num_layers: int) -> Fields:
    rope, local = read_ropes(config)
    windows = alternating_windows(config, num_layers)
    fields = {"windows": windows, "rope": rope, "local_rope": None if local == rope else local}
    return olmo2(config, num_layers) | fields


def cohere(config: Json, num_layers: int) -> Fields:
    return biases(config, mlp="") | {
        "rms_norm_eps": number_in(config, "layer_norm_eps", 1e-5, EPS_RANGE),
        "norm": "layer",
        "norms": NormPlaces(before_mlp=None),
        "is_parallel": True,
        "has_interleaved_rope": True,
        "logit_scale": number_in(config, "logit_scale", 0.0625),
        "qk_norm": bool(config.get("use_qk_norm")),
        "qk_norm_form": QKNorm(over="own head"),
    }


def cohere2(config: Json, num_layers: int) -> Fields:
    """Layers with full attention have no RoPE."""
    windows = alternating_windows(config, num_layers)
    unrotated = tuple(i for i, window in enumerate(windows) if window is None)
    return cohere(config, num_layers) | {"windows": windows, "unrotated": unrotated, "qk_norm": False}


def smollm3(config: Json, num_layers: int) -> Fields:
    interval = positive(config, "no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) != num_layers:
        raise CheckpointError(f"config.json: no_rope_layers must list {num_layers} layers (num_hidden_layers)")
    window = window_of({"sliding_window": None, **config}) if config.get("use_sliding_window") else None
    if window is not None and config.get("layer_types") is None:
        config = {**config, "layer_types": [FULL if has_rope else SLIDING for has_rope in rotated]}
    windows = (None,) * num_layers if window is None else listed_windows(config, num_layers, window)
    unrotated = tuple(i for i, has_rope in enumerate(rotated) if not has_rope)
    return biases(config) | {"windows": windows, "unrotated": unrotated}


def starcoder2(config: Json, num_layers: int) -> Fields:
    return biases(config, "use_bias", "use_bias") | {
        "rms_norm_eps": number_in(config, "norm_epsilon", 1e-5, EPS_RANGE),
        "norm": "layer",
        "has_norm_bias": True,
        "mlp": MlpNames(None, "mlp.c_fc", "mlp.c_proj"),
        "windows": (window_of({"sliding_window": None, **config}),) * num_layers,
    }


def nemotron(config: Json, num_layers: int) -> Fields:
    return biases(config) | {
        "rms_norm_eps": number_in(config, "norm_eps", 1e-5, EPS_RANGE),
        "norm": "layer plus one",
        "has_norm_bias": True,
        "mlp": UNGATED_MLP,
        "rotary_share": read_rotary_share(config),
    }


def exaone4(config: Json, num_layers: int) -> Fields:
    """If some layers have a window, the others have no RoPE."""
    windows = alternating_windows(config, num_layers)
    has_windows = config.get("sliding_window", 4096) is not None
    unrotated = tuple(i for i, window in enumerate(windows) if window is None and has_windows)
    return {"windows": windows, "unrotated": unrotated, "norms": NORMS_BEHIND, "qk_norm": True}


def helium(config: Json, num_layers: int) -> Fields:
    return biases(config) | {"o_bias": False, "has_interleaved_rope": True}


def seed_oss(config: Json, num_layers: int) -> Fields:
    return biases(config) | {"o_bias": bool(config.get("attention_out_bias"))}


def arcee(config: Json, num_layers: int) -> Fields:
    return biases(config) | {"mlp": UNGATED_MLP}


def ernie(config: Json, num_layers: int) -> Fields:
    return biases(config, "use_bias", "use_bias") | {"has_interleaved_rope": True}


def hunyuan(config: Json, num_layers: int) -> Fields:
    norm = QKNorm("self_attn.query_layernorm", "self_attn.key_layernorm", is_after_rope=True)
    return biases(config, mlp="") | {"qk_norm": True, "qk_norm_form": norm, "rope": _hunyuan_rope(config)}


def _hunyuan_rope(config: Json) -> RopeConfig:
    """Its dynamic scaling with an `alpha` is another theta, independent of the text's length."""
    scaling = mapping(config, "rope_scaling") or mapping(config, "rope_parameters")
    if "alpha" not in scaling:
        return read_rope(config)
    kept = {key: value for key, value in scaling.items() if key == "rope_theta"}
    plain = read_rope({**config, "rope_scaling": None, "rope_parameters": kept})
    dim = positive(config, "head_dim")
    theta = plain.theta * number_in(scaling, "alpha", 1.0) ** (dim / max(dim - 2, 1))
    return RopeConfig(min(theta, THETA_RANGE[1]), "default", {})
