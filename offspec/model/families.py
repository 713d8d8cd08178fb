"""Families of models, as data: each family's differences from Llama's layout.

A family is an entry of `FAMILIES`, a function from its config.json to the differing fields of `ModelConfig`. It also
has an entry of `DEFAULTS` if its defaults for missing keys differ from Llama's in transformers.
The source is transformers' configuration and modeling files (5.23).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from .config_values import EPS_RANGE, Json, integer, mapping, number_in, optional_number, positive
from .rope_config import (
    FULL,
    LAYER_KINDS,
    LINEAR,
    ORIGINAL_CONTEXT,
    SLIDING,
    THETA_RANGE,
    RopeConfig,
    read_rope,
    read_ropes,
    read_rotary_share,
)

Fields = dict[str, Any]  # of ModelConfig
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2")  # block.py computes them


@dataclass(frozen=True)
class NormPlaces:
    """Names of a layer's norms by place; None: no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @property
    def names(self) -> list[str]:
        places = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return [name for name in places if name is not None]


@dataclass(frozen=True)
class MlpNames:
    """Names of an MLP's matrices.

    gate: None without a gate; equal to `up` if one matrix is both, with the gate's rows first.
    """

    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"

    @property
    def is_fused(self) -> bool:
        return self.gate == self.up


@dataclass(frozen=True)
class QKNorm:
    """How queries and keys are normed.

    over: "head" (each head, all with one weight [head_dim]), "own head" (each head with its own row of a weight
    [heads, head_dim]) or "projection" (all heads at once, weight [heads * head_dim]).
    """

    queries: str = "self_attn.q_norm"
    keys: str = "self_attn.k_norm"
    over: str = "head"
    is_after_rope: bool = False


@dataclass(frozen=True)
class DeltaShape:
    """The shape of gated delta nets (`parts.delta_net`).

    num_heads, value_size: of values and states; key_heads, key_size: of queries and keys. kernel: tokens that the
    convolution sees.
    """

    num_heads: int
    value_size: int
    key_heads: int
    key_size: int
    kernel: int

    @property
    def values(self) -> int:
        """Numbers of all heads' values of a row."""
        return self.num_heads * self.value_size

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of a row."""
        return 2 * self.key_heads * self.key_size + self.values


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer, in models whose layers differ.

    number: the layer's number in the model. entries_of: the earlier layer whose KV entries it attends to; None: its
    own. are_values_keys: values are the keys' projection, before its norm and RoPE.
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    number: int
    entries_of: int | None = None
    are_values_keys: bool = False


@dataclass(frozen=True)
class LayerInputs:
    """The shape of what each layer gets of a token, beside hidden states (`parts.layer_input`).

    size: numbers of a token in one layer. num_layers: of the model. vocab_size: rows of their table.
    """

    size: int
    num_layers: int
    vocab_size: int

    @property
    def width(self) -> int:
        """Numbers of a token in all layers."""
        return self.size * self.num_layers


# Llama's layout, and differences that several families share.
HEADS_NORMED = QKNorm()
GATED_MLP = MlpNames()
NORMS_BEFORE = NormPlaces()
FUSED_MLP = MlpNames("mlp.gate_up_proj", "mlp.gate_up_proj")
UNGATED_MLP = MlpNames(gate=None)
NORMS_BEHIND = NormPlaces(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
NORMS_AROUND = NormPlaces(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


# ------------------------------------------------------------------------------------------------ windows


def _window(config: Json) -> int | None:
    """Mistral and Qwen: null is no window; without the key it is 4096, as in transformers."""
    return None if config.get("sliding_window", 4096) is None else positive(config, "sliding_window", 4096)


def _qwen_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """Qwen: windows only with `use_sliding_window`: from layer `max_window_layers` on, or as in `layer_types`."""
    window = _window(config) if config.get("use_sliding_window") else None
    if config.get("layer_types") is not None:
        return _listed_windows(config, num_layers, window)
    first = integer(config, "max_window_layers", 28, least=0)
    return tuple(window if i >= first else None for i in range(num_layers))


def _listed_windows(config: Json, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """Windows in the layers that `layer_types` lists."""
    kinds = config["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        listed = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise CheckpointError(f"config.json: layer_types lists {listed} layers, num_hidden_layers is {num_layers}")
    if unknown := [kind for kind in kinds if kind not in LAYER_KINDS]:
        raise UnsupportedModelError(f"layer type {unknown[0]!r} is not supported; supported: {', '.join(LAYER_KINDS)}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _alternating_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """Windows as in `layer_types`; without it, each `sliding_window_pattern`-th layer has full attention."""
    if (window := _window(config)) is None and config.get("layer_types") is None:
        return (None,) * num_layers
    if config.get("layer_types") is None:
        pattern = positive(config, "sliding_window_pattern")
        kinds = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
        config = {**config, "layer_types": kinds}
    return _listed_windows(config, num_layers, window)


def _refuse(config: Json, *keys: str) -> None:
    """Raise UnsupportedModelError if one of `keys` enables its feature."""
    for key in keys:
        if config.get(key):
            raise UnsupportedModelError(f"{key} {config[key]!r} is not supported for {config['model_type']}")


def _biases(config: Json, attention: str = "attention_bias", mlp: str = "mlp_bias") -> Fields:
    """The fields of biases, from the keys that enable them."""
    return {
        "qkv_bias": bool(config.get(attention)),
        "o_bias": bool(config.get(attention)),
        "mlp_bias": bool(config.get(mlp)),
    }


# ------------------------------------------------------------------------------------------------ families


def _llama(config: Json, num_layers: int) -> Fields:
    """Llama; also Arcee, whose MLP has no gate (see `FAMILIES`)."""
    return _biases(config)


def _mistral(config: Json, num_layers: int) -> Fields:
    """Mistral, and Ministral, which lists its layers' kinds, under either name."""
    window = _window(config)
    if config.get("layer_types") is not None:
        return {"windows": _listed_windows(config, num_layers, window)}
    return {"windows": (window,) * num_layers}


