"""The cached text of a draft with another vocabulary than the target's: a `TreeModel` that takes the target's ids.

The draft scores the text in its own encoding. When the target adds tokens, the text is encoded again from a word
boundary shortly before them. The draft's cache keeps the tokens before the first difference, and the draft scores the
others. A node of the tree is mapped to the draft's token with the same bytes, or else to the tokens into which the
draft's tokenizer splits those bytes. The draft proposes only tokens that both vocabularies contain (TLI, Timor et al.,
2502.05202). This module does not know how trees grow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.params import MAX_ROWS
from offspec.scheduler.trees.token_tree import ROOT, IntArray, node_paths
from offspec.scheduler.trees.vocabulary import Vocabulary

from ..model.decoder import CachedDecoder, Decoder
from ..model.memory.draft_window import WindowedText
from ..notes import Note
from ..text.reencoding import Reencoder
from ..text.shared_tokens import SharedTokens
from ..text.tokenizer import Tokenizer

BACK = 8  # minimum number of known tokens that are encoded again with new text
BOUNDARY = 64  # number of tokens before these that are searched for a word boundary
SPACES, WORD_STARTS = frozenset(" \n\t\r"), frozenset(" \n")


@dataclass(frozen=True)
class OtherVocabulary:
    """A draft's vocabulary that is not the target's."""

    shared: SharedTokens
    reencoder: Reencoder
    vocabulary: Vocabulary

    @classmethod
    def of(cls, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> OtherVocabulary:
        """target_size, draft_size: numbers of ids of the models.

        Raises VocabularyMismatchError if they share too few tokens.
        """
        shared = SharedTokens.of(target, draft, target_size, draft_size)
        # Columns that are not shared get ids beyond the target's, so they are never proposed.
        columns = np.arange(target_size, target_size + draft_size)
        columns[list(shared.to_draft.values())] = list(shared.to_draft)
        vocabulary = Vocabulary.mapped(columns, target_size, to_device)
        return cls(shared, Reencoder(target, draft, shared, draft_size), vocabulary)

    def note(self, name: str) -> Note:
        """A note that fewer of the draft's tokens will be accepted."""
        shared = f"they share {self.shared.share:.0%} of a sample text's tokens"
        return Note(
            f"the draft {name} has another vocabulary than the target: {shared}, and only shared tokens are drafted, "
            "so fewer are accepted than with a draft of the target's vocabulary",
            advice=True,
        )

    def text(self, text: CachedDecoder | WindowedText) -> ReencodedText:
        """The draft's text in the target's ids, for the drafter. text: the draft's own, empty."""
        return ReencodedText(text, self.reencoder, self.vocabulary)


class TargetText:
    """The target's tokens of one text as a string (see `text.reencoding`).

    ends: the end of each token in the string.
    """

    def __init__(self, reencoder: Reencoder) -> None:
        self._reencoder = reencoder
        self.string = ""
        self.ends: list[int] = []
        self._first: int | None = None  # the first token that is text, not special

    def __len__(self) -> int:
        return len(self.ends)

    def extend(self, tokens: Sequence[int]) -> None:
        pieces = []
        end = len(self.string)
        for token in tokens:
            piece = self._reencoder.piece(token)
            if self._first is None and not self._reencoder.is_special(piece):
                self._first, piece = len(self), self._reencoder.first_piece(piece)
            pieces.append(piece)
            end += len(piece)
            self.ends.append(end)
        self.string += "".join(pieces)

    def truncate(self, length: int) -> None:
        """Remove the tokens from `length` on."""
        del self.ends[length:]
        self.string = self.string[: self.ends[-1] if self.ends else 0]
        if self._first is not None and self._first >= length:
            self._first = None


