"""The server of `offspec serve`: one engine for many clients, and its HTTP routes.

Import this module only to start a server: it needs torch.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import click
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.small_files import parse_json
from offspec.engine import Message
from offspec.errors import ContextLengthError, MemoryLimitError, OffspecError, TokenizerError, UsageError
from offspec.request import Step
from offspec.session import Turn, encode_turns, lasting_caches, turns_of

from .connections import Bodies
from .flags import with_flags
from .openai_api import Answer, CompletionRequest, Kind, failure, parse

MOST_REMEMBERED = 256  # replies whose token ids are kept
MOST_BYTES = 32 * 2**20  # of a request
MOST_BODIES_BYTES = 2 * MOST_BYTES  # of all requests being received
STOPPING = failure("the server is stopping; retry when it runs again", kind="server_error")
Handler = Callable[[Request], Awaitable[Response]]


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Service:
    """One engine for many clients. Requests run one after another on one thread, so that torch has one thread pool.

    error: an error after which the engine cannot continue; the service then calls `give_up`.
    """

    def __init__(self, engine: Engine, speculation: SpeculationParams) -> None:
        self.engine = engine
        self._speculation = speculation
        self._folders = _folders(engine)
        self._caches = lasting_caches(engine)
        self._said = OrderedDict[str, list[int]]()  # replies and their original token ids
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offspec-serve")
        self.error: OffspecError | None = None
        self.give_up: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Wait for the current pass and stop the thread."""
        self._thread.shutdown(cancel_futures=True)

    async def answer(
        self, asked: CompletionRequest, is_gone: Callable[[], Awaitable[bool]]
    ) -> AsyncGenerator[Step | None, None]:
        """Yields None once the request has its turn and is valid, then its steps.

        is_gone: whether the client has disconnected; a client that leaves while waiting gets nothing.
        Raises OffspecError without this machine's folders, which clients should not learn.
        """
        steps = self._steps(asked, is_gone)
        try:
            async with aclosing(steps):
                async for step in steps:
                    yield step
        except OffspecError as exc:
            raise type(exc)(without_paths(str(exc), self._folders)) from exc

    async def _steps(
        self, asked: CompletionRequest, is_gone: Callable[[], Awaitable[bool]]
    ) -> AsyncGenerator[Step | None, None]:
        call = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        async with self._turn:
            if await is_gone():
                return
            steps = await call(self._begin, asked)
            try:
                yield None
                while True:
                    step = await call(next, steps)
                    yield step
                    if step.finish_reason is not None:
                        break
            finally:  # after the current pass and before the next request; the draft then trains
                self._thread.submit(steps.close).add_done_callback(_tell_failure)

    def _begin(self, asked: CompletionRequest) -> Generator[Step, None, None]:
        steps = self.engine.generate(self._encode(asked), asked.params, self._speculation, caches=self._caches)
        return self._followed(steps)

    def _encode(self, asked: CompletionRequest) -> list[int]:
        """The prompt's token ids. Replies keep their original token ids, because the KV caches contain these.

        Refuses a prompt that is much too long before tokenizing it, which would block other requests for seconds.
        """
        prompt, most = asked.prompt, self.engine.max_context
        if asked.kind == "chat":
            found = turns_of(cast(Sequence[Message], prompt), self._said)
            if found is not None:
                return encode_turns(self.engine.tokenizer, *found, most)
        elif not isinstance(prompt, str) and len(prompt) > most:
            raise ContextLengthError(f"the prompt has {len(prompt)} tokens, but the context is {most}; shorten it")
        return self.engine.encode(prompt)

    def _followed(self, steps: Generator[Step, None, None]) -> Generator[Step, None, None]:
        reply = Turn("")
        try:
            with closing(steps):
                for step in steps:
                    reply.add(step)
                    yield step
        except GeneratorExit:  # the answer is complete, or the client has disconnected
            self._remember(reply)
        except MemoryLimitError as exc:  # the engine has lost its target
            self.error = exc
            self.give_up()
            raise

    def _remember(self, reply: Turn) -> None:
        self._said[reply.reply] = reply.token_ids
        self._said.move_to_end(reply.reply)
        while len(self._said) > MOST_REMEMBERED:
            self._said.popitem(last=False)
        if reply.stats is not None:
            self.engine.learn(reply.stats)


