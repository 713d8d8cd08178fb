"""What a model thinks before its answer (`<think>…</think>`), apart from the answer: `reasoning_content`.

The field's name is DeepSeek's; vLLM and llama.cpp have it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from offspec.text.thinking import CLOSE, OPEN, ThinkingStyle

if TYPE_CHECKING:
    from offspec import Engine, Prompt, SamplingParams


def thinking_first(params: SamplingParams, prompt: Prompt) -> SamplingParams:
    """The parameters of an answer to `prompt`: in a chat, a constraint is one on what follows the model's thinking."""
    is_chat = not isinstance(prompt, str) and any(isinstance(part, Mapping) for part in prompt)
    if params.constraint is None or not is_chat:
        return params
    return replace(params, constraint=replace(params.constraint, thinks=True))


def reader_of(engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> ThinkingReader | None:
    """A reader of a constrained answer that may begin with thinking; None for any other."""
    if params.constraint is None or not params.constraint.thinks:
        return None
    style = ThinkingStyle.of(prompt_ids, engine.tokenizer)
    return None if style is None else ThinkingReader(style)


class ThinkingReader:
    """Splits the text of one answer, which comes in parts, into thinking and answer.

    Text that may be part of a tag is held back, and so are spaces beside the tags, which belong to neither.
    """

    def __init__(self, style: ThinkingStyle) -> None:
        self._held = ""
        self._place = "thinking" if style.is_open else "answer" if style.is_over else "start"
        self._is_bare = not style.is_over  # nothing was said yet at this place

    def push(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """The thinking and the answer that are certain now."""
        self._held += text
        if self._place == "start":
            begun = self._held.lstrip()
            if not is_end and len(begun) < len(OPEN) and OPEN.startswith(begun):
                return "", ""
            is_thinking = begun.startswith(OPEN)
            self._place = "thinking" if is_thinking else "answer"
            self._held = begun.removeprefix(OPEN) if is_thinking else self._held
            self._is_bare = is_thinking
        thought = self._thought(is_end) if self._place == "thinking" else ""
        if self._place != "answer":
            return thought, ""
        text = self._held.lstrip() if self._is_bare else self._held
        self._held, self._is_bare = "", self._is_bare and not text
        return thought, text

    def _thought(self, is_end: bool) -> str:
        inside, close, after = self._held.partition(CLOSE)
        if close:
            thought, self._held, self._place = inside.rstrip(), after, "answer"
        else:
            # Characters at the end may belong to CLOSE, or to the spaces before it.
            begun = max(size for size in range(len(CLOSE)) if inside.endswith(CLOSE[:size]))
            certain = len(inside) if is_end else len(inside[: len(inside) - begun].rstrip())
            thought, self._held = inside[:certain], inside[certain:]
        thought = thought.lstrip() if self._is_bare else thought
        self._is_bare = bool(close) or (self._is_bare and not thought)
        return thought
