"""The decoder: a list of blocks between an embedding and a head, computed layer by layer with borrowed weights.

`Decoder` owns no weights: a `WeightSource` lends one layer at a time, so that the same code runs resident and streamed
models. A pass is *layer-major*: all rows go through a layer, in chunks, before the next layer is borrowed. So a prompt
of up to PASS_ROWS tokens streams the weights once. `CachedDecoder` adds the KV cache of one text; the scheduler calls
it. This module does not depend on sampling, budgets or where weights are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offspec.backends.arithmetic import FAST
from offspec.backends.backend import Backend
from offspec.backends.choice import backend_of
from offspec.backends.device_kinds import GPU, DeviceKind
from offspec.backends.weights import Weight
from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.accelerators.cuda import span
from offspec.loaders.formats import StoredWeight
from offspec.loaders.streaming.weights import RamWeights, WeightSource
from offspec.scheduler.trees.token_tree import IntArray
from offspec.scheduler.trees.vocabulary import Vocabulary

from ..errors import CheckpointError, UnsupportedModelError
from .block import Block, build_blocks, kv_layouts, layer_shapes, of_all_entries
from .config import ModelConfig
from .memory.chunk_attention import ChunkAttention
from .memory.kv_cache import MakeLayerCaches, plain_layers
from .memory.kv_formats import PLAIN, KVFormat
from .memory.kv_in_ram import EntriesInRam
from .memory.sequence_cache import SequenceCache, empty_memories
from .memory.window_layers import most_pending
from .names import INPUT_NORM, INPUT_PROJECTION, INPUT_TABLE, LAYER_PREFIX
from .norms import normalize
from .parts.experts import Experts
from .parts.kinds import parts_of
from .parts.kv_attention import CAPPED_SCORES, MASKED_KEYS, Visibility
from .parts.layer_input import of_tokens
from .parts.mlp import Mlp
from .parts.part import ExpertsOfLayer, LayerWeights, PassRows, as_vector
from .parts.split_attention import most_scored_keys, reason_for_formula
from .pass_rows import MASK_ELEMENTS, PASS_ROWS, AppendedRows, JoinedRows, TextRows, chunk_rows, placed
from .rope import Rotations
from .row_logits import HEAD_ROWS, RowLogits

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
        if (stored_shape := weights[name].shape) != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(stored_shape)}, config.json requires {list(shape)}"
            )
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


class Decoder:
    """A decoder of the shape `config` with the weights of `weights`.

    entries_in_ram: the layers whose KV entries lie in RAM, in caches made from now on; None: all are on the device.
    arithmetic: of its passes. forgets: in caches made from now on, layers with a window drop KV entries outside of it
    (`memory.window_layers`).
    """

    entries_in_ram: EntriesInRam | None = None
    forgets = False
    arithmetic = FAST

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        make_layer_caches: MakeLayerCaches = plain_layers,
        blocks: Sequence[Block] | None = None,
    ) -> None:
        """make_layer_caches: creates the memories of texts, with KV entries in some format and place.

        blocks: the layers; None: those that `config` describes.
        """
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.device = device
        self.make_layer_caches = make_layer_caches
        self.blocks = build_blocks(config, dtype=dtype, device=device) if blocks is None else list(blocks)
        self.current_layer = 0  # the progress of a pass, for observers in other threads

    def new_cache(self, layers: range | None = None, *, forgets: bool | None = None) -> SequenceCache:
        """An empty memory of a text for all layers, or for `layers`. forgets: None is that of the decoder."""
        blocks = (self.blocks[index] for index in layers or range(len(self.blocks)))
        layouts = [(block.index, layout) for block in blocks for layout in block.memories]
        if not (self.forgets if forgets is None else forgets):
            layouts = [(index, of_all_entries(layout)) for index, layout in layouts]
        if self.entries_in_ram is not None:
            return self.entries_in_ram.new_cache(layouts, self.make_layer_caches, self.dtype)
        memories, numbers = empty_memories(layouts, self.make_layer_caches, self.dtype, self.device)
        return SequenceCache(memories, self.device, numbers)

    @property
    def most_nodes(self) -> int | None:
        """The most nodes of a tree behind a text; None: any number."""
        windows = [window for window in self.config.windows if window is not None] if self.forgets else []
        return min(map(most_pending, windows), default=None)

    # ---------------------------------------------------------------------------------------- a pass

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, cache: SequenceCache) -> Tensor:
        """Hidden states [T, hidden] of a chain of tokens [T] at positions [T].

        What the layers keep of them is appended to `cache`. tokens are on the CPU, positions on the device. The caller
        advances the cache's counts (`SequenceCache.append`).
        """
        return self.through(self.embed(tokens), self.rows(TextRows.of_chain(tokens.tolist()), cache, positions))

    def rows(self, rows: TextRows, cache: SequenceCache, positions: Tensor | None = None) -> AppendedRows:
        """Rows after the text in `cache`, which is extended for them.

        positions [T]: of a chain; None for those that follow.
        """
        cache.extend(len(rows))
        start = cache.size
        if positions is None:
            positions = placed(cache, rows)
        cache.positions[start : start + len(rows)] = positions
        step = chunk_rows(self.config, start + len(rows))
        chunks = [(first, min(first + step, len(rows))) for first in range(0, len(rows), step)]
        inputs = self.layer_inputs(torch.tensor(rows.token_ids, dtype=torch.long))
        rotations = Rotations(positions)
        visibility = self.visibility(rows, cache, positions)
        appended = AppendedRows(
            rows, cache.last_slot, cache, visibility, rotations, chunks, self.backend, inputs=inputs
        )
        appended.send_places(self.config)
        return appended

    def visibility(self, rows: TextRows, cache: SequenceCache, positions: Tensor) -> Visibility:
        """What rows after the text in `cache` attend to."""
        return Visibility(cache.size, positions, cache.positions, rows.parents, len(rows.tokens))

    @torch.inference_mode()
    def through(
        self, hidden: Tensor, rows: PassRows, layers: range | None = None, after: AfterLayer | None = None
    ) -> Tensor:
        """Hidden states [T, hidden] after all layers, or after `layers`. May overwrite its input `hidden`.

        after: called with each layer's output, which the next layer may overwrite.
        """
        for index in layers or range(len(self.blocks)):
            self.current_layer, block = index, self.blocks[index]
            with span("layer"), self.weights.layer(index) as tensors:
                weights = self.layer_weights(tensors, index, self.backend)
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

    def layer_inputs(self, tokens: Tensor) -> Tensor | None:
        """What each layer gets of tokens [T] (on the CPU): [T, layers, size]; None: nothing."""
        if self.config.layer_inputs is None:
            return None
        shared = self.weights.shared
        tensors = {"projection.weight": shared(INPUT_PROJECTION), "norm.weight": shared(INPUT_NORM)}
        weights = self.layer_weights(tensors, backend=self.backend)
        return of_tokens(self.embed(tokens), self.weights.rows(INPUT_TABLE, tokens), weights, self.config)

    @property
    def backend(self) -> Backend:
        """What computes its passes. Training computes in the fastest way, which keeps gradients."""
        return backend_of(self.device, self.arithmetic)

    @property
    def is_exact(self) -> bool:
        """Whether a row's results have the same bits whatever rows share its pass (`exactness`)."""
        return self.backend.is_exact

    def layer_weights(
        self, tensors: Mapping[str, Weight], layer: int | None = None, backend: Backend | None = None
    ) -> LayerWeights:
        """Borrowed weights in the form that blocks use. layer: the number of their layer, if they are a layer's.

        backend: None: the fastest for the device.
        """
        source, backend = self.weights, backend or backend_of(self.device)
        if layer is None:
            return LayerWeights(tensors, backend, source.scratch)
        lend, table = partial(source.experts, layer), partial(source.expert_table, layer)
        experts = ExpertsOfLayer(lend, table, partial(self._announce, layer))
        return LayerWeights(tensors, backend, source.scratch, experts)

    def _announce(self, layer: int, x: Tensor) -> None:
        """Tell the source which experts the next layer that has some would use for states x [T, hidden]."""
        part = next((part for part in self._expert_parts if part.layer > layer), None)
        if part is not None and (tensors := self.weights.ahead(part.layer)) is not None:
            weights = LayerWeights(tensors, self.backend, self.weights.scratch)
            self.weights.expect(part.layer, part.likely(x, weights))

    @cached_property
    def _expert_parts(self) -> list[Experts]:
        return [part for block in self.blocks for part in block.parts if isinstance(part, Experts)]

    def normed(self, hidden: Tensor) -> Tensor:
        """`forward`'s hidden states [R, hidden] after the final norm: the head's input."""
        vectors = [as_vector(self.weights.shared(name)) for name in self.config.final_norm_names]
        weight, bias = (*(vector.to(hidden.dtype) for vector in vectors), None)[:2]
        assert weight is not None
        return normalize(hidden, weight, bias, self.config.norm, self.config.rms_norm_eps, backend_of(self.device))

    def head(self, states: Tensor) -> Tensor:
        """fp32 logits [R, vocab] of `normed` states [R, hidden]."""
        return self.capped(self.linear_logits(states))

    def linear_logits(self, states: Tensor) -> Tensor:
        """Logits before the cap: linear in the states."""
        return self.logits_by(self.backend, states)

    def logits_by(self, backend: Backend, states: Tensor) -> Tensor:
        """`linear_logits`, for a draft that predicts with this head in its own arithmetic."""
        logits = self.head_weights(backend).linear_fp32("head", states)
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale

    def capped(self, logits: Tensor) -> Tensor:
        """fp32 logits [R, vocab]: `linear_logits`, or sums of them, with the model's cap."""
        cap = self.config.logit_cap
        return logits if cap is None else cap * self.backend.each(torch.tanh, logits / cap)

    def head_weights(self, backend: Backend) -> LayerWeights:
        """The matrix of the head as "head.weight"."""
        return LayerWeights({"head.weight": self.weights.shared(self.config.head_name)}, backend)


