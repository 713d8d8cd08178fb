"""Reads and checks a tokenizer's files: tokenizer.json and the small files of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from offspec.loaders.files.checkpoint import show
from offspec.loaders.files.small_files import MOST_JSON_BYTES, MOST_TOKENIZER_BYTES, parse_json, read_small_file

from ..errors import OffspecError, TokenizerError

MOST_TOKENS = 2**24  # the largest vocabularies have a quarter of a million
# Tokens that part an answer: its thinking, and its calls of tools. Some models have them as special tokens, which texts
# omit; most, such as Qwen's, as ordinary added ones. Here they are ordinary in all.
PARTS = (("<think>", "</think>"), ("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]",))
MOST_ADDED_CHARACTERS = 1000  # of an added token; those of models have some dozens
MOST_IDS = 2**31


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings in the small files beside tokenizer.json."""

    special_tokens: dict[str, str]  # "bos_token" → "<s>", as templates expect them
    added_tokens: dict[int, tokenizers.AddedToken]  # by id; an older tokenizer.json may lack them
    add_bos: bool | None  # None: the post-processor decides
    eos_ids: frozenset[int]
    chat_template: object  # None: there is none; anything but a text is refused on use
    chat_template_file: Path


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the files beside tokenizer.json in `folder`. Raises TokenizerError."""
    config = read_json(folder / "tokenizer_config.json")
    add_bos = config.get("add_bos_token")
    template, template_file = read_chat_template(folder, config)
    special_map = _special_tokens(read_json(folder / "special_tokens_map.json"))
    # Older settings have no list of added tokens; only then special_tokens_map.json takes precedence.
    special = _special_tokens(config) | ({} if "added_tokens_decoder" in config else special_map)
    return TokenizerSettings(
        special_tokens=special,
        added_tokens=_added_tokens(read_json(folder / "added_tokens.json"), config.get("added_tokens_decoder")),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        eos_ids=_read_eos_ids(folder / "generation_config.json") | _read_eos_ids(folder / "config.json"),
        chat_template=template,
        chat_template_file=template_file,
    )


def as_files(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> dict[str, bytes]:
    """A tokenizer as the files of a checkpoint folder: name → content.

    For other programs, a post-processor adds BOS; offspec adds it itself.
    """
    if settings.add_bos:
        bos = settings.special_tokens["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=["bos", "$A"], special_tokens=[{"id": "bos", "ids": [backend.token_to_id(bos)], "tokens": [bos]}]
        )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": settings.add_bos,
        **settings.special_tokens,
    }
    if settings.chat_template is not None:
        config["chat_template"] = settings.chat_template
    files: dict[str, Any] = {"tokenizer_config.json": config}
    if settings.eos_ids:
        files["generation_config.json"] = {"eos_token_id": sorted(settings.eos_ids)}
    written = {name: json.dumps(content, ensure_ascii=False, indent=2).encode() for name, content in files.items()}
    return {"tokenizer.json": backend.to_str(pretty=True).encode(), **written}


def byte_level(model: models.BPE, splits: Iterable[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE whose words are cut by these regular expressions, one after the other."""
    backend = tokenizers.Tokenizer(model)
    words = [pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in splits]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([*words, in_bytes]), decoders.ByteLevel()
    return backend


