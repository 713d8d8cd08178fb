"""The structures of heads that `offspec distill --head` can train: their config.json, and the weights they begin with.

A structure is a function from the target to a `Beginning`. The forward is that of the loaded head (`model.heads`), so a
new structure is a `Head` class, its `HeadSpec`, and a function here. Files of EAGLE-3, Medusa, Hydra, MLP speculators,
Clover-2, FSPAD, MTP layers and DFlash are published; the others are offspec's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.weights import dense

from ..checkpoints.head_files import OWN_KIND
from ..errors import UsageError
from ..model.block import layer_shapes
from ..model.config import ModelConfig, read_config
from ..model.decoder import Decoder
from ..model.heads import dflash as dflash_head
from ..model.heads import mtp as mtp_head
from ..model.heads.eagle import FC, JOINED_NORM, OF_TARGET, TO_TARGET, tapped_layers
from ..model.heads.head import LAYERS, OWN_HEAD, OWN_NORM, Advanced
from ..model.shapes import NORMS_BEFORE
from .blocks import unroll_blocks
from .distill_params import HEADS
from .own_heads import STAGES
from .target_texts import Shard
from .unrolling import Unroll, unroll

MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
UNROLLED = 6  # tokens ahead that EAGLE-3 is trained for; it goes on beyond
LEAST_LAYERS = 4  # of EAGLE-3's target
ANOTHER_HEAD = "choose another `head`"
ALIGNMENT = 10.0  # weight of the distance from the target's states, beside the cross entropy
STEPS = 5  # tokens ahead that heads without attention learn to predict
MEDUSA_CONFIG = {"medusa_num_heads": STEPS, "medusa_num_layers": 1, "model_type": "medusa"}
BLOCK_SIZE, BLOCK_LAYERS, NUM_TAPS = 8, 3, 5  # of DFlash; z-lab's heads have 10 or 16 rows, and 5 to 8 layers


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


def states_loss(made: Advanced, target: Shard) -> Tensor:
    """The distance of the head's states from the target's final states."""
    return ALIGNMENT * F.smooth_l1_loss(made.states.float(), target["states"].float())


def features_loss(made: Advanced, target: Shard) -> Tensor:
    """The distance of the head's features from the target's final states."""
    return ALIGNMENT * F.smooth_l1_loss(made.features.float(), target["states"].float())


def koala(target: Decoder, seed: int) -> Beginning:
    """KOALA's depth (2408.08146): EAGLE-3 with two layers. Its adversarial loss is left out."""
    return eagle3(target, seed, 2)


def medusa(target: Decoder, seed: int) -> Beginning:
    """Medusa with 5 heads of one residual block: each begins as the target's own head."""
    blocks, head = medusa_shared(target, seed), own_head(target)
    heads = {f"{step}.1.weight": head.clone() for step in range(STEPS)}
    tensors = {**blocks.tensors, **heads}
    return replace(blocks, kind="medusa", config=MEDUSA_CONFIG, tensors=tensors, has_own_head=True)


def medusa_shared(target: Decoder, seed: int) -> Beginning:
    """Medusa's residual blocks over the target's own head (vLLM's `original_lm_head`): each begins as the target."""
    hidden, tensors = target.config.hidden_size, dict[str, Tensor]()
    for step in range(STEPS):
        tensors |= {
            f"{step}.0.linear.weight": torch.zeros(hidden, hidden),
            f"{step}.0.linear.bias": torch.zeros(hidden),
        }
    return Beginning("medusa-shared", {**MEDUSA_CONFIG, "original_lm_head": True}, tensors, (), STEPS)


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
    named = {f"speculator.{name}": tensor for name, tensor in tensors.items()}
    return Beginning("mlp", config, named, (), STEPS, has_own_head=True)


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
    size = (
        shared(target, target.config.final_norm).square().mean().sqrt()
    )  # norms keep the size of the target's final states
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
    return Beginning("clover2", config, tensors | layers, (), STEPS, states_loss)


def fspad(target: Decoder, seed: int) -> Beginning:
    """FSPAD: begins as the target's final states, which its layer does not change."""
    c, hidden = target.config, target.config.hidden_size
    layer = begun_layer(target, c.num_layers - 1, torch.Generator().manual_seed(seed))
    copied = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
    tensors = {f"{LAYERS}0.{name}.weight": layer[f"{name}.weight"] for name in copied}
    tensors |= {f"{LAYERS}0.self_attn.o_proj.weight": torch.zeros(layer["self_attn.o_proj.weight"].shape)}
    tensors |= {f"{LAYERS}0.mlp.down_proj.weight": torch.zeros(2 * hidden, c.intermediate_size)}
    tensors |= {f"{LAYERS}0.post_attention_layernorm.weight": torch.ones(hidden)}
    tensors |= {"fc.fc.weight": torch.cat((0.02 * _small(hidden, hidden, seed), torch.eye(hidden)), dim=1)}
    tensors |= {"fc.fc.bias": torch.zeros(hidden), "fc.post_attention_layernorm.weight": torch.ones(hidden)}
    tensors |= {f"fc.mlp.{name}_proj.weight": _small(c.intermediate_size, hidden, seed + 1) for name in ("gate", "up")}
    tensors |= {"fc.mlp.down_proj.weight": torch.zeros(hidden, c.intermediate_size)}
    config = {**eagle_config(target, 1), "architectures": ["LlamaForCausalLM"], "bias": True}
    del config["draft_vocab_size"]
    return Beginning("fspad", config, tensors, (), UNROLLED, features_loss)


