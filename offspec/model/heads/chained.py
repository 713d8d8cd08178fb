"""Heads that see the last place of the text alone, and then their own path: no attention, no KV cache.

Medusa (2401.10774) predicts each of the next tokens from the same final state, whatever the tokens between are. Hydra
(2402.05109) also reads the embeddings of the path's tokens. MLP speculators (2404.19124) carry a state from token to
token, with weights for each step. A recurrent head has one cell for all steps (ReDrafter, 2403.09919).
Names and shapes: FasterDecoding/Medusa (medusa_model.py), zankner/Hydra (prefix_mlp_head.py), vLLM (medusa.py,
mlp_speculator.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.formats import linear
from offspec.loaders.weights import RamWeights
from offspec.scheduler.vocabulary import Vocabulary

from ...errors import CheckpointError
from ..block import PassRows
from ..config import ModelConfig
from ..config_values import Json, positive
from ..decoder import Decoder, IntArray
from .head import Advanced, Head, HeadSpec, Inputs

MOST_STEPS = 64
NEGLIGIBLE = 1e-4  # share of the largest number below which a step's part of the states is taken as zero


class ChainedHead(Head):
    """Base: `step` computes the rows of one depth. The states of different steps' heads lie side by side.

    So logits are linear in the states, although each step may have a head of its own: W_d times part d, the others
    being zero.
    """

    reads_text = False

    def __init__(
        self,
        num_parts: int,
        tensors: Mapping[str, Tensor],
        target: Decoder,
        dtype: torch.dtype | None = None,
        width: int | None = None,
    ) -> None:
        """num_parts: heads of its own, or 1 for one head. width: of a part; None is the target's hidden size."""
        self._tensors, self._num_parts = tensors, num_parts
        config = states_config(target.config, num_parts, width)
        super().__init__(config, RamWeights([], {}), target, Vocabulary(target.config.vocab_size), dtype)

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        """States [R, width] and features [R, F] of rows of one depth."""
        raise NotImplementedError

    def advance(self, inputs: Inputs, rows: PassRows) -> Advanced:
        states, features = list[Tensor](), list[Tensor]()
        order = list[Tensor]()
        for depth, chosen in _by_depth(inputs.depths):
            index = chosen.to(inputs.features.device)
            some, further = self.step(depth, inputs.features[index], inputs.tokens[chosen.numpy()])
            states.append(self._placed(depth, some))
            features.append(further)
            order.append(index)
        back = torch.cat(order).argsort()
        return Advanced(torch.cat(states)[back], torch.cat(features)[back])

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
        found = [
            self._logits_of(step, part, rows)
            for step, (part, rows) in enumerate(zip(parts, is_used, strict=True))
            if rows.any()
        ]
        return torch.stack(found).sum(0) if found else states.new_zeros(len(states), self.target.config.vocab_size)

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


def states_config(target: ModelConfig, num_parts: int, width: int | None = None) -> ModelConfig:
    """The shape of a head without layers, whose states have `num_parts` parts."""
    return replace(target.only_layers([]), hidden_size=num_parts * (width or target.hidden_size))


def _by_depth(depths: IntArray) -> Iterator[tuple[int, Tensor]]:
    given = torch.from_numpy(depths)
    for depth in np.unique(depths).tolist():
        yield depth, torch.nonzero(given == depth)[:, 0]


# ------------------------------------------------------------------------------------------------ Medusa


