"""Mamba2 as a part of a layer (2405.21060): alone (Granite 4 H, Nemotron-H), or beside attention (Falcon-H1).

A projection gives a row's gate z, the inputs x, B and C of a short convolution along the text, and a step dt per head.
A head's state sums B x^T, weighted by dt, and decays by exp(dt A) with each row; C reads it (`recurrence`). A head's
inputs are added to its outputs (D), which are gated and, in most families, normed by groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.backend import Backend
from offspec.scheduler.params import MOST_STATE_NODES

from ..config import ModelConfig
from ..memory.kv_cache import MemoryLayout
from ..memory.recurrent_states import RecurrentLayout
from ..norms import rms_normed
from ..recurrence import SumInputs
from ..rope import RotaryEmbeddings
from ..shapes import Multipliers
from .attention import Attention
from .part import LayerWeights, PassRows, Shape
from .recurrent import RecurrentPart


class Mamba(RecurrentPart):
    """Mamba2 of layer `layer`: norm, projections, convolution, recurrence, and a residual."""

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        assert config.mamba is not None
        self.shape = shape = config.mamba
        self.memory = RecurrentLayout(
            shape.num_heads, shape.num_groups, shape.state_size, shape.head_size, shape.channels, shape.kernel - 1
        )

    def name(self, tensor: str) -> str:
        """The short name of one of its tensors."""
        return f"{self.shape.prefix}.{tensor}"

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        shape, hidden = self.shape, self.config.hidden_size
        rows = shape.inner + shape.channels + shape.num_heads
        return {self.name("in_proj"): (rows, hidden), self.name("out_proj"): (hidden, shape.inner)}

    @property
    def row_numbers(self) -> int:
        shape = self.shape  # what is in fp32 counts twice
        return 2 * ((shape.kernel + 6) * shape.channels + 8 * shape.inner + 2 * shape.num_heads * MOST_STATE_NODES)

    def has_bias(self, matrix: str) -> bool:
        return self.shape.has_in_bias if matrix == self.name("in_proj") else self.shape.has_out_bias

    @property
    def shapes(self) -> dict[str, Shape]:
        shape = self.shape
        shapes: dict[str, Shape] = {
            **super().shapes,
            self.name("conv1d.weight"): (shape.channels, 1, shape.kernel),
            **{self.name(vector): (shape.num_heads,) for vector in ("A_log", "D", "dt_bias")},
        }
        if shape.has_conv_bias:
            shapes[self.name("conv1d.bias")] = (shape.channels,)
        if shape.norm is not None:
            shapes[self.name("norm.weight")] = (shape.inner,)
        return shapes

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        normed = self.norm(x, weights, self.config.norms_of(self.layer).before_attention)
        return self.added(x, self.mixed(normed, weights, rows, first, last))

    def mixed(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """Mamba2 of rows first .. last: normed states x [T, hidden] → [T, hidden]."""
        shape = self.shape
        gates, mixed, steps = self.projected(x, weights)
        steps = weights.backend.each(F.softplus, steps.float() + weights.vector(self.name("dt_bias")).float())
        steps = steps.clamp(*shape.step_limits)
        decays = -weights.vector(self.name("A_log")).float().exp() * steps
        skips = weights.vector(self.name("D")).float().expand(len(x), -1)
        outputs = self.advanced(mixed, (decays, steps, skips), weights, rows, first, last).flatten(1)
        return weights.linear(self.name("out_proj"), self.gated(outputs, gates, weights).to(x.dtype))

    def projected(self, x: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Of normed x [T, hidden]: gates [T, inner], the convolution's inputs [T, channels], steps [T, heads]."""
        shape, multipliers = self.shape, self.config.multipliers
        if multipliers is not None:
            x = x * multipliers.ssm_in
        parts = torch.split(weights.linear(self.name("in_proj"), x), shape.widths, -1)
        if multipliers is not None:
            parts = tuple(part * factor for part, factor in zip(parts, multipliers.ssm, strict=True))
        gates, *convolved, steps = parts
        return gates, torch.cat(convolved, -1), steps

    def stored_convolution(self, weights: LayerWeights) -> tuple[Tensor, Tensor | None]:
        return weights.vector(self.name("conv1d.weight")), weights.optional_vector(self.name("conv1d.bias"))

    def inputs(self, convolved: Tensor, pieces: Sequence[Tensor], backend: Backend) -> SumInputs:
        shape, (decays, steps, skips) = self.shape, pieces
        values, keys, queries = torch.split(backend.silu(convolved), shape.widths[1:4], -1)
        values = values.reshape(len(values), shape.num_heads, shape.head_size)
        by_group = (len(values), shape.num_groups, shape.state_size)
        return SumInputs(
            queries.reshape(by_group),
            keys.reshape(by_group),
            values * steps[..., None],
            decays,
            values * skips[..., None],
        )

    def gated(self, outputs: Tensor, gates: Tensor, weights: LayerWeights) -> Tensor:
        """Outputs [T, inner] in fp32, gated by silu(gates) and normed by groups, in the family's order."""
        gates = weights.backend.silu(gates.float())
        if self.shape.norm is None:
            return outputs * gates
        weight = weights.vector(self.name("norm.weight"))
        if self.shape.norm == "before gate":
            return self.grouped_norm(outputs, weight, weights.backend) * gates
        return self.grouped_norm(outputs * gates, weight, weights.backend)

    def grouped_norm(self, x: Tensor, weight: Tensor, backend: Backend) -> Tensor:
        """x [T, inner] in fp32, each group normed, times weight [inner]."""
        groups = x.view(len(x), self.shape.num_groups, -1)
        return rms_normed(groups, self.config.rms_norm_eps, backend).flatten(1) * weight


class AttentionBesideMamba(Attention):
    """Attention and Mamba2 that have the same normed states as input (Falcon-H1)."""

    is_static = False

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        self.mamba = Mamba(config, layer, rotaries)
        self.multipliers = config.multipliers or Multipliers()

    @property
    def memories(self) -> tuple[MemoryLayout, ...]:
        return (*super().memories, *self.mamba.memories)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        return {**super().matrices, **self.mamba.matrices}

    @property
    def row_numbers(self) -> int:
        return super().row_numbers + self.mamba.row_numbers

    def has_bias(self, matrix: str) -> bool:
        return self.mamba.has_bias(matrix) if matrix in self.mamba.matrices else super().has_bias(matrix)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {**super().shapes, **self.mamba.shapes}

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        factors = self.multipliers
        normed = self.norm(x, weights, self.config.norms_of(self.layer).before_attention)
        mixed = self.mamba.mixed(normed, weights, rows, first, last)
        attended = self.attended(normed * factors.attention_in, weights, rows, first, last)
        return x + (mixed * factors.ssm_out + attended * factors.attention_out)
