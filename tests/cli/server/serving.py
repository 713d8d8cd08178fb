"""A server in this process, and clients that ask it."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from socket import socket
from threading import Thread
from types import SimpleNamespace
from typing import Any

import uvicorn.server
from uvicorn.protocols.http.h11_impl import H11Protocol

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.cli.serve import listening
from offspec.cli.server.connections import protocol
from offspec.cli.server.model_manager import ModelManager
from offspec.cli.server.routes import StoppableServer, application
from offspec.cli.server.service import Service
from offspec.text.grammar_trials import CAN_TRY

USER = {"role": "user", "content": "hi"}
LONG_S = 300.0  # what is waited for at most, where a test would else hang
# Ten times a second uvicorn looks whether it is to end, and then whether it may: most of what tests would wait for.
_often = SimpleNamespace(**vars(asyncio))
_often.sleep = lambda seconds: asyncio.sleep(seconds / 20)
vars(uvicorn.server)["asyncio"] = _often


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any


class Client:
    """Asks a server, a connection a request."""

    def __init__(self, port: int) -> None:
        self.port = port

    def open(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)
        content = body if isinstance(body, (str, type(None))) else json.dumps(body)
        try:
            connection.request(method, path, content, headers)
        except OSError:
            connection.close()
            raise
        return connection

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        with closing(self.open(method, path, body, **headers)) as connection:
            response = connection.getresponse()
            return Reply(response.status, json.loads(response.read()))

    def chat(self, *messages: dict[str, str], **fields: Any) -> Reply:
        return self.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 8, **fields})

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        with closing(self.open("POST", path, {**body, "stream": True})) as connection:
            response = connection.getresponse()
            assert response.getheader("content-type", "").startswith("text/event-stream")
            assert response.getheader("cache-control") == "no-cache"
            events = [event for event in response.read().decode().split("\n\n") if not event.startswith(":")]
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@contextmanager
def served(
    engine: Engine,
    http: type[H11Protocol] | None = None,
    most_waiting: int = 16,
    parallel: int | None = None,
    notify: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
    idle_s: float = 5,
    speculation: SpeculationParams | None = None,
    tries: bool = False,
    **settings: Any,
) -> Generator[tuple[Client, Service], None, None]:
    """idle_s: how long a connection may be idle between requests.

    tries: the process that tries constraints begins here, because the server serves several tests.
    """
    sock = listening("127.0.0.1", 0)
    service = Service(
        engine,
        speculation or SpeculationParams(),
        most_waiting=most_waiting,
        most_texts=parallel,
        notify=notify,
        clock=clock,
    )
    with closing(service):
        for executor in (service._encoder, service._constraints.quick, service._constraints.slow):
            executor.submit("", int).result()  # its thread begins here, not in the test that asks first
        if tries and CAN_TRY:
            service._constraints.quick.submit("", service._constraints._start_trials).result()
        with running(service, sock, http or protocol(100), idle_s, **settings) as client:
            yield client, service


@contextmanager
def running(
    models: Service | ModelManager, sock: socket, http: type[H11Protocol], idle_s: float = 5, **settings: Any
) -> Generator[Client, None, None]:
    """A server of these models, on a thread. settings: of `application`."""
    app = application(models, SamplingParams(16), **settings)
    limits: dict[str, Any] = {"timeout_graceful_shutdown": 1, "timeout_keep_alive": idle_s}
    config = uvicorn.Config(app, http=http, log_level="critical", ws="none", lifespan="off", **limits)
    server = StoppableServer(config, models)
    thread = Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield Client(sock.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


def until(is_so: Any) -> None:
    """Wait for another thread."""
    end_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def gauge(client: Client, name: str) -> float:
    with closing(client.open("GET", "/metrics")) as connection:
        response = connection.getresponse()
        assert response.getheader("content-type", "").startswith("text/plain; version=0.0.4")
        found = re.search(rf"^offspec_{re.escape(name)} (\S+)$", response.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def port_of(process: subprocess.Popen[bytes]) -> int:
    """Where a server in a process of its own says that it listens."""
    assert process.stdout is not None
    return int(process.stdout.readline().decode().split("127.0.0.1:")[1].split("/")[0])
