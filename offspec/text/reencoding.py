"""Converts token ids of one vocabulary to those of another: a target's text for its draft.

The intermediate form is a string with one character per byte and one per special token, so that positions do not depend
on the tokens. It need not be UTF-8, because a token may end inside a character. This module does not know models.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple

from ..errors import TokenizerError
from .shared_tokens import SharedTokens, ids_by_bytes
from .tokenizer import Tokenizer

FIRST_SPECIAL = 256  # the first character that stands for a special token; those below it stand for bytes
SPARE = 1.25  # a margin for texts that need more of the draft's tokens than SAMPLE does
MOST_BYTES = 32  # bytes of the longest token that greedy encoding tries
_PARTS = re.compile(r"[\x00-\xff]+|[^\x00-\xff]")
_BAD_BYTES = re.compile("([\udc80-\udcff]+)")  # as `surrogateescape` writes them
_CONTEXTS = "\n", "a"  # placed before a text, so that the tokenizer adds its space before them


class Encoded(NamedTuple):
    """Token ids of a string, and the position in the string where each token ends."""

    ids: list[int]
    ends: list[int]


class Reencoder:
    """Turns the target's tokens into a string, and a string into the draft's tokens."""

    def __init__(self, target: Tokenizer, draft: Tokenizer, shared: SharedTokens, draft_size: int) -> None:
        """draft_size: number of ids that the draft model has. prefix: the ids that begin the draft's texts (BOS)."""
        assert target.token_bytes is not None
        assert draft.token_bytes is not None
        self.prefix = [token for token in draft.encode("") if token < draft_size]
        self._draft, self._shared = draft, shared
        self._target_bytes = target.token_bytes
        self._draft_bytes = {token: text for token, text in draft.token_bytes.items() if token < draft_size}
        self._lead = frozenset(target.encode("")) if self.prefix else frozenset[int]()
        self._target_adds_space, self._draft_adds_space = _adds_space(target), _adds_space(draft)
        self._ids = ids_by_bytes(draft, draft_size)
        self._longest = min(MOST_BYTES, max(map(len, self._ids)))
        self.stand_in = next(iter(self.prefix), next(iter(self._ids.values())))  # for texts without a token
        self._node_ids: dict[int, list[int]] = {}

    def piece(self, token: int) -> str:
        """The characters that stand for the target's token."""
        content = self._target_bytes.get(token)
        if content is None:
            return chr(min(FIRST_SPECIAL + token, sys.maxunicode))
        return content.decode("latin-1")

    def first_piece(self, piece: str) -> str:
        """The first text piece of a string, with the draft's added space instead of the target's."""
        text = piece.removeprefix(" ") if self._target_adds_space else piece
        return " " + text if self._draft_adds_space else text

    @staticmethod
    def is_special(piece: str) -> bool:
        """Whether a piece is a special token, not bytes."""
        return piece >= chr(FIRST_SPECIAL)

    def most_tokens(self, num_tokens: int) -> int:
        """An estimate, from SAMPLE, of how many draft tokens `num_tokens` target tokens need."""
        return math.ceil(max(1.0, SPARE * self._shared.ratio) * num_tokens)

    def node_ids(self, token: int) -> list[int]:
        """The draft's tokens for one token of the target, at least one."""
        if (shared_id := self._shared.to_draft.get(token)) is not None:
            return [shared_id]
        if token not in self._node_ids:
            self._node_ids[token] = self.encode("." + self.piece(token), 1).ids or [self.stand_in]
        return self._node_ids[token]

    def encode(self, string: str, start: int = 0) -> Encoded:
        """The draft's tokens for a string from `start` on. Special tokens that the draft lacks are omitted."""
        ids, ends = list[int](), list[int]()
        for match in _PARTS.finditer(string, start):
            first, part = match.start(), match[0]
            if not self.is_special(part):
                for token, end in self._tokens(part.encode("latin-1")):
                    ids.append(token)
                    ends.append(first + end)
                continue
            target = ord(part) - FIRST_SPECIAL
            is_lead = first == 0 and target in self._lead
            if not is_lead and (special := self._shared.to_draft.get(target)) is not None:
                ids.append(special)
                ends.append(match.end())
        return Encoded(ids, ends)

    def _tokens(self, content: bytes) -> Iterator[tuple[int, int]]:
        """The tokens of these bytes, each with the position of its end."""
        done = 0
        for part in _BAD_BYTES.split(content.decode("utf-8", "surrogateescape")):
            stretch = part.encode("utf-8", "surrogateescape")
            is_bad = _BAD_BYTES.match(part)
            for token, end in self._longest_first(stretch) if is_bad else self._of_text(part):
                yield token, done + end
            done += len(stretch)

    def _of_text(self, text: str) -> Iterator[tuple[int, int]]:
        """The tokens from the draft's tokenizer, each with its end in bytes.

        If the tokenizer would change the text (by normalising it, or by finding special tokens), the text is split at
        spaces. Parts that it would still change are encoded greedily.
        """
        content = text.encode()
        for ids in self._encodings(text):
            if b"".join(self._draft_bytes.get(token, b"") for token in ids) == content:
                yield from zip(ids, accumulate(len(self._draft_bytes[token]) for token in ids), strict=True)
                return
        at = text.rfind(" ", 1, len(text) // 2 + 1)
        if at < 1 and (at := text.find(" ", 1)) < 1:
            yield from self._longest_first(content)
            return
        yield from self._of_text(text[:at])
        start = len(text[:at].encode())
        yield from ((token, start + end) for token, end in self._of_text(text[at:]))

    def _encodings(self, text: str) -> Iterator[list[int]]:
        """Encodings of a text that follows another text, the best first; none if the tokenizer fails."""
        with suppress(TokenizerError):  # the vocabulary does not cover a character
            if not self._draft_adds_space:
                yield self._draft.encode(text, add_special_tokens=False)
                return
            if text.startswith(" "):  # the tokenizer adds it again
                yield self._draft.encode(text[1:], add_special_tokens=False)
            for context in _CONTEXTS:
                yield self._draft.encode_after(context, text)

    def _longest_first(self, content: bytes) -> Iterator[tuple[int, int]]:
        """Greedy encoding: the longest token at each position. Bytes without a token are omitted."""
        at = 0
        while at < len(content):
            for end in range(min(len(content), at + self._longest), at, -1):
                if (token := self._ids.get(content[at:end])) is not None:
                    yield token, end
                    at = end
                    break
            else:
                at += 1


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer adds a space before a text's first word, as sentencepiece does."""
    assert tokenizer.token_bytes is not None
    ids = tokenizer.encode("a", add_special_tokens=False)
    return bool(ids) and tokenizer.token_bytes.get(ids[0], b"").startswith(b" ")
