"""The structures of heads that `offspec distill --head` can train: their config.json, and the weights they begin with.

A structure is a function from the target to a `Beginning`. The forward is that of the loaded head (`model.heads`), so a
new structure is a `Head` class, its `HeadSpec`, and a function here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from offspec.loaders.formats import dense

from ..checkpoints.head_files import OWN_KIND
from ..errors import UsageError
from ..lab.own_heads import STAGES
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.families import NORMS_BEFORE
from ..model.heads.eagle import (
    FC,
    JOINED_NORM,
    LAYERS,
    OF_TARGET,
    OWN_HEAD,
    OWN_NORM,
    TO_TARGET,
    tapped_layers,
)
from ..model.names import FINAL_NORM

STEPS = 5  # tokens ahead that heads without attention learn to predict
UNROLLED = 6  # tokens ahead that EAGLE-3 is trained for; it goes on beyond
LEAST_LAYERS = 4  # of EAGLE-3's target
ANOTHER_HEAD = "choose another `head`"


@dataclass(frozen=True)
class Beginning:
    """A head before its training: config.json, and fp32 tensors by the names of its published files.

    layers: of the target, whose states the shards need; empty: the final states. steps: how many tokens ahead it
    learns to predict. aligned: what else is trained to be the target's final states.
    """

    kind: str
    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    layers: tuple[int, ...]
    steps: int
    aligned: Literal["states", "features"] | None = None

    def with_tokens(self, columns: Tensor) -> Beginning:
        """An EAGLE head that predicts only the target's tokens `columns`, ascending."""
        head, known = self.tensors[OWN_HEAD], torch.zeros(len(self.tensors[OWN_HEAD]), dtype=torch.bool)
        known[columns] = True
        tables = {TO_TARGET: columns - torch.arange(len(columns)), OF_TARGET: known}
        tensors = {**self.tensors, OWN_HEAD: head[columns].clone(), **tables}
        return replace(self, config={**self.config, "draft_vocab_size": len(columns)}, tensors=tensors)


Structure = Callable[[Decoder, int], Beginning]


def eagle3(target: Decoder, seed: int, depth: int = 1) -> Beginning:
    """EAGLE-3: begins as the target's last layers over the latest tapped states, without a view of the next token.

    depth: the number of layers.
    """
    c, generator = target.config, torch.Generator().manual_seed(seed)
    _need_llamas_layout("EAGLE-3", c)
    if c.num_layers < LEAST_LAYERS:
        raise UsageError(f"an EAGLE-3 head needs a target of {LEAST_LAYERS} layers, not {c.num_layers}; {ANOTHER_HEAD}")
    if c.norms != NORMS_BEFORE:
        raise UsageError(f"an EAGLE-3 head needs norms before attention and MLP, not {c.model_type}'s; {ANOTHER_HEAD}")
    layers = [_layer(target, c.num_layers - depth + index) for index in range(depth)]
    wanted = ("self_attn.o_proj.weight", "post_attention_layernorm.weight")
    copied = (*wanted, *(f"{name}.weight" for name in (c.mlp.gate, c.mlp.up, c.mlp.down)))
    tensors = {f"{LAYERS}0.{name}": layers[0][name] for name in copied}
    tensors |= {f"{LAYERS}0.input_layernorm.weight": torch.ones(c.hidden_size)}
    tensors |= {f"{LAYERS}0.{JOINED_NORM}": layers[0]["input_layernorm.weight"], OWN_NORM: shared(target, FINAL_NORM)}
    for name in "qkv":
        matrix = layers[0][f"self_attn.{name}_proj.weight"]
        small = 0.02 * torch.randn(matrix.shape, generator=generator)
        tensors[f"{LAYERS}0.self_attn.{name}_proj.weight"] = torch.cat((small, matrix), dim=1)
    for index, layer in enumerate(layers[1:], 1):
        own = (*copied, "input_layernorm.weight", *(f"self_attn.{name}_proj.weight" for name in "qkv"))
        tensors |= {f"{LAYERS}{index}.{name}": layer[name] for name in own}
    taps, unseen = tapped_layers({}, c.num_layers), torch.zeros(c.hidden_size, c.hidden_size)
    tensors[FC] = torch.cat([unseen] * (len(taps) - 1) + [torch.eye(c.hidden_size)], 1)
    tensors[OWN_HEAD] = own_head(target)
    tensors[TO_TARGET] = torch.zeros(c.vocab_size, dtype=torch.long)
    return Beginning("eagle3", _eagle_config(target, depth), tensors, taps, UNROLLED)


def _need_llamas_layout(kind: str, target: ModelConfig) -> None:
    """Raises UsageError."""
    mlp = target.mlp
    if target.has_fused_qkv or mlp.gate is None or mlp.is_fused or target.norm != "rms":
        said = f"an {kind} head needs a target of Llama's layout, not {target.model_type}"
        raise UsageError(f"{said}; {ANOTHER_HEAD}")


