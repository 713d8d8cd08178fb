"""A short convolution as a part of a layer (LFM2, 2511.23404): a gated causal convolution, without a recurrence.

Of a text it keeps the inputs of the last tokens, fewer than a kernel has places.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from offspec.backends.backend import Backend

from ..config import ModelConfig
from ..memory.recurrent_states import RecurrentLayout
from ..recurrence import PathRows, TreePlaces
from ..rope import RotaryEmbeddings
from .part import LayerWeights, PassRows, Shape
from .recurrent import ConvolvedPart


class ShortConvolution(ConvolvedPart):
    """The short convolution of layer `layer`: norm, projection, gates around a convolution, and a residual."""

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        assert config.short_convolution is not None
        self.shape = shape = config.short_convolution
        self.memory = RecurrentLayout(0, 1, 0, 0, config.hidden_size, shape.kernel - 1)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        hidden = self.config.hidden_size
        return {"conv.in_proj": (3 * hidden, hidden), "conv.out_proj": (hidden, hidden)}

    @property
    def row_numbers(self) -> int:
        return (8 + 4 * self.shape.kernel) * self.config.hidden_size  # what is in fp32 counts twice

    def has_bias(self, matrix: str) -> bool:
        return self.shape.has_bias

    @property
    def shapes(self) -> dict[str, Shape]:
        hidden = self.config.hidden_size
        bias = {"conv.conv.bias": (hidden,)} if self.shape.has_bias else {}
        return {**super().shapes, "conv.conv.weight": (hidden, 1, self.shape.kernel), **bias}

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        normed = self.norm(x, weights, self.config.norms_of(self.layer).before_attention)
        before, behind, values = weights.linear("conv.in_proj", normed).chunk(3, -1)
        convolved = self.advanced(before * values, (), weights, rows, first, last).to(x.dtype)
        return self.added(x, weights.linear("conv.out_proj", behind * convolved))

    def stored_convolution(self, weights: LayerWeights) -> tuple[Tensor, Tensor | None]:
        return weights.vector("conv.conv.weight"), weights.optional_vector("conv.conv.bias")

    def of_chain(
        self, matrix: Tensor, convolved: Tensor, pieces: Sequence[Tensor], backend: Backend
    ) -> tuple[Tensor, Tensor]:
        return convolved, matrix

    def of_tree(
        self,
        matrix: Tensor,
        convolved: Tensor,
        pieces: Sequence[Tensor],
        places: TreePlaces,
        earlier: PathRows,
        backend: Backend,
    ) -> tuple[Tensor, PathRows]:
        """Rows of no heads."""
        none = (part.new_empty(len(convolved), *part.shape[1:]) for part in vars(earlier).values())
        return convolved, type(earlier)(*none)
