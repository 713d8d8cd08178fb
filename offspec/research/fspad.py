"""FSPAD's head (2408.15562): EAGLE-1's, with a richer input and two outputs.

Feature sampling: an MLP that the token's embedding gates changes the joined input, so that it tells which token was
chosen. Partial alignment: the layer ends in two halves, a state for logits and a feature for the children; only the
feature is trained to be the target's. Names and shapes: Luc4Gui/FSPAD (cnets_fspad.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from offspec.backends.choice import linear

from ..checkpoints.head_files import Layout
from ..model.config import ModelConfig
from ..model.config_values import Json
from ..model.heads.chained import renamed
from ..model.heads.eagle import WITHOUT_INPUT_NORM, EagleHead, eagle_name, eagle_shape, eagle_shapes
from ..model.heads.head import LAYERS, Advanced, HeadSpec, Inputs
from ..model.parts.attention import Attention
from ..model.parts.mlp import ACTIVATIONS, Mlp
from ..model.parts.part import LayerWeights, Part, PassRows
from ..model.rope import RotaryEmbeddings

SAMPLING = "sampling."
_RULES = (
    (re.compile(r"fc\.fc\.(weight|bias)"), r"fc.\1"),
    (re.compile(r"fc\.mlp\.(gate|up|down)_proj\.weight"), rf"{SAMPLING}\1.weight"),
    (re.compile(r"fc\.post_attention_layernorm\.weight"), rf"{SAMPLING}norm.weight"),
)


class SplitMlp(Mlp):
    """An MLP whose output is added to its input twice, side by side."""

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        rows, columns = super().matrices[self.config.mlp.down]
        return {**super().matrices, self.config.mlp.down: (2 * rows, columns)}

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """x [T, hidden]; returns [T, 2 * hidden]."""
        output = self.output(self.norm(x, weights, self.config.norms.before_mlp), weights)
        return torch.cat((x, x), dim=-1) + output


class FspadHead(EagleHead):
    """An EAGLE-1 head of one layer with FSPAD's input and outputs."""

    def _first_parts(self, rotaries: RotaryEmbeddings) -> Sequence[Part]:
        config = replace(self.config, norms=WITHOUT_INPUT_NORM)
        return [Attention(config, 0, rotaries), SplitMlp(config, 0)]

    def advance(self, inputs: Inputs, rows: PassRows) -> Advanced:
        return Advanced(*super().advance(inputs, rows).states.chunk(2, dim=-1))

    def _fc(self, x: Tensor) -> Tensor:
        """x [T, 2 * hidden]: embeddings, then features; returns [T, hidden]."""
        embedded, x = x.chunk(2, dim=-1)[0], super()._fc(x).to(self.dtype)
        gate, up, down = (self.tensors[f"{SAMPLING}{name}.weight"] for name in ("gate", "up", "down"))
        inner = ACTIVATIONS[self.config.activation](linear(embedded, gate))
        return x + linear(inner * linear(self.normed_by(f"{SAMPLING}norm.weight", x), up), down)


def fspad_spec(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """present: the shapes of the file's tensors, by `fspad_name`. Raises UnsupportedModelError, CheckpointError."""
    shape = eagle_shape(1, {**config, "num_hidden_layers": 1}, present, target)
    c = shape.config
    shapes = eagle_shapes(shape, present, target)
    shapes[f"{LAYERS}0.mlp.down_proj.weight"] = (2 * c.hidden_size, c.intermediate_size)
    shapes |= {f"{SAMPLING}{name}.weight": (c.intermediate_size, c.hidden_size) for name in ("gate", "up")}
    shapes[f"{SAMPLING}down.weight"] = (c.hidden_size, c.intermediate_size)
    shapes[f"{SAMPLING}norm.weight"] = (c.hidden_size,)
    return HeadSpec("FSPAD", c, shapes, (), c.vocab_size, partial(FspadHead, shape))


def fspad_name(name: str) -> str | None:
    """`FspadHead`'s name of a tensor in a file; None for one that says nothing more."""
    plain = eagle_name(name)
    return None if plain is None else renamed(plain, _RULES)


FSPAD = Layout(fspad_name, fspad_spec)
