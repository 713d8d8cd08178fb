"""Hugging Face's names of tensors, for all families of `config.FAMILIES`.

A tensor outside the layers has a full name. One inside a layer also has a short name: the part after "model.layers.3.".
"""

from __future__ import annotations

LAYER_PREFIX = "model.layers."
EMBEDDING = "model.embed_tokens.weight"  # [vocab, hidden]
FINAL_NORM = "model.norm.weight"  # [hidden]; some families have another, see `ModelConfig.final_norm`
INPUT_TABLE = "model.embed_tokens_per_layer.weight"  # [vocab, layers * size], what layers get of each token
INPUT_PROJECTION = "model.per_layer_model_projection.weight"  # [layers * size, hidden]
INPUT_NORM = "model.per_layer_projection_norm.weight"  # [size]
HEAD = "lm_head.weight"  # [vocab, hidden]; a tied head is the embedding, see `ModelConfig.head_name`


def in_layer(index: int, short: str) -> str:
    """The full name of layer `index`'s tensor `short`."""
    return f"{LAYER_PREFIX}{index}.{short}"


def split_name(name: str) -> tuple[int | None, str]:
    """A full name as the layer's number and the name in it; None and the whole name outside of layers."""
    number, dot, short = name.removeprefix(LAYER_PREFIX).partition(".")
    is_inner = name.startswith(LAYER_PREFIX) and dot and number.isdecimal()
    return (int(number), short) if is_inner else (None, name)
