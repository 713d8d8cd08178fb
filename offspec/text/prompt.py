"""Prompts and their token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, cast

from ..errors import UsageError
from .context_limit import ContextLimit
from .tokenizer import Tokenizer

Message = Mapping[str, Any]  # role and content; with tools also what OpenAI's messages have
Prompt = str | Sequence[int] | Sequence[Message]


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, limit: ContextLimit) -> list[int]:
    """Token ids of a prompt: raw text, chat messages (through the chat template), or token ids.

    Raises UsageError for a prompt of another kind, and for an empty one; ContextLengthError for one of far more tokens
    than the limit, before all of it is encoded.
    """
    if isinstance(prompt, str):
        tokenizer.check_length(prompt, limit)
        ids = tokenizer.encode(prompt)
    elif len(prompt) > 0 and all(isinstance(part, Mapping) for part in prompt):
        ids = tokenizer.encode_chat(cast(Sequence[Message], prompt), limit)
    elif all(hasattr(part, "__index__") for part in prompt):  # includes numpy's integers, excludes floats
        ids = [index(token) for token in cast(Sequence[int], prompt)]
    else:
        raise UsageError("a prompt must be a text, a list of token ids, or a list of messages (role, content)")
    if not ids:
        raise UsageError("the prompt is empty; give at least one token")
    return ids
