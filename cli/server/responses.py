"""The responses of `offspec serve`: whole answers and streams, with a sign of life while a client has to wait.

A large model can take minutes until its first token. Proxies close connections that are silent for 30 to 100 s
(Heroku 30 s, nginx and AWS 60 s, Cloudflare 100 s), and OpenAI's client one of 600 s. So:

- A stream's headers are sent at once. A comment, which clients skip, follows at once and after each KEEP_ALIVE_S
  without an event (HTML Standard, 9.2.6: servers should send one about every 15 s).
- A response that is not there after SILENCE_S, because a model is loaded or a whole answer takes long, begins before it
  is known: status 200, then after each KEEP_ALIVE_S a comment in a stream, a newline before a whole answer. JSON may
  begin with white space (RFC 8259, section 2), and all clients' parsers skip it. In a stream of lines, whose clients
  parse each as JSON, a comment is a space before the next line. If it becomes an error, its status
  cannot tell. A stream has the error as an event. A whole answer's body is then the error as JSON, and the connection
  closes before the body's end. So clients raise a connection error, and do not take it for an answer. OpenAI's client
  retries it, as it does an answer with status 500. Errors that are found earlier keep their statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import click
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from offspec import memory_error
from offspec.errors import ConstraintError, ContextLengthError, OffspecError, TokenizerError, UsageError

from ..flag_declarations import with_flags
from .answer_forms import AnswerChunk, AnswerForm, ApiForm, StreamFormat
from .model_manager import UnknownModelError
from .openai_answers import failure
from .request_parts import Json
from .service import BusyError, ServerRequest, StoppingError

KEEP_ALIVE_S = 5.0  # between two signs of life
SILENCE_S = 10.0  # before the first one of a response that is not there yet
# For browsers and proxies: an answer is new each time. nginx would collect a stream's events.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
T = TypeVar("T")
Cancel = Callable[[ServerRequest], None]
WriteError = Callable[[Json, int], Json]  # an error in OpenAI's form, and its status → as the API writes it


class EventResponse(StreamingResponse):
    """A stream of an answer's parts."""

    def __init__(self, answer: AnswerForm, work: ServerRequest, cancel: Cancel, form: ApiForm) -> None:
        super().__init__(_events(answer, work, form), headers=STREAM_HEADERS, media_type=form.stream.media_type)
        self._cancel = partial(cancel, work)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


async def _events(answer: AnswerForm, work: ServerRequest, form: ApiForm) -> AsyncGenerator[str, None]:
    """An answer's parts. An error becomes one, because the status is already sent."""
    begun, num_open, stream = set[int](), len(work.jobs), form.stream
    if stream.begins_with_sign:
        yield stream.running if work.has_begun else stream.waiting
    try:
        while num_open:
            arrived = await work.next(KEEP_ALIVE_S)
            if arrived is None:
                yield stream.running if work.has_begun else stream.waiting
                continue
            index, step, report = arrived
            for part in answer.parts(index, AnswerChunk.of(step, report), is_first=index not in begun):
                yield stream.written(part)
            begun.add(index)
            num_open -= step.finish_reason is not None
        for part in answer.last_parts():
            yield stream.written(part)
    except Exception as exc:  # noqa: BLE001 (the client is told)
        yield stream.written(answer.error_part(form.error(*describe(exc, is_running=True))))
    yield answer.end


async def whole_response(
    answer: AnswerForm, work: ServerRequest, cancel: Cancel, request: Request, write_error: WriteError
) -> Response:
    """The response with a whole answer, when it is complete or the client has left."""
    try:
        return JSONResponse(*await unless_left(_collect(answer, work, write_error), request))
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    finally:
        cancel(work)  # also after an error of one of several answers


async def _collect(answer: AnswerForm, work: ServerRequest, write_error: WriteError) -> tuple[Json, int]:
    """The whole answer or an error, as JSON, and its status."""
    chunks = [AnswerChunk() for _ in work.jobs]
    try:
        while any(one.finish_reason is None for one in chunks):
            if (arrived := await work.next()) is not None:
                index, step, _ = arrived
                chunks[index] = chunks[index].then(step)
    except Exception as exc:  # noqa: BLE001 (the client is told)
        content, status = describe(exc, is_running=True)
        return write_error(content, status), status
    return answer.whole(chunks), 200


async def _left(request: Request) -> None:
    """Ends when the client has disconnected. The request's body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def unless_left(asking: Coroutine[Any, Any, T], request: Request) -> T:
    """The result of `asking`, which ends when the client disconnects. Raises ClientDisconnect then."""
    task, leaving = asyncio.create_task(asking), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        leaving.cancel()
        task.cancel()


async def in_time(answering: Coroutine[Any, Any, Response], stream: StreamFormat | None) -> Response:
    """The response of `answering`, or after SILENCE_S one that begins before it. stream: None is a whole answer."""
    task = asyncio.create_task(answering)
    try:
        done, _ = await asyncio.wait({task}, timeout=SILENCE_S)
    except asyncio.CancelledError:  # the server stops
        task.cancel()
        return await task
    return task.result() if done else LateResponse(task, stream)


class LateResponse(Response):
    """A response that begins before it is known: signs of life, then the body of the task's response."""

    def __init__(self, task: asyncio.Task[Response], stream: StreamFormat | None) -> None:
        """stream: the format of the task's response; None is a whole answer as JSON."""
        self._task, self._stream = task, stream
        self.media_type = JSONResponse.media_type if stream is None else stream.media_type
        super().__init__(headers=STREAM_HEADERS)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sign = "\n" if self._stream is None else self._stream.waiting
        while not self._task.done():
            await send({"type": "http.response.body", "body": sign.encode(), "more_body": True})
            await asyncio.wait({self._task}, timeout=KEEP_ALIVE_S)
        response = self._task.result()

        async def send_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                await send(message if response.status_code == 200 else self._failed(message))

        await response(scope, receive, send_body)

    def _failed(self, message: Message) -> Message:
        """The body of an error: a part of a stream, or JSON whose end is missing."""
        if self._stream is None:
            return {**message, "more_body": True}
        return {**message, "body": self._stream.error.format(message["body"].decode()).encode()}


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
