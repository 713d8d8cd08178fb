"""Structures of heads that nobody publishes files of: only `offspec distill --head` makes them.

Recurrent: one cell for all steps (ReDrafter, 2403.09919). Clover (2405.00263): each step attends to the path's tokens.
Amphista (2406.13170): the parts of all steps attend to each other. All use the target's own head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.scheduler.trees.token_tree import IntArray

from ..checkpoints.head_files import Layout
from ..model.config import ModelConfig
from ..model.config_values import Json, positive
from ..model.decoder import Decoder
from ..model.heads.chained import ChainedHead, attention_heads, num_steps, states_config, text_shapes
from ..model.heads.head import HeadSpec, Inputs
from ..model.parts.part import PassRows

Shapes = Mapping[str, tuple[int, ...]]


class RecurrentHead(ChainedHead):
    """One cell for all steps, over the final state, which stays in view; the target's own head."""

    def __init__(self, tensors: Mapping[str, Tensor], target: Decoder, dtype: torch.dtype | None = None) -> None:
        super().__init__(1, tensors, target, dtype)

    def fused(self, states: Tensor) -> Tensor:
        """[K, 2 * hidden]: the final states, then the cell's first states, which are zero."""
        return F.pad(states.to(self.dtype), (0, states.shape[-1]))

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        final, cell = features.chunk(2, dim=-1)
        cell = F.silu(self._linear("cell", torch.cat((cell, self.embedded(tokens)), dim=-1)))
        joined = torch.cat((final, cell), dim=-1)
        x = final + self._linear("down", F.silu(self._linear("up", joined)))
        return x, joined


def recurrent_spec(config: Json, present: Shapes, target: ModelConfig) -> HeadSpec:
    """present: shapes by name. Raises CheckpointError."""
    hidden, inner = target.hidden_size, positive(config, "intermediate_size")
    shapes: dict[str, tuple[int, ...]] = {"cell.weight": (hidden, 2 * hidden), "cell.bias": (hidden,)}
    shapes |= {"up.weight": (inner, 2 * hidden), "down.weight": (hidden, inner)}
    return HeadSpec("recurrent", states_config(target, 1), shapes, (), target.vocab_size, RecurrentHead)


RECURRENT = Layout(lambda name: name, recurrent_spec)


class AttendingHead(ChainedHead):
    """A head of `steps` steps, with attention of `heads` heads over final states."""

    def __init__(
        self, steps: int, heads: int, tensors: Mapping[str, Tensor], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(1, tensors, target, dtype)
        self.num_steps = steps
        self._heads = heads


class CloverHead(AttendingHead):
    """Each step renews the state by attention to the embeddings of the path's tokens; the heads are Medusa's.

    The paper's augmenting block is a layer over the text, which renews the state first.
    """

    def __init__(
        self, steps: int, heads: int, tensors: Mapping[str, Tensor], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(steps, heads, tensors, target, dtype)
        self.room = steps * target.config.hidden_size  # for the embeddings of a path

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        hidden = self.target.config.hidden_size
        state, path_before, end = features[:, :hidden], features[:, hidden : (1 + depth) * hidden], (2 + depth) * hidden
        path = torch.cat((path_before, _normed(self.embedded(tokens))), dim=-1)
        newest_first = path.view(-1, 1 + depth, hidden).flip(1) + self._tensors["places"][: 1 + depth]
        query, keys, values = self._linear("q", _normed(state))[:, None], *self._linear("kv", newest_first).chunk(2, -1)
        state = state + self._linear("o", _attended(query, keys, values, self._heads)[:, 0])
        features = torch.cat((state, path, features[:, end:]), dim=-1)
        return state + F.silu(self._linear(f"blocks.{depth}", state)), features


def clover_spec(config: Json, present: Shapes, target: ModelConfig) -> HeadSpec:
    """present: shapes by name. Raises CheckpointError."""
    steps, hidden = num_steps(config, "num_steps"), target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"q.weight": (hidden, hidden), "kv.weight": (2 * hidden, hidden)}
    shapes |= {"o.weight": (hidden, hidden), "places": (steps, hidden)}
    shapes |= {f"blocks.{step}.weight": (hidden, hidden) for step in range(steps)} | text_shapes(target, 1)
    make = partial(CloverHead, steps, attention_heads(config, hidden))
    return HeadSpec("Clover", states_config(target, 1, None, 1), shapes, (), target.vocab_size, make)


CLOVER = Layout(lambda name: name, clover_spec)


class AmphistaHead(AttendingHead):
    """All steps' states at once, from the final state and the text's last token; they attend to each other.

    The paper's adaptation layers are two layers over the text.
    """

    def of_text(self, inputs: Inputs, rows: PassRows) -> Tensor:
        x = inputs.features
        x = x + self._linear("token", torch.cat((_normed(x), _normed(self.embedded(inputs.tokens))), dim=-1))
        return super().of_text(inputs._replace(features=x), rows)

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        hidden = self.target.config.hidden_size
        if depth == 0:
            x = features[:, :hidden]
            assert self.num_steps is not None
            parts = [x + F.silu(self._linear(f"blocks.{step}", x)) for step in range(self.num_steps)]
            x = torch.stack(parts, dim=1) + self._tensors["places"]  # [R, steps, hidden]
            queries, keys, values = self._linear("qkv", _normed(x)).chunk(3, -1)
            x = x + self._linear("o", _attended(queries, keys, values, self._heads))
            features = (x + self._linear("down", F.silu(self._linear("up", _normed(x))))).flatten(1)
        return features[:, depth * hidden : (depth + 1) * hidden], features


STAGES = 2  # of adaptation, as in the paper


def amphista_spec(config: Json, present: Shapes, target: ModelConfig) -> HeadSpec:
    """present: shapes by name. Raises CheckpointError."""
    steps, hidden, inner = num_steps(config, "num_steps"), target.hidden_size, positive(config, "intermediate_size")
    shapes: dict[str, tuple[int, ...]] = {"qkv.weight": (3 * hidden, hidden), "o.weight": (hidden, hidden)}
    shapes |= {"up.weight": (inner, hidden), "down.weight": (hidden, inner), "places": (steps, hidden)}
    shapes |= {f"blocks.{step}.weight": (hidden, hidden) for step in range(steps)}
    shapes |= {"token.weight": (hidden, 2 * hidden)} | text_shapes(target, STAGES)
    make = partial(AmphistaHead, steps, attention_heads(config, hidden))
    return HeadSpec("Amphista", states_config(target, 1, None, STAGES), shapes, (), target.vocab_size, make)


AMPHISTA = Layout(lambda name: name, amphista_spec)


def _attended(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Attention of queries [R, Q, hidden] to all keys [R, K, hidden] → [R, Q, hidden]."""
    q, k, v = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in (queries, keys, values))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])
