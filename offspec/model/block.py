"""One layer of a decoder: its weights' shapes, what it computes, its kind of attention, what it puts in a KV cache.

The layout is Llama's: RMSNorm, attention with RoPE, RMSNorm, a gated MLP. What a family changes of it are fields of
`ModelConfig`, each read in one place here: biases in `layer_shapes` (a bias that is there is added), QK norm and the
window in `Block.attention`, the activation in `Block.mlp`, where norms stand in `Block.forward`.
Knows nothing of where weights or KV entries lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.formats import Weight, linear

from .attention import attend
from .config import ModelConfig
from .foreign_config import ForeignConfig
from .kv_cache import KVLayout
from .rope import RotaryEmbedding, Rotations, rotate


class PassRows(Protocol):
    """The rows of one pass: where they stand, which of them go through a layer together, and whom they see.

    rotations: of the T rows' positions. chunks: (first, last) row ranges.
    """

    @property
    def rotations(self) -> Rotations: ...

    @property
    def chunks(self) -> list[tuple[int, int]]: ...

    def mask(self, first: int, last: int, window: int | None) -> Tensor | None:
        """Bool [last - first, S]: which keys rows first .. last see; None when they see all of them."""

    def exchange(self, layer: int, keys: Tensor, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Store what rows first .. last have ([T, kv_heads, head_dim]).

        Returns the keys and values that they may look at, [kv_heads, S, head_dim] each.
        """


class LayerWeights:
    """One layer's weights by their short names, and how `Block` uses them."""

    def __init__(self, tensors: Mapping[str, Weight], scratch: Tensor | None = None) -> None:
        """scratch: where a matrix that lies in another format may be made, see `formats.linear`."""
        self.tensors, self.scratch = tensors, scratch

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x [T, K] times `name.weight` [N, K], plus `name.bias` [N] if there is one → [T, N]. Keeps gradients."""
        bias = self.vector(f"{name}.bias") if f"{name}.bias" in self.tensors else None
        return linear(x, self.tensors[f"{name}.weight"], bias, self.scratch)

    def vector(self, name: str) -> Tensor:
        """A norm's weight or a bias, which are plain tensors in every format."""
        return as_vector(self.tensors[name])


class Block:
    """Layer `index` of a decoder of the shape `config`. Holds no weights; every method keeps gradients."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding) -> None:
        """rotary: one object for all layers that rotate alike, so that a pass computes its angles once."""
        self.config, self.index, self.rotary = config, index, rotary
        self.window = config.windows[index]  # how many positions back a row sees, itself included; None is all
        self.kv = kv_layouts(config)[index]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Short name → shape of every tensor that the layer has."""
        return layer_shapes(self.config)

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """The layer over rows first .. last of a pass: hidden states x [T, hidden] → [T, hidden], a new tensor."""
        x = x + self.attention(self.norm(x, weights.vector("input_layernorm.weight")), weights, rows, first, last)
        return x + self.mlp(self.norm(x, weights.vector("post_attention_layernorm.weight")), weights)

    def attention(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """Grouped-query attention of rows first .. last: normed states x [T, hidden] → [T, hidden]."""
        c = self.config
        cos, sin = rows.rotations.of(self.rotary)
        cos, sin = cos[first:last], sin[first:last]
        queries = weights.linear("self_attn.q_proj", x).view(-1, c.num_heads, c.head_dim)
        keys = weights.linear("self_attn.k_proj", x).view(-1, c.num_kv_heads, c.head_dim)
        values = weights.linear("self_attn.v_proj", x).view(-1, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            queries = self.norm(queries, weights.vector("self_attn.q_norm.weight"))
            keys = self.norm(keys, weights.vector("self_attn.k_norm.weight"))
        keys, values = rows.exchange(self.index, rotate(keys, cos, sin), values, first, last)
        out = attend(rotate(queries, cos, sin), keys, values, rows.mask(first, last, self.window))
        return weights.linear("self_attn.o_proj", out.flatten(1))

    def mlp(self, x: Tensor, weights: LayerWeights) -> Tensor:
        """SwiGLU (2002.05202): normed states x [T, hidden] → [T, hidden]."""
        inner = F.silu(weights.linear("mlp.gate_proj", x)) * weights.linear("mlp.up_proj", x)
        return weights.linear("mlp.down_proj", inner)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (1910.07467) of x [..., N] with weight [N]."""
        return rms_norm(x, weight, self.config.rms_norm_eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Every norm of a decoder, inside its layers and behind them."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def as_vector(weight: Weight) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight


# ------------------------------------------------------------------------------------------------ from a config


def build_blocks(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> list[Block]:
    """A decoder's layers, in their order. dtype: of the arithmetic. Raises CheckpointError, see `rope.rotation`."""
    rotary = RotaryEmbedding(config.rope, config.head_dim, dtype=dtype, device=device)
    return [Block(config, index, rotary) for index in range(config.num_layers)]


def layer_shapes(config: ModelConfig, index: int = 0) -> dict[str, tuple[int, ...]]:
    """Short name → shape of every tensor that layer `index` has, no more and no less."""
    if isinstance(config, ForeignConfig):
        return dict(config.layers[index])
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def kv_layouts(config: ModelConfig) -> list[KVLayout]:
    """What each layer puts in a KV cache for a token."""
    if isinstance(config, ForeignConfig):
        return list(config.kv)
    return [KVLayout(config.num_kv_heads, config.head_dim)] * config.num_layers


def kv_cache_bytes(config: ModelConfig, num_entries: int, itemsize: int, layers: range | None = None) -> int:
    """What a KV cache with room for `num_entries` allocates for keys and values, of all layers or of these, in bytes.

    It is `KVCache.nbytes` of one that `Decoder.new_cache` made. Layers with a sliding window take as much as others:
    their entries are kept, because the text may be taken back to a position from which the window reaches before what
    it reaches from the end.
    """
    layouts = kv_layouts(config)
    return sum(layouts[i].nbytes(num_entries, itemsize) for i in layers or range(config.num_layers))
