"""Clover-2's head (2408.00264): a recurrent cell over the path's tokens, behind layers over the text.

The text's last token is joined with the state before the layers over the text, not behind them as in Clover. Each later
step renews the state by the next token, and joins both for its prediction. All steps after the first share their
weights. Names and shapes: XiaoBin1992/clover (clover2.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.trees.token_tree import IntArray

from ..checkpoints.head_files import Layout
from ..model.config import ModelConfig
from ..model.config_values import Json
from ..model.decoder import Decoder
from ..model.heads.chained import TEXT_NORM, ChainedHead, attention_heads, renamed, states_config, text_shapes
from ..model.heads.head import HeadSpec, Inputs
from ..model.parts.part import PassRows

OWN_EMBEDDING, OWN_NORM = "embedding.weight", "norm.weight"
MOST_LAYERS = 64
CELLS = ("before", "cell")  # of the text's last token, and of the path's tokens
_RULES = (
    (re.compile(r"layers\.(.+)"), r"text.\1"),
    (re.compile(r"clover_norm\.weight"), TEXT_NORM),
    (re.compile(r"clover_head_norm\.weight"), OWN_NORM),
    (re.compile(r"clover_embed_tokens\.weight"), OWN_EMBEDDING),
    (re.compile(r"clover_head_mlp_rnn\.(.+)"), r"before.\1"),
    (re.compile(r"clover_head_mlp_rnn2\.(.+)"), r"cell.\1"),
    (re.compile(r"clover_head_mlp\.(.+)"), r"first.\1"),
    (re.compile(r"clover_head_mlp2\.(.+)"), r"later.\1"),
)


class Clover2Head(ChainedHead):
    """States and features are as wide as the target's final state; the target's own head."""

    def __init__(
        self, heads: int, tensors: Mapping[str, Tensor], target: Decoder, dtype: torch.dtype | None = None
    ) -> None:
        """heads: of the cells' attention."""
        super().__init__(1, tensors, target, dtype)
        self._heads = heads

    def embedded(self, tokens: IntArray) -> Tensor:
        if OWN_EMBEDDING not in self._tensors:
            return super().embedded(tokens)
        table = self._tensors[OWN_EMBEDDING]
        return table[to_device(torch.from_numpy(tokens), table.device)].to(self.dtype)

    def of_text(self, inputs: Inputs, rows: PassRows) -> Tensor:
        x = self._renewed("before", inputs.features, self.embedded(inputs.tokens))
        return super().of_text(inputs._replace(features=x), rows)

    def step(self, depth: int, features: Tensor, tokens: IntArray) -> tuple[Tensor, Tensor]:
        if depth == 0:
            return self._norm(self._linear("first", features), OWN_NORM), features
        embedded = self.embedded(tokens)
        features = self._renewed("cell", features, embedded)
        joined = self._linear("later", torch.cat((features, embedded), dim=-1))
        return self._norm(joined, OWN_NORM), features

    def _renewed(self, cell: str, x: Tensor, embedded: Tensor) -> Tensor:
        """States [R, hidden], and the tokens' values, by each attention head's cosine of state and token."""
        queries = self._linear(f"{cell}.q", self._norm(x, f"{cell}.input_layernorm.weight"))
        keys, values = self._linear(f"{cell}.k", embedded), self._linear(f"{cell}.v", embedded)
        queries, keys, values = (part.view(len(x), self._heads, -1) for part in (queries, keys, values))
        shares: Tensor = F.cosine_similarity(queries, keys, dim=-1, eps=self.config.rms_norm_eps)
        return x + (shares[..., None] * values).flatten(1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.backend.rms_norm(x, self._tensors[name], self.config.rms_norm_eps)


def clover2_spec(config: Json, present: Mapping[str, tuple[int, ...]], target: ModelConfig) -> HeadSpec:
    """present: the shapes of the file's tensors, by `clover2_name`. Raises CheckpointError."""
    hidden, heads = target.hidden_size, attention_heads(config, target.hidden_size)
    layers = {int(match[1]) for name in present if (match := re.match(r"text\.(\d+)\.", name))}
    num_layers = min(max(1, len(layers)), MOST_LAYERS)
    shapes = text_shapes(target, num_layers) | {TEXT_NORM: (hidden,), OWN_NORM: (hidden,)}
    matrices = {f"{cell}.{name}": hidden for cell in CELLS for name in "qkv"}
    for name, width in (matrices | {"first": hidden, "later": 2 * hidden}).items():
        shapes |= {f"{name}.weight": (hidden, width), f"{name}.bias": (hidden,)}
    shapes |= {f"{cell}.input_layernorm.weight": (hidden,) for cell in CELLS}
    if OWN_EMBEDDING in present:
        shapes[OWN_EMBEDDING] = (target.vocab_size, hidden)
    states = states_config(target, 1, None, num_layers)
    return HeadSpec("Clover-2", states, shapes, (), target.vocab_size, partial(Clover2Head, heads))


def clover2_name(name: str) -> str | None:
    """`Clover2Head`'s name of a tensor in a file; None for the copy of the target's head."""
    return None if name == "lm_head.weight" else renamed(name, _RULES)


CLOVER2 = Layout(clover2_name, clover2_spec)
