"""Text to token ids and back, as the checkpoint's own files say: prompts, chat templates, streamed text, stop strings.

The encoding itself is the `tokenizers` library's; chat templates are rendered by `chat_template`. Knows nothing of
models, sampling or the terminal, nor how the folder came to this machine.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from offspec.loaders.checkpoint import show
from offspec.loaders.small_files import MOST_JSON_BYTES, MOST_TOKENIZER_BYTES, parse_json, read_small_file

from ..errors import ContextLengthError, OffspecError, TokenizerError, UsageError, VocabularyMismatchError
from . import chat_template
from .special_text import EncodedText, HiddenChat, SpecialText

REPLACEMENT = "\ufffd"
MOST_ADDED_CHARACTERS = 1000  # of an added token; those of models have some dozens
MOST_IDS = 2**31

# Bytes that are no UTF-8 become one U+FFFD each, as in sentencepiece and in the library's ByteFallback decoder.
_EACH_BYTE = "offspec.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)

# A byte-level decoder is back in step after one byte that continues nothing, or after three that do (UTF-8: at most
# four bytes a character, RFC 3629); every token has at least one byte.
_CONTEXT_TOKENS = 3


class Tokenizer:
    """The tokenizer of one checkpoint folder."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: _Settings, folder: Path) -> None:
        self.folder = folder
        self.special_in_text = False  # whether text of messages that looks like a special token becomes one
        self._backend = backend
        self._settings = settings
        self._prefix = self._prefix_ids()

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and the small files beside it; TokenizerError if one is damaged or the first missing."""
        with _library_errors(f"the tokenizer in {folder} cannot be used", "fetch its files again"):
            settings = _read_settings(folder)
            backend = _read_backend(folder)
            _add_missing(backend, settings.added_tokens)
            _check_added(backend, folder)
            # As transformers does: what the settings call special is so even where tokenizer.json does not say it.
            named = [settings.special_tokens.get(name) for name in ("bos_token", "eos_token")]
            stated = [token.content for token in settings.added_tokens.values() if token.special]
            tokenizer = cls(_with_special(backend, [*named, *stated]), settings, folder)
            assert tokenizer._byte_anchor is None or tokenizer.vocab_size  # a decoder that fails does so here
            return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: the highest id + 1."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> bytes:
        """A hash of everything that decides which ids a text gets."""
        return hashlib.blake2b(self._backend.to_str().encode()).digest()

    @property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a text: generation_config.json, config.json and the tokenizer's own, together."""
        own = self._special_id("eos_token")
        return self._settings.eos_ids | (frozenset() if own is None else {own})

    @property
    def has_chat_template(self) -> bool:
        """Whether the files have one, be it good or not."""
        return self._settings.chat_template is not None

    def check_chat_template(self) -> None:
        """Raises TokenizerError where there is no template, or none that could be taken."""
        if not self.has_chat_template:
            raise TokenizerError(
                f"{self.folder} has no chat template, so it takes plain text and no messages: choose a checkpoint "
                "tuned for chat"
            )
        if not isinstance(self._settings.chat_template, str):
            raise TokenizerError(
                f'{self._settings.chat_template_file}: "chat_template" is neither a template nor has one named '
                "default: correct it, or give plain text instead of messages"
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt, led by BOS where the tokenizer says so, never ended by EOS."""
        ids = self._encode(text).ids
        return [*self._prefix, *ids] if add_special_tokens else list(ids)

    def encode_after(self, context: str, text: str, hidden: Mapping[str, str] | None = None) -> list[int]:
        """Ids of `text` where it follows `context`; of `text` alone where a token would straddle the two.

        Neither BOS nor EOS is added. hidden: what private characters in both stand for (`hide_special`).
        """
        encoded = self._encode_hidden(context + text, hidden or {}, len(context))
        if encoded.at is not None:
            at = bisect_left([start for start, _ in encoded.offsets], encoded.at)
            if at == 0 or encoded.offsets[at - 1][1] <= encoded.at:
                return list(encoded.ids[at:])
        return list(self._encode_hidden(text, hidden or {}, 0).ids)

    def _encode_hidden(self, text: str, hidden: Mapping[str, str], at: int) -> EncodedText:
        if hidden.keys().isdisjoint(text):
            encoding = self._encode(text)
            return EncodedText(encoding.ids, encoding.offsets, at)
        with self._encoding():
            return self._special_text.encode(text, hidden, at)

    def check_length(self, text: str, most: int) -> None:
        """Raises ContextLengthError for a text that is far too long for `most` tokens, without encoding all of it.

        So much of it as `most` of the longest token are is enough, unless that has fewer tokens: some tokenizers
        swallow spaces, or make one token of whatever they do not know. Most texts need a part of that, which counts
        where it has more tokens than a cut inside of one can make.
        """
        enough, slack = most * self._longest + 1, 4 * self._longest
        length = min(enough, 8 * (most + slack))
        while length < len(text):
            if len(self._encode(text[:length]).ids) > most + (slack if length < enough else 0):
                raise ContextLengthError(
                    f"the prompt of {len(text)} characters has more than {most} tokens, and no more fit here; "
                    "shorten it"
                )
            if length == enough:
                break
            length = min(enough, 8 * length)

    def check_messages(self, messages: Sequence[Mapping[str, str]], most: int) -> None:
        """Raises ContextLengthError for messages that are far too long for `most` tokens, before they are looked into.

        Four times as many may be in them, as templates leave things out, like what was thought before former replies.
        """
        texts = (text for message in messages for text in message.values() if isinstance(text, str))
        try:
            self.check_length("\n".join(texts), 4 * most)
        except ContextLengthError as exc:
            raise ContextLengthError(
                f"the messages have more than {4 * most} tokens, and {most} fit here; shorten them"
            ) from exc

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token; of a byte-level one its bytes, which are no fewer."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)

    def _encode(self, text: str) -> tokenizers.Encoding:
        with self._encoding():
            text.encode()  # names a lone surrogate; the library says "must be str" (0.23) or takes it silently (0.20)
            # The library lets go of the interpreter's lock for a batch alone, and a long text takes seconds.
            return self._backend.encode_batch([text], add_special_tokens=False)[0]

    def _encoding(self) -> AbstractContextManager[None]:
        what = f"the text cannot be encoded with {self.folder / 'tokenizer.json'}"
        return _library_errors(what, "check that the text is valid Unicode, and that the vocabulary covers it")

    @cached_property
    def _special_text(self) -> SpecialText:
        return SpecialText(self._backend, str(self._settings.chat_template or ""))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without a token add nothing.

        The library's text, but for byte tokens (`<0xE2>`) that are no UTF-8: its ByteFallback decoder gives up every
        character of their run, so that no byte would ever be certain; here, as in sentencepiece, only the bad bytes.
        """
        text = self._backend_decode(ids, skip_special_tokens)
        if REPLACEMENT not in text or self._byte_anchor is None:
            return text
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join(map(stream.push, ids)) + stream.flush()

    def token_id(self, text: str) -> int | None:
        """The id of a raw vocabulary entry, such as "▁the" or "</s>"; None where there is none."""
        return self._backend.token_to_id(text)

    def token_text(self, token_id: int) -> str:
        """The raw vocabulary entry, for messages."""
        return self._backend.id_to_token(token_id) or f"<no token {token_id}>"

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the checkpoint's template writes it; TokenizerError if there is none or it refuses."""
        self.check_chat_template()
        variables = {
            **self._settings.special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return chat_template.render(str(self._settings.chat_template), variables)
        except (TokenizerError, TypeError, ValueError) as exc:  # the latter from messages that are no JSON
            raise TokenizerError(
                f"the chat template refuses the conversation: {_one_line(exc)} "
                f"({self._settings.chat_template_file}): change the messages, or give plain text instead"
            ) from exc

    def encode_chat(self, messages: Sequence[Mapping[str, str]], most_tokens: int | None = None) -> list[int]:
        """Ids of the conversation up to where the answer begins; the template writes the special tokens itself.

        Raises ContextLengthError for one that is far longer than `most_tokens`, before it is encoded.
        """
        if most_tokens is not None:
            self.check_messages(messages, most_tokens)
        chat = self.hide_special(messages)
        text = self.render_chat(chat.messages)
        if most_tokens is not None:
            self.check_length(text, most_tokens)
        return self.encode_after("", text, chat.texts)

    def hide_special(self, messages: Sequence[Mapping[str, str]]) -> HiddenChat:
        """The messages with what looks like special tokens hidden from the template, unless `special_in_text`."""
        if self.special_in_text:
            return HiddenChat([dict(message) for message in messages], {})
        with self._encoding():
            for message in messages:
                json.dumps(message, ensure_ascii=False).encode()
            return self._special_text.hide(messages)

    def stream(self, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> TextStream:
        """A fresh stream for one answer; UsageError if a stop string is empty."""
        return TextStream(_Detokenizer(self, skip_special_tokens), stop)

    def _special_id(self, name: str) -> int | None:
        text = self._settings.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    def _prefix_ids(self) -> list[int]:
        """What stands in front of every prompt: BOS, or whatever the post-processor puts there."""
        if self._settings.add_bos is None:
            return _post_processor_prefix(self._backend)
        bos = self._settings.special_tokens.get("bos_token")
        if not self._settings.add_bos or bos is None:
            return []
        if self.bos_id is None:
            raise TokenizerError(
                f"{self.folder / 'tokenizer_config.json'} asks for the BOS token {bos!r}, which tokenizer.json lacks: "
                'correct "bos_token", or set "add_bos_token" to false'
            )
        return [self.bos_id]

    def _backend_decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        with _library_errors(f"tokens cannot be decoded with {self.folder / 'tokenizer.json'}", "fetch it again"):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of a text."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _byte_anchor(self) -> int | None:
        """The byte token of "A" if the decoder joins byte tokens to characters (sentencepiece), else None."""
        decoder = self._backend.decoder
        if decoder is None or decoder.decode(["<0x41>"]) != "A":
            return None
        return self.token_id("<0x41>")


class TextStream:
    """Tokens in, text out as soon as it is certain; ends before the first stop string. For one answer."""

    def __init__(self, detokenizer: _Detokenizer, stop: Sequence[str]) -> None:
        if "" in stop:
            raise UsageError("a stop string is empty, and every text begins with it: leave it out")
        self.stopped: str | None = None
        self._detokenizer = detokenizer
        self._stops = tuple(stop)
        self._tail = ""

    def push(self, token_id: int) -> str:
        """The text that this token makes certain: often its own, sometimes none, sometimes more."""
        return "" if self.stopped is not None else self._cut(self._detokenizer.push(token_id), final=False)

    def flush(self) -> str:
        """What was held back, at the end of the answer: half characters as U+FFFD, half stop strings as they are."""
        return "" if self.stopped is not None else self._cut(self._detokenizer.flush(), final=True)

    def _cut(self, text: str, *, final: bool) -> str:
        self._tail += text
        at, stop = _first_stop(self._tail, self._stops)
        open_at = len(self._tail) if final else _first_open_stop(self._tail, self._stops)
        if stop is not None and at <= open_at:
            self.stopped = stop
            return self._tail[:at]
        # A longer stop string that begins earlier may still come true, and then it wins, wherever tokens end.
        shown, self._tail = self._tail[:open_at], self._tail[open_at:]
        return shown


class _Detokenizer:
    """Token ids → the text that no later token can change.

    The text of new tokens is decode(context + new) less decode(context): a sliding window, constant cost a token. The
    context shows the decoder that this is not the text's beginning, where it may strip a space.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._anchor = tokenizer._byte_anchor
        self._context: list[int] = []
        self._num_held = 0  # 1: the context's last character, a U+FFFD that may become another, has not been given out
        self._run: list[int] = []  # byte tokens of the character that is under way, and its bytes:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)

    def push(self, token_id: int) -> str:
        token = self._tokenizer._backend.id_to_token(token_id)
        if not token or (self._skip_special_tokens and token_id in self._tokenizer.special_ids):
            return ""
        byte = None if self._anchor is None else _fallback_byte(token)
        if byte is None:
            return self._end_run() + self._extend([token_id])
        return self._push_byte(token_id, byte)

    def flush(self) -> str:
        held, self._num_held = REPLACEMENT * self._num_held, 0
        return held + self._end_run()

    def _extend(self, ids: list[int]) -> str:
        num_shown = len(self._decode(self._context)) - self._num_held
        self._context += ids
        text = self._decode(self._context)
        # However many bytes wait for the rest of their character, a byte-level decoder shows them as one U+FFFD.
        self._num_held = int(self._anchor is None and text.endswith(REPLACEMENT))
        del self._context[:-_CONTEXT_TOKENS]
        return text[num_shown : len(text) - self._num_held]

    def _push_byte(self, token_id: int, byte: int) -> str:
        self._run.append(token_id)
        text = self._utf8.decode(bytes([byte]))
        if not text:
            return ""
        # The decoder decides on good bytes (it may strip the text's first space), but would drop them beside bad ones.
        text = text if REPLACEMENT in text else self._extend(self._run)
        waiting, _ = self._utf8.getstate()
        self._restart(self._run[len(self._run) - len(waiting) :])
        return text

    def _end_run(self) -> str:
        if not self._run:
            return ""
        self._restart([])
        return self._utf8.decode(b"", final=True)

    def _restart(self, run: list[int]) -> None:
        # The context is not the last run: with the next byte tokens it could be bad UTF-8, which would spoil them too.
        self._run = run
        self._context = [] if self._anchor is None else [self._anchor]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer._backend_decode(ids, self._skip_special_tokens)


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> None:
    """VocabularyMismatchError if an id means different tokens to the two.

    Ids that only one of them has are padding. An id that both keep for special tokens may bear two names: releases of a
    family rename their reserved tokens (Llama 3 and 3.1), and a guess that is wrong there costs nothing but itself.
    """
    ours, theirs = _tokens_by_id(target), _tokens_by_id(draft)
    renamed = target.special_ids & draft.special_ids
    differing = [i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i] and i not in renamed]
    if differing:
        first = min(differing)
        raise VocabularyMismatchError(
            f"the draft's vocabulary is another one: token {first} is {ours[first]!r} in {target.folder} but "
            f"{theirs[first]!r} in {draft.folder} ({len(differing)} differ): choose a draft of the target's family, "
            "or --draft none"
        )


# ---- the files -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Settings:
    """What the small files beside tokenizer.json say."""

    special_tokens: dict[str, str]  # "bos_token" → "<s>", as templates want them
    added_tokens: dict[int, tokenizers.AddedToken]  # by id; tokenizer.json may be older than they are
    add_bos: bool | None  # None: the post-processor decides
    eos_ids: frozenset[int]
    chat_template: object  # None: there is none; what is no text cannot be taken
    chat_template_file: Path


def _read_settings(folder: Path) -> _Settings:
    config = _read_json(folder / "tokenizer_config.json")
    add_bos = config.get("add_bos_token")
    template, template_file = _read_chat_template(folder, config)
    special_map = _special_tokens(_read_json(folder / "special_tokens_map.json"))
    # The map counts where the settings are older than the list of added tokens that took its place.
    special = _special_tokens(config) | ({} if "added_tokens_decoder" in config else special_map)
    return _Settings(
        special_tokens=special,
        added_tokens=_added_tokens(_read_json(folder / "added_tokens.json"), config.get("added_tokens_decoder")),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        eos_ids=_read_eos_ids(folder / "generation_config.json") | _read_eos_ids(folder / "config.json"),
        chat_template=template,
        chat_template_file=template_file,
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    content = _read_bytes(file, MOST_TOKENIZER_BYTES)
    if content is None:
        raise TokenizerError(_missing(folder))
    what = f"{file} is damaged or newer than the installed tokenizers {tokenizers.__version__}"
    with _library_errors(what, "fetch it again, or pip install -U tokenizers"):
        backend = tokenizers.Tokenizer.from_buffer(content)
    # Some files carry the limits they were trained with; a prompt must not be cut or padded silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _missing(folder: Path) -> str:
    found = "only a sentencepiece tokenizer.model" if (folder / "tokenizer.model").is_file() else "no tokenizer"
    return (
        f"{folder} has {found}, but tokenizer.json is needed: save it with transformers, "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


@contextmanager
def _library_errors(what: str, remedy: str) -> Iterator[None]:
    """The library raises TypeError, ValueError and bare Exception alike, and BaseException where its Rust panics."""
    try:
        yield
    except OffspecError:
        raise
    except BaseException as exc:
        if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what} ({_one_line(exc)}): {remedy}") from exc


def _read_bytes(file: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes | None:
    """None where there is no such file."""
    try:
        return read_small_file(file, most_bytes)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise TokenizerError(f"{file} cannot be read ({exc.strerror}): fetch it again") from exc


def _read_text(file: Path) -> str | None:
    content = _read_bytes(file)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise TokenizerError(f"{file} cannot be read ({_one_line(exc)}): fetch it again") from exc


def _read_json(file: Path) -> dict[str, Any]:
    found = _read_bytes(file)
    if found is None:
        return {}
    try:
        content = parse_json(found)
    except ValueError as exc:
        raise TokenizerError(f"{file} is not valid JSON ({_one_line(exc)}): fetch it again") from exc
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} holds a JSON {type(content).__name__}, not an object: fetch it again")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Every `…_token`, models' own (`image_token`) included; written as a string or as {"content": …}."""
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in contents.items() if isinstance(text, str)}


def _added_tokens(ids: dict[str, Any], decoder: object) -> dict[int, tokenizers.AddedToken]:
    """What added_tokens.json states, {text: id}, and tokenizer_config.json, {id: {"content": …}}."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    found = {token_id: tokenizers.AddedToken(text) for text, token_id in ids.items() if type(token_id) is int}
    for key, said in decoder.items() if isinstance(decoder, dict) else ():
        if (
            key.isdecimal()
            and len(key) < 10
            and isinstance(said, dict)
            and isinstance(text := said.get("content"), str)
        ):
            given = {flag: said[flag] for flag in flags if isinstance(said.get(flag), bool)}
            found[int(key)] = tokenizers.AddedToken(text, **given)
    return found


def _read_eos_ids(file: Path) -> frozenset[int]:
    """An id that the vocabulary lacks ends nothing; -1 says so in some files."""
    value = _read_json(file).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise TokenizerError(f'{file}: "eos_token_id" is {show(value)}, not a number or a list of numbers: correct it')
    if wrong := [i for i in ids if not -1 <= i < MOST_IDS]:
        raise TokenizerError(f'{file}: "eos_token_id" is {show(wrong[0])}, which is no token of any model: correct it')
    return frozenset(ids) - {-1}


def _read_chat_template(folder: Path, config: dict[str, Any]) -> tuple[object, Path]:
    file = folder / "chat_template.jinja"
    text = _read_text(file)
    if text is not None:
        return text, file
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {str(part.get("name")): part.get("template") for part in template if isinstance(part, dict)}
    if isinstance(template, dict) and "default" in template:
        template = template["default"]
    return template, folder / "tokenizer_config.json"


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def _add_missing(backend: tokenizers.Tokenizer, added_tokens: dict[int, tokenizers.AddedToken]) -> None:
    """Those that the backend lacks, where they get the ids that they are said to have."""
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
    backend.add_tokens(list(missing.values()))  # at once: each call goes through all that were added before


def _check_added(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Raises TokenizerError for what would take seconds to look for in each message, and no model has."""
    longest = max((len(token.content) for token in backend.get_added_tokens_decoder().values()), default=0)
    if longest > MOST_ADDED_CHARACTERS:
        raise TokenizerError(
            f"{folder} has an added token of {longest} characters, and no model has one of more than "
            f"{MOST_ADDED_CHARACTERS}: fetch its files again"
        )


def _with_special(backend: tokenizers.Tokenizer, texts: Iterable[str | None]) -> tokenizers.Tokenizer:
    """With these tokens special where it has them; one that is so already keeps its flags (some swallow spaces)."""
    added, wanted, new = backend.get_added_tokens_decoder(), set[str](), list[tokenizers.AddedToken]()
    for text in dict.fromkeys(texts):
        token_id = None if text is None else backend.token_to_id(text)
        if text is None or token_id is None or (token_id in added and added[token_id].special):
            continue
        if token_id in added:
            wanted.add(text)  # the library keeps what it has
        else:
            new.append(tokenizers.AddedToken(text, special=True, normalized=False))
    backend.add_special_tokens(new)  # at once: each call goes through all that were added before
    if not wanted:
        return backend
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        if token["content"] in wanted:
            token |= {"special": True, "normalized": False}
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _post_processor_prefix(backend: tokenizers.Tokenizer) -> list[int]:
    """Ids that the post-processor puts before a text. Found with a stand-in text of one token, since an empty one
    could not tell what comes before from what comes after."""
    if backend.post_processor is None:
        return []
    stand_in = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x")).encode("x")
    processed = backend.post_processor.process(stand_in)
    return list(processed.ids[: processed.special_tokens_mask.index(0)])


def _tokens_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    vocabulary: dict[str, int] = tokenizer._backend.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}


def _fallback_byte(token: str) -> int | None:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return int(match[1], 16) if match else None


# ---- stop strings ----------------------------------------------------------------------------------------------------


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str | None]:
    """Where the first stop string begins and which it is: of several there the shortest, which is complete first."""
    found = [(at, len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    at, _, stop = min(found, default=(-1, 0, None))
    return at, stop


def _first_open_stop(text: str, stops: tuple[str, ...]) -> int:
    """Where the end of `text` first looks like the beginning of a stop string; len(text) if nowhere."""
    longest = max(map(len, stops), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(stop.startswith(text[at:]) for stop in stops):
            return at
    return len(text)
