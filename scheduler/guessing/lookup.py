"""Guessers propose trees without a model: a continuation of the last tokens from an earlier place often recurs.

Prompt lookup finds the longest n-grams at the text's end that also occur earlier, in prompt or output (Saxena 2023;
LLMA, 2304.04487), and merges their continuations into one tree. The probability of a proposal depends on the length of
the match and on the agreement of the matches; `reliability` learns it at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..trees.sampling import Sampler
from ..trees.token_tree import LOOKUP, ROOT, IntArray, TokenTree, trimmed
from ..trees.verify import TargetPass, Verdict
from .reliability import ConsideredGuesses, Reliability, waits_of

NO_TOKEN = -1  # padding


class Guesser(Protocol):
    """Proposes trees without a model. Calls of `guess` and `observe` alternate, on one text that grows."""

    def guess(self, text: Sequence[int], sampler: Sampler, max_nodes: int, max_depth: int) -> TokenTree:
        """Proposed continuations of `text`, best first; scores: log P(the target's text reaches the node)."""

    def observe(self, done: TargetPass) -> None:
        """Record a pass of the target; its tree may come from any drafter."""


# ------------------------------------------------------------------------------------------------ matches → tree

MATCH_LENGTHS = np.array([1, 2, 3, 4, 6, 9, 13, 19, 28])  # lower bounds of the classes of match lengths
# Support of a node: by a single match; by all of several; the longest (most frequent, latest) sibling; another sibling.
ONCE, AGREED, FIRST, OTHER = range(4)
NUM_SUPPORTS = 4


def match_reliability() -> Reliability:
    """The reliability of proposals from matches: one kind per match length and support."""
    once = MATCH_LENGTHS / (MATCH_LENGTHS + 3)
    prior = np.stack([once, once**0.7, 0.8 * once, 0.15 * once], axis=-1)
    return Reliability(prior.ravel())


class Matches:
    """Merges the continuations of matches into a tree, scored by the acceptance of earlier ones."""

    def __init__(self, reliability: Reliability) -> None:
        self._reliability = reliability
        self._last: ConsideredGuesses | None = None

    def tree(self, rows: IntArray, lengths: IntArray, sampler: Sampler, position: int, max_nodes: int) -> TokenTree:
        """The best nodes of the trie of M continuations; without any, an empty tree.

        rows [M, D]: tokens after a match, padded with NO_TOKEN; preferred rows first. lengths [M]: matched tokens.
        position: of the first proposed token.
        """
        if not len(rows):
            return TokenTree.empty()
        trie = Trie(rows, lengths)
        waits = waits_of(trie.tokens, trie.depths, sampler, position)
        gains = self._reliability.log_probabilities(trie.kinds, waits)
        tree = TokenTree(trie.tokens, trie.parents, trie.depths, trie.path_sums(gains))
        self._last = ConsideredGuesses(tree, trie.kinds, waits)
        return trimmed(tree, max_nodes).from_source(LOOKUP)

    def observe(self, verdict: Verdict) -> None:
        """Learn from the verdict on the last tree."""
        if self._last is not None:
            self._reliability.observe(self._last, verdict)
        self._last = None


class Trie:
    """The paths of M rows as N nodes, in order of depth: tokens, parents, depths and kinds [N]."""

    def __init__(self, rows: IntArray, lengths: IntArray) -> None:
        """rows [M, D]: token ids, padded with NO_TOKEN. lengths [M]: number of matched tokens before the row."""
        num_rows, max_depth = rows.shape
        order = np.lexsort(rows.T[::-1]) if max_depth else np.arange(num_rows)
        rows, lengths = rows[order], lengths[order]
        is_token = np.logical_and.accumulate(rows != NO_TOKEN, axis=1)
        differs = np.ones_like(is_token)
        differs[1:] = rows[1:] != rows[:-1]
        # A node is a range of one column in which the sorted rows have a common prefix. It starts at the first row.
        starts = (np.logical_or.accumulate(differs, axis=1) & is_token).T
        self._is_token = is_token.T
        self._nodes = starts.cumsum().reshape(starts.shape) - 1  # [D, M]: the node of each cell that is a token
        self._starts = np.nonzero(starts)
        column, row = self._starts
        self.tokens: IntArray = rows[row, column]
        self.parents: IntArray = np.where(column == 0, ROOT, self._nodes[column - 1, row])
        self.depths: IntArray = column + 1
        _, row = np.nonzero(self._is_token)
        node = self._nodes[self._is_token]
        num_rows = np.bincount(node, minlength=len(self.tokens))
        longest, first = np.zeros_like(self.tokens), np.full_like(self.tokens, len(order))
        np.maximum.at(longest, node, lengths[row])
        np.minimum.at(first, node, order[row])
        matched = longest + self.depths - 1  # includes the path down to the parent
        best_first = np.lexsort((first, -num_rows, -matched, self.parents))
        is_best = np.empty(len(self.tokens), dtype=np.bool_)
        is_best[best_first] = np.diff(self.parents[best_first], prepend=ROOT - 1) != 0
        num_siblings = np.bincount(self.parents + 1)[self.parents + 1]
        support = np.where(num_rows > 1, AGREED, ONCE)
        support = np.where(num_siblings > 1, np.where(is_best, FIRST, OTHER), support)
        self.kinds = NUM_SUPPORTS * (np.searchsorted(MATCH_LENGTHS, matched, side="right") - 1) + support

    def path_sums(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sums [N] of the nodes' values [N] along their paths."""
        cells = np.zeros(self._nodes.shape)
        cells[self._is_token] = values[self._nodes[self._is_token]]
        sums: npt.NDArray[np.float64] = cells.cumsum(axis=0)[self._starts]
        return sums


# ------------------------------------------------------------------------------------------------ prompt lookup


class NGramIndex:
    """The places of the n-grams of a growing text. Work is per new token; a lookup's cost is independent of the length.

    An n-gram has its own key only if its last n - 1 tokens had an entry before: a short key suffices for rare n-grams.
    So a token usually adds two or three entries, and MAX_ORDER if the text repeats itself.
    """

    MAX_ORDER = 8
    MAX_MATCH = 16  # tokens compared

    def __init__(self) -> None:
        self._tokens = np.empty(1024, dtype=np.int64)
        self._length = 0
        # Keys are hashes of n-grams. `_match_lengths` compares the tokens, so collisions are harmless.
        self.places: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the text."""
        first, last = self._length, self._length + len(tokens)
        if last > len(self._tokens):
            self._tokens = np.concatenate((self._tokens[:first], np.empty(max(first, len(tokens)), dtype=np.int64)))
        self._tokens[first:last] = tokens
        self._length = last
        recent = self._tokens[max(first - self.MAX_ORDER, 0) : last].tolist()
        for place in range(first, last):
            end = len(recent) - (last - place)
            before = recent[max(end - self.MAX_ORDER, 0) : end]
            for n in range(1, len(before) + 1):
                places = self.places.setdefault(_key(before, n), [])
                places.append(place)
                if len(places) == 1:
                    break

    def continuations(self, max_matches: int, depth: int) -> tuple[IntArray, IntArray]:
        """rows [M, depth]: continuations of matches of the text's end, longest and latest first; lengths [M]."""
        recent = self._tokens[max(self._length - self.MAX_ORDER, 0) : self._length].tolist()
        distinct: dict[int, None] = {}
        for n in range(1, len(recent) + 1):
            if (places := self.places.get(_key(recent, n))) is None:
                break
            # The first place has no entry under a longer key, so its match may be longer than the others'.
            distinct.update(dict.fromkeys((places[0], *places[-max_matches:])))
        starts = np.array(list(distinct), dtype=np.int64)
        lengths = self._match_lengths(starts)
        best = np.lexsort((-starts, -lengths))[:max_matches]
        best = best[lengths[best] > 0]
        starts, lengths = starts[best], lengths[best]
        # A match that reaches the text's end is periodic, so its continuation wraps around (as in LZ77).
        return self._tokens[starts[:, None] + np.arange(depth) % (self._length - starts[:, None])], lengths

    def _match_lengths(self, starts: IntArray) -> IntArray:
        """For each place, the number of tokens before it that equal those before the text's end, up to MAX_MATCH."""
        back = np.arange(1, min(self.MAX_MATCH, self._length) + 1)
        places = starts[:, None] - back
        equal = (self._tokens[places] == self._tokens[self._length - back]) & (places >= 0)
        lengths: IntArray = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        return lengths


def _key(tokens: list[int], n: int) -> int:
    return hash(tuple(tokens[-n:]))


class PromptLookup:
    """Looks up the end of the text in the text itself; one per request. Requests may share the reliability."""

    MAX_MATCHES = 32

    def __init__(self, reliability: Reliability | None = None) -> None:
        self.reliability = reliability or match_reliability()
        self._matches = Matches(self.reliability)
        self._index = NGramIndex()

    def guess(self, text: Sequence[int], sampler: Sampler, max_nodes: int, max_depth: int) -> TokenTree:
        self._index.extend(text[len(self._index) :])
        rows, lengths = self._index.continuations(self.MAX_MATCHES, max_depth)
        return self._matches.tree(rows, lengths, sampler, len(text), max_nodes)

    def observe(self, done: TargetPass) -> None:
        self._matches.observe(done.verdict)
