"""Streamed text: decodes an answer token by token, and ends it before a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence

from ..errors import UsageError

REPLACEMENT = "\ufffd"

# Each byte of invalid UTF-8 becomes a U+FFFD, as in sentencepiece and in the library's ByteFallback decoder.
_EACH_BYTE = "offspec.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)

# A byte-level decoder resynchronises after one byte that starts a character, or after three continuation bytes (UTF-8
# has at most four bytes per character, RFC 3629); every token has at least one byte.
_CONTEXT_TOKENS = 3


class TextStream:
    """Turns one answer's tokens into text as soon as it is final; ends before the first stop string."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        if "" in stop:
            raise UsageError("a stop string is empty, which would end every text at once; omit it (`stop`)")
        self.stopped: str | None = None
        self._detokenizer = detokenizer
        self._stops = tuple(stop)
        self._tail = ""

    def push(self, token_id: int) -> str:
        """The text that becomes final with this token: usually its own, sometimes none, sometimes more."""
        return "" if self.stopped is not None else self._cut(self._detokenizer.push(token_id), final=False)

    def flush(self, *, is_cut: bool = False) -> str:
        """The rest of the text at the end of the answer.

        An incomplete character becomes U+FFFD, or is left out if a limit has cut the answer.
        """
        return "" if self.stopped is not None else self._cut(self._detokenizer.flush(is_cut=is_cut), final=True)

    def _cut(self, text: str, *, final: bool) -> str:
        self._tail += text
        # The first stop string; of several at one position, the shortest.
        matches = [(at, len(stop), stop) for stop in self._stops if (at := self._tail.find(stop)) >= 0]
        at, _, stop = min(matches, default=(-1, 0, None))
        open_at = len(self._tail) if final else _first_open_stop(self._tail, self._stops)
        if stop is not None and at <= open_at:
            self.stopped = stop
            return self._tail[:at]
        # A longer stop string that begins earlier may still be completed; then it takes precedence.
        shown, self._tail = self._tail[:open_at], self._tail[open_at:]
        return shown


class Detokenizer:
    """Token ids → text that no later token can change.

    The text of new tokens is decode(context + new) without decode(context), with a sliding window as the context, so
    the cost per token is constant. The context matters because decoders may strip a space at a text's beginning.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        entry_of: Callable[[int], str | None],
        byte_anchor: int | None,
        after: Sequence[int] = (),
    ) -> None:
        """decode: the library's. entry_of: a token's entry in the vocabulary; None for one that adds no text.

        byte_anchor: the tokenizer's. after: ids of a text that ends with a whole character, and that the new text
        continues.
        """
        self._decode, self._entry_of, self._anchor = decode, entry_of, byte_anchor
        self._context: list[int] = []
        self._num_held = 0  # 1: the context's last character is a U+FFFD that may change, so it is held back
        self._run: list[int] = []  # byte tokens of an incomplete character, and its bytes:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)
        for token_id in after[-_CONTEXT_TOKENS:]:
            self.push(token_id)
        self.flush()

    def push(self, token_id: int) -> str:
        if not (token := self._entry_of(token_id)):
            return ""
        match = None if self._anchor is None else re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
        if match is None:
            return self._end_run() + self._extend([token_id])
        self._run.append(token_id)
        text = self._utf8.decode(bytes([int(match[1], 16)]))
        if not text:
            return ""
        # Valid bytes go through the decoder (it may strip the text's first space), which drops them near invalid ones.
        text = text if REPLACEMENT in text else self._extend(self._run)
        waiting, _ = self._utf8.getstate()
        self._restart(self._run[len(self._run) - len(waiting) :])
        return text

    def flush(self, *, is_cut: bool = False) -> str:
        held, self._num_held = REPLACEMENT * self._num_held, 0
        rest = held + self._end_run()
        return "" if is_cut else rest

    def _extend(self, ids: list[int]) -> str:
        num_shown = len(self._decode(self._context)) - self._num_held
        self._context += ids
        text = self._decode(self._context)
        # A byte-level decoder shows all bytes of an incomplete character as one U+FFFD.
        self._num_held = int(self._anchor is None and text.endswith(REPLACEMENT))
        del self._context[:-_CONTEXT_TOKENS]
        return text[num_shown : len(text) - self._num_held]

    def _end_run(self) -> str:
        if not self._run:
            return ""
        self._restart([])
        return self._utf8.decode(b"", final=True)

    def _restart(self, run: list[int]) -> None:
        # The context excludes the last run, which could form invalid UTF-8 with the next byte tokens.
        self._run = run
        self._context = [] if self._anchor is None else [self._anchor]


def _first_open_stop(text: str, stops: tuple[str, ...]) -> int:
    """The first position from which the end of `text` may begin a stop string; len(text) if there is none."""
    longest = max(map(len, stops), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(stop.startswith(text[at:]) for stop in stops):
            return at
    return len(text)
