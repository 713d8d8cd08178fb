"""Tokenizers inside of GGUF files: ids beside llama.cpp's on the same files, and metadata that nobody should trust."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from offspec.checkpoints.conversion import convert
from offspec.errors import TokenizerError, UnsupportedModelError
from offspec.loaders.params import ConvertParams
from offspec.text import gguf_tokenizer
from offspec.text.gguf_pretokenizers import WORD_RULES
from offspec.text.gguf_tokenizer import read_gguf
from offspec.text.tokenizer import Tokenizer, check_vocabularies
from offspec.text.tokenizer_files import as_files

from ...llama_cpp import LlamaCpp
from ...loaders.gguf_writing import write_gguf
from ...refusals import refused
from .varied_texts import TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SEPARATOR = "<|separator|>"  # a special token between texts, so that one request asks for many
CHATML = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}{{ bos_token }}"


# ---- the oracle ------------------------------------------------------------------------------------------------------


def differing(llama_cpp: LlamaCpp, file: Path, texts: Sequence[str] = TEXTS) -> list[str]:
    """Those of `texts` that have other ids by llama.cpp than by offspec; all are asked for in one go.

    llama.cpp compiles its expressions for each text anew, so those that neither begin nor end with white space are
    lines of a few.
    """
    lines = [text for text in texts if text and text == text.strip()]
    texts = [*(text for text in texts if text != text.strip()), *("\n".join(lines[i::8]) for i in range(8))]
    tokenizer, together = Tokenizer.load(file), SEPARATOR.join(texts)
    separator = tokenizer.token_id(SEPARATOR)
    assert separator is not None
    ours, theirs = (
        [list(part) for is_between, part in groupby(ids, separator.__ne__) if is_between]
        for ids in (tokenizer.encode(together, add_special_tokens=False), llama_cpp.ids(file, [together])[0])
    )
    return [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b]


# ---- files -----------------------------------------------------------------------------------------------------------


def write_model(path: Path, tokenizer: Mapping[str, Any]) -> Path:
    """A llama model of one layer with this tokenizer, which llama.cpp opens."""
    width, num_tokens = 32, len(tokenizer["tokenizer.ggml.tokens"])
    sizes = {"embedding_length": width, "feed_forward_length": width, "rope.dimension_count": width}
    sizes |= {"block_count": 1, "context_length": 64, "attention.head_count": 1}
    metadata = {f"llama.{name}": size for name, size in sizes.items()}
    square, ones = np.zeros((width, width)), np.ones(width)
    products = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {f"blk.0.{name}.weight": square for name in products}
    tensors |= {f"{name}.weight": ones for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")}
    tensors["token_embd.weight"] = np.zeros((num_tokens, width))
    return write_gguf(path, "llama", {**metadata, "llama.attention.layer_norm_rms_epsilon": 1e-5, **tokenizer}, tensors)


def parts_between(special: list[str]) -> list[str]:
    """What is between special tokens in TEXTS, each twice, so that trainers take all of it for worth a token."""
    pattern = "|".join(map(re.escape, special))
    return [part for text in TEXTS for part in re.split(pattern, text) for _ in range(2)]


def trained(backend: tokenizers.Tokenizer, texts: list[str], **settings: Any) -> tuple[list[str], list[str]]:
    """The tokens of a model trained on these texts, by id, and the merges as GGUF files write them."""
    backend.train_from_iterator(texts, trainers.BpeTrainer(show_progress=False, min_frequency=2, **settings))
    model = json.loads(backend.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [" ".join(merge) for merge in model["merges"]]


@cache
def byte_level_metadata() -> dict[str, Any]:
    """A vocabulary whose merges cross whatever could be a word's end, so that every cut shows in the ids."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = [SEPARATOR, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "  \n"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens, merges = trained(backend, parts_between(special), vocab_size=2500, initial_alphabet=alphabet)
    types = [NORMAL] * len(tokens) + [CONTROL] * 6 + [USER_DEFINED] * 2
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens + special,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) + 4,
        "tokenizer.ggml.eos_token_id": len(tokens) + 3,
        "tokenizer.chat_template": CHATML,
    }