def activation_bytes(
    config: ModelConfig, num_rows: int, num_keys: int, itemsize: int, kv: KVFormat = PLAIN, device: DeviceKind = GPU
) -> int:
    """Upper bound of the bytes that a pass over `num_rows` rows allocates beside weights and KV cache.

    kv: the cache's format.
    """
    c, rows = config, min(num_rows, chunk_rows(config, num_keys))
    queries = c.num_heads * c.largest_head
    numbers = [part.row_numbers for layer in range(c.num_layers) for part in parts_of(c, layer)]
    widths = 4 * c.hidden_size + max(6 * queries, Mlp(c, 0).row_numbers, *numbers)  # a head may have no layers
    fp32 = 0 if c.norm == "rms" else 8 * rows * max(c.hidden_size, queries)  # the other norms compute in fp32
    attention = _attention_bytes(c, rows, num_keys, itemsize, kv, device)
    attention += c.made_numbers(num_keys) * itemsize
    head = HEAD_ROWS * c.vocab_size * (itemsize + (4 if c.logit_cap is None else 12))
    inputs = 0 if c.layer_inputs is None else 4 * c.layer_inputs.width  # kept for the pass, and made of three others
    return num_rows * (2 * c.hidden_size + inputs) * itemsize + max(rows * widths * itemsize + fp32 + attention, head)