def _tell_failure(ended: Future[None]) -> None:
    if not ended.cancelled() and (exc := ended.exception()) is not None:
        click.echo(f"offspec: training on the request failed: {type(exc).__name__}: {exc}", err=True)


# ------------------------------------------------------------------------------------------------ HTTP


def application(
    service: Service, defaults: SamplingParams, api_key: str | None = None, *, is_private: bool = False
) -> Starlette:
    """The routes. Without a key, requests from web pages are refused: browsers send them even across origins.

    is_private: only this machine can reach the server, so another host name indicates DNS rebinding.
    """
    api = Api(service, defaults)
    guarded = Guard(api_key, is_private=is_private)
    routes = [
        Route("/health", api.health),
        Route("/v1/models", guarded(api.models)),
        Route("/v1/models/{id:path}", guarded(api.model)),
        Route("/v1/chat/completions", guarded(partial(api.completion, kind="chat")), methods=["POST"]),
        Route("/v1/completions", guarded(partial(api.completion, kind="text")), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _not_found, Exception: _unexpected})


class Api:
    """The handlers of the routes."""

    def __init__(self, service: Service, defaults: SamplingParams) -> None:
        self._service, self._defaults = service, defaults
        self._bodies = Bodies(MOST_BODIES_BYTES)
        self._name = public_name(service.engine.name)
        self._described = {"id": self._name, "object": "model", "created": int(time.time()), "owned_by": "offspec"}

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described]})

    async def model(self, request: Request) -> Response:
        if (asked := request.path_params["id"]) != self._name:
            message = f"unknown model {asked!r}; this server has {self._name}"
            return JSONResponse(failure(message, code="model_not_found"), 404)
        return JSONResponse(self._described)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def completion(self, request: Request, kind: Kind) -> Response:
        try:
            asked = parse(kind, await self._json(request), self._defaults)
            steps = self._service.answer(asked, request.is_disconnected)
            await anext(steps)
            answer = Answer(asked, self._name)
            if asked.streams:
                return EventResponse(_events(answer, steps))
            return await _whole(answer, steps, request)
        except TooLargeError as exc:
            return JSONResponse(failure(str(exc), kind=exc.kind), exc.status)
        except OffspecError as exc:
            return _refusal(exc)
        except (ClientDisconnect, StopAsyncIteration):
            return Response(status_code=499)  # the client has disconnected
        except asyncio.CancelledError:
            return JSONResponse(STOPPING, 503)

    async def _json(self, request: Request) -> Any:
        """The body as JSON. Raises UsageError, and TooLargeError for a body over its own or the common limit."""
        stated, content = request.headers.get("content-length", ""), bytearray()
        if stated.isdecimal() and len(stated) < 19 and int(stated) > MOST_BYTES:
            raise TooLargeError(413)
        try:
            async for part in request.stream():
                if len(content) + len(part) > MOST_BYTES:
                    raise TooLargeError(413)
                if not self._bodies.take(len(part)):
                    raise TooLargeError(503)
                content += part
            return parse_json(bytes(content))
        except ValueError as exc:
            raise UsageError(f"the request is not JSON ({exc})") from exc
        finally:
            self._bodies.give_back(len(content))


class TooLargeError(Exception):
    """A request's body is too large by itself (413), or together with others (503)."""

    def __init__(self, status: int) -> None:
        self.status, self.kind = status, "invalid_request_error" if status == 413 else "server_error"
        too_large = f"the request is larger than {MOST_BYTES >> 20} MiB"
        super().__init__(too_large if status == 413 else "the server receives other large requests; try again later")


