"""The responses of `offspec serve`: whole answers and streams, with a sign of life while a client has to wait.

A large model can take minutes until its first token. Proxies close connections that are silent for 30 to 100 s
(Heroku 30 s, nginx and AWS 60 s, Cloudflare 100 s), and OpenAI's client one of 600 s. So:

- A stream's headers are sent at once. A comment, which clients skip, follows at once and after each KEEP_ALIVE_S
  without an event (HTML Standard, 9.2.6: servers should send one about every 15 s).
- A whole answer that takes longer than SILENCE_S begins before it is known: status 200, then a newline after each
  KEEP_ALIVE_S. JSON may begin with white space (RFC 8259, section 2), and all clients' parsers skip it. If such an
  answer fails, its status cannot tell: the body is then the error as JSON, and the connection closes before the body's
  end. So clients raise a connection error, and do not take it for an answer. OpenAI's client retries it, as it does an
  answer with status 500. Errors of the request itself, and a full queue, are found before, and keep their statuses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial

import click
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from offspec import memory_error
from offspec.errors import ConstraintError, ContextLengthError, OffspecError, TokenizerError, UsageError

from ..flag_names import with_flags
from .answer_forms import AnswerForm
from .openai_answers import Said, failure
from .request_parts import Json
from .service import BusyError, StoppingError, Work
from .shelf import UnknownModelError

KEEP_ALIVE_S = 5.0  # between two signs of life
SILENCE_S = 10.0  # before the first one of a whole answer
# For browsers and proxies: an answer is new each time. nginx would collect a stream's events.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Cancel = Callable[[Work], None]
WriteError = Callable[[Json, int], Json]  # an error in OpenAI's form, and its status → as the API writes it


class EventResponse(StreamingResponse):
    """A stream of server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, answer: AnswerForm, work: Work, cancel: Cancel) -> None:
        super().__init__(_events(answer, work), headers=STREAM_HEADERS)
        self._cancel = partial(cancel, work)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


async def _events(answer: AnswerForm, work: Work) -> AsyncGenerator[str, None]:
    """Server-sent events. An error becomes an event, because the status is already sent."""
    begun, num_open = set[int](), len(work.jobs)
    yield _sign_of_life(work)
    try:
        while num_open:
            arrived = await work.next(KEEP_ALIVE_S)
            if arrived is None:
                yield _sign_of_life(work)
                continue
            index, step, report = arrived
            for part in answer.parts(index, Said.of(step, report), is_first=index not in begun):
                yield answer.event(part)
            begun.add(index)
            num_open -= step.finish_reason is not None
        for part in answer.last_parts():
            yield answer.event(part)
    except Exception as exc:  # noqa: BLE001 (the client is told)
        for part in answer.error_parts(*describe(exc, is_running=True)):
            yield answer.event(part)
    yield answer.end


def _sign_of_life(work: Work) -> str:
    return ": running\n\n" if work.has_begun else ": waiting\n\n"


async def whole_response(
    answer: AnswerForm, work: Work, cancel: Cancel, request: Request, write_error: WriteError
) -> Response:
    """The response with a whole answer, which may take long."""
    collecting, leaving = asyncio.create_task(_collect(answer, work, write_error)), asyncio.create_task(_left(request))
    try:
        done, _ = await asyncio.wait({collecting, leaving}, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return SlowResponse(collecting, partial(cancel, work))
    finally:
        leaving.cancel()
    if collecting in done:
        content, status = collecting.result()
        if status != 200:
            cancel(work)  # of several answers, the others
        return JSONResponse(content, status)
    collecting.cancel()
    cancel(work)
    return Response(status_code=499)  # nobody reads it


async def _collect(answer: AnswerForm, work: Work, write_error: WriteError) -> tuple[Json, int]:
    """The whole answer or an error, as JSON, and its status."""
    said = [Said() for _ in work.jobs]
    try:
        while any(one.finish_reason is None for one in said):
            if (arrived := await work.next()) is not None:
                index, step, _ = arrived
                said[index] = said[index].then(step)
    except Exception as exc:  # noqa: BLE001 (the client is told)
        content, status = describe(exc, is_running=True)
        return write_error(content, status), status
    return answer.whole(said), 200


async def _left(request: Request) -> None:
    """Ends when the client has disconnected. The request's body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class SlowResponse(StreamingResponse):
    """A whole answer as JSON behind white space. If it fails, the connection closes before the body's end."""

    media_type = "application/json"

    def __init__(self, collecting: asyncio.Task[tuple[Json, int]], cancel: Callable[[], None]) -> None:
        super().__init__(self._parts(), headers={"Cache-Control": "no-cache"})
        self._collecting, self._cancel = collecting, cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._collecting.cancel()
            self._cancel()

    async def _parts(self) -> AsyncIterator[str]:
        while not self._collecting.done():
            yield "\n"
            await asyncio.wait({self._collecting}, timeout=KEEP_ALIVE_S)
        yield json.dumps(self._collecting.result()[0])

    async def stream_response(self, send: Send) -> None:
        """`StreamingResponse.stream_response`, without the body's end if the answer is an error."""

        async def send_answer(message: Message) -> None:
            is_end = message["type"] == "http.response.body" and not message["more_body"]
            if not (is_end and self._collecting.result()[1] != 200):
                await send(message)

        await super().stream_response(send_answer)


def describe(error: Exception, *, is_running: bool = False) -> tuple[Json, int]:
    """An error as JSON, and its status: 400 for an invalid request. is_running: the request was valid."""
    error = memory_error(error) or error
    if not isinstance(error, OffspecError):
        name = type(error).__name__
        click.echo(f"offspec: {name}: {error} (unexpected; offspec serve -v shows the traceback)", err=True)
        # The exception's own text may contain anything, so the client does not get it.
        return failure(f"{name} (unexpected; the server's log has details)", kind="server_error"), 500
    if isinstance(error, BusyError):
        return failure(str(error), kind="rate_limit_error", code="rate_limit_exceeded"), 429
    if isinstance(error, StoppingError):
        return failure(str(error), kind="server_error"), 503
    if isinstance(error, UnknownModelError):
        return failure(str(error), code="model_not_found"), 404
    is_invalid = isinstance(error, (UsageError, TokenizerError, ContextLengthError)) and not is_running
    is_theirs = is_invalid or isinstance(error, ConstraintError)  # its dead ends are met while running
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    kind = "invalid_request_error" if is_theirs else "server_error"
    return failure(with_flags(str(error)), kind=kind, code=code), 400 if is_theirs else 500


def refusal(error: Exception, write_error: WriteError = lambda failure, status: failure) -> Response:
    """The response to a request that is not begun."""
    content, status = describe(error)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, BusyError) else None
    return JSONResponse(write_error(content, status), status, headers)
