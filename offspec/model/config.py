"""What a decoder needs to know of a checkpoint's config.json, and the differences between model families.

One layout (Llama's: RMSNorm, RoPE, grouped-query attention, SwiGLU) serves every family here; a family is one entry of
`FAMILIES`, a function from its config.json to what differs. Knows nothing of weights or of how anything is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from offspec.loaders.checkpoint import show
from offspec.loaders.params import QUANT_METHODS

from ..errors import CheckpointError, UnsupportedModelError
from .names import EMBEDDING, FINAL_NORM, HEAD, LAYER_PREFIX

Json = Mapping[str, Any]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: `kind` is default, linear, llama3 or yarn; `scaling` its parameters by their names."""

    theta: float
    kind: str
    scaling: Json


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. `windows[i]` is layer i's sliding window in tokens, None where it sees everything."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_context: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    # Names of tensors in the checkpoint.

    @property
    def layer_prefix(self) -> str:
        """What comes before a layer's number."""
        return LAYER_PREFIX

    @property
    def embedding_name(self) -> str:
        return EMBEDDING

    @property
    def own_head_name(self) -> str:
        """Of a head that is not tied."""
        return HEAD

    @property
    def head_name(self) -> str:
        """The full name of the matrix that makes logits."""
        return self.embedding_name if self.tied_head else self.own_head_name

    def shared_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor outside the layers."""
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table, FINAL_NORM: (self.hidden_size,)}
        return shapes if self.tied_head else {**shapes, HEAD: table}


# ------------------------------------------------------------------------------------------------ families


def _window(config: Json) -> int | None:
    """Mistral and Qwen: null is no window; a config.json without the key means 4096, as Hugging Face has it."""
    return None if config.get("sliding_window", 4096) is None else _positive(config, "sliding_window", 4096)


def _qwen_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """Qwen: a window only where `use_sliding_window`, from layer `max_window_layers` on, or as `layer_types` lists."""
    window = _window(config) if config.get("use_sliding_window") else None
    if config.get("layer_types") is not None:
        return _listed_windows(config, num_layers, window)
    first = _integer(config, "max_window_layers", 28, least=0)
    return tuple(window if i >= first else None for i in range(num_layers))


def _listed_windows(config: Json, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """A window where `layer_types` lists one."""
    kinds = config["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        listed = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise CheckpointError(f"config.json: layer_types lists {listed} layers, num_hidden_layers says {num_layers}")
    if unknown := [kind for kind in kinds if kind not in LAYER_KINDS]:
        raise UnsupportedModelError(f"layer type {unknown[0]!r} is not supported; supported: {', '.join(LAYER_KINDS)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _llama(config: Json, num_layers: int) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(config.get("mlp_bias"))}


def _mistral(config: Json, num_layers: int) -> dict[str, Any]:
    """Also Ministral, which lists its layers' kinds, under either name."""
    window = _window(config)
    if config.get("layer_types") is not None:
        return {"windows": _listed_windows(config, num_layers, window)}
    return {"windows": (window,) * num_layers}


def _qwen2(config: Json, num_layers: int) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _qwen_windows(config, num_layers)}


def _qwen3(config: Json, num_layers: int) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    windows = _qwen_windows(config, num_layers)
    head_dim = _positive(config, "head_dim", 128)  # not hidden_size / heads, as elsewhere
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "windows": windows, "head_dim": head_dim}


