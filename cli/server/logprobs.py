"""Log-probabilities of tokens as OpenAI's JSON: of chats, and of text completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from .request_parts import Json

if TYPE_CHECKING:
    from offspec import TokenLogprob
    from offspec.text.tokenizer import Tokenizer

LEAST = -9999.0  # instead of minus infinity, which JSON does not have; so has vLLM


class TokenTexts:
    """What tokens stand for. Special tokens have their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def content(self, token: int) -> bytes:
        token_bytes = self._tokenizer.token_bytes or {}
        return token_bytes[token] if token in token_bytes else self._tokenizer.decode_stored([token], False).encode()

    def text(self, token: int, marker: str = "") -> str:
        r"""A token's text; for a part of a character its bytes as OpenAI writes them: \xe2\x80 after a marker."""
        content = self.content(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return marker + "".join(f"\\x{byte:02x}" for byte in content)

    def by_token(self, tokens: Sequence[int]) -> list[str]:
        """The text of a prompt by its tokens, as `Step.texts` has an answer's."""
        stream = self._tokenizer.stream()
        return [stream.push(token) for token in tokens]


def of_chat(logprobs: Sequence[TokenLogprob], texts: TokenTexts) -> Json:
    """`logprobs` of a chat's choice, or of a part of it."""
    content = [
        {
            **_described(each.token, each.logprob, texts),
            "top_logprobs": [_described(token, value, texts) for token, value in each.likeliest],
        }
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def _described(token: int, value: float, texts: TokenTexts) -> Json:
    return {"token": texts.text(token), "logprob": max(value, LEAST), "bytes": list(texts.content(token))}


def of_text(scored: Sequence[tuple[int, TokenLogprob | None, str]], texts: TokenTexts, offset: int) -> Json:
    """`logprobs` of a text completion's choice, or of a part of it, which begins at `offset` of its text.

    scored: tokens, their log-probabilities (None of a prompt's first), and the text that became final with each.
    """
    logprobs = [each for _, each, _ in scored]
    starts = list(accumulate((len(text) for *_, text in scored), initial=offset))[: len(scored)]
    return {
        "tokens": [_name(token, texts) for token, *_ in scored],
        "token_logprobs": [None if each is None else max(each.logprob, LEAST) for each in logprobs],
        "top_logprobs": [None if each is None else _likeliest(each, texts) for each in logprobs],
        "text_offset": starts,
    }


def _likeliest(scored: TokenLogprob, texts: TokenTexts) -> Json:
    """The likeliest tokens and the text's own. Of tokens with one text, the likeliest."""
    named: Json = {}
    for token, value in (*scored.likeliest, (scored.token, scored.logprob)):
        named.setdefault(_name(token, texts), max(value, LEAST))
    return named


def _name(token: int, texts: TokenTexts) -> str:
    return texts.text(token, marker="bytes:")
