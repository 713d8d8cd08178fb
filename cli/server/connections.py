"""Limits on connections of `offspec serve`: their number, the time that a request may take, and its size.

The limits apply before authentication. A refusal is JSON in the form that OpenAI's clients read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .metrics import one_line
from .openai_answers import failure

BACKLOG = 32  # connections that the system queues; asyncio accepts as many at a time
SPARE_FILES = 4 * BACKLOG  # descriptors kept free for files, and for refusing connections
MOST_CONNECTIONS = 512
HEADERS_S = 10.0  # for a request's headers, from the start of the connection
BODY_S = 60.0  # for its body: 32 MiB at 0.5 MiB/s
ACCEPT_FAILED = "socket.accept() out of system resource"


def most_connections() -> int:
    """The maximum number of connections that leaves SPARE_FILES descriptors free; at least 1."""
    if sys.platform == "win32":
        return MOST_CONNECTIONS
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    num_open = 64
    with suppress(OSError):
        num_open = len(os.listdir("/dev/fd"))
    return MOST_CONNECTIONS if limit < 0 else max(1, min(MOST_CONNECTIONS, limit - num_open - SPARE_FILES))


def protocol(most: int, headers_s: float = HEADERS_S, body_s: float = BODY_S) -> type[H11Protocol]:
    """uvicorn's HTTP protocol with limits, for `uvicorn.Config(http=…)`. most: simultaneous connections."""

    class Limited(LimitedProtocol):
        most_connections, limits_s = most, {h11.IDLE: headers_s, h11.SEND_BODY: body_s}

    return Limited


class StrictConnection(h11.Connection):
    """h11, which also refuses a request with two lengths: a proxy may take the other one (RFC 9112, section 6.3).

    fault: what is wrong with a request that is not valid HTTP.
    """

    fault = ""

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            names = {name for name, _ in event.headers} if isinstance(event, h11.Request) else set()
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("it has both Content-Length and Transfer-Encoding; omit one of them")
        except h11.RemoteProtocolError as exc:
            self.fault = str(exc)
            raise
        return event


class LimitedProtocol(H11Protocol):
    """limits_s: the maximum seconds that the client may stay in each state of h11."""

    conn: StrictConnection
    most_connections: int
    limits_s: dict[Any, float]

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.conn = StrictConnection(h11.SERVER)
        self._timer: asyncio.TimerHandle | None = None
        self._timed: object = None  # the state that the timer is for

    def connection_made(self, transport: Any) -> None:  # asyncio.Transport, as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            self._refuse(503, "the server has too many connections; try again later")
        else:
            self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)
            self._set_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_timer()

    def _set_timer(self) -> None:
        """Start a timer for the client's state, unless one runs; uvicorn itself times idle connections."""
        state = self.conn.their_state
        if state == self._timed:
            return
        self._clear_timer()
        is_idle = state is h11.IDLE and self.timeout_keep_alive_task is not None
        if state in self.limits_s and not is_idle and not self.transport.is_closing():
            self._timed = state
            self._timer = self.loop.call_later(
                self.limits_s[state], self._refuse_request, 408, "the request did not arrive in time"
            )

    def _clear_timer(self) -> None:
        self._timed = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        self._refuse_request(400, f"the request is not valid HTTP: {one_line(self.conn.fault)}")

    def _refuse_request(self, status: int, message: str) -> None:
        """Refuse what the client sends; if an answer has begun, only the connection's end can tell."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
        else:
            self._refuse(status, message)

    def _refuse(self, status: int, message: str) -> None:
        """Answer without h11, which may be in the middle of a request, and close the connection."""
        body = json.dumps(failure(message, kind="server_error" if status >= 500 else "invalid_request_error")).encode()
        reason = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}[status]
        head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        if not self.transport.is_closing():
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            self.transport.close()


class Seldom(logging.Filter):
    """Reduces asyncio's messages about failed accepts to one line per minute."""

    def __init__(self, every_s: float = 60.0) -> None:
        super().__init__()
        self._every_s, self._next_s = every_s, 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if ACCEPT_FAILED not in record.getMessage():
            return True
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + self._every_s
        record.msg, record.args, record.exc_info = "offspec: too many open files: new connections wait", (), None
        return True


class Bodies:
    """The bytes of request bodies in memory, over all connections: a limit for all clients, and one for each."""

    def __init__(self, most_bytes: int, most_client_bytes: int) -> None:
        self._most_bytes, self._most_client_bytes = most_bytes, most_client_bytes
        self._num_bytes = Counter[str]()

    def take(self, client: str, num_bytes: int) -> bool:
        """Reserve bytes; False if a limit does not allow it."""
        of_all, of_client = sum(self._num_bytes.values()), self._num_bytes[client]
        if of_all + num_bytes > self._most_bytes or of_client + num_bytes > self._most_client_bytes:
            return False
        self._num_bytes[client] += num_bytes
        return True

    def give_back(self, client: str, num_bytes: int) -> None:
        self._num_bytes[client] -= num_bytes
        self._num_bytes += Counter()  # forgets clients that have none
