"""Hydra (2402.05109): for each of the next tokens an MLP over the final state and the path's embeddings.

Hydra++ has a layer over the text before it. Names and shapes: zankner/Hydra (mlp_head.py, prefix_mlp_head.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.scheduler.trees.token_tree import IntArray

from ...errors import CheckpointError
from ..config import ModelConfig
from ..config_values import Json, positive
from ..decoder import Decoder
from .chained import (
    MOST_STEPS,
    TEXT_NORM,
    ChainedHead,
    head_name,
    num_heads,
    num_steps,
    renamed,
    states_config,
    text_shapes,
)
from .head import HeadSpec


class HydraHead(ChainedHead):
    """For each step an MLP over the final state and the embeddings of the path's tokens."""

    def __init__(
        self, steps: int, blocks: int, tensors: Mapping[str, Tensor], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(num_heads(tensors), tensors, target, dtype)
        self.num_steps = steps
        self._blocks = blocks
        self.room = steps * target.config.hidden_size  # for the embeddings of a path

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        hidden = self.target.config.hidden_size
        path_before, end = features[:, : (1 + depth) * hidden], (2 + depth) * hidden
        x = torch.cat((path_before, self.embedded(tokens)), dim=-1)
        features = torch.cat((x, features[:, end:]), dim=-1)
        x = self._linear(f"residual.{depth}", x) + F.silu(self._linear(f"blocks.{depth}.0", x))
        for block in range(1, self._blocks):
            x = x + F.silu(self._linear(f"blocks.{depth}.{block}", x))
        return x, features


def hydra_spec(has_prefix: bool, config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """has_prefix: Hydra++, with a layer over the text. present: shapes by the head's names. Raises CheckpointError."""
    for key, wanted in (("grounded_heads", True), ("hidden_state_offset", 0)):
        if config.get(key, wanted) != wanted:
            raise CheckpointError(f"config.json: {key} {config[key]} is not supported, only {wanted}")
    steps, blocks = num_steps(config, "hydra_num_heads"), positive(config, "hydra_num_layers", 1)
    hidden, vocab = target.hidden_size, target.vocab_size
    shapes = text_shapes(target, 1) | {TEXT_NORM: (hidden,)} if has_prefix else {}
    head_shapes = {"weight": (vocab, hidden), "bias": (vocab,)}  # of each step's head, if there are any
    head_shapes = {
        part: shape
        for part, shape in head_shapes.items()
        if any(f"{head_name(i)}.{part}" in present for i in range(steps))
    }
    for step in range(steps):
        for name in (f"residual.{step}", f"blocks.{step}.0"):
            shapes |= {f"{name}.weight": (hidden, (2 + step) * hidden), f"{name}.bias": (hidden,)}
        for block in range(1, min(blocks, MOST_STEPS)):
            shapes |= {f"blocks.{step}.{block}.weight": (hidden, hidden), f"blocks.{step}.{block}.bias": (hidden,)}
        shapes |= {f"{head_name(step)}.{part}": shape for part, shape in head_shapes.items()}
    make = partial(HydraHead, steps, blocks)
    return HeadSpec("Hydra", states_config(target, num_heads(shapes), None, int(has_prefix)), shapes, (), vocab, make)


_PART = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
_TEXT = (
    (re.compile(r"prefix_embeding_layer\.layers\.(\d+)\.(.+)"), r"text.\1.\2"),
    (re.compile(r"prefix_embeding_layer\.norm\.weight"), TEXT_NORM),
)


# The target's embedding, and one that nothing uses: the prefix layer reads states, not tokens.
_COPIES = ("input_embed_fn.weight", "prefix_embeding_layer.embed_tokens.weight")


def hydra_name(has_prefix: bool, name: str) -> str | None:
    """`HydraHead`'s name of a tensor of zankner/Hydra. Where there is a prefix, dropouts count as layers."""
    name = renamed(name.removeprefix("hydra_head."), _TEXT)
    if name in _COPIES or name.endswith("rotary_emb.inv_freq"):
        return None
    if (match := _PART.fullmatch(name)) is not None:
        step, layer, part, kind = match.groups()
        block = int(layer) // 2 if has_prefix else int(layer)
        return f"residual.{step}.{kind}" if part != "linear" else f"blocks.{step}.{block}.{kind}"
    head = r"hydra_lm_head\.(\d+)\.1\.(weight|bias)" if has_prefix else r"hydra_lm_head\.(\d+)\.(weight|bias)"
    return renamed(name, ((re.compile(head), r"head.\1.\2"),))