class Guard:
    """Lets a handler answer authorised requests only."""

    def __init__(self, api_key: str | None, *, is_private: bool) -> None:
        self._api_key, self._is_private = api_key, is_private

    def __call__(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            return self._refusal(request) or await handler(request)

        return checked

    def _refusal(self, request: Request) -> Response | None:
        named = request.headers.getlist("origin")
        if self._is_private:
            named.append(f"//{request.headers.get('host', '')}")
        borne = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._api_key is not None:
            if not secrets.compare_digest(borne.encode(), self._api_key.encode()):
                return JSONResponse(failure("the API key is missing or wrong", code="invalid_api_key"), 401)
        elif not all(map(is_loopback, map(_host_of, named))):
            who = "programs on its own machine" if self._is_private else "programs, not web pages"
            return JSONResponse(failure(f"without --api-key this server answers only {who}"), 403)
        return None


def public_name(model: str) -> str:
    """A model's name without its parent folders; a hub id is unchanged."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def without_paths(message: str, folders: Sequence[Path] = ()) -> str:
    """A message without this machine's folders; files keep their names.

    folders: known folders, removed whatever characters they contain. Other folders are recognised in quotes, or if
    they contain neither spaces nor punctuation.
    """
    for folder in folders:
        message = message.replace(f"{folder}/", "").replace(str(folder), folder.name)
    message = re.sub(r"(['\"])/[^'\"]*/([^'\"/]*)\1", r"\1\2\1", message)
    return re.sub(r"(?<![\w:/.<])/(?:[^\s/:;,'\"()]+/)+", "", message)


def _folders(engine: Engine) -> list[Path]:
    """The folders of the engine's models, in each form that a message may contain; longest first."""
    named = (Path(name) for name in (engine.name, engine.draft_name, engine.tokenizer.folder) if name is not None)
    given = [path.expanduser() for path in named if path.expanduser().is_dir()]
    forms = {form for path in given for form in (path, path.absolute(), path.resolve())}
    return sorted((form for form in forms if form.is_absolute()), key=lambda form: -len(str(form)))


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return url


class EventResponse(StreamingResponse):
    """A stream of server-sent events. When the server stops, the stream's last event reports it."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await super().__call__(scope, receive, send)


async def _events(answer: Answer, steps: AsyncGenerator[Step | None, None]) -> AsyncGenerator[str, None]:
    """Server-sent events. A later error, or the server's stop, becomes an event: the status is already sent."""
    made = asyncio.Queue[Step | Exception]()  # a slow client must not block other requests

    async def make() -> None:
        try:
            async with aclosing(steps):
                async for step in steps:
                    assert step is not None
                    made.put_nowait(step)
        except Exception as exc:  # noqa: BLE001 (the loop below reports or raises it)
            made.put_nowait(exc)

    maker, is_first = asyncio.create_task(make()), True
    try:
        while True:
            try:
                found = await made.get()
            except asyncio.CancelledError:
                yield _event(STOPPING)
                break
            if isinstance(found, OffspecError):
                yield _event(failure(str(found), kind="server_error"))
                break
            if isinstance(found, Exception):
                raise found
            for part in answer.parts(found.text, found.finish_reason, found.stats.as_dict(), is_first=is_first):
                yield _event(part)
            is_first = False
            if found.finish_reason is not None:
                break
        yield "data: [DONE]\n\n"
    finally:
        maker.cancel()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _whole(answer: Answer, steps: AsyncGenerator[Step | None, None], request: Request) -> Response:
    texts, last = list[str](), None
    try:
        async with aclosing(steps):
            async for last in steps:
                assert last is not None
                texts.append(last.text)
                if await request.is_disconnected():
                    break
    except OffspecError as exc:
        return _refusal(exc, status=500)
    assert last is not None
    return JSONResponse(answer.whole("".join(texts), last.finish_reason, last.stats.as_dict()))


def _refusal(error: OffspecError, status: int | None = None) -> Response:
    """An error response: status 400 for an invalid request, 500 for a server error, or `status`."""
    is_theirs = isinstance(error, (UsageError, TokenizerError, ContextLengthError))
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    kind = "invalid_request_error" if is_theirs else "server_error"
    return JSONResponse(failure(with_flags(str(error)), kind=kind, code=code), status or (400 if is_theirs else 500))


async def _not_found(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    message = f"{exc.detail}: {request.method} {request.url.path}; see offspec serve --help"
    return JSONResponse(failure(message), exc.status_code)


async def _unexpected(request: Request, exc: Exception) -> Response:
    click.echo(f"offspec: {type(exc).__name__}: {exc} (unexpected; offspec serve -v shows the traceback)", err=True)
    # The exception's own text may contain anything, so the client does not get it.
    told = f"{type(exc).__name__} (unexpected; the server's log has details)"
    return JSONResponse(failure(told, kind="server_error"), 500)
