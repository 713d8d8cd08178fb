"""One layer of a decoder: the shapes of its weights and KV entries, and its forward.

The layout is Llama's: RMSNorm, attention with RoPE, RMSNorm, a gated MLP. A family's differences are fields of
`ModelConfig`, each read in one place here: biases in `layer_shapes` (a bias is added if the layer has it), fused
matrices in `matrix_shapes`, QK norm, the window and scores in `Block.attention`, the activation in `Block.mlp`, the
places of norms in `Block.forward`. A block does not depend on where weights or KV entries are stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.formats import Weight, linear, linear_fp32

from .attention import attend
from .config import ModelConfig
from .foreign_config import ForeignConfig
from .kv_cache import KVLayout
from .kv_formats import PLAIN, KVFormat
from .norms import normalize
from .rope import RotaryEmbedding, Rotations, rotate
from .rope_config import RopeConfig
from .row_wise import row_wise

Projected = tuple[Tensor, Tensor, Tensor]  # queries [T, heads, D], keys and values [T, kv_heads, D] of T rows
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by their names in config.json
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class PassRows(Protocol):
    """The rows of one pass: their positions and chunks, and their attention.

    rotations: of the T rows' positions. chunks: (first, last) ranges of rows that go through a layer together.
    """

    @property
    def rotations(self) -> Rotations: ...

    @property
    def chunks(self) -> list[tuple[int, int]]: ...

    def attend(self, block: Block, projected: Projected, first: int, last: int) -> Tensor:
        """Attention [last - first, heads, head_dim] of rows first .. last, given their queries, keys and values."""


class RowsOfText(ABC):
    """`PassRows` of one text: its KV entries, and the mask over them."""

    @abstractmethod
    def mask(self, first: int, last: int, window: int | None) -> Tensor | None:
        """Bool [last - first, S]: the keys that rows first .. last attend to; None for all keys."""

    @abstractmethod
    def exchange(self, layer: int, keys: Tensor, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Store the keys and values [T, kv_heads, head_dim] of rows first .. last.

        Returns the keys and values for their attention, [kv_heads, S, head_dim] each.
        """

    def attend(self, block: Block, projected: Projected, first: int, last: int) -> Tensor:
        queries, keys, values = projected
        keys, values = self.exchange(block.index, keys, values, first, last)
        mask, c = self.mask(first, last, block.window), block.config
        return attend(queries, keys, values, mask, scale=c.attention_scale, cap=c.attention_cap)


class LayerWeights:
    """One layer's weights by their short names, with the operations that `Block` needs."""

    def __init__(self, tensors: Mapping[str, Weight], scratch: Tensor | None = None) -> None:
        """scratch: memory for a dequantised matrix, see `formats.linear`."""
        self.tensors, self.scratch = tensors, scratch

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x [T, K] times `name.weight` [N, K], plus `name.bias` [N] if there is one → [T, N]. Keeps gradients."""
        return linear(x, self.tensors[f"{name}.weight"], self._bias(name), self.scratch)

    def linear_fp32(self, name: str, x: Tensor) -> Tensor:
        """As `linear`, with an fp32 result; see `formats.linear_fp32`."""
        return linear_fp32(x, self.tensors[f"{name}.weight"], self._bias(name), self.scratch)

    def _bias(self, name: str) -> Tensor | None:
        return self.vector(f"{name}.bias") if f"{name}.bias" in self.tensors else None

    def vector(self, name: str) -> Tensor:
        """A norm's weight or a bias; no format packs these."""
        return as_vector(self.tensors[name])


