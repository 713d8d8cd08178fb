"""The HTTP routes of `offspec serve`.

Import this module only to start a server: it needs torch.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from offspec import RECOMMENDED, Engine, SamplingParams, with_recommended
from offspec.errors import OffspecError, UsageError
from offspec.user_files import parse_json

from ..flag_declarations import with_flags
from . import llama_cpp, ollama
from .answer_forms import ApiForm
from .anthropic_messages import Messages
from .connections import Bodies
from .metrics import one_line
from .model_manager import LoadedModel, ModelManager, OneModel, UnknownModelError
from .openai_answers import Completions, failure
from .openai_requests import CompletionRequest
from .openai_responses import Responses, StoredResponses
from .page_routes import page_routes
from .request_parts import Json, object_of
from .responses import EventResponse, describe, in_time, refusal, unless_left, whole_response
from .service import Service, StoppingError

MOST_BYTES = 32 * 2**20  # of a request
MOST_BODIES_BYTES = 2 * MOST_BYTES  # of all requests being received
MOST_CLIENT_BYTES = MOST_BYTES  # of those of one client
# JSON of more bytes than SMALL_BODY is read for so long that everything else waits: for this share of the time at most.
SMALL_BODY, LARGE_SHARE = 1 << 18, 0.2
REFUSAL_S = 0.5  # before a body is refused: a client that sends it again at once would keep the server busy
LLAMA_CPP, OLLAMA, MESSAGES = llama_cpp.Infilling(), ollama.Ollama("chat"), Messages()
EMBEDDINGS: dict[str, ApiForm] = {"/v1/embeddings": Completions("text"), "/embedding": LLAMA_CPP}
EMBEDDINGS |= {"/embeddings": LLAMA_CPP, "/api/embed": OLLAMA, "/api/embeddings": OLLAMA}
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


def forms() -> dict[str, ApiForm]:
    """The APIs that answer requests, by their paths, for one server."""
    return {
        "/v1/chat/completions": Completions("chat"),
        "/v1/completions": Completions("text"),
        "/v1/messages": MESSAGES,
        "/v1/responses": Responses(StoredResponses()),
        "/infill": LLAMA_CPP,
        "/api/chat": OLLAMA,
        "/api/generate": ollama.Ollama("generate"),
    }


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class StoppableServer(uvicorn.Server):
    """A uvicorn server that answers requests under way with an error when it stops, instead of waiting for them.

    Its log tells of long answers while they are computed.
    """

    def __init__(self, config: uvicorn.Config, service: Service | ModelManager) -> None:
        super().__init__(config)
        self._service = service
        service.give_up = lambda: setattr(self, "should_exit", True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Also SIGHUP, of a terminal that closes, ends the server as SIGTERM does; under nohup it is ignored."""
        hangup = getattr(signal, "SIGHUP", None)  # Windows has none
        is_main = threading.current_thread() is threading.main_thread()
        if hangup is None or not is_main or signal.getsignal(hangup) is signal.SIG_IGN:
            with super().capture_signals():
                yield
            return
        before = signal.signal(hangup, self.handle_exit)
        try:
            with super().capture_signals():
                yield
        finally:
            signal.signal(hangup, before)

    async def on_tick(self, counter: int) -> bool:
        self._service.tell_progress()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        await super().shutdown(sockets)


def application(
    models: Service | ModelManager,
    defaults: SamplingParams,
    api_key: str | None = None,
    *,
    is_private: bool = False,
    origins: Sequence[str] = (),
    alias: str | None = None,
    has_page: bool = False,
    given: Collection[str] = RECOMMENDED,
) -> Starlette:
    """The routes. Without a key, requests from web pages are refused: browsers send them even across origins.

    is_private: only this machine can reach the server, so another host name indicates DNS rebinding. origins: of web
    pages that may ask and read answers (CORS); "*" is all of them, with a key. alias: what clients see as the model's
    name. has_page: whether `/` is a page to chat in. given: fields of `defaults` that the loaded model's recommended
    sampling does not replace.
    """
    api = Api(models if isinstance(models, ModelManager) else OneModel(models, alias), defaults, given)
    guarded = guard(api_key, is_private=is_private, origins=origins)

    def of(form: ApiForm, path: str, handler: Handler, *methods: str) -> Route:
        """A route whose errors are written as `form` does."""
        return Route(path, guarded(partial(api.refusing, handler, form)), methods=methods or ["GET"])

    routes = [
        Route("/health", api.health),
        Route("/metrics", guarded(api.metrics)),
        Route("/v1/models", guarded(api.models)),
        Route("/v1/models/{id:path}", guarded(api.model)),
        *(of(form, path, partial(api.answer, form=form), "POST") for path, form in forms().items()),
        of(MESSAGES, "/v1/messages/count_tokens", api.count_tokens, "POST"),
        *(of(form, path, partial(api.embeddings, form=form), "GET", "POST") for path, form in EMBEDDINGS.items()),
        of(LLAMA_CPP, "/props", api.props),
        of(LLAMA_CPP, "/tokenize", partial(api.encoded, work=llama_cpp.tokenize), "POST"),
        of(LLAMA_CPP, "/detokenize", partial(api.encoded, work=llama_cpp.detokenize), "POST"),
        Route("/api/version", guarded(api.ollama_version)),
        of(OLLAMA, "/api/tags", api.ollama_tags),
        of(OLLAMA, "/api/show", api.ollama_show, "POST"),
        *(page_routes() if has_page else []),
    ]
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    handlers: dict[Any, Any] = {HTTPException: _not_found, Exception: _unexpected}
    return Starlette(routes=routes, middleware=[cors] if origins else [], exception_handlers=handlers)


