"""DFlash (2602.06036): a few layers fill a block of masked positions after the text in one forward.

Keys and values of the text come from the target's states after some layers, joined by `fc`; those of the block, which
sees all of itself, from its own rows: the text's last token, then masks. So a position's distribution does not depend
on the tokens before it in the block, and best-first trees over these distributions are those of DDTree (2604.12989).

DSpark (deepseek-ai/DeepSpec) adds a Markov head: logits W2 W1[token] by the token before a position, which is the
node's own in a tree. Its first row predicts, too. Its confidence head, which shortens chains, is not needed by trees.

Names and shapes: z-lab (dflash.py, DFlashDraftModel), SpecForge (dflash.py), Speculators (models/dflash), DeepSpec
(modeling/dspark).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.choice import linear
from offspec.backends.weights import Weight
from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.trees.token_tree import IntArray

from ...errors import CheckpointError, UnsupportedModelError
from ..block import Block, build_blocks, layer_shapes
from ..config import ModelConfig, read_config
from ..config_values import Json, mapping, number_in, optional_number, positive
from ..decoder import Decoder
from ..memory.sequence_cache import SequenceCache
from ..parts.attention import Attention
from ..parts.part import Entries, PassRows, RowsOfText, as_vector
from ..pass_rows import AppendedRows
from ..rope import Rotations
from .chained import MOST_STEPS
from .eagle import OF_TARGET, TO_TARGET, vocabulary_of
from .head import LAYERS, OWN_EMBEDDING, OWN_HEAD, OWN_NORM, Advanced, HeadSpec, Inputs, StoredHead

FC, STATE_NORM = "fc.weight", "hidden_norm.weight"
MARKOV_IN, MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
ENTRY, MARKOV_ENTRY = "dflash_config", "markov_rank"


@dataclass(frozen=True)
class BlockShape:
    """A head's shape. size: rows of a block, the first of which is the text's last token. mask: the others' token.

    first: the row that predicts the next token. marker_size: numbers beside a block's state that tell a node's token.
    embedding_scale: of the rows' embeddings. is_causal: a row sees none behind it; None: in layers with windows.
    """

    config: ModelConfig
    target_layers: tuple[int, ...]
    size: int
    mask: int
    first: int
    marker_size: int
    embedding_scale: float = 1.0
    is_causal: bool | None = None


class BlockRows(RowsOfText):
    """The rows of a block behind one text: each sees the text and all of the block, unless layers have windows."""

    def __init__(self, text: AppendedRows, shape: BlockShape) -> None:
        """text: the rows whose last token the block begins with."""
        last = text.visibility.positions[-1:]
        self.text = text
        self.text_rotations = text.rotations
        self.rotations = Rotations(last + 1 + torch.arange(shape.size, device=last.device))
        self.chunks = [(0, shape.size)]
        self._shape = shape

    def mask(self, first: int, last: int, window: int | None) -> Tensor | None:
        is_causal = self._shape.is_causal if self._shape.is_causal is not None else window is not None
        if window is None and not is_causal:
            return None
        length = self.text.visibility.start + len(self.text)
        keys = torch.arange(length + self._shape.size, device=self.text.visibility.positions.device)
        ahead = keys - keys[length + first : length + last, None]
        limit = window or len(keys)
        return (ahead > -limit) & (ahead < (1 if is_causal else limit))

    def store(self, layer: int, entries: Entries) -> None:
        """Store the entries of the text's rows."""
        self.text.store(layer, entries, 0)

    def exchange(self, layer: int, entries: Entries | None, first: int, last: int) -> Entries:
        """The text's keys and values, and the block's behind them."""
        assert entries is not None, "a head's layers have entries"
        of_text = self.text.exchange(layer, None, 0, len(self.text))
        keys, values = (torch.cat((old, new.transpose(0, 1)), 1) for old, new in zip(of_text, entries, strict=True))
        return keys, values


class FilledRows(PassRows, Protocol):
    """The rows of blocks. text_rotations: of the new rows of the texts before them, whose entries `store` takes."""

    @property
    def text_rotations(self) -> Rotations: ...

    def store(self, layer: int, entries: Entries) -> None: ...


