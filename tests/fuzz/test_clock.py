"""A clock that jumps an hour back or a day ahead while a server works, by seeds: the right text, and no hang."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Event

import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.cli.server.connections import protocol

from ..cli.server.serving import LONG_S, Client, served
from ..pair import build_pair

NUM_CASES = int(os.environ.get("FUZZ_CASES", "2"))  # one streams, one does not
HOUR_S, DAY_S = 3600.0, 86400.0
BODY = {"prompt": "def area(", "max_tokens": 12, "temperature": 0.7, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    pair = build_pair(tmp_path_factory.mktemp("pair"))
    with Engine.load(str(pair.target), draft=str(pair.draft), device="cpu") as loaded:
        yield loaded


@contextmanager
def jumping_clock(chance: random.Random) -> Iterator[Callable[[], int]]:
    """`time.time` jumps at each call, in any thread. Yields a function that counts the calls."""
    now, jumps_s = time.time, list[float]()

    def jumped() -> float:
        jumps_s.append(chance.choice((-HOUR_S, DAY_S, 0.0)))
        return now() + sum(jumps_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", jumped)
        yield lambda: len(jumps_s)


def text_of(response: http.client.HTTPResponse) -> str:
    content = response.read().decode()
    assert response.status == 200, content
    if not content.startswith(("data: ", ":")):
        return str(json.loads(content)["choices"][0]["text"])
    parts = [part for part in content.split("\n\n") if part.startswith("data: ")]
    events = [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]
    assert all(abs(event["created"]) < 2**40 for event in events)
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


def ask(connection: http.client.HTTPConnection, **fields: object) -> str:
    connection.request("POST", "/v1/completions", json.dumps(BODY | fields), {"content-type": "application/json"})
    return text_of(connection.getresponse())


@pytest.mark.slow
def test_a_server_does_not_go_by_the_clock_on_the_wall(engine: Engine) -> None:
    params = [SamplingParams(12, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(NUM_CASES)]
    expected = [engine.complete("def area(", own, SpeculationParams(0)) for own in params]
    with served(engine, protocol(10, headers_s=LONG_S, body_s=LONG_S), idle_s=LONG_S) as (client, _):
        idle = http.client.HTTPConnection("127.0.0.1", client.port, timeout=LONG_S)
        with closing(idle):
            for seed in range(NUM_CASES):
                chance = random.Random(seed)
                with jumping_clock(chance) as num_calls:
                    assert ask(idle, seed=seed, stream=seed % 2 == 1) == expected[seed]
                    assert client.ask("GET", "/v1/models").status == 200
                    Event().wait(0.02)  # idle while the clock jumps
                    assert num_calls() > 0
                assert client.ask("GET", "/health").status == 200


@pytest.mark.slow
def test_a_conversation_does_not_go_by_the_clock_on_the_wall(engine: Engine) -> None:
    with served(engine) as (client, _):
        before = _talk(client)
        with jumping_clock(random.Random(0)):
            assert _talk(client) == before


def _talk(client: Client) -> list[str]:
    messages, replies = list[dict[str, str]](), list[str]()
    for text in ("def area(", "and?", "more"):
        messages.append({"role": "user", "content": text})
        reply = client.chat(*messages, seed=3, temperature=0.7)
        assert reply.status == 200
        replies.append(reply.body["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies
