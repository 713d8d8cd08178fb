"""The decoder: a list of blocks between an embedding and a head, computed layer by layer with borrowed weights.

`Decoder` owns no weights: a `WeightSource` lends one layer at a time, so that the same code runs resident and streamed
models. A pass is *layer-major*: all rows go through a layer, in chunks, before the next layer is borrowed. So a prompt
of up to PASS_ROWS tokens streams the weights once. `CachedDecoder` adds the KV cache of one text; the scheduler calls
it. This module does not depend on sampling, budgets or where weights are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offspec.loaders.formats import StoredWeight, Weight
from offspec.loaders.formats.products import exact_rows, must_be_exact
from offspec.loaders.kernels.row_attention import Visible, attend_rows
from offspec.loaders.streaming.cuda import span
from offspec.loaders.streaming.small_transfers import to_device
from offspec.loaders.streaming.weights import RamWeights, WeightSource
from offspec.scheduler.trees.vocabulary import Vocabulary

from ..errors import CheckpointError, UnsupportedModelError
from .attention import (
    CAPPED_SCORES,
    MASKED_KEYS,
    KeyRange,
    Visibility,
    attend_by_parts,
)
from .block import (
    Block,
    LayerWeights,
    PassRows,
    Projected,
    RowsOfText,
    as_vector,
    build_blocks,
    kv_layouts,
    layer_shapes,
)
from .config import ModelConfig
from .foreign_config import ForeignConfig
from .kv_cache import KVCache, MakeLayerCaches, plain_layers
from .kv_formats import PLAIN, KVFormat
from .kv_in_ram import EntriesInRam
from .names import LAYER_PREFIX
from .norms import normalize
from .part_attention import SPLIT_BYTES, KeyPart, most_scored_keys, part_attention, reason_for_formula
from .rope import Rotations
from .row_attention import key_parts, visible_slots
from .row_logits import HEAD_ROWS, RowLogits
from .row_wise import row_wise

CHUNK_ROWS = 512  # rows of a long chain that go through a layer together; limits activations
# Rows of chains in one pass; a longer prompt takes several, because hidden states of all rows are in memory. Streaming
# the weights again takes less time than the arithmetic of so many rows. A multiple of CHUNK_ROWS: the same chunks.
PASS_ROWS = 16 * CHUNK_ROWS
MASK_ELEMENTS = 2**25  # heads of a group * rows * keys in one attention; limits the mask of a long text
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
AfterLayer = Callable[[int, Tensor], None]  # a layer's number, and the hidden states [T, hidden] after it


def check_tensors(weights: Mapping[str, StoredWeight], config: ModelConfig, path: Path) -> None:
    """Compare the names and shapes of a checkpoint's weights with `config`, before weights are read.

    Raises CheckpointError for a missing tensor or a wrong shape, UnsupportedModelError for a tensor that this
    architecture does not have, so that no trained part of a model is silently ignored.
    """
    wanted = wanted_shapes(config)
    for name, shape in wanted.items():
        if name not in weights:
            raise CheckpointError(f"{path}: tensor {name} is missing; the checkpoint does not match its config.json")
        if (found := weights[name].shape) != shape:
            raise CheckpointError(f"{path}: tensor {name} has shape {list(found)}, config.json requires {list(shape)}")
    for name in weights:
        if name not in wanted:
            raise UnsupportedModelError(
                f"{path}: tensor {name} does not belong to a {config.model_type} decoder; the model has unsupported "
                "parts"
            )


def wanted_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Full name → shape of each tensor that `config` requires."""
    prefix, layers = config.layer_prefix, range(config.num_layers)
    inner = {f"{prefix}{i}.{name}": shape for i in layers for name, shape in layer_shapes(config, i).items()}
    return config.shared_shapes() | inner


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a decoder does not need this tensor: a tied head's copy, precomputed frequencies."""
    if isinstance(config, ForeignConfig) and name in config.ignored:
        return True
    return (config.tied_head and name == config.own_head_name) or name.endswith("rotary_emb.inv_freq")


