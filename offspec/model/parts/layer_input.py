"""What Gemma 3n and 4 give each layer of a token, beside hidden states: per-layer embeddings, and a layer's scale.

A row's input depends on its token alone: a row of a table of its own, and a projection of its embedding
(`Decoder.layer_inputs`). So the table is read by rows, as the embedding is, and need not be on the device.
"""

from __future__ import annotations

import math

from torch import Tensor

from ..config import ModelConfig
from ..norms import normalize
from .mlp import ACTIVATIONS
from .part import LayerWeights, NativePart, PassRows, Shape

GATE, PROJECTION, NORM, SCALE = (
    "per_layer_input_gate",
    "per_layer_projection",
    "post_per_layer_input_norm",
    "layer_scalar",
)


def of_tokens(embedded: Tensor, rows: Tensor, projection: LayerWeights, config: ModelConfig) -> Tensor:
    """What each layer gets of T tokens: [T, layers, size].

    embedded [T, hidden]: hidden states before the first layer. rows [T, layers * size]: the table's. projection: of
    embeddings to as many numbers, as "projection.weight", and "norm.weight" [size].
    """
    inputs = config.layer_inputs
    assert inputs is not None
    shape = (len(rows), inputs.num_layers, inputs.size)
    projected = (projection.linear("projection", embedded) * config.hidden_size**-0.5).view(shape)
    weight = projection.vector("norm.weight").to(projected.dtype)
    normed = normalize(projected, weight, None, config.norm, config.rms_norm_eps, projection.backend)
    return (normed + rows.view(shape) * math.sqrt(inputs.size)) * 2**-0.5


class LayerInput(NativePart):
    """The input of layer `layer`: it passes a gate, which the hidden states open, is projected, normed and added."""

    @property
    def norms(self) -> list[str]:
        return [NORM]

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        assert self.config.layer_inputs is not None
        size, hidden = self.config.layer_inputs.size, self.config.hidden_size
        return {GATE: (size, hidden), PROJECTION: (hidden, size)}

    @property
    def row_numbers(self) -> int:
        assert self.config.layer_inputs is not None
        return 3 * self.config.layer_inputs.size

    def has_bias(self, matrix: str) -> bool:
        return False

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        assert rows.inputs is not None
        gate = weights.backend.each(ACTIVATIONS[self.config.activation], weights.linear(GATE, x))
        opened = gate * rows.inputs[first:last, self.config.shape_of(self.layer).number]
        return self.added(x, self.norm(weights.linear(PROJECTION, opened), weights, NORM))


class LayerScale(NativePart):
    """Hidden states times a number of the layer."""

    @property
    def norms(self) -> list[str]:
        return []

    @property
    def row_numbers(self) -> int:
        return 0

    def has_bias(self, matrix: str) -> bool:
        return False

    @property
    def shapes(self) -> dict[str, Shape]:
        return {SCALE: (1,)}

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        return x * weights.vector(SCALE).to(x.dtype)