def _ministral3(config: Json, num_layers: int) -> Fields:
    """Queries are scaled by their position, as in Llama 4."""
    rope = read_rope(config)
    fields: Fields = {"windows": (_window({"sliding_window": None, **config}),) * num_layers, "rope": rope}
    if (beta := optional_number(rope.scaling, "llama_4_scaling_beta")) is not None:
        fields["query_growth"] = beta, positive(rope.scaling, ORIGINAL_CONTEXT)
    return fields


def _qwen2(config: Json, num_layers: int) -> Fields:
    return {"qkv_bias": True, "windows": _qwen_windows(config, num_layers)}


def _qwen3(config: Json, num_layers: int) -> Fields:
    bias = bool(config.get("attention_bias"))
    windows = _qwen_windows(config, num_layers)
    head_dim = positive(config, "head_dim", 128)  # other families' default is hidden_size / heads
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "windows": windows, "head_dim": head_dim}


def _qwen3_5(config: Json, num_layers: int) -> Fields:
    """Gated delta nets in most layers; attention with a gate in the others, and RoPE for a share of each head."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = positive(config, "full_attention_interval", 4)
        kinds = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)]
    mixers = {FULL: "attention", LINEAR: "delta net"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in mixers for kind in kinds):
        raise CheckpointError(f"config.json: layer_types must list {num_layers} of {', '.join(mixers)}")
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
        ),
        "parts": tuple((mixers[kind], "mlp") for kind in kinds),
    }


def _gemma(config: Json, num_layers: int) -> Fields:
    """The first release's `gelu` means the tanh approximation."""
    _refuse(config, "use_bidirectional_attention")
    fields = {
        **_biases(config, mlp=""),
        "norm": "rms plus one",
        "embedding_scale": math.sqrt(positive(config, "hidden_size")),
        "is_embedding_scale_rounded": True,
    }
    return fields | ({"activation": "gelu_pytorch_tanh"} if config["hidden_act"] == "gelu" else {})


