"""Attacks on a server's connections, by number: broken HTTP, slow senders, clients that leave or lie about lengths.

Case N is the same everywhere. Whatever a client sends, it gets nothing, or answers in HTTP with a status below 500 (503
while too many are connected), within a deadline; afterwards the next client gets the right text.
"""

from __future__ import annotations

import json
import random
import re
import socket
import struct
from contextlib import closing, suppress

from ..cli.server.serving import Client
from .damage import damaged

DEADLINE_S = 20.0  # for an answer to what came only in part; the test's server waits for a third of a second
BODY = json.dumps({"prompt": "def f(", "max_tokens": 4, "seed": 1, "ignore_eos": True}).encode()
PATHS = (b"/v1/completions", b"/v1/chat/completions", b"/v1/models", b"/health", b"/metrics", b"/", b"*", b"/%00%ff")
METHODS = (b"POST", b"POST", b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"PRI", b"CONNECT", b"\xff\xfe")
HEADERS = (
    *(b"Content-Length: -1", b"Content-Length: 1", b"Content-Length: 99999999999999999999", b"Content-Length: 0x10"),
    *(b"Content-Length: 5\r\nContent-Length: 6", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked"),
    *(b"Expect: 100-continue", b"Upgrade: websocket\r\nConnection: Upgrade", b"Host: a\r\nHost: b", b"Host:"),
    *(b"X: " + b"a" * 70_000, b"X: a\r\n" * 500 + b"X: b", b" folded: x", b"no colon", b"X\x00: y", b": empty"),
    *(b"Authorization: Bearer \xff", b"Origin: null", b"Connection: close", b"Content-Encoding: gzip"),
)
CHUNKS = (
    *(
        b"5\r\nhello\r\n0\r\n\r\n",
        b"ffffffffffffffff\r\nx",
        b"-1\r\n\r\n",
        b"zz\r\n\r\n",
        b"5;a=" + b"b" * 9000 + b"\r\nhello\r\n",
    ),
    *(b"0\r\n\r\n", b"1\r\n{\r\n" * 200 + b"0\r\n\r\n", b"5\r\nhel"),
)
STATUS = re.compile(rb"^HTTP/1\.[01] (\d{3}) ", re.MULTILINE)


def attack(chance: random.Random) -> bytes:
    """The bytes that a client sends."""
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.choice((1, 20, 3000)))
    sound = _request(b"POST", PATHS[0], [b"Content-Length: %d" % len(BODY)], BODY)
    if kind == 1:
        return sound[: chance.randrange(len(sound))]
    if kind == 2:
        return damaged(sound, chance)
    if kind == 3:
        return sound * chance.choice((2, 5))  # without waiting for an answer
    headers = chance.sample(HEADERS, chance.choice((0, 1, 2)))
    body = chance.choice((BODY, b"", BODY[:10], BODY * 50, *CHUNKS))
    if chance.random() < 0.5 and not any(b"Content-Length" in header or b"chunked" in header for header in headers):
        is_chunked = body in CHUNKS
        headers.append(b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body))
    return _request(chance.choice(METHODS), chance.choice(PATHS), headers, body)


def _request(method: bytes, path: bytes, headers: list[bytes], body: bytes) -> bytes:
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: localhost", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def fault_of(client: Client, number: int) -> str | None:
    """What is wrong with the answer to attack `number`; None if nothing is."""
    chance = random.Random(number)
    sent, way = attack(chance), chance.choice(("wait", "wait", "half", "reset", "gone", "in pieces"))
    with closing(socket.create_connection(("127.0.0.1", client.port), timeout=DEADLINE_S)) as connection:
        try:
            answer = _answer(connection, sent, way, chance)
        except TimeoutError:
            return f"{way}: no answer and no end for {DEADLINE_S:.0f} s to {sent[:200]!r}"
    if answer and not STATUS.match(answer):
        return f"{way}: {answer[:200]!r} to {sent[:200]!r}"
    statuses = [int(status) for status in STATUS.findall(answer)]
    if any(status >= 500 and status != 503 for status in statuses):
        return f"{way}: status {statuses} to {sent[:200]!r}"
    return None


def _answer(connection: socket.socket, sent: bytes, way: str, chance: random.Random) -> bytes:
    """All that comes back; b"" for a client that does not wait."""
    with suppress(ConnectionError):  # a server may end the connection before it has read all
        if way == "in pieces":
            for piece in (sent[:7], sent[7:50]):
                connection.sendall(piece)
            sent = sent[50:]
        connection.sendall(sent)
        if way == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return b""
        if way == "gone":
            return b""
        if way == "half" or chance.random() < 0.3:
            connection.shutdown(socket.SHUT_WR)
        parts = list[bytes]()
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)
    return b""
