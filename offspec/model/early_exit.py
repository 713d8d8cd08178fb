"""The target as its own draft: its first N layers, a trained exit layer or none, and its own head.

With an exit layer this is EESD (2406.03853, section 3.1), without one LayerSkip (2404.16710, section 4.3). The first N
layers are computed once for drafting and verifying. A text has three caches: the *trunk* (layers 1 .. N,
and their hidden states), the exit layer's, and the *rest* (layers N + 1 on). Drafting takes rows through the trunk and
the exit layer. The verifying pass takes the sent nodes' hidden states from the trunk, first computes those that the
draft never expanded, and continues with layer N + 1. Shared rows are found by content: the trunk stores the token and
the parent of each pending node, so neither the drafter nor the engine reports them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device
from offspec.loaders.streaming.weights import RamWeights
from offspec.scheduler.params import MAX_NODES
from offspec.scheduler.trees.token_tree import ROOT, IntArray

from .cuda_graphs import USES_BEFORE_RECORDING, RoundBuffers, StaticRounds
from .decoder import CachedDecoder, Decoder
from .memory.sequence_cache import SequenceCache
from .parts.part import PassRows
from .pass_rows import AppendedRows, TextRows

ABSENT = -2  # in place of a row: the node is not in the trunk


class EarlyExit(Decoder):
    """A decoder of one or no layer after the target's first `num_first` layers, with the target's norm and head."""

    def __init__(
        self, target: Decoder, num_first: int, layer: Mapping[str, Tensor] | None, dtype: torch.dtype | None = None
    ) -> None:
        """layer: the exit layer's weights by their short names; None: there is none.

        dtype: of its arithmetic; None is the target's.
        """
        assert 1 <= num_first < target.config.num_layers
        config = target.config.only_layers([num_first])
        if layer is None:
            config = replace(config.only_layers([]), layer_inputs=None)
        names = (*config.final_norm_names, config.head_name)
        layers = [] if layer is None else [dict(layer)]
        weights = RamWeights(layers, {name: target.weights.shared(name) for name in names})
        caches = target.make_layer_caches
        super().__init__(config, weights, dtype=dtype or target.dtype, device=target.device, make_layer_caches=caches)
        self.num_first = num_first
        self._head_dtype = target.dtype

    def linear_logits(self, states: Tensor) -> Tensor:
        """`Decoder.linear_logits` in the target's dtype; the layer may have another dtype."""
        return super().linear_logits(states.to(self._head_dtype))

    def taught(self, layer: Mapping[str, Tensor], hidden: Tensor, rows: PassRows) -> Tensor:
        """fp32 logits [T, vocab] of hidden states [T, hidden] with `layer` as the weights; has gradients."""
        hidden = self.blocks[0].forward(hidden, self.layer_weights(layer), rows, 0, len(hidden))
        return self.head(self.normed(hidden))


def shared_text(
    target: Decoder, exit_layer: EarlyExit, capacity: int = 0, buffers: RoundBuffers | None = None
) -> tuple[SharedTarget, SharedDraft]:
    """An empty text for target and draft, which share a trunk. capacity: entries to reserve.

    buffers: of static rounds through the first layers; None: there are none.
    """
    trunk = Trunk(target, exit_layer.num_first, buffers)
    views = SharedTarget(trunk), SharedDraft(trunk, exit_layer)
    for view in views:
        view.reserve(capacity)
    return views


