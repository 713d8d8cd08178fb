"""Gemma 4's assistant: layers that attend to the target's KV entries and have none of their own.

`pre_projection` joins the next token's embedding, scaled as in the target, and the state before it; `post_projection`
makes the state for the row's children. All rows of a tree have the position of the text's last token, and attend to
the target's last layer of each kind (full, or with a window). So they see the text before this token, and of the path
after it only its state. Files with ordered embeddings also have centroids, which choose the tokens that get logits;
here all tokens get them, because the product is small beside a streamed pass. Names and shapes: transformers
(gemma4_assistant; the loop is `SinglePositionMultiTokenCandidateGenerator`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from offspec.backends.backend import Backend
from offspec.backends.choice import linear
from offspec.backends.weights import Weight
from offspec.scheduler.trees.token_tree import IntArray

from ...errors import CheckpointError, UnsupportedModelError
from ..block import layer_shapes
from ..config import ModelConfig, read_config
from ..config_values import Json, mapping
from ..decoder import CachedDecoder, Decoder
from ..memory.sequence_cache import SequenceCache
from ..parts.kv_attention import KeyRange, Visibility, attend_by_parts
from ..parts.part import Attending, Entries, PassRows
from ..pass_rows import AppendedRows, TextRows
from ..rope import Rotations
from ..shapes import LayerShape
from .eagle import vocabulary_of
from .head import LAYERS, OWN_EMBEDDING, OWN_HEAD, OWN_NORM, Advanced, HeadSpec, Inputs, LayeredHead

KIND = "Gemma 4 assistant"
FAMILY = "gemma4_text"
IN, OUT = "pre_projection.weight", "post_projection.weight"


class MemoryBesideTarget(SequenceCache):
    """Counts the head's rows of one text, whose KV entries are those of `target`."""

    def __init__(self, target: CachedDecoder) -> None:
        super().__init__([], target.device)
        self.target = target


class RowsBehindTarget(AppendedRows):
    """Rows at the position behind the target's committed entries. They see these entries, and none of each other."""

    @classmethod
    def of(cls, rows: TextRows, target: SequenceCache, backend: Backend) -> RowsBehindTarget:
        """target: the target's memory of the text. backend: the head's."""
        positions = torch.full((len(rows),), target.next_position, device=target.positions.device)
        visibility = Visibility(target.length, positions, target.positions, rows.parents[:0], 0)
        return cls(rows, target.last_slot, target, visibility, Rotations(positions), [(0, len(rows))], backend)

    def attend(
        self,
        part: Attending,
        queries: Tensor,
        entries: Entries | None,
        first: int,
        last: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        end, c = self.visibility.start, part.config
        begin = 0 if part.window is None else max(0, end - part.window + 1)
        parts = self.parts(part.entries_of, [KeyRange(begin, end, None)], self.most_keys(part, queries))
        return attend_by_parts(queries, parts, scale=c.attention_scale, cap=c.attention_cap, sinks=sinks)


class AssistantHead(LayeredHead):
    """An assistant. Its states are behind its final norm, its features those of the target's size."""

    reads_text = False

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Weight], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        """tensors: by the names of `assistant_spec`, on the target's device."""
        super().__init__(config, tensors, target, vocabulary_of(tensors, target), dtype)

    @property
    def has_own_head(self) -> bool:
        return True

    def cache_beside(self, target: CachedDecoder) -> SequenceCache:
        return MemoryBesideTarget(target)

    def rows(self, rows: TextRows, cache: SequenceCache, positions: Tensor | None = None) -> AppendedRows:
        assert isinstance(cache, MemoryBesideTarget)
        cache.extend(len(rows))
        return RowsBehindTarget.of(rows, cache.target.cache, self.backend)

    def embedded(self, tokens: IntArray) -> Tensor:
        """The target's embeddings, scaled; its table has the head's sizes, and is for logits."""
        return self.target.embed(torch.from_numpy(tokens)).to(self.dtype)

    def joined(self, inputs: Inputs) -> Tensor:
        return linear(torch.cat((self.embedded(inputs.tokens), inputs.features), dim=-1), self.tensors[IN])

    def advance(self, inputs: Inputs, rows: PassRows) -> Advanced:
        states, _ = super().advance(inputs, rows)
        return Advanced(states, linear(states, self.tensors[OUT]))


# ------------------------------------------------------------------------------------------------ from files


def assistant_spec(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """The assistant that a config.json describes. present: the shapes of its tensors, by `assistant_name`.

    Raises UnsupportedModelError, CheckpointError.
    """
    if target.model_type != FAMILY or not target.shapes:
        raise UnsupportedModelError(
            f"Gemma 4's assistant needs a dense Gemma 4 in offspec's own decoder as its target, not this "
            f"{target.model_type}; choose another draft"
        )
    c = _config(config, target, is_tied=OWN_HEAD not in present)
    shapes = {f"{LAYERS}{i}.{name}": size for i in range(c.num_layers) for name, size in layer_shapes(c, i).items()}
    shapes |= {IN: (c.hidden_size, 2 * target.hidden_size), OUT: (target.hidden_size, c.hidden_size)}
    shapes |= {OWN_NORM: (c.hidden_size,), OWN_EMBEDDING: (c.vocab_size, c.hidden_size)}
    shapes |= {} if c.tied_head else {OWN_HEAD: (c.vocab_size, c.hidden_size)}
    make = partial(AssistantHead, c)
    return HeadSpec(
        KIND, c, shapes, (), c.vocab_size, make, takes_packed=True, can_learn=False, reads_target_entries=True
    )


def _config(config: Json, target: ModelConfig, *, is_tied: bool) -> ModelConfig:
    """The shape of the layers, which attend to the target's: `LayerShape.entries_of` is a number of these.

    Logits have no cap. Raises UnsupportedModelError, CheckpointError.
    """
    inner = {**mapping(config, "text_config"), "model_type": FAMILY, "num_kv_shared_layers": 0}
    c = read_config(inner)
    last = {target.windows[i] is None: i for i, shape in enumerate(target.shapes) if shape.entries_of is None}
    shapes = list[LayerShape]()
    for shape, window in zip(c.shapes, c.windows, strict=True):
        attended = last.get(window is None, -1)
        entries = target.shapes[attended]
        sizes, wanted = (shape.num_kv_heads, shape.head_dim, window), (entries.num_kv_heads, entries.head_dim)
        if sizes != (*wanted, target.windows[attended]):
            raise CheckpointError(
                f"layer {shape.number} has {sizes[0]} heads of {sizes[1]} numbers and the window {window}, and the "
                f"target's layer {attended} has other ones"
            )
        shapes.append(replace(shape, entries_of=attended))
    return replace(c, shapes=tuple(shapes), tied_head=is_tied, logit_cap=None)


def assistant_name(name: str) -> str | None:
    """`AssistantHead`'s name of a tensor in a file; None for the centroids."""
    name = name.removeprefix("model.")
    return None if name.startswith("masked_embedding.") else name
