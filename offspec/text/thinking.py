"""Whether an answer begins with the model's thinking, `<think>…</think>`: what the prompt and its chat template say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
TAIL = 16  # tokens at a prompt's end that may have a tag


@dataclass(frozen=True)
class ThinkingStyle:
    """is_open: the prompt's end has opened the thinking, so that the answer begins inside it.

    is_over: the prompt's end has closed it, so that the answer has none. Otherwise the model chooses.
    """

    is_open: bool
    is_over: bool = False

    @classmethod
    def of(cls, prompt: Sequence[int], tokenizer: Tokenizer) -> ThinkingStyle | None:
        """None for a model whose chat template does not know the tags, or that has none."""
        if not tokenizer.has_chat_template or not any(tag in tokenizer.chat_template for tag in (OPEN, CLOSE)):
            return None
        end = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
        return cls(end.endswith(OPEN), end.endswith(CLOSE))
