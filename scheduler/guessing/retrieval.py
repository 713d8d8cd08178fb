"""Retrieval (REST, 2311.08252): proposes continuations of the last tokens in other texts, by a sorted index.

`SuffixIndex` consists of two arrays of integers, in memory or mapped from a file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..trees.sampling import Sampler
from ..trees.token_tree import IntArray, TokenTree
from ..trees.verify import TargetPass
from .lookup import NO_TOKEN, Matches, match_reliability
from .reliability import Reliability

Int32Array = npt.NDArray[np.int32]

MAX_MATCH = 16  # number of tokens in a sort key, read backwards
SHARD_TOKENS = 1 << 22  # shards are sorted separately, so that sorting takes some 200 MB for texts of any length
_BEFORE = NO_TOKEN - 1  # padding before the first token of a shard


class SuffixIndex:
    """Finds a sequence of tokens in `tokens` [N], in some 20 steps per matching token.

    order [N]: places in `tokens`, sorted in each shard by the tokens that end there, read backwards. So all places
    where the same n tokens end are adjacent, and n + 1 tokens narrow that range. tokens: NO_TOKEN between texts. With
    one shard, order may leave places out.
    """

    def __init__(self, tokens: Int32Array, order: Int32Array) -> None:
        self.tokens, self.order = np.asarray(tokens), np.asarray(order)  # a memmap's own indexing is slow

    def continuations(self, context: Sequence[int], max_matches: int, depth: int) -> tuple[IntArray, IntArray]:
        """rows [M, depth]: continuations of the context's end, longest match first, padded with NO_TOKEN; lengths [M].

        If more than `max_matches` matches have equal length, an even sample over their preceding tokens is used.
        """
        places, lengths = self._ends(context, max_matches)
        ahead = places[:, None] + 1 + np.arange(depth)
        inside = ahead < len(self.tokens)
        rows = np.where(inside, self.tokens[np.where(inside, ahead, 0)], NO_TOKEN)
        return rows.astype(np.int64), lengths

    def run_of(self, context: Sequence[int], ahead: Sequence[int], max_matches: int) -> tuple[int, int, int]:
        """Where the most tokens of `ahead` follow a match of the context's end, among `max_matches` of the longest.

        Returns the place of the first of these tokens, their number, which may be 0, and the match's length.
        """
        rows, lengths = self.continuations(context, max_matches, len(ahead))
        if not len(rows):
            return 0, 0, 0
        runs = np.logical_and.accumulate(rows == np.array(ahead, dtype=np.int64), axis=1).sum(1)
        best = int(runs.argmax())
        return int(self._ends(context, max_matches)[0][best]) + 1, int(runs[best]), int(lengths[best])

    def _ends(self, context: Sequence[int], max_matches: int) -> tuple[IntArray, IntArray]:
        """places [M] where a match of the context's end ends, longest match first; lengths [M]."""
        shards = range(0, len(self.tokens), SHARD_TOKENS)
        matches = [part for first in shards for part in self._matches(context, first, max_matches)]
        places = np.concatenate([np.empty(0, dtype=np.int64), *(places for places, _ in matches)])
        lengths = np.concatenate([np.empty(0, dtype=np.int64), *(np.full(len(p), length) for p, length in matches)])
        longest = np.argsort(-lengths, kind="stable")[:max_matches]
        return places[longest], lengths[longest]

    def _matches(self, context: Sequence[int], first: int, max_matches: int) -> Iterator[tuple[IntArray, int]]:
        """Places in one shard where the context's last tokens end, and the match lengths, longest first."""
        stretches = self._stretches(context, first)
        inner = (0, 0)
        while stretches and max_matches > 0:
            length, outer = len(stretches), stretches.pop()
            # The places of the outer range without the inner one, which it contains.
            before = inner[0] - outer[0] if inner[1] > inner[0] else 0
            gap = inner[1] - inner[0]
            total = outer[1] - outer[0] - gap
            picks = np.linspace(0, total - 1, min(total, max_matches)).astype(np.int64)
            picks += outer[0] + np.where(picks >= before, gap, 0)
            max_matches -= len(picks)
            inner = outer
            yield self.order[picks].astype(np.int64), length

    def _stretches(self, context: Sequence[int], first: int) -> list[tuple[int, int]]:
        """For n = 1, 2, … while matches exist: the range of `order` where the context's last n tokens end."""
        tokens, stretches = self.tokens, list[tuple[int, int]]()
        start, end = first, min(first + SHARD_TOKENS, len(self.order))
        for back, token in enumerate(reversed(context[-MAX_MATCH:])):

            def backwards(place: int, back: int = back) -> int:
                return int(tokens[place - back]) if place - back >= first else _BEFORE

            start = bisect_left(self.order, token, start, end, key=backwards)
            end = bisect_right(self.order, token, start, end, key=backwards)
            if start == end:
                break
            stretches.append((start, end))
        return stretches


def sorted_places(tokens: Int32Array, first: int, last: int) -> Int32Array:
    """The places first … last - 1, a shard, sorted by the MAX_MATCH tokens that end there, read backwards.

    Prefix doubling (Manber and Myers 1993), until ranks distinguish MAX_MATCH tokens; equal keys are sorted by place.
    """
    rank = tokens[first:last].astype(np.int64) - _BEFORE  # 0 means before the shard
    width = 1
    while True:
        keys = rank << 32
        keys[width:] |= rank[:-width]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        rank[order] = np.cumsum(np.diff(keys, prepend=keys[:1]) != 0) + 1
        width *= 2
        if width >= MAX_MATCH:
            return (order + first).astype(np.int32)


class Retrieval:
    """Looks up the end of the text in other texts. One instance may serve many requests."""

    MAX_MATCHES = 64

    def __init__(self, index: SuffixIndex, reliability: Reliability | None = None) -> None:
        self._index = index
        self.reliability = reliability or match_reliability()
        self._matches = Matches(self.reliability)

    def guess(self, text: Sequence[int], sampler: Sampler, max_nodes: int, max_depth: int) -> TokenTree:
        rows, lengths = self._index.continuations(text[-MAX_MATCH:], self.MAX_MATCHES, max_depth)
        rows = np.where(rows < sampler.vocab_size, rows, NO_TOKEN)  # the tokenizer may have more tokens than the model
        return self._matches.tree(rows, lengths, sampler, len(text), max_nodes)

    def observe(self, done: TargetPass) -> None:
        self._matches.observe(done.verdict)
