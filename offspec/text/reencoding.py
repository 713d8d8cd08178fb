"""A text of one vocabulary's tokens, encoded with another vocabulary's (a target's text for its draft).

A text is written as a string with a character for each byte, and one for each special token, so that positions in it
are comparable whatever tokens it is made of. Texts need not be UTF-8: tokens may end inside a character. Knows nothing
of models.
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

FIRST_SPECIAL = 256  # characters from here on are special tokens, those below are bytes
SPARE = 1.25
MOST_BYTES = 32  # of a token that is looked for in a text which the tokenizer would change
_PARTS = re.compile(r"[\x00-\xff]+|[^\x00-\xff]")
_BAD_BYTES = re.compile("([\udc80-\udcff]+)")  # as `surrogateescape` writes them
_CONTEXTS = "\n", "a"  # tried before a text to which the tokenizer would add a space at its beginning


class Encoded(NamedTuple):
    """ids of a string, and where in it each of them ends."""

    ids: list[int]
    ends: list[int]


class Reencoder:
    """From the target's tokens to a string, and from there to the draft's tokens."""

    def __init__(self, target: Tokenizer, draft: Tokenizer, shared: SharedTokens, draft_size: int) -> None:
        """draft_size: ids that the draft knows."""
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
        self.stand_in = next(iter(self.prefix), next(iter(self._ids.values())))  # read where there is nothing to read
        self._node_ids: dict[int, list[int]] = {}

    def piece(self, token: int) -> str:
        """What the target's token is in a string."""
        content = self._target_bytes.get(token)
        if content is None:
            return chr(min(FIRST_SPECIAL + token, sys.maxunicode))
        return content.decode("latin-1")

    def first_piece(self, piece: str) -> str:
        """The first piece of a string that is text: the space that tokenizers of one kind put there is the draft's."""
        text = piece.removeprefix(" ") if self._target_adds_space else piece
        return " " + text if self._draft_adds_space else text

    @staticmethod
    def is_special(piece: str) -> bool:
        """Whether a piece is a special token, and no bytes."""
        return piece >= chr(FIRST_SPECIAL)

    def most_tokens(self, num_tokens: int) -> int:
        """The draft's tokens for `num_tokens` of the target's: an estimate from SAMPLE, with something to spare."""
        return math.ceil(max(1.0, SPARE * self._shared.ratio) * num_tokens)

    def node_ids(self, token: int) -> list[int]:
        """The draft's tokens for a token of the target's by itself, one at least."""
        if (known := self._shared.to_draft.get(token)) is not None:
            return [known]
        if token not in self._node_ids:
            self._node_ids[token] = self.encode("." + self.piece(token), 1).ids or [self.stand_in]
        return self._node_ids[token]

    def encode(self, string: str, start: int = 0) -> Encoded:
        """The draft's tokens for a string from `start` on. A special token that it does not have is left out."""
        ids, ends = list[int](), list[int]()
        for match in _PARTS.finditer(string, start):
            first, part = match.start(), match[0]
            if not self.is_special(part):
                for token, end in self._tokens(part.encode("latin-1")):
                    ids.append(token)
                    ends.append(first + end)
            elif (special := self._special(part, is_first=first == 0)) is not None:
                ids.append(special)
                ends.append(match.end())
        return Encoded(ids, ends)

    def _special(self, part: str, *, is_first: bool) -> int | None:
        target = ord(part) - FIRST_SPECIAL
        return None if is_first and target in self._lead else self._shared.to_draft.get(target)

    def _tokens(self, content: bytes) -> Iterator[tuple[int, int]]:
        """Tokens of these bytes, each with where it ends."""
        done = 0
        for part in _BAD_BYTES.split(content.decode("utf-8", "surrogateescape")):
            stretch = part.encode("utf-8", "surrogateescape")
            is_bad = _BAD_BYTES.match(part)
            for token, end in self._longest_first(stretch) if is_bad else self._of_text(part):
                yield token, done + end
            done += len(stretch)

    def _of_text(self, text: str) -> Iterator[tuple[int, int]]:
        """As the draft's tokenizer has it; where that would change the text, of as few characters as possible not."""
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
        """What the tokenizer may make of a text inside of another one, the best first; none where it fails."""
        with suppress(TokenizerError):  # characters that the vocabulary does not cover
            if not self._draft_adds_space:
                yield self._draft.encode(text, add_special_tokens=False)
                return
            if text.startswith(" "):  # which the tokenizer puts back
                yield self._draft.encode(text[1:], add_special_tokens=False)
            for context in _CONTEXTS:
                yield self._draft.encode_after(context, text)

    def _longest_first(self, content: bytes) -> Iterator[tuple[int, int]]:
        """The longest token at each place; bytes without one are left out."""
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
    """Whether it puts a space before a text's first word, as sentencepiece's do."""
    assert tokenizer.token_bytes is not None
    ids = tokenizer.encode("a", add_special_tokens=False)
    return bool(ids) and tokenizer.token_bytes.get(ids[0], b"").startswith(b" ")