def koala(target: Decoder, seed: int) -> Beginning:
    """KOALA's depth (2408.08146): EAGLE-3 with two layers. Its adversarial loss is left out."""
    return eagle3(target, seed, 2)


def _eagle_config(target: Decoder, depth: int) -> dict[str, object]:
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


def _layer(target: Decoder, index: int) -> dict[str, Tensor]:
    with target.weights.layer(index) as layer:
        return {name: dense(weight, torch.float32).detach().clone().cpu() for name, weight in layer.items()}


def shared(target: Decoder, name: str) -> Tensor:
    """A tensor outside the target's layers, in fp32."""
    return dense(target.weights.shared(name), torch.float32).detach().clone().cpu()


def own_head(target: Decoder) -> Tensor:
    """The target's head as one that scales no logits."""
    return shared(target, target.config.head_name) * target.config.logit_scale


def medusa(target: Decoder, seed: int) -> Beginning:
    """Medusa with 5 heads of one residual block: each begins as the target's own head."""
    hidden, head = target.config.hidden_size, own_head(target)
    tensors: dict[str, Tensor] = {}
    for step in range(STEPS):
        tensors |= {
            f"{step}.0.linear.weight": torch.zeros(hidden, hidden),
            f"{step}.0.linear.bias": torch.zeros(hidden),
        }
        tensors[f"{step}.1.weight"] = head.clone()
    config = {"medusa_num_heads": STEPS, "medusa_num_layers": 1, "model_type": "medusa"}
    return Beginning("medusa", config, tensors, (), STEPS)


def hydra(target: Decoder, seed: int) -> Beginning:
    """Hydra with 5 heads of one block, over the target's own head: each begins as Medusa's."""
    hidden, tensors = target.config.hidden_size, dict[str, Tensor]()
    for step in range(STEPS):
        wide = (2 + step) * hidden
        passed = torch.cat((torch.eye(hidden), torch.zeros(hidden, wide - hidden)), dim=1)
        for name, matrix in (("linear", _small(hidden, wide, seed + step)), ("res_connection", passed)):
            tensors |= {
                f"hydra_mlp.{step}.0.{name}.weight": matrix,
                f"hydra_mlp.{step}.0.{name}.bias": torch.zeros(hidden),
            }
    config = {"hydra_num_heads": STEPS, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}
    return Beginning("hydra", config, tensors, (), STEPS)


def recurrent(target: Decoder, seed: int) -> Beginning:
    """A recurrent cell for all steps, over the target's own head."""
    hidden, inner = target.config.hidden_size, target.config.intermediate_size
    tensors = {"cell.weight": _small(hidden, 2 * hidden, seed), "cell.bias": torch.zeros(hidden)}
    tensors |= {"up.weight": _small(inner, 2 * hidden, seed + 1), "down.weight": torch.zeros(hidden, inner)}
    return Beginning("recurrent", {OWN_KIND: "recurrent", "intermediate_size": inner}, tensors, (), STEPS)


def mlp(target: Decoder, seed: int) -> Beginning:
    """An MLP speculator of 5 steps, as wide as the target's state, with one embedding and head for all steps."""
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "n_predict": STEPS}
    config |= {"emb_dim": hidden, "inner_dim": hidden, "vocab_size": vocab, "tie_weights": True, "scale_input": True}
    tensors = {"emb.0.weight": shared(target, target.config.embedding_name), "proj.0.weight": torch.eye(hidden)}
    tensors |= {"proj.1.weight": torch.eye(hidden), "head.0.weight": own_head(target)}
    tensors |= {"ln.0.weight": torch.ones(hidden), "ln.0.bias": torch.zeros(hidden)}
    return Beginning("mlp", config, {f"speculator.{name}": tensor for name, tensor in tensors.items()}, (), STEPS)


def clover(target: Decoder, seed: int) -> Beginning:
    """Clover: a layer over the text, and steps that attend to the path's tokens."""
    hidden = target.config.hidden_size
    tensors = {"q.weight": _small(hidden, hidden, seed), "kv.weight": _small(2 * hidden, hidden, seed + 1)}
    tensors |= {"o.weight": torch.zeros(hidden, hidden), "places": torch.zeros(STEPS, hidden)}
    tensors |= {f"blocks.{step}.weight": torch.zeros(hidden, hidden) for step in range(STEPS)} | _text_layers(target, 1)
    config = {OWN_KIND: "clover", "num_steps": STEPS, "num_attention_heads": _num_heads(target.config)}
    return Beginning("clover", config, tensors, (), STEPS)


