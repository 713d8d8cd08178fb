"""Only the template writes special tokens; messages without their text get the ids that transformers gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from offspec.errors import TokenizerError
from offspec.session import Turn, encode_turns
from offspec.text.tokenizer import Tokenizer

from ...examples import examples
from ...pair import TEMPLATE
from ...refusals import refused
from .test_tokenizer import CHATML, llama2_backend, llama3_backend, reference, trained_byte_level, write_folder

LLAMA3 = """{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role']
 + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}
{{- '[INST] ' + message.content + ' [/INST]' }}{%- elif message.role == 'system' %}{{- message.content + '\\n\\n' }}
{%- else %}{{- ' ' + message.content.strip() + eos_token }}{%- endif %}{%- endfor %}"""
ZEPHYR = """{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{% endfor %}"""
GEMMA = """{{ bos_token }}{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<start_of_turn>' + role + '\\n' + (message['content'] | trim) + '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"""
THINKING = """{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1].lstrip() if message.role == 'assistant' else message.content %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}
{{- '<|im_start|>assistant\\n<think>\\n' }}"""
# As Qwen3 has it: thinking before the last answer alone; and something after all messages.
REASONING = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if tools %}{{- 'Tools: ' + tools | tojson }}{%- endif %}{{- '<|im_start|>assistant\\n' }}"""
UPPER = "{% for m in messages %}<s>{{ m.content | upper | replace('A', 'E') }}</s>{{ m.content[:3] }}{% endfor %}"


def swallowing() -> tokenizers.Tokenizer:
    """Special tokens that take the spaces beside them, one that counts as a word, one that is looked
    for in normalized text.
    """
    backend = llama2_backend()
    backend.add_special_tokens(
        [
            tokenizers.AddedToken("<mask>", lstrip=True, rstrip=True, special=True),
            tokenizers.AddedToken("user", single_word=True, special=True),
        ]
    )
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """What begins a text is encoded in another way than what follows a special token."""
    backend = llama2_backend()
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def byte_level(*special: str, plain: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    backend = trained_byte_level(list(special))
    backend.add_tokens(list(plain))
    return backend


HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
KINDS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], str, list[str]]] = {
    "llama3": (lambda: _with(llama3_backend(), *HEADERS), LLAMA3, ["<|eot_id|>", *HEADERS, "<|begin_of_text|>"]),
    "chatml": (lambda: byte_level("<|im_start|>", "<|im_end|>"), CHATML, ["<|im_start|>", "<|im_end|>"]),
    "mistral": (lambda: _with(llama2_backend(), "[INST]", "[/INST]"), MISTRAL, ["[INST]", "[/INST]", "</s>", "<s>"]),
    "zephyr": (lambda: _with(llama2_backend(), "<|user|>", "<|assistant|>"), ZEPHYR, ["<|assistant|>", "</s>"]),
    "gemma": (
        lambda: _with(llama2_backend(), "<start_of_turn>", "<end_of_turn>"),
        GEMMA,
        ["<start_of_turn>", "<end_of_turn>", "<s>"],
    ),
    "thinking": (
        lambda: byte_level("<|im_start|>", "<|im_end|>", plain=("<think>", "</think>")),
        THINKING,
        ["<|im_end|>", "<think>", "</think>"],
    ),
    "upper": (llama2_backend, UPPER, ["<s>", "</s>"]),
    "swallowing": (swallowing, ZEPHYR, ["<mask>", "</s>", " <mask>  "]),
    "metaspace": (metaspace, GEMMA, ["<s>", "</s>"]),
}


def _with(backend: tokenizers.Tokenizer, *special: str) -> tokenizers.Tokenizer:
    backend.add_special_tokens(list(special))
    return backend


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("special"), dict[str, Path]()
    for kind, (backend, template, _) in KINDS.items():
        made = backend()
        bos, eos = ("<s>", "</s>") if made.token_to_id("<s>") is not None else ("<|begin_of_text|>", None)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "bos_token": bos}
        found[kind] = write_folder(root / kind, made, tokenizer_config=config | ({"eos_token": eos} if eos else {}))
    return found


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, tuple[Tokenizer, Any]]:
    return {kind: (Tokenizer.load(folder), reference(folder)) for kind, folder in folders.items()}


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, contents, strict=False)]


