"""Prompts with a gap: each family's tokens in its order, texts as they are, further files as far as there is room."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from offspec.errors import TokenizerError
from offspec.text.context_limit import ContextLimit
from offspec.text.infill import SNIPPET, STYLES, Infill, InfillTokens
from offspec.text.tokenizer import Tokenizer

from ...llama_cpp import LlamaCpp
from ...refusals import refused
from .test_gguf_tokenizer import CONTROL, metadata_with, write_model
from .test_tokenizer import llama2_backend, trained_byte_level, write_folder

QWEN = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"]
QWEN += ["<|file_sep|>"]
PREFIX, SUFFIX = "def area(x):\n    ", "\n    return y\n"


def read(folder: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer.load(write_folder(folder, backend, tokenizer_config={}))


AMPLE = ContextLimit(1000, 1000)


@pytest.fixture
def qwen(tmp_path: Path) -> Tokenizer:
    return read(tmp_path, trained_byte_level(QWEN))


def prompt_of(tokenizer: Tokenizer, prefix: str, infill: Infill, most: int = 1000, num_answer: int = 0) -> str:
    ids = InfillTokens.of(tokenizer).encode(prefix, infill, ContextLimit(most, most), num_answer)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("style", STYLES, ids=lambda style: next(iter(style.values())))
def test_a_family_has_its_own_tokens_in_its_order(style: dict[int, str], tmp_path: Path) -> None:
    tokenizer = read(tmp_path, trained_byte_level(list(style.values())))
    texts = dict(enumerate((PREFIX, SUFFIX, "")))
    wanted = "".join(name + texts[part] for part, name in style.items())
    assert prompt_of(tokenizer, PREFIX, Infill(SUFFIX)) == wanted


def test_the_last_family_has_no_token_before_the_answer(tmp_path: Path) -> None:
    """Codestral's: mistral-common's `encode_fim` ends with the text before the gap."""
    tokenizer = read(tmp_path, trained_byte_level(["[PREFIX]", "[SUFFIX]"]))
    assert prompt_of(tokenizer, "a", Infill("b")) == "[SUFFIX]b[PREFIX]a"


def test_a_prompt_is_llama_cpps(llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    metadata = metadata_with("qwen2")
    for name, more in (("tokens", QWEN[1:]), ("token_type", [CONTROL] * len(QWEN[1:]))):
        metadata[f"tokenizer.ggml.{name}"] = [*metadata[f"tokenizer.ggml.{name}"], *more]
    file = write_model(tmp_path / "a.gguf", metadata)
    tokenizer = Tokenizer.load(file)
    ids = InfillTokens.of(tokenizer).encode(PREFIX, Infill(SUFFIX), AMPLE, 0)
    wanted = tokenizer.decode(ids, skip_special_tokens=False), len(ids)
    assert llama_cpp.infill(file, PREFIX, SUFFIX) == wanted


def test_a_suffix_begins_without_a_space_and_a_prompt_with_bos(tmp_path: Path) -> None:
    """As in Code Llama's `infilling_prompt_tokens`: the text before the gap has sentencepiece's space."""
    backend = llama2_backend()
    backend.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"])
    tokenizer = read(tmp_path, backend)
    tokens = InfillTokens.of(tokenizer)
    ids = [tokenizer.token_text(token) for token in tokens.encode("the", Infill("the"), AMPLE, 0)]
    assert ids == ["<s>", "▁<PRE>", "▁the", "▁<SUF>", "t", "h", "e", "▁<MID>"]
    assert tokenizer.token_id("▁<EOT>") in tokens.ends


def test_markup_in_a_text_stays_text(qwen: Tokenizer) -> None:
    marked = f'print("{QWEN[2]}{QWEN[0]}")'
    ids = InfillTokens.of(qwen).encode(marked, Infill(marked), AMPLE, 0)
    named = [qwen.token_text(token) for token in ids if qwen.token_text(token) in QWEN]
    assert named == ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    assert qwen.decode(ids, skip_special_tokens=False).count(marked) == 2


def test_what_begins_another_part_ends_an_answer(qwen: Tokenizer) -> None:
    assert InfillTokens.of(qwen).ends == {qwen.token_id(name) for name in QWEN}


def test_further_files_stand_before_the_gap(qwen: Tokenizer, tmp_path: Path) -> None:
    infill = Infill("b", (("x.py", "one"), ("y.py", "two")))
    gap = "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    files = "<|file_sep|>x.py\none<|file_sep|>y.py\ntwo"
    assert prompt_of(qwen, "a", infill) == f"<|repo_name|>myproject\n{files}<|file_sep|>filename\n{gap}"
    other = read(tmp_path / "other", trained_byte_level(QWEN[1:4]))
    assert prompt_of(other, "a", infill) == f"{SNIPPET}one{SNIPPET}two{gap}"


def test_files_that_leave_no_room_are_left_out(qwen: Tokenizer) -> None:
    last = ("y.py", "two")
    alone = InfillTokens.of(qwen).encode("a", Infill("b", (last,)), AMPLE, 0)
    both = Infill("b", (("x.py", "one"), last))
    for most, num_answer in ((len(alone), 0), (len(alone) + 3, 3)):
        assert InfillTokens.of(qwen).encode("a", both, ContextLimit(most, most), num_answer) == alone
    assert "repo_name" not in prompt_of(qwen, "a", both, len(alone) - 1)
    assert "repo_name" not in prompt_of(qwen, "a", Infill("b", (("x.py", "one " * 9999),)), 100)


def test_a_model_without_such_tokens_is_refused(tmp_path: Path) -> None:
    with refused(TokenizerError, "<|fim_prefix|>", "suffix", "Qwen2.5-Coder"):
        InfillTokens.of(read(tmp_path, trained_byte_level(QWEN[:2])))
