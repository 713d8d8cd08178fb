"""Multi-head latent attention as a part of a layer (DeepSeek-V2, 2405.04434, section 2.1).

All heads' keys and values of a token are made of one small latent, beside one rotated key that all heads share. The KV
cache holds these two. Each head's own key matrix is multiplied into its queries, and its value matrix into its results,
instead of making keys and values of each token. So all heads attend to one head of entries, which are keys, and whose
first numbers are the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from ..memory.kv_cache import KVLayout
from ..norms import normalize
from ..rope import RotaryEmbeddings, rotate
from .attention import Attention
from .part import LayerWeights, PassRows, Shape


class LatentAttention(Attention):
    """The latent attention of layer `layer`: norm, projections, KV entries, and a residual."""

    def __init__(self, config: ModelConfig, layer: int, rotaries: RotaryEmbeddings | None = None) -> None:
        super().__init__(config, layer, rotaries)
        assert config.latent is not None
        self.latent = config.latent
        self.memory = KVLayout(1, config.latent.entry_size, has_values=False)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        c, latent = self.config, self.latent
        queries = c.num_heads * (latent.key_size + latent.rope_size)
        made = {f"{c.attention}.q_proj": (queries, c.hidden_size)}
        if latent.query_rank is not None:
            made = {
                f"{c.attention}.q_a_proj": (latent.query_rank, c.hidden_size),
                f"{c.attention}.q_b_proj": (queries, latent.query_rank),
            }
        return {
            **made,
            f"{c.attention}.kv_a_proj_with_mqa": (latent.entry_size, c.hidden_size),
            **self._made,
            c.attention_output: (c.hidden_size, c.num_heads * latent.value_size),
        }

    @property
    def _made(self) -> dict[str, tuple[int, int]]:
        """Matrices that make heads' keys and values of a latent."""
        c, latent = self.config, self.latent
        if latent.is_split:
            return {
                f"{c.attention}.k_b_proj": (c.num_heads * latent.rank, latent.key_size),
                f"{c.attention}.v_b_proj": (c.num_heads * latent.value_size, latent.rank),
            }
        return {f"{c.attention}.kv_b_proj": (c.num_heads * (latent.key_size + latent.value_size), latent.rank)}

    @property
    def row_numbers(self) -> int:
        return 8 * self.config.num_heads * self.latent.entry_size

    def has_bias(self, matrix: str) -> bool:
        return super().has_bias(matrix) and not matrix.endswith((".q_proj", "_b_proj"))

    @property
    def shapes(self) -> dict[str, Shape]:
        prefix, latent = self.config.attention, self.latent
        norms: dict[str, Shape] = {f"{prefix}.kv_a_layernorm.weight": (latent.rank,)}
        if latent.query_rank is not None:
            norms[f"{prefix}.q_a_layernorm.weight"] = (latent.query_rank,)
        return {**super().shapes, **norms}

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        attended = self.attended(self.norm(x, weights, self.places.before_attention), weights, rows, first, last)
        return self.added(x, self.norm(attended, weights, self.places.after_attention))

    def attended(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        c, latent = self.config, self.latent
        queries, rotated = torch.split(self.queries(x, weights), [latent.key_size, latent.rope_size], -1)
        made = weights.linear(f"{c.attention}.kv_a_proj_with_mqa", x)[:, None]
        compressed, key = torch.split(made, [latent.rank, latent.rope_size], -1)
        rotated, key = (self.rotated(heads, rows, first, last) for heads in (rotated, key))
        entries = torch.cat((self._normed(compressed, "kv_a_layernorm", weights), key), -1)
        of_keys, of_values = self._by_heads(weights, x.dtype)
        absorbed = torch.cat((weights.backend.by_head(queries, of_keys), rotated), -1)
        if c.query_growth is not None:
            absorbed = absorbed * rows.rotations.growth(*c.query_growth)[first:last].to(absorbed.dtype)
        mixed = rows.attend(self, absorbed, (entries, entries), first, last)
        if of_values is None:
            of_values = weights.matrix(f"{c.attention}.v_b_proj", x.dtype).view(c.num_heads, -1, latent.rank)
        values = weights.backend.by_head(mixed[..., : latent.rank], of_values)
        return weights.linear(c.attention_output, values.flatten(1))

    def _by_heads(self, weights: LayerWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Matrices [heads, rank, key_size] of keys and [heads, value_size, rank] of values; None: read them afterwards,
        because they take the same scratch memory.
        """
        c, latent = self.config, self.latent
        if latent.is_split:
            return weights.matrix(f"{c.attention}.k_b_proj", dtype).view(c.num_heads, latent.rank, -1), None
        both = weights.matrix(f"{c.attention}.kv_b_proj", dtype).view(c.num_heads, -1, latent.rank)
        of_keys, of_values = torch.split(both, [latent.key_size, latent.value_size], 1)
        return of_keys.transpose(1, 2), of_values

    def queries(self, x: Tensor, weights: LayerWeights) -> Tensor:
        """Queries [T, heads, key_size + rope_size] of normed states x [T, hidden], not rotated yet."""
        prefix = self.config.attention
        if self.latent.query_rank is None:
            queries = weights.linear(f"{prefix}.q_proj", x)
        else:
            compressed = self._normed(weights.linear(f"{prefix}.q_a_proj", x), "q_a_layernorm", weights)
            queries = weights.linear(f"{prefix}.q_b_proj", compressed)
        return queries.view(len(x), self.config.num_heads, -1)

    def rotated(self, heads: Tensor, rows: PassRows, first: int, last: int) -> Tensor:
        """Heads [T, heads, rope_size] of rows first .. last, with RoPE."""
        assert self.rotary is not None
        cos, sin = (each[first:last] for each in rows.rotations.of(self.rotary))
        return rotate(heads, cos, sin, is_interleaved=self.config.has_interleaved_rope)

    def _normed(self, compressed: Tensor, name: str, weights: LayerWeights) -> Tensor:
        weight = weights.vector(f"{self.config.attention}.{name}.weight")
        return normalize(compressed.contiguous(), weight, None, "rms", self.latent.norm_eps, weights.backend)