def metadata_with(pre: str = "qwen2", **changed: Any) -> dict[str, Any]:
    """Byte-level metadata; changed: by the end of the key, None leaves it out."""
    values = byte_level_metadata() | {"tokenizer.ggml.pre": pre}
    values |= {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    return {key: value for key, value in values.items() if value is not None}


# ---- beside llama.cpp ------------------------------------------------------------------------------------------------


def has_marks_or_capitals(text: str) -> bool:
    """Beyond ASCII."""
    return any(unicodedata.category(char) in ("Mn", "Mc", "Me", "Lu", "Lt") for char in text if char > "\x7f")


def has_inner_capitals(text: str) -> bool:
    return re.search("[a-z][A-Z]", text) is not None or has_marks_or_capitals(text)


# Where llama.cpp's engine knows less than the expression in the tokenizer's own file says.
COARSER: dict[str, Callable[[str], bool]] = {
    "tekken": has_marks_or_capitals,  # letters have a case in ASCII alone, and no marks
    "gpt-4o": has_marks_or_capitals,
    "kimi-k2": has_inner_capitals,  # letters have no case at all
    "youtu": has_inner_capitals,
    "tiny_aya": lambda text: has_inner_capitals(text) or re.search("[0-9]", text) is not None,
    "superbpe": lambda text: any(char.isdecimal() for char in text if char > "\x7f"),
    "deepseek-coder": lambda text: any(char.isspace() for char in text if char > "\x7f"),
    "deepseek-llm": lambda text: any(char.isspace() for char in text if char > "\x7f"),
}
ONE_OF_EACH = list({rules: name for name, rules in reversed(WORD_RULES.items())}.values())


@pytest.mark.parametrize("pre", sorted(ONE_OF_EACH))
def test_every_rule_for_words_gives_llama_cpps_ids(pre: str, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    file = write_model(tmp_path / f"{pre}.gguf", metadata_with(pre))
    is_cut_otherwise = COARSER.get(pre, lambda text: False)
    assert differing(llama_cpp, file, [text for text in TEXTS if not is_cut_otherwise(text)]) == []


@cache
def sentencepiece_metadata() -> dict[str, Any]:
    """Pieces with scores, trained over whole texts, so that pieces go across words; bytes for what they lack."""
    special = ["<unk>", "<s>", "</s>", SEPARATOR, "<|im_end|>", "    "]
    texts = [part.replace(" ", "▁") for part in parts_between(special) if part.isprintable()]
    pieces, _ = trained(tokenizers.Tokenizer(models.BPE()), texts, vocab_size=1500, limit_alphabet=300)
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, CONTROL, USER_DEFINED]
    some_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": special + some_bytes + pieces,
        "tokenizer.ggml.token_type": types + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": [0.0] * 262 + [float(-place) for place in range(len(pieces))],
        "tokenizer.chat_template": CHATML,
    }


@pytest.mark.parametrize("has_prefix", [None, False])
def test_sentencepiece_gives_llama_cpps_ids(has_prefix: bool | None, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    said = {} if has_prefix is None else {"tokenizer.ggml.add_space_prefix": has_prefix}
    file = write_model(tmp_path / "a.gguf", sentencepiece_metadata() | said)
    assert differing(llama_cpp, file) == []


@cache
def gemma4_metadata() -> dict[str, Any]:
    """Pieces with merges, as Gemma 4's, trained over whole lines; bytes for what they lack."""
    backend = tokenizers.Tokenizer(models.BPE())
    special = ["<pad>", "<eos>", "<bos>", "<unk>", SEPARATOR, "<|im_end|>"]
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[^\n]+|\n+"), "isolated")
    texts = [part.replace(" ", "▁") for part in parts_between(special) if "\0" not in part]  # llama.cpp ends there
    pieces, merges = trained(backend, texts, vocab_size=2000)
    some_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": special + some_bytes + pieces,
        "tokenizer.ggml.token_type": [CONTROL] * 6 + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }


