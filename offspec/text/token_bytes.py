"""The bytes that each token of a vocabulary stands for, by its tokenizer's decoder. Knows nothing of models."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def token_bytes(backend: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """Token id → bytes, without special tokens and tokens that stand for no text.

    None if the tokenizer is neither byte-level BPE nor of sentencepiece's kind, because the text of its tokens depends
    on their neighbours.
    """
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"decoders": []}
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        convert = _byte_level
    elif "Metaspace" in kinds or any(
        step["type"] == "Replace" and step.get("pattern") == {"String": _SPACE} and step.get("content") == " "
        for step in steps
    ):
        convert = _sentencepiece if "ByteFallback" in kinds else _plain
    else:
        return None
    added = backend.get_added_tokens_decoder()
    contents = dict[int, bytes]()
    for text, token_id in backend.get_vocab(with_added_tokens=True).items():
        if (token := added.get(token_id)) is None:
            content = convert(text)
        else:
            content = None if token.special else token.content.encode("utf-8", "surrogatepass")
        if content:
            contents[token_id] = content
    return contents


def byte_alphabet() -> list[str]:
    """The character for each byte in byte-level vocabularies (GPT-2, encoder.py)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTES = {char: byte for byte, char in enumerate(byte_alphabet())}


def _byte_level(text: str) -> bytes | None:
    """None for a token with a character that stands for no byte."""
    content = [_BYTES.get(char, -1) for char in text]
    return None if -1 in content else bytes(content)


def _plain(text: str) -> bytes:
    return text.replace(_SPACE, " ").encode("utf-8", "surrogatepass")


def _sentencepiece(text: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else _plain(text)