class MedusaHead(ChainedHead):
    """Residual blocks for each step, on the final state."""

    def __init__(
        self, steps: int, blocks: int, tensors: Mapping[str, Tensor], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(num_heads(tensors), tensors, target, dtype)
        self.num_steps, self._blocks = steps, blocks

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        x = features
        for block in range(self._blocks):
            x = x + F.silu(self._linear(f"blocks.{depth}.{block}", x))
        return x, features


def num_heads(tensors: Mapping[str, object]) -> int:
    """The number of a head's own matrices for logits, at least 1."""
    return max(1, sum(name.startswith("head.") and name.endswith(".weight") for name in tensors))


def medusa_spec(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """present: shapes by `medusa_name`. Raises CheckpointError."""
    steps = _steps(config, "medusa_num_heads", "num_heads")
    blocks = positive(config, "medusa_num_layers" if "medusa_num_layers" in config else "num_hidden_layers", 1)
    hidden, vocab = target.hidden_size, target.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for step in range(steps):
        for block in range(min(blocks, MOST_STEPS)):
            shapes[f"blocks.{step}.{block}.weight"] = (hidden, hidden)
            if f"blocks.{step}.{block}.bias" in present:
                shapes[f"blocks.{step}.{block}.bias"] = (hidden,)
    shared = 1 if config.get("original_lm_head") is True else steps
    own = {f"{head_name(step)}.weight": (vocab, hidden) for step in range(shared)}
    shapes |= own if any(name in present for name in own) else {}
    make = partial(MedusaHead, steps, blocks)
    return HeadSpec("Medusa", states_config(target, num_heads(shapes)), shapes, (), vocab, make)


_MEDUSA = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"blocks.\1.\2.\3"),
    (re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), r"blocks.\1.\2.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"head.\1.weight"),
    (re.compile(r"lm_heads\.(\d+)\.weight"), r"head.\1.weight"),
    (re.compile(r"lm_head\.weight"), r"head.0.weight"),
)


def medusa_name(name: str) -> str | None:
    """`MedusaHead`'s name of a tensor in a file of FasterDecoding or vLLM."""
    return _renamed(re.sub(r"^medusa_heads?\.", "", name), _MEDUSA)


