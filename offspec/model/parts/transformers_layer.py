"""A whole layer of transformers' modules as one part. This module does not import transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..config import ModelConfig
from ..pass_rows import AppendedRows, by_text
from ..transformers_config import ForeignConfig
from .part import LayerWeights, Part, PassRows, Shape

# Computes a layer by its number over rows first .. last of a text: hidden states x [T, hidden] → [T, hidden].
# Arguments: the layer, x, its weights, the text's rows, first, last.
ComputeLayer = Callable[[int, Tensor, LayerWeights, AppendedRows, int, int], Tensor]


class LayerOfModules(Part):
    """Layer `layer` of a `ForeignConfig`."""

    is_static = False

    def __init__(self, config: ModelConfig, layer: int, compute: ComputeLayer | None = None) -> None:
        """compute: by the modules; without it, a part tells shapes only."""
        assert isinstance(config, ForeignConfig)
        super().__init__(config, layer)
        self.memory = config.kv[layer]
        self._shapes = config.layers[layer]
        self._compute = compute

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    @property
    def row_numbers(self) -> int:
        return max(3 * self.config.intermediate_size, 6 * self.config.num_heads * self.config.head_dim)

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        assert self._compute is not None, "a part without modules"
        outputs = [
            self._compute(self.layer, x[some], weights, text, begin, end)
            for text, begin, end, some in by_text(rows, first, last)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def of_config(config: ModelConfig, layer: int, rotaries: object) -> LayerOfModules:
    """A layer that tells shapes."""
    return LayerOfModules(config, layer)