class Trunk:
    """The first layers' KV cache and hidden states of one text. num_rows: rows computed by these layers so far.

    The committed prefix is the known text. The pending region has the draft's nodes in its order; between a verifying
    pass and its verdict, the nodes of this pass alone follow. Hidden states are kept until all `readers`, the caches of
    exit and rest, have used them.
    """

    def __init__(self, decoder: Decoder, num_layers: int, buffers: RoundBuffers | None = None) -> None:
        """buffers: see `shared_text`."""
        self.decoder = decoder
        self.layers = range(num_layers)
        self._buffers = buffers
        self._new_cache()
        self.readers: list[SequenceCache] = []
        self.num_rows = 0
        self._hidden: list[Tensor] = []  # parts of [slots from _first on, hidden]
        self._first = 0
        self._tokens = np.empty(0, dtype=np.int64)  # of pending nodes
        self.parents = np.empty(0, dtype=np.int64)  # of pending nodes, as rows of the pending region or ROOT
        self._accepted: list[int] = []

    def _new_cache(self) -> None:
        self.cache = self.decoder.new_cache(self.layers, forgets=False)
        self._rounds: StaticRounds | None = None
        if self._buffers is not None:
            self._rounds = StaticRounds(self._buffers, self.cache, uses_before=USES_BEFORE_RECORDING)

    def advance(self, rows: TextRows) -> None:
        """Take a chain and nodes through the first layers."""
        if not len(rows):
            return  # the draft may have computed all rows of the target's pass
        hidden = None
        if self._rounds is not None and not rows.chain:
            hidden = self._rounds.run(rows.chain, rows.tokens, rows.depths, rows.parents)
        if hidden is None:
            embedded = self.decoder.embed(torch.tensor([*rows.chain, *rows.tokens.tolist()]))
            appended = self.decoder.rows(rows, self.cache)
            self._hidden.append(self.decoder.through(embedded, appended, self.layers))
            self.cache.append(len(rows.chain), len(rows.tokens))
        else:
            self._hidden.append(hidden.clone())  # the next round overwrites it
        self._tokens = np.concatenate((self._tokens, rows.tokens))
        self.parents = np.append(self.parents, rows.parents[len(self.parents) :])
        self.num_rows += len(rows)

    def hidden(self, slots: Sequence[int]) -> Tensor:
        """Hidden states [len(slots), hidden] after the first layers, as a copy.

        The first of `slots` is the smallest; no slot may be before the kept hidden states.
        """
        rows = to_device(torch.tensor(slots), self.decoder.device) - self._first
        last = sum(len(part) for part in self._hidden[:-1])
        if len(slots) and slots[0] - self._first >= last:  # a draft's round needs the last part only, no concatenation
            return self._hidden[-1][rows - last]
        return self._joined()[rows]

    def find(self, tokens: IntArray, parents: IntArray) -> IntArray:
        """[R]: the pending rows of a tree's nodes (parents first); ABSENT for nodes that are not in the trunk."""
        places = {key: row for row, key in enumerate(zip(self.parents.tolist(), self._tokens.tolist(), strict=True))}
        rows: list[int] = []
        for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
            above = ROOT if parent == ROOT else rows[parent]
            rows.append(places.get((above, token), ABSENT))
        return np.array(rows, dtype=np.int64)

    def accept(self, rows: Sequence[int]) -> None:
        """Store the accepted rows of the target's verdict until the draft's `keep` commits them."""
        self._accepted = list(rows)

    def keep(self, path: Sequence[int], pending: Sequence[int], num_drafted: int) -> None:
        """`SequenceCache.keep` in the draft's numbering; commits accepted nodes after its `num_drafted`, too."""
        path = [*path, *(row for row in self._accepted if row >= num_drafted)]
        start = self.cache.length - self._first
        stay = [*range(start), *(start + row for row in (*path, *pending))]
        self._hidden = [self._joined()[to_device(torch.tensor(stay, dtype=torch.long), self.decoder.device)]]
        renumbered = np.full(self.cache.pending + 1, ROOT)  # index ROOT (-1) is the last entry; committed nodes too
        renumbered[list(pending)] = np.arange(len(pending))
        self._tokens, self.parents = self._tokens[list(pending)], renumbered[self.parents[list(pending)]]
        self.cache.keep(path, pending)
        self._accepted = []
        # Drop the kept hidden states that all readers have read.
        count = max(0, min(cache.length for cache in self.readers) - self._first)
        self._hidden, self._first = [self._joined()[count:].clone()], self._first + count

    def truncate(self) -> None:
        """Drop the text that no reader has, and all pending nodes."""
        self.cache.truncate(min(self.cache.length, max(cache.length for cache in self.readers)))
        lengths = [cache.length for cache in self.readers]
        if min(lengths) < self._first or max(lengths) > self.cache.length:  # layers with states go back to some lengths
            self._go_back_together()
        length = self.cache.length
        self._hidden = [self._joined()[: max(0, length - self._first)]]
        self._first = min(self._first, length)
        self._tokens, self.parents, self._accepted = self._tokens[:0], self.parents[:0], []

    def _go_back_together(self) -> None:
        """Truncate all caches to a length that all can go back to."""
        caches = [self.cache, *self.readers]
        while len(lengths := {cache.length for cache in caches}) > 1:
            for cache in caches:
                cache.truncate(min(*lengths, cache.length))

    def drop(self) -> None:
        """Drop the whole text, also that of the readers, and free the memory of the first layers."""
        for cache in self.readers:
            cache.truncate(0)
        self._new_cache()
        self.truncate()

    @property
    def num_hidden(self) -> int:
        """The number of rows with kept hidden states."""
        return sum(len(part) for part in self._hidden)

    def _joined(self) -> Tensor:
        """All kept hidden states as one tensor."""
        if len(self._hidden) != 1:
            empty = torch.empty(
                0, self.decoder.config.hidden_size, dtype=self.decoder.dtype, device=self.decoder.device
            )
            self._hidden = [torch.cat(self._hidden) if self._hidden else empty]
        return self._hidden[0]


