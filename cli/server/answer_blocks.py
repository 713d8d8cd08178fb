"""An answer as a list of blocks: thinking, texts and calls of tools, as Anthropic's Messages and OpenAI's Responses.

It knows neither API: both are built from the message, or the deltas of a stream, of a chat's choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from offspec.text.thinking import ThinkingStyle

from .answer_forms import AnswerChunk
from .logprobs import TokenTexts
from .openai_answers import ChatChoice
from .openai_requests import CompletionRequest
from .request_parts import Json

if TYPE_CHECKING:
    from offspec.text.tokenizer import Tokenizer

BlockKind = Literal["thinking", "text", "call"]


@dataclass
class AnswerBlock:
    """A part of an answer. text: of a call, its arguments as JSON. name, call_id: of a call."""

    kind: BlockKind
    text: str = ""
    name: str = ""
    call_id: str = ""

    @property
    def arguments(self) -> Json | None:
        """Of a call; None for what is no call, or one that a limit has cut."""
        try:
            parsed = json.loads(self.text or "{}") if self.kind == "call" else None
        except ValueError:
            return None
        return parsed if isinstance(parsed, dict) else None


@dataclass(frozen=True)
class BlockEvent:
    """What a pass adds to an answer: a block begins, gets more text, or is complete. index: the block's."""

    kind: Literal["begin", "more", "end"]
    index: int
    block: AnswerBlock
    text: str = ""


class BlockAnswer:
    """The blocks of one chat's answer, whole or as they grow; its finish_reason as OpenAI's chats have it."""

    def __init__(self, request: CompletionRequest, prompt: Sequence[int], tokenizer: Tokenizer) -> None:
        self._choice = ChatChoice(request, TokenTexts(tokenizer), ThinkingStyle.of(prompt, tokenizer))
        self.blocks = list[AnswerBlock]()
        self._is_open = False
        self.finish: str | None = None

    def whole(self, passage: AnswerChunk) -> list[AnswerBlock]:
        """The blocks of a whole answer."""
        message = self._choice.whole(passage)["message"]
        self.finish = self._choice.finish(passage)
        if message.get("reasoning_content"):
            self.blocks.append(AnswerBlock("thinking", message["reasoning_content"]))
        if message["content"]:
            self.blocks.append(AnswerBlock("text", message["content"]))
        for call in message.get("tool_calls", []):
            function = call["function"]
            self.blocks.append(AnswerBlock("call", function["arguments"], function["name"], call["id"]))
        return self.blocks

    def push(self, passage: AnswerChunk) -> Iterator[BlockEvent]:
        """What the text of one pass adds; after the last pass, no block is open."""
        for part in self._choice.parts(passage, is_first=False):
            delta = part["delta"]
            for kind, name in (("thinking", "reasoning_content"), ("text", "content")):
                if text := delta.get(name):
                    yield from self._more(AnswerBlock(kind), text)  # type: ignore[arg-type]
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    yield from self._begin(AnswerBlock("call", name=call["function"]["name"], call_id=call["id"]))
                if text := call["function"]["arguments"]:
                    yield from self._more(self.blocks[-1], text)
        if passage.finish_reason is not None:
            self.finish = self._choice.finish(passage)
            yield from self._end()

    def _more(self, block: AnswerBlock, text: str) -> Iterator[BlockEvent]:
        """Text for the open block of the same kind, or for a new one."""
        if not self._is_open or self.blocks[-1].kind != block.kind:
            yield from self._begin(block)
        block = self.blocks[-1]
        block.text += text
        yield BlockEvent("more", len(self.blocks) - 1, block, text)

    def _begin(self, block: AnswerBlock) -> Iterator[BlockEvent]:
        yield from self._end()
        self.blocks.append(block)
        self._is_open = True
        yield BlockEvent("begin", len(self.blocks) - 1, block)

    def _end(self) -> Iterator[BlockEvent]:
        if self._is_open:
            self._is_open = False
            yield BlockEvent("end", len(self.blocks) - 1, self.blocks[-1])
