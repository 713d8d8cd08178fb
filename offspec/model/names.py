"""The names of a checkpoint's tensors, as Hugging Face gives them to every family of `config.FAMILIES`.

Outside a layer a tensor goes by its full name, inside one by its short name: what follows "model.layers.3.".
"""

from __future__ import annotations

LAYER_PREFIX = "model.layers."
EMBEDDING = "model.embed_tokens.weight"  # [vocab, hidden]
FINAL_NORM = "model.norm.weight"  # [hidden]
FINAL_NORM_BIAS = "model.norm.bias"  # [hidden], where the family has one
HEAD = "lm_head.weight"  # [vocab, hidden]; a tied head is the embedding, see `ModelConfig.head_name`


def in_layer(index: int, short: str) -> str:
    """The full name of layer `index`'s tensor `short`."""
    return f"{LAYER_PREFIX}{index}.{short}"