def test_gemma4_gives_llama_cpps_ids(llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    file = write_model(tmp_path / "a.gguf", gemma4_metadata())
    assert differing(llama_cpp, file) == []
    tokenizer = Tokenizer.load(file)
    assert tokenizer.encode("a b") == [2, *tokenizer.encode("a b", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode("two  lines\n\n é\U0001f600")[1:]) == "two  lines\n\n é\U0001f600"


def test_a_real_models_ids_are_llama_cpps(smollm2: Path, llama_cpp: LlamaCpp) -> None:
    tokenizer = Tokenizer.load(smollm2)
    for text, ids in zip(TEXTS, llama_cpp.ids(smollm2, TEXTS), strict=True):
        assert tokenizer.encode(text) == ids, text
    assert tokenizer.eos_ids == {0, 2, 4}
    chat = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]) == tokenizer.encode(chat)


def test_tokens_of_phi3_eat_the_spaces_behind_them(llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    file = write_model(tmp_path / "a.gguf", sentencepiece_metadata() | {"general.name": "Phi-3 Mini"})
    tokenizer = Tokenizer.load(file)
    texts = ["a<|im_end|> \n b", "a</s>  b", "a<s>  b<|im_end|>", "<unk>  b    c"]
    ours = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert ours == llama_cpp.ids(file, texts)
    assert len(ours[0]) < len(Tokenizer.from_gguf(sentencepiece_metadata(), file).encode(texts[0]))


# ---- what else a file says -------------------------------------------------------------------------------------------


def metadata_of(kind: str) -> dict[str, Any]:
    return dict(sentencepiece_metadata()) if kind == "sentencepiece" else metadata_with(kind)


@pytest.mark.parametrize("kind", ["llama-bpe", "sentencepiece"])
def test_what_is_written_of_a_tokenizer_is_read_as_the_same(kind: str, tmp_path: Path) -> None:
    metadata = metadata_of(kind)
    source = Tokenizer.from_gguf(metadata, Path("a.gguf"))
    for name, content in as_files(*read_gguf(metadata, Path("a.gguf"))).items():
        (tmp_path / name).write_bytes(content)
    written = Tokenizer.load(tmp_path)
    ids = [source.encode(text) for text in TEXTS]
    assert [written.encode(text) for text in TEXTS] == ids
    assert [written.decode(i, skip_special_tokens=False) for i in ids] == [
        source.decode(i, skip_special_tokens=False) for i in ids
    ]
    for name in ("eos_ids", "bos_id", "special_ids", "vocab_size"):
        assert getattr(written, name) == getattr(source, name), name
    messages = [{"content": "a <|im_end|> b"}]
    assert written.render_chat(messages) == source.render_chat(messages)
    assert written.encode_chat(messages) == source.encode_chat(messages)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs("a  b<s>c")["input_ids"] == source.encode("a  b<s>c")


def test_a_file_whose_tokenizer_is_not_read_is_not_copied(tmp_path: Path) -> None:
    file = write_model(tmp_path / "a.gguf", metadata_with("future-bpe"))
    with refused(UnsupportedModelError, file, "future-bpe"):
        convert(file, tmp_path / "copy", ConvertParams(format="fp32"))


@pytest.mark.parametrize("kind", ["qwen2", "sentencepiece"])
def test_texts_come_back(kind: str) -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of(kind), Path("a.gguf"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "▁" in text:
            continue  # which is how sentencepiece writes a space
        if kind == "sentencepiece" and {*ids} & {*tokenizer.special_ids, 5}:
            continue  # behind each token that is found before all others it puts a space
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("changed", "leads"),
    [
        ({"pre": "qwen2"}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"pre": "qwen2", "add_bos_token": True, "add_eos_token": True}, True),
    ],
)
def test_bos_leads_where_the_file_or_its_kind_says_so_and_eos_never_ends(changed: dict[str, Any], leads: bool) -> None:
    tokenizer = Tokenizer.from_gguf(metadata_with(**changed), Path("a.gguf"))
    ids = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == ([tokenizer.bos_id, *ids] if leads else ids)


