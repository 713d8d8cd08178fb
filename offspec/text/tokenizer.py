"""Encodes and decodes text by the checkpoint's own tokenizer files; prompts and chats.

The encoding is the `tokenizers` library's; `chat_template` renders chats. This module does not depend on models,
sampling or the terminal.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from offspec.loaders.registry import named

from ..errors import TokenizerError, VocabularyMismatchError
from . import chat_template
from .context_limit import ContextLimit
from .special_text import EncodedText, HiddenChat, SpecialText
from .text_stream import REPLACEMENT, Detokenizer, TextStream
from .token_bytes import token_bytes
from .tokenizer_files import (
    TokenizerSettings,
    add_missing,
    check_added,
    library_errors,
    one_line,
    post_processor_prefix,
    read_backend,
    read_settings,
    with_shown,
    with_special,
)

# The variable of chat templates that turns thinking on and off: Qwen3, SmolLM3 and GLM have the first name, Granite and
# DeepSeek V3.1 the second.
THINKING_SWITCH = re.compile(r"\{[{%][^{}%]*?(?<![\w.'\"])(enable_thinking|thinking)(?![\w'\"])")

END_MARK = "\ue002"  # private use, as the placeholders of `offspec.session`


class Tokenizer:
    """The tokenizer of one checkpoint: a folder, or a GGUF file."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings, folder: Path) -> None:
        self.folder = folder  # or the GGUF file
        self.special_in_text = False  # whether a message's text that looks like a special token becomes one
        self.template_settings: dict[str, Any] = {}  # variables of every chat, unless a chat sets them itself
        self._backend = backend
        self._settings = settings
        self._prefix = self._prefix_ids()

    @property
    def _file(self) -> Path:
        """The vocabulary's file, for messages."""
        return self.folder if self.folder.is_file() else self.folder / "tokenizer.json"

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and the small files beside it, a GGUF file's metadata, or Mistral's tekken.json.

        Raises TokenizerError if a file is damaged or tokenizer.json is missing; for a GGUF file the errors of
        `from_gguf`, and CheckpointError if the file cannot be read.
        """
        if folder.name == "tekken.json" and folder.is_file():
            backend, settings = named(__package__, "tekken.read_tekken")(folder)
            return cls._made(backend, settings, folder)
        if folder.is_file():
            return cls.from_gguf(named("offspec.loaders.files", "gguf_file.read_metadata")(folder), folder)
        with library_errors(f"the tokenizer in {folder} cannot be used", "download its files again"):
            settings = read_settings(folder)
            return cls._made(read_backend(folder), settings, folder)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: Path) -> Tokenizer:
        """The tokenizer of a GGUF file's metadata. Raises the errors of `read_gguf`."""
        with library_errors(f"the tokenizer in {path} cannot be used", "download it again"):
            backend, settings = named(__package__, "gguf_tokenizer.read_gguf")(metadata, path)
            return cls._made(backend, settings, path)

    @classmethod
    def _made(cls, backend: tokenizers.Tokenizer, settings: TokenizerSettings, folder: Path) -> Tokenizer:
        add_missing(backend, settings.added_tokens)
        check_added(backend, folder)
        # As in transformers, tokens named in the settings are special, even if tokenizer.json does not flag them.
        ends = [settings.special_tokens.get(name) for name in ("bos_token", "eos_token")]
        stated = [token.content for token in settings.added_tokens.values() if token.special]
        backend, template = with_special(backend, [*ends, *stated]), settings.chat_template
        if isinstance(template, str):
            backend = with_shown(backend, template)
        tokenizer = cls(backend, settings, folder)
        assert tokenizer.byte_anchor is None or tokenizer.vocab_size  # a broken decoder raises here, not later
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """The number of ids, including added tokens: the highest id + 1."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> bytes:
        """A hash of everything that determines the ids of a text."""
        return hashlib.blake2b(self._backend.to_str().encode()).digest()

    @property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own EOS; `eos_ids` has all ids that end a text."""
        return self._special_id("eos_token")

    @cached_property
    def token_bytes(self) -> Mapping[int, bytes] | None:
        """The bytes of every token that stands for text; None if they depend on a token's neighbours."""
        return token_bytes(self._backend)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """All ids that end a text: those of generation_config.json, config.json and the tokenizer."""
        eos_id = self._special_id("eos_token")
        return self._settings.eos_ids | (frozenset() if eos_id is None else {eos_id})

    @property
    def has_chat_template(self) -> bool:
        """Whether the files have a chat template, valid or not."""
        return self._settings.chat_template is not None

    def check_chat_template(self) -> None:
        """Raises TokenizerError if the template is missing or not a text."""
        if not self.has_chat_template:
            raise TokenizerError(
                f"{self.folder} has no chat template, so it accepts plain text only; choose a checkpoint tuned for "
                "chat, or put the model's chat_template.jinja beside it"
            )
        if not isinstance(self._settings.chat_template, str):
            raise TokenizerError(
                f'{self._settings.chat_template_file}: "chat_template" is not a template, and has none named default; '
                "correct it, or use plain text instead of messages"
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt, with BOS if the tokenizer adds it, and without EOS."""
        ids = self._encode(text).ids
        return [*self._prefix, *ids] if add_special_tokens else list(ids)

    def encode_plain(self, text: str, context: str = "") -> list[int]:
        """Ids of a text after `context` (`encode_after`); none of markup such as `<|im_end|>`."""
        with self._encoding():
            text.encode()
            chat = self._plain_text.hide([{"text": text}])
        return self.encode_after(context, chat.messages[0]["text"], chat.texts, self._plain_text)

    def encode_after(
        self, context: str, text: str, hidden: Mapping[str, str] | None = None, special: SpecialText | None = None
    ) -> list[int]:
        """Ids of `text` after `context`; if a token would overlap both, ids of `text` alone.

        Neither BOS nor EOS is added. hidden: the texts of private characters in both (`hide_special`). special: what
        has hidden them.
        """
        encoded = self._encode_hidden(context + text, hidden or {}, len(context), special)
        if encoded.at is not None:
            at = bisect_left([start for start, _ in encoded.offsets], encoded.at)
            if at == 0 or encoded.offsets[at - 1][1] <= encoded.at:
                return list(encoded.ids[at:])
        return list(self._encode_hidden(text, hidden or {}, 0, special).ids)

    def _encode_hidden(self, text: str, hidden: Mapping[str, str], at: int, special: SpecialText | None) -> EncodedText:
        if hidden.keys().isdisjoint(text):
            encoding = self._encode(text)
            return EncodedText(encoding.ids, encoding.offsets, at)
        with self._encoding():
            return (special or self._special_text).encode(text, hidden, at)

    def check_length(self, text: str, limit: ContextLimit, *, times: int = 1) -> None:
        """Raises ContextLengthError for a text with far more than `times` the limit, without encoding all of it.

        It encodes growing prefixes. A prefix as long as that many of the longest token usually has more than that many
        tokens; some tokenizers remove spaces, or merge unknown characters into one token. A shorter prefix is enough
        if it has clearly more tokens: cutting inside a token can add a few.
        """
        most = times * limit.num_tokens
        enough, slack = most * self._longest + 1, 4 * self._longest
        length = min(enough, 8 * (most + slack))
        while length < len(text):
            if len(self._encode(text[:length]).ids) > most + (slack if length < enough else 0):
                raise limit.error(f"more than {most}")
            if length == enough:
                break
            length = min(enough, 8 * length)

    def check_messages(self, messages: Sequence[Mapping[str, Any]], limit: ContextLimit) -> None:
        """Raises ContextLengthError for messages with far more tokens than the limit, before other processing.

        It allows four times as many, because templates omit text, such as the reasoning of earlier replies.
        """
        texts = (text for message in messages for text in message.values() if isinstance(text, str))
        self.check_length("\n".join(texts), limit, times=4)

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token; for a byte-level token its bytes, which are at least as many."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)

    def _encode(self, text: str) -> tokenizers.Encoding:
        with self._encoding():
            text.encode()  # reports a lone surrogate; the library says "must be str" (0.23) or accepts it (0.20)
            # The library releases the interpreter's lock only for batches, and a long text takes seconds.
            return self._backend.encode_batch([text], add_special_tokens=False)[0]

    def _encoding(self) -> AbstractContextManager[None]:
        description = f"the text cannot be encoded with {self._file}"
        return library_errors(description, "check that the text is valid Unicode, and that the vocabulary covers it")

    @cached_property
    def _special_text(self) -> SpecialText:
        return SpecialText(self._backend, str(self._settings.chat_template or ""))

    @cached_property
    def _plain_text(self) -> SpecialText:
        """As `_special_text`, for all added tokens that are written like markup."""
        added = self._backend.get_added_tokens_decoder().values()
        return SpecialText(self._backend, "\n".join(token.content for token in added))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; unused ids add nothing.

        It is the library's text, except for byte tokens (`<0xE2>`) with invalid UTF-8. The library's ByteFallback
        decoder replaces every character of their run, so no byte would ever be final. Here, as in sentencepiece, only
        the invalid bytes are replaced.
        """
        text = self.decode_stored(ids, skip_special_tokens)
        if REPLACEMENT not in text or self.byte_anchor is None:
            return text
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join(map(stream.push, ids)) + stream.flush()

    def token_id(self, text: str) -> int | None:
        """The id of a raw vocabulary entry, such as "▁the" or "</s>"; None if there is none."""
        return self._backend.token_to_id(text)

    def token_text(self, token_id: int) -> str:
        """The raw vocabulary entry, for messages."""
        return self._backend.id_to_token(token_id) or f"<no token {token_id}>"

    @property
    def chat_template(self) -> str:
        """The template's source. Raises TokenizerError if it is missing or not a text."""
        self.check_chat_template()
        return str(self._settings.chat_template)

    def set_thinking(self, thinks: bool) -> None:
        """Let the chat template ask for an answer with or without thinking before it.

        Raises TokenizerError if the template cannot choose.
        """
        if (switch := THINKING_SWITCH.search(self.chat_template)) is None:
            raise TokenizerError(
                "the model's chat template has no switch for thinking (enable_thinking); omit `think`, or choose "
                "another model"
            )
        self.template_settings[switch[1]] = thinks

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation, rendered by the checkpoint's template. Raises TokenizerError if it is missing or fails.

        tools: descriptions of functions, for templates that know tools. settings: further variables of the template.
        """
        self.check_chat_template()
        variables = {
            **self.template_settings,
            **(settings or {}),
            **self._settings.special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) if tools else None,
            "documents": None,
        }
        try:
            return chat_template.render(str(self._settings.chat_template), variables)
        except (TokenizerError, TypeError, ValueError) as exc:  # the latter two if messages are not JSON
            raise TokenizerError(
                f"the chat template refuses the conversation: {one_line(exc)} "
                f"({self._settings.chat_template_file}); change the messages, or use plain text"
            ) from exc

    def render_begun(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation, rendered up to the end of the last message's text, an answer to be continued.

        It is transformers' text for `continue_final_message`, without spaces at its end if the template strips texts.
        tools, settings: as for `render_chat`. Raises its errors, and TokenizerError if the template changes the text.
        """
        *before, last = messages
        marked = {**last, "content": f"{last['content']}{END_MARK} "}
        text = self.render_chat([*before, marked], add_generation_prompt=False, tools=tools, settings=settings)
        begun, mark, rest = text.rpartition(END_MARK)
        if not mark or last["content"].strip() not in begun:
            raise TokenizerError(
                "the chat template changes the text of the last message, so that it cannot be continued "
                f"({self._settings.chat_template_file}); shorten it to what follows the thinking, or ask anew"
            )
        return begun if rest.startswith(" ") else begun.rstrip()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: ContextLimit | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
        continues: bool = False,
    ) -> list[int]:
        """Ids of the conversation up to the start of the answer; the template writes the special tokens.

        tools, settings: as for `render_chat`. continues: up to the end of the last message's text (`render_begun`).

        Raises ContextLengthError for a conversation of far more tokens than the limit, before encoding all of it.
        """
        if limit is not None:
            self.check_messages([*messages, {"tools": json.dumps(list(tools), ensure_ascii=False)}], limit)
        chat = self.hide_special([*messages, {"tools": list(tools), "settings": dict(settings or {})}])
        *hidden, other = chat.messages
        text = self.render_begun(hidden, **other) if continues else self.render_chat(hidden, **other)
        if limit is not None:
            self.check_length(text, limit)
        return self.encode_after("", text, chat.texts)

    def hide_special(self, messages: Sequence[Mapping[str, Any]]) -> HiddenChat:
        """The messages, with texts that look like special tokens hidden, unless `special_in_text`."""
        if self.special_in_text:
            return HiddenChat([dict(message) for message in messages], {})
        with self._encoding():
            for message in messages:
                json.dumps(message, ensure_ascii=False).encode()
            return self._special_text.hide(messages)

    def stream(
        self, stop: Sequence[str] = (), *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> TextStream:
        """A new stream for one answer. after: ids of a text that it continues, or none.

        Raises UsageError for an empty stop string.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()

        def entry_of(token_id: int) -> str | None:
            return None if token_id in skipped else self._backend.id_to_token(token_id)

        decode = partial(self.decode_stored, skip_special_tokens=skip_special_tokens)
        return TextStream(Detokenizer(decode, entry_of, self.byte_anchor, after), stop)

    def _special_id(self, name: str) -> int | None:
        text = self._settings.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    def _prefix_ids(self) -> list[int]:
        """The ids before every prompt: BOS, or those of the post-processor."""
        if self._settings.add_bos is None:
            return post_processor_prefix(self._backend)
        bos = self._settings.special_tokens.get("bos_token")
        if not self._settings.add_bos or bos is None:
            return []
        if self.bos_id is None:
            raise TokenizerError(
                f"{self.folder / 'tokenizer_config.json'} requires the BOS token {bos!r}, which tokenizer.json lacks; "
                'correct "bos_token", or set "add_bos_token" to false'
            )
        return [self.bos_id]

    def decode_stored(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The library's text of these ids."""
        with library_errors(f"tokens cannot be decoded with {self._file}", "download it again"):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` omits from a text."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def byte_anchor(self) -> int | None:
        """The byte token of "A" if the decoder joins byte tokens to characters (sentencepiece), else None."""
        decoder = self._backend.decoder
        if decoder is None or decoder.decode(["<0x41>"]) != "A":
            return None
        return self.token_id("<0x41>")


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises VocabularyMismatchError if an id has different tokens in the two.

    Ids of only one of them are padding. GGUF files write some spaces as spaces that others write as "▁". An id that is
    a special token in both may have two names: releases of a family rename reserved tokens (Llama 3 and 3.1), and a
    wrong guess there is merely rejected.
    """
    ours, theirs = (
        {i: token.replace(" ", "▁") for token, i in each._backend.get_vocab(with_added_tokens=True).items()}
        for each in (target, draft)
    )
    renamed = target.special_ids & draft.special_ids
    differing = [i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i] and i not in renamed]
    if differing:
        first = min(differing)
        raise VocabularyMismatchError(
            f"the draft has another vocabulary: token {first} is {ours[first]!r} in {target.folder}, but "
            f"{theirs[first]!r} in {draft.folder} ({len(differing)} differ); choose a draft of the target's family "
            "(`draft=PATH`), or none (`draft=none`)"
        )
