"""Checkpoints in Mistral's own layout under Hugging Face's names: tensors, settings, tokenizer.

The source is Mistral's reference code (mistral_inference, `args.py` and `transformer_layers.py`), and for `yarn` and
`llama_4_scaling` vLLM's reader (transformers_utils/configs/mistral.py). Rows of queries and keys have the order of
llama.cpp's, which weight formats undo (`Change`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from offspec.loaders.files.checkpoint import Change, CheckpointView, Order, TensorInfo, fault, show
from offspec.loaders.files.mistral_folder import PARAMS_FILE, TEKKEN_FILE, MistralCheckpoint
from offspec.loaders.files.safetensors_folder import CONFIG_FILE

from ..errors import CheckpointError, UnsupportedModelError
from ..model.config_values import Json, mapping, number_in, number_of_layers, positive, positive_number
from ..model.names import EMBEDDING, FINAL_NORM, HEAD, in_layer
from ..model.rope_config import FULL, ORIGINAL_CONTEXT, SLIDING
from ..text.tekken import read_tekken
from ..text.tokenizer_files import as_files

EAGLE_FC = "fc.weight"  # of a head, in place of a model
_SHARED = {
    "tok_embeddings.weight": EMBEDDING,
    "norm.weight": FINAL_NORM,
    "output.weight": HEAD,
    "eagle_linear.weight": EAGLE_FC,
    "eagle_linear.qscale_weight": "fc.weight_scale",
    "eagle_linear.qscale_act": "fc.input_scale",
}
_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)\.([a-z_0-9]+)")
_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_PARTS = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}  # of fp8
_HEADS = {"attention.wq": "num_attention_heads", "attention.wk": "num_key_value_heads"}
_OF_IMAGES = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
_KEYS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
}
# What else is read, or changes nothing. Another key that says something may change the arithmetic.
_READ = (
    *("n_kv_heads", "head_dim", "norm_eps", "rope_theta", "max_position_embeddings", "max_seq_len", "tied_embeddings"),
    *("sliding_window", "yarn", "llama_4_scaling", "quantization", "quantization_config", "vision_encoder"),
    *("multimodal", "model_type", "activation", "causal", "dtype"),
)
_LONGEST = 128_000  # the context if the file does not state it, as in vLLM


class TranslatedMistral(CheckpointView):
    """The checkpoint under Hugging Face's names."""

    def companions(self) -> dict[str, Path | bytes]:
        """The tokenizer in Hugging Face's files, too. Raises TokenizerError."""
        files, tokenizer = dict(self.whole.companions()), self.tokenizer_path
        if tokenizer is not None and tokenizer.name == TEKKEN_FILE:
            files.update(as_files(*read_tekken(tokenizer)))
        return files


def translated(checkpoint: MistralCheckpoint) -> TranslatedMistral:
    """Raises CheckpointError, UnsupportedModelError."""
    try:
        config = _config(checkpoint.config, checkpoint.path)
    except CheckpointError as exc:
        if str(checkpoint.path) in str(exc):
            raise
        raise fault(checkpoint.path, str(exc).replace(CONFIG_FILE, PARAMS_FILE)) from exc
    tensors: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        if name.startswith(_OF_IMAGES):
            continue
        named = _named(info, config)
        if tensors.setdefault(named.name, named) is not named:
            raise fault(info.path, f"has {show(named.name)} twice, also as {show(name)}; download it again")
    names = (*checkpoint.tensors, *checkpoint.config)
    has_images = any(name.startswith(_OF_IMAGES) or name == "vision_encoder" for name in names)
    note = f"{checkpoint.path.name} is a multimodal model; offspec loads its language model only and reads no images"
    return TranslatedMistral(checkpoint, tensors, config, (note,) if has_images else ())


