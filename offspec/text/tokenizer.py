"""Text to token ids and back, as the checkpoint's own files say; prompts and chats.

The encoding itself is the `tokenizers` library's; chat templates are rendered by `chat_template`. Knows nothing of
models, sampling or the terminal, nor how the folder came to this machine.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from offspec.loaders.gguf_file import read_metadata

from ..errors import ContextLengthError, TokenizerError, VocabularyMismatchError
from . import chat_template
from .gguf_tokenizer import read_gguf
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
    with_special,
)


class Tokenizer:
    """The tokenizer of one checkpoint: a folder, or a GGUF file."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings, folder: Path) -> None:
        self.folder = folder  # or the GGUF file
        self.special_in_text = False  # whether text of messages that looks like a special token becomes one
        self._backend = backend
        self._settings = settings
        self._prefix = self._prefix_ids()

    @property
    def _file(self) -> Path:
        """What its vocabulary was read from, for messages."""
        return self.folder if self.folder.is_file() else self.folder / "tokenizer.json"

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and the small files beside it, or a GGUF file's metadata.

        Raises TokenizerError if one is damaged or the first missing, what `from_gguf` does for a GGUF file, and
        CheckpointError where that cannot be read.
        """
        if folder.is_file():
            return cls.from_gguf(read_metadata(folder), folder)
        with library_errors(f"the tokenizer in {folder} cannot be used", "fetch its files again"):
            settings = read_settings(folder)
            return cls._made(read_backend(folder), settings, folder)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], path: Path) -> Tokenizer:
        """The tokenizer that the metadata of the GGUF file at `path` describe. Raises what `read_gguf` does."""
        with library_errors(f"the tokenizer in {path} cannot be used", "download it again"):
            return cls._made(*read_gguf(metadata, path), path)

    @classmethod
    def _made(cls, backend: tokenizers.Tokenizer, settings: TokenizerSettings, folder: Path) -> Tokenizer:
        add_missing(backend, settings.added_tokens)
        check_added(backend, folder)
        # As transformers does: what the settings call special is so even where tokenizer.json does not say it.
        named = [settings.special_tokens.get(name) for name in ("bos_token", "eos_token")]
        stated = [token.content for token in settings.added_tokens.values() if token.special]
        tokenizer = cls(with_special(backend, [*named, *stated]), settings, folder)
        assert tokenizer.byte_anchor is None or tokenizer.vocab_size  # a decoder that fails does so here
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

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own; `eos_ids` has all that end a text."""
        return self._special_id("eos_token")

    @cached_property
    def token_bytes(self) -> Mapping[int, bytes] | None:
        """The bytes of every token that stands for text; None where they depend on a token's neighbours."""
        return token_bytes(self._backend)

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
        what = f"the text cannot be encoded with {self._file}"
        return library_errors(what, "check that the text is valid Unicode, and that the vocabulary covers it")

    @cached_property
    def _special_text(self) -> SpecialText:
        return SpecialText(self._backend, str(self._settings.chat_template or ""))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without a token add nothing.

        The library's text, but for byte tokens (`<0xE2>`) that are no UTF-8: its ByteFallback decoder gives up every
        character of their run, so that no byte would ever be certain; here, as in sentencepiece, only the bad bytes.
        """
        text = self.decode_stored(ids, skip_special_tokens)
        if REPLACEMENT not in text or self.byte_anchor is None:
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
                f"the chat template refuses the conversation: {one_line(exc)} "
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
        return TextStream(Detokenizer(self, skip_special_tokens), stop)

    def _special_id(self, name: str) -> int | None:
        text = self._settings.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    def _prefix_ids(self) -> list[int]:
        """What stands in front of every prompt: BOS, or whatever the post-processor puts there."""
        if self._settings.add_bos is None:
            return post_processor_prefix(self._backend)
        bos = self._settings.special_tokens.get("bos_token")
        if not self._settings.add_bos or bos is None:
            return []
        if self.bos_id is None:
            raise TokenizerError(
                f"{self.folder / 'tokenizer_config.json'} asks for the BOS token {bos!r}, which tokenizer.json lacks: "
                'correct "bos_token", or set "add_bos_token" to false'
            )
        return [self.bos_id]

    def stored_token(self, token_id: int) -> str | None:
        """The token as the vocabulary has it; None for an id without one."""
        return self._backend.id_to_token(token_id)

    def decode_stored(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of these ids, as the library gives it."""
        with library_errors(f"tokens cannot be decoded with {self._file}", "fetch it again"):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of a text."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def byte_anchor(self) -> int | None:
        """The byte token of "A" if the decoder joins byte tokens to characters (sentencepiece), else None."""
        decoder = self._backend.decoder
        if decoder is None or decoder.decode(["<0x41>"]) != "A":
            return None
        return self.token_id("<0x41>")


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> None:
    """VocabularyMismatchError if an id means different tokens to the two.

    Ids that only one of them has are padding. GGUF files write some spaces plainly that others write as "▁". An id that
    both keep for special tokens may bear two names: releases of a family rename their reserved tokens (Llama 3 and
    3.1), and a guess that is wrong there costs nothing but itself.
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


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def _tokens_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    vocabulary: dict[str, int] = tokenizer._backend.get_vocab(with_added_tokens=True)
    return {token_id: token.replace(" ", "▁") for token, token_id in vocabulary.items()}
