"""A small soak; `scripts/soak` is the large one."""

from __future__ import annotations

import http.client
import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ...pair import Pair

pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install 'offspec[test]'")

from .soak import WAIT_S, processor_s, serving, soak

NUM_REQUESTS = 16


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
