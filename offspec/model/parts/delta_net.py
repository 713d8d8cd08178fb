"""A gated delta net as a part of a layer (Gated Delta Networks, 2412.06464; Qwen3-Next, Qwen3.5 and newer).

A row's queries, keys and values come from a projection and a short convolution along the text; a state per head maps
keys to values (`recurrence`). The layer's output is the state's answer to the query, normed and gated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.scheduler.params import MOST_STATE_NODES

from ..config import ModelConfig
from ..memory.recurrent_states import RecurrentLayout
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
    def norms(self) -> list[str]:
        name = self.config.norms.before_attention
        return [] if name is None else [name]

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        shape, heads, hidden = self.shape, self.shape.num_heads, self.config.hidden_size
        rows = {"in_proj_qkv": shape.channels, "in_proj_z": shape.values, "in_proj_b": heads, "in_proj_a": heads}
        made = {f"linear_attn.{name}": (count, hidden) for name, count in rows.items()}
        return {**made, "linear_attn.out_proj": (hidden, shape.values)}

    @property
    def row_numbers(self) -> int:
        shape = self.shape  # what is in fp32 counts twice
        return 2 * ((shape.kernel + 6) * shape.channels + 8 * shape.values + 3 * shape.num_heads * MOST_STATE_NODES)

    def has_bias(self, matrix: str) -> bool:
        return False

    @property
    def shapes(self) -> dict[str, Shape]:
        shape = self.shape
        return {
            **super().shapes,
            "linear_attn.conv1d.weight": (shape.channels, 1, shape.kernel),
            "linear_attn.A_log": (shape.num_heads,),
            "linear_attn.dt_bias": (shape.num_heads,),
            "linear_attn.norm.weight": (shape.value_size,),
        }

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        mixed, gates, rates, steps = self.projected(self.norm(x, weights, self.config.norms.before_attention), weights)
        decays = -weights.vector("linear_attn.A_log").float().exp() * F.softplus(
            steps.float() + weights.vector("linear_attn.dt_bias").float()
        )
        outputs = self.recurred(mixed, (decays, rates.float().sigmoid()), weights, rows, first, last)
        return self.added(x, self.gated(outputs.to(x.dtype), gates, weights))

    def projected(self, x: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of normed states x [T, hidden]: the convolution's inputs [T, channels], gates [T, heads, Dv], and per head
        the inputs of the update's rate and of the decay's step [T, heads].
        """
        shape = self.shape
        mixed, gates, rates, steps = (
            weights.linear(f"linear_attn.in_proj_{name}", x) for name in ("qkv", "z", "b", "a")
        )
        return mixed, gates.view(len(x), shape.num_heads, shape.value_size), rates, steps

    def convolution(self, weights: LayerWeights) -> tuple[Tensor, None]:
        kernel = weights.vector("linear_attn.conv1d.weight").float().view(self.shape.channels, self.shape.kernel)
        return kernel, None

    def inputs(self, convolved: Tensor, pieces: Sequence[Tensor]) -> DeltaInputs:
        shape, (decays, rates) = self.shape, pieces
        size = shape.key_heads * shape.key_size
        active = F.silu(convolved)
        queries, keys, values = torch.split(active, [size, size, shape.values], -1)
        by_head = (len(active), shape.key_heads, shape.key_size)
        return DeltaInputs(
            _normed(queries.view(by_head)) * shape.key_size**-0.5,
            _normed(keys.view(by_head)),
            values.view(len(active), shape.num_heads, shape.value_size),
            decays,
            rates,
        )

    def gated(self, outputs: Tensor, gates: Tensor, weights: LayerWeights) -> Tensor:
        """Outputs [T, heads, Dv], normed per head and times silu(gate), through the last projection: [T, hidden]."""
        wide = outputs.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        normed = weights.vector("linear_attn.norm.weight") * normed.to(outputs.dtype)
        gated = (normed * F.silu(gates.float())).to(outputs.dtype)
        return weights.linear("linear_attn.out_proj", gated.flatten(1))


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