class OwnTokens:
    """The draft's tokens of a text, and the end of each in the text's string.

    num_settled: the number of first tokens that come from the draft's tokenizer; the others are accepted nodes.
    """

    def __init__(self, reencoder: Reencoder, most: int) -> None:
        """most: the draft's maximum context."""
        self._reencoder, self._most = reencoder, most
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.num_settled = 0

    def __len__(self) -> int:
        return len(self.ids)

    def encode_again(self, string: str) -> int:
        """Encode `string`. Returns the number of leading tokens that did not change; at least one token is new.

        If the text is longer than the draft's context, only its end is kept.
        """
        first = self._restart(string)
        start = self.ends[first - 1] if first else 0
        ids, ends = self._reencoder.encode(string, start)
        if not first:
            prefix = self._reencoder.prefix
            ids, ends = [*prefix, *ids], [*(0 for _ in prefix), *ends]
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, self.ids[first:], strict=False)))
        self.ids[first:], self.ends[first:] = ids, ends
        if not self.ids:  # the draft has to score at least one token
            self.ids, self.ends = [self._reencoder.stand_in], [len(string)]
        if is_cut := len(self) > self._most:
            count = max(1, self._most // 2)
            prefix, start = self._reencoder.prefix, self.ends[-count - 1]
            self.ids = [*prefix, *self.ids[-count:]]
            self.ends = [*(start for _ in prefix), *self.ends[-count:]]
        self.num_settled = len(self)
        return 0 if is_cut else min(first + same, len(self) - 1)

    def _restart(self, string: str) -> int:
        """The index of the first token to encode again: at a word boundary, if there is one nearby."""
        latest, least = min(self.num_settled, len(self)) - BACK, len(self._reencoder.prefix)
        for token in range(latest, max(latest - BOUNDARY, least), -1):
            at = self.ends[token - 1]
            before, behind = string[at - 1 : at], string[at : at + 1]
            is_special = Reencoder.is_special(before) or Reencoder.is_special(behind)
            if is_special or (behind in WORD_STARTS and before not in SPACES):
                return token
        return 0 if latest - BOUNDARY <= least else latest

    def extend(self, ids: Sequence[int], end: int) -> None:
        """Append an accepted node's tokens. All get the node's end, so that they are kept or removed together."""
        self.ids += ids
        self.ends += [end] * len(ids)

    def truncate(self, end: int, most: int) -> None:
        """Keep the tokens that end at or before `end`, at most `most` of them."""
        count = min(bisect_right(self.ends, end), most)
        del self.ids[count:], self.ends[count:]


class ReencodedText:
    """A draft's cached text in its own encoding (a `DraftText`); its inputs are the target's ids."""

    def __init__(self, text: CachedDecoder | WindowedText, reencoder: Reencoder, vocabulary: Vocabulary) -> None:
        """text: the draft's, empty. vocabulary: the draft's, in terms of the target's ids."""
        self.vocabulary = vocabulary
        self._text, self._reencoder = text, reencoder
        self._read, self._own = TargetText(reencoder), OwnTokens(reencoder, text.max_context)
        self._pending: list[list[int]] = []  # the draft's tokens of each pending node
        self._tokens: list[int] = []  # the target's token of each pending node

    @property
    def decoder(self) -> Decoder:
        return self._text.decoder

    @property
    def max_context(self) -> int:
        """The target's tokens of the text, plus the free positions of the draft's context."""
        return self.length + self._text.max_context - self._text.length

    @property
    def length(self) -> int:
        """Number of committed tokens, counted in the target's tokens."""
        return len(self._read)

    @torch.inference_mode()
    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray) -> Tensor:
        """As `CachedDecoder.score`."""
        return self.decoder.head(self.states(chain, tokens, depths, parents))

    def joining(self, chain: Sequence[int]) -> None:
        """A node may take several rounds."""

    @torch.inference_mode()
    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, parents: IntArray, before: int = 0
    ) -> Tensor:
        """As `CachedDecoder.states`, but `before` is ignored, because the draft's text has other rows."""
        entered = list[int]()  # the draft's tokens after the cached ones, which it has to score
        if chain:
            self._read.extend(chain)
            num_kept = self._own.encode_again(self._read.string)
            self._text.truncate(min(num_kept, self._text.length))
            entered = self._own.ids[self._text.length :]  # a text with a window may have dropped more
        new = [self._reencoder.node_ids(token) for token in tokens.tolist()]
        rows = _NodeRows.of(self._pending, new, depths, parents)
        free_entries = self._text.max_context - self._text.length - len(entered)
        states = self._text.states(entered, rows.tokens, np.minimum(rows.depths, max(1, free_entries)), rows.parents)
        self._pending += new
        self._tokens += tokens.tolist()
        if rows.is_plain:
            return states
        root = np.zeros(min(1, len(entered)), dtype=np.int64)
        return states[to_device(torch.from_numpy(np.append(root, rows.last + len(root))), states.device)]

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        """As `CachedDecoder.keep`."""
        firsts = [0, *accumulate(map(len, self._pending))]
        rows = [[row for node in nodes for row in range(firsts[node], firsts[node + 1])] for nodes in (path, pending)]
        self._text.keep(*rows)
        self._read.extend([self._tokens[node] for node in path])
        for node, end in zip(path, self._read.ends[len(self._read) - len(path) :], strict=True):
            self._own.extend(self._pending[node], end)
        self._pending = [self._pending[node] for node in pending]
        self._tokens = [self._tokens[node] for node in pending]

    def truncate(self, length: int) -> None:
        """Remove the text from the target's token `length` on, and all pending nodes."""
        self._read.truncate(length)
        self._own.truncate(len(self._read.string), self._text.length)
        self._text.truncate(len(self._own))
        self._pending, self._tokens = [], []

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` entries: tokens of the target's text, and MAX_ROWS nodes."""
        num_tokens = self._reencoder.most_tokens(capacity - MAX_ROWS)
        self._text.reserve(min(num_tokens, self._text.max_context) + MAX_ROWS)


class _NodeRows(NamedTuple):
    """R new nodes as T rows of the draft: tokens [T], depths [T], parents [Q + T], with Q rows pending before them.

    last [R]: each node's last row. is_plain: whether every node is one row.
    """

    tokens: IntArray
    depths: IntArray
    parents: IntArray
    last: IntArray
    is_plain: bool

    @classmethod
    def of(
        cls, pending: Sequence[Sequence[int]], new: Sequence[Sequence[int]], depths: IntArray, parents: IntArray
    ) -> _NodeRows:
        """pending, new: the draft's tokens of each of P and R nodes. depths [R], parents [P + R]: the drafter's."""
        tokens = np.array([token for ids in new for token in ids], dtype=np.int64)
        num_rows = np.array([len(ids) for ids in (*pending, *new)], dtype=np.int64)
        ends = num_rows.cumsum()
        num_before = ends[-1] - len(tokens) if len(ends) else 0
        last = ends[len(pending) :] - 1 - num_before
        if not new or num_rows.max() == 1:
            return cls(tokens, depths, parents, last, True)
        above = np.arange(-1, ends[-1] - 1)  # of a node's rows, each is the parent of the next
        above[ends - num_rows] = np.append(ends - 1, ROOT)[parents]  # the last entry is for ROOT
        return cls(tokens, node_paths(above, num_before)[1], above, last, False)