class Api:
    """The handlers of the routes."""

    def __init__(self, models: ModelManager, defaults: SamplingParams, given: Collection[str]) -> None:
        self._models, self._defaults, self._given = models, defaults, given
        self._bodies = Bodies(MOST_BODIES_BYTES, MOST_CLIENT_BYTES)
        self._turn_of_large, self._large_may_begin_s = asyncio.Lock(), 0.0

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(map(self._described, self._models.list()))})

    async def model(self, request: Request) -> Response:
        try:
            return JSONResponse(self._described(self._models.describe(request.path_params["id"])))
        except UnknownModelError as exc:
            return refusal(exc)

    def _described(self, model: Json) -> Json:
        """A model as it is listed; with the defaults of its requests, if it is loaded."""
        loaded = self._models.loaded
        if loaded is None or loaded.name != model["id"]:
            return model
        params = self._recommended(self._defaults, loaded)
        sampling = {"max_tokens": params.max_new_tokens, **{name: getattr(params, name) for name in RECOMMENDED}}
        return {**model, "sampling": sampling}

    def _recommended(self, params: SamplingParams, loaded: LoadedModel, given: Collection[str] = ()) -> SamplingParams:
        """Parameters with what the model recommends, except in the fields that flags or a request give."""
        return with_recommended(params, loaded.service.engine.recommended_sampling, {*self._given, *given})

    async def health(self, request: Request) -> Response:
        if (fault := self._models.fault) is not None:
            return JSONResponse({"status": "error", "message": with_flags(fault)}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        loaded = self._models.loaded
        text = "" if loaded is None else loaded.service.metrics.text(loaded.service.gauges())
        return PlainTextResponse(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def answer(self, request: Request, form: ApiForm) -> Response:
        body, completion = await self._read(request, form)
        answered = partial(self._answered, form=form, body=body, completion=completion)
        return await in_time(self.refusing(answered, form, request), form.stream if completion.streams else None)

    async def _answered(self, request: Request, form: ApiForm, body: Json, completion: CompletionRequest) -> Response:
        """The response to a request that was read: as soon as its model is loaded, or its whole answer complete."""
        async with self._models.using(body.get("model")) as loaded:
            service = loaded.service
            completion = replace(completion, params=self._recommended(completion.params, loaded, completion.given))
            work = await unless_left(
                service.submit(service.with_tools(completion), _client(request, completion.user)), request
            )
        answer = form.answer(body, work.completion, loaded.name, work.prompts, service.engine.tokenizer)
        if completion.streams:
            return EventResponse(answer, work, service.cancel, form)
        return await whole_response(answer, work, service.cancel, request, form.error)

    async def count_tokens(self, request: Request) -> Response:
        """Anthropic's count of a request's tokens, which the model does not read."""
        body, completion = await self._read(request, MESSAGES)
        async with self._models.using(body.get("model")) as loaded:
            completion = loaded.service.with_tools(completion)
            number = await loaded.service.count_tokens(completion, _client(request, completion.user))
        return JSONResponse({"input_tokens": number})

    async def embeddings(self, request: Request, form: ApiForm) -> Response:
        refused = failure("offspec has no embeddings; ask a server with an embedding model")
        return JSONResponse(form.error(refused, 404), 404)

    async def props(self, request: Request) -> Response:
        """llama.cpp's description of the model that the query or nobody names."""
        async with self._models.using(request.query_params.get("model")) as loaded:
            service = loaded.service
            return JSONResponse(llama_cpp.props(service.engine, loaded.name, self._defaults, service.num_texts))

    async def encoded(self, request: Request, work: Callable[[Json, Engine], Json]) -> Response:
        """The result of `work` on a request's body, by the thread that encodes."""
        body = await self._json(request, object_of)
        async with self._models.using(body.get("model")) as loaded:
            service = loaded.service
            return JSONResponse(await service.on_encoder(_client(request), partial(work, body, service.engine)))

    async def ollama_version(self, request: Request) -> Response:
        return JSONResponse(ollama.version())

    async def ollama_tags(self, request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(ollama.tags, self._models.paths))

    async def ollama_show(self, request: Request) -> Response:
        body = await self._json(request, object_of)
        name, loaded = self._models.checked(body.get("model") or body.get("name")), self._models.loaded
        context = loaded.service.engine.max_context if loaded is not None and loaded.name == name else None
        return JSONResponse(await asyncio.to_thread(ollama.show, name, self._models.paths[name], context))

    async def refusing(self, handler: Handler, form: ApiForm, request: Request) -> Response:
        """The response of `handler`, or the one that refuses the request, as `form` writes it."""
        try:
            return await handler(request)
        except (TooLargeError, OffspecError) as exc:
            self._models.notify(f"{form.name}: refused: {one_line(with_flags(str(exc)))}")
            if isinstance(exc, TooLargeError):
                return JSONResponse(form.error(failure(str(exc), kind=exc.kind), exc.status), exc.status)
            return refusal(exc, form.error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except asyncio.CancelledError:
            return refusal(StoppingError(), form.error)

    async def _read(self, request: Request, form: ApiForm) -> tuple[Any, CompletionRequest]:
        """The body as JSON, and what it asks for. Raises UsageError, and TooLargeError."""
        return await self._json(request, lambda body: (body, form.request(body, self._defaults)))

    async def _json(self, request: Request, made: Callable[[Any], T]) -> T:
        """What is made of the body's JSON.

        Raises UsageError, and TooLargeError for a body over its own or the common limit.
        """

        def parsed() -> T:
            try:
                body = parse_json(bytes(content))
            except ValueError as exc:
                raise UsageError(f"the request is not JSON ({exc})") from exc
            return made(body)

        stated, content, client = request.headers.get("content-length", ""), bytearray(), _address(request)
        if stated.isdecimal() and len(stated) < 19 and int(stated) > MOST_BYTES:
            raise TooLargeError(413)
        try:
            async for part in request.stream():
                if len(content) + len(part) > MOST_BYTES:
                    raise TooLargeError(413)
                if not self._bodies.take(client, len(part)):
                    self._bodies.give_back(client, len(content))
                    content.clear()
                    await asyncio.sleep(REFUSAL_S)
                    raise TooLargeError(503)
                content += part
            return parsed() if len(content) <= SMALL_BODY else await self._large(parsed)
        finally:
            self._bodies.give_back(client, len(content))

    async def _large(self, parsed: Callable[[], T]) -> T:
        """The result of `parsed`, which takes long: one at a time, and all of them take LARGE_SHARE of the time."""
        async with self._turn_of_large:
            await asyncio.sleep(self._large_may_begin_s - time.monotonic())
            began = time.monotonic()
            try:
                return await asyncio.to_thread(parsed)
            finally:
                now = time.monotonic()
                self._large_may_begin_s = now + (now - began) * (1 / LARGE_SHARE - 1)


def _client(request: Request, user: str = "") -> str:
    """Whose request it is: clients take turns. Programs with many users state them (`user`)."""
    return f"{_address(request)} {user}"


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


class TooLargeError(Exception):
    """A request's body is too large by itself (413), or together with others (503)."""

    def __init__(self, status: int) -> None:
        self.status, self.kind = status, "invalid_request_error" if status == 413 else "server_error"
        too_large = f"the request is larger than {MOST_BYTES >> 20} MiB"
        super().__init__(too_large if status == 413 else "the server receives other large requests; try again later")


def guard(api_key: str | None, *, is_private: bool, origins: Sequence[str] = ()) -> Callable[[Handler], Handler]:
    """Lets a handler answer authorised requests only."""

    def refusal_of(request: Request) -> Response | None:
        named = [origin for origin in request.headers.getlist("origin") if origin not in origins]
        if is_private:
            named.append(f"//{request.headers.get('host', '')}")
        if api_key is not None:
            # The scheme `Bearer` may be in any case (RFC 9110, section 11.1).
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            borne = request.headers.get("x-api-key") or (key.strip() if scheme.lower() == "bearer" else None)
            if borne is None or not secrets.compare_digest(borne.encode(), api_key.encode()):
                return JSONResponse(failure("the API key is missing or wrong", code="invalid_api_key"), 401)
        elif not all(map(is_loopback, map(_host_of, named))):
            who = "programs on its own machine" if is_private else "programs, not web pages"
            return JSONResponse(failure(f"without --api-key this server answers only {who}"), 403)
        return None

    def guarded(handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            return refusal_of(request) or await handler(request)

        return checked

    return guarded


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return url


async def _not_found(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    message = f"{exc.detail}: {request.method} {request.url.path}; see offspec serve --help"
    return JSONResponse(failure(message), exc.status_code)


async def _unexpected(request: Request, exc: Exception) -> Response:
    return JSONResponse(*describe(exc))
