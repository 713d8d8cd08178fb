"""The decoder: one layout for every family of `config.FAMILIES`, computed layer by layer with borrowed weights.

`Decoder` owns no weights: a `WeightSource` lends one layer at a time, so that the same code runs a model that lies in
memory and one that is streamed. A pass is *layer-major*: all rows go through a layer, in chunks, before the next layer is
asked for, so that a prompt of any length costs one walk over the weights. `CachedDecoder` adds the KV cache of one text;
it is what the scheduler drives. Knows nothing of sampling, budgets or where weights come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.checkpoint import Checkpoint
from offspec.loaders.weights import RamWeights, WeightSource

from .attention import Visibility, attend
from .config import ModelConfig
from .errors import CheckpointError, UnsupportedModelError
from .kv_cache import KVCache
from .rope import rotate, rotation

LAYER_PREFIX = "model.layers."
CHUNK_ROWS = 512  # rows of a long chain that go through a layer together; bounds activations and masks
Weights = Mapping[str, Tensor]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare a checkpoint's tensors with what `config` calls for, by names and shapes, before anything is read.

    Raises CheckpointError for a tensor that is missing or misshapen, UnsupportedModelError for one that this
    architecture does not have (so that nothing a model was trained with is left out silently).
    """
    wanted = dict(config.shared_shapes())
    for index in range(config.num_layers):
        wanted |= {f"{LAYER_PREFIX}{index}.{name}": shape for name, shape in config.layer_shapes().items()}
    for name, shape in wanted.items():
        if name not in checkpoint.tensors:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} is missing; the checkpoint does not match its config.json"
            )
        if (found := checkpoint.tensors[name].shape) != shape:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} has shape {list(found)}, config.json calls for {list(shape)}"
            )
    for name in checkpoint.tensors:
        if name not in wanted and not is_ignored(name, config):
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor {name} has no place in a {config.model_type} decoder; the model has parts that are not supported"
            )


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints carry and a decoder does not need: a tied head's copy, precomputed frequencies."""
    return (config.tied_head and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")


@dataclass(frozen=True)
class Rows:
    """The rows of one pass: their positions' rotation, and which of them go together.

    cos, sin: [T, 1, head_dim]. chunks: (first, last) row ranges.
    """

    visibility: Visibility
    cos: Tensor
    sin: Tensor
    chunks: list[tuple[int, int]]
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, first: int, last: int, window: int | None) -> Tensor | None:
        """As `Visibility.mask`; kept for the whole pass where there is one chunk, made anew by each layer otherwise."""
        if len(self.chunks) > 1:
            return self.visibility.mask(first, last, window)
        if window not in self.masks:
            self.masks[window] = self.visibility.mask(first, last, window)
        return self.masks[window]


