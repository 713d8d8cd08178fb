"""Medusa (2401.10774): each of the next tokens is predicted from the same final state, whatever the tokens between are.

Names and shapes: FasterDecoding/Medusa (medusa_model.py), vLLM (medusa.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.scheduler.trees.token_tree import IntArray

from ..config import ModelConfig
from ..config_values import Json, positive
from ..decoder import Decoder
from .chained import MOST_STEPS, ChainedHead, head_name, num_heads, num_steps, renamed, states_config
from .head import HeadSpec


class MedusaHead(ChainedHead):
    """Residual blocks for each step, on the final state."""

    def __init__(
        self, steps: int, blocks: int, tensors: Mapping[str, Tensor], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(num_heads(tensors), tensors, target, dtype)
        self.num_steps = steps
        self._blocks = blocks

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        x = features
        for block in range(self._blocks):
            x = x + F.silu(self._linear(f"blocks.{depth}.{block}", x))
        return x, features


def medusa_spec(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """present: shapes by `medusa_name`. Raises CheckpointError."""
    steps = num_steps(config, "medusa_num_heads", "num_heads")
    blocks = positive(config, "medusa_num_layers" if "medusa_num_layers" in config else "num_hidden_layers", 1)
    hidden, vocab = target.hidden_size, target.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for step in range(steps):
        for block in range(min(blocks, MOST_STEPS)):
            shapes[f"blocks.{step}.{block}.weight"] = (hidden, hidden)
            if f"blocks.{step}.{block}.bias" in present:
                shapes[f"blocks.{step}.{block}.bias"] = (hidden,)
    shared = 1 if config.get("original_lm_head") is True else steps
    head_shapes = {f"{head_name(step)}.weight": (vocab, hidden) for step in range(shared)}
    shapes |= head_shapes if any(name in present for name in head_shapes) else {}
    make = partial(MedusaHead, steps, blocks)
    return HeadSpec("Medusa", states_config(target, num_heads(shapes)), shapes, (), vocab, make)


_MEDUSA = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"blocks.\1.\2.\3"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"blocks.\1.\2.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"head.\1.weight"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"head.\1.weight"),
    (re.compile(r"lm_head\.weight"), r"head.0.weight"),
)


def medusa_name(name: str) -> str | None:
    """`MedusaHead`'s name of a tensor in a file of FasterDecoding or vLLM."""
    return renamed(re.sub(r"^medusa_heads?\.", "", name), _MEDUSA)
