"""MLP speculators (2404.19124): a state that each step renews from the token, with weights of its own.

Names and shapes: ibm-fms, vLLM (mlp_speculator.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.backends.choice import linear
from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.trees.token_tree import IntArray

from ..config import ModelConfig
from ..config_values import Json, positive
from ..decoder import Decoder
from .chained import ChainedHead, head_name, num_heads, num_steps, states_config
from .head import HeadSpec


class MlpHead(ChainedHead):
    """A state that each step renews from the token's embedding, with a matrix, an embedding and a norm of its own."""

    def __init__(
        self,
        steps: int,
        scales: bool,
        tensors: Mapping[str, Tensor],
        target: Decoder,
        dtype: torch.dtype | None = None,
    ) -> None:
        """scales: the first state is normed."""
        inner = len(tensors["ln.0.weight"])
        super().__init__(num_heads(tensors), tensors, target, dtype, inner)
        self.num_steps = steps
        self._scales = scales
        self._inner = inner
        self._state = 0.5 ** (0.5 / steps)
        self._added = math.sqrt((1 - self._state**2) * (inner / 2)) / self._state

    def fused(self, states: Tensor) -> Tensor:
        states = states.to(self.dtype)
        if self._scales:
            states = _l2_normed(states) / math.sqrt(2)
        return F.pad(states, (0, max(0, self._inner - states.shape[-1])))

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        embedding, projection, norm = (self._of(name, depth) for name in ("emb", "proj", "ln"))
        table = self._tensors[f"{embedding}.weight"]
        embedded = table[to_device(torch.from_numpy(tokens), table.device)].to(self.dtype)
        matrix = self._tensors[f"{projection}.weight"]
        x = linear(features[:, : matrix.shape[1]], matrix) + self._added * embedded
        x = _l2_normed(x) * self._tensors[f"{norm}.weight"] + self._tensors[f"{norm}.bias"]
        x = F.gelu(x)
        return x, F.pad(x, (0, features.shape[1] - x.shape[1]))

    def _of(self, name: str, depth: int) -> str:
        """The name of a step's tensor; with tied weights, the last one there is."""
        while depth and f"{name}.{depth}.weight" not in self._tensors:
            depth -= 1
        return f"{name}.{depth}"


def _l2_normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def mlp_spec(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """present: shapes by `mlp_name`. Raises CheckpointError."""
    steps = num_steps(config, "n_predict")
    emb, vocab = target.hidden_size, target.vocab_size
    inner = config.get("inner_dim") or emb
    inner = positive({"inner_dim": inner}, "inner_dim")
    ties = config.get("tie_weights") is True
    shapes: dict[str, tuple[int, ...]] = {}
    for step in range(steps):
        step_shapes: dict[str, tuple[int, ...]] = {
            f"emb.{step}.weight": (vocab, inner),
            f"{head_name(step)}.weight": (vocab, inner),
        }
        step_shapes |= {f"proj.{step}.weight": (inner, inner if step else emb)}
        step_shapes |= {f"ln.{step}.{part}": (inner,) for part in ("weight", "bias")}
        first = 2 if ties else steps
        is_needed = {name: step == 0 or not ties or (name.startswith("proj") and step < first) for name in step_shapes}
        shapes |= {name: shape for name, shape in step_shapes.items() if is_needed[name] or name in present}
    make = partial(MlpHead, steps, config.get("scale_input") is True)
    return HeadSpec("MLP speculator", states_config(target, num_heads(shapes), inner), shapes, (), vocab, make)


def mlp_name(name: str) -> str | None:
    """`MlpHead`'s name of a tensor of ibm-fms's files."""
    return name.removeprefix("speculator.")
