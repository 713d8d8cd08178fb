"""Large bodies are read one at a time, and leave most of the time to others."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from offspec import SamplingParams
from offspec.cli.server import routes
from offspec.cli.server.routes import LARGE_SHARE, Api

from .serving import USER, Client


def test_large_bodies_take_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, times = [100.0], list[tuple[float, float]]()

    def parsed(seconds: float) -> None:
        began, now[0] = now[0], now[0] + seconds
        times.append((began, now[0]))

    async def sleep(seconds: float) -> None:
        now[0] += max(0.0, seconds)

    async def all_of(api: Any) -> None:
        await asyncio.gather(*(api._large(partial(parsed, seconds)) for seconds in (1.0, 0.5, 2.0)))

    monkeypatch.setattr(routes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(routes.asyncio, "sleep", sleep)
    models: Any = None
    asyncio.run(all_of(Api(models, SamplingParams(), ())))
    for (began, ended), (next_began, _) in pairwise(times):
        assert ended - began == pytest.approx(LARGE_SHARE * (next_began - began))


def test_a_large_body_is_answered_as_a_small_one(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    small = client.chat(USER)
    monkeypatch.setattr(routes, "SMALL_BODY", 1)
    large = client.chat(USER)
    assert (large.status, large.body["choices"]) == (200, small.body["choices"])
    assert client.ask("POST", "/v1/chat/completions", "{").status == 400
