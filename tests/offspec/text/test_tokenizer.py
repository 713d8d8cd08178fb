"""offspec.text.tokenizer on tiny tokenizers of the three common kinds, beside transformers on the same files."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from offspec.errors import ContextLengthError, TokenizerError, VocabularyMismatchError
from offspec.text.context_limit import ContextLimit
from offspec.text.text_stream import TextStream
from offspec.text.token_bytes import byte_alphabet
from offspec.text.tokenizer import Tokenizer, check_vocabularies

from ...examples import examples
from ...refusals import refused

CORPUS = ["the cat sat on the mat, the dog on the log. ", "def area(x):\n    return x * x\n", "naïve café 日本 😀 "] * 4
TEXTS = ["", "the cat", " the  cat ", "naïve café 日本語 😀👩‍👩‍👧\n\n\tx", "a</s>b <|im_end|> <s>", "Ünïcödé ☃ ﬁ"]
REPLACEMENT = "\ufffd"


def written(token: bytes) -> str:
    return "".join(byte_alphabet()[b] for b in token)


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    """A checkpoint folder: tokenizer.json and the given files (`config={…}` becomes config.json)."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def trained_byte_level(special: list[str], *extra: bytes) -> tokenizers.Tokenizer:
    """Byte-level BPE; `extra` are tokens that no text is encoded to, but a model may still emit."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    state = json.loads(backend.to_str())
    vocabulary = state["model"]["vocab"]
    for token in extra:
        vocabulary.setdefault(written(token), len(vocabulary))
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens(special)
    return backend


def llama3_backend() -> tokenizers.Tokenizer:
    backend = trained_byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    bos = "<|begin_of_text|>"
    template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def llama2_backend(single: str = "<s> $A") -> tokenizers.Tokenizer:
    """Sentencepiece-like: ▁ for spaces, byte tokens for what the vocabulary lacks, the first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdehmostx.,é日", "▁t", "▁th"]
    pieces += ["▁the", "at", "▁c", "▁cat", "▁▁", "\ufffd"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "t"), ("▁", "c"), ("▁c", "at"), ("▁", "▁")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    return backend


# Tokens that begin and end within characters: 82 AC E2 after E2 is "€" and the beginning of another.
CROSSING = [b"\x82\xac\xe2", b"\xac", b"a\xf0\x9f", b"\x98\x80\xe2\x82", b"\xef\xbf\xbd", b"\xc0\x80", b" "]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    fast = "PreTrainedTokenizerFast"
    llama3 = {"tokenizer_class": fast, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    llama2 = {"tokenizer_class": fast, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    qwen = {"tokenizer_class": fast, "bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}
    qwen_backend = trained_byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], *CROSSING)
    return {
        "llama3": write_folder(root / "llama3", llama3_backend(), tokenizer_config=llama3),
        "llama2": write_folder(root / "llama2", llama2_backend(), tokenizer_config=llama2),
        "qwen": write_folder(root / "qwen", qwen_backend, tokenizer_config=qwen),
    }


KINDS = ["llama3", "llama2", "qwen"]


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(folder) for kind, folder in folders.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, loaded: dict[str, Tokenizer]) -> Tokenizer:
    return loaded[request.param]


def reference(folder: Path, **overrides: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), **overrides)


def with_config(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Tokenizer:
    return Tokenizer.load(write_folder(folder, backend, tokenizer_config=config))


# ---- encoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_encodes_as_transformers_does(
    kind: str, add_bos: bool | None, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders[kind] / "tokenizer_config.json").read_text())
    config.pop("add_bos_token", None)
    # transformers 5 heeds the key as an argument, but no longer in the file (4 did, for Llama's class): hence both.
    explicit = {} if add_bos is None else {"add_bos_token": add_bos}
    backend = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json"))
    ours, theirs = with_config(tmp_path, backend, **config, **explicit), reference(tmp_path, **explicit)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("single", ["<s> $A </s>", "$A"])