def read_backend(folder: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer, from tokenizer.json in `folder`. Raises TokenizerError."""
    file = folder / "tokenizer.json"
    content = _read_bytes(file, MOST_TOKENIZER_BYTES)
    if content is None:
        present = "only a sentencepiece tokenizer.model" if (folder / "tokenizer.model").is_file() else "no tokenizer"
        raise TokenizerError(
            f"{folder} has {present}, but tokenizer.json is needed; save it with transformers, "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    description = f"{file} is damaged or newer than the installed tokenizers {tokenizers.__version__}"
    with library_errors(description, "download it again, or pip install -U tokenizers"):
        backend = tokenizers.Tokenizer.from_buffer(content)
    # Some files contain the limits of their training; a prompt must not be truncated or padded silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


@contextmanager
def library_errors(problem: str, remedy: str) -> Iterator[None]:
    """Turn the library's exceptions into TokenizerError: TypeError, ValueError, Exception, and panics of its Rust."""
    try:
        yield
    except OffspecError:
        raise
    except BaseException as exc:
        if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{problem} ({one_line(exc)}); {remedy}") from exc


def _read_bytes(file: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes | None:
    """The file's content; None if it does not exist."""
    try:
        return read_small_file(file, most_bytes)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise TokenizerError(f"{file} cannot be read ({exc.strerror}); download it again") from exc


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; {} if it does not exist. Raises TokenizerError."""
    encoded = _read_bytes(file)
    if encoded is None:
        return {}
    try:
        content = parse_json(encoded)
    except ValueError as exc:
        raise TokenizerError(f"{file} is not valid JSON ({one_line(exc)}); download it again") from exc
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} contains a JSON {type(content).__name__}, not an object; download it again")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Every `…_token`, also models' own ones (`image_token`); a string or {"content": …}."""
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in contents.items() if isinstance(text, str)}


def _added_tokens(ids: dict[str, Any], decoder: object) -> dict[int, tokenizers.AddedToken]:
    """The tokens of added_tokens.json, {text: id}, and of tokenizer_config.json, {id: {"content": …}}."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    tokens = {token_id: tokenizers.AddedToken(text) for text, token_id in ids.items() if type(token_id) is int}
    for key, entry in decoder.items() if isinstance(decoder, dict) else ():
        if (
            key.isdecimal()
            and len(key) < 10
            and isinstance(entry, dict)
            and isinstance(text := entry.get("content"), str)
        ):
            given = {flag: entry[flag] for flag in flags if isinstance(entry.get(flag), bool)}
            tokens[int(key)] = tokenizers.AddedToken(text, **given)
    return tokens


def _read_eos_ids(file: Path) -> frozenset[int]:
    """The ids of end tokens. Ids outside the vocabulary are harmless; some files have -1."""
    value = read_json(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise TokenizerError(f'{file}: "eos_token_id" is {show(value)}, not a number or a list of numbers; correct it')
    if wrong := [i for i in ids if not -1 <= i < MOST_IDS]:
        raise TokenizerError(f'{file}: "eos_token_id" is {show(wrong[0])}, which cannot be a token id; correct it')
    return frozenset(ids) - {-1}


def read_chat_template(folder: Path, config: dict[str, Any]) -> tuple[object, Path]:
    """The template of a folder, None if it has none, and its file. config: of the tokenizer."""
    file = folder / "chat_template.jinja"
    content = _read_bytes(file)
    if content is not None:
        try:
            return content.decode("utf-8"), file
        except UnicodeDecodeError as exc:
            raise TokenizerError(f"{file} cannot be read ({one_line(exc)}); download it again") from exc
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {str(part.get("name")): part.get("template") for part in template if isinstance(part, dict)}
    if isinstance(template, dict) and "default" in template:
        template = template["default"]
    return template, folder / "tokenizer_config.json"


def one_line(exc: BaseException) -> str:
    """An exception's message on one line."""
    return " ".join(str(exc).split()) or type(exc).__name__


def add_missing(backend: tokenizers.Tokenizer, added_tokens: dict[int, tokenizers.AddedToken]) -> None:
    """Add the tokens that the backend lacks, if they get their stated ids."""
    next_id, missing = backend.get_vocab_size(with_added_tokens=True), dict[str, tokenizers.AddedToken]()
    for token_id, token in sorted(added_tokens.items()):
        if (
            token_id == next_id
            and token.content
            and token.content not in missing
            and backend.token_to_id(token.content) is None
        ):
            missing[token.content] = token
            next_id += 1
    backend.add_tokens(list(missing.values()))  # in one call, because each call processes all earlier ones again


def check_added(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Raises TokenizerError for absurd ids or lengths, which would take seconds or gigabytes."""
    if (highest := max(backend.get_vocab(with_added_tokens=True).values(), default=0)) >= MOST_TOKENS:
        raise TokenizerError(  # when the library writes a tokenizer, it lists all ids below the highest
            f"{folder} has a token with id {highest}, above the limit of {MOST_TOKENS}; download its files again"
        )
    longest = max((len(token.content) for token in backend.get_added_tokens_decoder().values()), default=0)
    if longest > MOST_ADDED_CHARACTERS:
        raise TokenizerError(
            f"{folder} has an added token of {longest} characters, above the limit of {MOST_ADDED_CHARACTERS}; "
            "download its files again"
        )


def with_special(backend: tokenizers.Tokenizer, texts: Iterable[str | None]) -> tokenizers.Tokenizer:
    """Make these tokens special, if the backend has them. Special ones keep their flags (some remove spaces)."""
    added, wanted, new = backend.get_added_tokens_decoder(), set[str](), list[tokenizers.AddedToken]()
    for text in dict.fromkeys(texts):
        token_id = None if text is None else backend.token_to_id(text)
        if text is None or token_id is None or (token_id in added and added[token_id].special):
            continue
        if token_id in added:
            wanted.add(text)
        else:
            new.append(tokenizers.AddedToken(text, special=True, normalized=False))
    backend.add_special_tokens(new)  # in one call, because each call processes all earlier ones again
    return _changed(backend, wanted, is_special=True)


def with_shown(backend: tokenizers.Tokenizer, template: str) -> tokenizers.Tokenizer:
    """Make the tokens that part answers ordinary added ones, if the template knows them; see PARTS."""
    shown = {text for texts in PARTS if any(text in template for text in texts) for text in texts}
    added = backend.get_added_tokens_decoder().values()
    return _changed(backend, {token.content for token in added if token.special} & shown, is_special=False)


def _changed(backend: tokenizers.Tokenizer, texts: Set[str], *, is_special: bool) -> tokenizers.Tokenizer:
    """The tokenizer with these added tokens special or not; the library itself keeps what it has."""
    if not texts:
        return backend
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        if token["content"] in texts:
            token |= {"special": is_special, "normalized": False}
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def post_processor_prefix(backend: tokenizers.Tokenizer) -> list[int]:
    """Ids that the post-processor puts before a text.

    They are found with a text of one token, because an empty one would not separate prefix and suffix.
    """
    if backend.post_processor is None:
        return []
    stand_in = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x")).encode("x")
    processed = backend.post_processor.process(stand_in)
    return list(processed.ids[: processed.special_tokens_mask.index(0)])
