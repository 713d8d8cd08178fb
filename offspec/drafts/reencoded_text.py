"""The text of a draft that has another vocabulary than its target: a `scheduler.drafter.TreeModel` of the target's ids.

The draft reads the text in its own encoding. What the target adds is encoded anew from a word's beginning shortly
before it; the draft's tokens up to the last one that is the same stay in its cache, the others are scored. Below the
text, a tree's node is the draft's token of the same bytes, or, where it has none, as many of its tokens as the node's
bytes make. Only tokens that both have are guessed (TLI, Timor et al., 2502.05202, section 3). Knows nothing of how
trees grow.
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

from offspec.scheduler.params import MAX_ROWS
from offspec.scheduler.vocabulary import Vocabulary

from ..checkpoints.opening import Note
from ..model.decoder import BoolArray, CachedDecoder, Decoder, IntArray
from ..text.reencoding import Reencoder
from ..text.shared_tokens import SharedTokens
from ..text.tokenizer import Tokenizer

BACK = 8  # tokens before new text that are encoded again with it, at least
BOUNDARY = 64  # tokens among which a word's beginning is looked for
SPACES, WORD_STARTS = frozenset(" \n\t\r"), frozenset(" \n")


@dataclass(frozen=True)
class OtherVocabulary:
    """A draft's vocabulary that is not its target's."""

    shared: SharedTokens
    reencoder: Reencoder
    vocabulary: Vocabulary

    @classmethod
    def of(cls, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> OtherVocabulary:
        """Of models with so many ids. Raises VocabularyMismatchError where they share too little."""
        shared = SharedTokens.of(target, draft, target_size, draft_size)
        # Columns of tokens that the target does not have stand for ids that it does not have either.
        columns = np.arange(target_size, target_size + draft_size)
        columns[list(shared.to_draft.values())] = list(shared.to_draft)
        vocabulary = Vocabulary.mapped(columns, num_inputs=target_size)
        return cls(shared, Reencoder(target, draft, shared, draft_size), vocabulary)

    def note(self, name: str) -> Note:
        """What to expect of the draft."""
        shared = f"they share {self.shared.share:.0%} of a sample text's tokens"
        return Note(
            f"the draft {name} has another vocabulary than the target: {shared}, and only shared tokens are guessed, "
            "so fewer guesses are accepted than of a draft with the target's vocabulary",
            advice=True,
        )

    def text(self, text: CachedDecoder) -> ReencodedText:
        """An empty text of the draft's, as the drafter sees it."""
        return ReencodedText(text, self.reencoder, self.vocabulary)


class TargetText:
    """The target's tokens of one text, and the string that they make for the draft (see `text.reencoding`)."""

    def __init__(self, reencoder: Reencoder) -> None:
        self._reencoder = reencoder
        self.string = ""
        self.ends: list[int] = []  # in the string, of each token
        self._first: int | None = None  # of the tokens that are text

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
        """Forget the tokens from `length` on."""
        del self.ends[length:]
        self.string = self.string[: self.ends[-1] if self.ends else 0]
        if self._first is not None and self._first >= length:
            self._first = None


