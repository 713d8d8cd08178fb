"""The rows of a pass: where they are in their texts, what they attend to, and whose children they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec.backends.backend import Backend
from offspec.backends.x86.row_attention import KeysOfRows, RunningAttention, Scores, Visible
from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.trees.token_tree import ROOT, IntArray

from .config import ModelConfig
from .memory.chunk_attention import ChunkAttention
from .memory.layer_memory import CHUNK_ROWS
from .memory.sequence_cache import SequenceCache
from .parts.kv_attention import KeyRange, Visibility, attend, attend_by_parts, merge_parts
from .parts.part import Attending, Entries, PassRows, RowsOfText
from .parts.split_attention import KeyPart, part_attention
from .rope import Rotations
from .row_attention import all_keys, key_parts, keys_from_begin, moved_to, visible_slots

# Rows of chains in one pass; a longer prompt takes several, because hidden states of all rows are in memory. Streaming
# the weights again takes less time than the arithmetic of so many rows. A multiple of CHUNK_ROWS: the same chunks.
PASS_ROWS = 16 * CHUNK_ROWS
MASK_ELEMENTS = 2**25  # heads of a group * rows * keys in one attention; limits the mask of a long text


@dataclass(frozen=True)
class TextRows:
    """One text's rows in a pass, see `CachedDecoder.score`: a chain, then R tree nodes."""

    chain: Sequence[int]
    tokens: IntArray
    depths: IntArray
    parents: IntArray

    @classmethod
    def of_chain(cls, chain: Sequence[int]) -> TextRows:
        """A chain without nodes."""
        none = np.empty(0, dtype=np.int64)
        return cls(chain, none, none, none)

    def __len__(self) -> int:
        return len(self.chain) + len(self.tokens)

    @property
    def token_ids(self) -> list[int]:
        """Of all rows."""
        return [*self.chain, *self.tokens.tolist()]

    @property
    def num_before(self) -> int:
        """P: nodes that are pending before these."""
        return len(self.parents) - len(self.tokens)


