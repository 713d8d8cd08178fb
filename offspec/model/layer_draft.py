"""A draft made of the target's own layers: all of them in fewer bits, or some of them as they are.

Examples: SubSpec's low-bit copies (2509.18344), skipped layers (Draft & Verify, 2309.08168). In each of them a layer's
keys and values estimate what the target computes there. So `LayerDraftText` reads the target's entries, those of a
prompt included (`shared_cache`), and `WindowOfTarget` copies a few of them (MagicDec, 2408.11049). This module knows
nothing of files, or of how trees grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offspec.loaders.streaming.weights import LayerView
from offspec.scheduler.trees.token_tree import IntArray

from .cuda_graphs import USES_BEFORE_RECORDING, WIDTHS, RoundBuffers, StaticRounds
from .decoder import CachedDecoder, Decoder
from .memory.chunk_attention import CHUNK, NUM_SINKS, ChunkAttention, num_chunks, positions_of
from .memory.draft_window import LEAST_SLACK, most_entries
from .memory.sequence_cache import SequenceCache
from .memory.shared_cache import GapVisibility, SharedCache
from .parts.kv_attention import Visibility
from .pass_rows import TextRows


class LayerDraft(Decoder):
    """Some layers of a target, in their order, with its embedding, norm and head. numbers: the layers of the target."""

    def __init__(self, target: Decoder, numbers: Sequence[int], weights: LayerView) -> None:
        """weights: as many layers as `numbers`."""
        assert weights.num_layers == len(numbers)
        super().__init__(
            target.config.only_layers(numbers),
            weights,
            dtype=target.dtype,
            device=target.device,
            make_layer_caches=target.make_layer_caches,
        )
        self.numbers = tuple(numbers)

    def visibility(self, rows: TextRows, cache: SequenceCache, positions: Tensor) -> Visibility:
        """`Decoder.visibility` without the gap of a shared cache."""
        if not isinstance(cache, SharedCache):
            return super().visibility(rows, cache, positions)
        return GapVisibility(cache.size, positions, cache.positions, rows.parents, len(rows.tokens), cache.gap)


class LayerDraftText(CachedDecoder):
    """The cached text of a `LayerDraft`, in its target's KV cache.

    The last token of a pass is the target's choice, which the target has not scored yet. If the draft has scored it,
    its entry is the draft's own until the next pass.
    """

    decoder: LayerDraft
    cache: SharedCache

    def __init__(self, decoder: LayerDraft, target: CachedDecoder, buffers: RoundBuffers | None = None) -> None:
        """buffers: of the draft's static rounds; None: it has none."""
        self.decoder = decoder
        self.cache = SharedCache(target, decoder.numbers)
        self._rounds: StaticRounds | None = None
        if buffers is not None:
            self._rounds = StaticRounds(buffers, self.cache, uses_before=USES_BEFORE_RECORDING)

    def begin(self, room: int) -> None:
        """Start a request whose trees have at most `room` nodes, from the target's entries."""
        self.cache.begin(room)

    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray, before: int = 0
    ) -> Tensor:
        """`CachedDecoder.states`; the states of a static round are valid until the next call."""
        states = None
        if self._rounds is not None and max(len(chain), len(tokens)) <= WIDTHS[-1]:
            self.cache.extend(len(chain) + len(tokens))  # places the first own entries
            states = self._rounds.run(chain, tokens, depths, parents)
        if states is None:
            return super().states(chain, tokens, depths, parents, before)
        return states[-1 - before :] if chain else states

    def joining(self, chain: Sequence[int]) -> None:
        """Its rounds may be replayed."""

    def reserve(self, capacity: int) -> None:
        """Nothing: the target's cache has room for the draft's entries (`RequestCaches.num_shared`)."""


