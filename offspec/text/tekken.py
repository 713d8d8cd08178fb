"""Mistral's tekken.json: the tokenizer of checkpoints in Mistral's own layout.

It is byte-level BPE whose tokens' ranks are the priorities of merges, as in tiktoken; a word that is a token is not
merged (mistral-common, tokens/tokenizers/tekken.py). Special tokens have the first ids. It contains no chat template.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from offspec.loaders.files.checkpoint import show

from ..errors import TokenizerError
from .token_bytes import byte_alphabet
from .tokenizer_files import (
    MOST_ADDED_CHARACTERS,
    TokenizerSettings,
    byte_level,
    library_errors,
    read_chat_template,
    read_json,
)

BOS, EOS, UNK, PAD = "<s>", "</s>", "<unk>", "<pad>"
MOST_MERGES = 2**21
_REMEDY = "download it again"


def read_tekken(file: Path) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """The tokenizer, and its settings. Raises TokenizerError."""
    content = read_json(file)
    config, special = content.get("config"), _special_tokens(content, file)
    if not isinstance(config, dict) or not isinstance(config.get("pattern"), str):
        raise TokenizerError(f"{file} has no config.pattern, by which texts are split; {_REMEDY}")
    size = config.get("default_vocab_size")  # with special tokens; a file may list more than are used
    count = size - len(special) if isinstance(size, int) and size > len(special) else None
    tokens = _tokens(content, count, file)
    ids = {_as_text(token): rank + len(special) for rank, token in enumerate(tokens)}
    ids |= {text: rank for rank, text in enumerate(special)}
    with library_errors(f"the tokenizer in {file} cannot be used", _REMEDY):
        backend = byte_level(models.BPE(ids, _merges(tokens, file), ignore_merges=True), [config["pattern"]])
        backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
        named = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNK, "pad_token": PAD}
        template, template_file = read_chat_template(file.parent, {})
        return backend, TokenizerSettings(
            special_tokens={name: text for name, text in named.items() if text in special},
            added_tokens={},
            add_bos=BOS in special,
            eos_ids=frozenset({special.index(EOS)} if EOS in special else ()),
            chat_template=template,
            chat_template_file=template_file,
        )


def _special_tokens(content: dict[str, Any], file: Path) -> list[str]:
    """Texts of the special tokens by id; those that the file reserves have names of mistral-common's making."""
    listed, config = content.get("special_tokens"), content.get("config")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise TokenizerError(f"{file} lists no special tokens (an older version); use tokenizer.json")
    by_rank = {each.get("rank"): each.get("token_str") for each in listed}
    texts = [by_rank.get(rank) for rank in range(len(listed))]
    if not all(isinstance(text, str) and 0 < len(text) <= MOST_ADDED_CHARACTERS for text in texts):
        raise TokenizerError(f"{file} has special tokens without a text or a rank; {_REMEDY}")
    stated = config.get("default_num_special_tokens") if isinstance(config, dict) else None
    count = len(texts) if stated is None else stated
    if not isinstance(count, int) or not len(texts) <= count < 2**16 or len(set(texts)) != len(texts):
        raise TokenizerError(f"{file} has {len(texts)} special tokens, not {show(stated)}, or one twice; {_REMEDY}")
    return [str(text) for text in texts] + [f"<SPECIAL_{rank}>" for rank in range(len(texts), count)]


def _tokens(content: dict[str, Any], count: int | None, file: Path) -> list[bytes]:
    """The bytes of the tokens by rank."""
    listed = content.get("vocab")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise TokenizerError(f"{file} has no list vocab; {_REMEDY}")
    try:
        tokens = [base64.b64decode(each.get("token_bytes") or "", validate=True) for each in listed[:count]]
    except (binascii.Error, TypeError, ValueError) as exc:
        raise TokenizerError(f"{file} has tokens that are not in base64 ({exc}); {_REMEDY}") from exc
    if [each.get("rank") for each in listed[:count]] != list(range(len(tokens))) or len(set(tokens)) != len(tokens):
        raise TokenizerError(f"{file} has tokens whose ranks are not 0, 1, 2, …, or one twice; {_REMEDY}")
    if missing := set(range(256)) - {token[0] for token in tokens if len(token) == 1}:
        raise TokenizerError(f"{file} has no token for byte {min(missing)}; {_REMEDY}")
    if (longest := max(map(len, tokens))) > MOST_ADDED_CHARACTERS:
        raise TokenizerError(f"{file} has a token of {longest} bytes, above {MOST_ADDED_CHARACTERS}; {_REMEDY}")
    return tokens


def _merges(tokens: list[bytes], file: Path) -> list[tuple[str, str]]:
    """Every pair of tokens that forms a token, by that token's rank, then by those of the parts."""
    ranks, merges = {token: rank for rank, token in enumerate(tokens)}, list[tuple[str, str]]()
    for token in tokens:
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(left, right) for left, right in pairs if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_as_text(left), _as_text(right)) for left, right in pairs]
        if len(merges) > MOST_MERGES:
            raise TokenizerError(f"the tokens in {file} need more than {MOST_MERGES} merges, which is the limit")
    return merges


_ALPHABET = byte_alphabet()


def _as_text(token: bytes) -> str:
    return "".join(_ALPHABET[byte] for byte in token)