@dataclass(frozen=True)
class AppendedRows(RowsOfText):
    """`PassRows` of one text, appended to its memory.

    before: the slot of the last token before them, or ROOT. once: what parts compute once in a pass, by their own keys.
    attention: is told what the last certain token attends to; None: nobody asks.
    """

    rows: TextRows
    before: int
    cache: SequenceCache
    visibility: Visibility
    rotations: Rotations
    chunks: list[tuple[int, int]]
    backend: Backend
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    known_ranges: dict[int | None, list[KeyRange]] = field(default_factory=dict)
    known_slots: dict[int | None, Visible] = field(default_factory=dict)
    once: dict[object, Any] = field(default_factory=dict)
    inputs: Tensor | None = None
    attention: ChunkAttention | None = None

    @cached_property
    def parents(self) -> IntArray:
        """[T]: the slot of each row's parent; ROOT for a text's first token."""
        start, num_chain = self.visibility.start, len(self.rows.chain)
        slots = np.arange(start - 1, start + num_chain)  # of the certain tokens from the last one before these rows on
        slots[0] = self.before
        above = self.rows.parents[self.rows.num_before :]
        nodes = np.where(above == ROOT, slots[-1], above + self.visibility.region)
        return np.concatenate((slots[:-1], nodes))

    def attend(
        self,
        part: Attending,
        queries: Tensor,
        entries: Entries | None,
        first: int,
        last: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention to all keys at once, or by parts: of many keys, and of keys that are unpacked for each use."""
        layer, group = part.entries_of, queries.shape[1] // part.shape.num_kv_heads
        most = self.cache.most_read(layer)
        self.store(layer, entries, first)
        self.note_attention(part, queries, first, last)
        if self.backend.is_exact:
            visible, c = self.slots(first, last, part.window, group), part.config
            scores = Scores(attention_scale(part), c.attention_cap, sinks)
            if most is None and self.cache.beginning is None:
                return self.backend.attend_texts(queries, [all_keys(0, self.cache, layer, visible)], scores)
            few = keys_from_begin(self.cache, layer, visible)
            return self.backend.attend_slots(queries, few, visible.from_begin, scores)
        is_little = group * len(queries) * (self.visibility.start + last) <= MASK_ELEMENTS
        scale, cap = part.config.attention_scale, part.config.attention_cap
        if most is None and self.cache.beginning is None and is_little:
            begin, mask = self.visibility.first_seen(first, last, part.window), self.mask(first, last, part.window)
            keys, values = self.cache.read(layer, self.visibility.start + last, begin)
            mask = None if mask is None else mask[:, begin:]
            return attend(queries, keys, values, mask, scale=scale, cap=cap, sinks=sinks)
        parts = self.parts(layer, self.ranges(first, last, part.window), self.most_keys(part, queries))
        return attend_by_parts(queries, parts, scale=scale, cap=cap, sinks=sinks)

    def note_attention(self, part: Attending, queries: Tensor, first: int, last: int) -> None:
        """Tell `attention` what the last certain token attends to, if it is among rows first .. last, just stored."""
        row, layer = len(self.rows.chain) - 1, part.entries_of
        end = self.visibility.start + row + 1
        if self.attention is not None and first <= row < last and end >= self.attention.least_length:
            parts = self.parts(layer, [KeyRange(0, end, None)], self.cache.most_read(layer))
            scaled = queries[row - first] * attention_scale(part)
            self.attention.observe(layer, scaled, (each.keys for each in parts))

    def most_keys(self, part: Attending, queries: Tensor) -> int | None:
        """How many keys attention of queries [T, heads, D] may take at once; None: any number."""
        most_scored = part_attention(queries, part.config.attention_cap).most_keys(queries.shape[0] * queries.shape[1])
        limits = [limit for limit in (self.cache.most_read(part.entries_of), most_scored) if limit is not None]
        return min(limits, default=None)

    def parts(self, layer: int, ranges: Sequence[KeyRange], most: int | None, first: int = 0) -> Iterator[KeyPart]:
        """Keys and values of these slots from `first` on in the cache's layer `layer`, at most `most` at once."""
        pieces = (piece for each in ranges for piece in each.cut(self.cache.cuts(layer, each.first, each.end)))
        for whole in pieces:
            for each in whole.split(most or max(1, whole.end - whole.first)) if whole.first >= first else ():
                yield KeyPart(*self.cache.read(layer, each.end, each.first), each.mask)

    def exchange(self, layer: int, entries: Entries | None, first: int, last: int) -> Entries:
        self.store(layer, entries, first)
        return self.cache.read(layer, self.visibility.start + last)

    def store(self, layer: int, entries: Entries | None, first: int) -> None:
        """Store the entries of rows from `first` on, unless they are stored already."""
        if entries is not None:
            self.cache.write(layer, *entries, self.visibility.start + first)

    def send_places(self, config: ModelConfig) -> None:
        """Move what attention needs of the rows to the device before the first layer, because later ones would wait."""
        if not self.backend.is_exact:
            self.visibility.ancestors(0, self.visibility.num_nodes)
        elif len(self.chunks) == 1:
            for window in set(config.windows):
                self.slots(0, len(self), window, config.mask_heads)

    def slots(self, first: int, last: int, window: int | None, group: int) -> Visible:
        """`visible_slots`; if they are all rows', they are computed once per pass, otherwise in each layer."""
        if last - first < len(self):
            return self._seen(first, last, window, group)
        if window not in self.known_slots:
            self.known_slots[window] = self._seen(first, last, window, group)
        return self.known_slots[window]

    def _seen(self, first: int, last: int, window: int | None, group: int) -> Visible:
        visible = visible_slots(self.visibility, first, last, window, group)
        return moved_to(visible, self.cache.positions.device)

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

    They share every product with weights. Attention is each text's own, but rows of texts with a common beginning
    attend to it together, which reads its keys once (DeFT, 2404.00242).
    """

    def __init__(self, config: ModelConfig, texts: Sequence[AppendedRows]) -> None:
        self.texts = list(texts)
        self.rotations = Rotations(torch.cat([text.visibility.positions for text in texts]))
        inputs = [text.inputs for text in texts if text.inputs is not None]
        self.inputs = torch.cat(inputs) if inputs else None
        self.ends = list(accumulate(len(text) for text in texts))
        step = min(chunk_rows(config, text.visibility.start + len(text)) for text in texts)
        self.chunks = [(first, min(first + step, self.ends[-1])) for first in range(0, self.ends[-1], step)]
        self._known_slots = dict[tuple[int, ...], Visible]()

    def attend(
        self,
        part: Attending,
        queries: Tensor,
        entries: Entries | None,
        first: int,
        last: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        pieces = [RowPiece(*each) for each in by_text(self, first, last)]
        outputs, backend = dict[int, Tensor](), self.texts[0].backend
        groups = _by_beginning(pieces, part.window) if backend.shares_keys else [[piece] for piece in pieces]
        if backend.is_exact:
            alone = [some[0] for some in groups if len(some) == 1 and some[0].has_views(part.entries_of)]
            if alone:
                whole = _attend_at_once(backend, part, queries, entries, alone, sinks)
                if len(alone) == len(pieces):
                    return whole
                outputs = {piece.rows.start: whole[piece.rows] for piece in alone}
        for some in groups:
            if some[0].rows.start in outputs:
                continue
            if len(some) == 1:
                (piece,) = some
                rows = (queries[piece.rows], piece.of(entries), piece.first, piece.last)
                results = [piece.text.attend(part, *rows, sinks)]
            else:
                results = self._attend_together(part, queries, entries, some, sinks)
            outputs |= {piece.rows.start: result for piece, result in zip(some, results, strict=True)}
        return torch.cat([outputs[piece.rows.start] for piece in pieces])

    def _attend_together(
        self,
        part: Attending,
        queries: Tensor,
        entries: Entries | None,
        pieces: Sequence[RowPiece],
        sinks: Tensor | None,
    ) -> list[Tensor]:
        """Attention of texts that share as many entries: first to these, then to each one's own."""
        for piece in pieces:
            piece.text.store(part.entries_of, piece.of(entries), piece.first)
            piece.text.note_attention(part, queries[piece.rows], piece.first, piece.last)
        queries = torch.cat([queries[piece.rows] for piece in pieces])
        ends = list(accumulate(piece.last - piece.first for piece in pieces))
        rows = [slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
        if self.texts[0].backend.is_exact:
            return self._attend_exactly(part, queries, pieces, rows, sinks)
        shared, cache = pieces[0].text.cache.num_in_beginning, pieces[0].text
        scale, cap = part.config.attention_scale, part.config.attention_cap
        whole = [KeyRange(0, shared, None)]
        parts = cache.parts(part.entries_of, whole, cache.most_keys(part, queries))
        before = merge_parts(queries, parts, scale=scale, cap=cap, sinks=sinks)
        return [
            attend_by_parts(
                queries[some], piece.own_parts(part, queries[some]), scale=scale, cap=cap, before=before.of_rows(some)
            )
            for piece, some in zip(pieces, rows, strict=True)
        ]

    def _attend_exactly(
        self,
        part: Attending,
        queries: Tensor,
        pieces: Sequence[RowPiece],
        rows: Sequence[slice],
        sinks: Tensor | None,
    ) -> list[Tensor]:
        """`_attend_together` with the bits of each text alone."""
        cache, num_heads, layer = pieces[0].text.cache, part.shape.num_kv_heads, part.entries_of
        group, scores = queries.shape[1] // num_heads, Scores(attention_scale(part), part.config.attention_cap, sinks)
        most, shared = cache.most_read(layer), cache.num_in_beginning
        seen = [piece.text.slots(piece.first, piece.last, part.window, group) for piece in pieces]
        together = self._slots_together(seen)
        attention = RunningAttention.of(queries, num_heads, scores)
        for keys in key_parts(cache, layer, together, most, end=shared):
            attention.add(keys, together)
        results = list[Tensor]()
        for piece, visible, some in zip(pieces, seen, rows, strict=True):
            rest = attention.of_rows(some)
            for keys in key_parts(piece.text.cache, layer, visible, most, first=shared):
                rest.add(keys, visible)
            results.append(rest.final(queries[some]))
        return results

    def _slots_together(self, seen: Sequence[Visible]) -> Visible:
        """`Visible.together`; of whole texts once per pass, otherwise in each layer."""
        if len(self.chunks) > 1:
            return Visible.together(seen)
        key = tuple(map(id, seen))  # which the texts keep
        if key not in self._known_slots:
            self._known_slots[key] = Visible.together(seen)
        return self._known_slots[key]


@dataclass(frozen=True)
class RowPiece:
    """Rows first .. last of a text: the rows `rows` of those that go through a layer together."""

    text: AppendedRows
    first: int
    last: int
    rows: slice

    def of(self, entries: Entries | None) -> Entries | None:
        """Its own ones of those of all rows."""
        return None if entries is None else (entries[0][self.rows], entries[1][self.rows])

    def has_views(self, layer: int) -> bool:
        """Whether all keys of a layer can be read at once, as they are stored."""
        cache = self.text.cache
        return cache.beginning is None and cache.most_read(layer) is None

    def own_parts(self, part: Attending, queries: Tensor) -> Iterator[KeyPart]:
        """The keys that the text does not share."""
        text, ranges = self.text, self.text.ranges(self.first, self.last, part.window)
        return text.parts(part.entries_of, ranges, text.most_keys(part, queries), text.cache.num_in_beginning)


def _attend_at_once(
    backend: Backend,
    part: Attending,
    queries: Tensor,
    entries: Entries | None,
    pieces: Sequence[RowPiece],
    sinks: Tensor | None,
) -> Tensor:
    """Attention of each piece's rows to its text, in one call → [T, heads, D]; of other rows it means nothing."""
    layer, group = part.entries_of, queries.shape[1] // part.shape.num_kv_heads
    texts = list[KeysOfRows]()
    for piece in pieces:
        piece.text.store(layer, piece.of(entries), piece.first)
        if piece.text.attention is not None:
            piece.text.note_attention(part, queries[piece.rows], piece.first, piece.last)
        visible = piece.text.slots(piece.first, piece.last, part.window, group)
        texts.append(all_keys(piece.rows.start, piece.text.cache, layer, visible))
    return backend.attend_texts(queries, texts, Scores(attention_scale(part), part.config.attention_cap, sinks))


def _by_beginning(pieces: Sequence[RowPiece], window: int | None) -> list[list[RowPiece]]:
    """Pieces of texts that share as many entries together, if each of their rows sees these. Others are alone."""
    groups = dict[object, list[RowPiece]]()
    for piece in pieces:
        cache, end = piece.text.cache, piece.text.visibility.start + piece.last
        is_alone = cache.beginning is None or (window is not None and end > window)
        key = piece.rows.start if is_alone else (id(cache.beginning), cache.num_in_beginning)
        groups.setdefault(key, []).append(piece)
    return list(groups.values())


def attention_scale(part: Attending) -> float:
    """Of scores, as a number."""
    return part.config.attention_scale or part.shape.head_dim**-0.5


def by_text(rows: PassRows, first: int, last: int) -> Iterator[tuple[AppendedRows, int, int, slice]]:
    """The texts of rows first .. last: a text, the range of these rows in it, and their slice of first .. last."""
    if isinstance(rows, AppendedRows):
        yield rows, first, last, slice(0, last - first)
        return
    assert isinstance(rows, JoinedRows), "rows that are in no text's memory"
    for text, start, stop in zip(rows.texts, (0, *rows.ends), rows.ends, strict=False):
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            yield text, begin - start, end - start, slice(begin - first, end - first)


def chunk_rows(config: ModelConfig, num_keys: int) -> int:
    """How many rows go through a layer together if attention has `num_keys` keys.

    A mask over all keys limits them.
    """
    if not config.has_whole_attention:
        return CHUNK_ROWS
    return max(1, min(CHUNK_ROWS, MASK_ELEMENTS // (config.mask_heads * max(1, num_keys))))


def placed(cache: SequenceCache, rows: TextRows) -> Tensor:
    """Positions [T] of rows after the text in `cache`, on its device."""
    base = cache.next_position + len(rows.chain)
    positions = torch.cat(
        (torch.arange(cache.next_position, base), torch.as_tensor(rows.depths, dtype=torch.long) + (base - 1))
    )
    return to_device(positions, cache.positions.device)