class WindowOfTarget(CachedDecoder):
    """The cached text of a `LayerDraft` with a KV cache of its own: copies of some of the target's entries.

    The target's cache may lie elsewhere, as in RAM. There are NUM_SINKS first entries, the last ones (StreamingLLM,
    2309.17453; MagicDec, 2408.11049, section 4), and as many in chunks of the text between them, to which the text's
    last token attends most in the target's pass (`memory.chunk_attention`). Each layer has chunks of its own, chosen
    anew after each pass. Behind these are the entries of nodes. `length` counts the text's tokens. All entries keep
    their positions: the target was trained on distances as long.
    """

    decoder: LayerDraft

    def __init__(self, decoder: LayerDraft, target: CachedDecoder, window: int, num_rows: int) -> None:
        """window: first, last and chosen entries together, but for the sinks and what `draft_window.slack` adds.

        num_rows: the most entries beside those of the window: a prompt that the draft reads, and pending nodes.
        """
        super().__init__(decoder, most_entries(window) + num_rows, keeps_all=True)
        self._target = target
        self._window = window
        self._num_chunks = window // 2 // CHUNK
        self._num_exact = 0  # first tokens of the text whose entries are the target's
        self.chunks: list[list[int]] = []  # of each layer, in the order of their slots; behind the sinks
        self._attention = target.attention = ChunkAttention(most_entries(window))

    @property
    def _num_kept(self) -> int:
        """The slots of sinks and chunks, which stay where they are; the last entries follow."""
        return NUM_SINKS + self._num_chunks * CHUNK

    def begin(self, room: int) -> None:
        """Start a request from the target's entries. room: of no importance here."""
        self._attention.clear()
        self._take(self._target.length)

    def reserve(self, capacity: int) -> None:
        """Nothing: the room does not grow with the text."""

    def truncate(self, length: int) -> None:
        """Drop the text from position `length` on, and take the target's entries before it."""
        self._attention.clear()
        self._take(min(length, self._target.length))

    @torch.inference_mode()
    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """As `CachedDecoder.keep`, to be called after the target's, whose entries replace those of `path`.

        The target has not scored the last token of a pass, which it chose itself. If `path` ends with this token, its
        entry stays the draft's.
        """
        length = self._target.length
        super().keep(path, pending)
        if (missing := length - self.length) > 0:
            assert not pending, "nodes below a token that the draft has not scored"
            if missing > LEAST_SLACK:  # the target has read a prompt
                self._take(length)
                self._choose()
                return
            self.cache.extend(missing)
            slots = self.cache.length + torch.arange(missing, device=self.device)
            self.cache.positions[slots] = slots + self.cache.num_dropped
            self.cache.append(missing, 0)
        self._copy(self._num_exact, length, self._num_exact - self.cache.num_dropped)
        self._num_exact = length
        if self.cache.length > most_entries(self._window):
            self.cache.drop(self._num_kept, self.cache.length - NUM_SINKS - self._window)
        self._choose()

    @torch.inference_mode()
    def _take(self, length: int) -> None:
        """Replace all entries by the target's of a text of `length` tokens: the first ones, until chunks are chosen."""
        self.cache.truncate(0)
        num_kept = min(self._num_kept, length)
        first = max(num_kept, length - (self._window - self._num_chunks * CHUNK))
        self.cache.begin(num_kept + length - first)
        self.cache.num_dropped = first - num_kept
        self.cache.positions[num_kept : self.cache.length] += self.cache.num_dropped
        self._copy(0, num_kept, 0)
        self._copy(first, length, num_kept)
        self._num_exact = length
        self.chunks = [list(range(self._num_chunks)) for _ in self.decoder.numbers]

    @torch.inference_mode()
    def _choose(self) -> None:
        """Copy the chunks with the most attention to the slots of those that have less."""
        if not self.cache.num_dropped:
            return
        end = num_chunks(self.cache.num_dropped + self._num_kept)
        chosen_of = self._attention.best(self.decoder.numbers, self._num_chunks, end)
        for layer, number in enumerate(self.decoder.numbers):
            held = self.chunks[layer]
            chosen = chosen_of.get(number, held)
            new = [chunk for chunk in chosen if chunk not in held]
            free = [place for place, chunk in enumerate(held) if chunk not in chosen]
            for chunk, place in zip(new, free, strict=True):
                held[place] = chunk
                where = positions_of(chunk)
                self._copy_layer(layer, where.start, where.stop, positions_of(place).start)

    def _copy(self, first: int, end: int, slot: int) -> None:
        """Copy the target's entries of positions first .. end to slots from `slot` on."""
        for layer in range(len(self.decoder.numbers)) if first < end else ():
            self._copy_layer(layer, first, end, slot)

    def _copy_layer(self, layer: int, first: int, end: int, slot: int) -> None:
        number = self.decoder.numbers[layer]
        (mine, place), (exact, exact_place) = self.cache.kv_of(layer), self._target.cache.kv_of(number)
        copied = exact.stored(exact_place, end, first)  # as they are stored, wherever that is
        for rows, others in zip(mine.stored(place, slot + end - first, slot), copied, strict=True):
            rows.copy_(others)
