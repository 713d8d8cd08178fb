"""A gated delta net as a part of a layer (Gated Delta Networks, 2412.06464; Qwen3-Next, Qwen3.5 and newer).

A row's queries, keys and values come from a projection and a short convolution along the text; a state per head maps
keys to values (`recurrence`). The layer's output is the state's answer to the query, normed and gated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.backend import Backend
from offspec.scheduler.params import MOST_STATE_NODES

from ..config import ModelConfig
from ..memory.recurrent_states import RecurrentLayout
from ..norms import rms_normed
from ..recurrence import DeltaInputs
from ..rope import RotaryEmbeddings
from .part import LayerWeights, PassRows, Shape
from .recurrent import RecurrentPart

NORM_EPS = 1e-6  # of queries and keys


class DeltaNet(RecurrentPart):
    """The gated delta net of layer `layer`: norm, projections, convolution, recurrence, and a residual."""

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        assert config.delta is not None
        self.shape = shape = config.delta
        self.memory = RecurrentLayout(
            shape.num_heads, shape.key_heads, shape.key_size, shape.value_size, shape.channels, shape.kernel - 1
        )

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        shape, hidden = self.shape, self.config.hidden_size
        made = {f"linear_attn.{name}": (count, hidden) for name, count in shape.rows.items()}
        return {**made, f"linear_attn.{shape.names.output}": (hidden, shape.values)}

    @property
    def row_numbers(self) -> int:
        shape = self.shape  # what is in fp32 counts twice
        return 2 * ((shape.kernel + 6) * shape.channels + 8 * shape.values + 3 * shape.num_heads * MOST_STATE_NODES)

    def has_bias(self, matrix: str) -> bool:
        return False

    @property
    def shapes(self) -> dict[str, Shape]:
        shape, names = self.shape, self.shape.names
        parts = zip(names.convolutions, shape.kernel_parts or shape.inputs, strict=True)
        return {
            **super().shapes,
            **{f"linear_attn.{name}.weight": (channels, 1, shape.kernel) for name, channels in parts},
            "linear_attn.A_log": (shape.num_heads,),
            "linear_attn.dt_bias": (shape.num_heads,),
            f"linear_attn.{names.norm}.weight": (shape.value_size,),
        }

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        normed = self.norm(x, weights, self.config.norms_of(self.layer).before_attention)
        mixed, gates, rates, steps = self.projected(normed, weights)
        steps = weights.backend.each(F.softplus, steps.float() + weights.vector("linear_attn.dt_bias").float())
        decays = -weights.vector("linear_attn.A_log").float().exp() * steps
        rates = weights.backend.each(torch.sigmoid, rates.float()) * self.shape.top_rate
        outputs = self.advanced(mixed, (decays, rates), weights, rows, first, last)
        return self.added(x, self.gated(outputs.to(x.dtype), gates, weights))

    def projected(self, x: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of normed states x [T, hidden]: the convolution's inputs [T, channels], gates [T, heads, Dv], and per head
        the inputs of the update's rate and of the decay's step [T, heads].
        """
        shape, products = self.shape, [weights.linear(f"linear_attn.{name}", x) for name in self.shape.rows]
        if shape.names.is_grouped:
            products[:1] = self._ungrouped(products[0])
        if shape.names.rate == shape.names.step:
            by_key_head = products.pop().view(len(x), shape.key_heads, -1)
            products += [half.flatten(1) for half in by_key_head.chunk(2, -1)]
        *mixed, gates, rates, steps = products
        by_head = gates.view(len(x), shape.num_heads, shape.value_size)
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1), by_head, rates, steps

    def _ungrouped(self, inputs: Tensor) -> list[Tensor]:
        """The product [T, N] with a matrix that is grouped by key heads → queries, keys, values and gates."""
        shape = self.shape
        per_key = shape.num_heads // shape.key_heads  # value heads
        sizes = [shape.key_size, shape.key_size, per_key * shape.value_size, per_key * shape.value_size]
        pieces = torch.split(inputs.view(len(inputs), shape.key_heads, -1), sizes, -1)
        return [piece.flatten(1) for piece in pieces]

    def stored_convolution(self, weights: LayerWeights) -> tuple[Tensor, None]:
        return torch.cat([weights.vector(f"linear_attn.{name}.weight") for name in self.shape.names.convolutions]), None

    def inputs(self, convolved: Tensor, pieces: Sequence[Tensor], backend: Backend) -> DeltaInputs:
        shape, (decays, rates) = self.shape, pieces
        active = backend.silu(convolved)
        queries, keys, values = torch.split(active, [shape.keys, shape.keys, shape.values], -1)
        by_head = (len(active), shape.key_heads, shape.key_size)
        return DeltaInputs(
            _normed(queries.view(by_head), 1 / shape.key_size, backend),
            _normed(keys.view(by_head), shape.key_size**-0.5, backend),
            values.view(len(active), shape.num_heads, shape.value_size),
            decays,
            rates,
        )

    def gated(self, outputs: Tensor, gates: Tensor, weights: LayerWeights) -> Tensor:
        """Outputs [T, heads, Dv], normed per head and times silu(gate), through the last projection: [T, hidden]."""
        normed = rms_normed(outputs.float(), self.shape.norm_eps, weights.backend).to(outputs.dtype)
        normed = weights.vector(f"linear_attn.{self.shape.names.norm}.weight") * normed
        gated = (normed.flatten(1) * weights.backend.silu(gates.float().flatten(1))).to(outputs.dtype)
        return weights.linear(f"linear_attn.{self.shape.names.output}", gated)


def _normed(x: Tensor, factor: float, backend: Backend) -> Tensor:
    """x [..., N] divided by its length, times sqrt(N) · `factor`."""
    return rms_normed(x, NORM_EPS / x.shape[-1], backend, factor)
