"""DFlash (2602.06036): a few layers fill a block of masked positions after the text in one forward.

Keys and values of the text come from the target's states after some layers, joined by `fc`; those of the block, which
sees all of itself, from its own rows: the text's last token, then masks. So a position's distribution does not depend
on the tokens before it in the block, and best-first trees over these distributions are those of DDTree (2604.12989).
Names and shapes: z-lab (dflash.py, DFlashDraftModel), SpecForge (dflash.py), Speculators (models/dflash).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from offspec.loaders.formats import Weight, linear
from offspec.loaders.streaming.small_transfers import to_device

from ...errors import CheckpointError, UnsupportedModelError
from ..block import layer_shapes
from ..config import ModelConfig, read_config
from ..config_values import Json, mapping, positive
from ..decoder import Decoder
from ..memory.text_memory import TextMemory
from ..names import EMBEDDING
from ..parts.attention import Attention
from ..parts.kv_attention import attend
from ..parts.part import LayerWeights, Part, PassRows
from ..pass_rows import AppendedRows
from ..rope import Rotations
from .chained import MOST_STEPS
from .eagle import OF_TARGET, TO_TARGET, vocabulary_of
from .head import LAYERS, OWN_EMBEDDING, OWN_HEAD, OWN_NORM, Advanced, HeadSpec, Inputs, StoredHead

FC, STATE_NORM = "fc.weight", "hidden_norm.weight"
ENTRY = "dflash_config"


@dataclass(frozen=True)
class BlockShape:
    """A head's shape. size: rows of a block, the first of which is the text's last token. mask: the others' token."""

    config: ModelConfig
    target_layers: tuple[int, ...]
    size: int
    mask: int