def mtp(target: Decoder, seed: int) -> Beginning:
    """A multi-token prediction layer as Qwen3.5's: begins as the target's final states, which it does not change.

    It also learns the target's states, over which it is chained.
    """
    c, hidden = target.config, target.config.hidden_size
    index = mtp_head.last_with_attention(c)
    if c.parts_of(index) != ("attention", "mlp"):
        description = f"an MTP head needs a target whose layers are attention and an MLP, not {c.model_type}'s"
        raise UsageError(f"{description}; {ANOTHER_HEAD}")
    layer = copied_layer(target, index)
    for name in (c.attention_output, c.mlp.down):
        layer[f"{name}.weight"] = torch.zeros_like(layer[f"{name}.weight"])
    size = final_norm(target).square().mean().sqrt()  # its norm keeps the size of the target's final states
    tensors = {f"{LAYERS}0.{name}": tensor for name, tensor in layer.items()}
    tensors |= {mtp_head.FC: torch.cat((0.02 * _small(hidden, hidden, seed), torch.eye(hidden)), dim=1)}
    offset = 1.0 if c.norm == "rms plus one" else 0.0
    norms = {
        mtp_head.EMBEDDING_NORM: torch.ones(hidden),
        mtp_head.STATE_NORM: torch.ones(hidden),
        OWN_NORM: size.repeat(hidden),
    }
    tensors |= {name: factors - offset for name, factors in norms.items()}
    named = {f"{mtp_head.PREFIX}{name}": tensor for name, tensor in tensors.items()}
    return Beginning("mtp", {"model_type": c.model_type, "mtp_num_hidden_layers": 1}, named, (), UNROLLED, states_loss)


def dflash(target: Decoder, seed: int) -> Beginning:
    """DFlash: begins as the target's first layer, because its rows are embeddings, and its last ones, as the text's
    entries are those of the latest tapped states.
    """
    c, hidden = target.config, target.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    taps, depth = block_taps(c.num_layers), min(BLOCK_LAYERS, c.num_layers)
    tensors: dict[str, Tensor] = {}
    for index, copied in enumerate((0, *range(c.num_layers - depth + 1, c.num_layers))):
        layer = begun_layer(target, copied, generator)
        tensors |= {f"{LAYERS}{index}.{name}": tensor for name, tensor in layer.items()}
        tensors |= {f"{LAYERS}{index}.self_attn.{name}_norm.weight": torch.ones(c.head_dim) for name in "qk"}
    unseen = torch.zeros(hidden, (len(taps) - 1) * hidden)
    tensors |= {dflash_head.FC: torch.cat((unseen, torch.eye(hidden)), 1), OWN_NORM: final_norm(target)}
    tensors |= {dflash_head.STATE_NORM: layer["input_layernorm.weight"].clone()}
    config = {**eagle_config(target, depth), "architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
    del config["draft_vocab_size"]
    config |= {"block_size": BLOCK_SIZE, "num_target_layers": c.num_layers}
    scales = {"input_embedding_scale": c.embedding_scale, "output_multiplier": c.logit_scale}
    scales |= {} if c.logit_cap is None else {"final_logit_softcapping": c.logit_cap}
    config |= {dflash_head.ENTRY: {"mask_token_id": c.vocab_size - 1, "target_layer_ids": list(taps), **scales}}
    return Beginning("dflash", config, tensors, taps, BLOCK_SIZE - 1, unroll=unroll_blocks)


def block_taps(num_layers: int) -> tuple[int, ...]:
    """z-lab's choice of the target's layers (from 0) whose states a block reads: from the 2nd to the last but two."""
    last = max(1, num_layers - 3)
    return tuple(sorted({round(1 + (last - 1) * index / (NUM_TAPS - 1)) for index in range(NUM_TAPS)}))


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
    layer = copied_layer(target, target.config.num_layers - 1)
    outputs = {"self_attn.o_proj.weight", f"{target.config.mlp.down}.weight"}
    made = {name: torch.zeros_like(tensor) if name in outputs else tensor for name, tensor in layer.items()}
    return {f"text.{index}.{name}": tensor.clone() for index in range(count) for name, tensor in made.items()}


def _small(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * math.sqrt(1 / columns)


STRUCTURES: dict[str, Structure] = {
    "eagle3": eagle3,
    "medusa": medusa,
    "medusa-shared": medusa_shared,
    "hydra": hydra,
    "recurrent": recurrent,
    "mlp": mlp,
    "clover": clover,
    "clover2": clover2,
    "koala": koala,
    "amphista": amphista,
    "fspad": fspad,
    "mtp": mtp,
    "dflash": dflash,
}


def structure_of(kind: str) -> Structure:
    """The structure of this name in `HEADS`. Raises UsageError."""
    if kind not in STRUCTURES:
        raise UsageError(f"`head={kind}` is no kind of head; choose one of {', '.join(HEADS)}")
    return STRUCTURES[kind]
