"""The MLP as a part of a layer, with a gate (SwiGLU, GeGLU) or without, behind attention or beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from offspec.backends.backend import Backend
from offspec.backends.x86.row_steps import LARGEST, SHARPNESS

from ..config import ModelConfig
from ..rope import RotaryEmbeddings
from ..shapes import CLAMPED, MlpNames, Multipliers
from .attention import Attention
from .part import LayerWeights, NativePart, PassRows


def clamped(x: Tensor) -> Tensor:
    """gpt-oss's activation of a gate; see `gated` for `up`."""
    x = x.clamp(max=LARGEST)
    return x * (SHARPNESS * x).sigmoid()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by their names in config.json
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    CLAMPED: clamped,
}
IN_ONE_STEP = ("silu", "swish", CLAMPED)  # with `up`


class Mlp(NativePart):
    """The MLP of a layer: norm, matrices, and a residual. Differences are in `ModelConfig.mlp` and `activation`."""

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        self.multipliers = config.multipliers

    @property
    def inner_size(self) -> int:
        return self.config.shape_of(self.layer).intermediate_size

    @property
    def names(self) -> MlpNames:
        return self.config.mlp

    @property
    def norms(self) -> list[str]:
        return self.config.norms_of(self.layer).of_mlp

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        hidden, inner, names = self.config.hidden_size, self.inner_size, self.names
        gate = {} if names.gate is None else {names.gate: (inner, hidden)}
        return {**gate, names.up: (2 * inner if names.is_fused else inner, hidden), names.down: (hidden, inner)}

    @property
    def row_numbers(self) -> int:
        return (4 if self.names.is_fused else 3) * self.inner_size

    def has_bias(self, matrix: str) -> bool:
        return self.config.mlp_bias

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        (output,) = self.steps.run(weights.backend, "mlp", partial(self._forward, weights), (x,), weights.tensors)
        return output

    def _forward(self, weights: LayerWeights, x: Tensor) -> tuple[Tensor]:
        places = self.config.norms_of(self.layer)
        output = self.output(self.norm(x, weights, places.before_mlp), weights)
        return (self.added(x, self.norm(output, weights, places.after_mlp)),)

    def output(self, x: Tensor, weights: LayerWeights) -> Tensor:
        """Normed states x [T, hidden] → [T, hidden]."""
        return output_of(x, weights, self.names, self.config.activation, self.multipliers)


def output_of(
    x: Tensor, weights: LayerWeights, names: MlpNames, activation: str, multipliers: Multipliers | None = None
) -> Tensor:
    """An MLP's output [T, hidden] of x [T, hidden]; with a gate it is SwiGLU or GeGLU (2002.05202)."""
    down = weights.linear(names.down, inner_of(x, weights, names, activation, multipliers))
    return down if multipliers is None else down * multipliers.down


def inner_of(
    x: Tensor, weights: LayerWeights, names: MlpNames, activation: str, multipliers: Multipliers | None = None
) -> Tensor:
    """An MLP's inner numbers [T, inner], which `names.down` multiplies."""
    if names.gate is None:
        return weights.backend.each(ACTIVATIONS[activation], weights.linear(names.up, x))
    if names.is_fused:
        both = weights.linear(names.up, x)
        gate, up = (both[:, ::2], both[:, 1::2]) if names.is_interleaved else both.chunk(2, -1)
        return gated(gate, up, activation, weights.backend)
    gate, up = weights.linears((names.gate, names.up), x)
    if multipliers is not None:
        gate = gate * multipliers.gate
    return gated(gate, up, activation, weights.backend)


def gated(gate: Tensor, up: Tensor, activation: str, backend: Backend) -> Tensor:
    """The inner numbers [T, inner] of an MLP by the outputs of its gate and of `up`."""
    is_clamped = activation == CLAMPED
    if activation in IN_ONE_STEP and (inner := backend.swiglu(gate, up, is_clamped=is_clamped)) is not None:
        return inner
    if is_clamped:
        up = up.clamp(-LARGEST, LARGEST) + 1
    return backend.each(ACTIVATIONS[activation], gate) * up


class AttentionBesideMlp(Attention):
    """Attention and an MLP that have the same normed states as input (Cohere)."""

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        self.mlp = Mlp(config, layer)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        return {**super().matrices, **self.mlp.matrices}

    @property
    def norms(self) -> list[str]:
        return [*super().norms, *self.mlp.norms]

    @property
    def row_numbers(self) -> int:
        return max(super().row_numbers, self.mlp.row_numbers)

    def has_bias(self, matrix: str) -> bool:
        return super().has_bias(matrix) if matrix in super().matrices else self.mlp.has_bias(matrix)

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        normed = self.norm(x, weights, self.places.before_attention)
        return x + self.attended(normed, weights, rows, first, last) + self.mlp.output(normed, weights)