class DFlashHead(StoredHead):
    """A block head. The states after a text's last token and after all nodes below it come from one block.

    So nodes have no features: a node's depth chooses one of the block's states. Beside it is the embedding of the
    node's token. By it, recall tells nodes of one depth from each other. Logits depend on it only by a Markov head,
    whose embedding it is then.
    """

    def __init__(
        self, shape: BlockShape, tensors: Mapping[str, Weight], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        """tensors: by the names of `dflash_spec`, on the target's device."""
        self.shape = shape
        self.target_layers = shape.target_layers
        self.num_steps = shape.size - shape.first
        self._states = WeakKeyDictionary[SequenceCache, Tensor]()  # of each text's block: [num_steps, hidden]
        super().__init__(states_config(shape), tensors, target, vocabulary_of(tensors, target), dtype)
        self.blocks = build_blocks(shape.config, dtype=self.dtype, device=self.device)

    def fused(self, states: Tensor) -> Tensor:
        return self.normed_by(STATE_NORM, linear(states.to(self.dtype), self.tensors[FC]))

    def advance(self, inputs: Inputs, rows: PassRows) -> Advanced:
        assert isinstance(rows, AppendedRows)
        if not inputs.depths.any():
            block = BlockRows(rows, self.shape)
            self._states[rows.cache] = self.filled(inputs.tokens[-1:], inputs.features, block)[self.shape.first :]
            inputs = Inputs(inputs.features[:1, :0], inputs.tokens[-1:], inputs.depths[-1:])
        states = self._states[rows.cache][to_device(torch.from_numpy(inputs.depths), self.device)]
        return Advanced(self.beside_tokens(states, inputs.tokens), inputs.features)

    def beside_tokens(self, states: Tensor, tokens: IntArray) -> Tensor:
        """A block's states [R, hidden] at nodes with these tokens [R]: [R, hidden + marker_size].

        Without a Markov head, both parts have equal lengths.
        """
        if MARKOV_IN in self.tensors:
            rows = to_device(torch.from_numpy(tokens), self.device)
            marker = F.embedding(rows, as_vector(self.tensors[MARKOV_IN])).to(self.dtype)
        else:
            marker = F.normalize(self.embedded(tokens), dim=-1) * states.norm(dim=-1, keepdim=True)
        return torch.cat((states, marker), -1)

    def read(self, inputs: Inputs, rows: PassRows) -> None:
        assert isinstance(rows, AppendedRows)
        for block in self.blocks:
            with self.weights.layer(block.index) as tensors:
                rows.store(block.index, self._entries(block, inputs.features, tensors, rows.rotations), 0)

    def linear_logits(self, states: Tensor) -> Tensor:
        """Of its own head, or of the target's without the target's factor; and of the Markov head."""
        hidden = self.shape.config.hidden_size
        logits = super().linear_logits(states[..., :hidden])
        scale = self.config.logit_scale / self.target.config.logit_scale
        logits = logits if self.has_own_head or scale == 1 else logits * scale
        if MARKOV_OUT in self.tensors:
            logits = logits + linear(states[..., hidden:], self.tensors[MARKOV_OUT]).float()
        return logits

    def capped(self, logits: Tensor) -> Tensor:
        """With the cap of its config.json; the target's head may have another one."""
        return Decoder.capped(self, logits)

    def filled(self, tokens: IntArray, features: Tensor, rows: FilledRows) -> Tensor:
        """The states [n * B, hidden] of n blocks, which begin with `tokens` [n]. Keeps gradients.

        features [T, hidden]: of the new rows of the texts before the blocks.
        """
        masked = torch.full((len(tokens), self.shape.size), self.shape.mask)
        masked[:, 0] = torch.from_numpy(tokens)
        x = self.embedded(masked.flatten().numpy()) * self.shape.embedding_scale
        for block in self.blocks:
            with self.weights.layer(block.index) as tensors:
                rows.store(block.index, self._entries(block, features, tensors, rows.text_rotations))
                x = block.forward(x, self.layer_weights(tensors, block.index), rows, 0, len(x))
        return self.normed(x)

    def _entries(self, block: Block, features: Tensor, tensors: Mapping[str, Weight], rotations: Rotations) -> Entries:
        """Keys and values [T, kv_heads, head_dim] of a text's rows."""
        attention, weights = block.parts[0], self.layer_weights(tensors, block.index)
        assert isinstance(attention, Attention)
        turns = attention.turns(rotations, 0, len(features))
        return attention.entries(attention.projected(features, weights)[1:], weights, turns)


# ------------------------------------------------------------------------------------------------ from files


def states_config(shape: BlockShape) -> ModelConfig:
    """The shape of the head's layers, with the size of its states."""
    return replace(shape.config, hidden_size=shape.config.hidden_size + shape.marker_size)


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
    is_dspark = MARKOV_IN in present or MARKOV_OUT in present
    if is_dspark:
        rank = shape.marker_size
        shapes |= {MARKOV_IN: (target.vocab_size, rank), MARKOV_OUT: (c.vocab_size, rank)}
    if hidden != target.hidden_size and not {OWN_EMBEDDING, OWN_HEAD} <= shapes.keys():
        raise CheckpointError(f"the head has hidden size {hidden}, the target {target.hidden_size}")
    make, layers = partial(DFlashHead, shape), shape.target_layers
    kind = "DSpark" if is_dspark else "DFlash"
    return HeadSpec(kind, states_config(shape), shapes, layers, c.vocab_size, make, takes_packed=True, can_learn=False)


def _shape(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> BlockShape:
    inner = mapping(config, "transformer_layer_config") or config
    settings = {**config, **mapping(config, ENTRY)}
    sizes = {"vocab_size": target.vocab_size, "max_position_embeddings": target.max_context}
    layer_config = read_config(
        {"use_sliding_window": False, **sizes, **inner, "model_type": "qwen3", "is_causal": None}
    )
    is_causal = settings.get("is_causal", settings.get("causal"))
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
    scales = (number_in(settings, name, 1.0) for name in ("input_embedding_scale", "output_multiplier"))
    embedding_scale, logit_scale = scales
    cap = optional_number(settings, "final_logit_softcapping")
    head_config = replace(layer_config, vocab_size=columns, tied_head=False, logit_scale=logit_scale, logit_cap=cap)
    first = 0 if settings.get("sample_from_anchor", MARKOV_ENTRY in settings) else 1
    marker_size = present[MARKOV_IN][-1] if present.get(MARKOV_IN) else layer_config.hidden_size
    return BlockShape(head_config, tuple(layers), size, mask, first, marker_size, embedding_scale, is_causal)


def dflash_name(name: str) -> str | None:
    """`DFlashHead`'s name of a tensor in a file; None for one that says nothing more."""
    name = name.removeprefix("model.")
    is_copy = name in ("verifier_norm.weight", "verifier_lm_head.weight") or name.startswith("confidence_head.")
    return None if is_copy or name == OF_TARGET or name.endswith("rotary_emb.inv_freq") else name