class Decoder:
    """A decoder of the shape `config` over the weights that `weights` lends."""

    def __init__(self, config: ModelConfig, weights: WeightSource, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.weights, self.dtype, self.device = config, weights, dtype, device
        frequencies, self._magnitude = rotation(config.rope, config.head_dim)
        self._frequencies = frequencies.to(device)
        self._embedding = weights.shared("model.embed_tokens.weight")
        self._norm = weights.shared("model.norm.weight")
        self._head = self._embedding if config.tied_head else weights.shared("lm_head.weight")

    def new_cache(self) -> KVCache:
        c = self.config
        return KVCache(c.num_layers, c.num_kv_heads, c.head_dim, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache, tree_mask: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] of tokens [T] at positions [T], whose keys and values go behind the cache's entries.

        With tree_mask (bool [R, P + R], see `Visibility`) the last R rows are tree nodes, the rows before them a chain.
        The cache's counts are the caller's to advance (`KVCache.append`).
        """
        start, num_rows = cache.size, tokens.shape[0]
        cache.reserve(start + num_rows)
        rows = self._rows(positions, cache, start, tree_mask)
        hidden = F.embedding(tokens.to(self._embedding.device), self._embedding).to(self.device, self.dtype)
        for index in range(self.config.num_layers):
            with self.weights.layer(index) as weights:
                for first, last in rows.chunks:
                    hidden[first:last] = self._layer(index, weights, hidden[first:last], cache, rows, first, last)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [R, vocab] of hidden states [R, hidden] as `forward` returns them."""
        return F.linear(self._rms_norm(hidden, self._norm), self._head).float()

    def _rows(self, positions: Tensor, cache: KVCache, start: int, tree_mask: Tensor | None) -> Rows:
        num_rows = positions.shape[0]
        cache.positions[start : start + num_rows] = positions
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = (angles.cos() * self._magnitude).to(self.dtype), (angles.sin() * self._magnitude).to(self.dtype)
        chunks = [(first, min(first + CHUNK_ROWS, num_rows)) for first in range(0, num_rows, CHUNK_ROWS)]
        return Rows(Visibility(start, positions, cache.positions, tree_mask), cos, sin, chunks)

    def _layer(self, index: int, w: Weights, x: Tensor, cache: KVCache, rows: Rows, first: int, last: int) -> Tensor:
        """One layer over rows first .. last: x [T, hidden] → [T, hidden]."""
        normed = self._rms_norm(x, w["input_layernorm.weight"])
        x = x + self._attention(index, w, normed, cache, rows, first, last)
        normed = self._rms_norm(x, w["post_attention_layernorm.weight"])
        inner = F.silu(_linear(w, "mlp.gate_proj", normed)) * _linear(w, "mlp.up_proj", normed)
        return x + _linear(w, "mlp.down_proj", inner)

    def _attention(
        self, index: int, w: Weights, x: Tensor, cache: KVCache, rows: Rows, first: int, last: int
    ) -> Tensor:
        c, cos, sin = self.config, rows.cos[first:last], rows.sin[first:last]
        queries = _linear(w, "self_attn.q_proj", x).view(-1, c.num_heads, c.head_dim)
        keys = _linear(w, "self_attn.k_proj", x).view(-1, c.num_kv_heads, c.head_dim)
        values = _linear(w, "self_attn.v_proj", x).view(-1, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            queries = self._rms_norm(queries, w["self_attn.q_norm.weight"])
            keys = self._rms_norm(keys, w["self_attn.k_norm.weight"])
        seen = rows.visibility
        cache.write(index, rotate(keys, cos, sin), values, seen.start + first)
        keys, values = cache.read(index, seen.start + last)
        out = attend(rotate(queries, cos, sin), keys, values, rows.mask(first, last, c.windows[index]))
        return _linear(w, "self_attn.o_proj", out.flatten(1))

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


class CachedDecoder:
    """A decoder with the KV cache of one text: what the scheduler drives, for target and draft alike."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.cache = decoder.new_cache()

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @property
    def max_context(self) -> int:
        return self.decoder.config.max_context

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.cache.length

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """Logits fp32 [(1 if chain else 0) + R, vocab]: after the chain's last token, then after each tree node.

        chain: tokens that are part of the text for certain; they are committed. tokens, depths [R]: nodes, the root's
        children (depth 1) following the committed text; they stay pending. mask: bool [R, P + R], whom of the pending
        region (P earlier nodes, then these R) each node sees, itself included.
        """
        device, num_nodes = self.decoder.device, len(tokens)
        base = self.length + len(chain)
        ids = torch.tensor([*chain, *tokens.tolist()], device=device)
        positions = torch.cat((torch.arange(self.length, base), torch.as_tensor(depths, dtype=torch.long) + (base - 1)))
        tree_mask = torch.as_tensor(mask, device=device) if num_nodes else None
        hidden = self.decoder.forward(ids, positions.to(device), self.cache, tree_mask)
        self.cache.append(len(chain), num_nodes)
        return self.decoder.logits(hidden[max(len(chain) - 1, 0) :])

    def keep(self, path: Sequence[int]) -> None:
        """Commit the pending nodes `path` (ascending indices); forget the others."""
        self.cache.keep(path)

    def truncate(self, length: int) -> None:
        """Forget the text from position `length` on."""
        self.cache.truncate(length)


def random_decoder(config: ModelConfig, seed: int, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder of the shape `config` with random weights: guesses that are worth nothing, to show that text is unmoved."""
    generator = torch.Generator().manual_seed(seed)
    shapes = config.shared_shapes()
    for index in range(config.num_layers):
        shapes |= {f"{LAYER_PREFIX}{index}.{name}": shape for name, shape in config.layer_shapes().items()}
    tensors = {
        name: (0.1 * torch.randn(shape, generator=generator)).to(device, dtype) for name, shape in shapes.items()
    }
    return Decoder(config, RamWeights.from_tensors(tensors, layer_prefix=LAYER_PREFIX), dtype=dtype, device=device)
