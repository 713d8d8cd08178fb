"""What an API's requests and answers have to offer to the routes and the responses of `offspec serve`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from offspec import SamplingParams

from .openai_requests import CompletionRequest
from .request_parts import Json

if TYPE_CHECKING:
    from offspec import Step, TokenLogprob
    from offspec.text.tokenizer import Tokenizer

ADDED = ("text", "texts", "logprobs", "prompt_logprobs")  # fields of a chunk that later steps go on with


@dataclass(frozen=True)
class StreamFormat:
    """How the parts of an answer are sent. waiting, running: signs of life, which clients skip.

    part: around a part's JSON. begins_with_sign: whether a sign may come at once. error: around an error that is known
    only after such a sign.
    """

    media_type: str
    begins_with_sign: bool
    waiting: str
    running: str
    part: str
    error: str

    def written(self, part: Json) -> str:
        """A part as it is sent; an event with a type has it as its name, too."""
        name = f"event: {part['type']}\n" if "type" in part else ""
        return name + self.part.format(json.dumps(part))


EVENTS = StreamFormat(
    "text/event-stream", True, ": waiting\n\n", ": running\n\n", "data: {}\n\n", "event: error\ndata: {}\n\n"
)
# White space before the next line's JSON; clients that take each chunk for a line should seldom get one.
LINES = StreamFormat("application/x-ndjson", False, " ", " ", "{}\n", "{}\n")


@dataclass(frozen=True)
class AnswerChunk:
    """Text of an answer, all of it or a part. figures: `Stats.as_dict`, once there is a pass.

    texts, logprobs, prompt_logprobs, stopped: as in `Step`. report: of the pass, if the request asks for it.
    """

    text: str = ""
    finish_reason: str | None = None
    figures: Json = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stopped: str | None = None
    report: Json | None = None

    @classmethod
    def of(cls, step: Step, report: Json | None = None) -> AnswerChunk:
        same: Json = {name: getattr(step, name) for name in (*ADDED, "finish_reason", "stopped")}
        return cls(**same, figures=step.stats.as_dict(), report=report)

    def then(self, step: Step) -> AnswerChunk:
        """This text and that of the next step."""
        later = AnswerChunk.of(step)
        return replace(later, **{name: getattr(self, name) + getattr(later, name) for name in ADDED})


class AnswerForm(Protocol):
    """The response to one request as an API writes it: whole, or as the parts of a stream."""

    end: ClassVar[str] = ""  # what a stream ends with

    def whole(self, answers: Sequence[AnswerChunk]) -> Json: ...

    def parts(self, index: int, passage: AnswerChunk, *, is_first: bool) -> list[Json]:
        """The parts of a stream for an answer's text of one pass."""

    def last_parts(self) -> list[Json]:
        """Those that follow the last parts of all answers."""
        return []

    def error_part(self, error: Json) -> Json:
        """The one that tells of an error. error: as `ApiForm.error` writes it."""
        return error


class ApiForm(Protocol):
    """An API: how requests are read, and answers and errors are written. name: for the log."""

    name: str
    stream: StreamFormat = EVENTS

    def request(self, body: Any, defaults: SamplingParams) -> CompletionRequest:
        """Raises UsageError, which names the field."""

    def answer(
        self, body: Json, request: CompletionRequest, model: str, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> AnswerForm:
        """request: as it is answered. prompts: token ids."""

    def error(self, failure: Json, status: int) -> Json:
        """failure: in OpenAI's form."""
        return failure
