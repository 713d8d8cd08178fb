"""EAGLE heads: one decoder layer (seldom more) over the target's states and the next token's embedding.

EAGLE-1 and 2 (2401.15077, 2406.16858): `fc` joins embedding and final state; the target's own head. EAGLE-3
(2503.01840): `fc` joins states after three layers, the layer reads embedding and features side by side, and norm and
head are its own. Mistral's heads are EAGLE-1 with whole layers, and a norm behind them. Names and shapes:
SafeAILab/EAGLE (cnets1.py, cnets.py), SpecForge (llama3_eagle.py), Speculators (models/eagle3/core.py), vLLM
(llama_eagle.py, llama_eagle3.py, mistral_eagle.py), SGLang (llama_eagle3.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.weights import Weight
from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.trees.vocabulary import Vocabulary

from ...errors import CheckpointError, UnsupportedModelError
from ..block import Block, layer_shapes, rotaries_of
from ..config import ModelConfig, read_config
from ..config_values import Json, number_in
from ..decoder import Decoder
from ..parts.attention import Attention
from ..parts.kinds import parts_of
from ..parts.mlp import Mlp
from ..parts.part import LayerWeights, Part, PassRows, as_vector
from ..rope import RotaryEmbeddings
from ..shapes import NormPlaces
from .head import LAYERS, OWN_EMBEDDING, OWN_HEAD, OWN_NORM, HeadSpec, Inputs, LayeredHead

FC, FC_BIAS = "fc.weight", "fc.bias"
TO_TARGET, OF_TARGET = "d2t", "t2d"
JOINED_NORM, INPUT_NORM = "hidden_norm.weight", "input_norm.weight"
TAPPED = "eagle_aux_hidden_state_layer_ids"  # the key in config.json of the target's layers whose states are read
WITHOUT_INPUT_NORM = NormPlaces(before_attention=None)
FAMILIES = ("llama", "qwen3", "mistral")  # of the layers in Speculators' files; others' are Llama's, or Mistral's
MOST_LAYERS = 64
BIASES = {"qkv": "self_attn.q_proj", "o": "self_attn.o_proj", "mlp": "mlp.gate_proj"}  # config.json seldom says them


@dataclass(frozen=True)
class EagleShape:
    """A head's shape beside that of its layers.

    version: 1 or 3. norm_before_residual: the residual is the normed features. norm_output: children get normed states.
    has_norms: EAGLE-3, and version 1 as Mistral has it, with the first layer's norm and the final one.
    """

    config: ModelConfig
    version: int
    target_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_output: bool = False
    has_norms: bool = True


class JoinedAttention(Attention):
    """EAGLE-3's first attention, to embedding and features side by side."""

    def __init__(self, shape: EagleShape, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(shape.config, 0, rotaries)
        self._norm_before_residual = shape.norm_before_residual

    @property
    def norms(self) -> list[str]:
        return [*super().norms, "hidden_norm"]

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Queries, keys and values have twice as many columns."""
        return {
            name: (rows, columns if name.endswith(".o_proj") else 2 * columns)
            for name, (rows, columns) in super().matrices.items()
        }

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """x [T, 2 * hidden]: embeddings, then features; returns [T, hidden]."""
        embedded, features = x.chunk(2, dim=-1)
        normed = self.norm(features, weights, "hidden_norm")
        joined = torch.cat((self.norm(embedded, weights, "input_layernorm"), normed), dim=-1)
        residual = normed if self._norm_before_residual else features
        return residual + self.attended(joined, weights, rows, first, last)


def first_parts(shape: EagleShape, rotaries: RotaryEmbeddings | None = None) -> list[Part]:
    """The parts of a head's first layer."""
    if shape.version == 1:
        config = shape.config if shape.has_norms else replace(shape.config, norms=WITHOUT_INPUT_NORM)
        return parts_of(config, 0, rotaries)
    return [JoinedAttention(shape, rotaries), Mlp(shape.config, 0)]


class EagleHead(LayeredHead):
    """An EAGLE head of version 1 or 3."""

    def __init__(
        self, shape: EagleShape, tensors: Mapping[str, Weight], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        """tensors: by the names of `eagle_shapes`, on the target's device."""
        self._shape = shape
        self.feeds_normed = shape.norm_output
        config = shape.config
        self.target_layers = shape.target_layers
        super().__init__(config, tensors, target, vocabulary_of(tensors, target), dtype)
        self.blocks[0] = Block(0, self._first_parts(rotaries_of(config, self.dtype, self.device)))

    def _first_parts(self, rotaries: RotaryEmbeddings) -> Sequence[Part]:
        return first_parts(self._shape, rotaries)

    def fused(self, states: Tensor) -> Tensor:
        states = states.to(self.dtype)
        if self._shape.version == 1:
            return states
        if INPUT_NORM in self.tensors:
            states = self.normed_by(INPUT_NORM, states)
        if fc_norm(0) in self.tensors:
            parts = states.chunk(len(self.target_layers), dim=-1)
            states = torch.cat([self.normed_by(fc_norm(i), part) for i, part in enumerate(parts)], dim=-1)
        return self._fc(states)

    def joined(self, inputs: Inputs) -> Tensor:
        x = torch.cat((self.embedded(inputs.tokens), inputs.features), dim=-1)
        return self._fc(x) if self._shape.version == 1 else x

    def normed(self, hidden: Tensor) -> Tensor:
        """EAGLE-1 predicts the target's final states; other heads have a norm."""
        return super().normed(hidden) if self._shape.has_norms else hidden

    def _fc(self, x: Tensor) -> Tensor:
        bias = self.tensors.get(FC_BIAS)
        return linear(x, self.tensors[FC], None if bias is None else as_vector(bias))


def vocabulary_of(tensors: Mapping[str, Weight], target: Decoder) -> Vocabulary:
    """The tokens of the head's logits. Raises CheckpointError for a table d2t that is no selection of tokens."""
    vocab_size = target.config.vocab_size
    size = tensors[OWN_EMBEDDING].shape[0] if OWN_EMBEDDING in tensors else vocab_size
    if TO_TARGET not in tensors:  # columns are the first tokens
        return Vocabulary(min(size, tensors[OWN_HEAD].shape[0]) if OWN_HEAD in tensors else size)
    try:
        vocabulary = Vocabulary.from_offsets(as_vector(tensors[TO_TARGET]).cpu().numpy(), size, to_device)
    except ValueError as exc:
        raise CheckpointError(f"the head's table {TO_TARGET} is damaged ({exc}); download it again") from exc
    if not vocabulary.num_known(vocab_size):
        raise CheckpointError(
            f"the head's table {TO_TARGET} has no token of this target, which has {vocab_size}; choose another head"
        )
    return vocabulary


def fc_norm(index: int) -> str:
    """The name of the norm of the states of the chosen layer `index`."""
    return f"fc_norm.{index}.weight"


# ------------------------------------------------------------------------------------------------ from files


def eagle_spec(version: int, config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """The head that a config.json describes. present: the shapes of the file's tensors, by `eagle_name`.

    Raises UnsupportedModelError, CheckpointError.
    """
    shape = eagle_shape(version, config, present, target)
    make = partial(EagleHead, shape)
    shapes = eagle_shapes(shape, present, target)
    kind, layers = f"EAGLE-{version}", shape.target_layers
    return HeadSpec(kind, shape.config, shapes, layers, shape.config.vocab_size, make, takes_packed=True)


def eagle_shape(version: int, config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> EagleShape:
    """See `eagle_spec`."""
    inner = config.get("transformer_layer_config", config)
    if not isinstance(inner, Mapping):
        raise CheckpointError("config.json: transformer_layer_config is not an object")
    family = inner.get("model_type") if inner is not config or config.get("model_type") == "mistral" else "llama"
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"EAGLE heads of {family!r} layers are not supported, only of {', '.join(FAMILIES)}"
        )
    layers = inner.get("num_hidden_layers", 1)
    inherited = {"vocab_size": target.vocab_size, "max_position_embeddings": target.max_context}
    head_config = read_config(
        {**inherited, **inner, "num_hidden_layers": layers, "model_type": family, "is_causal": None}
    )
    if head_config.num_layers > MOST_LAYERS:
        raise UnsupportedModelError(f"an EAGLE head of {head_config.num_layers} layers is not supported")
    columns = _num_rows(present, OWN_HEAD, target.vocab_size)
    biases: dict[str, Any] = {f"{part}_bias": f"{LAYERS}0.{name}.bias" in present for part, name in BIASES.items()}
    head_config = replace(
        head_config, vocab_size=columns, tied_head=False, logit_scale=number_in(config, "logit_scale", 1.0), **biases
    )
    if head_config.hidden_size != target.hidden_size and (version == 1 or OWN_EMBEDDING not in present):
        raise CheckpointError(f"the head has hidden size {head_config.hidden_size}, the target {target.hidden_size}")
    tapped = tapped_layers(config, target.num_layers) if version == 3 else ()
    has_norms = version == 3 or OWN_NORM in present
    flags = {name: config.get(name) is True for name in ("norm_before_residual", "norm_output")}
    flags["norm_output"] |= version == 1 and has_norms
    return EagleShape(head_config, version, tapped, **flags, has_norms=has_norms)


def _num_rows(present: Mapping[str, tuple[int, ...]], name: str, default: int) -> int:
    """Rows of a tensor, at least 1; the default if it is not there."""
    return max(1, present[name][0]) if present.get(name) else default


def tapped_layers(config: Json, num_layers: int) -> tuple[int, ...]:
    """The target's layers (from 0) after which an EAGLE-3 head reads states.

    Files count differently. At the top level (Speculators, vLLM) layer i is layer i's *input*; in `eagle_config`
    (SpecForge, SGLang) its output. The default [2, N / 2, N - 3] are inputs, too. Raises UnsupportedModelError.
    """
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    if nested.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModelError("an EAGLE-3 head that reads final states alone is not supported")
    if config.get(TAPPED) is not None:
        numbers, shift = config[TAPPED], 1
    elif nested.get(TAPPED) is not None:
        numbers, shift = nested[TAPPED], 0
    else:
        numbers, shift = [2, num_layers // 2, num_layers - 3], 1
    if not isinstance(numbers, list) or not numbers or not all(type(layer) is int for layer in numbers):
        raise CheckpointError(f"config.json: {TAPPED} is not a list of layers")
    layers = tuple(layer - shift for layer in numbers)
    if wrong := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise UnsupportedModelError(
            f"the head reads states after layer {wrong[0] + 1}, and the target has layers 1 to {num_layers}"
        )
    return layers


def eagle_shapes(
    shape: EagleShape, present: Mapping[str, tuple[int, ...]], target: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Name → shape of the tensors that a head of this shape has; optional ones only if they are `present`."""
    c, hidden = shape.config, shape.config.hidden_size
    num_taps = len(shape.target_layers)
    shapes: dict[str, tuple[int, ...]] = {
        f"{LAYERS}{i}.{name}": size for i in range(1, c.num_layers) for name, size in layer_shapes(c, i).items()
    }
    shapes |= {f"{LAYERS}0.{name}": size for name, size in Block(0, first_parts(shape)).shapes.items()}
    rows = _num_rows(present, OWN_EMBEDDING, target.vocab_size)
    optional = {OWN_EMBEDDING: (rows, hidden), FC_BIAS: (hidden,)}
    if shape.version == 1:
        shapes |= {FC: (hidden, 2 * hidden), **({OWN_NORM: (hidden,)} if shape.has_norms else {})}
    else:
        shapes |= {FC: (hidden, num_taps * target.hidden_size), OWN_NORM: (hidden,)}
        optional |= {OWN_HEAD: (c.vocab_size, hidden), INPUT_NORM: (num_taps * target.hidden_size,)}
        optional |= {fc_norm(i): (target.hidden_size,) for i in range(num_taps)}
        optional |= {TO_TARGET: (c.vocab_size,)}
    return shapes | {name: size for name, size in optional.items() if name in present}


def eagle_name(name: str) -> str | None:
    """`EagleHead`'s name of a tensor in a file; None for one that says nothing more (t2d follows from d2t)."""
    name = name.removeprefix("model.").replace("midlayer.", f"{LAYERS}0.", 1)
    is_copy = name in ("verifier_norm.weight", "verifier_lm_head.weight")  # of the target's, by Speculators' trainer
    return None if is_copy or name == OF_TARGET or name.endswith("rotary_emb.inv_freq") else name