def _attention_bytes(
    config: ModelConfig, num_rows: int, num_keys: int, itemsize: int, kv: KVFormat, device: DeviceKind
) -> int:
    """Bytes of masks, scores, results and unpacked keys of attention, at once or by parts."""
    layouts = [layout for layout in kv_layouts(config) if layout is not None]
    is_whole, is_capped = config.has_whole_attention, config.attention_cap is not None
    heads, copies = config.mask_heads, 1 + 2 * itemsize  # the mask as bool, as numbers, and as aligned numbers
    each = (kv.unpacked_bytes(layout, num_keys, itemsize, device, is_whole=is_whole) for layout in layouts)
    unpacked = max(each, default=0)  # a head may have no layer
    elements = heads * num_rows * num_keys
    if is_whole:
        return elements * copies + unpacked
    at_once = min(elements, MASK_ELEMENTS) if kv.is_plain else 0
    total = at_once * copies
    if is_capped:  # scores and two intermediate results, in fp32
        total += 12 * max(at_once, min(CAPPED_SCORES, at_once * max(layout.num_heads for layout in layouts)))
    if kv.is_plain and elements <= MASK_ELEMENTS:
        return total
    rows = num_rows * config.num_heads
    by_formula = reason_for_formula(config.largest_head, itemsize, config.attention_cap, device) is not None
    scores = rows * min(num_keys, most_scored_keys(rows)) if by_formula else 0
    masks = (heads if device.repeats_masks else 1) * num_rows * min(num_keys, MASKED_KEYS) * copies
    return max(total, masks + 4 * (3 * scores + 6 * rows * config.largest_head) + device.split_bytes + unpacked)


