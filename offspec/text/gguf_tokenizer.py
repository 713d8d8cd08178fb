"""The tokenizer of a GGUF file: metadata → a tokenizer of the `tokenizers` library with llama.cpp's ids.

Three kinds are supported: byte-level BPE ("gpt2"), and sentencepiece's BPE with scores ("llama") or merges ("gemma4").
llama.cpp's `clean_spaces`, which changes decoded text, has no counterpart here. This module does not read the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from offspec.loaders.files.checkpoint import show

from ..errors import UnsupportedModelError
from .gguf_pretokenizers import WORD_RULES
from .gguf_tokens import ADDED_KINDS, REMEDY, GgufTokens, Metadata, TokenKind, is_utf8, read_tokens
from .tokenizer_files import MOST_ADDED_CHARACTERS, TokenizerSettings, byte_level, library_errors

MOST_MERGES = 2**21  # Gemma's vocabulary has 0.6 million
_SPACE = "▁"
_SENTENCEPIECE_ROLES = {"unk": 0, "bos": 1, "eos": 2}
_GEMMA4_ROLES = {"eos": 1, "bos": 2, "unk": 3}
_LINES = r"[^\n]+|[\n]+"  # Gemma 4's words (llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_GEMMA4)
_TEMPLATE_NAMES = {"bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "pad": "pad_token"}


def read_gguf(values: Mapping[str, Any], path: Path) -> tuple[tokenizers.Tokenizer, TokenizerSettings]:
    """The tokenizer of a file's metadata, and its settings.

    Raises TokenizerError for damaged metadata, UnsupportedModelError for an unsupported kind of tokenizer.
    """
    metadata = Metadata(values, path)
    kind = metadata.optional("tokenizer.ggml.model", str)
    if kind is None:
        raise metadata.error("it has no tokenizer (tokenizer.ggml.model)")
    with library_errors(f"the tokenizer in {path} cannot be used", REMEDY):
        if kind == "gpt2":
            tokens = read_tokens(metadata, {})
            backend, adds_bos = _byte_level(metadata, tokens)
        elif kind == "llama":
            tokens = read_tokens(metadata, _SENTENCEPIECE_ROLES)
            backend, adds_bos = _sentencepiece(metadata, tokens, _scored_merges(metadata, tokens)), True
        elif kind == "gemma4":
            tokens = read_tokens(metadata, _GEMMA4_ROLES)
            backend, adds_bos = _sentencepiece(metadata, tokens, _merges(metadata, tokens)), True
            backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_LINES), "isolated")
        else:
            raise UnsupportedModelError(
                f"{path} has a tokenizer of kind {show(kind)}, which is not supported (only gpt2, llama and gemma4 "
                "are); use the model's safetensors checkpoint"
            )
        _add_tokens(backend, tokens, metadata)
        stated = metadata.optional("tokenizer.ggml.add_bos_token", bool)
        add_bos = adds_bos if stated is None else stated
        if add_bos and "bos" not in tokens.roles:
            raise metadata.error("its prompts begin with BOS, but it has no BOS token (tokenizer.ggml.bos_token_id)")
        template = metadata.optional("tokenizer.chat_template", str)
        if template is not None and not is_utf8(template):
            raise metadata.error("tokenizer.chat_template is not UTF-8")
        special = {
            _TEMPLATE_NAMES[role]: tokens.texts[i] for role, i in tokens.roles.items() if role in _TEMPLATE_NAMES
        }
        return backend, TokenizerSettings(
            special_tokens=special,
            added_tokens={},
            add_bos=add_bos,
            eos_ids=tokens.end_ids,
            chat_template=template,
            chat_template_file=metadata.path,
        )


def _byte_level(metadata: Metadata, tokens: GgufTokens) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether prompts begin with BOS by default."""
    name = metadata.optional("tokenizer.ggml.pre", str)
    if name not in WORD_RULES:
        description = "does not state" if name is None else f"has unknown rules, {show(name)},"
        raise UnsupportedModelError(
            f"{metadata.path} {description} how its tokenizer splits text into words (tokenizer.ggml.pre); use a newer "
            "conversion of the model, or its safetensors checkpoint"
        )
    rules = WORD_RULES[name]
    model = models.BPE(tokens.ids, _merges(metadata, tokens), ignore_merges=rules.ignores_merges)
    return byte_level(model, rules.splits), rules.adds_bos