def _gemma2(config: Json, num_layers: int) -> Fields:
    return _gemma(config, num_layers) | {
        "activation": config["hidden_activation"] or "gelu_pytorch_tanh",
        "norms": NORMS_AROUND,
        "windows": _alternating_windows(config, num_layers),
        "attention_scale": number_in(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_cap": optional_number(config, "attn_logit_softcapping"),
        "logit_cap": optional_number(config, "final_logit_softcapping"),
    }


def _gemma3(config: Json, num_layers: int) -> Fields:
    rope, local = read_ropes(config)
    fields = _gemma2(config, num_layers) | {"qk_norm": True, "rope": rope}
    # transformers ignores config.json's cap of attention for this family.
    return fields | {"attention_cap": None, "local_rope": None if local == rope else local}


def _gemma4(config: Json, num_layers: int) -> Fields:
    """The dense ones. Layers with full attention have other heads; the last layers may share earlier ones' entries."""
    _refuse(config, "enable_moe_block")
    if config.get("use_bidirectional_attention") == "all":
        _refuse(config, "use_bidirectional_attention")
    config = {**config, "rope_parameters": mapping(config, "rope_parameters") or _GEMMA4_ROPES}
    rope, local = read_ropes(config)
    windows = (*_alternating_windows(config, num_layers)[:-1], None)  # transformers makes the last one full
    size = integer(config, "hidden_size_per_layer_input", 256, least=0)
    inputs = LayerInputs(size, num_layers, positive(config, "vocab_size_per_layer_input", 262144)) if size else None
    return {
        **_biases(config, mlp=""),
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


def _phi3(config: Json, num_layers: int) -> Fields:
    window = _window({"sliding_window": None, **config})
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


def _glm(config: Json, num_layers: int) -> Fields:
    return {
        "qkv_bias": bool(config["attention_bias"]),
        "mlp": FUSED_MLP,
        "rotary_share": read_rotary_share(config),
        "has_interleaved_rope": True,
    }


def _glm4(config: Json, num_layers: int) -> Fields:
    norms = NormPlaces("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return _glm(config, num_layers) | {"norms": norms}


def _granite(config: Json, num_layers: int) -> Fields:
    return _biases(config) | {
        "embedding_scale": number_in(config, "embedding_multiplier", 1.0),
        "residual_scale": number_in(config, "residual_multiplier", 1.0),
        "attention_scale": number_in(config, "attention_multiplier", 1.0),
        "logit_scale": 1 / number_in(config, "logits_scaling", 1.0),
    }


def _granite_hybrid(config: Json, num_layers: int) -> Fields:
    """Models of Granite 4 that are hybrids by name only: attention in each layer, one MLP."""
    _refuse(config, "num_local_experts")
    kinds = config.get("layers_block_type") or config.get("layer_types")
    kinds = kinds if isinstance(kinds, list) and len(kinds) == num_layers else ["mamba"]
    if other := [kind for kind in kinds if kind not in ("attention", FULL)]:
        raise UnsupportedModelError(f"layer type {other[0]!r} is not supported for granitemoehybrid")
    if (position := config.get("position_embedding_type")) not in ("rope", "nope", None):
        raise UnsupportedModelError(f"position_embedding_type {position!r} is not supported")
    return _granite(config, num_layers) | {
        "mlp_bias": False,
        "intermediate_size": positive(config, "shared_intermediate_size"),
        "mlp": MlpNames("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear"),
        "unrotated": () if position == "rope" else tuple(range(num_layers)),
    }


def _olmo2(config: Json, num_layers: int) -> Fields:
    return _biases(config, mlp="") | {"norms": NORMS_BEHIND, "qk_norm": True, "qk_norm_form": QKNorm(over="projection")}


def _olmo3(config: Json, num_layers: int) -> Fields:
    rope, local = read_ropes(config)
    windows = _alternating_windows(config, num_layers)
    fields = {"windows": windows, "rope": rope, "local_rope": None if local == rope else local}
    return _olmo2(config, num_layers) | fields


def _cohere(config: Json, num_layers: int) -> Fields:
    return _biases(config, mlp="") | {
        "rms_norm_eps": number_in(config, "layer_norm_eps", 1e-5, EPS_RANGE),
        "norm": "layer",
        "norms": NormPlaces(before_mlp=None),
        "is_parallel": True,
        "has_interleaved_rope": True,
        "logit_scale": number_in(config, "logit_scale", 0.0625),
        "qk_norm": bool(config.get("use_qk_norm")),
        "qk_norm_form": QKNorm(over="own head"),
    }


def _cohere2(config: Json, num_layers: int) -> Fields:
    """Layers with full attention have no RoPE."""
    windows = _alternating_windows(config, num_layers)
    unrotated = tuple(i for i, window in enumerate(windows) if window is None)
    return _cohere(config, num_layers) | {"windows": windows, "unrotated": unrotated, "qk_norm": False}


def _smollm3(config: Json, num_layers: int) -> Fields:
    interval = positive(config, "no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) != num_layers:
        raise CheckpointError(f"config.json: no_rope_layers must list {num_layers} layers (num_hidden_layers)")
    window = _window({"sliding_window": None, **config}) if config.get("use_sliding_window") else None
    if window is not None and config.get("layer_types") is None:
        config = {**config, "layer_types": [FULL if has_rope else SLIDING for has_rope in rotated]}
    windows = (None,) * num_layers if window is None else _listed_windows(config, num_layers, window)
    unrotated = tuple(i for i, has_rope in enumerate(rotated) if not has_rope)
    return _biases(config) | {"windows": windows, "unrotated": unrotated}


def _starcoder2(config: Json, num_layers: int) -> Fields:
    return _biases(config, "use_bias", "use_bias") | {
        "rms_norm_eps": number_in(config, "norm_epsilon", 1e-5, EPS_RANGE),
        "norm": "layer",
        "has_norm_bias": True,
        "mlp": MlpNames(None, "mlp.c_fc", "mlp.c_proj"),
        "windows": (_window({"sliding_window": None, **config}),) * num_layers,
    }


def _nemotron(config: Json, num_layers: int) -> Fields:
    return _biases(config) | {
        "rms_norm_eps": number_in(config, "norm_eps", 1e-5, EPS_RANGE),
        "norm": "layer plus one",
        "has_norm_bias": True,
        "mlp": UNGATED_MLP,
        "rotary_share": read_rotary_share(config),
    }


def _exaone4(config: Json, num_layers: int) -> Fields:
    """If some layers have a window, the others have no RoPE."""
    windows = _alternating_windows(config, num_layers)
    has_windows = config.get("sliding_window", 4096) is not None
    unrotated = tuple(i for i, window in enumerate(windows) if window is None and has_windows)
    return {"windows": windows, "unrotated": unrotated, "norms": NORMS_BEHIND, "qk_norm": True}


def _helium(config: Json, num_layers: int) -> Fields:
    return _biases(config) | {"o_bias": False, "has_interleaved_rope": True}


def _seed_oss(config: Json, num_layers: int) -> Fields:
    return _biases(config) | {"o_bias": bool(config.get("attention_out_bias"))}


def _arcee(config: Json, num_layers: int) -> Fields:
    return _biases(config) | {"mlp": UNGATED_MLP}


def _ernie(config: Json, num_layers: int) -> Fields:
    return _biases(config, "use_bias", "use_bias") | {"has_interleaved_rope": True}


def _hunyuan(config: Json, num_layers: int) -> Fields:
    norm = QKNorm("self_attn.query_layernorm", "self_attn.key_layernorm", is_after_rope=True)
    return _biases(config, mlp="") | {"qk_norm": True, "qk_norm_form": norm, "rope": _hunyuan_rope(config)}


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


# To add a family, add one entry: its config.json → the differing fields of ModelConfig.
FAMILIES: dict[str, Callable[[Json, int], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_5_text": _qwen3_5,
    "ministral3": _ministral3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "phi3": _phi3,
    "glm": _glm,
    "glm4": _glm4,
    "granite": _granite,
    "granitemoehybrid": _granite_hybrid,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
    "nemotron": _nemotron,
    "exaone4": _exaone4,
    "helium": _helium,
    "seed_oss": _seed_oss,
    "arcee": _arcee,
    "ernie4_5": _ernie,
    "hunyuan_v1_dense": _hunyuan,
}

_GEMMA2 = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA4_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_GLM = {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "attention_bias": True}
# Families' defaults for missing keys, if they differ from Llama's; transformers omits keys with its defaults.
# `default_theta`: RoPE's; `default_local_theta`: of layers with a window.
DEFAULTS: dict[str, Json] = {
    "ministral3": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "gemma": {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2
    | {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "default_theta": 1000000.0,
        "default_local_theta": 10000.0,
    },
    "gemma4_text": {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "qwen3_5_text": {
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
    },
    "phi3": {"rms_norm_eps": 1e-5, ORIGINAL_CONTEXT: 4096},
    "glm": _GLM,
    "glm4": _GLM,
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "default_theta": 500000.0, "sliding_window_pattern": 4},
    "granitemoehybrid": {"num_local_experts": 8, "shared_intermediate_size": 1024},
    "cohere": {"tie_word_embeddings": True, "default_theta": 500000.0},
    "cohere2": {"tie_word_embeddings": True, "sliding_window_pattern": 4},
    "smollm3": {"tie_word_embeddings": True, "default_theta": 2000000.0, "num_key_value_heads": 4},
    "starcoder2": {
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "num_key_value_heads": 2,
    },
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "exaone4": {"rms_norm_eps": 1e-5, "sliding_window_pattern": 4},
    "helium": {"rms_norm_eps": 1e-8, "head_dim": 128, "default_theta": 100000.0},
    "seed_oss": {"head_dim": 128, "attention_bias": True},
    "arcee": {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    "ernie4_5": {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "default_theta": 500000.0,
    },
    "hunyuan_v1_dense": {"rms_norm_eps": 1e-5},
}
# Multimodal models → the family of their language model, if `text_config` does not name it.
MULTIMODAL = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text"}
TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
}
PARTLY_ROTATED = ("phi3", "glm", "glm4", "nemotron", "qwen3_5_text")  # the families that read `partial_rotary_factor`
