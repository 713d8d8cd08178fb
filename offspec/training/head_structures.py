"""The structures of heads that `offspec distill --head` can train: their config.json, and the weights they begin with.

A structure is a function from the target to a `Beginning`. The forward is that of the loaded head (`model.heads`), so a
new structure is a `Head` class, its `HeadSpec`, and a function here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec.loaders.formats import dense

from ..checkpoints.head_files import OWN_KIND
from ..errors import UsageError
from ..model.decoder import Decoder
from ..model.heads.eagle import (
    FC,
    JOINED_NORM,
    LAYERS,
    OWN_HEAD,
    OWN_NORM,
    TO_TARGET,
    tapped_layers,
)
from ..model.names import FINAL_NORM

STEPS = 5  # tokens ahead that heads without attention learn to predict
LAYER = f"{LAYERS}0."


@dataclass(frozen=True)
class Beginning:
    """A head before its training: config.json, and fp32 tensors by the names of its published files.

    layers: of the target, whose states the shards need; empty: the final states. steps: how many tokens ahead it
    learns to predict.
    """

    kind: str
    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    layers: tuple[int, ...]
    steps: int


Structure = Callable[[Decoder, int], Beginning]


def eagle3(target: Decoder, seed: int) -> Beginning:
    """EAGLE-3: begins as the target's last layer over the latest tapped states, without a view of the next token."""
    c, generator = target.config, torch.Generator().manual_seed(seed)
    taps = tapped_layers({}, c.num_layers)
    if c.has_fused_qkv or c.mlp.gate is None or c.mlp.is_fused or c.norm != "rms":
        raise UsageError(f"an EAGLE-3 head needs a target of Llama's layout, not {c.model_type}; choose another `head`")
    last = _last_layer(target)
    wanted = ("self_attn.o_proj.weight", "post_attention_layernorm.weight")
    tensors = {
        f"{LAYER}{name}": last[name] for name in (*wanted, *(f"{m}.weight" for m in (c.mlp.gate, c.mlp.up, c.mlp.down)))
    }
    tensors |= {f"{LAYER}input_layernorm.weight": torch.ones(c.hidden_size)}
    tensors |= {f"{LAYER}{JOINED_NORM}": last["input_layernorm.weight"], OWN_NORM: shared(target, FINAL_NORM)}
    for name in "qkv":
        matrix = last[f"self_attn.{name}_proj.weight"]
        small = 0.02 * torch.randn(matrix.shape, generator=generator)
        tensors[f"{LAYER}self_attn.{name}_proj.weight"] = torch.cat((small, matrix), dim=1)
    tensors[FC] = torch.cat(
        [torch.zeros(c.hidden_size, c.hidden_size)] * (len(taps) - 1) + [torch.eye(c.hidden_size)], 1
    )
    tensors[OWN_HEAD] = shared(target, c.head_name)
    tensors[TO_TARGET] = torch.zeros(c.vocab_size, dtype=torch.long)
    return Beginning("eagle3", _eagle_config(target), tensors, taps, 4)


def _eagle_config(target: Decoder) -> dict[str, object]:
    c = target.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
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


def _last_layer(target: Decoder) -> dict[str, Tensor]:
    with target.weights.layer(target.config.num_layers - 1) as layer:
        return {name: dense(weight, torch.float32).detach().clone().cpu() for name, weight in layer.items()}


def shared(target: Decoder, name: str) -> Tensor:
    """A tensor outside the target's layers, in fp32."""
    return dense(target.weights.shared(name), torch.float32).detach().clone().cpu()


def medusa(target: Decoder, seed: int) -> Beginning:
    """Medusa with 5 heads of one residual block: each begins as the target's own head."""
    hidden, head = target.config.hidden_size, shared(target, target.config.head_name)
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
                f"hydra_mlp.{step}.1.{name}.weight": matrix,
                f"hydra_mlp.{step}.1.{name}.bias": torch.zeros(hidden),
            }
    config = {"hydra_num_heads": STEPS, "hydra_num_layers": 1, "grounded_heads": True, "model_type": "hydra"}
    return Beginning("hydra", config, tensors, (), STEPS)


def recurrent(target: Decoder, seed: int) -> Beginning:
    """A recurrent cell for all steps, over the target's own head."""
    hidden, inner = target.config.hidden_size, target.config.intermediate_size
    tensors = {"cell.weight": _small(hidden, 2 * hidden, seed), "cell.bias": torch.zeros(hidden)}
    tensors |= {"up.weight": _small(inner, 2 * hidden, seed + 1), "down.weight": torch.zeros(hidden, inner)}
    return Beginning("recurrent", {OWN_KIND: "recurrent", "intermediate_size": inner}, tensors, (), STEPS)


def _small(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * math.sqrt(1 / columns)


STRUCTURES: dict[str, Structure] = {"eagle3": eagle3, "medusa": medusa, "hydra": hydra, "recurrent": recurrent}
