"""What clients may learn of a model beside its name: its chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offspec.errors import TokenizerError

if TYPE_CHECKING:
    from offspec.text.tokenizer import Tokenizer


def template_of(tokenizer: Tokenizer) -> str:
    """The chat template's source; empty if there is none."""
    try:
        return tokenizer.chat_template
    except TokenizerError:
        return ""
