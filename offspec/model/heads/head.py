"""A trained head as a draft: a small decoder that continues from its target's states.

A head's row is a token and the *features* of the place before it. After the text they come from the target: its final
state there, or its states after chosen layers. Below that they are the head's own, from the row of the parent node. A
head returns *states*, from which logits are linear (`Decoder.linear_logits`), and features for the row's children.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offspec.backends.weights import Weight
from offspec.loaders.streaming.weights import RamWeights, WeightSource
from offspec.scheduler.trees.token_tree import IntArray
from offspec.scheduler.trees.vocabulary import Vocabulary

from ..config import ModelConfig
from ..decoder import CachedDecoder, Decoder
from ..memory.sequence_cache import SequenceCache
from ..names import EMBEDDING, HEAD
from ..norms import normalize
from ..parts.part import PassRows, as_vector

LAYERS = "layers."  # the prefix of a head's own layers
OWN_EMBEDDING, OWN_NORM, OWN_HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"


class Advanced(NamedTuple):
    """What a head makes of R rows: states [R, hidden] for logits, features [R, F] for the rows' children."""

    states: Tensor
    features: Tensor


class Inputs(NamedTuple):
    """R rows of a head: features [R, F] of the places before them, tokens [R], and depths [R] in the tree.

    Rows of the text have depth 0.
    """

    features: Tensor
    tokens: IntArray
    depths: IntArray


class Head(Decoder, ABC):
    """Base of heads.

    target_layers: layers of the target whose states it reads; empty: it reads the final states. reads_text: whether it
    attends to the text; otherwise it needs the last place only. num_steps: the length of the longest path that it can
    predict; None: any. vocabulary: of its logits.
    """

    target_layers: tuple[int, ...] = ()
    reads_text = True
    num_steps: int | None = None

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        target: Decoder,
        vocabulary: Vocabulary,
        dtype: torch.dtype | None = None,
    ) -> None:
        """weights: its layers, and optionally its own embedding and head under a decoder's names.

        dtype: of its arithmetic; None is the target's.
        """
        super().__init__(config, weights, dtype=dtype or target.dtype, device=target.device)
        self.target = target
        self.vocabulary = vocabulary

    def fused(self, states: Tensor) -> Tensor:
        """Features [K, F] from the target's states [K, S]; S: the chosen layers' hidden sizes, side by side."""
        return states.to(self.dtype)

    def cache_beside(self, target: CachedDecoder) -> SequenceCache:
        """An empty memory of the head for the text of `target`."""
        return self.new_cache()

    @abstractmethod
    def advance(self, inputs: Inputs, rows: PassRows) -> Advanced:
        """The head over R rows, whose KV entries are appended. Keeps gradients."""

    def read(self, inputs: Inputs, rows: PassRows) -> None:
        """`advance` over rows of the text whose states nobody needs, only their KV entries."""
        self.advance(inputs, rows)

    @property
    def has_own_embedding(self) -> bool:
        return False

    @property
    def has_own_head(self) -> bool:
        return False

    def embedded(self, tokens: IntArray) -> Tensor:
        """The tokens' embeddings [R, hidden]: its own, or the target's without scaling."""
        indices = torch.from_numpy(tokens)
        rows = self.weights.rows(EMBEDDING, indices) if self.has_own_embedding else self.target.embedding_rows(indices)
        return rows.to(self.dtype)

    def linear_logits(self, states: Tensor) -> Tensor:
        """fp32 logits of its own head, or of the target's."""
        if self.has_own_head:
            return super().linear_logits(states)
        return self.target.logits_by(self.backend, states.to(self.target.dtype))

    def capped(self, logits: Tensor) -> Tensor:
        return super().capped(logits) if self.has_own_head else self.target.capped(logits)


class StoredHead(Head):
    """A head that consists of its file's tensors: layers, perhaps an embedding and a head, and whatever it has more."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Weight],
        target: Decoder,
        vocabulary: Vocabulary,
        dtype: torch.dtype | None = None,
    ) -> None:
        """tensors: by the names of its `HeadSpec`, on the target's device."""
        self.tensors = tensors
        names = {EMBEDDING: OWN_EMBEDDING, config.final_norm: OWN_NORM, HEAD: OWN_HEAD}
        shared = {name: tensors[name_in_head] for name, name_in_head in names.items() if name_in_head in tensors}
        layers = [
            {name.removeprefix(prefix): weight for name, weight in tensors.items() if name.startswith(prefix)}
            for prefix in (f"{LAYERS}{index}." for index in range(config.num_layers))
        ]
        weights = RamWeights(layers, shared, dtype or target.dtype)
        super().__init__(config, weights, target, vocabulary, dtype)

    @property
    def has_own_embedding(self) -> bool:
        return OWN_EMBEDDING in self.tensors

    @property
    def has_own_head(self) -> bool:
        return OWN_HEAD in self.tensors

    def normed_by(self, name: str, x: Tensor) -> Tensor:
        """x [..., N] after the norm with the weight of this name."""
        weight = as_vector(self.tensors[name]).to(x.dtype)
        return normalize(x, weight, None, self.config.norm, self.config.rms_norm_eps, self.backend)


class LayeredHead(StoredHead):
    """A head of decoder layers over rows that join a token's embedding and the features before it.

    feeds_normed: whether a row's children get its states behind the final norm as their features.
    """

    feeds_normed = True

    @abstractmethod
    def joined(self, inputs: Inputs) -> Tensor:
        """What the first layer reads of R rows: [R, N]."""

    def advance(self, inputs: Inputs, rows: PassRows) -> Advanced:
        x = self.joined(inputs)
        for block in self.blocks:
            with self.weights.layer(block.index) as tensors:
                weights = self.layer_weights(tensors, block.index)
                parts = [block.forward(x[first:last], weights, rows, first, last) for first, last in rows.chunks]
            x = torch.cat(parts) if len(parts) > 1 else parts[0]
        states = self.normed(x)
        return Advanced(states, states if self.feeds_normed else x)


class MakeHead(Protocol):
    """Makes a head of its weights, which are on the target's device. dtype: see `Head`."""

    def __call__(self, tensors: Mapping[str, Any], target: Decoder, dtype: torch.dtype | None = None) -> Head: ...


@dataclass(frozen=True)
class HeadSpec:
    """What a head's files must hold, and how it is made of them.

    kind: of head, for messages. config: the shape of its layers and of its states. shapes: its tensors by `Head`'s
    names. num_columns: of its logits. make: see `MakeHead`. takes_packed: whether it multiplies with quantised
    matrices; otherwise they are unpacked for it. can_learn: whether it can be unrolled over a text
    (`training.unrolling`). reads_target_entries: whether it attends to the target's KV entries.
    """

    kind: str
    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    target_layers: tuple[int, ...]
    num_columns: int
    make: MakeHead
    takes_packed: bool = False
    can_learn: bool = True
    reads_target_entries: bool = False