@dataclass(frozen=True)
class AppendedRows(RowsOfText):
    """`PassRows` whose KV entries are appended to the cache. first_layer: the number of the cache's first layer."""

    cache: KVCache
    visibility: Visibility
    rotations: Rotations
    chunks: list[tuple[int, int]]
    first_layer: int = 0
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    known_ranges: dict[int | None, list[KeyRange]] = field(default_factory=dict)
    known_slots: dict[int | None, Visible] = field(default_factory=dict)

    def attend(self, block: Block, projected: Projected, first: int, last: int) -> Tensor:
        """Attention to all keys at once, or by parts: of many keys, and of keys that are unpacked for each use."""
        queries, keys, values = projected
        layer, group = block.index - self.first_layer, queries.shape[1] // keys.shape[1]
        most = self.cache.most_read(layer)
        if must_be_exact(queries):
            self.cache.write(layer, keys, values, self.visibility.start + first)
            visible, c = self.slots(first, last, block.window, group), block.config
            parts = key_parts(self.cache, layer, visible, most)
            scale = c.attention_scale or c.head_dim**-0.5
            return attend_rows(queries, parts, visible, scale=scale, cap=c.attention_cap)
        if most is None and group * len(queries) * (self.visibility.start + last) <= MASK_ELEMENTS:
            return super().attend(block, projected, first, last)
        self.cache.write(layer, keys, values, self.visibility.start + first)
        scale, cap = block.config.attention_scale, block.config.attention_cap
        most_scored = part_attention(queries, cap).most_keys(queries.shape[0] * queries.shape[1])
        limits = [limit for limit in (most, most_scored) if limit is not None]
        ranges = self.ranges(first, last, block.window)
        key_ranges = self.parts(layer, ranges, min(limits, default=None))
        return attend_by_parts(queries, key_ranges, scale=scale, cap=cap)

    def parts(self, layer: int, ranges: Sequence[KeyRange], most: int | None) -> Iterator[KeyPart]:
        """Keys and values of these slots in the cache's layer `layer`, at most `most` of them at once."""
        for whole in ranges:
            for each in whole.split(most or max(1, whole.end - whole.first)):
                yield KeyPart(*self.cache.read(layer, each.end, each.first), each.mask)

    def exchange(self, layer: int, keys: Tensor, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        start = self.visibility.start
        self.cache.write(layer - self.first_layer, keys, values, start + first)
        return self.cache.read(layer - self.first_layer, start + last)

    def slots(self, first: int, last: int, window: int | None, group: int) -> Visible:
        """`visible_slots`; if they are all rows', they are computed once per pass, otherwise in each layer."""
        if last - first < len(self):
            return visible_slots(self.visibility, first, last, window, group)
        if window not in self.known_slots:
            self.known_slots[window] = visible_slots(self.visibility, first, last, window, group)
        return self.known_slots[window]

    def ranges(self, first: int, last: int, window: int | None) -> list[KeyRange]:
        """`Visibility.ranges`; if they are all rows', they are computed once per pass, otherwise in each layer."""
        if last - first < len(self):
            return self.visibility.ranges(first, last, window)
        if window not in self.known_ranges:
            self.known_ranges[window] = self.visibility.ranges(first, last, window)
        return self.known_ranges[window]

    def __len__(self) -> int:
        return len(self.visibility.positions)

    def mask(self, first: int, last: int, window: int | None) -> Tensor | None:
        """`Visibility.mask`; if it is all rows', it is computed once per pass, otherwise in each layer."""
        if last - first < len(self):
            return self.visibility.mask(first, last, window)
        if window not in self.masks:
            self.masks[window] = self.visibility.mask(first, last, window)
        return self.masks[window]


class JoinedRows:
    """`PassRows` of several texts, one after the other, without padding (EMS-SD, 2405.07542).

    They share every product with weights; attention is each text's own. parts: the texts' rows.
    """

    def __init__(self, config: ModelConfig, parts: Sequence[AppendedRows]) -> None:
        self.parts = list(parts)
        self.rotations = Rotations(torch.cat([part.visibility.positions for part in parts]))
        self.ends = list(accumulate(len(part) for part in parts))
        step = min(chunk_rows(config, part.visibility.start + len(part)) for part in parts)
        self.chunks = [(first, min(first + step, self.ends[-1])) for first in range(0, self.ends[-1], step)]

    def ranges(self) -> Iterator[tuple[AppendedRows, int, int]]:
        """Each text's rows, and the range of them in the pass."""
        return zip(self.parts, (0, *self.ends), self.ends, strict=False)

    def attend(self, block: Block, projected: Projected, first: int, last: int) -> Tensor:
        found = list[Tensor]()
        for part, begin, end in self.ranges():
            begins, ends = max(first, begin), min(last, end)
            if begins < ends:
                queries, keys, values = (each[begins - first : ends - first] for each in projected)
                found.append(part.attend(block, (queries, keys, values), begins - begin, ends - begin))
        return torch.cat(found)


class Decoder:
    """A decoder of the shape `config` with the weights of `weights`.

    entries_in_ram: the layers whose KV entries lie in RAM, in caches made from now on; None: all are on the device.
    is_exact: a row's results have the same bits whatever rows share its pass (`exactness`).
    """

    entries_in_ram: EntriesInRam | None = None
    is_exact = False

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        make_layer_caches: MakeLayerCaches = plain_layers,
    ) -> None:
        """make_layer_caches: creates the KV caches of texts, in some format and place."""
        self.config, self.weights, self.dtype, self.device = config, weights, dtype, device
        self.blocks = build_blocks(config, dtype=dtype, device=device)
        self.current_layer = 0  # the progress of a pass, for observers in other threads
        self.make_layer_caches = make_layer_caches

    def new_cache(self, layers: range | None = None) -> KVCache:
        """An empty KV cache for all layers, or for `layers`."""
        layouts = kv_layouts(self.config)
        numbers = layers or range(len(layouts))
        layouts = [layouts[index] for index in numbers]
        if self.entries_in_ram is not None:
            return self.entries_in_ram.new_cache(numbers, layouts, self.make_layer_caches, self.dtype)
        return KVCache(self.make_layer_caches(layouts, self.dtype, self.device), self.device)

    # ---------------------------------------------------------------------------------------- a pass

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, cache: KVCache, tree_mask: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] of tokens [T] at positions [T].

        Their keys and values are appended to the cache. tokens are on the CPU, positions on the device.
        With tree_mask (bool [R, P + R], see `Visibility`) the last R rows are tree nodes, the rows before them a chain.
        The caller advances the cache's counts (`KVCache.append`).
        """
        return self.through(self.embed(tokens), self.rows(positions, cache, tree_mask))

    def rows(self, positions: Tensor, cache: KVCache, tree_mask: Tensor | None, first_layer: int = 0) -> AppendedRows:
        """Rows at positions [T] after the entries of `cache`, which is extended for them; arguments as in `forward`."""
        start, num_rows = cache.size, positions.shape[0]
        cache.extend(num_rows)
        cache.positions[start : start + num_rows] = positions
        visibility = Visibility(start, positions, cache.positions, tree_mask)
        step = chunk_rows(self.config, start + num_rows)
        chunks = [(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]
        return AppendedRows(cache, visibility, Rotations(positions), chunks, first_layer)

    @torch.inference_mode()
    def through(
        self, hidden: Tensor, rows: PassRows, layers: range | None = None, after: AfterLayer | None = None
    ) -> Tensor:
        """Hidden states [T, hidden] after all layers, or after `layers`. May overwrite its input `hidden`.

        after: called with each layer's output, which the next layer may overwrite.
        """
        for index in layers or range(len(self.blocks)):
            self.current_layer, block = index, self.blocks[index]
            with exact_rows(self.is_exact), span("layer"), self.weights.layer(index) as tensors:
                weights = self.layer_weights(tensors)
                if len(rows.chunks) == 1:
                    hidden = block.forward(hidden, weights, rows, 0, len(hidden))
                else:
                    for first, last in rows.chunks:
                        hidden[first:last] = block.forward(hidden[first:last], weights, rows, first, last)
            if after is not None:
                after(index, hidden)
        self.current_layer = 0
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [R, vocab] of `forward`'s hidden states [R, hidden]."""
        return self.head(self.normed(hidden))

    # ---------------------------------------------------------------------------------------- its parts

    # They keep gradients. They borrow weights at each use, so that a decoder does not keep closed weights in memory.

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [T, hidden] of tokens [T] (on the CPU or the device) before the first layer.

        Every pass begins here, also in CUDA graphs and in training.
        """
        rows, scale = self.embedding_rows(tokens), self.config.embedding_scale
        if scale == 1:
            return rows
        if self.config.is_embedding_scale_rounded:
            scale = torch.tensor(scale).to(rows.dtype).item()
        return rows * scale

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        """The embedding's rows [T, hidden] of tokens [T], without scaling."""
        return self.weights.rows(self.config.embedding_name, tokens)

    def layer_weights(self, tensors: Mapping[str, Weight]) -> LayerWeights:
        """A layer's borrowed weights in the form that blocks use."""
        return LayerWeights(tensors, self.weights.scratch)

    def normed(self, hidden: Tensor) -> Tensor:
        """`forward`'s hidden states [R, hidden] after the final norm: the head's input."""
        vectors = [as_vector(self.weights.shared(name)) for name in self.config.final_norm_names]
        weight, bias = (*(vector.to(hidden.dtype) for vector in vectors), None)[:2]
        assert weight is not None
        return normalize(hidden, weight, bias, self.config.norm, self.config.rms_norm_eps)

    def head(self, states: Tensor) -> Tensor:
        """fp32 logits [R, vocab] of `normed` states [R, hidden]."""
        with exact_rows(self.is_exact):
            return self.capped(self.linear_logits(states))

    def linear_logits(self, states: Tensor) -> Tensor:
        """Logits before the cap: linear in the states."""
        logits = self.head_weights().linear_fp32("head", states)
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def capped(self, logits: Tensor) -> Tensor:
        """fp32 logits [R, vocab]: `linear_logits`, or sums of them, with the model's cap."""
        cap = self.config.logit_cap
        return logits if cap is None else cap * row_wise(torch.tanh, logits / cap)

    def head_weights(self) -> LayerWeights:
        """The matrix of the head as "head.weight"."""
        return LayerWeights({"head.weight": self.weights.shared(self.config.head_name)})


