"""The frame of heads that go step by step from the last place of the text along their own path.

Most see nothing of the text but the target's state at that place, and have no KV cache. Some have layers of their own
over the text.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.choice import linear
from offspec.loaders.streaming.small_transfers import to_device
from offspec.loaders.streaming.weights import RamWeights
from offspec.scheduler.trees.token_tree import IntArray
from offspec.scheduler.trees.vocabulary import Vocabulary

from ...errors import CheckpointError
from ..block import build_blocks, layer_shapes
from ..config import ModelConfig
from ..config_values import Json, positive
from ..decoder import Decoder
from ..parts.part import PassRows
from .head import Advanced, Head, Inputs

MOST_STEPS = 64
NEGLIGIBLE = 1e-4  # share of the largest number below which a step's part of the states is taken as zero


class ChainedHead(Head, ABC):
    """Base: `step` computes the rows of one depth. The states of different steps' heads lie side by side.

    So logits are linear in the states, although each step may have a head of its own: W_d times part d, the others
    being zero. A head with tensors `text.N.*` has layers over the text, which renew the states of its rows.
    room: numbers that a path's features have behind those of the text.
    """

    room = 0

    def __init__(
        self,
        num_parts: int,
        tensors: Mapping[str, Tensor],
        target: Decoder,
        dtype: torch.dtype | None = None,
        width: int | None = None,
    ) -> None:
        """num_parts: heads of its own, or 1 for one head. width: of a part; None is the target's hidden size."""
        self._tensors = tensors
        self._num_parts = num_parts
        layers = _text_layers(tensors)
        config = states_config(target.config, num_parts, width, len(layers))
        super().__init__(config, RamWeights(layers, {}), target, Vocabulary(target.config.vocab_size), dtype)
        inner = target.config.plain_layers(len(layers))
        self.blocks = build_blocks(inner, dtype=self.dtype, device=self.device)
        self.reads_text = bool(layers)

    @abstractmethod
    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        """States [R, width] and features [R, F] of rows of one depth."""

    def advance(self, inputs: Inputs, rows: PassRows) -> Advanced:
        if not inputs.depths.any():
            text_features = self.of_text(inputs, rows) if self.blocks else inputs.features
            inputs = inputs._replace(features=F.pad(text_features, (0, self.room)))
        states, features = list[Tensor](), list[Tensor]()
        order = list[Tensor]()
        for depth, chosen in _by_depth(inputs.depths):
            index = to_device(chosen, inputs.features.device)
            some, further = self.step(depth, inputs.features[index], inputs.tokens[chosen.numpy()])
            states.append(self._placed(depth, some))
            features.append(further)
            order.append(index)
        back = torch.cat(order).argsort()
        return Advanced(torch.cat(states)[back], torch.cat(features)[back])

    def read(self, inputs: Inputs, rows: PassRows) -> None:
        self.of_text(inputs, rows)

    def of_text(self, inputs: Inputs, rows: PassRows) -> Tensor:
        """The target's states [R, hidden] at rows of the text, behind the layers over the text."""
        x = inputs.features
        for block in self.blocks:
            with self.weights.layer(block.index) as tensors:
                weights = self.layer_weights(tensors)
                x = torch.cat([block.forward(x[i:j], weights, rows, i, j) for i, j in rows.chunks])
        if TEXT_NORM in self._tensors:
            x = F.rms_norm(x, x.shape[-1:], self._tensors[TEXT_NORM].to(x.dtype), self.config.rms_norm_eps)
        return x

    def _placed(self, depth: int, states: Tensor) -> Tensor:
        """The states [R, width] as the part of their step's head: [R, parts * width]."""
        if self._num_parts == 1:
            return states
        part = min(depth, self._num_parts - 1) * states.shape[1]
        return F.pad(states, (part, self.config.hidden_size - part - states.shape[1]))

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def linear_logits(self, states: Tensor) -> Tensor:
        if f"{head_name(0)}.weight" not in self._tensors:
            return super().linear_logits(states)
        parts = states.chunk(self._num_parts, dim=-1)
        if len(parts) == 1:
            return self._linear(head_name(0), states).float()
        largest = torch.stack([part.detach().abs().amax(-1) for part in parts])  # [parts, R]
        is_used = largest > NEGLIGIBLE * largest.amax(0)
        logits_of_steps = [
            self._logits_of(step, part, rows)
            for step, (part, rows) in enumerate(zip(parts, is_used, strict=True))
            if rows.any()
        ]
        return (
            torch.stack(logits_of_steps).sum(0)
            if logits_of_steps
            else states.new_zeros(len(states), self.target.config.vocab_size)
        )

    def _logits_of(self, step: int, states: Tensor, rows: Tensor) -> Tensor:
        """fp32 logits of one step's head; its bias for these `rows` (bool [R]) only, as the others are not its own."""
        logits = linear(states, self._tensors[f"{head_name(step)}.weight"]).float()
        bias = self._tensors.get(f"{head_name(step)}.bias")
        return logits if bias is None else logits + rows[:, None] * bias.float()

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """x times the matrix `name`.weight, plus its bias if there is one."""
        return linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    @property
    def has_own_head(self) -> bool:
        return False

    def capped(self, logits: Tensor) -> Tensor:
        return logits if f"{head_name(0)}.weight" in self._tensors else super().capped(logits)


def head_name(step: int) -> str:
    return f"head.{step}"


def states_config(target: ModelConfig, num_parts: int, width: int | None = None, num_layers: int = 0) -> ModelConfig:
    """The shape of a head whose states have `num_parts` parts. num_layers: over the text."""
    return replace(target.plain_layers(num_layers), hidden_size=num_parts * (width or target.hidden_size))


TEXT_NORM = "text.norm.weight"


def text_shapes(target: ModelConfig, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Name → shape of the tensors of layers over the text."""
    shapes = layer_shapes(target.plain_layers(1))
    return {f"text.{index}.{name}": shape for index in range(num_layers) for name, shape in shapes.items()}


def _text_layers(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The weights of the layers over the text by short names."""
    layers = dict[int, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        if (match := re.fullmatch(r"text\.(\d+)\.(.+)", name)) is not None:
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
    return [layers[index] for index in sorted(layers)]


def _by_depth(depths: IntArray) -> Iterator[tuple[int, Tensor]]:
    given = torch.from_numpy(depths)
    for depth in np.unique(depths).tolist():
        yield depth, torch.nonzero(given == depth)[:, 0]


def num_heads(tensors: Mapping[str, object]) -> int:
    """The number of a head's own matrices for logits, at least 1."""
    return max(1, sum(name.startswith("head.") and name.endswith(".weight") for name in tensors))


def renamed(name: str, rules: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, new in rules:
        if (match := pattern.fullmatch(name)) is not None:
            return match.expand(new)
    return name


def num_steps(config: Json, *keys: str) -> int:
    """How many tokens ahead a head predicts. Raises CheckpointError."""
    steps = positive(config, next((key for key in keys if key in config), keys[0]))
    if steps > MOST_STEPS:
        raise CheckpointError(f"config.json: a head of {steps} steps, and at most {MOST_STEPS} are supported")
    return steps


def attention_heads(config: Json, hidden: int) -> int:
    """The number of heads of a head's own attention. Raises CheckpointError."""
    heads = positive(config, "num_attention_heads")
    if hidden % heads:
        raise CheckpointError(f"config.json: num_attention_heads {heads} does not divide the hidden size {hidden}")
    return heads