class OwnTokens:
    """The draft's tokens of a text, and where in its string each of them ends.

    num_settled: the first ones, which are its tokenizer's own encoding; those behind them are nodes that came true.
    """

    def __init__(self, reencoder: Reencoder, most: int) -> None:
        """most: tokens that the draft can read."""
        self._reencoder, self._most = reencoder, most
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.num_settled = 0

    def __len__(self) -> int:
        return len(self.ids)

    def reencode(self, string: str) -> int:
        """Become the encoding of all of `string`; returns how many tokens stay as they are, which is never all.

        Of a text that is longer than the draft can read, it is the end.
        """
        first = self._restart(string)
        start = self.ends[first - 1] if first else 0
        ids, ends = self._reencoder.encode(string, start)
        if not first:
            prefix = self._reencoder.prefix
            ids, ends = [*prefix, *ids], [*(0 for _ in prefix), *ends]
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, self.ids[first:], strict=False)))
        self.ids[first:], self.ends[first:] = ids, ends
        if not self.ids:  # nothing that the draft could read, yet something has to be
            self.ids, self.ends = [self._reencoder.stand_in], [len(string)]
        if is_cut := len(self) > self._most:
            self._keep_last(max(1, self._most // 2))
        self.num_settled = len(self)
        return 0 if is_cut else min(first + same, len(self) - 1)

    def _keep_last(self, count: int) -> None:
        prefix, start = self._reencoder.prefix, self.ends[-count - 1]
        self.ids = [*prefix, *self.ids[-count:]]
        self.ends = [*(start for _ in prefix), *self.ends[-count:]]

    def _restart(self, string: str) -> int:
        """The token from which on to encode anew: at a word's beginning, where there is one nearby."""
        latest, least = min(self.num_settled, len(self)) - BACK, len(self._reencoder.prefix)
        for token in range(latest, max(latest - BOUNDARY, least), -1):
            if _begins_word(string, self.ends[token - 1]):
                return token
        return 0 if latest - BOUNDARY <= least else latest

    def extend(self, ids: Sequence[int], end: int) -> None:
        """A node that came true: its tokens, which are cut at its end only."""
        self.ids += ids
        self.ends += [end] * len(ids)

    def truncate(self, end: int, most: int) -> None:
        """Keep the tokens that end at `end` of the string or before it, and of these no more than `most`."""
        count = min(bisect_right(self.ends, end), most)
        del self.ids[count:], self.ends[count:]
        self.num_settled = min(self.num_settled, count)


def _begins_word(string: str, at: int) -> bool:
    """Whether tokenizers cut a text there whatever stands before it."""
    before, behind = string[at - 1 : at], string[at : at + 1]
    is_special = Reencoder.is_special(before) or Reencoder.is_special(behind)
    return is_special or (behind in WORD_STARTS and before not in SPACES)


class ReencodedText:
    """A draft's cached text in its own encoding (a `DraftText`): tokens come in as the target's ids."""

    def __init__(self, text: CachedDecoder, reencoder: Reencoder, vocabulary: Vocabulary) -> None:
        """text: an empty one. vocabulary: the draft's, by the target's ids."""
        self.vocabulary = vocabulary
        self._text, self._reencoder = text, reencoder
        self._read, self._own = TargetText(reencoder), OwnTokens(reencoder, text.max_context)
        self._pending: list[list[int]] = []  # of each node its tokens, and of all of them which target tokens they are:
        self._tokens: list[int] = []

    @property
    def decoder(self) -> Decoder:
        return self._text.decoder

    @property
    def max_context(self) -> int:
        """In the target's tokens; those that follow may be as many of the draft's."""
        return self.length + self._text.max_context - self._text.length

    @property
    def length(self) -> int:
        """Committed tokens, the target's."""
        return len(self._read)

    @property
    def own_ids(self) -> list[int]:
        """The committed text as the draft reads it."""
        return list(self._own.ids)

    def score(self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray) -> Tensor:
        """As `CachedDecoder.score`."""
        return self.decoder.head(self.states(chain, tokens, depths, mask))

    @torch.inference_mode()
    def states(
        self, chain: Sequence[int], tokens: IntArray, depths: IntArray, mask: BoolArray, before: int = 0
    ) -> Tensor:
        """As `CachedDecoder.states`, but for `before`: rows of the draft's text are none of the target's."""
        own = self._enter(chain) if chain else []
        new = [self._reencoder.node_ids(token) for token in tokens.tolist()]
        rows = _NodeRows.of(self._pending, new, depths, mask)
        room = self._text.max_context - self._text.length - len(own)
        states = self._text.states(own, rows.tokens, np.minimum(rows.depths, max(1, room)), rows.mask)
        self._pending += new
        self._tokens += tokens.tolist()
        if rows.is_plain:
            return states
        root = np.zeros(min(1, len(own)), dtype=np.int64)
        return states[torch.from_numpy(np.append(root, rows.last + len(root))).to(states.device)]

    def _enter(self, chain: Sequence[int]) -> list[int]:
        """Add to the text; returns what the draft has to score for it, behind what it keeps."""
        self._read.extend(chain)
        num_kept = self._own.reencode(self._read.string)
        self._text.truncate(num_kept)
        return self._own.ids[num_kept:]

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
        """Forget the text from the target's token `length` on, and whatever is pending."""
        self._read.truncate(length)
        self._own.truncate(len(self._read.string), self._text.length)
        self._text.truncate(len(self._own))
        self._pending, self._tokens = [], []

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` entries: the target's tokens of a text, and MAX_ROWS nodes."""
        num_tokens = self._reencoder.most_tokens(capacity - MAX_ROWS)
        self._text.reserve(min(num_tokens, self._text.max_context) + MAX_ROWS)


class _NodeRows(NamedTuple):
    """New nodes as rows of the draft: tokens, depths [T], mask [T, Q + T]; Q rows are pending.

    last [R]: each node's last row. is_plain: whether every node is one row.
    """

    tokens: IntArray
    depths: IntArray
    mask: BoolArray
    last: IntArray
    is_plain: bool

    @classmethod
    def of(
        cls, pending: Sequence[Sequence[int]], new: Sequence[Sequence[int]], depths: IntArray, mask: BoolArray
    ) -> _NodeRows:
        """Of nodes of so many tokens each, as the drafter has them: depths [R], mask [R, P + R]."""
        tokens = np.array([token for ids in new for token in ids], dtype=np.int64)
        num_rows = np.array([len(ids) for ids in (*pending, *new)], dtype=np.int64)
        of_new = num_rows[len(pending) :]
        last = of_new.cumsum() - 1
        if not new or num_rows.max() == 1:
            return cls(tokens, depths, mask, last, True)
        above = mask @ num_rows - of_new  # rows of each node's ancestors
        place = np.concatenate([np.arange(1, count + 1) for count in of_new])
        seen = mask.repeat(of_new, axis=0).repeat(num_rows, axis=1)
        own_rows = np.arange(len(tokens))
        seen[:, -len(tokens) :] &= own_rows <= own_rows[:, None]  # not what of the same node comes later
        return cls(tokens, above.repeat(of_new) + place, seen, last, False)
