"""Guessers: trees without a model. What followed the last tokens where they stood before is likely to follow again.

Prompt lookup finds the longest n-grams at the end of the text that it had earlier, in prompt or output (Saxena 2023;
LLMA, 2304.04487), and makes one tree of all that followed them. How likely a guess is follows from how long the match
is and from whether the matches agree; `reliability` learns it while running. Knows nothing of models or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .reliability import ConsideredGuesses, Reliability, waits_of
from .sampling import Sampler
from .tree import ROOT, IntArray, TokenTree, trimmed
from .verify import TargetPass, Verdict

NO_TOKEN = -1  # in place of a token: no token


class Guesser(Protocol):
    """Guesses without a model. `guess` and `observe` by turns, with the same text; from turn to turn the text grows."""

    def guess(self, text: Sequence[int], sampler: Sampler, max_nodes: int, max_depth: int) -> TokenTree:
        """Guesses for what follows `text`, best first; scores: log P(the target's text comes down to the node)."""

    def observe(self, done: TargetPass) -> None:
        """What the target made of a pass, whoever guessed its tree."""


# ------------------------------------------------------------------------------------------------ matches → tree

MATCH_LENGTHS = np.array([1, 2, 3, 4, 6, 9, 13, 19, 28])  # from each of these on, matches are of one kind
ONCE, AGREED, FIRST, OTHER = range(4)  # a single match; all of several; the longest (most frequent, latest); the others
NUM_SUPPORTS = 4


def match_reliability() -> Reliability:
    """For guesses from matches: a kind for each match length and support."""
    once = MATCH_LENGTHS / (MATCH_LENGTHS + 3)
    prior = np.stack([once, once**0.7, 0.8 * once, 0.15 * once], axis=-1)
    return Reliability(prior.ravel())


class Matches:
    """Makes a tree of the continuations of matches, scored by what came of earlier ones."""

    def __init__(self, reliability: Reliability) -> None:
        self._reliability = reliability
        self._last: ConsideredGuesses | None = None

    def tree(self, rows: IntArray, lengths: IntArray, sampler: Sampler, position: int, max_nodes: int) -> TokenTree:
        """The best nodes of the trie of M continuations.

        rows [M, D]: tokens that followed a match, padded with NO_TOKEN; the preferred ones first. lengths [M]: tokens
        matched. position: that of the first token guessed.
        """
        trie = Trie(rows, lengths)
        waits = waits_of(trie.tokens, trie.depths, sampler, position)
        gains = self._reliability.log_probabilities(trie.kinds, waits)
        tree = TokenTree(trie.tokens, trie.parents, trie.depths, trie.path_sums(gains))
        self._last = ConsideredGuesses(tree, trie.kinds, waits)
        return trimmed(tree, max_nodes)

    def observe(self, verdict: Verdict) -> None:
        """What the target made of the tree that was made last."""
        if self._last is not None:
            self._reliability.observe(self._last, verdict)
        self._last = None


class Trie:
    """The paths of M rows as N nodes, in order of depth: tokens, parents, depths and kinds [N]."""

    def __init__(self, rows: IntArray, lengths: IntArray) -> None:
        """rows [M, D]: token ids, padded with NO_TOKEN. lengths [M]: how many tokens matched before the row."""
        num_rows, max_depth = rows.shape
        order = np.lexsort(rows.T[::-1]) if max_depth else np.arange(num_rows)
        rows, lengths = rows[order], lengths[order]
        is_token = np.logical_and.accumulate(rows != NO_TOKEN, axis=1)
        differs = np.ones_like(is_token)
        differs[1:] = rows[1:] != rows[:-1]
        # A node is a stretch of one column where the sorted rows begin alike. It starts in the first of them.
        starts = (np.logical_or.accumulate(differs, axis=1) & is_token).T
        self._is_token = is_token.T
        self._nodes = starts.cumsum().reshape(starts.shape) - 1  # [D, M]: the node of each cell that is a token
        self._starts = np.nonzero(starts)
        column, row = self._starts
        self.tokens: IntArray = rows[row, column]
        self.parents: IntArray = np.where(column == 0, ROOT, self._nodes[column - 1, row])
        self.depths: IntArray = column + 1
        self.kinds = self._kinds(lengths, order)

    def _kinds(self, lengths: IntArray, preference: IntArray) -> IntArray:
        _, row = np.nonzero(self._is_token)
        node = self._nodes[self._is_token]
        num_rows = np.bincount(node, minlength=len(self.tokens))
        longest, first = np.zeros_like(self.tokens), np.full_like(self.tokens, len(preference))
        np.maximum.at(longest, node, lengths[row])
        np.minimum.at(first, node, preference[row])
        matched = longest + self.depths - 1  # the path down to the parent has matched too
        best_first = np.lexsort((first, -num_rows, -matched, self.parents))
        is_best = np.empty(len(self.tokens), dtype=np.bool_)
        is_best[best_first] = np.diff(self.parents[best_first], prepend=ROOT - 1) != 0
        num_siblings = np.bincount(self.parents + 1)[self.parents + 1]
        support = np.where(num_rows > 1, AGREED, ONCE)
        support = np.where(num_siblings > 1, np.where(is_best, FIRST, OTHER), support)
        return NUM_SUPPORTS * (np.searchsorted(MATCH_LENGTHS, matched, side="right") - 1) + support

    def path_sums(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Sums [N] of the nodes' values [N] along their paths."""
        cells = np.zeros(self._nodes.shape)
        cells[self._is_token] = values[self._nodes[self._is_token]]
        sums: npt.NDArray[np.float64] = cells.cumsum(axis=0)[self._starts]
        return sums


# ------------------------------------------------------------------------------------------------ prompt lookup


class NGramIndex:
    """Where the n-grams of a growing text stood. Work is per new token; a lookup does not depend on the text's length.

    An n-gram is filed under its own key only if its last n - 1 tokens had been filed before: what is rare is found by
    a short key. So a token takes two or three entries as a rule, MAX_ORDER where the text repeats itself.
    """

    MAX_ORDER = 8
    MAX_MATCH = 16  # tokens compared

    def __init__(self) -> None:
        self._tokens = np.empty(1024, dtype=np.int64)
        self._length = 0
        # Keys are hashes of n-grams; matches are compared, so that a collision costs nothing.
        self.places: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that the text has grown by."""
        first, last = self._length, self._length + len(tokens)
        if last > len(self._tokens):
            self._tokens = np.concatenate((self._tokens[:first], np.empty(max(first, len(tokens)), dtype=np.int64)))
        self._tokens[first:last] = tokens
        self._length = last
        recent = self._tokens[max(first - self.MAX_ORDER, 0) : last].tolist()
        for place in range(first, last):
            end = len(recent) - (last - place)
            self._file(recent[max(end - self.MAX_ORDER, 0) : end], place)

    def _file(self, before: list[int], place: int) -> None:
        for n in range(1, len(before) + 1):
            places = self.places.setdefault(_key(before, n), [])
            places.append(place)
            if len(places) == 1:
                return

    def continuations(self, max_matches: int, depth: int) -> tuple[IntArray, IntArray]:
        """rows [M, depth]: what followed where the text's end stood before, longest and latest first; lengths [M]."""
        recent = self._tokens[max(self._length - self.MAX_ORDER, 0) : self._length].tolist()
        found: dict[int, None] = {}
        for n in range(1, len(recent) + 1):
            if (places := self.places.get(_key(recent, n))) is None:
                break
            # The first place was filed under no longer key than this, so it may match for longer than the others.
            found.update(dict.fromkeys((places[0], *places[-max_matches:])))
        starts = np.array(list(found), dtype=np.int64)
        lengths = self._match_lengths(starts)
        best = np.lexsort((-starts, -lengths))[:max_matches]
        best = best[lengths[best] > 0]
        starts, lengths = starts[best], lengths[best]
        # A match that reaches the end of the text is a period, so it goes round (as LZ77 copies from its own output).
        return self._tokens[starts[:, None] + np.arange(depth) % (self._length - starts[:, None])], lengths

    def _match_lengths(self, starts: IntArray) -> IntArray:
        """How many tokens before each of these places are those before the end, up to MAX_MATCH."""
        back = np.arange(1, min(self.MAX_MATCH, self._length) + 1)
        places = starts[:, None] - back
        equal = (self._tokens[places] == self._tokens[self._length - back]) & (places >= 0)
        lengths: IntArray = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        return lengths


def _key(tokens: list[int], n: int) -> int:
    return hash(tuple(tokens[-n:]))


class PromptLookup:
    """Looks the end of the text up in the text itself; one per request. The reliability may outlive it."""

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