# Adding a family of this layout is adding one entry: its config.json → the fields of ModelConfig that differ.
FAMILIES: dict[str, Callable[[Json, int], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
LAYER_KINDS = ("full_attention", "sliding_attention")
ROPE_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
ROPE_OPTIONAL = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
MAX_CONTEXT = 2**31  # no factor leads beyond it
MAX_SIZE = 2**31 - 1  # of every whole number: beyond it arithmetic would wrap around silently, and no model is so large
THETA_RANGE = (1.0, 1e15)  # below 1, and far above what models have, powers leave fp32
EPS_RANGE = (1e-30, 0.1)  # below it fp32 has no such number, above it the norm would be another function
SCALING_RANGE = (1e-6, 1e6)  # of the other numbers of RoPE
MAX_LAYERS = 10_000  # a lying config.json must not exhaust memory before it is compared with the tensors
ROPE_KINDS = tuple(ROPE_NEEDED)
ROPE_HEADER = ("rope_theta", "rope_type", "type", "partial_rotary_factor")  # fields of their own, or only in one layout


# ------------------------------------------------------------------------------------------------ reading


def read_config(config: Json) -> ModelConfig:
    """ModelConfig of a config.json.

    Raises UnsupportedModelError for an architecture or feature that is not implemented, CheckpointError for a
    config.json that lacks or contradicts what it must say.
    """
    family = _family(config)
    hidden, heads, layers = (
        _positive(config, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    if layers > MAX_LAYERS:
        raise CheckpointError(f"config.json: num_hidden_layers {layers} is more than any model has ({MAX_LAYERS})")
    kv_heads = _positive(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    fields: dict[str, Any] = {
        "model_type": config["model_type"],
        "vocab_size": _positive(config, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": _positive(config, "head_dim", hidden // heads),
        "intermediate_size": _positive(config, "intermediate_size"),
        "rms_norm_eps": _norm_eps(config),
        "max_context": _positive(config, "max_position_embeddings"),
        "rope": _rope(config),
        "windows": (None,) * layers,
        "tied_head": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
    }
    if (rope := fields["rope"]).kind == "yarn":  # added by hand it stretches what max_position_embeddings says
        stretched = rope.scaling["original_max_position_embeddings"] * rope.scaling["factor"]
        fields["max_context"] = max(fields["max_context"], round(min(stretched, MAX_CONTEXT)))
    result = ModelConfig(**(fields | family(config, layers)))
    if result.head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {result.head_dim} is odd, but RoPE turns pairs")
    return result


def _family(config: Json) -> Callable[[Json, int], dict[str, Any]]:
    """The family's entry, after what no family here implements has been refused."""
    model_type = config.get("model_type")
    supported = ", ".join(FAMILIES)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        architectures = config.get("architectures") or ["no architecture named"]
        named = ", ".join(map(str, architectures)) if isinstance(architectures, list) else str(architectures)
        raise UnsupportedModelError(
            f"model_type {model_type!r} ({named}) is not supported; supported: {supported} and their fine-tunes"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported: silu")
    if config.get("is_causal") is False:
        raise UnsupportedModelError(
            "is_causal false (every token sees all others) is not supported; the model does not write text"
        )
    check_quantization(config)
    return FAMILIES[model_type]


def check_quantization(config: Json) -> None:
    """Raises UnsupportedModelError where the weights are in a form that nobody here reads."""
    if quantization := config.get("quantization_config"):
        method = _quant_method(quantization)
        if method not in QUANT_METHODS:
            raise UnsupportedModelError(
                f"checkpoints quantised by {method} are not read; use one by {', '.join(QUANT_METHODS)}, "
                "or the 16-bit one and `offspec quantize`"
            )


def _quant_method(quantization: object) -> str:
    """By whom; the first files of bitsandbytes do not name it."""
    if not isinstance(quantization, Mapping):
        return "unknown"
    is_nameless = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
    return str(quantization.get("quant_method") or ("bitsandbytes" if is_nameless else "unknown"))


def _positive(config: Json, key: str, default: int | None = None) -> int:
    return _integer(config, key, default, least=1)


def _integer(config: Json, key: str, default: int | None, *, least: int) -> int:
    value = config.get(key) if config.get(key) is not None else default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"config.json: {key} must be an integer of at least {least}, not {show(value)}")
    if value > MAX_SIZE:
        raise CheckpointError(f"config.json: {key} must be at most {MAX_SIZE}, not {show(value)}")
    return value


def _positive_number(config: Json, key: str, default: float | None = None) -> float:
    value = config.get(key) if config.get(key) is not None else default
    if not _is_positive_number(value):
        raise CheckpointError(f"config.json: {key} must be a positive number, not {show(value)}")
    return float(value)


def _norm_eps(config: Json) -> float:
    value = _positive_number(config, "rms_norm_eps", 1e-6)
    _check_range("rms_norm_eps", value, EPS_RANGE)
    return value


def _is_positive_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _check_range(key: str, value: float, allowed: tuple[float, float]) -> None:
    least, most = allowed
    if not least <= value <= most:
        raise CheckpointError(f"config.json: {key} must be from {least:g} to {most:g}, not {show(value)}")


def _rope(config: Json) -> RopeConfig:
    """RoPE settings from either layout: `rope_theta` + `rope_scaling`, or `rope_parameters` (transformers 5).

    Where a file has both, `rope_scaling` was added by hand, to stretch the context: it counts.
    """
    new, old = (_mapping(config, key) for key in ("rope_parameters", "rope_scaling"))
    if kinds := [key for key, value in (old or new).items() if isinstance(value, Mapping)]:
        raise UnsupportedModelError(f"RoPE of its own for each kind of layer ({kinds[0]}) is not supported")
    scaling = dict(old or new)
    named = [source for source in (scaling, config, new) if source.get("rope_theta") is not None]
    theta = _positive_number(named[0] if named else {}, "rope_theta", 10000.0)
    _check_range("rope_theta", theta, THETA_RANGE)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise UnsupportedModelError("partial_rotary_factor other than 1 is not supported")
    numbers = ROPE_NEEDED[kind] + tuple(key for key in ROPE_OPTIONAL if scaling.get(key) not in (None, 0))
    if wrong := [key for key in numbers if not _is_positive_number(scaling.get(key))]:
        raise CheckpointError(
            f"config.json: RoPE scaling {kind!r} needs a positive {wrong[0]}, not {show(scaling.get(wrong[0]))}"
        )
    for key in numbers:
        _check_range(key, scaling[key], SCALING_RANGE)
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise CheckpointError("config.json: RoPE scaling 'llama3' needs a low_freq_factor below its high_freq_factor")
    if kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        stated = config if config.get(name) is not None else scaling
        scaling[name] = _positive(stated, name, config.get("max_position_embeddings"))
    return RopeConfig(theta, kind, {key: value for key, value in scaling.items() if key not in ROPE_HEADER})


def _mapping(config: Json, key: str) -> Json:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} must be an object, not {show(value)}")
    return value
