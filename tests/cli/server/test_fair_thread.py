"""Clients take turns, and each has its share of the time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import CancelledError
from functools import partial
from threading import Event

import pytest

from offspec.cli.server.fair_thread import Places, TurnsExecutor


def test_clients_take_turns() -> None:
    executor, begin, order = TurnsExecutor("test"), Event(), list[str]()
    first = executor.submit("A", begin.wait)
    calls = [executor.submit(name[0], lambda name=name: order.append(name)) for name in ("A1", "A2", "A3", "B1", "C1")]
    calls.pop(1).cancel()
    begin.set()
    assert first.result()
    for call in calls:
        call.result()
    assert order == ["A1", "B1", "C1", "A3"]
    executor.shutdown()


def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    executor = TurnsExecutor("test")
    with pytest.raises(ZeroDivisionError):
        executor.submit("A", lambda: 1 // 0).result()
    assert executor.submit("A", lambda: 5).result() == 5
    executor.shutdown()


def test_an_error_does_not_keep_what_was_called() -> None:
    """Not even until cycles are collected: a refused request may be large."""
    executor, argument = TurnsExecutor("test"), Event()
    ref = weakref.ref(argument)
    gc.disable()
    try:
        future = executor.submit("A", partial(int, argument))  # type: ignore[arg-type]
        assert isinstance(future.exception(), TypeError)
        del future, argument
        executor.submit("A", int).result()  # the thread has left the call
        assert ref() is None
    finally:
        gc.enable()
    executor.shutdown()


def test_what_waits_is_cancelled_at_the_end() -> None:
    executor, begin = TurnsExecutor("test"), Event()
    running, waiting = executor.submit("A", begin.wait), executor.submit("A", list)
    executor.shutdown()
    with pytest.raises(CancelledError):
        waiting.result()
    begin.set()
    assert running.result()


def test_clients_take_turns_at_places() -> None:
    """Who leaves while waiting, or with a place just given, does not keep it."""
    order = list[str]()

    async def take(places: Places, name: str) -> None:
        async with places.place(name[0]):
            order.append(name)
            await asyncio.sleep(0)

    async def all_of() -> None:
        places = Places(1)
        tasks = [asyncio.create_task(take(places, name)) for name in ("A1", "A2", "A3", "B1", "C1")]
        await asyncio.sleep(0)
        tasks.pop(1).cancel()
        await asyncio.gather(*tasks)
        given = asyncio.create_task(take(places, "D1"))
        await asyncio.sleep(0)
        given.cancel()
        await take(places, "E1")

    asyncio.run(all_of())
    assert [name for name in order if name != "D1"] == ["A1", "B1", "C1", "A3", "E1"]
