"""Protects against special tokens in messages: only the chat template may write special tokens.

Otherwise a message with `<|end|>\\n<|system|>` would get the ids of a system turn. In messages, each text that looks
like a special token is replaced by a private character. All special tokens in the rendered text are then the
template's. The text is encoded as a whole, by a second tokenizer that has other names for the special tokens. There,
the replaced texts are plain text, and everything merges as usual.
"""

from __future__ import annotations

import json
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Any

import tokenizers

from ..errors import TokenizerError
from .tokenizer_files import PARTS

FIRST_PRIVATE = 0xF0000  # Unicode's planes 15 and 16 are for private use
PRIVATE = tuple(chain(range(FIRST_PRIVATE, 0xFFFFE), range(0x100000, 0x10FFFE)))
ASSISTANT = "assistant"


@dataclass(frozen=True)
class HiddenChat:
    """messages: with a private character for each text that looks like a special token. texts: character → text."""

    messages: list[dict[str, Any]]
    texts: Mapping[str, str]


@dataclass(frozen=True)
class EncodedText:
    """ids, and the characters [start, end) of each in the encoded text.

    at: the requested position in that text; None if it is inside a special token.
    """

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]
    at: int | None


@dataclass(frozen=True)
class _Piece:
    """Characters [start, end) of a text with private characters: plain text, or the special token `token_id`."""

    start: int
    end: int
    plain: str  # the original text
    renamed: str  # the text for the second tokenizer
    token_id: int | None = None