class SharedTarget(CachedDecoder):
    """The target over a trunk; `length` and `cache` belong to its other layers."""

    def __init__(self, trunk: Trunk) -> None:
        self.decoder = trunk.decoder
        self.trunk = trunk
        self._layers = range(len(trunk.layers), trunk.decoder.config.num_layers)
        self.cache = trunk.decoder.new_cache(self._layers, forgets=False)
        self._rows = np.empty(0, dtype=np.int64)  # rows in the trunk of the tree that waits for its verdict
        trunk.readers.append(self.cache)

    @property
    def observable_layers(self) -> range:
        """From the trunk's last layer on: earlier layers' states of the draft's pass are not kept."""
        return range(self._layers.start - 1, self._layers.stop)

    @property
    def layers(self) -> range:
        return self._layers

    def begin_pass(self, rows: TextRows) -> tuple[Tensor, AppendedRows]:
        trunk, chain = self.trunk, rows.chain
        if trunk.cache.pending and self.length + len(chain) > trunk.cache.length:
            trunk.truncate()  # the draft was given up before its `keep`
        nodes = trunk.find(rows.tokens, rows.parents)
        absent = np.flatnonzero(nodes == ABSENT)
        nodes[absent] = np.arange(trunk.cache.pending, trunk.cache.pending + len(absent))
        parents = np.append(trunk.parents, np.append(nodes, ROOT)[rows.parents[absent]])
        num_computed = trunk.cache.length - self.length  # tokens of the chain that the draft has computed
        trunk.advance(TextRows(chain[num_computed:], rows.tokens[absent], rows.depths[absent], parents))
        base = self.length + len(chain)
        hidden = trunk.hidden([*range(self.length, base), *(base + nodes).tolist()])  # the chain is never empty
        self._rows = nodes
        return hidden, self.decoder.rows(rows, self.cache)

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """`CachedDecoder.keep`; called once per pass, before the draft's."""
        assert not pending, "a target's tree arrives in one pass"
        self.cache.keep(path)
        self.trunk.accept(self._rows[list(path)].tolist())

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.trunk.truncate()

    def drop(self) -> None:
        self.trunk.drop()
        place = self.trunk.readers.index(self.cache)
        self.cache = self.trunk.readers[place] = self.decoder.new_cache(self._layers, forgets=False)


class SharedDraft(CachedDecoder):
    """The early exit over a trunk, a `TreeModel` for drafters; `length` and `cache` belong to the exit layer."""

    def __init__(self, trunk: Trunk, exit_layer: EarlyExit) -> None:
        super().__init__(exit_layer)
        self.trunk = trunk
        trunk.readers.append(self.cache)

    def reserve(self, capacity: int) -> None:
        super().reserve(capacity)
        self.trunk.cache.reserve(capacity + MAX_NODES)

    def begin_pass(self, rows: TextRows) -> tuple[Tensor, AppendedRows]:
        trunk, start = self.trunk, self.cache.size
        num_computed = trunk.cache.length - self.length  # tokens of the chain accepted without having been expanded
        trunk.advance(replace(rows, chain=rows.chain[num_computed:]))
        hidden = trunk.hidden(range(start, start + len(rows)))
        return hidden, self.decoder.rows(rows, self.cache)

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        num_drafted = self.cache.pending
        super().keep(path, pending)
        self.trunk.keep(path, pending, num_drafted)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.trunk.truncate()
