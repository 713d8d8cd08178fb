"""What an API's requests and answers have to offer to the routes and the responses of `offspec serve`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from offspec import SamplingParams

from .openai_answers import AnswerChunk
from .openai_requests import CompletionRequest
from .stream_formats import StreamFormat

if TYPE_CHECKING:
    from offspec.text.tokenizer import Tokenizer

Json = dict[str, Any]


class AnswerForm(Protocol):
    """The response to one request as an API writes it: whole, or as the parts of a stream."""

    end: str  # what a stream ends with

    def whole(self, answers: Sequence[AnswerChunk]) -> Json: ...

    def parts(self, index: int, passage: AnswerChunk, *, is_first: bool) -> list[Json]:
        """The parts of a stream for an answer's text of one pass."""

    def last_parts(self) -> list[Json]:
        """Those that follow the last parts of all answers."""

    def error_parts(self, failure: Json, status: int) -> list[Json]:
        """Those that tell of an error. failure: in OpenAI's form."""

    def event(self, part: Json) -> str:
        """A part as the stream has it."""


class ApiForm(Protocol):
    """An API: how requests are read, and answers and errors are written. name: for the log."""

    name: str
    stream: StreamFormat

    def request(self, body: Any, defaults: SamplingParams) -> CompletionRequest:
        """Raises UsageError, which names the field."""

    def answer(
        self, body: Json, request: CompletionRequest, model: str, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> AnswerForm:
        """request: as it is answered. prompts: token ids."""

    def error(self, failure: Json, status: int) -> Json:
        """failure: in OpenAI's form."""


class NamedEvents:
    """Base of answers whose events have the name of their type."""

    end = ""

    def event(self, part: Json) -> str:
        return f"event: {part['type']}\ndata: {json.dumps(part)}\n\n"
