"""Filling in the middle (FIM): prompts of the text before and after a gap, by a model's own special tokens.

Their names, and where further files stand, are llama.cpp's (`llama-vocab.cpp`, `format_prompt_infill`); those of
Mistral (mistral-common, `encode_fim`) and Seed-Coder (its model card) begin with the text after the gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ..errors import ContextLengthError, TokenizerError
from .context_limit import ContextLimit

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# The names before the text before the gap, before the text after it, and before the answer, in a prompt's order.
PREFIX, SUFFIX, MIDDLE = range(3)
BAR = "\uff5c"  # a wide one
STYLES: tuple[dict[int, str], ...] = (
    {PREFIX: "<|fim_prefix|>", SUFFIX: "<|fim_suffix|>", MIDDLE: "<|fim_middle|>"},  # Qwen, CodeGemma
    {PREFIX: "<fim_prefix>", SUFFIX: "<fim_suffix>", MIDDLE: "<fim_middle>"},  # StarCoder, Granite
    {PREFIX: "<fim-prefix>", SUFFIX: "<fim-suffix>", MIDDLE: "<fim-middle>"},  # SantaCoder
    {PREFIX: f"<{BAR}fim▁begin{BAR}>", SUFFIX: f"<{BAR}fim▁hole{BAR}>", MIDDLE: f"<{BAR}fim▁end{BAR}>"},  # DeepSeek
    {PREFIX: "▁<PRE>", SUFFIX: "▁<SUF>", MIDDLE: "▁<MID>"},  # Code Llama
    {PREFIX: "<PRE>", SUFFIX: "<SUF>", MIDDLE: "<MID>"},
    {PREFIX: "<|code_prefix|>", SUFFIX: "<|code_suffix|>", MIDDLE: "<|code_middle|>"},  # GLM
    {PREFIX: "<|prefix|>", SUFFIX: "<|suffix|>", MIDDLE: "<|middle|>"},  # Falcon-H1's coder
    {SUFFIX: "<[fim-suffix]>", PREFIX: "<[fim-prefix]>", MIDDLE: "<[fim-middle]>"},  # Seed-Coder
    {SUFFIX: "[SUFFIX]", PREFIX: "[PREFIX]"},  # Codestral, whose answer follows the text before the gap
)
REPOSITORY, FILE = "<|repo_name|>", "<|file_sep|>"  # Qwen's, before the name of a repository, and of each file
NO_NAME = ("myproject\n", "filename\n")  # as llama.cpp names the repository, and the file with the gap
SNIPPET = "\n\n--- snippet ---\n\n"  # before a further file, for models without those tokens
ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", REPOSITORY, "<reponame>", "<repo_name>", FILE, "<file_sep>"),
    *("<|file_separator|>", "▁<EOT>", "<EOT>", "<|endoftext|>"),
)
# Before a text whose tokenizer would else add a space, as in the code of Code Llama and of Mistral.
NO_SPACE = "☺"


@dataclass(frozen=True)
class Infill:
    """What stands around a gap, but for the text before it. extra: further files, (name, text) each."""

    suffix: str
    extra: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class InfillTokens:
    """A model's tokens for filling in the middle. ids: of a style. ends: tokens that end such an answer, too."""

    tokenizer: Tokenizer
    ids: dict[int, int]
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> InfillTokens:
        """Raises TokenizerError for a model that has no such tokens."""
        for style in STYLES:
            tokens = {part: token for part, name in style.items() if (token := _id(tokenizer, name)) is not None}
            if len(tokens) == len(style):
                ends = {token for name in ENDS if (token := _id(tokenizer, name)) is not None}
                return cls(tokenizer, tokens, frozenset(ends.union(tokens.values())))
        raise TokenizerError(
            "the model has no tokens for a text with a gap (<|fim_prefix|> or the like), so it cannot fill in before a "
            "suffix; omit the suffix, or choose a model of code such as Qwen2.5-Coder"
        )

    def encode(self, prefix: str, infill: Infill, limit: ContextLimit, num_answer: int) -> list[int]:
        """Ids of a prompt. Of the further files, the last ones are kept that leave `num_answer` tokens.

        Raises ContextLengthError for texts of far more tokens than `limit` allows.
        """
        tokenizer = self.tokenizer
        tokenizer.check_length(f"{prefix}\n{infill.suffix}", limit)
        texts = {
            PREFIX: tokenizer.encode_plain(prefix),
            SUFFIX: tokenizer.encode_plain(infill.suffix, NO_SPACE if tokenizer.byte_anchor is not None else ""),
            MIDDLE: [],
        }
        gap = [id for part, token in self.ids.items() for id in (token, *texts[part])]
        begin = tokenizer.encode("")
        return [*begin, *self._files(infill.extra, limit.num_tokens - num_answer - len(begin) - len(gap)), *gap]

    def _files(self, extra: Sequence[tuple[str, str]], room: int) -> list[int]:
        """Ids of the last of these files that take `room` tokens at most, and of what stands before the gap's file."""
        tokenizer, files, before, after = self.tokenizer, list[list[int]](), list[int](), list[int]()
        repository, file = (_id(tokenizer, name) for name in (REPOSITORY, FILE))
        if repository is not None and file is not None:
            before = [repository, *tokenizer.encode_plain(NO_NAME[0])]
            after = [file, *tokenizer.encode_plain(NO_NAME[1])]
        room -= len(before) + len(after)
        for name, text in reversed(extra):
            try:
                tokenizer.check_length(text, ContextLimit(max(room, 0), max(room, 0)))
            except ContextLengthError:
                break
            head = [after[0], *tokenizer.encode_plain(f"{name}\n")] if after else tokenizer.encode_plain(SNIPPET)
            files.append([*head, *tokenizer.encode_plain(text)])
            room -= len(files[-1])
            if room < 0:
                files.pop()
                break
        return [*before, *chain.from_iterable(reversed(files)), *after] if files else []


def _id(tokenizer: Tokenizer, name: str) -> int | None:
    """GGUF files write some spaces as spaces that others write as "▁"."""
    return next((id for text in (name, name.replace("▁", " ")) if (id := tokenizer.token_id(text)) is not None), None)
