"""Grouped-query attention with RoPE, as a part of a layer.

A family's differences are fields of `ModelConfig`, each read in one place here: biases in `has_bias`, fused matrices in
`matrices` and `projected`, norms of heads in `placed` and `entries`, scores in the rows' `attend`, the places of norms
in `forward`. Layers' shapes are `ModelConfig.shape_of`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig
from ..memory.kv_cache import KVLayout
from ..rope import RotaryEmbeddings, Rotations, rotate
from .part import Entries, LayerWeights, NativePart, PassRows, Shape


class Attention(NativePart):
    """Attention of layer `layer`: norm, projections, KV entries, and a residual."""

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        self.window = config.windows[layer]  # the number of positions a row attends to, itself included; None is all
        self.places = config.norms_of(layer)
        self.shape = shape = config.shape_of(layer)
        self.entries_of = layer if shape.entries_of is None else shape.entries_of
        if self.has_entries:
            # A layer that others attend to keeps all entries: they do so after the last rows of a pass.
            is_read_later = any(other.entries_of == layer for other in config.shapes)
            self.memory = KVLayout(shape.num_kv_heads, shape.head_dim, window=None if is_read_later else self.window)
        rope = config.rope_of(layer)
        self.rotary = None if rope is None or rotaries is None else rotaries.of(rope, config.rotary_dim_of(layer))

    @property
    def has_entries(self) -> bool:
        """Whether it makes KV entries, and does not attend to another layer's."""
        return self.shape.entries_of is None

    @property
    def norms(self) -> list[str]:
        return self.places.of_attention

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        c, shape = self.config, self.shape
        q, kv, hidden = c.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, c.hidden_size
        if c.has_fused_qkv:
            rows = {"qkv": q + 2 * kv}
        else:
            rows = {"q": 2 * q if c.has_attention_gate else q} | dict.fromkeys(self._entry_projections, kv)
        return {
            **{f"{c.attention}.{name}_proj": (n, hidden) for name, n in rows.items()},
            c.attention_output: (hidden, q),
        }

    @property
    def _entry_projections(self) -> str:
        if not self.has_entries:
            return ""
        return "k" if self.shape.are_values_keys else "kv"

    @property
    def row_numbers(self) -> int:
        return 6 * self.config.num_heads * self.shape.head_dim

    def has_bias(self, matrix: str) -> bool:
        return self.config.o_bias if matrix == self.config.attention_output else self.config.qkv_bias

    @property
    def shapes(self) -> dict[str, Shape]:
        form, shapes, head_dim = self.config.qk_norm_form, super().shapes, self.shape.head_dim
        normed = {form.queries: self.config.num_heads}
        if self.has_entries:
            normed[form.keys] = self.shape.num_kv_heads
        for name, heads in normed.items() if self.config.qk_norm else ():
            forms = {"head": (head_dim,), "own head": (heads, head_dim), "projection": (heads * head_dim,)}
            shapes[f"{name}.weight"] = forms[form.over]
        if self.config.has_sinks:
            shapes[f"{self.config.attention}.sinks"] = (self.config.num_heads,)
        return shapes

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        inputs = (x, *self.turns(rows.rotations, first, last))
        made = self.steps.run(
            weights.backend, "before attention", partial(self._before, weights), inputs, weights.tensors
        )
        attended = self._attend(made, weights, rows, first, last)
        (output,) = self.steps.run(
            weights.backend, "after attention", partial(self._after, weights), (x, *attended), weights.tensors
        )
        return output

    def _before(self, weights: LayerWeights, x: Tensor, *turns: Tensor) -> list[Tensor]:
        return self.prepared(self.norm(x, weights, self.places.before_attention), weights, turns)

    def _after(self, weights: LayerWeights, x: Tensor, *attended: Tensor) -> tuple[Tensor]:
        return (self.added(x, self.norm(self.output(attended, weights), weights, self.places.after_attention)),)

    def attended(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """Attention of rows first .. last: normed states x [T, hidden] → [T, hidden]."""
        made = self.prepared(x, weights, self.turns(rows.rotations, first, last))
        return self.output(self._attend(made, weights, rows, first, last), weights)

    def prepared(self, x: Tensor, weights: LayerWeights, turns: Sequence[Tensor]) -> list[Tensor]:
        """What rows attend with, of normed states x [T, hidden]: queries, KV entries unless they are another layer's,
        and the gate if there is one. turns: see `turns`.
        """
        c = self.config
        projected = self.projected(x, weights)
        queries, gates = projected[0], list[Tensor]()
        if c.has_attention_gate:
            queries, *gates = queries.chunk(2, dim=-1)
        queries = self.placed(queries, c.qk_norm_form.queries, weights, turns)
        entries = self.entries(projected[1:], weights, turns) if self.has_entries else ()
        return [queries, *entries, *gates]

    def _attend(
        self, made: Sequence[Tensor], weights: LayerWeights, rows: PassRows, first: int, last: int
    ) -> Sequence[Tensor]:
        """Attention [T, heads, head_dim] with what is `prepared`, and the gate."""
        c, queries = self.config, made[0]
        entries = (made[1], made[2]) if self.has_entries else None
        if c.query_growth is not None:
            queries = queries * rows.rotations.growth(*c.query_growth)[first:last].to(queries.dtype)
        sinks = weights.vector(f"{c.attention}.sinks") if c.has_sinks else None
        return rows.attend(self, queries, entries, first, last, sinks), *(made[-1:] if c.has_attention_gate else ())

    def output(self, attended: Sequence[Tensor], weights: LayerWeights) -> Tensor:
        """The output [T, hidden] of attention, before its norm and residual. attended: what `_attend` gives."""
        out, *gates = attended
        for gate in gates:
            out = out * gate.sigmoid()
        return weights.linear(self.config.attention_output, out.flatten(1))

    def turns(self, rotations: Rotations, first: int, last: int) -> tuple[Tensor, ...]:
        """cos and sin [T, 1, rotary_dim] of rows first .. last; nothing without rotations."""
        return () if self.rotary is None else tuple(each[first:last] for each in rotations.of(self.rotary))

    def projected(self, x: Tensor, weights: LayerWeights) -> list[Tensor]:
        """Queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim] of normed states x [T, hidden].

        With a gate, a head's queries are followed by it. Keys are missing without KV entries, values if they are keys.
        """
        c, shape = self.config, self.shape
        if c.has_fused_qkv:
            sizes = [heads * shape.head_dim for heads in (c.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
            queries, *entries = torch.split(weights.linear(f"{c.attention}.qkv_proj", x), sizes, dim=-1)
        else:
            names = [f"{c.attention}.{name}_proj" for name in ("q", *self._entry_projections)]
            queries, *entries = weights.linears(names, x)
        by_head = (len(x), shape.num_kv_heads, shape.head_dim)
        return [queries.view(len(x), c.num_heads, -1), *(each.view(by_head) for each in entries)]

    def entries(self, projected: Sequence[Tensor], weights: LayerWeights, turns: Sequence[Tensor]) -> Entries:
        """The KV entries of rows. projected: their keys, and values unless they are keys. turns: see `turns`."""
        keys, values = projected[0], projected[-1]
        if self.config.has_value_norm:
            values = F.rms_norm(values, values.shape[-1:], None, self.config.rms_norm_eps)
        return self.placed(keys, self.config.qk_norm_form.keys, weights, turns), values

    def placed(self, heads: Tensor, norm: str, weights: LayerWeights, turns: Sequence[Tensor]) -> Tensor:
        """Queries or keys [T, heads, head_dim], rotated, and normed if the family norms them. turns: see `turns`."""
        c = self.config
        if c.qk_norm and not c.qk_norm_form.is_after_rope:
            heads = self._heads_normed(heads, norm, weights)
        if turns:
            cos, sin = turns
            heads = rotate(heads, cos, sin, is_interleaved=c.has_interleaved_rope)
        if c.qk_norm and c.qk_norm_form.is_after_rope:
            heads = self._heads_normed(heads, norm, weights)
        return heads

    def _heads_normed(self, heads: Tensor, norm: str, weights: LayerWeights) -> Tensor:
        if self.config.qk_norm_form.over != "projection":
            return self.norm(heads, weights, norm)
        return self.norm(heads.flatten(1), weights, norm).view(heads.shape)
