"""What clients may learn of a model beside its name: its chat template, and what it can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offspec.errors import TokenizerError
from offspec.text.infill import InfillTokens
from offspec.text.thinking import ThinkingStyle
from offspec.text.tool_calls import ToolFormat

if TYPE_CHECKING:
    from offspec.text.tokenizer import Tokenizer


def template_of(tokenizer: Tokenizer) -> str:
    """The chat template's source; empty if there is none."""
    try:
        return tokenizer.chat_template
    except TokenizerError:
        return ""


def capabilities(tokenizer: Tokenizer) -> list[str]:
    """What the model can do, in Ollama's words."""
    names = ["completion"]
    for name, format_of in (("tools", ToolFormat.of), ("insert", InfillTokens.of)):
        try:
            format_of(tokenizer)
        except TokenizerError:
            continue
        names.append(name)
    has_template = bool(template_of(tokenizer))
    return [*names, "thinking"] if has_template and ThinkingStyle.of([], tokenizer) is not None else names
