"""Grouped-query attention with RoPE, as a part of a layer.

A family's differences are fields of `ModelConfig`, each read in one place here: biases in `has_bias`, fused matrices in
`matrices` and `projected`, QK norm in `qk_normed`, scores in the rows' `attend`, the places of norms in `forward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from ..memory.kv_cache import KVLayout
from ..rope import RotaryEmbeddings, rotate
from .part import LayerWeights, NativePart, PassRows, Projected, Shape


class Attention(NativePart):
    """Attention of layer `layer`: norm, projections, KV entries, and a residual."""

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        self.window = config.windows[layer]  # the number of positions a row attends to, itself included; None is all
        self.memory = KVLayout(config.num_kv_heads, config.head_dim)
        self.places = config.norms_of(layer)
        rope = config.rope_of(layer)
        self.rotary = None if rope is None or rotaries is None else rotaries.of(rope)

    @property
    def norms(self) -> list[str]:
        return [name for name in (self.places.before_attention, self.places.after_attention) if name is not None]

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        c = self.config
        q, kv, hidden = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size
        if c.has_attention_gate:
            shapes = {f"{c.attention}.{name}_proj": (n, hidden) for name, n in (("q", 2 * q), ("k", kv), ("v", kv))}
        elif c.has_fused_qkv:
            shapes = {f"{c.attention}.qkv_proj": (q + 2 * kv, hidden)}
        else:
            shapes = {f"{c.attention}.{name}_proj": (rows, hidden) for name, rows in (("q", q), ("k", kv), ("v", kv))}
        return {**shapes, c.attention_output: (hidden, q)}

    @property
    def row_numbers(self) -> int:
        return 6 * self.config.num_heads * self.config.head_dim

    def has_bias(self, matrix: str) -> bool:
        return self.config.o_bias if matrix == self.config.attention_output else self.config.qkv_bias

    @property
    def shapes(self) -> dict[str, Shape]:
        c, form, shapes = self.config, self.config.qk_norm_form, super().shapes
        if c.qk_norm:
            for name, heads in ((form.queries, c.num_heads), (form.keys, c.num_kv_heads)):
                forms = {
                    "head": (c.head_dim,),
                    "own head": (heads, c.head_dim),
                    "projection": (heads * c.head_dim,),
                }
                shapes[f"{name}.weight"] = forms[form.over]
        return shapes

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        attended = self.attended(self.norm(x, weights, self.places.before_attention), weights, rows, first, last)
        return self.added(x, self.norm(attended, weights, self.places.after_attention))

    def attended(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """Attention of rows first .. last: normed states x [T, hidden] → [T, hidden]."""
        c = self.config
        queries, keys, values = self.projected(x, weights)
        gate = None
        if c.has_attention_gate:
            queries, gate = queries.chunk(2, dim=-1)
        if not c.qk_norm_form.is_after_rope:
            queries, keys = self.qk_normed(queries, keys, weights)
        if self.rotary is not None:
            cos, sin = (each[first:last] for each in rows.rotations.of(self.rotary))
            queries = rotate(queries, cos, sin, is_interleaved=c.has_interleaved_rope)
            keys = rotate(keys, cos, sin, is_interleaved=c.has_interleaved_rope)
        if c.qk_norm_form.is_after_rope:
            queries, keys = self.qk_normed(queries, keys, weights)
        if c.query_growth is not None:
            queries = queries * rows.rotations.growth(*c.query_growth)[first:last].to(queries.dtype)
        out = rows.attend(self, (queries, keys, values), first, last)
        if gate is not None:
            out = out * gate.sigmoid()
        return weights.linear(c.attention_output, out.flatten(1))

    def projected(self, x: Tensor, weights: LayerWeights) -> Projected:
        """Queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim] of normed states x [T, hidden].

        With a gate, a head's queries are followed by it.
        """
        c = self.config
        if c.has_fused_qkv:
            sizes = [heads * c.head_dim for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
            queries, keys, values = torch.split(weights.linear(f"{c.attention}.qkv_proj", x), sizes, dim=-1)
        else:
            queries, keys, values = (weights.linear(f"{c.attention}.{name}_proj", x) for name in "qkv")
        return (
            queries.view(len(x), c.num_heads, -1),
            keys.view(-1, c.num_kv_heads, c.head_dim),
            values.view(-1, c.num_kv_heads, c.head_dim),
        )

    def qk_normed(self, queries: Tensor, keys: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, heads, head_dim], normed if the family has a QK norm."""
        if not self.config.qk_norm:
            return queries, keys
        form = self.config.qk_norm_form
        if form.over != "projection":
            return self.norm(queries, weights, form.queries), self.norm(keys, weights, form.keys)
        return (
            self.norm(queries.flatten(1), weights, form.queries).view(queries.shape),
            self.norm(keys.flatten(1), weights, form.keys).view(keys.shape),
        )