class SpecialText:
    """Finds texts in messages that look like special tokens of one tokenizer, and encodes them as plain text.

    Special tokens are the added tokens with the flag `special`, and those written like markup that the template itself
    contains (`<think>`). The latter stay special in the assistant's messages, where templates search for them. Methods
    change only caches.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: str) -> None:
        self._backend, self._template = backend, template
        self._added: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        flagged = {i for i, token in self._added.items() if token.special and token.content.strip()}
        parts = {text for texts in PARTS for text in texts}
        # Markup is not written like a word: `<think>`, `[INST]`.
        markup = {
            i: token.content
            for i, token in self._added.items()
            if any(not char.isalnum() and not char.isspace() and char not in "_▁" for char in token.content)
        }
        named = {i for i, content in markup.items() if content in template or content in parts}
        self._ids, self._ids_in_replies = frozenset(flagged | named), frozenset(flagged)
        self._sorted = sorted(self._added[token_id].content for token_id in self._ids)
        self._reversed = sorted(content[::-1] for content in self._sorted)
        self._longest = max(map(len, self._sorted), default=0)

    def hide(self, messages: Sequence[Mapping[str, Any]]) -> HiddenChat:
        """The messages for the template. Values other than texts, such as calls of tools, may contain texts."""
        texts = [text for message in messages for text in _texts(list(message.values()))]
        used = {ord(char) for char in set(self._template).union(*texts) if ord(char) >= FIRST_PRIVATE}
        private, names = (chr(code) for code in PRIVATE if code not in used), dict[str, str]()

        def name(text: str) -> str:
            if text not in names:
                names[text] = next(private)
            return names[text]

        hidden = [dict(message) for message in messages]
        for message in hidden:
            ids = self._ids_in_replies if message.get("role") == ASSISTANT else self._ids
            for key, value in message.items():
                # In the assistant's text, templates search for their markup; in calls of tools they do not.
                wanted = ids if isinstance(value, str) else self._ids
                if _is_free(key, value):
                    message[key] = _mapped(value, partial(self._hidden, ids=wanted, name=name))
        texts = [text for message in hidden for text in _texts(list(message.values()))]
        beginnings, endings = [text.lstrip() for text in texts], [text.rstrip() for text in texts]
        for message in hidden:
            for key, value in message.items():
                if _is_free(key, value):
                    message[key] = _mapped(
                        value, partial(self._parts_hidden, beginnings=beginnings, endings=endings, name=name)
                    )
        return HiddenChat(hidden, {char: text for text, char in names.items()})

    def _hidden(self, text: str, ids: frozenset[int], name: Callable[[str], str]) -> str:
        pieces, done = list[str](), 0
        for start, end, token_id in self._matches(text):
            if token_id in ids:
                pieces += [text[done:start], name(text[start:end])]
                done = end
        return "".join([*pieces, text[done:]])

    def _parts_hidden(self, text: str, beginnings: list[str], endings: list[str], name: Callable[[str], str]) -> str:
        """Hide a part at the text's start or end that would form a special token with its neighbour.

        The neighbour is the template's or another message's text. Spaces between them are ignored, because a template
        may remove them.
        """
        stripped = text.rstrip()
        for length in range(min(self._longest - 1, len(stripped)), 0, -1):
            if _begins(self._sorted, part := stripped[-length:]) and self._is_completed(part, beginnings, at_end=True):
                text = stripped[:-length] + name(part) + text[len(stripped) :]
                break
        stripped = text.lstrip()
        for length in range(min(self._longest - 1, len(stripped)), 0, -1):
            part = stripped[:length]
            if _begins(self._reversed, part[::-1]) and self._is_completed(part, endings, at_end=False):
                return text[: len(text) - len(stripped)] + name(part) + stripped[length:]
        return text

    def _is_completed(self, part: str, others: list[str], *, at_end: bool) -> bool:
        """Whether a neighbour may complete `part` (at a text's end, or its start) to a special token."""
        if at_end:
            rests, joins = [each.removeprefix(part) for each in self._sorted if each.startswith(part)], str.startswith
        else:
            rests, joins = [each.removesuffix(part) for each in self._sorted if each.endswith(part)], str.endswith
        return any(
            rest in self._template_without or any(joins(other, rest) for other in others) for rest in rests if rest
        )

    def encode(self, text: str, texts: Mapping[str, str], at: int = 0) -> EncodedText:
        """Encode a rendered text of hidden messages.

        texts: a `HiddenChat`'s. at: a position in `text`, which the result has in the encoded text.

        Raises TokenizerError if the vocabulary has only the special token for a plain text.
        """
        pieces = self._pieces(text, str.maketrans(dict(texts)), at)
        plain = "".join(piece.plain for piece in pieces)
        places, length = list[tuple[int, int, int]](), 0  # of the special tokens in the plain text
        for piece in pieces:
            if piece.token_id is not None:
                places.append((length, length + len(piece.plain), piece.token_id))
            length += len(piece.plain)
        if self._matches(plain) == places:  # no hidden text would become a special token
            encoding = self._backend.encode_batch([plain], add_special_tokens=False)[0]
            return EncodedText(encoding.ids, encoding.offsets, _moved(pieces, at, lambda piece: piece.plain))
        renamed = "".join(piece.renamed for piece in pieces)
        encoding = self._renamed.encode_batch([renamed], add_special_tokens=False)[0]
        ids = [self._old_ids.get(token_id, token_id) for token_id in encoding.ids]
        for token_id, (start, end) in zip(ids, encoding.offsets, strict=True):
            if token_id in self._ids and self._added[token_id].content in renamed[start:end]:
                raise TokenizerError(
                    f"a message contains {renamed[start:end]!r}, for which this vocabulary has only a special token; "
                    "change the message, or allow special tokens in messages (`special_in_text`)"
                )
        return EncodedText(ids, encoding.offsets, _moved(pieces, at, lambda piece: piece.renamed))

    def _pieces(self, text: str, table: Mapping[int, str], at: int) -> list[_Piece]:
        """The text, split around special tokens, and at the position `at` if it is outside of them."""
        pieces, done = list[_Piece](), 0
        for start, end, token_id in [*self._matches(text), (len(text), len(text), None)]:
            for first, last in pairwise([done, *([at] if done < at < start else []), start]):
                between = text[first:last].translate(table)
                pieces.append(_Piece(first, last, between, between))
            if token_id is not None:
                pieces.append(_Piece(start, end, text[start:end], self._new_names[token_id], token_id))
            done = end
        return pieces

    def _matches(self, text: str) -> list[tuple[int, int, int]]:
        """Start, end and id of each special token that the library finds in a text."""
        encoding = self._finder.encode_batch([text], add_special_tokens=False)[0]
        pairs = zip(encoding.offsets, encoding.ids, strict=True)
        return [(*offsets, self._found_ids[i]) for offsets, i in pairs if self._found_ids.get(i) in self._ids]

    @cached_property
    def _finder(self) -> tokenizers.Tokenizer:
        """A tokenizer with the added tokens only. They do not include neighbouring spaces."""
        finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
        if (normalizer := self._backend.normalizer) is not None:
            finder.normalizer = normalizer
        flags = ("single_word", "normalized")
        finder.add_tokens(
            [
                tokenizers.AddedToken(token.content, **{flag: getattr(token, flag) for flag in flags})
                for token in self._added.values()
            ]
        )
        return finder

    @cached_property
    def _found_ids(self) -> dict[int, int]:
        """The finder's ids → the tokenizer's."""
        contents = {token.content: token_id for token_id, token in self._added.items()}
        return {i: contents[token.content] for i, token in self._finder.get_added_tokens_decoder().items()}

    @cached_property
    def _new_names(self) -> dict[int, str]:
        """Special ids → their names in the second tokenizer. They are random, so that no message can contain them."""
        secret = secrets.token_hex(8)
        return {token_id: f"{chr(PRIVATE[0])}{secret}.{token_id}{chr(PRIVATE[1])}" for token_id in self._ids}

    @cached_property
    def _renamed(self) -> tokenizers.Tokenizer:
        """The tokenizer with other names for the special tokens, which changes their ids."""
        state = json.loads(self._backend.to_str())
        for token in state["added_tokens"]:
            if token["id"] in self._new_names:
                token |= {"content": self._new_names[token["id"]], "normalized": False}
        state["post_processor"] = None  # it names special tokens, and is not used
        return tokenizers.Tokenizer.from_str(json.dumps(state))

    @cached_property
    def _old_ids(self) -> dict[int, int]:
        """The second tokenizer's ids of added tokens → the first one's."""
        names = {token_id: self._new_names.get(token_id, token.content) for token_id, token in self._added.items()}
        ids = {self._renamed.token_to_id(name): token_id for token_id, name in names.items()}
        return {new: old for new, old in ids.items() if new is not None}

    @cached_property
    def _template_without(self) -> str:
        """The template's source without its special tokens."""
        rest, done = list[str](), 0
        for start, end, _ in self._matches(self._template):
            rest.append(self._template[done:start])
            done = end
        return "\n".join([*rest, self._template[done:]])


def _begins(contents: Sequence[str], part: str) -> bool:
    """Whether one of the sorted contents begins with `part` and is longer."""
    at = bisect_right(contents, part)
    return at < len(contents) and contents[at].startswith(part)


def _is_free(key: str, value: object) -> bool:
    """Whether a message's value is free text, or contains some; a role of one word is not."""
    return not (key == "role" and isinstance(value, str) and value.isidentifier())


def _texts(value: object) -> Iterator[str]:
    """All texts in a message's value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from (*_texts(key), *_texts(part))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with all of its texts changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(part, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(part, change) for part in value]
    return value


def _moved(pieces: Iterable[_Piece], at: int, written: Callable[[_Piece], str]) -> int | None:
    """The position `at` of the text with private characters, in the written text; pieces are split there."""
    length = 0
    for piece in pieces:
        if piece.start < at < piece.end:
            return None
        length += len(written(piece)) if piece.end <= at else 0
    return length