class SharedForward(NamedTuple):
    """How a text's round joins those of other texts in one forward.

    num_before: rows of the chain before its last one whose states `logits` takes, too. logits(states, is_after_chain,
    num_nodes): of the round.
    """

    text: CachedDecoder
    num_before: int
    logits: Callable[[Tensor, bool, int], Tensor]


class CachedDecoder:
    """A decoder with the KV cache of one text. The scheduler uses it for target and draft.

    attention: is told what the text's last token attends to in each pass, if a draft asks for it.
    """

    attention: ChunkAttention | None = None
    _keeps_all = False

    def __init__(self, decoder: Decoder, capacity: int = 0, *, keeps_all: bool = False) -> None:
        """capacity: entries to reserve at once, so that the cache is not copied when it grows.

        keeps_all: no entries are dropped, because a draft reads them, too.
        """
        self.decoder = decoder
        self._keeps_all = keeps_all
        self.cache = self._new_cache()
        self.cache.reserve(capacity)

    def _new_cache(self) -> SequenceCache:
        return self.decoder.new_cache(forgets=False if self._keeps_all else None)

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
        accelerator_of(self.device).current_stream.synchronize()

    @torch.inference_mode()
    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        """Logits fp32 [(1 if chain else 0) + R, vocab]: after the chain's last token, then after each tree node.

        chain: tokens of the certain text; they are committed. tokens, depths [R]: nodes, which become pending; the
        root's children have depth 1 and follow the committed text. parents [P + R]: as in `TokenTree`, of
        the pending region (P earlier nodes, then these R), in which parents come before their children.
        """
        return self.decoder.head(self.states(chain, tokens, depths, parents))

    @torch.inference_mode()
    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray, before: int = 0
    ) -> Tensor:
        """The states that `score` computes logits from: `Decoder.normed` states [(1 if chain else 0) + R, hidden].

        before: also return the states of up to `before` rows of the chain before its last one.
        """
        while len(chain) > PASS_ROWS + before:
            pass_together([(self, TextRows.of_chain(chain[:PASS_ROWS]))])
            chain = chain[PASS_ROWS:]
        hidden = pass_together([(self, TextRows(chain, tokens, depths, parents))])
        return self.decoder.normed(hidden[max(len(chain) - 1 - before, 0) :])

    def joining(self, chain: Sequence[int]) -> SharedForward | None:
        """How a round with this chain joins others; None if it has a forward of its own."""
        return SharedForward(self, 0, lambda states, is_after_chain, num_nodes: self.decoder.head(states))

    def score_rows(
        self,
        chain: Sequence[int],
        tokens: IntArray,
        depths: IntArray,
        parents: IntArray,
        layers: Collection[int] = (),
    ) -> RowLogits:
        """`score`, with each row's logits computed on first use.

        layers: see `score_together`.
        """
        return score_together([(self, TextRows(chain, tokens, depths, parents))], layers)[0]

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

    def begin_pass(self, rows: TextRows) -> tuple[Tensor | None, AppendedRows]:
        """Hidden states [T, hidden] of these rows before `layers`, and their places.

        None instead of states: the embeddings of the rows' tokens, which texts of a pass look up together.
        """
        appended = self.decoder.rows(rows, self.cache)
        return None, appended if self.attention is None else replace(appended, attention=self.attention)

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """Commit the pending nodes `path`, keep the nodes `pending` below them (both ascending), drop the others."""
        self.cache.keep(path, pending)

    def truncate(self, length: int) -> None:
        """Drop the text from position `length` on."""
        self.cache.truncate(length - self.cache.num_dropped)

    def drop(self) -> None:
        """Drop the whole text, and free its memory."""
        self.cache = self._new_cache()


