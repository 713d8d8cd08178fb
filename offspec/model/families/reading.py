"""What several families read from a config.json in the same way: windows, biases, numbers of experts."""

from __future__ import annotations

from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from ..config_values import Json, integer, positive
from ..rope_config import FULL, LAYER_KINDS, SLIDING

Fields = dict[str, Any]  # of ModelConfig
# Names of the number of a layer's experts; transformers 5 writes the second one for all families.
EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
MAX_EXPERTS = 10_000  # of a layer; a wrong config.json must not exhaust memory


def window_of(config: Json) -> int | None:
    """Mistral and Qwen: null is no window; without the key it is 4096, as in transformers."""
    return None if config.get("sliding_window", 4096) is None else positive(config, "sliding_window", 4096)


def qwen_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """Qwen: windows only with `use_sliding_window`: from layer `max_window_layers` on, or as in `layer_types`."""
    window = window_of(config) if config.get("use_sliding_window") else None
    if config.get("layer_types") is not None:
        return listed_windows(config, num_layers, window)
    first = integer(config, "max_window_layers", 28, least=0)
    return tuple(window if i >= first else None for i in range(num_layers))


def listed_windows(config: Json, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """Windows in the layers that `layer_types` lists."""
    kinds = config["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        listed = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise CheckpointError(f"config.json: layer_types lists {listed} layers, num_hidden_layers is {num_layers}")
    if unknown := [kind for kind in kinds if kind not in LAYER_KINDS]:
        raise UnsupportedModelError(f"layer type {unknown[0]!r} is not supported; supported: {', '.join(LAYER_KINDS)}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def alternating_windows(config: Json, num_layers: int) -> tuple[int | None, ...]:
    """Windows as in `layer_types`; without it, each `sliding_window_pattern`-th layer has full attention."""
    if (window := window_of(config)) is None and config.get("layer_types") is None:
        return (None,) * num_layers
    if config.get("layer_types") is None:
        pattern = positive(config, "sliding_window_pattern")
        kinds = [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
        config = {**config, "layer_types": kinds}
    return listed_windows(config, num_layers, window)


def refuse(config: Json, *keys: str) -> None:
    """Raise UnsupportedModelError if one of `keys` enables its feature."""
    for key in keys:
        if config.get(key):
            raise UnsupportedModelError(f"{key} {config[key]!r} is not supported for {config['model_type']}")


def biases(config: Json, attention: str = "attention_bias", mlp: str = "mlp_bias") -> Fields:
    """The fields of biases, from the keys that enable them."""
    return {
        "qkv_bias": bool(config.get(attention)),
        "o_bias": bool(config.get(attention)),
        "mlp_bias": bool(config.get(mlp)),
    }


def expert_layers(config: Json, num_layers: int) -> tuple[tuple[str, ...], ...]:
    """Parts of layers with experts in those that Qwen's keys name, and an MLP in the others."""
    step, dense = integer(config, "decoder_sparse_step", 1, least=1), config.get("mlp_only_layers") or []
    is_sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]
    return tuple(("attention", "experts" if sparse else "mlp") for sparse in is_sparse)


def numbers_of_experts(config: Json) -> tuple[int, int]:
    """The numbers of a layer's experts, and of those that a row uses. Raises CheckpointError."""
    used = "num_experts_per_tok"
    key = next((key for key in (*EXPERTS_KEYS, "default_experts") if key in config), EXPERTS_KEYS[0])
    num, num_used = positive(config, key), positive(config, used)
    if num_used > num or num > MAX_EXPERTS:
        raise CheckpointError(f"config.json: {used} {num_used} of {num} experts; at most {MAX_EXPERTS} can exist")
    return num, num_used
