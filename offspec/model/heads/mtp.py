"""Multi-token prediction (MTP): a layer of the target's own kind that comes with its checkpoint as a draft.

`fc` joins the next token's embedding and the place's final state, each normed; a layer and a norm follow, then the
target's head (DeepSeek-V3, 2412.19437, section 2.2). Trained to look one token further, it is chained over its own
normed states. Names and shapes: vLLM (qwen3_5_mtp.py, deepseek_mtp.py), SGLang (deepseek_nextn.py), llama.cpp
(qwen35.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.weights import Weight
from offspec.scheduler.trees.vocabulary import Vocabulary

from ...errors import CheckpointError, UnsupportedModelError
from ..block import kv_layouts, layer_shapes
from ..config import ModelConfig
from ..config_values import Json
from ..decoder import Decoder
from ..names import LAYER_PREFIX
from .head import LAYERS, OWN_EMBEDDING, OWN_HEAD, OWN_NORM, HeadSpec, Inputs, LayeredHead

KIND = "MTP"
PREFIX = "mtp."  # of Qwen's names; the rest of them are `MtpHead`'s
FC = "fc.weight"
EMBEDDING_NORM, STATE_NORM = "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"
# DeepSeek's and GLM's names in the layer after the last one → `MtpHead`'s.
_NEXTN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}
_PROMISES = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # keys of config.json


class MtpHead(LayeredHead):
    """The first MTP layer of a checkpoint."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Weight],
        target: Decoder,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, tensors, target, Vocabulary(target.config.vocab_size), dtype)

    def joined(self, inputs: Inputs) -> Tensor:
        parts = ((self.embedded(inputs.tokens), EMBEDDING_NORM), (inputs.features, STATE_NORM))
        return linear(torch.cat([self.normed_by(name, x) for x, name in parts], dim=-1), self.tensors[FC])


def mtp_spec(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """The MTP head of a target. present: the shapes of its tensors, by `MtpHead`'s names.

    config: of the file that has it, if this is not the target's. Raises CheckpointError, UnsupportedModelError.
    """
    if (num_layers := config.get("num_hidden_layers", target.num_layers)) != target.num_layers:
        raise CheckpointError(f"the MTP layer is for a target of {num_layers} layers, not {target.num_layers}")
    expert = next((name for name in present if ".experts." in name or ".mlp.gate." in name), None)
    if expert is not None and target.experts is None:
        raise UnsupportedModelError(f"tensor {expert}: the MTP layer is a mixture of experts, and its target is none")
    if target.norm not in ("rms", "rms plus one"):
        raise UnsupportedModelError(f"an MTP layer needs RMSNorm, and a {target.model_type} has another norm")
    # The shape of the MTP layer: the target's last one with attention. Raises UnsupportedModelError.
    layer = replace(target.only_layers([last_with_attention(target)]), delta=None, tied_head=False)
    hidden = target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"{LAYERS}0.{name}": shape for name, shape in layer_shapes(layer).items()}
    shapes |= {FC: (hidden, 2 * hidden), **dict.fromkeys((EMBEDDING_NORM, STATE_NORM, OWN_NORM), (hidden,))}
    tables = {name: (target.vocab_size, hidden) for name in (OWN_EMBEDDING, OWN_HEAD) if name in present}
    make = partial(MtpHead, layer)
    return HeadSpec(KIND, layer, shapes | tables, (), target.vocab_size, make, takes_packed=True)


def last_with_attention(target: ModelConfig) -> int:
    """The target's last layer with attention. Raises UnsupportedModelError."""
    layers = [i for i, layout in enumerate(kv_layouts(target)) if layout is not None]
    if not layers:
        raise UnsupportedModelError(f"no layer of a {target.model_type} attends, as an MTP layer does")
    return layers[-1]


# ------------------------------------------------------------------------------------------------ names


def mtp_name(name: str) -> str | None:
    """`MtpHead`'s name of a tensor with Qwen's name; None for one of another layer than the first."""
    name = name.removeprefix(PREFIX)
    return None if name.startswith(LAYERS) and not name.startswith(f"{LAYERS}0.") else name


def mtp_names(names: Collection[str], num_layers: int) -> dict[str, str | None]:
    """Full name → `MtpHead`'s, of a checkpoint's MTP layers; None for one that it does not read.

    num_layers: of the target. Qwen has names of its own, DeepSeek and GLM count on after the last layer.
    """
    there = {name: mtp_name(name) for name in names if name.startswith(PREFIX)}
    first = f"{LAYER_PREFIX}{num_layers}."
    if there or not any(name.startswith(f"{first}eh_proj.") for name in names):
        return there
    pattern = re.compile(re.escape(LAYER_PREFIX) + r"(\d{1,6})\..+", re.DOTALL)
    layers = [name for name in names if (match := pattern.fullmatch(name)) and int(match[1]) >= num_layers]
    return {name: _nextn_name(name.removeprefix(first)) if name.startswith(first) else None for name in layers}


def _nextn_name(short: str) -> str:
    """`MtpHead`'s name of a tensor of DeepSeek's or GLM's MTP layer, from the name inside the layer."""
    prefix = next((prefix for prefix in _NEXTN if short.startswith(f"{prefix}.")), None)
    return f"{LAYERS}0.{short}" if prefix is None else _NEXTN[prefix] + short.removeprefix(prefix)


def num_promised(config: Json) -> int:
    """The number of MTP layers that config.json names. Raises CheckpointError."""
    count = next((config[key] for key in _PROMISES if config.get(key) is not None), 0)
    if type(count) is not int or count < 0:
        raise CheckpointError(f"config.json: the number of MTP layers is {count!r}")
    return count