def with_tokens(*added: tuple[str, int], **changed: Any) -> dict[str, Any]:
    values = metadata_with(**changed)
    values["tokenizer.ggml.tokens"] = values["tokenizer.ggml.tokens"] + [text for text, _ in added]
    values["tokenizer.ggml.token_type"] = values["tokenizer.ggml.token_type"] + [kind for _, kind in added]
    return values


def ends(metadata: dict[str, Any]) -> set[str]:
    tokenizer = Tokenizer.from_gguf(metadata, Path("a.gguf"))
    return {tokenizer.token_text(i) for i in tokenizer.eos_ids}


def test_tokens_that_end_an_answer_are_found_by_key_and_by_text() -> None:
    num_tokens = len(metadata_with()["tokenizer.ggml.tokens"])
    assert ends(metadata_with()) == {"<|endoftext|>", "<|im_end|>", "</s>"}
    assert ends(with_tokens(("<|stop|>", CONTROL))) == {"<|endoftext|>", "<|im_end|>", "</s>"}
    found = ends(with_tokens(("<|stop|>", CONTROL), ("<|end|>", NORMAL), eot_token_id=num_tokens))
    assert found == {"<|endoftext|>", "<|im_end|>", "</s>", "<|stop|>", "<|end|>"}
    assert "<|fim_pad|>" in ends(with_tokens(("<|fim_pad|>", CONTROL)))
    assert "<|fim_prefix|>" not in ends(with_tokens(("<|fim_prefix|>", CONTROL)))
    harmony = [(text, CONTROL) for text in ("<|return|>", "<|call|>", "<|end|>", "<|channel|>")]
    assert "<|end|>" not in ends(with_tokens(*harmony))
    assert {"<|return|>", "<|call|>"} <= ends(with_tokens(*harmony))
    assert "</s>" not in ends(with_tokens(("<|tool_response>", CONTROL)))


def test_what_looks_like_a_control_token_is_one_whatever_its_type_says() -> None:
    tokenizer = Tokenizer.from_gguf(with_tokens(("<|eot_id|>", NORMAL), ("<|fim_prefix|>", NORMAL)), Path("a.gguf"))
    for text in ("<|eot_id|>", "<|fim_prefix|>"):
        assert tokenizer.encode(f"a{text}b")[1] == tokenizer.token_id(text)
        assert tokenizer.token_id(text) in tokenizer.special_ids
    assert tokenizer.token_id("[INST]") not in tokenizer.special_ids  # of a user, who sees it


def test_cases_and_marks_beyond_ascii_count_where_the_models_own_rule_says_so() -> None:
    """llama.cpp cuts these; the tokenizers' files say that marks belong to words, and what a capital is."""
    rules = WORD_RULES["gpt-4o"]
    split = pre_tokenizers.Split(tokenizers.Regex(rules.splits[0]), "isolated")
    assert [word for word, _ in split.pre_tokenize_str("e\u0301cole ÉCOLEété ЗДРАВствуй")] == [
        *("e\u0301cole", " ÉCOLEété", " ЗДРАВствуй")
    ]
    assert [word for word, _ in split.pre_tokenize_str("étéÉCOLE")] == ["été", "ÉCOLE"]


# ---- what nobody should trust ----------------------------------------------------------------------------------------


