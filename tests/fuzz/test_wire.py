"""Some attacks on a server's connections; `scripts/fuzz` tries thousands."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.cli.server.connections import protocol

from ..cli.server.serving import Client, served
from ..pair import build_pair
from .wire import fault_of

NUM_CASES = int(os.environ.get("FUZZ_CASES", "20"))
NUM_ATTACKERS = 8  # at a time
WAIT_S = 0.5  # of the server, for what does not come


@pytest.mark.slow
def test_a_server_outlives_broken_requests(tmp_path: Path) -> None:
    pair = build_pair(tmp_path)
    with (
        Engine.load(str(pair.target), draft=str(pair.draft), device="cpu") as engine,
        served(engine, protocol(100, headers_s=WAIT_S, body_s=WAIT_S), idle_s=WAIT_S) as (client, _),
    ):
        expected = engine.complete("def area(", SamplingParams(8, seed=1, ignore_eos=True), SpeculationParams(0))
        with ThreadPoolExecutor(NUM_ATTACKERS) as pool:
            faults = pool.map(partial(fault_of, client), range(NUM_CASES))
            for number, fault in enumerate(faults):
                assert fault is None, f"attack {number}: {fault}"
                if number % 10 == 0:
                    assert _said(client) == expected, f"after attack {number}"
        assert _said(client) == expected


def _said(client: Client) -> str:
    asked = {"prompt": "def area(", "max_tokens": 8, "seed": 1, "ignore_eos": True}
    replies = (client.ask("POST", "/v1/completions", asked) for _ in range(20))
    reply = next(reply for reply in replies if reply.status != 408)  # a busy machine may be slower than WAIT_S
    assert reply.status == 200, reply
    return str(reply.body["choices"][0]["text"])