TextPass = tuple[CachedDecoder, TextRows]


@torch.inference_mode()
def pass_together(texts: Sequence[TextPass], after: AfterLayer | None = None) -> Tensor:
    """One pass of the same decoder over rows of several texts: hidden states [T, hidden], text after text.

    Every text has at least one row. Each text's rows become committed (chains) and pending (nodes) in its own cache, as
    in `CachedDecoder.score`. The weights are streamed once. after: see `Decoder.through`.
    """
    first = texts[0][0]
    begun = [text.begin_pass(rows) for text, rows in texts]
    states = [hidden for hidden, _ in begun if hidden is not None]
    if not states:
        states = [first.decoder.embed(torch.tensor([token for _, rows in texts for token in rows.token_ids]))]
    hidden = states[0] if len(states) == 1 else torch.cat(states)
    places = [appended for _, appended in begun]
    joined = places[0] if len(places) == 1 else JoinedRows(first.decoder.config, places)
    if after is not None and first.layers.start:
        after(first.layers.start - 1, hidden)
    hidden = first.decoder.through(hidden, joined, first.layers, after)
    for text, text_rows in texts:
        text.cache.append(len(text_rows.chain), len(text_rows.tokens))
    return hidden


def score_together(texts: Sequence[TextPass], layers: Collection[int] = ()) -> list[RowLogits]:
    """`pass_together`; for each text the logits of [(1 if chain else 0) + R] rows, each computed on first use.

    layers: also keep the hidden states after these layers (from 0), of all rows (`RowLogits.layer_states`). Raises
    ValueError for a layer that is not one of `observable_layers`.
    """
    if unknown := set(layers) - set(texts[0][0].observable_layers):
        raise ValueError(f"no hidden states after layer {min(unknown)}, only after {texts[0][0].observable_layers}")
    tapped: dict[int, Tensor] = {}

    def after(layer: int, hidden: Tensor) -> None:
        if layer in layers:
            tapped[layer] = hidden.clone()

    hidden = pass_together(texts, after if layers else None)
    ends = list(accumulate(len(rows) for _, rows in texts))
    each = [
        RowLogits(
            text.decoder,
            hidden[begin:end],
            max(len(rows.chain) - 1, 0),
            {layer: states[begin:end] for layer, states in tapped.items()},
        )
        for (text, rows), begin, end in zip(texts, (0, *ends), ends, strict=False)
    ]
    RowLogits.share(each)
    return each


def random_decoder(config: ModelConfig, seed: int, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder of the shape `config` with random weights. As a draft it must not change the text."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (0.1 * torch.randn(shape, generator=generator)).to(device, dtype)
        for name, shape in wanted_shapes(config).items()
    }
    return Decoder(config, RamWeights.from_tensors(tensors, layer_prefix=LAYER_PREFIX), dtype=dtype, device=device)