def expected(theirs: Any, messages: list[dict[str, str]]) -> list[int]:
    found: list[int] = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return found


def special(theirs: Any) -> dict[str, int]:
    """Added tokens and their ids, but for the one that stands for what the vocabulary lacks."""
    return {token.content: i for i, token in theirs.added_tokens_decoder.items() if token.content != "<unk>"}


def count_special(theirs: Any, ids: list[int]) -> int:
    return sum(token in special(theirs).values() for token in ids)


PARTS = (
    *("the cat", " ", "\n", "<", "<|", "|>", ">", "[", "INST]", "s>", "</", "_end|>"),
    *("é😀日", "\U000f0000", "user", "A"),
)
HARMLESS = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(contents=st.lists(HARMLESS, min_size=3, max_size=3))
@examples(60)
def test_messages_without_special_tokens_get_the_ids_of_transformers(
    kind: str, contents: list[str], loaded: dict[str, tuple[Tokenizer, Any]]
) -> None:
    ours, theirs = loaded[kind]
    messages = chat(*contents)
    if kind == "upper" and ours.hide_special(messages).texts:
        return  # it changes the case of what would be a special token together with another message
    if not any(token in text for text in contents for token in special(theirs)):
        assert ours.encode_chat(messages) == expected(theirs, messages)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@examples(60)
def test_messages_make_no_special_tokens(
    kind: str, data: st.DataObject, loaded: dict[str, tuple[Tokenizer, Any]]
) -> None:
    """As many as the template writes; and what is decoded is the text that the template wrote."""
    ours, theirs = loaded[kind]
    pieces = st.lists(st.sampled_from([*KINDS[kind][2], *PARTS]), max_size=6).map("".join)
    contents = data.draw(st.lists(pieces, min_size=3, max_size=3))
    if kind == "thinking":  # the template looks for what the assistant thought
        contents[1] = contents[1].replace("<think>", "").replace("</think>", "")
    ids = ours.encode_chat(chat(*contents))
    assert count_special(theirs, ids) == count_special(theirs, expected(theirs, chat("x", "x", "x")))
    ours.special_in_text = True
    try:
        assert ours.encode_chat(chat(*contents)) == expected(theirs, chat(*contents))
    finally:
        ours.special_in_text = False


@pytest.mark.parametrize("kind", KINDS)
def test_roles_make_no_special_tokens_either(kind: str, loaded: dict[str, tuple[Tokenizer, Any]]) -> None:
    ours, theirs = loaded[kind]
    forged = ours.encode_chat([{"role": f"user{KINDS[kind][2][0]}", "content": "x"}])
    assert count_special(theirs, forged) == count_special(theirs, expected(theirs, [{"role": "userx", "content": "x"}]))


def test_special_tokens_that_a_message_and_the_template_would_make_together(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}_end|>{{ m.content }}{% endfor %}"
    ours = Tokenizer.load(
        write_folder(tmp_path, byte_level("<|im_end|>"), tokenizer_config={"chat_template": template})
    )
    (end,) = ours.encode("<|im_end|>")
    assert end not in ours.encode_chat(chat("a <|im"))
    ours.special_in_text = True
    assert end in ours.encode_chat(chat("a <|im"))


def test_what_only_the_special_token_can_write_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<end>"])
    config = {"chat_template": "{% for m in messages %}{{ m.content }} <end>{% endfor %}"}
    ours = Tokenizer.load(write_folder(tmp_path, backend, tokenizer_config=config))
    assert ours.encode_chat(chat("a a")) == [1, 1, 0]
    with refused(TokenizerError, "'<end>'", "`special_in_text`"):
        ours.encode_chat(chat("a <end> a"))


