"""Streamed text: what of an answer is certain, token by token, and where a stop string ends it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from ..errors import UsageError

REPLACEMENT = "\ufffd"

# Bytes that are no UTF-8 become one U+FFFD each, as in sentencepiece and in the library's ByteFallback decoder.
_EACH_BYTE = "offspec.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)

# A byte-level decoder is back in step after one byte that continues nothing, or after three that do (UTF-8: at most
# four bytes a character, RFC 3629); every token has at least one byte.
_CONTEXT_TOKENS = 3


class TokenDecoder(Protocol):
    """What a stream needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of a text."""

    @property
    def byte_anchor(self) -> int | None:
        """The byte token of "A" if the decoder joins byte tokens to characters (sentencepiece), else None."""

    def stored_token(self, token_id: int) -> str | None:
        """The token as the vocabulary has it; None for an id without one."""

    def decode_stored(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of these ids, as the library gives it."""


class TextStream:
    """Tokens in, text out as soon as it is certain; ends before the first stop string. For one answer."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        if "" in stop:
            raise UsageError("a stop string is empty, and every text begins with it: leave it out")
        self.stopped: str | None = None
        self._detokenizer = detokenizer
        self._stops = tuple(stop)
        self._tail = ""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain: often its own, sometimes none, sometimes more."""
        return "" if self.stopped is not None else self._cut(self._detokenizer.push(token_id), final=False)

    def flush(self) -> str:
        """What was held back, at the end of the answer: half characters as U+FFFD, half stop strings as they are."""
        return "" if self.stopped is not None else self._cut(self._detokenizer.flush(), final=True)

    def _cut(self, text: str, *, final: bool) -> str:
        self._tail += text
        at, stop = _first_stop(self._tail, self._stops)
        open_at = len(self._tail) if final else _first_open_stop(self._tail, self._stops)
        if stop is not None and at <= open_at:
            self.stopped = stop
            return self._tail[:at]
        # A longer stop string that begins earlier may still come true, and then it wins, wherever tokens end.
        shown, self._tail = self._tail[:open_at], self._tail[open_at:]
        return shown


class Detokenizer:
    """Token ids → the text that no later token can change.

    The text of new tokens is decode(context + new) less decode(context): a sliding window, constant cost a token. The
    context shows the decoder that this is not the text's beginning, where it may strip a space.
    """

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._anchor = tokenizer.byte_anchor
        self._context: list[int] = []
        self._num_held = 0  # 1: the context's last character, a U+FFFD that may become another, has not been given out
        self._run: list[int] = []  # byte tokens of the character that is under way, and its bytes:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)

    def push(self, token_id: int) -> str:
        token = self._tokenizer.stored_token(token_id)
        if not token or (self._skip_special_tokens and token_id in self._tokenizer.special_ids):
            return ""
        byte = None if self._anchor is None else _fallback_byte(token)
        if byte is None:
            return self._end_run() + self._extend([token_id])
        return self._push_byte(token_id, byte)

    def flush(self) -> str:
        held, self._num_held = REPLACEMENT * self._num_held, 0
        return held + self._end_run()

    def _extend(self, ids: list[int]) -> str:
        num_shown = len(self._decode(self._context)) - self._num_held
        self._context += ids
        text = self._decode(self._context)
        # However many bytes wait for the rest of their character, a byte-level decoder shows them as one U+FFFD.
        self._num_held = int(self._anchor is None and text.endswith(REPLACEMENT))
        del self._context[:-_CONTEXT_TOKENS]
        return text[num_shown : len(text) - self._num_held]

    def _push_byte(self, token_id: int, byte: int) -> str:
        self._run.append(token_id)
        text = self._utf8.decode(bytes([byte]))
        if not text:
            return ""
        # The decoder decides on good bytes (it may strip the text's first space), but would drop them beside bad ones.
        text = text if REPLACEMENT in text else self._extend(self._run)
        waiting, _ = self._utf8.getstate()
        self._restart(self._run[len(self._run) - len(waiting) :])
        return text

    def _end_run(self) -> str:
        if not self._run:
            return ""
        self._restart([])
        return self._utf8.decode(b"", final=True)

    def _restart(self, run: list[int]) -> None:
        # The context is not the last run: with the next byte tokens it could be bad UTF-8, which would spoil them too.
        self._run = run
        self._context = [] if self._anchor is None else [self._anchor]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode_stored(ids, self._skip_special_tokens)


def _fallback_byte(token: str) -> int | None:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return int(match[1], 16) if match else None


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str | None]:
    """Where the first stop string begins and which it is: of several there the shortest, which is complete first."""
    found = [(at, len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    at, _, stop = min(found, default=(-1, 0, None))
    return at, stop


def _first_open_stop(text: str, stops: tuple[str, ...]) -> int:
    """Where the end of `text` first looks like the beginning of a stop string; len(text) if nowhere."""
    longest = max(map(len, stops), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(stop.startswith(text[at:]) for stop in stops):
            return at
    return len(text)