@pytest.mark.parametrize(("add_bos", "expected"), [(True, [1]), (False, []), (None, None)])
def test_one_bos_and_no_eos_whatever_the_post_processor_adds(
    single: str, add_bos: bool | None, expected: list[int] | None, tmp_path: Path
) -> None:
    tokenizer = with_config(tmp_path, llama2_backend(single), bos_token="<s>", eos_token="</s>", add_bos_token=add_bos)
    before = ([1] if single.startswith("<s>") else []) if expected is None else expected
    for text in ("", "the cat"):
        assert tokenizer.encode(text) == before + tokenizer.encode(text, add_special_tokens=False)


def test_limits_in_the_file_do_not_cut_or_pad_a_prompt(tmp_path: Path) -> None:
    backend = llama2_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    short, long = (with_config(tmp_path, backend).encode(text) for text in ("the", "the cat " * 9))
    assert len(short) == 2
    assert len(long) > 9


def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with refused(TokenizerError, tokenizer.folder, "Unicode"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize("text", ["x", "the    cat 日本"])
def test_a_text_is_too_long_only_where_it_is(text: str, tokenizer: Tokenizer) -> None:
    for times in (1, 9, 50, 400):
        num_tokens = len(tokenizer.encode(text * times, add_special_tokens=False))
        tokenizer.check_length(text * times, ContextLimit(num_tokens, num_tokens))


def test_most_of_a_text_far_too_long_is_not_encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, encode = list[int](), Tokenizer._encode

    def counted(self: Tokenizer, text: str) -> tokenizers.Encoding:
        seen.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "_encode", counted)
    with refused(ContextLengthError, "more than 8 tokens", "`context`", "up to 32"):
        tokenizer.check_length("the cat 日" + "y" * 99_991, ContextLimit(8, 32))
    assert 0 < sum(seen) < 1000


# ---- what the files say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"tokenizer_config": {"eos_token": {"content": "</s>", "lstrip": False}}}, {2}),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, {2}),
        ({"special_tokens_map": {"eos_token": "<s>"}, "tokenizer_config": {"eos_token": "</s>"}}, {1}),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 9]}}, {5, 7, 9}),
        (
            {
                "config": {"eos_token_id": [3]},
                "generation_config": {"eos_token_id": 4},
                "tokenizer_config": {"eos_token": "</s>"},
            },
            {2, 3, 4},
        ),
    ],
)
def test_eos_ids_are_gathered_from_every_file(files: dict[str, Any], expected: set[int], tmp_path: Path) -> None:
    assert Tokenizer.load(write_folder(tmp_path, llama2_backend(), **files)).eos_ids == expected


NEW = {
    "content": "<|im_end|>",
    "special": True,
    "normalized": False,
    "lstrip": False,
    "rstrip": False,
    "single_word": False,
}


@pytest.mark.parametrize("where", ["decoder", "file", "both"])
def test_tokens_that_tokenizer_json_is_too_old_for(where: str, tmp_path: Path) -> None:
    """Fine-tunes add tokens, and some leave the base's tokenizer.json as it was."""
    backend = llama2_backend()
    size = backend.get_vocab_size()
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    files: dict[str, Any] = {}
    if where != "decoder":
        files["added_tokens"] = {"<tool>": size + 1, "<|im_end|>": size}
    if where != "file":
        tool = NEW | {"content": "<tool>", "special": False}
        config["added_tokens_decoder"] = {str(size + 1): tool, str(size): NEW}
    write_folder(tmp_path, backend, tokenizer_config=config, **files)
    ours, theirs = Tokenizer.load(tmp_path), reference(tmp_path)
    text = "the cat<|im_end|>the<tool> cat"
    assert ours.encode(text) == theirs.encode(text)
    assert size in ours.encode(text)
    assert ours.eos_ids == {size} == {theirs.eos_token_id}
    shown = [each.decode(each.encode(text), skip_special_tokens=True) for each in (ours, theirs)]
    assert shown[0] == shown[1]


