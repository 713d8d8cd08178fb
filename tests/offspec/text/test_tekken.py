"""Mistral's tekken.json: ids beside those of transformers' conversion, and files that nobody should trust."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from offspec.errors import TokenizerError
from offspec.text.tokenizer import Tokenizer

from ...refusals import refused
from .varied_texts import TEXTS

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
    r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
WORDS = ("he", "th", "the", " t", " the", "in", "ing", "er", "  ", "    ", "\n\n", "é", "an", "and", " and", "19")


def content(**more: Any) -> dict[str, Any]:
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    return {
        "config": {"pattern": PATTERN, "default_vocab_size": 10 + len(tokens) - 1, "default_num_special_tokens": 10},
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(SPECIAL)],
        **more,
    }


def write_tekken(folder: Path, **more: Any) -> Path:
    file = folder / "tekken.json"
    file.write_text(json.dumps(content(**more)))
    return file


def test_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    """Its last token is not used, as default_vocab_size says."""
    convert = pytest.importorskip("transformers.integrations.mistral.tokenizer").MistralConverter
    file = write_tekken(tmp_path)
    tokenizer, theirs = Tokenizer.load(file), convert(str(file)).converted()
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == {2}
    assert tokenizer.vocab_size == 10 + 256 + len(WORDS) - 1
    for text in (*TEXTS, "[INST] the thing</s><SPECIAL_9>", "1919 and the"):
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert ids[1:] == theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids[1:]) == theirs.decode(ids[1:])


def test_a_chat_needs_a_template_beside_it(tmp_path: Path) -> None:
    file = write_tekken(tmp_path)
    with refused(TokenizerError, file, "chat_template.jinja"):
        Tokenizer.load(file).check_chat_template()
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0]['content'] }}[/INST]")
    assert Tokenizer.load(file).render_chat([{"role": "user", "content": "hi"}]) == "<s>[INST]hi[/INST]"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"config": {"pattern": "("}}, ["cannot be used"]),
        ({"config": {"pattern": "x", "default_num_special_tokens": 2}}, ["5 special tokens"]),
        ({"special_tokens": None}, ["older version"]),
        ({"special_tokens": [{"rank": 1, "token_str": "<s>"}]}, ["without a text or a rank"]),
        ({"vocab": [{"rank": 1, "token_bytes": "YQ=="}]}, ["ranks"]),
        ({"vocab": [{"rank": 0, "token_bytes": "YQ=="}]}, ["byte 0"]),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, more: dict[str, Any], words: list[str]) -> None:
    file = write_tekken(tmp_path, **more)
    with refused(TokenizerError, file, *words):
        Tokenizer.load(file)