class DFlashHead(StoredHead):
    """A block head. The states after a text's last token and after all nodes below it come from one block.

    So nodes have no features: a node's depth chooses one of the block's states.
    """

    def __init__(
        self, shape: BlockShape, tensors: Mapping[str, Weight], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        """tensors: by the names of `dflash_spec`, on the target's device."""
        self._shape = shape
        self.target_layers = shape.target_layers
        self.num_steps = shape.size - 1
        self._states = WeakKeyDictionary[TextMemory, Tensor]()  # of each text's block: [B - 1, hidden]
        super().__init__(shape.config, tensors, target, vocabulary_of(tensors, target), dtype)

    def fused(self, states: Tensor) -> Tensor:
        return self.normed_by(STATE_NORM, linear(states.to(self.dtype), self.tensors[FC]))

    def advance(self, inputs: Inputs, rows: PassRows) -> Advanced:
        assert isinstance(rows, AppendedRows)
        if not inputs.depths.any():
            self._states[rows.cache] = self._block(inputs, rows)
            return Advanced(self._states[rows.cache][:1], inputs.features[:1, :0])
        depths = to_device(torch.from_numpy(inputs.depths), self.device)
        return Advanced(self._states[rows.cache][depths], inputs.features)

    def read(self, inputs: Inputs, rows: PassRows) -> None:
        assert isinstance(rows, AppendedRows)
        for block in self.blocks:
            with self.weights.layer(block.index) as tensors:
                self._read(block.parts[0], inputs.features, self.layer_weights(tensors), rows)

    def _block(self, inputs: Inputs, rows: AppendedRows) -> Tensor:
        """The states [B - 1, hidden] of the block behind these rows of the text, whose last token it begins with."""
        size, last = self._shape.size, rows.visibility.positions[-1:]
        tokens = torch.full((size,), self._shape.mask)
        tokens[0] = int(inputs.tokens[-1])
        rotations = Rotations(last + 1 + torch.arange(size, device=last.device))
        x = self.weights.rows(EMBEDDING, tokens) if self.has_own_embedding else self.target.embed(tokens)
        x = x.to(self.dtype)
        for block in self.blocks:
            attention, mlp = block.parts
            with self.weights.layer(block.index) as tensors:
                weights = self.layer_weights(tensors)
                keys_and_values = self._read(attention, inputs.features, weights, rows)
                x = self._attended(attention, x, weights, rotations, keys_and_values)
                x = mlp.forward(x, weights, rows, 0, size)
        return self.normed(x)[1:]

    def _read(self, part: Part, features: Tensor, weights: LayerWeights, rows: AppendedRows) -> tuple[Tensor, Tensor]:
        """Store the entries of rows of the text; returns all keys and values [kv_heads, S, head_dim]."""
        assert isinstance(part, Attention)
        _, keys, values = self._projected(part, features, weights, rows.rotations)
        return rows.exchange(part.layer, (keys, values), 0, len(features))

    def _attended(
        self,
        part: Part,
        x: Tensor,
        weights: LayerWeights,
        rotations: Rotations,
        of_text: tuple[Tensor, Tensor],
    ) -> Tensor:
        """x [B, hidden] of a block after its attention to the text and to all of itself."""
        assert isinstance(part, Attention)
        normed = part.norm(x, weights, self.config.norms.before_attention)
        queries, *of_block = self._projected(part, normed, weights, rotations)
        keys, values = (
            torch.cat((there, here.transpose(0, 1)), 1) for there, here in zip(of_text, of_block, strict=True)
        )
        out = attend(queries, keys, values, None, scale=self.config.attention_scale)
        return x + weights.linear("self_attn.o_proj", out.flatten(1))

    def _projected(
        self, part: Attention, x: Tensor, weights: LayerWeights, rotations: Rotations
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows x [T, hidden]."""
        queries, *entries = part.projected(x, weights)
        norm = part.config.qk_norm_form.queries
        queries = part.placed(queries, norm, weights, rotations, 0, len(x))
        return (queries, *part.entries(entries, weights, rotations, 0, len(x)))


# ------------------------------------------------------------------------------------------------ from files


def dflash_spec(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """The head that a config.json describes. present: the shapes of its tensors, by `dflash_name`.

    Raises UnsupportedModelError, CheckpointError.
    """
    shape = _shape(config, present, target)
    c, hidden = shape.config, shape.config.hidden_size
    shapes = {f"{LAYERS}{i}.{name}": size for i in range(c.num_layers) for name, size in layer_shapes(c, i).items()}
    shapes |= {FC: (hidden, len(shape.target_layers) * target.hidden_size), STATE_NORM: (hidden,), OWN_NORM: (hidden,)}
    tables = {OWN_EMBEDDING: (target.vocab_size, hidden), OWN_HEAD: (c.vocab_size, hidden)}
    optional: dict[str, tuple[int, ...]] = {**tables, TO_TARGET: (c.vocab_size,)}
    shapes |= {name: size for name, size in optional.items() if name in present}
    if hidden != target.hidden_size and not {OWN_EMBEDDING, OWN_HEAD} <= shapes.keys():
        raise CheckpointError(f"the head has hidden size {hidden}, the target {target.hidden_size}")
    make, layers = partial(DFlashHead, shape), shape.target_layers
    return HeadSpec("DFlash", c, shapes, layers, c.vocab_size, make, takes_packed=True, can_learn=False)


def _shape(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> BlockShape:
    inner = mapping(config, "transformer_layer_config") or config
    settings = {**config, **mapping(config, ENTRY)}
    sizes = {"vocab_size": target.vocab_size, "max_position_embeddings": target.max_context}
    layer_config = read_config(
        {"use_sliding_window": False, **sizes, **inner, "model_type": "qwen3", "is_causal": None}
    )
    if any(window is not None for window in layer_config.windows) or settings.get("causal"):
        raise UnsupportedModelError("a DFlash head with windows, or whose block is causal, is not supported")
    size, mask = positive(settings, "block_size"), settings.get("mask_token_id")
    if not 2 <= size <= MOST_STEPS or type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise CheckpointError(f"config.json: block_size {size} or mask_token_id {mask!r} is out of range")
    layers = settings.get("target_layer_ids", settings.get("aux_hidden_state_layer_ids"))
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise CheckpointError("config.json: target_layer_ids is not a list of layers")
    if wrong := [layer for layer in layers if not 0 <= layer < target.num_layers]:
        raise UnsupportedModelError(
            f"the head reads states after layer {wrong[0] + 1}, and the target has layers 1 to {target.num_layers}"
        )
    columns = max(1, present[OWN_HEAD][0]) if present.get(OWN_HEAD) else target.vocab_size
    return BlockShape(replace(layer_config, vocab_size=columns, tied_head=False), tuple(layers), size, mask)


def dflash_name(name: str) -> str | None:
    """`DFlashHead`'s name of a tensor in a file; None for one that says nothing more."""
    name = name.removeprefix("model.")
    is_copy = name in ("verifier_norm.weight", "verifier_lm_head.weight")
    return None if is_copy or name == OF_TARGET or name.endswith("rotary_emb.inv_freq") else name