def check_refused(metadata: Mapping[str, Any], *words: object, error: type[Exception] = TokenizerError) -> None:
    """In one line of bounded length, and with the remedy: the model's safetensors checkpoint."""
    with refused(error, "some.gguf", "safetensors", *words) as caught:
        Tokenizer.from_gguf(metadata, Path("some.gguf"))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", ["bert", "\n" * 10**6])
def test_a_kind_of_tokenizer_that_is_not_read_is_refused(kind: str) -> None:
    check_refused(metadata_with(model=kind), "gpt2", "llama", error=UnsupportedModelError)


@pytest.mark.parametrize("pre", [None, "future-bpe"])
def test_an_unknown_rule_for_words_is_not_guessed(pre: str | None) -> None:
    check_refused(metadata_with(**{"tokenizer.ggml.pre": pre}), "tokenizer.ggml.pre", error=UnsupportedModelError)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": None}, ["no tokenizer"]),
        ({"pre": ["qwen2"]}, ["tokenizer.ggml.pre"]),
        ({"tokens": []}, ["tokens", "empty"]),
        ({"tokens": [1, 2]}, ["tokens", "1"]),
        ({"tokens": ["", "[EMPTY_0]"]}, ["'[EMPTY_0]'"]),
        ({"tokens": ["a", "\udcff"]}, ["UTF-8"]),
        ({"token_type": [1]}, ["tokenizer.ggml.token_type", "1"]),
        ({"scores": [0.5]}, ["tokenizer.ggml.scores", "1"]),
        ({"merges": None}, ["merges", "missing"]),
        ({"merges": [["a", "b"]]}, ["merges", "['a', 'b']"]),
        ({"merges": ["a zzzz"]}, ["merge 0", "'a zzzz'"]),
        ({"eos_token_id": 10**6}, ["eos_token_id", "1000000"]),
        ({"bos_token_id": 2**40}, ["bos_token_id", "1099511627776"]),
        ({"add_bos_token": 1}, ["add_bos_token", "1"]),
        ({"add_bos_token": True, "bos_token_id": None}, ["BOS"]),
        ({"tokenizer.chat_template": 5}, ["chat_template", "5"]),
        ({"general.name": b"x"}, ["general.name"]),
    ],
)
def test_damaged_metadata_are_refused(changed: dict[str, Any], words: list[str]) -> None:
    check_refused(metadata_with(**changed), *words)


def test_tokens_of_absurd_length_are_refused() -> None:
    check_refused(with_tokens(("x" * 10**7, CONTROL)), "10000000 characters")
    long = dict(sentencepiece_metadata())
    long["tokenizer.ggml.tokens"] = [*long["tokenizer.ggml.tokens"], "x" * 10**7]
    long["tokenizer.ggml.token_type"] = [*long["tokenizer.ggml.token_type"], NORMAL]
    long["tokenizer.ggml.scores"] = [*long["tokenizer.ggml.scores"], 0.0]
    check_refused(long, "10000000 characters")


def test_a_vocabulary_whose_tokens_all_make_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokenizer, "MOST_MERGES", 2**11)
    texts = ["".join(letters) for length in range(1, 9) for letters in product("ab", repeat=length)]
    check_refused({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", *texts]}, "tokens", 2**11)


def test_a_vocabulary_in_gguf_is_the_one_in_tokenizer_json(tmp_path: Path) -> None:
    """Also where one writes the spaces of a token plainly and the other as sentencepiece does."""
    metadata = sentencepiece_metadata()
    for name, content in as_files(*read_gguf(metadata, Path("a.gguf"))).items():
        (tmp_path / name).write_bytes(content.replace(b'"    "', '"▁▁▁▁"'.encode()))
    folder, file = Tokenizer.load(tmp_path), Tokenizer.from_gguf(metadata, Path("a.gguf"))
    assert folder.token_text(5) != file.token_text(5)
    check_vocabularies(folder, file)
    check_vocabularies(file, folder)