def _renamed(name: str, rules: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, new in rules:
        if (match := pattern.fullmatch(name)) is not None:
            return match.expand(new)
    return name


def _steps(config: Json, *keys: str) -> int:
    """How many tokens ahead a head predicts. Raises CheckpointError."""
    steps = positive(config, next((key for key in keys if key in config), keys[0]))
    if steps > MOST_STEPS:
        raise CheckpointError(f"config.json: a head of {steps} steps, and at most {MOST_STEPS} are supported")
    return steps


# ------------------------------------------------------------------------------------------------ Hydra


class HydraHead(ChainedHead):
    """For each step an MLP over the final state and the embeddings of the path's tokens."""

    def __init__(
        self, steps: int, blocks: int, tensors: Mapping[str, Tensor], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(num_heads(tensors), tensors, target, dtype)
        self.num_steps, self._blocks = steps, blocks

    def fused(self, states: Tensor) -> Tensor:
        """The final states, with room for the embeddings of a path: [K, (1 + steps) * hidden]."""
        assert self.num_steps is not None
        return F.pad(states.to(self.dtype), (0, self.num_steps * states.shape[-1]))

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        hidden = self.target.config.hidden_size
        known, end = features[:, : (1 + depth) * hidden], (2 + depth) * hidden
        x = torch.cat((known, self.embedded(tokens)), dim=-1)
        features = torch.cat((x, features[:, end:]), dim=-1)
        x = self._linear(f"residual.{depth}", x) + F.silu(self._linear(f"blocks.{depth}.0", x))
        for block in range(1, self._blocks):
            x = x + F.silu(self._linear(f"blocks.{depth}.{block}", x))
        return x, features


def hydra_spec(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """present: shapes by `hydra_name`. Raises CheckpointError."""
    if config.get("grounded_heads", True) is not True:
        raise CheckpointError("config.json: grounded_heads false is not supported; use a Medusa head")
    steps, blocks = _steps(config, "hydra_num_heads"), positive(config, "hydra_num_layers", 1)
    hidden, vocab = target.hidden_size, target.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for step in range(steps):
        for name, width in (("residual", 2 + step), ("blocks", 2 + step)):
            short = f"{name}.{step}" if name == "residual" else f"{name}.{step}.0"
            shapes |= {f"{short}.weight": (hidden, width * hidden), f"{short}.bias": (hidden,)}
        for block in range(1, min(blocks, MOST_STEPS)):
            shapes |= {f"blocks.{step}.{block}.weight": (hidden, hidden), f"blocks.{step}.{block}.bias": (hidden,)}
        for part, shape in (("weight", (vocab, hidden)), ("bias", (vocab,))):
            shapes |= {f"{head_name(step)}.{part}": shape} if f"{head_name(step)}.{part}" in present else {}
    make = partial(HydraHead, steps, blocks)
    return HeadSpec("Hydra", states_config(target, num_heads(shapes)), shapes, (), vocab, make)


def hydra_name(name: str) -> str | None:
    """`HydraHead`'s name of a tensor of zankner/Hydra, where dropouts count as layers: 1, 3, ... are blocks."""
    name = name.removeprefix("hydra_head.")
    if (match := re.fullmatch(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)", name)) is not None:
        step, layer, part, kind = match.groups()
        return f"residual.{step}.{kind}" if part != "linear" else f"blocks.{step}.{int(layer) // 2}.{kind}"
    return _renamed(name, ((re.compile(r"hydra_lm_head\.(\d+)\.1\.(weight|bias)"), r"head.\1.\2"),))


# ------------------------------------------------------------------------------------------------ MLP speculators


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
        self.num_steps, self._scales, self._inner = steps, scales, inner
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
        embedded = table[torch.from_numpy(tokens).to(table.device)].to(self.dtype)
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
    steps = _steps(config, "n_predict")
    emb, vocab = target.hidden_size, target.vocab_size
    inner = config.get("inner_dim") or emb
    inner = positive({"inner_dim": inner}, "inner_dim")
    ties = config.get("tie_weights") is True
    shapes: dict[str, tuple[int, ...]] = {}
    for step in range(steps):
        own: dict[str, tuple[int, ...]] = {
            f"emb.{step}.weight": (vocab, inner),
            f"{head_name(step)}.weight": (vocab, inner),
        }
        own |= {f"proj.{step}.weight": (inner, inner if step else emb)}
        own |= {f"ln.{step}.{part}": (inner,) for part in ("weight", "bias")}
        first = 2 if ties else steps
        is_needed = {name: step == 0 or not ties or (name.startswith("proj") and step < first) for name in own}
        shapes |= {name: shape for name, shape in own.items() if is_needed[name] or name in present}
    make = partial(MlpHead, steps, config.get("scale_input") is True)
    return HeadSpec("MLP speculator", states_config(target, num_heads(shapes), inner), shapes, (), vocab, make)


def mlp_name(name: str) -> str | None:
    """`MlpHead`'s name of a tensor of ibm-fms's files."""
    return name.removeprefix("speculator.")


# ------------------------------------------------------------------------------------------------ recurrent


class RecurrentHead(ChainedHead):
    """One cell for all steps, over the final state, which stays in view; the target's own head."""

    def __init__(self, tensors: Mapping[str, Tensor], target: Decoder, dtype: torch.dtype | None = None) -> None:
        super().__init__(1, tensors, target, dtype)

    def fused(self, states: Tensor) -> Tensor:
        """[K, 2 * hidden]: the final states, then the cell's first states, which are zero."""
        return F.pad(states.to(self.dtype), (0, states.shape[-1]))

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        final, cell = features.chunk(2, dim=-1)
        cell = F.silu(self._linear("cell", torch.cat((cell, self.embedded(tokens)), dim=-1)))
        joined = torch.cat((final, cell), dim=-1)
        x = final + self._linear("down", F.silu(self._linear("up", joined)))
        return x, joined


def recurrent_spec(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """present: shapes by name. Raises CheckpointError."""
    hidden, inner = target.hidden_size, positive(config, "intermediate_size")
    shapes: dict[str, tuple[int, ...]] = {"cell.weight": (hidden, 2 * hidden), "cell.bias": (hidden,)}
    shapes |= {"up.weight": (inner, 2 * hidden), "down.weight": (hidden, inner)}
    return HeadSpec("recurrent", states_config(target, 1), shapes, (), target.vocab_size, RecurrentHead)
