"""A small soak; `scripts/soak` is the large one."""

from __future__ import annotations

import http.client
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from ...pair import Pair

pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install 'offspec[test]'")

from .serving import Client, Reply, until
from .soak import WAIT_S, num_open_files, processor_s, serving, soak

NUM_REQUESTS = 16
BODIES = ({"prompt": "a", "max_tokens": 8, "ignore_eos": True}, {"prompt": "a", "max_tokens": 8, "regex": "[a-z]{4,8}"})


@pytest.mark.nightly("a server process under load; each kind of request is tested by default")
@pytest.mark.slow
def test_many_clients_get_right_answers_from_a_server_of_few_files(pair: Pair) -> None:
    found = soak(pair.target, pair.draft, NUM_REQUESTS, num_clients=12)
    assert found.wrong == []
    assert found.num_answers + found.num_left == NUM_REQUESTS
    assert found.num_refused > 0
    assert found.num_healthy > 0
    assert found.bytes_after - found.bytes_before < 50 * 2**20


@pytest.mark.nightly("opens connections until a process may open no more")
def test_a_server_that_may_open_no_more_files_stays_quiet(pair: Pair, tmp_path: Path) -> None:
    """More connections than it may have files: few words, little computing, and it answers when they have gone."""
    errors = tmp_path / "errors"
    with errors.open("wb") as opened, serving([pair.target, "--draft", "none"], 64, opened.fileno()) as (port, pid):
        before_s = processor_s(pid)
        with ExitStack() as held:
            for _ in range(200):
                held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
            time.sleep(4)
        used_s = processor_s(pid) - before_s
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
    assert errors.stat().st_size < 2000
    assert used_s < 1


@pytest.mark.nightly("a server process under load for some seconds")
def test_a_server_of_32_files_refuses_with_a_reason_and_recovers(pair: Pair) -> None:
    """16 clients, a quarter of whose requests need a process for their constraint."""
    end_s = time.monotonic() + 300
    with serving([pair.target, "--draft", pair.draft], 32, subprocess.DEVNULL) as (port, pid):
        client = Client(port)
        files_before, right = num_open_files(pid), client.ask("POST", "/v1/completions", BODIES[0]).body["choices"]

        def ask_often(number: int) -> list[Reply]:
            replies = list[Reply]()
            while time.monotonic() < end_s and sum(reply.status == 200 for reply in replies) < 2:
                with suppress(ConnectionError):  # refused before the request was written
                    replies.append(client.ask("POST", "/v1/completions", BODIES[number % 4 == 1]))
                time.sleep(0.02)
            return replies

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask_often, range(16)))
        for number, replies in enumerate(answers):
            for reply in replies:
                assert reply.status in (200, 503), reply
                assert reply.status == 200 or "too many connections" in reply.body["error"]["message"]
                assert reply.status == 503 or number % 4 == 1 or reply.body["choices"] == right
        assert sum(reply.status == 200 for replies in answers for reply in replies) == 32
        until(lambda: num_open_files(pid) <= files_before + 4)  # pipes of the process for constraints
        assert client.ask("GET", "/health").status == 200
        assert client.ask("POST", "/v1/completions", BODIES[1]).status == 200