def clover2(target: Decoder, seed: int) -> Beginning:
    """Clover-2: a cell that renews the state by each token, and layers over the text behind its first step."""
    hidden, heads = target.config.hidden_size, _num_heads(target.config)
    names, tensors = ("clover_head_mlp_rnn", "clover_head_mlp_rnn2"), dict[str, Tensor]()
    size = shared(target, FINAL_NORM).square().mean().sqrt()  # norms keep the size of the target's final states
    for index, cell in enumerate(names):
        tensors |= {f"{cell}.{name}.weight": torch.eye(hidden) for name in "qk"}
        tensors |= {f"{cell}.v.weight": 0.1 * _small(hidden, hidden, seed + index)}
        tensors |= {f"{cell}.{name}.bias": torch.zeros(hidden) for name in "qkv"}
        tensors |= {f"{cell}.input_layernorm.weight": torch.ones(hidden)}
    tensors |= {"clover_head_mlp.weight": torch.eye(hidden), "clover_head_mlp.bias": torch.zeros(hidden)}
    tensors |= {"clover_head_mlp2.weight": torch.eye(hidden, 2 * hidden), "clover_head_mlp2.bias": torch.zeros(hidden)}
    tensors |= {name: size.repeat(hidden) for name in ("clover_norm.weight", "clover_head_norm.weight")}
    layers = {name.replace("text.", LAYERS, 1): tensor for name, tensor in _text_layers(target, 2).items()}
    config = {"num_attention_heads": heads, "clover": {"num_heads": STEPS, "num_layers": 2}}
    return Beginning("clover2", config, tensors | layers, (), STEPS, "states")


def fspad(target: Decoder, seed: int) -> Beginning:
    """FSPAD: begins as the target's final states, which its layer does not change."""
    c, hidden = target.config, target.config.hidden_size
    _need_llamas_layout("FSPAD", c)
    layer = _layer(target, c.num_layers - 1)
    copied = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
    tensors = {f"{LAYERS}0.{name}.weight": layer[f"{name}.weight"] for name in copied}
    tensors |= {f"{LAYERS}0.self_attn.o_proj.weight": torch.zeros(layer["self_attn.o_proj.weight"].shape)}
    tensors |= {f"{LAYERS}0.mlp.down_proj.weight": torch.zeros(2 * hidden, c.intermediate_size)}
    tensors |= {f"{LAYERS}0.post_attention_layernorm.weight": torch.ones(hidden)}
    tensors |= {"fc.fc.weight": torch.cat((0.02 * _small(hidden, hidden, seed), torch.eye(hidden)), dim=1)}
    tensors |= {"fc.fc.bias": torch.zeros(hidden), "fc.post_attention_layernorm.weight": torch.ones(hidden)}
    tensors |= {f"fc.mlp.{name}_proj.weight": _small(c.intermediate_size, hidden, seed + 1) for name in ("gate", "up")}
    tensors |= {"fc.mlp.down_proj.weight": torch.zeros(hidden, c.intermediate_size)}
    config = {**_eagle_config(target, 1), "architectures": ["LlamaForCausalLM"], "bias": True}
    del config["draft_vocab_size"]
    return Beginning("fspad", config, tensors, (), UNROLLED, "features")


def amphista(target: Decoder, seed: int) -> Beginning:
    """Amphista: layers over the text, and states of all steps at once, which attend to each other."""
    c, hidden, inner = target.config, target.config.hidden_size, target.config.intermediate_size
    tensors = {"qkv.weight": _small(3 * hidden, hidden, seed), "up.weight": _small(inner, hidden, seed + 1)}
    tensors |= {"o.weight": torch.zeros(hidden, hidden), "down.weight": torch.zeros(hidden, inner)}
    tensors |= {"token.weight": torch.zeros(hidden, 2 * hidden), "places": torch.zeros(STEPS, hidden)}
    tensors |= {f"blocks.{step}.weight": _small(hidden, hidden, seed + 2 + step) for step in range(STEPS)}
    config = {OWN_KIND: "amphista", "num_steps": STEPS, "intermediate_size": inner}
    config |= {"num_attention_heads": _num_heads(c)}
    return Beginning("amphista", config, tensors | _text_layers(target, STAGES), (), STEPS)


def _num_heads(target: ModelConfig) -> int:
    """Heads of a head's own attention, which divide the hidden size: the target's, if they do."""
    return math.gcd(target.num_heads, target.hidden_size)


def _text_layers(target: Decoder, count: int) -> dict[str, Tensor]:
    """Layers over the text that change nothing yet: copies of the target's last one, whose outputs are zero."""
    layer = _layer(target, target.config.num_layers - 1)
    outputs = {"self_attn.o_proj.weight", f"{target.config.mlp.down}.weight"}
    made = {name: torch.zeros_like(tensor) if name in outputs else tensor for name, tensor in layer.items()}
    return {f"text.{index}.{name}": tensor.clone() for index in range(count) for name, tensor in made.items()}


def _small(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * math.sqrt(1 / columns)


STRUCTURES: dict[str, Structure] = {
    "eagle3": eagle3,
    "medusa": medusa,
    "hydra": hydra,
    "recurrent": recurrent,
    "mlp": mlp,
    "clover": clover,
    "clover2": clover2,
    "koala": koala,
    "amphista": amphista,
    "fspad": fspad,
}
