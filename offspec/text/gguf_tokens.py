"""Reads and checks the tokens in a GGUF file's metadata: texts, kinds, scores, roles, and end tokens.

Files state the role of few tokens; the others are found by their text, as in llama.cpp (src/llama-vocab.cpp,
llama_vocab::impl::load).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from offspec.loaders.files.checkpoint import show

from ..errors import TokenizerError

MOST_TOKENS = 2**22  # the largest vocabularies have a quarter of a million
_NO_ID = (-1, 2**32 - 1)  # in some files, "no such token"
REMEDY = "download it again, or use the model's safetensors checkpoint"


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`, named as in the GGUF specification."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


ADDED_KINDS = (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)  # found in a text before all others
# Role → its key in the metadata, and the texts of such tokens, for files without the key.
_ROLES: dict[str, tuple[str, str]] = {
    "bos": ("bos_token_id", ""),
    "eos": ("eos_token_id", ""),
    "unk": ("unknown_token_id", ""),
    "pad": ("padding_token_id", ""),
    "eot": (
        "eot_token_id",
        "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
        "<\uff5cend▁of▁sentence\uff5c> <end_of_utterance>",
    ),
    "eom": ("eom_token_id", "<|eom_id|>"),
    "fim_pre": (
        "fim_pre_token_id",
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    ),
    "fim_suf": (
        "fim_suf_token_id",
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    ),
    "fim_mid": (
        "fim_mid_token_id",
        "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> <MID> ▁<MID> <|code_middle|> <|middle|>",
    ),
    "fim_pad": ("fim_pad_token_id", "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    "fim_rep": ("fim_rep_token_id", "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "fim_sep": ("fim_sep_token_id", "<|file_sep|>"),
}
_NEEDED_ROLES = ("bos", "eos", "eot", "eom")  # an invalid id of another role is ignored
_ENDING_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDINGS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    "<\uff5cend▁of▁sentence\uff5c>",
)
_HARMONY_PARTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # of gpt-oss; they stay visible


class Metadata:
    """A file's values by key, checked for type. Methods raise TokenizerError."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.path, self._values = path, values

    def error(self, problem: str) -> TokenizerError:
        return TokenizerError(f"{self.path}: {problem}; {REMEDY}")

    def optional(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value, or None without such a key. A bool is not accepted as a number."""
        value = self._values.get(key)
        is_wrong = isinstance(value, bool) and kind is not bool
        if value is not None and (is_wrong or not isinstance(value, kind)):
            raise self.error(f"{key} is {show(value)}, which is not a valid value")
        return value

    def array(self, key: str, kind: type | tuple[type, ...], count: int | None = None) -> list[Any] | None:
        """A list of values of one type, or None. count: of its values, if another one is a mistake."""
        values: list[Any] | None = self.optional(key, list)
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if values is not None and any(type(value) not in allowed for value in values):
            wrong = next(value for value in values if type(value) not in allowed)
            raise self.error(f"{key} contains {show(wrong)}, which is not a valid value")
        if values is not None and count is not None and len(values) != count:
            raise self.error(f"it has {count} tokens, but {len(values)} values of {key}")
        return values


@dataclass(frozen=True)
class GgufTokens:
    """The tokens of a file by id, and their roles."""

    texts: list[str]
    kinds: list[TokenKind]
    scores: list[float]
    ids: dict[str, int]  # by text
    roles: dict[str, int]  # "bos" → id
    end_ids: frozenset[int]

    def text_of(self, role: str) -> str | None:
        return self.texts[self.roles[role]] if role in self.roles else None


def read_tokens(metadata: Metadata, default_roles: Mapping[str, int]) -> GgufTokens:
    """Read a file's tokens. default_roles: ids for roles that the file does not state. Raises TokenizerError."""
    texts = metadata.array("tokenizer.ggml.tokens", str)
    if not texts:
        raise metadata.error("tokenizer.ggml.tokens is missing or empty")
    if len(texts) > MOST_TOKENS:
        raise metadata.error(f"it has {len(texts)} tokens, more than the limit of {MOST_TOKENS}")
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    ids = dict[str, int]()
    for token_id, text in enumerate(texts):
        if (first := ids.setdefault(text, token_id)) != token_id:
            raise metadata.error(f"tokens {first} and {token_id} are both {show(text)}")
        if not is_utf8(text):
            raise metadata.error(f"token {token_id} is {show(text)}, which is not UTF-8")
    numbers = metadata.array("tokenizer.ggml.token_type", int, len(texts)) or [TokenKind.NORMAL] * len(texts)
    kind_of = {int(kind): kind for kind in TokenKind}
    kinds = [kind_of.get(number, TokenKind.UNDEFINED) for number in numbers]
    scores = metadata.array("tokenizer.ggml.scores", (float, int), len(texts)) or [0.0] * len(texts)
    if any(score != score for score in scores):
        raise metadata.error("tokenizer.ggml.scores contains a value that is not a number")
    roles = _roles(metadata, ids, kinds, default_roles)
    end_ids = _end_ids(ids, kinds, roles)
    return GgufTokens(texts, kinds, scores, ids, roles, end_ids)


def is_utf8(text: str) -> bool:
    """Whether the string has no surrogates (from invalid UTF-8), which the library does not accept."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _roles(
    metadata: Metadata, ids: dict[str, int], kinds: list[TokenKind], defaults: Mapping[str, int]
) -> dict[str, int]:
    """Role → id. A token that is found by its text becomes a control token."""
    roles = {role: token_id for role, token_id in defaults.items() if token_id < len(kinds)}
    for role, (key, texts) in _ROLES.items():
        stated: int | None = metadata.optional(f"tokenizer.ggml.{key}", int)
        if stated is not None and stated not in _NO_ID:
            if 0 <= stated < len(kinds):
                roles[role] = stated
            elif role in _NEEDED_ROLES:
                raise metadata.error(f"tokenizer.ggml.{key} is {stated}, but it has only {len(kinds)} tokens")
        if role not in roles and (token_ids := [ids[text] for text in texts.split() if text in ids]):
            roles[role] = min(token_ids)
            kinds[min(token_ids)] = TokenKind.CONTROL
    return roles


def _end_ids(ids: dict[str, int], kinds: list[TokenKind], roles: dict[str, int]) -> frozenset[int]:
    """Ids that end an answer. Tokens that are found by their text become control tokens."""
    by_text = {ids[text] for text in _ENDINGS if text in ids}
    for token_id in by_text:
        kinds[token_id] = TokenKind.CONTROL
    for text in _HARMONY_PARTS:
        if text in ids:
            kinds[ids[text]] = TokenKind.USER_DEFINED
    ending = by_text | {roles[role] for role in _ENDING_ROLES if role in roles}
    endings = {text for text in _ENDINGS if ids.get(text) in ending}
    is_harmony = {"<|return|>", "<|call|>"} <= endings
    is_solar = "<|flush|>" in endings and not endings.isdisjoint(("<|call|>", "<|calls|>"))
    if "<|end|>" in endings and (is_harmony or is_solar):  # in these formats it ends a message, not the answer
        ending.remove(ids["<|end|>"])
        kinds[ids["<|end|>"]] = TokenKind.USER_DEFINED
    if "<|tool_response>" in endings and "</s>" in endings:  # in Gemma 4 and PaddleOCR, </s> is a plain token
        ending.remove(ids["</s>"])
        kinds[ids["</s>"]] = TokenKind.NORMAL
    return frozenset(ending)