def _merges(metadata: Metadata, tokens: GgufTokens) -> list[tuple[str, str]]:
    """Pairs of tokens to merge, in order of priority."""
    lines = metadata.array("tokenizer.ggml.merges", str)
    if lines is None:
        raise metadata.error("tokenizer.ggml.merges is missing")
    if len(lines) > MOST_MERGES:
        raise metadata.error(f"it has {len(lines)} merges, more than the limit of {MOST_MERGES}")
    merges = dict[tuple[str, str], None]()  # the first of equal pairs counts
    for place, line in enumerate(lines):
        space = line.find(" ", 1)
        left, right = line[: max(space, 0)], line[space + 1 :]
        if not (left in tokens.ids and right in tokens.ids and left + right in tokens.ids):
            raise metadata.error(f"merge {place} is {show(line)}, but the vocabulary lacks a part of it or its result")
        merges[left, right] = None
    return list(merges)


def _sentencepiece(metadata: Metadata, tokens: GgufTokens, merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Sentencepiece's BPE: characters are merged, and spaces are characters.

    With scores, the pair whose token has the highest one is merged first (sentencepiece, bpe_model.cc). There, two
    pairs for the same token have one rank, and the leftmost is merged. Here, as in transformers, one pair precedes the
    other. Texts that show the difference are rare, such as "xyx" split in this way by earlier merges.
    """
    unk = tokens.text_of("unk")
    model = models.BPE(tokens.ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    has_prefix = metadata.optional("tokenizer.ggml.add_space_prefix", bool) is not False
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if has_prefix else spaces)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend


def _scored_merges(metadata: Metadata, tokens: GgufTokens) -> list[tuple[str, str]]:
    """Every pair of tokens that forms a token, by that token's score, highest first."""
    plain = (TokenKind.NORMAL, TokenKind.UNUSED)
    parts = {text for text, kind in zip(tokens.texts, tokens.kinds, strict=True) if kind in plain}
    merges = list[tuple[str, str]]()
    for token_id in sorted(range(len(tokens.texts)), key=lambda i: -tokens.scores[i]):
        text = tokens.texts[token_id]
        if text not in parts:
            continue
        if len(text) > MOST_ADDED_CHARACTERS:
            raise metadata.error(f"token {token_id} has {len(text)} characters, the limit is {MOST_ADDED_CHARACTERS}")
        merges += [(text[:at], text[at:]) for at in range(1, len(text)) if text[:at] in parts and text[at:] in parts]
        if len(merges) > MOST_MERGES:
            raise metadata.error(f"its tokens need more than {MOST_MERGES} merges, which is the limit")
    return merges


def _add_tokens(backend: tokenizers.Tokenizer, tokens: GgufTokens, metadata: Metadata) -> None:
    """Add the tokens that are found in a text before it is split: special and user-defined ones."""
    # Phi-3's remove the spaces after them. Files do not state this; as llama.cpp, it goes by the name.
    name = (metadata.optional("general.name", str) or "").lower()
    keep_spaces = ("<unk>", "<s>", "<|endoftext|>")
    added = [
        tokenizers.AddedToken(
            text,
            special=kind != TokenKind.USER_DEFINED,
            normalized=False,
            rstrip=("phi-3" in name or "phi3" in name) and text not in keep_spaces,
        )
        for text, kind in zip(tokens.texts, tokens.kinds, strict=True)
        if kind in ADDED_KINDS
    ]
    longest = max((len(token.content) for token in added), default=0)
    if longest > MOST_ADDED_CHARACTERS:
        raise metadata.error(f"a special token has {longest} characters, the limit is {MOST_ADDED_CHARACTERS}")
    backend.add_tokens(added)  # in one call, because each call processes all earlier ones again
