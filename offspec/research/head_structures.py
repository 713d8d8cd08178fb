"""The structures of heads that `offspec distill --head` can train: their config.json, and the weights they begin with.

A structure is a function from the target to a `Beginning`. The forward is that of the loaded head (`model.heads`), so a
new structure is a `Head` class, its `HeadSpec`, and a function here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offspec.loaders.formats import dense

from ..errors import UsageError
from ..model.block import layer_shapes
from ..model.config import ModelConfig, read_config
from ..model.decoder import Decoder
from ..model.heads.eagle import (
    FC,
    JOINED_NORM,
    OF_TARGET,
    TO_TARGET,
    tapped_layers,
)
from ..model.heads.head import LAYERS, OWN_HEAD, OWN_NORM, Advanced
from ..model.shapes import NORMS_BEFORE
from .distill_params import HEADS
from .target_texts import Shard
from .unrolling import Unroll, unroll

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
UNROLLED = 6  # tokens ahead that EAGLE-3 is trained for; it goes on beyond
LEAST_LAYERS = 4  # of EAGLE-3's target
ANOTHER_HEAD = "choose another `head`"


@dataclass(frozen=True)
class Beginning:
    """A head before its training: config.json, and fp32 tensors by the names of its published files.

    layers: of the target, whose states the shards need; empty: the final states. steps: how many tokens ahead it
    learns to predict. more_loss: beside the cross entropy, of a step's rows and of what the target says there. unroll:
    how it goes over texts. has_own_head: a matrix of its own for logits, instead of the target's.
    """

    kind: str
    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    layers: tuple[int, ...]
    steps: int
    more_loss: Callable[[Advanced, Shard], Tensor] | None = None
    unroll: Unroll = unroll
    has_own_head: bool = False

    def with_tokens(self, columns: Tensor) -> Beginning:
        """An EAGLE head that predicts only the target's tokens `columns`, ascending."""
        head, is_in_table = self.tensors[OWN_HEAD], torch.zeros(len(self.tensors[OWN_HEAD]), dtype=torch.bool)
        is_in_table[columns] = True
        tables = {TO_TARGET: columns - torch.arange(len(columns)), OF_TARGET: is_in_table}
        tensors = {**self.tensors, OWN_HEAD: head[columns].clone(), **tables}
        return replace(self, config={**self.config, "draft_vocab_size": len(columns)}, tensors=tensors)


Structure = Callable[[Decoder, int], Beginning]


def eagle3(target: Decoder, seed: int, depth: int = 1) -> Beginning:
    """EAGLE-3: begins as the target's last layers (`begun_layer`) over the latest tapped states, without a view of the
    next token.

    depth: the number of layers.
    """
    c, generator = target.config, torch.Generator().manual_seed(seed)
    if c.num_layers < LEAST_LAYERS:
        raise UsageError(f"an EAGLE-3 head needs a target of {LEAST_LAYERS} layers, not {c.num_layers}; {ANOTHER_HEAD}")
    layers = [begun_layer(target, c.num_layers - depth + index, generator) for index in range(depth)]
    copied = [f"{name}.weight" for name in ("self_attn.o_proj", "post_attention_layernorm", *MLP)]
    tensors = {f"{LAYERS}0.{name}": layers[0][name] for name in copied}
    tensors |= {f"{LAYERS}0.input_layernorm.weight": torch.ones(c.hidden_size)}
    tensors |= {f"{LAYERS}0.{JOINED_NORM}": layers[0]["input_layernorm.weight"], OWN_NORM: final_norm(target)}
    for name in "qkv":
        matrix = layers[0][f"self_attn.{name}_proj.weight"]
        small = 0.02 * torch.randn(matrix.shape, generator=generator)
        tensors[f"{LAYERS}0.self_attn.{name}_proj.weight"] = torch.cat((small, matrix), dim=1)
    for index, layer in enumerate(layers[1:], 1):
        own_names = (*copied, "input_layernorm.weight", *(f"self_attn.{name}_proj.weight" for name in "qkv"))
        tensors |= {f"{LAYERS}{index}.{name}": layer[name] for name in own_names}
    taps, unseen = tapped_layers({}, c.num_layers), torch.zeros(c.hidden_size, c.hidden_size)
    tensors[FC] = torch.cat([unseen] * (len(taps) - 1) + [torch.eye(c.hidden_size)], 1)
    tensors[OWN_HEAD] = own_head(target)
    tensors[TO_TARGET] = torch.zeros(c.vocab_size, dtype=torch.long)
    return Beginning("eagle3", eagle_config(target, depth), tensors, taps, UNROLLED, has_own_head=True)


def begun_layer(target: Decoder, index: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A layer of Llama's layout: the target's layer `index`, or one that changes nothing if that has another layout."""
    names = [*(f"self_attn.{name}_proj" for name in "qkvo"), *MLP]
    matrices, norms = [f"{name}.weight" for name in names], [f"{name}.weight" for name in LAYER_NORMS]
    shapes = layer_shapes(read_config(eagle_config(target, 1)))
    if is_llamas(target.config, index):
        layer = copied_layer(target, index)
        return {name: layer[name] for name in (*matrices, *norms)}
    layer = {name: torch.ones(shapes[name]) for name in norms}
    for name in matrices:
        is_output = name.startswith(("self_attn.o_proj", "mlp.down_proj"))
        scale = 0.0 if is_output else shapes[name][1] ** -0.5
        layer[name] = scale * torch.randn(shapes[name], generator=generator)
    return layer


def is_llamas(target: ModelConfig, index: int) -> bool:
    """Whether a layer of the target computes what one of Llama's does, under the same names."""
    is_plain = target.parts_of(index) == ("attention", "mlp") and target.norm == "rms" and target.norms == NORMS_BEFORE
    has_names = (target.attention_output, target.mlp.gate) == ("self_attn.o_proj", "mlp.gate_proj")
    return is_plain and has_names and not (target.has_fused_qkv or target.mlp.is_fused)


def final_norm(target: Decoder) -> Tensor:
    """The factors of the target's final norm."""
    return shared(target, target.config.final_norm) + (target.config.norm == "rms plus one")


def eagle_config(target: Decoder, depth: int) -> dict[str, object]:
    """config.json of an EAGLE-3 head with `depth` layers."""
    c = target.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": depth,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": c.activation,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_context,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
    }


def copied_layer(target: Decoder, index: int) -> dict[str, Tensor]:
    """The weights of one of the target's layers by short names, in fp32."""
    with target.weights.layer(index) as layer:
        return {name: dense(weight, torch.float32).detach().clone().cpu() for name, weight in layer.items()}


def shared(target: Decoder, name: str) -> Tensor:
    """A tensor outside the target's layers, in fp32."""
    return dense(target.weights.shared(name), torch.float32).detach().clone().cpu()


def own_head(target: Decoder) -> Tensor:
    """The target's head as one that scales no logits."""
    return shared(target, target.config.head_name) * target.config.logit_scale


def structure_of(kind: str) -> Structure:
    """The structure of this name in `HEADS`. Raises UsageError."""
    structure: Structure | None = eagle3 if kind == "eagle3" else HEADS.load(kind)
    if structure is None:
        raise UsageError(f"`head={kind}` is no kind of head; choose one of {', '.join(HEADS)}")
    return structure