def test_a_token_that_would_get_another_id_than_is_stated_is_not_added(tmp_path: Path) -> None:
    backend = llama2_backend()
    size = backend.get_vocab_size()
    loaded = with_config(tmp_path, backend, added_tokens_decoder={str(size + 3): NEW, "1": "what", "x": NEW})
    assert loaded.vocab_size == size


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "special_tokens_map", "generation_config", "config"])
@pytest.mark.parametrize("content", [b'{"a": ', b"[1, 2]", b"[" * 100_000])
def test_a_damaged_file_is_named_in_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    write_folder(tmp_path, llama2_backend())
    (tmp_path / f"{name}.json").write_bytes(content)
    with refused(TokenizerError, tmp_path / f"{name}.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer", "added_tokens"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, llama2_backend())
    file = tmp_path / f"{name}.json"
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")
    with refused(TokenizerError, file, "device"):
        Tokenizer.load(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with refused(TokenizerError, file, "pipe"):
        Tokenizer.load(tmp_path)


# What the library panics of, which no `except Exception` catches: on loading, encoding and decoding.
PANICS: list[tuple[str, dict[str, Any]]] = [
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff\0\0\0abcd").decode()}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\x04\0\0\0abcd").decode()}),
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    ("decoder", {"type": "Strip", "content": "d", "start": 9, "stop": 9}),
    (
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
    ),
]


@pytest.mark.parametrize(("part", "content"), PANICS)
def test_a_panic_of_the_library_is_one_line(part: str, content: dict[str, Any], tmp_path: Path) -> None:
    file = write_folder(tmp_path, llama2_backend()) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {part: content}))
    with refused(TokenizerError, tmp_path):
        Tokenizer.load(tmp_path).decode(Tokenizer.load(tmp_path).encode("d the cat"))


def test_an_added_token_that_no_model_has_is_refused(tmp_path: Path) -> None:
    """Its beginnings are looked for in messages, which took gigabytes."""
    backend = llama2_backend()
    backend.add_special_tokens(["a" * 100_000])
    with refused(TokenizerError, tmp_path, "added token", "100000 characters"):
        Tokenizer.load(write_folder(tmp_path, backend))


def test_an_id_beyond_any_vocabulary_is_refused(tmp_path: Path) -> None:
    """Writing such a tokenizer out, as for chats, took eight gigabytes."""
    file = write_folder(tmp_path, tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))) / "tokenizer.json"
    state = json.loads(file.read_text())
    state["model"]["vocab"]["b"] = 2**31
    file.write_text(json.dumps(state))
    with refused(TokenizerError, tmp_path, "id", 2**31):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("value", ["</s>", [1, "2"], 2**31])
def test_an_eos_that_is_no_id_is_refused(value: Any, tmp_path: Path) -> None:
    write_folder(tmp_path, llama2_backend(), generation_config={"eos_token_id": value})
    with refused(TokenizerError, tmp_path / "generation_config.json", "eos_token_id"):
        Tokenizer.load(tmp_path)


def test_a_bos_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with refused(TokenizerError, tmp_path, "'<start>'", "tokenizer.json"):
        with_config(tmp_path, llama2_backend(), bos_token="<start>", add_bos_token=True)


def test_a_folder_without_tokenizer_json_says_how_to_make_it(tmp_path: Path) -> None:
    with refused(TokenizerError, tmp_path, "no tokenizer", "save_pretrained"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with refused(TokenizerError, tmp_path, "tokenizer.model", "save_pretrained"):
        Tokenizer.load(tmp_path)


# ---- chat templates --------------------------------------------------------------------------------------------------

CHAT = [
    {"role": "system", "content": "be <brief> & 'kind'"},
    {"role": "user", "content": "the cat\n 😀"},
    {"role": "assistant", "content": " sat "},
    {"role": "user", "content": "the dog"},
]
CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{% endif %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "bos": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}\n",
    "json": "{% for m in messages %}\n    {{ m | tojson }}{{ [m] | tojson(indent=2) }}\n{% endfor %}",
    "loops": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor "
    "%}",
    "generation": "{% for m in messages %}{% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "indented": "  {% if true %}\n    {% for m in messages %}\n{{ m.role }}\n    {% endfor %}\n  {% endif %}\n",
    "date": "{{ strftime_now('%Y') }}",
}


def chat_tokenizer(folder: Path, template: Any) -> Tokenizer:
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return with_config(folder, llama2_backend(), chat_template=template, **config)


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str, tmp_path: Path) -> None:
    ours, theirs = chat_tokenizer(tmp_path, TEMPLATES[name]), reference(tmp_path)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
        assert ours.render_chat(CHAT, add_generation_prompt=prompt) == expected
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == expected


def test_of_several_templates_default_is_taken_and_the_jinja_file_wins(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert chat_tokenizer(tmp_path, several).render_chat(CHAT) == "plain"
    assert chat_tokenizer(tmp_path, {"default": "by name"}).render_chat(CHAT) == "by name"
    (tmp_path / "chat_template.jinja").write_text("newer é", encoding="utf-8")
    assert Tokenizer.load(tmp_path).render_chat(CHAT) == "newer é"


@pytest.mark.parametrize("template", [[{"name": "tool_use", "template": "x"}], 5])
def test_templates_none_of_which_is_default_are_refused_for_chats_alone(template: Any, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, template)
    assert tokenizer.has_chat_template
    with refused(TokenizerError, tmp_path / "tokenizer_config.json", '"chat_template"', "default"):
        tokenizer.render_chat(CHAT)
    with pytest.raises((ValueError, TypeError)):
        reference(tmp_path).apply_chat_template(CHAT)
    assert tokenizer.encode("a") == chat_tokenizer(tmp_path / "other", CHATML).encode("a")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% unheard_of %}", "unknown tag"),
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[9].content.strip() }}", "element 9"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ nothing | tojson }}", "not JSON serializable"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_one_line_with_its_file(template: str, reason: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, template)
    assert tokenizer.has_chat_template  # a damaged template does not keep plain text from working
    with refused(TokenizerError, tmp_path / "tokenizer_config.json", reason, "plain text"):
        tokenizer.render_chat(CHAT)


# ---- decoding and streaming ------------------------------------------------------------------------------------------


def pushed(stream: TextStream, ids: Iterable[int]) -> list[str]:
    return [*map(stream.push, ids), stream.flush()]


def ids_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Random ids, byte tokens and specials often; an id beyond the vocabulary now and then, as a padded head gives."""
    size = {"llama3": 303, "llama2": 283, "qwen": 308}[kind]
    byte_tokens = st.sampled_from(range(3, 259)) if kind == "llama2" else st.sampled_from(range(256))
    return st.lists(st.one_of(st.integers(0, size - 1), byte_tokens, st.integers(size - 12, size + 1)), max_size=24)


def oracle(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """llama2's text, worked out by hand: runs of byte tokens are UTF-8 whose bad bytes are one U+FFFD each."""
    tokens = [tokenizer.token_text(i) for i in ids if i < tokenizer.vocab_size and not (skip and i < 3)]
    runs = groupby(tokens, key=lambda token: token.startswith("<0x"))
    texts = [decode_each(bytes(int(t[3:5], 16) for t in run)) if are_bytes else "".join(run) for are_bytes, run in runs]
    return "".join(texts)


def decode_each(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        return data[: exc.start].decode() + REPLACEMENT * (exc.end - exc.start) + decode_each(data[exc.end :])


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(data=st.data(), text=st.text(max_size=30))
def test_streamed_text_is_the_decoded_text(
    kind: str, data: st.DataObject, text: str, loaded: dict[str, Tokenizer]
) -> None:
    tokenizer = loaded[kind]
    for ids in (tokenizer.encode(text), data.draw(ids_of(kind))):
        for skip in (True, False):
            shown = pushed(tokenizer.stream(skip_special_tokens=skip), ids)
            assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["llama3", "qwen"])
@examples(60)
@given(data=st.data())
def test_byte_level_decoding_is_the_library_s(kind: str, data: st.DataObject, loaded: dict[str, Tokenizer]) -> None:
    ids = data.draw(ids_of(kind))
    backend = tokenizers.Tokenizer.from_file(str(loaded[kind].folder / "tokenizer.json"))
    assert loaded[kind].decode(ids) == backend.decode(ids)


