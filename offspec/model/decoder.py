"""The decoder: one layout for every family of `config.FAMILIES`, computed layer by layer with borrowed weights.

`Decoder` owns no weights: a `WeightSource` lends one layer at a time, so that the same code runs a model that lies in
memory and one that is streamed. A pass is *layer-major*: all rows go through a layer, in chunks, before the next layer is
asked for, so that a prompt of any length costs one walk over the weights. `CachedDecoder` adds the KV cache of one text;
it is what the scheduler drives. Knows nothing of sampling, budgets or where weights come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.cuda import span
from offspec.loaders.formats import StoredWeight, Weight, linear
from offspec.loaders.small_transfers import to_device
from offspec.loaders.weights import RamWeights, WeightSource

from ..errors import CheckpointError, UnsupportedModelError
from .attention import Visibility, attend, avoid_plans
from .config import ModelConfig
from .kv_cache import KVCache
from .rope import rotate, rotation

LAYER_PREFIX = "model.layers."
EMBEDDING = "model.embed_tokens.weight"
CHUNK_ROWS = 512  # rows of a long chain that go through a layer together; bounds activations
MASK_ELEMENTS = 2**25  # heads of a group * rows * keys in one attention; bounds its mask where the text is long
HEAD_ROWS = 64  # rows whose logits are computed together
Weights = Mapping[str, Weight]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def check_tensors(weights: Mapping[str, StoredWeight], config: ModelConfig, path: Path) -> None:
    """Compare a checkpoint's weights with what `config` calls for, by names and shapes, before anything is read.

    Raises CheckpointError for a tensor that is missing or misshapen, UnsupportedModelError for one that this
    architecture does not have (so that nothing a model was trained with is left out silently).
    """
    wanted = wanted_shapes(config)
    for name, shape in wanted.items():
        if name not in weights:
            raise CheckpointError(f"{path}: tensor {name} is missing; the checkpoint does not match its config.json")
        if (found := weights[name].shape) != shape:
            raise CheckpointError(f"{path}: tensor {name} has shape {list(found)}, config.json calls for {list(shape)}")
    for name in weights:
        if name not in wanted:
            raise UnsupportedModelError(
                f"{path}: tensor {name} has no place in a {config.model_type} decoder; the model has parts that are not supported"
            )


def wanted_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Full name → shape of every tensor that `config` calls for."""
    layers = range(config.num_layers)
    inner = {f"{LAYER_PREFIX}{i}.{name}": shape for i in layers for name, shape in config.layer_shapes().items()}
    return config.shared_shapes() | inner


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints carry and a decoder does not need: a tied head's copy, precomputed frequencies."""
    return (config.tied_head and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")


class Rows(Protocol):
    """The rows of one pass: their positions' rotation, which of them go together, and whom they see.

    cos, sin: [T, 1, head_dim]. chunks: (first, last) row ranges.
    """

    @property
    def cos(self) -> Tensor: ...

    @property
    def sin(self) -> Tensor: ...

    @property
    def chunks(self) -> list[tuple[int, int]]: ...

    def mask(self, first: int, last: int, window: int | None) -> Tensor | None:
        """Bool [last - first, S]: which keys rows first .. last see; None when they see all of them."""

    def exchange(self, layer: int, keys: Tensor, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Store what rows first .. last have ([T, kv_heads, head_dim]); all that they may look at [kv_heads, S, head_dim]."""


@dataclass(frozen=True)
class FreshRows:
    """Rows whose entries go behind those that the cache has. first_layer: the one that the cache's first layer is."""

    cache: KVCache
    visibility: Visibility
    cos: Tensor
    sin: Tensor
    chunks: list[tuple[int, int]]
    first_layer: int = 0
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def exchange(self, layer: int, keys: Tensor, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        start = self.visibility.start
        self.cache.write(layer - self.first_layer, keys, values, start + first)
        return self.cache.read(layer - self.first_layer, start + last)

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
        avoid_plans(device)
        self.config, self.weights, self.dtype, self.device = config, weights, dtype, device
        frequencies, self._magnitude = rotation(config.rope, config.head_dim)
        self._frequencies = frequencies.to(device)
        self.current_layer = 0  # where a pass is, for whoever watches from another thread

    # Both are asked for at each use: whoever holds a decoder whose weights were closed must not hold its memory.

    @property
    def _norm(self) -> Tensor:
        return _vector(self.weights.shared("model.norm.weight"))

    @property
    def _head(self) -> Weight:
        return self.weights.shared(EMBEDDING if self.config.tied_head else "lm_head.weight")

    def new_cache(self, num_layers: int | None = None) -> KVCache:
        """For all layers, or for `num_layers` of them."""
        c = self.config
        return KVCache(num_layers or c.num_layers, c.num_kv_heads, c.head_dim, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache, tree_mask: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] of tokens [T] at positions [T], whose keys and values go behind the cache's entries.

        tokens are on the CPU, positions on the device.
        With tree_mask (bool [R, P + R], see `Visibility`) the last R rows are tree nodes, the rows before them a chain.
        The cache's counts are the caller's to advance (`KVCache.append`).
        """
        return self.through(self.embed(tokens), self.rows(positions, cache, tree_mask))

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [T, hidden] of tokens [T] (on the CPU) before the first layer."""
        return self.weights.rows(EMBEDDING, tokens)

    def rows(self, positions: Tensor, cache: KVCache, tree_mask: Tensor | None, first_layer: int = 0) -> FreshRows:
        """Rows at positions [T] behind what `cache` has, with room made for them there; arguments as `forward`'s."""
        start, num_rows = cache.size, positions.shape[0]
        cache.extend(num_rows)
        cache.positions[start : start + num_rows] = positions
        visibility = Visibility(start, positions, cache.positions, tree_mask)
        step = chunk_rows(self.config, start + num_rows)
        chunks = [(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]
        return FreshRows(cache, visibility, *self.rotation(positions), chunks, first_layer)

    @torch.inference_mode()
    def through(self, hidden: Tensor, rows: Rows, layers: range | None = None) -> Tensor:
        """Hidden states [T, hidden], which may be overwritten, after all layers or after these."""
        for index in layers or range(self.config.num_layers):
            self.current_layer = index
            with span("layer"), self.weights.layer(index) as weights:
                if len(rows.chunks) == 1:
                    hidden = self._layer(index, weights, hidden, rows, 0, len(hidden))
                    continue
                for first, last in rows.chunks:
                    hidden[first:last] = self._layer(index, weights, hidden[first:last], rows, first, last)
        self.current_layer = 0
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [R, vocab] of hidden states [R, hidden] as `forward` returns them."""
        return self.head(self.normed(hidden))

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """What the head is given of hidden states [R, hidden] as `forward` returns them."""
        return self._rms_norm(hidden, self._norm)

    @torch.inference_mode()
    def head(self, states: Tensor) -> Tensor:
        """fp32 logits [R, vocab] of `normed` states [R, hidden], in which they are linear."""
        return linear(states, self._head).float()

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim] of positions [T]."""
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self._magnitude).to(self.dtype), (angles.sin() * self._magnitude).to(self.dtype)

    def _layer(self, index: int, w: Weights, x: Tensor, rows: Rows, first: int, last: int) -> Tensor:
        """One layer over rows first .. last: x [T, hidden] → [T, hidden]."""
        normed = self._rms_norm(x, _vector(w["input_layernorm.weight"]))
        x = x + self._attention(index, w, normed, rows, first, last)
        normed = self._rms_norm(x, _vector(w["post_attention_layernorm.weight"]))
        inner = F.silu(self._linear(w, "mlp.gate_proj", normed)) * self._linear(w, "mlp.up_proj", normed)
        return x + self._linear(w, "mlp.down_proj", inner)

    def _attention(self, index: int, w: Weights, x: Tensor, rows: Rows, first: int, last: int) -> Tensor:
        c, cos, sin = self.config, rows.cos[first:last], rows.sin[first:last]
        queries = self._linear(w, "self_attn.q_proj", x).view(-1, c.num_heads, c.head_dim)
        keys = self._linear(w, "self_attn.k_proj", x).view(-1, c.num_kv_heads, c.head_dim)
        values = self._linear(w, "self_attn.v_proj", x).view(-1, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            queries = self._rms_norm(queries, _vector(w["self_attn.q_norm.weight"]))
            keys = self._rms_norm(keys, _vector(w["self_attn.k_norm.weight"]))
        keys, values = rows.exchange(index, rotate(keys, cos, sin), values, first, last)
        out = attend(rotate(queries, cos, sin), keys, values, rows.mask(first, last, c.windows[index]))
        return self._linear(w, "self_attn.o_proj", out.flatten(1))

    def _linear(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        scratch = self.weights.scratch
        return linear(x, weights[f"{name}.weight"], None if bias is None else _vector(bias), scratch)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)


def _vector(weight: Weight) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight


def chunk_rows(config: ModelConfig, num_keys: int) -> int:
    """How many rows go through a layer together where attention looks at `num_keys`."""
    group = config.num_heads // config.num_kv_heads
    return max(1, min(CHUNK_ROWS, MASK_ELEMENTS // (group * max(1, num_keys))))


def activation_bytes(config: ModelConfig, num_rows: int, num_keys: int, itemsize: int) -> int:
    """Upper bound of what a pass over `num_rows` allocates beside weights and KV cache, in bytes."""
    c, rows = config, min(num_rows, chunk_rows(config, num_keys))
    queries = c.num_heads * c.head_dim
    widths = 4 * c.hidden_size + 3 * max(c.intermediate_size, 2 * queries)
    copies = 1 + 2 * itemsize  # as bool, as numbers, and these aligned
    mask = (c.num_heads // c.num_kv_heads) * rows * num_keys * copies
    head = HEAD_ROWS * c.vocab_size * (itemsize + 4)
    return 2 * num_rows * c.hidden_size * itemsize + max(rows * widths * itemsize + mask, head)


class RowLogits:
    """fp32 logits [R, vocab] of hidden states, computed in slices of HEAD_ROWS when one of their rows is asked for.

    A verdict looks at few rows of a large tree, most of them among the first; all of a large vocabulary's logits would
    take a gigabyte.
    """

    def __init__(self, decoder: Decoder, hidden: Tensor, num_before: int = 0) -> None:
        """hidden [num_before + R, hidden]: the first ones are rows of the same pass before these, see `before`."""
        self._decoder, self._hidden = decoder, hidden[num_before:]
        self._before, self.num_before = hidden[:num_before], num_before
        self._slices: dict[int, Tensor] = {}

    def before(self, first: int, last: int) -> Tensor:
        """[last - first, vocab]: of rows first .. last of the num_before, the pass's chain without its last token. Not kept."""
        return self._decoder.logits(self._before[first:last])

    def states(self, rows: Sequence[int]) -> Tensor:
        """`Decoder.normed` states [len(rows), hidden] of these rows."""
        return self._decoder.normed(self._hidden[to_device(torch.tensor(rows, dtype=torch.long), self._hidden.device)])

    def states_before(self, count: int) -> Tensor:
        """The same [count, hidden] of the last `count` of the num_before."""
        return self._decoder.normed(self._before[self.num_before - count :])

    def __len__(self) -> int:
        return self._hidden.shape[0]

    def __getitem__(self, row: int) -> Tensor:
        index = row // HEAD_ROWS
        if index not in self._slices:
            first = index * HEAD_ROWS
            self._slices[index] = self._decoder.logits(self._hidden[first : first + HEAD_ROWS])
        return self._slices[index][row % HEAD_ROWS]


class CachedDecoder:
    """A decoder with the KV cache of one text: what the scheduler drives, for target and draft alike."""

    def __init__(self, decoder: Decoder, capacity: int = 0) -> None:
        """`capacity`: entries to make room for at once, so that the cache need not be copied to grow."""
        self.decoder = decoder
        self.cache = decoder.new_cache()
        self.cache.reserve(capacity)

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

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """Logits fp32 [(1 if chain else 0) + R, vocab]: after the chain's last token, then after each tree node.

        chain: tokens that are part of the text for certain; they are committed. tokens, depths [R]: nodes, the root's
        children (depth 1) following the committed text; they stay pending. mask: bool [R, P + R], whom of the pending
        region (P earlier nodes, then these R) each node sees, itself included.
        """
        return self.decoder.head(self.states(chain, tokens, depths, mask))

    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray, before: int = 0
    ) -> Tensor:
        """As `score`, with what the logits follow from (`Decoder.normed`), [(1 if chain else 0) + R, hidden], in their place.

        before: so many of the chain's rows before its last one are wanted as well, if there are as many.
        """
        return self.decoder.normed(self._pass(chain, tokens, depths, mask)[max(len(chain) - 1 - before, 0) :])

    def score_rows(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> RowLogits:
        """As `score`, with each row's logits computed when it is asked for."""
        return RowLogits(self.decoder, self._pass(chain, tokens, depths, mask), max(len(chain) - 1, 0))

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` entries, committed and pending."""
        self.cache.reserve(capacity)

    def _pass(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """Hidden states [len(chain) + R, hidden] of what `score` describes."""
        ids = torch.tensor([*chain, *tokens.tolist()])
        positions, tree_mask = placed(self.cache, len(chain), depths, mask)
        hidden = self.decoder.forward(ids, positions, self.cache, tree_mask)
        self.cache.append(len(chain), len(tokens))
        return hidden

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """Commit the pending nodes `path`, let `pending` below them wait on (both ascending); forget the others."""
        self.cache.keep(path, pending)

    def truncate(self, length: int) -> None:
        """Forget the text from position `length` on."""
        self.cache.truncate(length)


def placed(cache: KVCache, num_chain: int, depths: IntArray, mask: BoolArray) -> tuple[Tensor, Tensor | None]:
    """Positions [num_chain + R] of a chain and nodes behind what `cache` holds; their mask; both on its device."""
    base, device = cache.length + num_chain, cache.positions.device
    positions = torch.cat((torch.arange(cache.length, base), torch.as_tensor(depths, dtype=torch.long) + (base - 1)))
    return to_device(positions, device), to_device(torch.as_tensor(mask), device) if len(depths) else None


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
