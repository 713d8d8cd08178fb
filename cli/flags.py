"""Names flags in messages: where the Python API says `context` or `draft=none`, the terminal says `--draft none`.

Errors and notes of `offspec`, `loaders` and `scheduler` name a setting by its argument in Python, between backticks.
"""

from __future__ import annotations

import re

_ARGUMENTS = [
    "accept",
    "budget",
    "context",
    "deterministic",
    "device",
    "disk",
    "draft",
    "draft_window",
    "drafts",
    "dtype",
    "embedding",
    "exit_file",
    "exit_layer",
    "fast_arithmetic",
    "format",
    "head",
    "head_tokens",
    "kv_cache",
    "learn",
    "learn_file",
    "learning_rate",
    "lookup_files",
    "new_draft",
    "num_texts",
    "on_policy",
    "out",
    "path",
    "prompt_tokens",
    "ram",
    "resume",
    "revision",
    "special_in_text",
    "stop",
    "text_tokens",
    "think",
    "threads",
    "tree",
    "vram",
    "when_full",
]
FLAGS = {name: f"--{name.replace('_', '-')}" for name in _ARGUMENTS} | {"texts": "--text", "lora_rank": "--lora"}
_NAMED = re.compile(rf"`({'|'.join(FLAGS)})(?:=([^`]*))?`")


def with_flags(message: str) -> str:
    """The message with flags in place of arguments; other words between backticks stay."""
    return _NAMED.sub(lambda found: " ".join(filter(None, (FLAGS[found[1]], found[2]))), message)