@examples(150)
@example(ids=[282, 3 + 0x80, 277], skip=True)  # the vocabulary's own U+FFFD, a bad byte, a word
@example(ids=[3 + 0xC2, 3 + 0xC2, 3 + 0xA2, 277], skip=True)  # one byte is bad and the next begins a character
@given(ids=ids_of("llama2"), skip=st.booleans())
def test_byte_fallback_spoils_only_bad_bytes(ids: list[int], skip: bool, loaded: dict[str, Tokenizer]) -> None:
    tokenizer = loaded["llama2"]
    expected = oracle(tokenizer, ids, skip).replace("▁", " ").removeprefix(" ")
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(text=st.text(st.characters(exclude_characters=REPLACEMENT, exclude_categories=["Cs"]), max_size=30))
def test_half_characters_are_never_shown_nor_whole_ones_held(
    kind: str, text: str, loaded: dict[str, Tokenizer]
) -> None:
    tokenizer, shown = loaded[kind], ""
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    for i, token_id in enumerate(ids, 1):
        shown += stream.push(token_id)
        assert shown == tokenizer.decode(ids[:i]).rstrip(REPLACEMENT)
        cut = tokenizer.stream()
        assert "".join(map(cut.push, ids[:i])) + cut.flush(is_cut=True) == shown
        if shown == tokenizer.decode(ids[:i]):
            assert shown + "".join(pushed(tokenizer.stream(after=ids[:i]), ids[i:])) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@examples(80)
@given(data=st.data())
def test_stop_strings_cut_the_text_wherever_tokens_end(
    kind: str, data: st.DataObject, loaded: dict[str, Tokenizer]
) -> None:
    tokenizer = loaded[kind]
    ids = data.draw(st.one_of(ids_of(kind), st.text("the cat,\n😀日", max_size=20).map(tokenizer.encode)))
    text = tokenizer.decode(ids)
    stops = data.draw(st.lists(st.one_of(pieces_of(text), st.text("the cat", min_size=1)), max_size=3))
    stream = tokenizer.stream(stops)
    shown = pushed(stream, ids)
    first = min((text.index(stop) for stop in stops if stop in text), default=None)
    assert "".join(shown) == text[:first]
    assert (stream.stopped is None) == (first is None)
    if stream.stopped is not None:
        assert text.startswith(stream.stopped, first)
        assert stream.push(ids[0]) == stream.flush() == ""


def pieces_of(text: str) -> st.SearchStrategy[str]:
    """Parts of the text, sometimes gone on with otherwise: stop strings that come true, and some that nearly do."""
    starts = st.integers(0, max(0, len(text) - 1))
    parts = st.tuples(starts, st.integers(1, 5), st.sampled_from(["", "", "x", "t"]))
    return parts.map(lambda part: text[part[0] : part[0] + part[1]] + part[2]).filter(bool)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_of_a_token_does_not_grow(
    kind: str, loaded: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, widths = loaded[kind], []
    decode = Tokenizer.decode_stored

    def counted(self: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
        widths.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode_stored", counted)
    for ids in (tokenizer.encode("the cat 😀" * 40), [3 + 0x80] * 200, [0, 1, 2] * 100):
        pushed(tokenizer.stream(["zzz"]), ids)
    assert max(widths) <= 7


# ---- vocabularies ----------------------------------------------------------------------------------------------------


@pytest.fixture
def with_words(tmp_path: Path) -> Callable[..., Tokenizer]:
    def make(name: str, words: dict[str, int]) -> Tokenizer:
        return with_config(tmp_path / name, tokenizers.Tokenizer(models.WordLevel(words, unk_token="a")))

    return make


@pytest.mark.parametrize("draft", [{"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2, "pad": 3}, {"a": 0, "c": 2}])
def test_vocabularies_that_differ_only_in_padding_agree(draft: dict[str, int], with_words: Any) -> None:
    target = with_words("target", {"a": 0, "b": 1, "c": 2})
    check_vocabularies(target, with_words("draft", draft))
    check_vocabularies(with_words("draft", draft), target)


def test_one_id_with_two_meanings_is_refused(with_words: Any) -> None:
    target = with_words("target", {"a": 0, "b": 1, "c": 2, "d": 3})
    with refused(VocabularyMismatchError, "token 1", "'b'", "target", "'x'", "draft", 2):
        check_vocabularies(target, with_words("draft", {"a": 0, "x": 1, "c": 2, "line\nend": 3}))