def _named(info: TensorInfo, config: Json) -> TensorInfo:
    """The tensor under Hugging Face's name. An unknown tensor keeps its name, and the decoder refuses it."""
    if (match := _LAYER.fullmatch(info.name)) is None or match[2] not in _NAMES:
        return replace(info, name=_SHARED.get(info.name, info.name))
    part = _PARTS.get(match[3], match[3])
    heads = _HEADS.get(match[2])
    change = Change(rows=Order(2, groups=config[heads])) if heads is not None and part == "weight" else None
    return replace(info, name=in_layer(int(match[1]), f"{_NAMES[match[2]]}.{part}"), change=change)


def _config(params: Json, path: Path) -> dict[str, Any]:
    """params.json → config.json."""
    where = path / PARAMS_FILE
    if unknown := [key for key, value in params.items() if value and key not in (*_READ, *_KEYS.values())]:
        raise UnsupportedModelError(
            f"{where}: {show(unknown[0])} is not supported; use a checkpoint with a config.json"
        )
    if params.get("rope_theta") is None:
        raise fault(where, "has no rope_theta, as those of older versions; use a checkpoint with a config.json")
    config = {ours: positive(params, theirs) for ours, theirs in _KEYS.items()}
    heads = config["num_attention_heads"]
    longest = params.get("max_position_embeddings") or params.get("max_seq_len") or _LONGEST
    return {
        **config,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_key_value_heads": positive(params, "n_kv_heads", heads),
        "head_dim": positive(params, "head_dim", config["hidden_size"] // heads),
        "hidden_act": params.get("activation") or "silu",
        "rms_norm_eps": positive_number(params, "norm_eps"),
        "max_position_embeddings": positive({"max_position_embeddings": longest}, "max_position_embeddings"),
        "tie_word_embeddings": bool(params.get("tied_embeddings")),
        "is_causal": params.get("causal") is not False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
        **_windows(params, where),
        **_quantization(params, where),
        **_rope(params, where),
    }


def _windows(params: Json, where: Path) -> dict[str, Any]:
    """One window for all layers, or a list of windows that repeats."""
    window = params.get("sliding_window")
    if not isinstance(window, list):
        return {"sliding_window": window}
    sizes, layers = {size for size in window if size is not None}, number_of_layers(params, "n_layers")
    if len(sizes) > 1 or not window or layers % len(window):
        raise fault(where, f"sliding_window {show(window)} is not supported for {layers} layers")
    if not sizes:
        return {"sliding_window": None}
    kinds = [FULL if size is None else SLIDING for size in window] * (layers // len(window))
    return {"sliding_window": sizes.pop(), "layer_types": kinds}


def _quantization(params: Json, where: Path) -> dict[str, Any]:
    if given := mapping(params, "quantization_config"):
        return {"quantization_config": dict(given)}
    given = mapping(params, "quantization")
    if given and given.get("qformat_weight") != "fp8_e4m3":
        raise UnsupportedModelError(f"{where}: quantization {show(given)} is not supported, only fp8_e4m3")
    return {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}} if given else {}


def _rope(params: Json, where: Path) -> dict[str, Any]:
    """RoPE with YaRN, and queries that grow with their position, which make it a Ministral 3."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": positive_number(params, "rope_theta")}
    if yarn := mapping(params, "yarn"):
        rope |= {
            "rope_type": "yarn",
            "factor": positive_number(yarn, "factor"),
            ORIGINAL_CONTEXT: positive(yarn, ORIGINAL_CONTEXT),
            "beta_fast": number_in(yarn, "beta", 32.0),
            "beta_slow": number_in(yarn, "alpha", 1.0),
        }
        if yarn.get("apply_scale") is False:
            rope["attention_factor"] = 1.0
    growth = mapping(params, "llama_4_scaling")
    if not growth:
        return {"rope_parameters": rope}
    original = positive(growth, ORIGINAL_CONTEXT)
    if rope.setdefault(ORIGINAL_CONTEXT, original) != original:
        raise fault(where, f"yarn and llama_4_scaling have different {ORIGINAL_CONTEXT}, which is not supported")
    if isinstance(params.get("sliding_window"), list) and any(params["sliding_window"]):
        raise fault(where, "llama_4_scaling with a list of windows is not supported")
    rope["llama_4_scaling_beta"] = positive_number(growth, "beta")
    return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "rope_parameters": rope}