class Block:
    """Layer `index` of a decoder of the shape `config`. Holds no weights; every method keeps gradients."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding | None) -> None:
        """rotary: one object for all layers with equal RoPE, so that a pass computes its angles once; None: no RoPE."""
        self.config, self.index, self.rotary = config, index, rotary
        self.window = config.windows[index]  # the number of positions a row attends to, itself included; None is all
        self.kv = kv_layouts(config)[index]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Short name → shape of each of the layer's tensors."""
        return layer_shapes(self.config)

    def forward(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """The layer over rows first .. last of a pass: hidden states x [T, hidden] → [T, hidden], a new tensor."""
        places = self.config.norms
        normed = self.norm(x, weights, places.before_attention)
        attended = self.attention(normed, weights, rows, first, last)
        if self.config.is_parallel:
            return x + attended + self.mlp(normed, weights)
        x = self.added(x, self.norm(attended, weights, places.after_attention))
        inner = self.mlp(self.norm(x, weights, places.before_mlp), weights)
        return self.added(x, self.norm(inner, weights, places.after_mlp))

    def added(self, x: Tensor, part: Tensor) -> Tensor:
        """Hidden states x [T, hidden] plus the scaled output `part` of attention or MLP."""
        scale = self.config.residual_scale
        return x + part if scale == 1 else x + part * scale

    def attention(self, x: Tensor, weights: LayerWeights, rows: PassRows, first: int, last: int) -> Tensor:
        """Grouped-query attention of rows first .. last: normed states x [T, hidden] → [T, hidden]."""
        c = self.config
        queries, keys, values = self.projected(x, weights)
        if not c.qk_norm_form.is_after_rope:
            queries, keys = self.qk_normed(queries, keys, weights)
        if self.rotary is not None:
            cos, sin = (part[first:last] for part in rows.rotations.of(self.rotary))
            queries = rotate(queries, cos, sin, is_interleaved=c.has_interleaved_rope)
            keys = rotate(keys, cos, sin, is_interleaved=c.has_interleaved_rope)
        if c.qk_norm_form.is_after_rope:
            queries, keys = self.qk_normed(queries, keys, weights)
        if c.query_growth is not None:
            queries = queries * rows.rotations.growth(*c.query_growth)[first:last].to(queries.dtype)
        out = rows.attend(self, (queries, keys, values), first, last)
        return weights.linear("self_attn.o_proj", out.flatten(1))

    def projected(self, x: Tensor, weights: LayerWeights) -> Projected:
        """Queries [T, heads, head_dim], keys and values [T, kv_heads, head_dim] of normed states x [T, hidden]."""
        c = self.config
        if c.has_fused_qkv:
            sizes = [heads * c.head_dim for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
            queries, keys, values = torch.split(weights.linear("self_attn.qkv_proj", x), sizes, dim=-1)
        else:
            queries, keys, values = (weights.linear(f"self_attn.{name}_proj", x) for name in "qkv")
        return (
            queries.view(-1, c.num_heads, c.head_dim),
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

    def mlp(self, x: Tensor, weights: LayerWeights) -> Tensor:
        """Normed states x [T, hidden] → [T, hidden]; with a gate it is SwiGLU or GeGLU (2002.05202)."""
        names, activate = self.config.mlp, ACTIVATIONS[self.config.activation]
        if names.gate is None:
            inner = row_wise(activate, weights.linear(names.up, x))
        elif names.is_fused:
            gate, up = weights.linear(names.up, x).chunk(2, dim=-1)
            inner = row_wise(activate, gate) * up
        else:
            inner = row_wise(activate, weights.linear(names.gate, x)) * weights.linear(names.up, x)
        return weights.linear(names.down, inner)

    def norm(self, x: Tensor, weights: LayerWeights, name: str | None) -> Tensor:
        """x [..., N], normed by the layer's norm `name`; x itself if `name` is None."""
        if name is None:
            return x
        c = self.config
        bias = weights.vector(f"{name}.bias") if f"{name}.bias" in weights.tensors else None
        return normalize(x, weights.vector(f"{name}.weight"), bias, c.norm, c.rms_norm_eps)


def as_vector(weight: Weight) -> Tensor:
    """A norm's weight or a bias as a tensor. A two-dimensional one may be stored in oneDNN's order."""
    return weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


# ------------------------------------------------------------------------------------------------ from a config


def build_blocks(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> list[Block]:
    """A decoder's layers, in their order. dtype: of the arithmetic. Raises CheckpointError, see `rope.rotation`."""
    dim, is_interleaved = config.rotary_dim, config.has_interleaved_rope
    made = list[tuple[RopeConfig, RotaryEmbedding]]()

    def rotary(rope: RopeConfig | None) -> RotaryEmbedding | None:
        """One object for all layers with equal RoPE."""
        if rope is None:
            return None
        if (found := next((embedding for known, embedding in made if known == rope), None)) is None:
            found = RotaryEmbedding(rope, dim, is_interleaved=is_interleaved, dtype=dtype, device=device)
            made.append((rope, found))
        return found

    return [Block(config, index, rotary(config.rope_of(index))) for index in range(config.num_layers)]


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Short name without ".weight" → shape of each matrix of a layer, in the order of use."""
    hidden, inner, mlp = config.hidden_size, config.intermediate_size, config.mlp
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.has_fused_qkv:
        shapes = {"self_attn.qkv_proj": (q + 2 * kv, hidden)}
    else:
        shapes = {f"self_attn.{name}_proj": (rows, hidden) for name, rows in (("q", q), ("k", kv), ("v", kv))}
    shapes["self_attn.o_proj"] = (hidden, q)
    if mlp.gate is not None:
        shapes[mlp.gate] = (inner, hidden)
    shapes[mlp.up] = (2 * inner if mlp.is_fused else inner, hidden)
    shapes[mlp.down] = (hidden, inner)
    return shapes


def layer_shapes(config: ModelConfig, index: int = 0) -> dict[str, tuple[int, ...]]:
    """Short name → shape of each tensor of layer `index`."""
    if isinstance(config, ForeignConfig):
        return dict(config.layers[index])
    shapes = dict[str, tuple[int, ...]]()
    for name in config.norms.names:
        shapes[f"{name}.weight"] = (config.hidden_size,)
        if config.has_norm_bias:
            shapes[f"{name}.bias"] = (config.hidden_size,)
    for name, shape in matrix_shapes(config).items():
        shapes[f"{name}.weight"] = shape
        if _has_bias(config, name):
            shapes[f"{name}.bias"] = shape[:1]
    if config.qk_norm:
        form = config.qk_norm_form
        for name, heads in ((form.queries, config.num_heads), (form.keys, config.num_kv_heads)):
            forms = {
                "head": (config.head_dim,),
                "own head": (heads, config.head_dim),
                "projection": (heads * config.head_dim,),
            }
            shapes[f"{name}.weight"] = forms[form.over]
    return shapes


def _has_bias(config: ModelConfig, matrix: str) -> bool:
    if not matrix.startswith("self_attn."):
        return config.mlp_bias
    return config.o_bias if matrix.endswith(".o_proj") else config.qkv_bias


def kv_layouts(config: ModelConfig) -> list[KVLayout]:
    """The shape of a token's KV entry in each layer."""
    if isinstance(config, ForeignConfig):
        return list(config.kv)
    return [KVLayout(config.num_kv_heads, config.head_dim)] * config.num_layers


def kv_cache_bytes(
    config: ModelConfig, num_entries: int, itemsize: int, layers: range | None = None, kv: KVFormat = PLAIN
) -> int:
    """Bytes of a KV cache with room for `num_entries` entries, of all layers or of `layers`, in the format `kv`.

    It equals `KVCache.nbytes` of a cache by `Decoder.new_cache`. Layers with a sliding window need as much as others.
    Their old entries are kept, because the text may be cut back to a position whose window contains them.
    """
    layouts = kv_layouts(config)
    return num_entries * sum(kv.entry_bytes(layouts[i], itemsize) for i in layers or range(config.num_layers))
