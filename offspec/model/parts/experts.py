"""A mixture of experts as a part of a layer: a router chooses experts for each row, and only these are computed."""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor

from ..config import ModelConfig
from ..rope import RotaryEmbeddings
from ..shapes import ExpertsShape, MlpNames
from .chosen_experts import ChosenExperts
from .mlp import Mlp
from .part import LayerWeights, NativePart, PassRows, Shape

LEAST_SUM = 1e-20  # that keeps a division by a sum of scores finite, as in DeepSeek's code


class SharedExpert(Mlp):
    """An MLP beside the experts, which every row uses."""

    def __init__(self, config: ModelConfig, layer: int, shape: ExpertsShape) -> None:
        super().__init__(config, layer)
        self._shape = shape

    @property
    def inner_size(self) -> int:
        return self._shape.shared_size

    @property
    def names(self) -> MlpNames:
        return self._shape.shared


class Experts(NativePart):
    """The experts of a layer: norm, router, experts, perhaps a shared one, and a residual.

    Source: Shazeer et al. (1701.06538). `shapes.ExpertsShape` has the families' ways of choosing. Each expert is a
    unit of weights, which the part borrows when the rows have chosen.
    """

    is_static = False

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        assert config.experts is not None
        self.shape = config.experts
        self.shared = SharedExpert(config, layer, self.shape) if self.shape.shared_size else None

    @property
    def norms(self) -> list[str]:
        return self.config.norms_of(self.layer).of_mlp

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        shared = {} if self.shared is None else self.shared.matrices
        if self.shape.shared_gate is not None:
            shared = {**shared, self.shape.shared_gate: (1, self.config.hidden_size)}
        return {self.shape.router: (self.shape.num, self.config.hidden_size), **shared}

    @property
    def shapes(self) -> dict[str, Shape]:
        shapes = super().shapes
        if self.shape.correction is not None:
            shapes[self.shape.correction] = (self.shape.num,)
        for number in range(self.shape.num):
            for name, shape in self.of_expert.items():
                shapes[f"{self.shape.prefix}.{number}.{name}"] = shape
        return shapes

    @property
    def of_expert(self) -> dict[str, Shape]:
        """Short name → shape of each tensor of an expert."""
        hidden, inner, names = self.config.hidden_size, self.shape.inner_size, self.shape.names
        matrices = {names.up: (2 * inner if names.is_fused else inner, hidden), names.down: (hidden, inner)}
        if names.gate is not None and not names.is_fused:
            matrices[names.gate] = (inner, hidden)
        biases = {f"{name}.bias": shape[:1] for name, shape in matrices.items() if self.shape.has_bias}
        return {**{f"{name}.weight": shape for name, shape in matrices.items()}, **biases}

    @property
    def row_numbers(self) -> int:
        """Of all experts of a row: their results are kept until they are summed, and each makes 4 vectors at most."""
        shared = 0 if self.shared is None else self.shared.row_numbers
        experts = self.shape.num_used * (3 * self.config.hidden_size + 4 * self.shape.inner_size)
        return max(shared, experts + 4 * self.shape.num)

    def has_bias(self, matrix: str) -> bool:
        return self.shape.has_bias and matrix == self.shape.router

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        normed, logits = self.steps.run(
            weights.backend, "router", partial(self._scored, weights), (x,), weights.tensors
        )
        weights.announce(x)
        output = self.mixed(normed, *self.routed(logits, weights), weights)
        if self.shared is not None:
            output = output + self._shared_output(normed, weights)
        return self.added(x, self.norm(output, weights, self.config.norms_of(self.layer).after_mlp))

    def _scored(self, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        """States x [T, hidden], normed, and the router's fp32 logits [T, experts] of them."""
        normed = self.norm(x, weights, self.config.norms_of(self.layer).before_mlp)
        return normed, self._logits(normed, weights)

    def _shared_output(self, x: Tensor, weights: LayerWeights) -> Tensor:
        assert self.shared is not None
        output = self.shared.output(x, weights)
        if self.shape.shared_gate is None:
            return output
        return output * weights.backend.each(torch.sigmoid, weights.linear(self.shape.shared_gate, x))

    def likely(self, x: Tensor, weights: LayerWeights) -> dict[int, int]:
        """The experts that rows would choose if an earlier layer's states x [T, hidden] came here, with their rows.

        Residual connections change states slowly, so most of these are chosen later (Eliseev and Mazur, 2312.17238).
        weights: this layer's.
        """
        chosen, _ = self.routed(self._scored(weights, x)[1], weights)
        return Counter(chosen.flatten().tolist())

    def routed(self, logits: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor]:
        """Logits [T, experts] → the numbers [T, used] of the rows' experts, ascending, and their fp32 scales."""
        shape = self.shape
        scores = weights.backend.each(torch.sigmoid, logits) if shape.scores == "sigmoid" else logits
        if shape.scores == "softmax":
            scores = logits.softmax(-1)
        ranks = scores if shape.correction is None else scores + weights.vector(shape.correction).float()
        chosen = self._within_groups(ranks).topk(shape.num_used, dim=-1).indices.sort(-1).values
        scales = scores.gather(-1, chosen)
        if shape.scores == "softmax of chosen":
            scales = scales.softmax(-1)
        elif shape.is_normed:
            scales = scales / (scales.sum(-1, keepdim=True) + LEAST_SUM)
        return chosen, scales if shape.scale == 1 else scales * shape.scale

    def _logits(self, x: Tensor, weights: LayerWeights) -> Tensor:
        """The router's fp32 logits [T, experts] of x [T, hidden]."""
        if not self.shape.has_fp32_router:
            return weights.linear_fp32(self.shape.router, x)
        without_scratch = LayerWeights(weights.tensors, weights.backend)  # which has another dtype
        return without_scratch.linear(self.shape.router, x.float())

    def _within_groups(self, ranks: Tensor) -> Tensor:
        """ranks [T, experts], with -inf in groups that are not among the best (DeepSeek, 2412.19437, 2.1.2)."""
        groups = self.shape.groups
        if groups is None:  # as it also is where all groups are used
            return ranks
        by_group = ranks.view(len(ranks), groups.num, -1)
        ranked = by_group.topk(groups.num_ranked, dim=-1).values.sum(-1)
        best = ranked.topk(groups.num_used, dim=-1).indices
        is_open = torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, best, True)
        return by_group.masked_fill(~is_open[..., None], -torch.inf).view_as(ranks)

    def mixed(self, x: Tensor, chosen: Tensor, scales: Tensor, weights: LayerWeights) -> Tensor:
        """The sum [T, hidden] of the outputs of each row's experts times their scales, by ascending numbers."""
        experts = ChosenExperts(x, chosen, self.shape, self.config.activation, self.steps)
        experts.compute(weights)
        return weights.backend.mix(experts.outputs, scales)
