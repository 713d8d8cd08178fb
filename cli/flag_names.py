"""Names flags in messages: where the Python API says `context` or `draft=none`, the terminal says `--draft none`.

Errors and notes of `offspec`, `loaders` and `scheduler` name a setting by its argument in Python, between backticks.
"""

from __future__ import annotations

import re

from .flag_declarations import FLAGS

_NAMED = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")
# Flags that messages name before a command's module, which declares them, can be imported: memory is short.
_ALWAYS = {"context": "--context", "ram": "--ram", "vram": "--vram"}


def with_flags(message: str) -> str:
    """The message with flags in place of arguments; other words between backticks stay."""

    flags = _ALWAYS | FLAGS

    def named(match: re.Match[str]) -> str:
        return " ".join(filter(None, (flags[match[1]], match[2]))) if match[1] in flags else match[0]

    return _NAMED.sub(named, message)