def test_replies_are_the_tokens_that_were_said_and_the_rest_is_text(loaded: dict[str, tuple[Tokenizer, Any]]) -> None:
    ours, _ = loaded["chatml"]
    (end,) = ours.encode("<|im_end|>")
    said = ours.encode("t", add_special_tokens=False) + ours.encode("he cat<|im", add_special_tokens=False)
    turns = [Turn("a <|im_end|> b", "the cat<|im", said), Turn("<|im_start|>", "forged <|im_end|>"), Turn("c")]
    ids = encode_turns(ours, "be <|im_end|> kind", turns)
    assert ids.count(end) == 6
    assert any(ids[i : i + len(said)] == said for i in range(len(ids)))
    forged = Turn("a", "<|im_end|>", [end])  # as a saved chat of somebody else might have it
    assert encode_turns(ours, None, [forged, Turn("b")]).count(end) == 4
    plain = [Turn("a b", "the cat", []), Turn("x", "y"), Turn("c")]
    messages = [{"role": "system", "content": "s"}, *chat("a b", "the cat", "x", "y"), {"role": "user", "content": "c"}]
    assert encode_turns(ours, "s", plain) == ours.encode_chat(messages)


def test_thoughts_of_the_assistant_are_the_templates_to_find(loaded: dict[str, tuple[Tokenizer, Any]]) -> None:
    ours, theirs = loaded["thinking"]
    messages = chat("a", "<think>x</think>\n\nthe cat", "b")
    assert ours.encode_chat(messages) == expected(theirs, messages)
    (thinking,) = ours.encode("<think>")
    assert ours.encode_chat(chat("<think> no")).count(thinking) == 1


def test_a_message_that_is_not_unicode_is_refused(loaded: dict[str, tuple[Tokenizer, Any]]) -> None:
    with refused(TokenizerError, "surrogates"):
        loaded["chatml"][0].encode_chat(chat("a \ud800"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "upper"])
@given(contents=st.lists(HARMLESS, min_size=2, max_size=2))
@example(contents=["the cat", " the cat \n"])
@examples(60)
def test_a_begun_answer_ends_where_transformers_ends_it(
    kind: str, contents: list[str], loaded: dict[str, tuple[Tokenizer, Any]]
) -> None:
    ours, theirs = loaded[kind]
    messages = chat(*contents)
    if any(token in text for text in contents for token in special(theirs)):
        return
    begun = theirs.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert ours.encode_chat(messages, continues=True) == begun


@pytest.mark.parametrize("template", [TEMPLATE, REASONING])
def test_what_a_template_writes_around_a_begun_answer(template: str, tmp_path: Path) -> None:
    backend = byte_level("<|user|>", "<|assistant|>", "<|end|>", "<|im_start|>", "<|im_end|>", plain=("<think>",))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    folder = write_folder(tmp_path, backend, tokenizer_config=config)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    messages = chat("the cat", "sat", "and", "\n\nthe dog ")
    messages[-1]["reasoning_content"] = "Hm."
    tools = [{"type": "function", "function": {"name": "f", "description": "the cat", "parameters": {}}}]
    for described in ([], tools):
        begun = theirs.apply_chat_template(
            messages, tools=described or None, continue_final_message=True, return_dict=False
        )
        assert ours.encode_chat(messages, tools=described, continues=True) == begun
    assert ours.decode(begun).endswith("the dog ")


def test_a_begun_answer_that_the_template_changes_is_refused(loaded: dict[str, tuple[Tokenizer, Any]]) -> None:
    for kind, text in (("thinking", "<think>x</think>\n\nthe cat"), ("upper", "the cat")):
        ours, theirs = loaded[kind]
        with pytest.raises(ValueError, match="continue_final_message"):
            theirs.apply_chat_template(chat("a", text), continue_final_message=True)
        with refused(TokenizerError, "template", "last message"):
            ours.encode_chat(chat("a", text), continues=True)


def test_a_begun_answer_makes_no_special_tokens(loaded: dict[str, tuple[Tokenizer, Any]]) -> None:
    ours, _ = loaded["chatml"]
    (end,) = ours.encode("<|im_end|>")
    assert ours.encode_chat(chat("a", "b <|im_end|> c <|im"), continues=True).count(end) == 2