def chunk_rows(config: ModelConfig, num_keys: int) -> int:
    """How many rows go through a layer together if attention has `num_keys` keys.

    Only transformers' modules need a mask over all keys.
    """
    if not isinstance(config, ForeignConfig):
        return CHUNK_ROWS
    return max(1, min(CHUNK_ROWS, MASK_ELEMENTS // (_mask_heads(config) * max(1, num_keys))))


def _mask_heads(config: ModelConfig) -> int:
    """The number of heads whose mask or scores are in memory at once."""
    if isinstance(config, ForeignConfig) and config.form.attention == "eager":
        return config.num_heads
    return config.num_heads // config.num_kv_heads


def activation_bytes(
    config: ModelConfig, num_rows: int, num_keys: int, itemsize: int, kv: KVFormat = PLAIN, *, on_cpu: bool = False
) -> int:
    """Upper bound of the bytes that a pass over `num_rows` rows allocates beside weights and KV cache.

    kv: the cache's format. on_cpu: the CPU computes, whose attention by parts holds no scores.
    """
    c, rows = config, min(num_rows, chunk_rows(config, num_keys))
    queries = c.num_heads * c.head_dim
    inner = (4 if c.mlp.is_fused else 3) * c.intermediate_size
    widths = 4 * c.hidden_size + max(inner, 6 * queries)
    fp32 = 0 if c.norm == "rms" else 8 * rows * max(c.hidden_size, queries)  # the other norms compute in fp32
    attention = _attention_bytes(c, rows, num_keys, itemsize, kv, on_cpu=on_cpu)
    if isinstance(c, ForeignConfig):  # keys and values are repeated for each head; one expert is made at a time
        attention += (2 * queries * num_keys + c.made_elements) * itemsize
    head = HEAD_ROWS * c.vocab_size * (itemsize + (4 if c.logit_cap is None else 12))
    return 2 * num_rows * c.hidden_size * itemsize + max(rows * widths * itemsize + fp32 + attention, head)


def _attention_bytes(
    config: ModelConfig, num_rows: int, num_keys: int, itemsize: int, kv: KVFormat, *, on_cpu: bool
) -> int:
    """Bytes of masks, scores, results and unpacked keys of attention, at once or by parts."""
    is_foreign, is_capped = isinstance(config, ForeignConfig), config.attention_cap is not None
    heads, copies = _mask_heads(config), 1 + 2 * itemsize  # the mask as bool, as numbers, and as aligned numbers
    each = (
        kv.unpacked_bytes(layout, num_keys, itemsize, on_cpu=on_cpu, is_whole=is_foreign)
        for layout in kv_layouts(config)
    )
    unpacked = max(each, default=0)  # a head may have no layer
    elements = heads * num_rows * num_keys
    if is_foreign:
        return elements * copies + unpacked
    at_once = min(elements, MASK_ELEMENTS) if kv.is_plain else 0
    found = at_once * copies
    if is_capped:  # scores and two intermediate results, in fp32
        found += 12 * max(at_once, min(CAPPED_SCORES, at_once * config.num_kv_heads))
    if kv.is_plain and elements <= MASK_ELEMENTS:
        return found
    rows = num_rows * config.num_heads
    by_formula = reason_for_formula(config.head_dim, itemsize, config.attention_cap, on_cpu=on_cpu) is not None
    scores = rows * min(num_keys, most_scored_keys(rows)) if by_formula else 0
    splits = 0 if on_cpu else SPLIT_BYTES
    masks = (heads if on_cpu else 1) * num_rows * min(num_keys, MASKED_KEYS) * copies
    return max(found, masks + 4 * (3 * scores + 6 * rows * config.head_dim) + splits + unpacked)


@dataclass(frozen=True)
class TextRows:
    """One text's rows in a pass, see `CachedDecoder.score`: a chain, then tree nodes tokens, depths [R] with a mask."""

    chain: Sequence[int]
    tokens: IntArray
    depths: IntArray
    mask: BoolArray

    @classmethod
    def of_chain(cls, chain: Sequence[int]) -> TextRows:
        """A chain without nodes."""
        none = np.empty(0, dtype=np.int64)
        return cls(chain, none, none, np.empty((0, 0), dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.chain) + len(self.tokens)


class CachedDecoder:
    """A decoder with the KV cache of one text. The scheduler uses it for target and draft."""

    def __init__(self, decoder: Decoder, capacity: int = 0) -> None:
        """capacity: entries to reserve at once, so that the cache is not copied when it grows."""
        self.decoder = decoder
        self.cache = decoder.new_cache()
        self.cache.reserve(capacity)

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the target, of this model's size."""
        return Vocabulary(self.decoder.config.vocab_size)

    @property
    def max_context(self) -> int:
        return self.decoder.config.max_context

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.cache.next_position

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @torch.inference_mode()
    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """Logits fp32 [(1 if chain else 0) + R, vocab]: after the chain's last token, then after each tree node.

        chain: tokens of the certain text; they are committed. tokens, depths [R]: nodes, which become pending; the
        root's children have depth 1 and follow the committed text. mask: bool [R, P + R], the nodes of the pending
        region (P earlier nodes, then these R) that each node attends to, itself included.
        """
        return self.decoder.head(self.states(chain, tokens, depths, mask))

    @torch.inference_mode()
    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray, before: int = 0
    ) -> Tensor:
        """The states that `score` computes logits from: `Decoder.normed` states [(1 if chain else 0) + R, hidden].

        before: also return the states of up to `before` rows of the chain before its last one.
        """
        while len(chain) > PASS_ROWS + before:
            pass_together([(self, TextRows.of_chain(chain[:PASS_ROWS]))])
            chain = chain[PASS_ROWS:]
        hidden = pass_together([(self, TextRows(chain, tokens, depths, mask))])
        return self.decoder.normed(hidden[max(len(chain) - 1 - before, 0) :])

    def score_rows(
        self,
        chain: Sequence[int],
        tokens: IntArray,
        depths: IntArray,
        mask: BoolArray,
        layers: Collection[int] = (),
    ) -> RowLogits:
        """`score`, with each row's logits computed on first use.

        layers: see `score_together`.
        """
        return score_together([(self, TextRows(chain, tokens, depths, mask))], layers)[0]

    @property
    def observable_layers(self) -> range:
        """The layers whose hidden states `score_rows` can return."""
        return range(self.decoder.config.num_layers)

    def reserve(self, capacity: int) -> None:
        """Reserve room for `capacity` entries, committed and pending."""
        self.cache.reserve(capacity)

    @property
    def layers(self) -> range:
        """The layers that a pass takes its rows through."""
        return range(self.decoder.config.num_layers)

    def begin_pass(self, rows: TextRows) -> tuple[Tensor, AppendedRows]:
        """Hidden states [T, hidden] of these rows before `layers`, and their places. `end_pass` must follow."""
        hidden = self.decoder.embed(torch.tensor([*rows.chain, *rows.tokens.tolist()]))
        return hidden, self._appended(rows)

    def _appended(self, rows: TextRows) -> AppendedRows:
        positions, tree_mask = placed(self.cache, len(rows.chain), rows.depths, rows.mask)
        return self.decoder.rows(positions, self.cache, tree_mask, self.layers.start)

    def end_pass(self, rows: TextRows) -> None:
        """Count the entries that the pass has written."""
        self.cache.append(len(rows.chain), len(rows.tokens))

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """Commit the pending nodes `path`, keep the nodes `pending` below them (both ascending), drop the others."""
        self.cache.keep(path, pending)

    def truncate(self, length: int) -> None:
        """Drop the text from position `length` on."""
        self.cache.truncate(length - self.cache.num_dropped)

    def drop(self) -> None:
        """Drop the whole text, and free its memory."""
        self.cache = self.decoder.new_cache()


TextPass = tuple[CachedDecoder, TextRows]


@torch.inference_mode()
def pass_together(texts: Sequence[TextPass], after: AfterLayer | None = None) -> Tensor:
    """One pass of the same decoder over rows of several texts: hidden states [T, hidden], text after text.

    Every text has at least one row. Each text's rows become committed (chains) and pending (nodes) in its own cache, as
    in `CachedDecoder.score`. The weights are streamed once. after: see `Decoder.through`.
    """
    first = texts[0][0]
    begun = [text.begin_pass(rows) for text, rows in texts]
    hidden, rows = begun[0]
    joined: PassRows = rows
    if len(begun) > 1:
        hidden = torch.cat([each for each, _ in begun])
        joined = JoinedRows(first.decoder.config, [rows for _, rows in begun])
    if after is not None and first.layers.start:
        after(first.layers.start - 1, hidden)
    hidden = first.decoder.through(hidden, joined, first.layers, after)
    for text, own in texts:
        text.end_pass(own)
    return hidden


def score_together(texts: Sequence[TextPass], layers: Collection[int] = ()) -> list[RowLogits]:
    """`pass_together`; for each text the logits of [(1 if chain else 0) + R] rows, each computed on first use.

    layers: also keep the hidden states after these layers (from 0), of all rows (`RowLogits.layer_states`). Raises
    ValueError for a layer that is not one of `observable_layers`.
    """
    if unknown := set(layers) - set(texts[0][0].observable_layers):
        raise ValueError(f"no hidden states after layer {min(unknown)}, only after {texts[0][0].observable_layers}")
    found: dict[int, Tensor] = {}

    def after(layer: int, hidden: Tensor) -> None:
        if layer in layers:
            found[layer] = hidden.clone()

    hidden = pass_together(texts, after if layers else None)
    ends = list(accumulate(len(rows) for _, rows in texts))
    return [
        RowLogits(
            text.decoder,
            hidden[begin:end],
            max(len(rows.chain) - 1, 0),
            {layer: states[begin:end] for layer, states in found.items()},
        )
        for (text, rows), begin, end in zip(texts, (0, *ends), ends, strict=False)
    ]


def placed(cache: KVCache, num_chain: int, depths: IntArray, mask: BoolArray) -> tuple[Tensor, Tensor | None]:
    """Positions [num_chain + R] of a chain and nodes after the text in `cache`, and their mask; both on its device."""
    base, device = cache.next_position + num_chain, cache.positions.device
    positions = torch.cat(
        (torch.arange(cache.next_position, base), torch.as_tensor(depths, dtype=torch.long) + (base - 1))
    )
    return to_device(positions, device), to_device(torch.as_tensor(mask), device) if len(depths) else None


def random_decoder(config: ModelConfig, seed: int, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder of the shape `config` with random weights. As a draft it must not change the text."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (0.1 * torch.randn(shape, generator=generator)).to(device, dtype)
        for name, shape in wanted_shapes(config).items()
    }
    return Decoder(config, RamWeights.from_tensors(tensors, layer_prefix=LAYER_PREFIX), dtype=dtype, device=device)
